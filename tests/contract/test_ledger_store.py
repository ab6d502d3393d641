"""The contract of LedgerStore, on memory, SQLite and PostgreSQL: order, atomicity, fencing, recovery, sums."""

import asyncio
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.contract.stores import (
    KINDS,
    NEXT_DAY,
    T0_MS,
    TAKES,
    WINDOWS,
    AnyLedger,
    Cell,
    execution,
    hold,
    release,
    settle,
    step,
)

from weir import errors
from weir.core.endings import FinishReason, Status
from weir.core.ledger.records import BucketTake, EndRecord, ExecutionId, HoldRecord, LedgerRecord, SettleRecord, Timing
from weir.core.metering import Basis
from weir.core.tenancy import ServiceClass
from weir.messages import GenerationRecord
from weir.ports import (
    USAGE_GROUPS,
    LeafBalance,
    LedgerReport,
    LedgerStore,
    OpenHold,
    RecentTake,
    Recovery,
    UsageQuery,
    UsageRow,
)
from weir.storage.memory import MemoryLedger

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(params=KINDS)
def cell(request: pytest.FixtureRequest, tmp_path: Path) -> Cell:
    return Cell(request.param, tmp_path)


@pytest.fixture
async def ledger(cell: Cell) -> AsyncIterator[AnyLedger]:
    async with cell.ledger() as opened:
        yield opened


async def test_a_new_store_starts_at_the_first_epoch_and_number(ledger: LedgerStore) -> None:
    """Protects: an empty store recovers to nothing, and every opening raises the epoch."""
    assert await ledger.open_epoch(0) == Recovery(1, 1, [], [], [])
    assert await ledger.open_epoch(0) == Recovery(2, 1, [], [], [])


async def test_an_execution_is_shown_through_its_whole_life(ledger: LedgerStore) -> None:
    """Protects: every field of an execution's stored form, queued, running and ended."""
    epoch, named = (await ledger.open_epoch(0)).epoch, execution()
    await ledger.write(epoch, [hold(1, named)])
    queued = await ledger.find_execution("acme", "r")
    assert queued is not None
    assert queued.record == GenerationRecord("gen-r-1", "r", 1, "assistant", "rev-1", Status.QUEUED)
    assert (queued.id, queued.body_digest, queued.delivered_tokens) == (named, b"\x00digest\xff", 0)
    assert queued.open

    await ledger.write(epoch, [step(2, named), step(3, named, attempt=2, delivered_max=32)])
    running = await ledger.find_execution("acme", "r")
    assert running is not None
    assert running.record.status is Status.RUNNING
    assert not running.record.posted
    assert running.open

    await ledger.write(epoch, [settle(4, named)])
    ended = await ledger.find_execution("acme", "r")
    assert ended is not None
    assert ended.record == GenerationRecord(
        "gen-r-1",
        "r",
        1,
        "assistant",
        "rev-1",
        Status.COMPLETED,
        FinishReason.STOP,
        input_tokens=90,
        cached_input_tokens=10,
        output_tokens=30,
        cost_microusd=40,
        basis=Basis.ENGINE,
        posted=True,
        timing=Timing(1.5, 20.25, 3.0, 99.0),
    )
    assert (ended.open, ended.delivered_tokens) == (False, 25)
    assert ended.ended_at_ms == T0_MS + 1_000


async def test_a_release_is_shown_with_its_error(ledger: LedgerStore) -> None:
    """Protects: an execution that never ran ends with its reason, nothing used, and no basis."""
    epoch = (await ledger.open_epoch(0)).epoch
    await ledger.write(epoch, [hold(1, execution()), release(2, execution())])
    found = await ledger.find_execution("acme", "r")
    assert found is not None
    assert found.record.status is Status.EXPIRED
    assert (found.record.basis, found.record.cost_microusd, found.record.posted) == (None, 0, True)
    assert (found.record.error_code, found.record.timing.queue_ms) == ("queue_wait_exceeded", 5_000.0)
    assert found.record.error_detail == "The bound of waiting was reached."


async def test_the_latest_execution_is_found(ledger: LedgerStore) -> None:
    """Protects: a re-run under the same request id hides the earlier run; other tenants see neither."""
    epoch = (await ledger.open_epoch(0)).epoch
    first, second = execution(number=1), execution(number=2)
    await ledger.write(epoch, [hold(1, first), release(2, first), hold(3, second)])
    found = await ledger.find_execution("acme", "r")
    assert found is not None
    assert found.id == second
    assert found.open
    assert await ledger.find_execution("globex", "r") is None
    assert await ledger.find_execution("acme", "other") is None


async def test_a_stale_epoch_writes_nothing(ledger: LedgerStore) -> None:
    """Protects: a coordinator that was replaced can write neither alone nor beside its successor."""
    old = await ledger.open_epoch(0)
    new = await ledger.open_epoch(0)
    with pytest.raises(errors.StaleEpoch):
        await ledger.write(old.epoch, [hold(1, execution())])
    await ledger.write(new.epoch, [hold(1, execution("mine"))])
    assert await ledger.find_execution("acme", "r") is None
    assert await ledger.find_execution("acme", "mine") is not None


async def test_a_group_is_all_or_nothing(ledger: LedgerStore) -> None:
    """Protects: a group with a record that cannot be written leaves nothing behind, and the store goes on."""
    epoch = (await ledger.open_epoch(0)).epoch
    await ledger.write(epoch, [hold(1, execution())])
    with pytest.raises(AssertionError):
        await ledger.write(epoch, [hold(2, execution("new")), settle(3, execution()), hold(4, execution())])
    with pytest.raises(AssertionError):
        await ledger.write(epoch, [hold(2, execution("new")), step(3, execution("never held"))])
    found = await ledger.find_execution("acme", "r")
    assert found is not None
    assert found.open
    assert await ledger.find_execution("acme", "new") is None
    recovery = await ledger.open_epoch(0)
    assert (recovery.next_seq, recovery.balances) == (2, [])
    await ledger.write(recovery.epoch, [settle(2, execution())])


async def test_a_group_written_again_changes_nothing(ledger: AnyLedger) -> None:
    """Protects: a write whose answer was lost may be repeated, also together with what came after it."""
    epoch, named = (await ledger.open_epoch(0)).epoch, execution()
    group: list[LedgerRecord] = [hold(1, named), step(2, named), settle(3, named)]
    await ledger.write(epoch, group)
    await ledger.write(epoch, group)
    await ledger.write(epoch, [*group, hold(4, execution("next"))])
    recovery = await ledger.open_epoch(0)
    assert recovery.next_seq == 5
    leaf = ("acme", "app", "key", "assistant", ServiceClass.INTERACTIVE)
    assert recovery.balances == [LeafBalance(*leaf, window, 40, 100) for window in sorted(WINDOWS)]
    assert (await ledger.verify()).late == 0


async def test_the_first_end_counts_and_later_ones_are_kept_aside(ledger: AnyLedger) -> None:
    """Protects: a settlement after the end changes no balance and no answer, within a group or after it, and is counted."""
    epoch, named = (await ledger.open_epoch(0)).epoch, execution()
    await ledger.write(epoch, [hold(1, named), step(2, named), settle(3, named, cost=40), settle(4, named, cost=999)])
    await ledger.write(epoch, [release(5, named), settle(6, execution("unknown"), cost=999)])
    assert (await ledger.verify()).late == 3
    found = await ledger.find_execution("acme", "r")
    assert found is not None
    assert (found.record.status, found.record.cost_microusd) == (Status.COMPLETED, 40)
    recovery = await ledger.open_epoch(0)
    assert recovery.next_seq == 7
    assert [balance.spent_microusd for balance in recovery.balances] == [40, 40, 40]
    assert (await ledger.usage(UsageQuery()))[0].requests == 1


async def test_open_holds_survive_a_restart_in_order(cell: Cell) -> None:
    """Protects a takeover: it finds exactly the holds without an end, oldest first, as written, with their last step."""
    async with cell.ledger() as before:
        epoch = (await before.open_epoch(0)).epoch
        names = [execution(f"r{i}") for i in range(6)]
        await before.write(epoch, [hold(i + 1, named) for i, named in enumerate(names)])
        await before.write(
            epoch, [step(7, names[4]), step(8, names[4], delivered_max=128), settle(9, names[2]), release(10, names[0])]
        )
        await before.write(epoch, [step(11, names[5]), step(12, names[5], attempt=2, delivered_max=32)])
    async with cell.ledger() as after:
        recovery = await after.open_epoch(0)
        assert (recovery.epoch, recovery.next_seq) == (2, 13)
        assert recovery.open_holds == [
            OpenHold(hold(2, names[1])),
            OpenHold(hold(4, names[3])),
            OpenHold(hold(5, names[4]), 1, "replica-1", 128),
            OpenHold(hold(6, names[5]), 2, "replica-2", 32, 64),
        ]


async def test_recent_takes_are_net_of_returns_and_in_order(ledger: LedgerStore) -> None:
    """Protects: buckets are rebuilt from takes since the given time, less what settlements gave back."""
    epoch = (await ledger.open_epoch(0)).epoch
    old, back, open_hold, whole = (execution(name) for name in ("old", "back", "open", "whole"))
    await ledger.write(epoch, [hold(1, old, at_ms=T0_MS - 1), hold(2, back, at_ms=T0_MS), hold(3, open_hold, at_ms=T0_MS + 5)])
    await ledger.write(epoch, [hold(4, whole, at_ms=T0_MS + 5), settle(5, back, back=250), release(6, whole, back=TAKES)])
    recovery = await ledger.open_epoch(T0_MS)
    assert recovery.recent_takes == [
        RecentTake("acme", None, None, None, "requests_per_minute", 1, T0_MS),
        RecentTake("acme", "app", "key", None, "tokens_per_minute", 50, T0_MS),
        RecentTake("acme", None, None, None, "requests_per_minute", 1, T0_MS + 5, open_hold),
        RecentTake("acme", "app", "key", None, "tokens_per_minute", 300, T0_MS + 5, open_hold),
    ]


async def test_each_budget_window_of_a_hold_is_posted(ledger: LedgerStore) -> None:
    """Protects: a settlement charges every window in which its hold was taken, and a free one none."""
    epoch = (await ledger.open_epoch(0)).epoch
    names = [execution(f"r{i}") for i in range(3)]
    await ledger.write(epoch, [hold(1, names[0]), hold(2, names[1], windows=NEXT_DAY), hold(3, names[2])])
    await ledger.write(epoch, [settle(4, names[0], cost=10), settle(5, names[1], cost=5), release(6, names[2])])
    first, second, month, lifetime = (
        LeafBalance("acme", "app", "key", "assistant", ServiceClass.INTERACTIVE, *posted)
        for posted in (
            ("day/2026-01-01", 10, 100),
            ("day/2026-01-02", 5, 100),
            ("month/2026-01", 15, 200),
            ("lifetime", 15, 200),
        )
    )
    assert sorted((await ledger.open_epoch(0)).balances, key=repr) == sorted([first, second, month, lifetime], key=repr)
    day_ms = 86_400_000
    present = (await ledger.open_epoch(T0_MS + 3 * day_ms)).balances
    assert sorted(present, key=repr) == sorted([second, month, lifetime], key=repr)
    assert (await ledger.open_epoch(T0_MS + 90 * day_ms)).balances == [lifetime]


async def test_each_class_has_balances_and_takes_of_its_own(ledger: AnyLedger) -> None:
    """Protects limits of a class: what is posted and taken is kept by it, through a restart, the check and the retention."""
    epoch, jobs = (await ledger.open_epoch(0)).epoch, ServiceClass.BATCH
    names = [execution(f"r{i}") for i in range(3)]
    take = BucketTake("app", None, None, "tokens_per_minute", 300, jobs)
    held = [
        msgspec.structs.replace(hold(i + 1, named, service_class=jobs), takes=(*TAKES, take))
        for i, named in enumerate(names[:2])
    ]
    given = msgspec.structs.replace(take, units=200)
    ends = [settle(7, names[0], cost=10), msgspec.structs.replace(settle(8, names[1], cost=5), returns=(given,))]
    steps = [step(i + 4, named) for i, named in enumerate(names)]
    await ledger.write(epoch, [*held, hold(3, names[2]), *steps, *ends])
    await ledger.write(epoch, [settle(9, names[2], cost=7)])
    recovery = await ledger.open_epoch(T0_MS)
    assert [(each.service_class, each.window, each.spent_microusd, each.spent_tokens) for each in recovery.balances] == [
        *((jobs, window, 15, 200) for window in sorted(WINDOWS)),
        *((ServiceClass.INTERACTIVE, window, 7, 100) for window in sorted(WINDOWS)),
    ]
    assert all(type(each.service_class) is ServiceClass for each in recovery.balances)
    taken = [(each.service_class, each.net_units) for each in recovery.recent_takes if each.limit == "tokens_per_minute"]
    assert taken == [(None, 300), (jobs, 300), (None, 300), (jobs, 100), (None, 300)]
    assert (await ledger.verify()).is_clean
    assert await ledger.prune(recovery.epoch, T0_MS + 86_400_000, 10) == 3
    report = await ledger.verify()
    assert report.is_clean and (report.rolled_up, report.balances) == (3, 6)
    assert (await ledger.open_epoch(T0_MS)).balances == recovery.balances


async def test_usage_is_grouped_bounded_and_refuses_other_columns(ledger: LedgerStore) -> None:
    """Protects: usage sums ended executions by the time they ended, from inclusive, to exclusive, by approved columns only."""
    epoch = (await ledger.open_epoch(0)).epoch
    assert await ledger.usage(UsageQuery()) == []
    day_ms = 86_400_000
    ends = [
        ("a", "acme", T0_MS, WINDOWS),
        ("b", "acme", T0_MS + day_ms - 1, WINDOWS),
        ("c", "acme", T0_MS + day_ms, NEXT_DAY),
        ("d", "globex", T0_MS + day_ms, NEXT_DAY),
    ]
    for i, (name, tenant, at_ms, windows) in enumerate(ends):
        named = execution(name, tenant=tenant)
        await ledger.write(epoch, [hold(2 * i + 1, named, windows=windows), settle(2 * i + 2, named, at_ms=at_ms)])
    await ledger.write(epoch, [hold(20, execution("open")), hold(21, execution("idle")), release(22, execution("idle"))])
    by_day = await ledger.usage(UsageQuery(tenant="acme", group_by=("day", "status")))
    assert by_day == [
        UsageRow({"day": "2026-01-01", "status": "completed"}, 2, 160, 18, 40, 80, 6),
        UsageRow({"day": "2026-01-01", "status": "expired"}, 1, 0, 0, 0, 0, 0),
        UsageRow({"day": "2026-01-02", "status": "completed"}, 1, 80, 9, 20, 40, 3),
    ]
    bounded = await ledger.usage(UsageQuery(from_ms=T0_MS + day_ms - 1, to_ms=T0_MS + day_ms))
    assert bounded == [UsageRow({}, 1, 80, 9, 20, 40, 3)]
    everything = await ledger.usage(UsageQuery(group_by=USAGE_GROUPS))
    assert set(everything[0].group) == set(USAGE_GROUPS)
    assert sum(row.requests for row in everything) == 5
    assert len(await ledger.usage(UsageQuery(group_by=("day", "tenant"), groups_max=3))) == 3
    for groups, groups_max in ((("body_digest",), 9), (("day", "day"), 9), (("day", "tenant"), 2)):
        with pytest.raises(errors.InvalidRequest) as refused:
            await ledger.usage(UsageQuery(group_by=groups, groups_max=groups_max))
        assert refused.value.members["field"] == "group_by"


async def test_usage_by_day_follows_the_budget_window_of_the_hold(ledger: LedgerStore) -> None:
    """Protects: what a day's budget was charged is what usage shows for that day, also where the end came after midnight."""
    epoch = (await ledger.open_epoch(0)).epoch
    named = execution()
    await ledger.write(epoch, [hold(1, named), settle(2, named, at_ms=T0_MS + 90_000_000)])
    assert [row.group for row in await ledger.usage(UsageQuery(group_by=("day",)))] == [{"day": "2026-01-01"}]


async def test_a_whole_ledger_is_checked(ledger: LedgerStore) -> None:
    """Protects: a clean ledger is called clean, with its figures."""
    epoch = (await ledger.open_epoch(0)).epoch
    names = [execution(f"r{i}") for i in range(3)]
    await ledger.write(epoch, [hold(1, names[0]), hold(2, names[1]), step(3, names[0]), settle(4, names[0]), hold(5, names[2])])
    await ledger.write(epoch, [release(6, names[1]), settle(7, names[0])])
    report = await ledger.verify()
    assert report == LedgerReport(epoch, 7, holds=3, open_holds=1, settlements=2, rolled_up=0, late=1, balances=3)
    assert report.is_clean


async def test_what_is_past_the_retention_is_rolled_up_and_every_sum_stays(ledger: AnyLedger) -> None:
    """Protects: pruning is bounded and fenced, forgets executions and their ids, and changes no usage and no balance."""
    epoch = (await ledger.open_epoch(0)).epoch
    day_ms = 86_400_000
    names = [execution(f"r{i}") for i in range(5)]
    for i, named in enumerate(names[:4]):
        await ledger.write(epoch, [hold(3 * i + 1, named), step(3 * i + 2, named)])
        await ledger.write(epoch, [settle(3 * i + 3, named, at_ms=T0_MS + i * day_ms // 2, cost=40)])
    await ledger.write(epoch, [hold(20, names[4]), settle(21, names[0], at_ms=T0_MS + 10)])
    await ledger.count_rejections([("acme", "queue_full", T0_MS, 2), ("acme", "queue_full", T0_MS + day_ms, 1)])
    queries = [UsageQuery(), UsageQuery(group_by=USAGE_GROUPS), UsageQuery(tenant="acme", from_ms=T0_MS + day_ms)]
    before = [await ledger.usage(query) for query in queries]
    balances = (await ledger.open_epoch(0)).balances
    epoch += 1
    with pytest.raises(errors.StaleEpoch):
        await ledger.prune(epoch - 1, T0_MS + day_ms, 10)
    assert [await ledger.prune(epoch, T0_MS + day_ms, 1) for _ in range(3)] == [1, 1, 0]
    assert [await ledger.usage(query) for query in queries] == before
    report = await ledger.verify()
    assert (report.is_clean, report.holds, report.settlements, report.rolled_up, report.late) == (True, 3, 2, 2, 0)
    assert await ledger.rejections() == [("acme", "queue_full", T0_MS + day_ms, 1)]
    assert await ledger.find_execution("acme", "r0") is None and await ledger.find_execution("acme", "r2") is not None
    assert await ledger.prune(epoch, T0_MS + 9 * day_ms, 10) == 2
    assert [await ledger.usage(query) for query in queries[:2]] == before[:2]
    assert (await ledger.verify()).is_clean
    recovery = await ledger.open_epoch(0)
    assert recovery.balances == balances
    assert [found.hold.id for found in recovery.open_holds] == [names[4]]


async def test_rejections_add_up(ledger: AnyLedger) -> None:
    """Protects: rejections are counters by tenant, code and minute."""
    await ledger.count_rejections([("acme", "queue_full", T0_MS, 2), ("globex", "queue_full", T0_MS, 1)])
    await ledger.count_rejections([("acme", "queue_full", T0_MS, 3), ("acme", "queue_full", T0_MS + 60_000, 1)])
    assert await ledger.rejections("acme") == [("acme", "queue_full", T0_MS, 5), ("acme", "queue_full", T0_MS + 60_000, 1)]
    assert len(await ledger.rejections()) == 3


# ── any sequence of records ──────────────────────────────────────────────────────────────────────────────────────────

Choice = tuple[Literal["hold", "step", "settle", "release"], int, int, int]

choices = st.lists(
    st.tuples(
        st.sampled_from(("hold", "step", "settle", "release")), st.integers(0, 5), st.integers(0, 400), st.integers(0, 3)
    ),
    max_size=40,
)


def records_of(chosen: list[Choice]) -> list[LedgerRecord]:
    """Legal records from random choices: an execution is held once, steps have a hold, ends may come twice or for nothing."""
    held: Counter[tuple[str, str]] = Counter()
    records: list[LedgerRecord] = []
    for seq, (kind, who, amount, offset) in enumerate(chosen, 1):
        tenant, request_id = ("acme", "globex")[who % 2], f"r{who // 2}"
        at_ms = T0_MS + offset * 40_000_000
        if kind == "hold":
            held[tenant, request_id] += 1
        named = ExecutionId(tenant, request_id, max(1, held[tenant, request_id]))
        if kind == "hold":
            windows = (f"day/2026-01-{1 + offset:02}", "month/2026-01", "lifetime")
            records.append(hold(seq, named, at_ms=at_ms, key=f"key{amount % 3}", windows=windows))
        elif kind == "step" and held[tenant, request_id]:
            records.append(step(seq, named, 1 + amount % 2, amount))
        elif kind == "settle":
            records.append(settle(seq, named, at_ms=at_ms, cost=amount, back=amount % 300))
        elif kind == "release":
            records.append(release(seq, named, at_ms=at_ms, back=TAKES[:offset]))
    return records


def counting_ends(records: list[LedgerRecord]) -> list[tuple[HoldRecord, EndRecord]]:
    """Each held execution with its first end: what the ledger must have counted."""
    held: dict[ExecutionId, HoldRecord] = {}
    ended: dict[ExecutionId, tuple[HoldRecord, EndRecord]] = {}
    for record in records:
        if isinstance(record, HoldRecord):
            held[record.id] = record
        elif isinstance(record, EndRecord) and record.id in held:
            ended.setdefault(record.id, (held[record.id], record))
    return list(ended.values())


def expected_balances(records: list[LedgerRecord]) -> dict[tuple[str, str, str], tuple[int, int]]:
    """(tenant, key, window) → money and tokens, straight from the records."""
    sums: dict[tuple[str, str, str], tuple[int, int]] = {}
    for held, end in counting_ends(records):
        if isinstance(end, SettleRecord):
            for window in held.windows:
                leaf = (held.id.tenant, held.key, window)
                microusd, tokens = sums.get(leaf, (0, 0))
                sums[leaf] = (microusd + end.cost_microusd, tokens + end.tenant_input_tokens + end.tenant_output_tokens)
    return sums


async def observed(cell: Cell, groups: list[list[LedgerRecord]]) -> tuple[Recovery, list[UsageRow], int, list[object]]:
    """Everything that can be read back after a restart."""
    async with cell.ledger() as ledger:
        epoch = (await ledger.open_epoch(0)).epoch
        for group in groups:
            await ledger.write(epoch, group)
    async with cell.ledger() as ledger:
        recovery = await ledger.open_epoch(0)
        usage = await ledger.usage(UsageQuery(group_by=USAGE_GROUPS))
        names = sorted({(record.id.tenant, record.id.request_id) for group in groups for record in group})
        found: list[object] = [await ledger.find_execution(*name) for name in names]
        return recovery, usage, (await ledger.verify()).late, found


@settings(max_examples=40, deadline=None)
@given(chosen=choices, group_size=st.integers(1, 12))
def test_any_records_leave_balances_and_usage_equal_to_their_settlements(chosen: list[Choice], group_size: int) -> None:
    """Protects: balances and usage are sums over first ends, and all stores agree on everything that can be read."""
    records = records_of(chosen)
    groups = [records[i : i + group_size] for i in range(0, len(records), group_size)]
    with tempfile.TemporaryDirectory() as directory:
        in_memory, *durable = (asyncio.run(observed(Cell(kind, Path(directory)), groups)) for kind in KINDS)
    assert durable == [in_memory] * len(durable)
    recovery, usage, late, _ = in_memory
    check_balances(recovery, usage, records)
    ends = counting_ends(records)
    assert sum(row.requests for row in usage) == len(ends)
    assert late == sum(isinstance(record, EndRecord) for record in records) - len(ends)
    assert len(recovery.open_holds) == sum(isinstance(record, HoldRecord) for record in records) - len(ends)


def check_balances(recovery: Recovery, usage: list[UsageRow], records: list[LedgerRecord]) -> None:
    """Balances are the sums of the records, in money what usage shows, and of the same days."""
    balances = {(b.tenant, b.key, b.window): (b.spent_microusd, b.spent_tokens) for b in recovery.balances}
    assert balances == expected_balances(records)
    lifetime = sum(microusd for (_, _, window), (microusd, _) in balances.items() if window == "lifetime")
    assert lifetime == sum(row.cost_microusd for row in usage)
    by_day = {window for _, _, window in balances if window.startswith("day/")}
    assert {row.group["day"] for row in usage if row.cost_microusd} <= {window[4:] for window in by_day}


# ── what only memory can do ──────────────────────────────────────────────────────────────────────────────────────────


async def test_memory_hooks_delay_fail_and_lose_answers() -> None:
    """Protects: the simulator's store is slow, failing or forgetful where told, and consistent throughout."""
    gate = asyncio.Event()
    ledger = MemoryLedger()
    epoch = (await ledger.open_epoch(0)).epoch

    async def wait_for_gate(operation: str) -> None:
        if operation == "write":
            await gate.wait()

    ledger.delay = wait_for_gate
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        group.create_task(ledger.write(epoch, [hold(1, execution())]))
        group.create_task(ledger.write(epoch, [settle(2, execution())]))
        assert await ledger.find_execution("acme", "r") is None
        gate.set()
    assert [record.seq for record in ledger.records] == [1, 2]

    ledger.fault = lambda operation: errors.LedgerUnavailable() if operation == "write" else None
    with pytest.raises(errors.LedgerUnavailable):
        await ledger.write(epoch, [hold(3, execution("lost"))])
    assert await ledger.find_execution("acme", "lost") is None
    ledger.fault = lambda operation: None
    ledger.lost_answer = lambda operation: errors.LedgerUnavailable()
    with pytest.raises(errors.LedgerUnavailable):
        await ledger.write(epoch, [hold(3, execution("unsure"))])
    assert await ledger.find_execution("acme", "unsure") is not None
