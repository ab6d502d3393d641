"""Timelines of the latest requests, so that an operator can ask why one went as it did: a bounded ring in the coordinator.

It is told what happened, keeps figures and names as they were, and renders only what is asked for. It decides nothing, and
never keeps prompt or output text. The oldest request is forgotten first, and within one the oldest event. What is said of a
request that is forgotten is dropped.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, TypeAlias

import msgspec

from weir import errors
from weir.coordinator.candidates import NO_CANDIDATES, Candidate, Candidates
from weir.coordinator.execution import Execution
from weir.coordinator.sessions import Sessions
from weir.core.admission import Admit
from weir.core.endings import FinishReason
from weir.core.ledger.book import Taken
from weir.core.ledger.records import BucketTake, EndRecord, ReleaseRecord, SettleRecord
from weir.core.routing.replica import Replica
from weir.core.tenancy import Scope
from weir.messages import Acquire, Down, EndBooked, Ended, EndUnbooked, Finish, GenerationRecord, Granted, Stopped
from weir.ports import Clock
from weir.units import NANOS_PER_MILLI, Millis, Nanos, ms_from_ns

EVENTS_MAX = 32
"""Of one request: twice what two attempts make."""

_REJECTED_SHARE = 4
"""One rejected request is kept for so many executions."""

_REJECTED = 0
"""Stands for the execution's number where there is none."""

_Key: TypeAlias = tuple[str, str, int]
_Event: TypeAlias = tuple[Nanos, str, Any]


class DoorFigures(msgspec.Struct, frozen=True, gc=False):
    """The scheduling domain as the request met it. lanes: that can be used; waiting: admitted requests ahead of it.

    prefill_ms: predicted from its start to its first output.
    """

    pool: str
    lanes: int
    free: int
    waiting: int
    predicted_wait_ms: Millis
    prefill_ms: Millis


class _Timeline(msgspec.Struct):
    """number: rises as they are told. told_at_ms and told_ns: both clocks when it began. attempt: the last dispatched.

    times: how often its id was rejected.
    events: time, name, and what the figures are read from when they are asked for.
    """

    number: int
    asked: Acquire
    execution: int
    arrived_ns: Nanos
    told_ns: Nanos
    told_at_ms: Millis
    status: str
    events: list[_Event]
    dropped: int = 0
    delivery_steps: int = 0
    attempt: int = 0
    is_ended: bool = False
    times: int = 1

    @property
    def arrived_at_ms(self) -> Millis:
        """Wall-clock time of its arrival."""
        return self.told_at_ms - ms_from_ns(self.told_ns - self.arrived_ns)

    def add(self, at_ns: Nanos, event: str, source: Any) -> None:
        """One more event, and the oldest is forgotten beyond the bound."""
        if len(self.events) >= EVENTS_MAX:
            del self.events[0]
            self.dropped += 1
        self.events.append((at_ns, event, source))


class _Ring:
    """The latest timelines by key; the oldest is forgotten first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[_Key, _Timeline] = OrderedDict()
        self.forgot_until_ms: Millis | None = None  # when the latest that is forgotten was told of

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: _Key) -> _Timeline | None:
        return self._kept.get(key)

    def put(self, key: _Key, timeline: _Timeline) -> None:
        self._kept.pop(key, None)
        self._kept[key] = timeline
        if len(self._kept) > self._most:
            self.forgot_until_ms = self._kept.popitem(last=False)[1].told_at_ms

    def of(self, request_id: str, tenant: str | None) -> list[_Timeline]:
        return [kept for key, kept in self._kept.items() if key[1] == request_id and tenant in (None, key[0])]


class Timelines:
    """requests_max ≥ 1: executions that are kept; of rejected requests a quarter as many. All methods are for the loop."""

    def __init__(self, clock: Clock, requests_max: int) -> None:
        self._clock = clock
        self._executions = _Ring(requests_max)
        self._rejections = _Ring(max(1, requests_max // _REJECTED_SHARE))  # of its own: a refused loop evicts no execution
        self._began_at_ms = clock.wall_ms()
        self._told = 0

    # ── asked ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def __len__(self) -> int:
        return len(self._executions) + len(self._rejections)

    @property
    def since_ms(self) -> Millis:
        """Wall-clock time after which every request that the coordinator decided on is kept."""
        return max(ring.forgot_until_ms or self._began_at_ms for ring in (self._executions, self._rejections))

    def of(self, request_id: str, tenant: str | None = None) -> list[dict[str, Any]]:
        """What is kept of a request id, of one tenant or of all, latest first: linear in what is kept."""
        found = self._rejections.of(request_id, tenant) + self._executions.of(request_id, tenant)
        return [_shown(timeline) for timeline in sorted(found, key=lambda timeline: timeline.number, reverse=True)]

    # ── told at the door ─────────────────────────────────────────────────────────────────────────────────────────────

    def admitted(self, execution: Execution, taken: Taken, door: DoorFigures) -> None:
        """Everything was taken for a new execution."""
        now_ns = execution.admitted_ns
        began = (now_ns, "admitted", (execution.admit, taken, door))
        self._executions.put(
            (*execution.key, execution.id.execution),
            _Timeline(
                self._next_number(),
                execution.acquire,
                execution.id.execution,
                execution.arrived_ns,
                now_ns,
                self._clock.wall_ms(),
                "queued",
                [began],
            ),
        )

    def rejected(self, asked: Acquire, refusal: errors.WeirError, door: DoorFigures | None) -> None:
        """Nothing was taken. A rejected request id that is rejected again is kept once, as it was the last time."""
        now_ns, key = self._clock.monotonic_ns(), (asked.tenant, asked.request_id)
        figures = {
            "code": refusal.code,
            "detail": refusal.detail,
            "figures": refusal.members,
            "retry_after_ms": refusal.retry_after_ms,
            "predicted_wait_ms": door.predicted_wait_ms if door is not None and door.lanes else None,
            "door": door,
        }
        arrived_ns, wall_ms = now_ns - asked.waited_ns, self._clock.wall_ms()
        began = (now_ns, "rejected", figures)
        timeline = _Timeline(self._next_number(), asked, _REJECTED, arrived_ns, now_ns, wall_ms, "rejected", [began])
        if before := self._rejections.get((*key, _REJECTED)):
            timeline.times += before.times
        self._rejections.put((*key, _REJECTED), timeline)

    def _next_number(self) -> int:
        self._told += 1
        return self._told

    # ── told of an execution ─────────────────────────────────────────────────────────────────────────────────────────

    def hold_is_durable(self, execution: Execution) -> None:
        """The hold's record is in the store."""
        self._add(execution, "hold_durable", None)

    def queued(self, execution: Execution, position: int | None, ahead: int) -> None:
        """It has to wait. position: its place in its flow, 0 first, if known; ahead: how many others of the domain wait."""
        self._add(execution, "queued", {"position": position, "ahead": ahead})

    def considered(self, execution: Execution, candidates: Candidates) -> None:
        """It might have gone, and no candidate took it; said again before anything else happened, the last one is kept."""
        timeline = self._timeline(execution)
        if timeline is None:
            return
        times = 1
        if timeline.events and timeline.events[-1][1] == "considered":
            times += timeline.events.pop()[2]["times"]
        timeline.add(self._clock.monotonic_ns(), "considered", {"times": times, **_kept_of(candidates)})

    def dispatched(self, execution: Execution, replica: Replica, candidates: Candidates = NO_CANDIDATES) -> None:
        """Its last placement's attempt was dispatched; said twice, the first counts. candidates: before the lane was taken."""
        timeline, placement = self._timeline(execution), execution.placement
        if timeline is None or placement is None or placement.attempt <= timeline.attempt:
            return
        timeline.attempt, timeline.status = placement.attempt, "running"
        figures = {"attempt": placement.attempt, "replica": replica.name, "lane": placement.lane, **_kept_of(candidates)}
        timeline.add(placement.lane_taken_ns, "dispatched", figures)

    def first_output(self, execution: Execution) -> None:
        """The first output was handed to its client."""
        self._add(execution, "first_output", None)

    def stepped(self, execution: Execution) -> None:
        """One more step of delivery was asked for, beyond the dispatch's own."""
        if (timeline := self._timeline(execution)) is not None:
            timeline.delivery_steps += 1

    def finished(self, execution: Execution, finish: Finish) -> None:
        """The gateway's account of an attempt's end, before what follows from it is decided."""
        self._add(execution, "finished", finish)

    def lost(self, execution: Execution, finish: Finish) -> None:
        """The attempt failed and is retried on another replica; what it used is the platform's."""
        if (timeline := self._timeline(execution)) is not None:
            timeline.status = "queued"
            timeline.add(self._clock.monotonic_ns(), "lost", {"attempt": finish.attempt, "reason": finish.reason})

    def stop_asked(self, execution: Execution, reason: FinishReason) -> None:
        """The coordinator asked the gateway to end it."""
        self._add(execution, "stop_asked", {"reason": reason})

    def stopped(self, execution: Execution, stopped: Stopped) -> None:
        """The engine runs nothing for an attempt any more, or did not confirm that."""
        self._add(execution, "stopped", stopped)

    def ended(self, execution: Execution, record: EndRecord) -> None:
        """Its end is decided; said twice, the first counts."""
        timeline = self._timeline(execution)
        if timeline is not None and not timeline.is_ended:
            timeline.is_ended, timeline.status = True, record.status
            timeline.add(execution.decided_ns, "ended", record)

    def end_is_durable(self, execution: Execution, record: GenerationRecord) -> None:
        """Its settlement or release is in the store, as this record says."""
        if (timeline := self._timeline(execution)) is not None:
            timeline.status = record.status
            timeline.add(self._clock.monotonic_ns(), "end_durable", record)

    def given_up(self, execution: Execution) -> None:
        """Its settlement is late and its answer was not streamed, so that the output was dropped."""
        self._add(execution, "given_up", {"reason": FinishReason.LEDGER_UNAVAILABLE})

    def _timeline(self, execution: Execution) -> _Timeline | None:
        named = execution.id
        return self._executions.get((named.tenant, named.request_id, named.execution))

    def _add(self, execution: Execution, event: str, source: Any) -> None:
        if (timeline := self._timeline(execution)) is not None:
            timeline.add(self._clock.monotonic_ns(), event, source)


class WatchedSessions(Sessions):
    """Sessions whose messages about an execution's start and end are also told to its timeline."""

    def __init__(self, timelines: Timelines) -> None:
        super().__init__()
        self.timelines = timelines

    def deliver(self, execution: Execution, message: Down) -> None:
        """Remember it, and tell the gateway that carries the execution."""
        if type(message) in _WATCHED:
            self._tell(execution, message)
        super().deliver(execution, message)

    def _tell(self, execution: Execution, message: Down) -> None:
        match message:
            case Granted() if execution.placement is not None:
                self.timelines.dispatched(execution, execution.placement.replica)
            case Ended() if execution.end_record is not None:
                self.timelines.ended(execution, execution.end_record)
            case EndBooked(record=record):
                self.timelines.end_is_durable(execution, record)
            case EndUnbooked():
                self.timelines.given_up(execution)


_WATCHED = frozenset({Granted, Ended, EndBooked, EndUnbooked})


def _kept_of(candidates: Candidates) -> dict[str, Any]:
    kept: dict[str, Any] = {"candidates": candidates.kept} if candidates.kept else {}
    return kept | {"more_candidates": candidates.more} if candidates.more else kept


# ── rendering ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _shown(timeline: _Timeline) -> dict[str, Any]:
    """A timeline in plain values; times in milliseconds since the arrival, with one decimal."""
    asked = timeline.asked
    return {
        "tenant": asked.tenant,
        "request_id": asked.request_id,
        "execution": timeline.execution or None,
        "status": timeline.status,
        "arrived_at_ms": timeline.arrived_at_ms,
        "rejections": None if timeline.execution else timeline.times,
        "delivery_steps": timeline.delivery_steps,
        "dropped_events": timeline.dropped,
        "events": [*_events_of(timeline)],
    }


def _events_of(timeline: _Timeline) -> Iterator[dict[str, Any]]:
    yield {"event": "received", "at_ms": 0.0} | _received(timeline.asked)
    for at_ns, event, source in timeline.events:
        at_ms = round((at_ns - timeline.arrived_ns) / NANOS_PER_MILLI, 1)
        yield {"event": event, "at_ms": at_ms} | _plain(_figures(source))


def _figures(source: Any) -> dict[str, Any]:
    """What an event shows of what it was told with."""
    match source:
        case None:
            return {}
        case Finish(usage=None):
            return _fields(source, "attempt", "reason")
        case Finish(usage=usage):
            used = _fields(usage, *_TOKENS)
            return _fields(source, "attempt", "reason") | used | _fields(source, "delivered_tokens", "ttft_ms", "tpot_ms")
        case Stopped():
            return _fields(source, "attempt", "stop_ms", "confirmed")
        case SettleRecord(platform_microusd=platform):
            settled = _fields(source, "status", "finish_reason", *_TOKENS, "delivered_tokens", "cost_microusd")
            return settled | {"platform_cost_microusd": platform}
        case ReleaseRecord():
            return _fields(source, "status", "finish_reason")
        case GenerationRecord():
            return _fields(source, "status", "finish_reason", "cost_microusd")
        case (Admit() as admit, Taken() as taken, door):
            return _admission(admit, taken) | {"door": door}
        case _:
            return dict(source)


_TOKENS = ("input_tokens", "cached_input_tokens", "output_tokens", "basis")


def _fields(source: object, *names: str) -> dict[str, Any]:
    return {name: getattr(source, name) for name in names}


def _admission(admit: Admit, taken: Taken) -> dict[str, Any]:
    worst = admit.worst
    return {
        "held_microusd": worst.cost_microusd,
        "held_tokens": worst.tokens,
        "worst_input_tokens": worst.input_tokens,
        "worst_output_tokens": worst.output_tokens,
        "windows": taken.windows,
        "scopes": admit.scopes,
        "takes": taken.takes,
    }


def _received(asked: Acquire) -> dict[str, Any]:
    caller = _fields(asked, "application", "key", "alias", "revision", "surface", "service_class", "workload_class", "stream")
    size = _fields(asked, "input_tokens", "input_basis", "max_output_tokens", "choices")
    return caller | size | {"deadline_ms": asked.deadline_left_ms + ms_from_ns(asked.waited_ns)}


def _plain(value: Any) -> Any:
    """A figure in values that JSON has; what is None within it is left out."""
    match value:
        case Scope():
            return value.public()
        case BucketTake():
            place = _fields(value, "application", "key", "alias", "service_class")
            return _plain({"limit": value.limit, "units": value.units, **place})
        case Candidate() | DoorFigures():
            return _plain(msgspec.structs.asdict(value))
        case dict():
            return {name: _plain(part) for name, part in value.items() if part is not None}
        case list() | tuple():
            return [_plain(part) for part in value]
        case _:
            return value
