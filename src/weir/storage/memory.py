"""The stores in memory, with the semantics of the durable ones: for the simulator, and as the yardstick of the contract suites.

An object outlives its users: a new `open_epoch` on it is a restart. Hooks let a simulator make it slow, failing, or lose the
answer of a write. It must never accept what the durable stores refuse, nor the reverse.
"""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from weir import errors
from weir.core.endings import Status
from weir.core.ledger.records import EndRecord, ExecutionId, HoldRecord, LedgerRecord, SettleRecord, StepRecord
from weir.core.registry.model import CATALOG_KEYS, Revision, RevisionPrice
from weir.core.tenancy import Limits, Scope
from weir.core.windows import LIFETIME_WINDOW, day_of, floors_of
from weir.messages import GenerationRecord, ended_record
from weir.ports import (
    AuditEntry,
    Catalog,
    CatalogChange,
    LeafBalance,
    LedgerReport,
    OpenHold,
    RecentTake,
    Recovery,
    StoredExecution,
    UsageQuery,
    UsageRow,
)
from weir.storage.ledger_audit import differing_balances
from weir.storage.ledger_rows import check_group_count, check_groups, leaf_balance, net_takes
from weir.units import Millis

Operation: TypeAlias = Literal["open_epoch", "write", "find_execution", "usage", "verify", "prune", "count_rejections"]
Delay: TypeAlias = Callable[[Operation], Awaitable[None]]
Fault: TypeAlias = Callable[[Operation], Exception | None]
_Leaf: TypeAlias = tuple[str, str, str, str, str, str]
_MS_PER_DAY: Millis = 86_400_000


async def _no_delay(operation: Operation) -> None:
    """The default hook: at once."""


def _no_fault(operation: Operation) -> Exception | None:
    """The default hook: nothing fails."""
    return None


class MemoryLedger:
    """LedgerStore in memory.

    delay: awaited before each operation takes effect; writes stay in order. fault: an exception to raise instead of the
    operation. lost_answer: an exception to raise after a write took effect. All three may be exchanged at any time.
    """

    def __init__(self, delay: Delay = _no_delay, fault: Fault = _no_fault, lost_answer: Fault = _no_fault) -> None:
        self.delay = delay
        self.fault = fault
        self.lost_answer = lost_answer
        self.records: list[LedgerRecord] = []
        """Every durable record in order, late ones too: what checkers read."""
        self._order = asyncio.Lock()
        self._epoch = 0
        self._last_seq = 0
        self._holds: dict[ExecutionId, HoldRecord] = {}
        self._latest: dict[tuple[str, str], HoldRecord] = {}
        self._steps: dict[ExecutionId, StepRecord] = {}
        self._lost_delivered_max: dict[ExecutionId, int] = {}
        self._ends: dict[ExecutionId, EndRecord] = {}
        self._open: dict[ExecutionId, HoldRecord] = {}
        self._late: list[EndRecord] = []
        self._rolled_up: list[tuple[HoldRecord, EndRecord]] = []
        self._balances: dict[_Leaf, tuple[int, int]] = {}
        self._rejections: defaultdict[tuple[str, str, Millis], int] = defaultdict(int)

    async def open_epoch(self, recent_since_ms: Millis) -> Recovery:
        """Become the writer: epoch + 1, and everything needed to continue."""
        async with self._order:
            await self._begin("open_epoch")
            self._epoch += 1
            return Recovery(
                epoch=self._epoch,
                next_seq=self._last_seq + 1,
                balances=self._recent_balances(recent_since_ms),
                open_holds=[self._open_hold(hold) for hold in self._open.values()],
                recent_takes=self._recent_takes(recent_since_ms),
            )

    async def write(self, epoch: int, records: Sequence[LedgerRecord]) -> None:
        """Write a group, in order, all or nothing. Raises StaleEpoch, or what a hook says."""
        async with self._order:
            await self._begin("write")
            if epoch != self._epoch:
                raise errors.StaleEpoch()
            fresh = [record for record in records if record.seq > self._last_seq]
            self._check(fresh)
            for record in fresh:
                self._apply(record)
            if lost := self.lost_answer("write"):
                raise lost

    async def find_execution(self, tenant: str, request_id: str) -> StoredExecution | None:
        """The latest execution of a request id."""
        await self._begin("find_execution")
        hold = self._latest.get((tenant, request_id))
        return self._stored(hold) if hold else None

    async def usage(self, query: UsageQuery) -> list[UsageRow]:
        """Sums over the rows of ended executions, by the time they ended. Raises InvalidRequest."""
        check_groups(query.group_by)
        await self._begin("usage")
        sums: defaultdict[tuple[str, ...], list[int]] = defaultdict(lambda: [0] * 6)
        for hold, end in self._ended():
            if _selected(query, end):
                columns = _usage_columns(hold, end)
                total = sums[tuple(columns[name] for name in query.group_by)]
                total[:] = map(sum, zip(total, _amounts(end), strict=True))
        check_group_count(query, len(sums))
        return [UsageRow(dict(zip(query.group_by, group, strict=True)), *total) for group, total in sorted(sums.items())]

    async def verify(self) -> LedgerReport:
        """Recount everything."""
        await self._begin("verify")
        posted: defaultdict[_Leaf, tuple[int, int]] = defaultdict(lambda: (0, 0))
        for hold, end in self._ended():
            for leaf, microusd, tokens in _posted(hold, end):
                posted[leaf] = (posted[leaf][0] + microusd, posted[leaf][1] + tokens)
        return LedgerReport(
            epoch=self._epoch,
            last_seq=self._last_seq,
            holds=len(self._holds),
            open_holds=len(self._open),
            settlements=len(self._ends),
            rolled_up=len(self._rolled_up),
            late=len(self._late),
            balances=len(self._balances),
            problems=tuple(differing_balances(self._balances, posted)),
        )

    async def prune(self, epoch: int, before_ms: Millis, rows_max: int) -> int:
        """Roll up to rows_max executions up that ended before a time; how many. Raises StaleEpoch, or what a hook says."""
        async with self._order:
            await self._begin("prune")
            if epoch != self._epoch:
                raise errors.StaleEpoch()
            oldest = sorted(self._ends.items(), key=lambda entry: (entry[1].at_ms, entry[1].seq))[:rows_max]
            old = [(execution, end) for execution, end in oldest if end.at_ms < before_ms]
            for execution, end in old:
                self._roll_up(execution, end)
            if len(old) < rows_max:
                self._late = [end for end in self._late if end.at_ms >= before_ms]
                for key in [key for key in self._rejections if key[2] < before_ms]:
                    del self._rejections[key]
            return len(old)

    def _roll_up(self, execution: ExecutionId, end: EndRecord) -> None:
        hold = self._holds.pop(execution)
        ended_day_ms = end.at_ms - end.at_ms % _MS_PER_DAY
        self._rolled_up.append((hold, msgspec.structs.replace(end, at_ms=ended_day_ms)))
        del self._ends[execution]
        self._steps.pop(execution, None)
        self._lost_delivered_max.pop(execution, None)
        if self._latest.get((execution.tenant, execution.request_id)) is hold:
            del self._latest[execution.tenant, execution.request_id]

    def _ended(self) -> Iterator[tuple[HoldRecord, EndRecord]]:
        """Every ended execution; of those rolled up only the day of the end is kept."""
        yield from self._rolled_up
        for execution, end in self._ends.items():
            yield self._holds[execution], end

    async def count_rejections(self, counts: Sequence[tuple[str, str, Millis, int]]) -> None:
        """Add (tenant, code, minute as wall-clock ms, number) to the rejection counters."""
        await self._begin("count_rejections")
        for tenant, code, minute_ms, number in counts:
            self._rejections[tenant, code, minute_ms] += number

    async def rejections(self, tenant: str | None = None) -> list[tuple[str, str, Millis, int]]:
        """The rejection counters, by tenant, code and minute."""
        return [(*key, number) for key, number in sorted(self._rejections.items()) if tenant in (None, key[0])]

    async def aclose(self) -> None:
        """Nothing to close: the object stays readable, and opens again."""

    async def _begin(self, operation: Operation) -> None:
        await self.delay(operation)
        if fault := self.fault(operation):
            raise fault

    def _check(self, records: Sequence[LedgerRecord]) -> None:
        held = set[ExecutionId]()
        last_seq = 0
        for record in records:
            assert record.seq > last_seq, "records are written in the order of their numbers"
            last_seq = record.seq
            if isinstance(record, HoldRecord):
                assert record.id not in self._holds and record.id not in held, "an execution is held once"
                held.add(record.id)
            elif isinstance(record, StepRecord):
                assert record.id in self._holds or record.id in held, "a step's hold is written before it"

    def _apply(self, record: LedgerRecord) -> None:
        self._last_seq = record.seq
        self.records.append(record)
        execution = record.id
        if isinstance(record, HoldRecord):
            self._holds[execution] = self._open[execution] = record
            latest = self._latest.get((execution.tenant, execution.request_id))
            if latest is None or latest.id.execution < execution.execution:
                self._latest[execution.tenant, execution.request_id] = record
        elif isinstance(record, StepRecord):
            before = self._steps.get(execution)
            if before is not None and before.attempt < record.attempt:
                self._lost_delivered_max[execution] = before.delivered_max
            self._steps[execution] = record
        elif (hold := self._open.pop(execution, None)) is None:
            self._late.append(record)
        else:
            self._ends[execution] = record
            self._post(hold, record)

    def _post(self, hold: HoldRecord, end: EndRecord) -> None:
        for leaf, microusd, tokens in _posted(hold, end):
            spent_microusd, spent_tokens = self._balances.get(leaf, (0, 0))
            self._balances[leaf] = (spent_microusd + microusd, spent_tokens + tokens)

    def _recent_balances(self, since_ms: Millis) -> list[LeafBalance]:
        floor_of = dict(zip(("day", "month"), floors_of(since_ms), strict=True))
        return [
            leaf_balance((*leaf, *spent))
            for leaf, spent in sorted(self._balances.items())
            if leaf[-1] == LIFETIME_WINDOW or leaf[-1] >= floor_of[leaf[-1].partition("/")[0]]
        ]

    def _recent_takes(self, since_ms: Millis) -> list[RecentTake]:
        found: list[RecentTake] = []
        for execution, hold in self._holds.items():
            if hold.at_ms >= since_ms:
                end = self._ends.get(execution)
                found += net_takes(execution, hold.at_ms, hold.takes, end.returns if end else None)
        return found

    def _stored(self, hold: HoldRecord) -> StoredExecution:
        step, end = self._steps.get(hold.id), self._ends.get(hold.id)
        return StoredExecution(
            id=hold.id,
            body_digest=hold.body_digest,
            record=_generation_record(hold, step, end),
            delivered_tokens=end.delivered_tokens if isinstance(end, SettleRecord) else 0,
            tenant_tokens=end.tenant_input_tokens + end.tenant_output_tokens if isinstance(end, SettleRecord) else 0,
            ended_at_ms=end.at_ms if end else None,
        )

    def _open_hold(self, hold: HoldRecord) -> OpenHold:
        step = self._steps.get(hold.id)
        if step is None:
            return OpenHold(hold)
        return OpenHold(hold, step.attempt, step.replica, step.delivered_max, self._lost_delivered_max.get(hold.id, 0))


def _generation_record(hold: HoldRecord, step: StepRecord | None, end: EndRecord | None) -> GenerationRecord:
    status = Status.RUNNING if step else Status.QUEUED
    shown = GenerationRecord(hold.generation_id, hold.id.request_id, hold.id.execution, hold.alias, hold.revision, status)
    return ended_record(shown, end, posted=True) if end else shown


def _posted(hold: HoldRecord, end: EndRecord) -> Iterator[tuple[_Leaf, int, int]]:
    """What an end adds to each balance: micro-dollars and tokens."""
    if isinstance(end, SettleRecord):
        tokens = end.tenant_input_tokens + end.tenant_output_tokens
        for window in hold.windows if end.cost_microusd + tokens else ():
            leaf = (hold.id.tenant, hold.application, hold.key, hold.alias, hold.service_class.value, window)
            yield leaf, end.cost_microusd, tokens


def _selected(query: UsageQuery, end: EndRecord) -> bool:
    return (
        query.tenant in (None, end.id.tenant)
        and (query.from_ms is None or end.at_ms >= query.from_ms)
        and (query.to_ms is None or end.at_ms < query.to_ms)
    )


def _usage_columns(hold: HoldRecord, end: EndRecord) -> dict[str, str]:
    return {
        "tenant": hold.id.tenant,
        "application": hold.application,
        "key": hold.key,
        "alias": hold.alias,
        "revision": hold.revision,
        "day": day_of(hold.windows),
        "status": end.status.value,
        "workload_class": hold.workload_class,
    }


def _amounts(end: EndRecord) -> tuple[int, int, int, int, int, int]:
    """Requests, the tenant's input, cached input and output tokens, its cost, the platform's."""
    if not isinstance(end, SettleRecord):
        return 1, 0, 0, 0, 0, 0
    tenant_tokens = (end.tenant_input_tokens, end.tenant_cached_input_tokens, end.tenant_output_tokens)
    return 1, *tenant_tokens, end.cost_microusd, end.platform_microusd


class MemoryCatalog:
    """ControlStore in memory."""

    def __init__(self) -> None:
        self._version = 0
        self._entities: dict[str, dict[tuple[str, ...], Any]] = {name: {} for name in CATALOG_KEYS}
        self._limits: dict[Scope, Limits] = {}
        self._prices: dict[tuple[str, int], RevisionPrice] = {}
        self._audit: list[AuditEntry] = []

    async def load(self) -> Catalog:
        """The whole catalog, each sequence ordered by key."""
        return Catalog(
            version=self._version,
            limits=sorted(self._limits.items(), key=lambda entry: entry[0].order),
            prices=[self._prices[key] for key in sorted(self._prices)],
            **{name: [values[key] for key in sorted(values)] for name, values in self._entities.items()},
        )

    async def version(self) -> int:
        """The catalog's version, which every change raises by one."""
        return self._version

    async def apply(self, expected_version: int, change: CatalogChange) -> int:
        """Apply a change if the catalog is still at expected_version; the new version. Raises AlreadyExists when it is not."""
        if expected_version != self._version:
            raise errors.AlreadyExists(f"The catalog is not at version {expected_version} any more.")
        for revision in change.revisions:
            self._keep_price(revision)
        for name, key_of in CATALOG_KEYS.items():
            self._entities[name] |= {key_of(value): value for value in getattr(change, name)}
        for scope, limits in change.limits:
            self._limits.pop(scope, None)
            if not limits.is_empty:
                self._limits[scope] = limits
        self._audit.append(change.audit)
        self._version += 1
        return self._version

    def _keep_price(self, revision: Revision) -> None:
        key = (revision.id, revision.price.version)
        assert self._prices.setdefault(key, RevisionPrice(revision.id, revision.price)).price == revision.price

    async def audit(self, limit: int, before_ms: Millis | None = None, subject: str | None = None) -> list[AuditEntry]:
        """The newest audit entries, newest first; only those before a time, and of a subject, where these are given."""
        newest_first = sorted(self._audit, key=lambda entry: entry.at_ms)[::-1]
        earlier = (entry for entry in newest_first if before_ms is None or entry.at_ms < before_ms)
        return [entry for entry in earlier if subject in (None, entry.subject)][:limit]

    async def aclose(self) -> None:
        """Nothing to close: the object stays readable."""
