"""Independent checks of the invariants while a simulated cell runs: it hears every message, durable record and client byte.

It keeps its own figures, from what passes on the wire and from what is durable, and asserts at each event. It shares no
decision with the platform, changes nothing, and feeds all it hears into a trace hash, so that two runs can be compared.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from weir.config import CoordinatorConfig
from weir.core.endings import FinishReason, Status
from weir.core.ledger.records import EndRecord, ExecutionId, HoldRecord, LedgerRecord, SettleRecord, StepRecord
from weir.core.metering import Price
from weir.core.registry.snapshot import Snapshot
from weir.core.tenancy import Limits, Scope, Scopes, scopes_of
from weir.engines.simulated_text import ReplyBounds, Script, natural_output_tokens, script
from weir.errors import WeirError
from weir.gateway.client import Accepted
from weir.messages import (
    Acquire,
    Admitted,
    Down,
    EndBooked,
    Ended,
    EndUnbooked,
    FleetView,
    GenerationRecord,
    Granted,
    Progress,
    Rejected,
    Stopped,
    Up,
)
from weir.ports import Clock, EngineCall
from weir.sim.clients import SimAnswer
from weir.units import MILLION, MicroDollars, Nanos, Tokens, ceil_div, ns_from_ms


class Records(Protocol):
    """A ledger whose durable records can be read in order."""

    @property
    def records(self) -> list[LedgerRecord]: ...


@dataclass(slots=True)
class Seen:
    """An admitted execution as the wire showed it. lane: (replica, lane) while taken; handed: tokens that its client got."""

    acquire: Acquire
    id: ExecutionId
    acquired_ns: Nanos
    scopes: Scopes
    held: MicroDollars
    admitted_ns: Nanos
    is_queued: bool = True
    attempts: int = 0
    lane: tuple[str, int] | None = None
    had_output: bool = False
    end: GenerationRecord | None = None
    booked: bool = False
    unbooked: bool = False
    lost: bool = False  # the process died before its end was known
    posted: MicroDollars = 0
    handed: Tokens = 0


@dataclass(slots=True)
class _Sums:
    """One scope as counted here."""

    held: MicroDollars = 0
    spent: MicroDollars = 0
    in_flight: int = 0


@dataclass(slots=True)
class Durable:
    """What the ledger's durable records say."""

    holds: dict[ExecutionId, HoldRecord] = field(default_factory=dict)
    steps: dict[ExecutionId, list[StepRecord]] = field(default_factory=dict)
    ends: dict[ExecutionId, EndRecord] = field(default_factory=dict)

    def add(self, record: LedgerRecord) -> None:
        """One more record; a second hold or end of an execution, or a step after its end, is a violation."""
        name = record.id
        if isinstance(record, HoldRecord):
            assert name not in self.holds, f"{name} is held twice"
            self.holds[name] = record
            return
        assert name in self.holds, f"{name} has a record without a hold"
        assert name not in self.ends, f"{name} goes on after its end"
        if isinstance(record, StepRecord):
            steps = self.steps.setdefault(name, [])
            assert not steps or record.delivered_max > steps[-1].delivered_max or record.attempt > steps[-1].attempt
            steps.append(record)
        else:
            self.ends[name] = record

    def delivered_max(self, name: ExecutionId) -> Tokens:
        """The durable bound of what may have been delivered."""
        steps = self.steps.get(name)
        return steps[-1].delivered_max if steps else 0


class Checker:
    """The witness of one world. prompts: by the exchange's name; seen: by generation id; limits: in force now."""

    def __init__(self, clock: Clock, ledger: Records, price: Price, config: CoordinatorConfig, concurrency: int) -> None:
        self._clock = clock
        self._ledger = ledger
        self._price = price
        self._config = config
        self._concurrency = concurrency
        self._read = 0
        self._trace = hashlib.sha256()
        self._acquired: dict[int, tuple[Acquire, Nanos]] = {}
        self._by_ref: dict[int, Seen] = {}
        self._lanes: dict[str, set[int]] = {}
        self._sums: dict[Scope, _Sums] = {}
        self._with_output: set[str] = set()
        self.limits: Mapping[Scope, Limits] = {}
        self.changed_limits: set[Scope] = set()
        self.prompts: dict[str, str] = {}
        self.seen: dict[str, Seen] = {}
        self.durable = Durable()
        self.rejections: list[str] = []
        self._rules: dict[type, Callable[..., None]] = {
            Acquire: self._on_acquire,
            Admitted: self._on_admitted,
            Rejected: self._on_rejected,
            Granted: self._on_granted,
            Progress: self._on_progress,
            Stopped: self._on_stopped,
            Ended: self._on_ended,
            EndBooked: self._on_booked,
            EndUnbooked: self._on_unbooked,
            Snapshot: self._on_snapshot,
        }

    # ── the trace ────────────────────────────────────────────────────────────────────────────────────────────────────

    def note(self, what: str) -> None:
        """Feed an event into the trace."""
        self._trace.update(f"{self._clock.monotonic_ns()} {what}\n".encode())

    @property
    def trace(self) -> str:
        """The digest of everything that happened so far."""
        return self._trace.hexdigest()

    def catch_up(self) -> None:
        """Take in what became durable."""
        records = self._ledger.records
        while self._read < len(records):
            record = records[self._read]
            self._read += 1
            self.note(repr(record))
            self.durable.add(record)

    # ── processes ────────────────────────────────────────────────────────────────────────────────────────────────────

    def cell_started(self) -> None:
        """A coordinator begins on what is durable: nothing is held, and the ends say what is spent."""
        self.catch_up()
        self._sums = {}
        for name, end in self.durable.ends.items():
            hold = self.durable.holds[name]
            for scope in scopes_of(name.tenant, hold.application, hold.key, hold.alias):
                self._of(scope).spent += end.cost_microusd if isinstance(end, SettleRecord) else 0

    def cell_died(self) -> None:
        """The process is gone, with everything that it had not written."""
        self.note("died")
        for seen in self._by_ref.values():
            seen.lost = not seen.booked
        self._acquired, self._by_ref, self._lanes = {}, {}, {}

    def replica_gone(self, replica: str) -> None:
        """A replica's process is gone, and its lanes with it."""
        self._lanes.pop(replica, None)

    @property
    def lanes_taken(self) -> int:
        """Lanes between a grant and a confirmed stop."""
        return sum(map(len, self._lanes.values()))

    def spent(self, scope: Scope) -> MicroDollars:
        """What was posted in this scope."""
        return self._of(scope).spent

    # ── the wire ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def heard(self, message: Up | Down) -> None:
        """A message passes."""
        if not isinstance(message, Snapshot | FleetView):
            self.note(repr(message))
        rule = self._rules.get(type(message))
        if rule is not None:
            rule(message)

    def _on_snapshot(self, snapshot: Snapshot) -> None:
        before, self.limits = self.limits, snapshot.limits
        for scope in {*before, *self.limits}:
            if before.get(scope) != self.limits.get(scope):
                self.changed_limits.add(scope)

    def _on_acquire(self, acquire: Acquire) -> None:
        self._acquired[acquire.ref] = (acquire, self._clock.monotonic_ns())

    def _on_rejected(self, rejected: Rejected) -> None:
        self._acquired.pop(rejected.ref)
        self.rejections.append(rejected.code)

    def _on_admitted(self, admitted: Admitted) -> None:
        acquire, acquired_ns = self._acquired.pop(admitted.ref)
        scopes = scopes_of(acquire.tenant, acquire.application, acquire.key, acquire.alias)
        price = self._price
        worst = acquire.input_tokens * price.input_microusd + acquire.max_output_tokens * price.output_microusd
        held = ceil_div(acquire.choices * worst, MILLION)
        for scope in scopes:
            self._check_limit(scope, held)
        name = ExecutionId(acquire.tenant, acquire.request_id, admitted.execution)
        now_ns = self._clock.monotonic_ns()
        seen = Seen(acquire, name, acquired_ns, scopes, held, now_ns)
        assert acquire.generation_id not in self.seen
        assert now_ns < self._deadline_ns(seen), f"{name} was admitted after its deadline"
        self.seen[acquire.generation_id] = self._by_ref[admitted.ref] = seen
        for scope in scopes:
            sums = self._of(scope)
            sums.held += held
            sums.in_flight += 1
        self._check_queue(acquire.tenant)

    def _check_limit(self, scope: Scope, held: MicroDollars) -> None:
        limits = self.limits.get(scope)
        if limits is None:
            return
        sums = self._of(scope)
        most = limits.spend_microusd_lifetime
        assert most is None or sums.held + sums.spent + held <= most, f"{scope} is over its budget"
        assert limits.concurrency is None or sums.in_flight < limits.concurrency, f"{scope} is over its concurrency"

    def _check_queue(self, tenant: str) -> None:
        queued = [seen.acquire for seen in self._by_ref.values() if seen.is_queued]
        config = self._config
        assert len(queued) <= config.queue_entries
        assert sum(acquire.input_bytes for acquire in queued) <= config.queue_bytes
        assert sum(acquire.tenant == tenant for acquire in queued) <= config.queue_entries_per_tenant

    def _deadline_ns(self, seen: Seen) -> Nanos:
        return seen.acquired_ns + ns_from_ms(seen.acquire.deadline_left_ms)

    def _on_granted(self, granted: Granted) -> None:
        seen, now_ns = self._by_ref[granted.ref], self._clock.monotonic_ns()
        assert seen.is_queued and seen.end is None, f"{seen.id} is granted and was not waiting"
        assert not seen.had_output, f"{seen.id} is dispatched again after output"
        assert now_ns < self._deadline_ns(seen), f"{seen.id} is dispatched past its deadline"
        assert now_ns - seen.admitted_ns <= ns_from_ms(self._config.queue_wait_ms), f"{seen.id} waited too long"
        seen.is_queued = False
        seen.attempts += 1
        assert seen.attempts == granted.attempt <= 2
        lanes = self._lanes.setdefault(granted.replica.name, set())
        assert granted.lane not in lanes and len(lanes) < self._concurrency, f"{granted.replica.name} is overbooked"
        lanes.add(granted.lane)
        seen.lane = (granted.replica.name, granted.lane)

    def _on_progress(self, progress: Progress) -> None:
        seen = self._by_ref.get(progress.ref)
        if seen is not None and progress.first_output:
            seen.had_output = True

    def _on_stopped(self, stopped: Stopped) -> None:
        seen = self._by_ref.get(stopped.ref)
        if seen is not None and seen.lane is not None and stopped.confirmed:
            replica, lane = seen.lane
            self._lanes.get(replica, set()).discard(lane)
            seen.lane = None

    def _on_ended(self, ended: Ended) -> None:
        seen = self._by_ref[ended.ref]
        assert seen.end is None, f"{seen.id} ended twice"
        assert ended.record.status not in (Status.QUEUED, Status.RUNNING)
        seen.end, seen.is_queued = ended.record, False
        self._post(seen, ended.record.cost_microusd)
        for scope in seen.scopes:
            sums = self._of(scope)
            sums.held -= seen.held
            sums.in_flight -= 1

    def _on_unbooked(self, unbooked: EndUnbooked) -> None:
        seen = self._by_ref[unbooked.ref]
        assert not seen.acquire.stream and not seen.booked and seen.end is not None
        assert unbooked.record.finish_reason is FinishReason.LEDGER_UNAVAILABLE
        seen.unbooked = True
        self._post(seen, unbooked.record.cost_microusd)

    def _on_booked(self, booked: EndBooked) -> None:
        self.catch_up()
        seen = self._by_ref[booked.ref]
        end = self.durable.ends.get(seen.id)
        assert end is not None and not seen.booked, f"{seen.id} is booked twice, or not durable"
        record = booked.record
        assert (end.status, end.finish_reason) == (record.status, record.finish_reason)
        seen.booked, seen.end = True, record
        self._post(seen, record.cost_microusd)

    def _post(self, seen: Seen, cost: MicroDollars) -> None:
        assert cost <= seen.held, f"{seen.id} costs more than its hold"
        for scope in seen.scopes:
            self._of(scope).spent += cost - seen.posted
        seen.posted = cost

    def _of(self, scope: Scope) -> _Sums:
        return self._sums.setdefault(scope, _Sums())

    # ── engines ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def engine_started(self, call: EngineCall) -> None:
        """An engine is about to run a prompt; prompts name requests here."""
        self.note(f"start {call.replica.name} {call.lane}")
        assert call.prompt not in self._with_output, "an engine runs a request again whose client got output"

    # ── clients ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def opened(self, answer: SimAnswer, accepted: Accepted) -> None:
        """Headers only with a durable hold."""
        self.catch_up()
        assert self.seen[accepted.generation_id].id in self.durable.holds, f"{answer.name}: headers before the hold is durable"

    def handed_out(self, answer: SimAnswer, texts: Sequence[str]) -> None:
        """Output byte-exact as the engine made it, within what is durably booked."""
        self.catch_up()
        assert answer.accepted is not None
        seen = self.seen[answer.accepted.generation_id]
        reply = self.script_of(answer.name, seen)
        for text in texts:
            seen.handed = self._match(reply, seen, text)
        seen.had_output = True
        self._with_output.add(self.prompts[answer.name])
        booked = self.durable.delivered_max(seen.id)
        assert seen.handed <= booked, f"{answer.name}: {seen.handed} tokens handed out with {booked} durably booked"
        assert seen.end is None, f"{answer.name}: output after its end was decided"

    def _match(self, reply: Script, seen: Seen, text: str) -> Tokens:
        """The token count after `text`, which must be the next piece with text."""
        position = seen.handed
        while position < reply.tokens and not reply.piece(position):
            position += 1
        assert position < reply.tokens and reply.piece(position) == text, "the client got other bytes than the engine made"
        return position + 1

    def script_of(self, name: str, seen: Seen) -> Script:
        """The whole reply that the engine has for this exchange."""
        prompt = self.prompts[name]
        return script(prompt, 0, ReplyBounds(natural_output_tokens(prompt), seen.acquire.max_output_tokens))

    def answered(self, answer: SimAnswer, record: GenerationRecord, text: str) -> None:
        """The end that the client sees is the end that was decided; a whole answer only once it is durable."""
        self.catch_up()
        seen = self.seen[record.generation_id]
        end = self.durable.ends.get(seen.id)
        assert record.status not in (Status.QUEUED, Status.RUNNING)
        assert seen.end is not None
        if not seen.unbooked:
            assert (record.status, record.finish_reason) == (seen.end.status, seen.end.finish_reason)
        if record.posted:
            assert end is not None and end.status is record.status, f"{answer.name}: posted before it is durable"
        if not seen.acquire.stream and record.status is Status.COMPLETED:
            reply = self.script_of(answer.name, seen)
            assert end is not None and record.posted, f"{answer.name}: answered before its settlement is durable"
            assert text == "".join(map(reply.piece, range(reply.tokens)))
            self._with_output.add(self.prompts[answer.name])
        else:
            assert not text or (seen.acquire.stream and record.status is Status.COMPLETED)

    def refused(self, answer: SimAnswer, error: WeirError) -> None:
        """A refusal shows what happened at the door."""
        self.note(f"refused {answer.name} {error.code}")
