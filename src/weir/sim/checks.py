"""Independent checks of the invariants while a simulated cell runs: it hears every message, durable record and client byte.

It keeps its own figures (of money and limits its tally does), from what passes on the wire and from what is durable, and
asserts at each event. It shares no decision with the platform, changes nothing, and feeds all it hears into a trace hash, so
that two runs can be compared.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from weir.config import CoordinatorConfig
from weir.core.endings import FinishReason, Status
from weir.core.ledger.records import EndRecord, ExecutionId, HoldRecord, LedgerRecord, SettleRecord, StepRecord
from weir.core.registry.model import Pool
from weir.core.registry.snapshot import Snapshot
from weir.engines.simulated_text import ReplyBounds, Script, natural_output_tokens, script
from weir.errors import WeirError
from weir.gateway.client import Accepted
from weir.messages import (
    Acquire,
    Admitted,
    DeliveryBooked,
    Down,
    EndBooked,
    Ended,
    EndUnbooked,
    Finish,
    FleetView,
    GenerationRecord,
    Granted,
    HoldBooked,
    Progress,
    Rejected,
    Stopped,
    Up,
)
from weir.ports import Clock, EngineCall
from weir.sim.clients import SimAnswer
from weir.sim.places import Places, Reach
from weir.sim.tally import Counted, Tally
from weir.units import Nanos, Tokens, ns_from_ms


class Records(Protocol):
    """A ledger whose durable records can be read in order."""

    @property
    def records(self) -> list[LedgerRecord]: ...


@dataclass(slots=True)
class Seen:
    """An admitted execution as the wire showed it. process: which one admitted it; lanes: (replica, lane) by attempt while
    taken; handed: tokens that its client got; waits_since_ns: admitted, or queued again; failed: the report of a first attempt
    that might be retried.
    """

    acquire: Acquire
    id: ExecutionId
    acquired_ns: Nanos
    counted: Counted
    reach: Reach
    process: int
    admitted_ns: Nanos
    waits_since_ns: Nanos
    is_queued: bool = True
    attempts: int = 0
    lanes: dict[int, tuple[str, int]] = field(default_factory=dict)
    replica: str | None = None
    failed: Finish | None = None
    had_output: bool = False
    end: GenerationRecord | None = None
    booked: bool = False
    unbooked: bool = False
    lost: bool = False  # the process died before its end was known
    handed: Tokens = 0

    @property
    def was_waiting(self) -> bool:
        """Whether its one attempt failed and was to be followed by another that never came."""
        return self.failed is not None and self.attempts == 1


@dataclass(slots=True)
class Durable:
    """What the ledger's durable records say. late: records that are to come after an end, and to change nothing.

    may_be_unheard: a dispatch that no gateway heard of, because its coordinator died, is made again.
    """

    may_be_unheard: bool = False
    late: list[LedgerRecord] = field(default_factory=list)
    late_count: int = 0
    holds: dict[ExecutionId, HoldRecord] = field(default_factory=dict)
    steps: dict[ExecutionId, list[StepRecord]] = field(default_factory=dict)
    ends: dict[ExecutionId, EndRecord] = field(default_factory=dict)

    def add(self, record: LedgerRecord) -> None:
        """One more record; a second hold or end of an execution, or a step after its end, is a violation."""
        name = record.id
        if record in self.late:
            assert name in self.ends, f"{name} is late and had not ended"
            self.late_count += 1
            return
        if isinstance(record, HoldRecord):
            assert name not in self.holds, f"{name} is held twice"
            self.holds[name] = record
            return
        assert name in self.holds, f"{name} has a record without a hold"
        assert name not in self.ends, f"{name} goes on after its end"
        if isinstance(record, StepRecord):
            steps = self.steps.setdefault(name, [])
            last = steps[-1] if steps else None
            goes_on = last is None or record.delivered_max > last.delivered_max or record.attempt > last.attempt
            assert goes_on or self.may_be_unheard, f"{name} steps back"
            steps.append(record)
        else:
            self.ends[name] = record

    def is_of(self, name: ExecutionId, generation_id: str) -> bool:
        """Whether an execution's hold is this one's, and not of another that came after a hold was lost with its process."""
        return name in self.holds and self.holds[name].generation_id == generation_id

    def delivered_max(self, name: ExecutionId) -> Tokens:
        """The durable bound of what may have been delivered."""
        steps = self.steps.get(name)
        return steps[-1].delivered_max if steps else 0


class Checker:
    """The witness of one world. prompts: by the exchange's name; ids: tenant and request id by prompt; seen: by generation.

    queues: who waited after each admission; retries: of granted second attempts, and since when they waited.
    """

    def __init__(self, clock: Clock, ledger: Records, config: CoordinatorConfig, pools: Sequence[Pool]) -> None:
        self._clock = clock
        self._ledger = ledger
        self._process = 0
        self._read = 0
        self._trace = hashlib.sha256()
        self._acquired: dict[int, tuple[Acquire, Nanos]] = {}
        self._by_ref: dict[int, Seen] = {}
        self._with_output: set[str] = set()
        self._freed: set[tuple[str, str]] = set()
        self.config = config
        self.tally = Tally(clock)
        self.places = Places(pools, config)
        self.queues: list[list[Seen]] = []
        self.retries: list[tuple[Seen, Nanos]] = []
        self.prompts: dict[str, str] = {}
        self.ids: dict[str, tuple[str, str]] = {}
        self.seen: dict[str, Seen] = {}
        self.durable = Durable()
        self.rejections: list[str] = []
        self._rules: dict[type, Callable[..., None]] = {
            Acquire: self._on_acquire,
            Admitted: self._on_admitted,
            Rejected: self._on_rejected,
            Granted: self._on_granted,
            Progress: self._on_progress,
            Finish: self._on_finish,
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

    def cell_started(self, snapshot: Snapshot) -> None:
        """A coordinator begins with this configuration on what is durable: nothing is open."""
        self.catch_up()
        self._process += 1
        assert set(self.durable.ends) == set(self.durable.holds), "a hold is left open by recovery"
        self.places.begin(snapshot)
        self.tally.begin(snapshot, [(hold, self.durable.ends[name]) for name, hold in self.durable.holds.items()])

    def cell_died(self) -> None:
        """The process is gone, with everything that it had not written."""
        self.note("died")
        for seen in self._by_ref.values():
            seen.lost = not seen.booked
        self._acquired, self._by_ref = {}, {}
        self.places.die()

    # ── the wire ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def heard(self, message: Up | Down) -> None:
        """A message passes."""
        if not isinstance(message, Snapshot | FleetView):
            self.note(repr(message))
        if isinstance(message, Progress | Finish | Stopped):
            self.places.compare()  # before it takes effect
        rule = self._rules.get(type(message))
        if rule is not None:
            rule(message)
        if isinstance(message, Granted):
            self.places.compare()

    def heard_of_stale(self, message: Up | Down) -> None:
        """A message of a process that is not the writer any more: nothing of it is booked."""
        self.note(f"stale {message!r}" if not isinstance(message, Snapshot | FleetView) else "stale")
        assert not isinstance(message, HoldBooked | DeliveryBooked | EndBooked), "a stale process wrote"

    def _on_snapshot(self, snapshot: Snapshot) -> None:
        self.tally.publish(snapshot)
        self.places.publish(snapshot)

    def _on_acquire(self, acquire: Acquire) -> None:
        self._acquired[acquire.ref] = (acquire, self._clock.monotonic_ns())

    def _on_rejected(self, rejected: Rejected) -> None:
        acquire, _ = self._acquired.pop(rejected.ref)
        self.tally.refuse(acquire, rejected)
        self.places.refuse(acquire, rejected)
        self.rejections.append(rejected.code)

    def _on_admitted(self, admitted: Admitted) -> None:
        acquire, acquired_ns = self._acquired.pop(admitted.ref)
        name = ExecutionId(acquire.tenant, acquire.request_id, admitted.execution)
        self._check_repeat(name)
        now_ns = self._clock.monotonic_ns()
        counted, reach = self.tally.admit(name, acquire), self.places.admit(acquire)
        seen = Seen(acquire, name, acquired_ns, counted, reach, self._process, now_ns, now_ns)
        assert acquire.generation_id not in self.seen
        assert now_ns < self._deadline_ns(seen), f"{name} was admitted after its deadline"
        self.seen[acquire.generation_id] = self._by_ref[admitted.ref] = seen
        self.queues.append([other for other in self._by_ref.values() if other.is_queued])

    def _check_repeat(self, name: ExecutionId) -> None:
        """An id runs again only if its latest end delivered and cost nothing, or is older than ids are kept."""
        self.catch_up()
        if name.execution == 1:
            return
        before = ExecutionId(name.tenant, name.request_id, name.execution - 1)
        end = self.durable.ends.get(before)
        running = [seen for seen in self._by_ref.values() if seen.id == before]
        assert all(seen.end is not None for seen in running), f"{name} runs beside {before}"
        if end is None or self._clock.wall_ms() - end.at_ms > self.config.request_id_ms:
            assert end is not None or running, f"{name} follows an execution that is not known"
            self._freed.add((name.tenant, name.request_id))
        elif isinstance(end, SettleRecord):
            free = end.status is not Status.COMPLETED and not (end.delivered_tokens or end.cost_microusd)
            assert free, f"{name} runs again after it delivered or was charged"

    def _deadline_ns(self, seen: Seen) -> Nanos:
        return seen.acquired_ns + ns_from_ms(seen.acquire.deadline_left_ms)

    def _on_granted(self, granted: Granted) -> None:
        seen, now_ns = self._by_ref[granted.ref], self._clock.monotonic_ns()
        assert seen.is_queued and seen.end is None, f"{seen.id} is granted and was not waiting"
        assert not seen.had_output, f"{seen.id} is dispatched again after output"
        assert now_ns < self._deadline_ns(seen), f"{seen.id} is dispatched past its deadline"
        assert now_ns - seen.waits_since_ns <= ns_from_ms(self.config.queue_wait_ms), f"{seen.id} waited too long"
        seen.is_queued = False
        seen.attempts += 1
        assert seen.attempts == granted.attempt <= 2
        if granted.attempt == 2:
            self._check_retry(seen, granted.replica.name)
        seen.replica = granted.replica.name
        self.places.grant(seen.acquire, seen.reach, granted)
        seen.lanes[granted.attempt] = (granted.replica.name, granted.lane)

    def _check_retry(self, seen: Seen, replica: str) -> None:
        """Only after a failure of ours, and elsewhere."""
        assert seen.failed is not None and seen.failed.attempt == 1, f"{seen.id} is retried and had not failed"
        assert seen.replica != replica, f"{seen.id} is retried where it failed"
        self.retries.append((seen, seen.waits_since_ns))

    def _on_progress(self, progress: Progress) -> None:
        seen = self._by_ref.get(progress.ref)
        if seen is None:
            return
        if progress.first_output:
            seen.had_output = True
        if seen.end is None and not seen.is_queued and progress.attempt == seen.attempts and progress.attempt in seen.lanes:
            self.places.progress(*seen.lanes[progress.attempt], progress)

    def _on_finish(self, finish: Finish) -> None:
        """A failure of a first attempt without output may be followed by another grant; until it ends, it waits."""
        seen = self._by_ref.get(finish.ref)
        if seen is None or seen.end is not None or finish.attempt != 1 or seen.attempts != 1 or seen.had_output:
            return
        if finish.reason in ("engine_error", "replica_lost", "stalled") and not finish.delivered_tokens:
            seen.failed = finish
            seen.is_queued, seen.waits_since_ns = True, self._clock.monotonic_ns()

    def _on_stopped(self, stopped: Stopped) -> None:
        seen = self._by_ref.get(stopped.ref)
        if seen is not None and stopped.confirmed and stopped.attempt in seen.lanes:
            self.places.free(*seen.lanes.pop(stopped.attempt))

    def _on_ended(self, ended: Ended) -> None:
        seen = self._by_ref[ended.ref]
        assert seen.end is None, f"{seen.id} ended twice"
        assert ended.record.status not in (Status.QUEUED, Status.RUNNING)
        seen.end, seen.is_queued = ended.record, False
        self.places.end(seen.acquire, ended)
        self.tally.end(seen.counted, ended.record, seen.handed, was_waiting=seen.was_waiting)

    def _on_unbooked(self, unbooked: EndUnbooked) -> None:
        seen = self._by_ref[unbooked.ref]
        assert not seen.acquire.stream and not seen.booked and seen.end is not None
        assert unbooked.record.finish_reason is FinishReason.LEDGER_UNAVAILABLE
        seen.unbooked = True
        self.tally.post(seen.counted, unbooked.record, 0, was_waiting=seen.was_waiting)
        self.tally.doubt(seen.id.tenant, seen.counted, ended=False)

    def _on_booked(self, booked: EndBooked) -> None:
        self.catch_up()
        seen = self._by_ref[booked.ref]
        end = self.durable.ends.get(seen.id)
        assert end is not None and not seen.booked, f"{seen.id} is booked twice, or not durable"
        record = booked.record
        assert (end.status, end.finish_reason) == (record.status, record.finish_reason)
        seen.booked, seen.end = True, record
        self.tally.post(seen.counted, record, seen.handed, was_waiting=seen.was_waiting)
        self.tally.doubt(seen.id.tenant, seen.counted, ended=True)
        self.tally.check_hold(seen.counted, self.durable.holds[seen.id])
        self.tally.check_returns(seen.counted, end)

    # ── engines ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def engine_started(self, call: EngineCall) -> None:
        """An engine is about to run a prompt; prompts name requests here."""
        self.note(f"start {call.replica.name} {call.lane}")
        assert isinstance(call.prompt, str)
        self.places.started(call.replica, self.ids[call.prompt][0], call.cache_salt)
        is_free = self.ids.get(call.prompt) in self._freed
        assert is_free or call.prompt not in self._with_output, "an engine runs a request again whose client got output"

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
        assert record.status not in (Status.QUEUED, Status.RUNNING)
        seen = self.seen.get(record.generation_id)
        if seen is None or seen.lost:  # by a process that is not the writer any more
            assert not record.posted and (answer.accepted is not None or not text)
            return
        end = self.durable.ends.get(seen.id)
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
