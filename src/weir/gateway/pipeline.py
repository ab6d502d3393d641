"""One request from an authenticated caller to the last byte, top to bottom: read this first.

    plan ── refuse                                    what can never work
      └ acquire ── refuse                             what admission refuses
          └ wait: grant | early headers | end         queued; a disconnect or the deadline ends it here too
              └ open · relay                          the engine's stream, event by event
                  └ settle · end                      exactly one terminal event or answer

The coroutine here only walks the phases. What happens inside a phase is `relay`'s, what is decided is the coordinator's.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, TypeAlias

from weir import errors
from weir.config import GatewayConfig
from weir.core.endings import FinishReason, Status
from weir.core.metering import InputBasis
from weir.core.output import Delta
from weir.core.request import InferenceRequest
from weir.core.tenancy import Principal
from weir.gateway.answer_bounds import whole_answer_bytes_max
from weir.gateway.client import Accepted, Answer
from weir.gateway.inbox import LOST_RETRY_MS, Inbox
from weir.gateway.kept_client import KeptClient
from weir.gateway.kept_reader import StreamMeta
from weir.gateway.planning import EngineFor, Ids, Plan, Planner, acquire_of
from weir.gateway.relay import Relay, RelayParts
from weir.gateway.retention import RetentionDesk
from weir.kept_streams import StreamName
from weir.messages import Admitted, GenerationRecord, Rejected, StandingView
from weir.ports import Clock, CoordinatorLink, Entropy
from weir.telemetry import Telemetry
from weir.units import Millis, Tokens, ms_from_ns, ns_from_ms

_TICK_S = 0.25
_LAST_WRITES_S = 5.0
_STANDING_S = 0.25
"""How long headers wait for a coordinator whose link is away."""
_DRAINING_RETRY_MS: Millis = 1_000
_ID_BYTES = 12
_EVENT_BYTES_PER_BYTE = 4
"""What events of an output take at most beside it, about: each has a name, a number and JSON around a token."""

SecureAs: TypeAlias = Callable[[str, list[Delta]], Awaitable[None]]
"""Makes the output of a generation of this id durable. Raises StoreFault, and the request fails."""

Replay: TypeAlias = Callable[[GenerationRecord, StandingView], Awaitable[bool]]
"""Shows what was kept of a generation that has ended; False, and nothing shown, where nothing was."""


class Gateway:
    """A gateway's data plane. Start `run` before the first request; `inbox` must be connected to a coordinator.

    retained: keeps streams; None where none can be kept.
    """

    def __init__(
        self, clock: Clock, entropy: Entropy, config: GatewayConfig, inbox: Inbox, planner: Planner, telemetry: Telemetry
    ) -> None:
        self.retained: RetentionDesk | None = None
        self._clock = clock
        self._entropy = entropy
        self._config = config
        self._planner = planner
        self._telemetry = telemetry
        self._relays: set[Relay] = set()
        self._tasks: asyncio.TaskGroup | None = None
        self._parts: RelayParts | None = None
        self._closed = asyncio.Event()
        self._draining = False
        self._quiet = asyncio.Event()
        self._quiet.set()
        self.inbox = inbox

    def connect(
        self,
        link: CoordinatorLink,
        engine_for: EngineFor,
        step_tokens: Tokens,
        store_wait_ms: Millis,
        is_heard: Callable[[], bool] = lambda: True,
    ) -> None:
        """Use this link; once, before `run`. is_heard: whether its coordinator was heard lately."""
        self.inbox.link = link
        self._parts = RelayParts(
            loop=asyncio.get_running_loop(),
            clock=self._clock,
            link=link,
            config=self._config,
            step_tokens=step_tokens,
            store_wait_ms=store_wait_ms,
            engine_for=engine_for,
            salt_of=self._planner.cache_salt,
            spawn=self._spawn,
            reopen=self.inbox.reopen,
            settled=self.inbox.settled,
            is_heard=is_heard,
        )

    def keep_with(self, retained: RetentionDesk) -> None:
        """Keep streams; once, before `run`, so that what is over is swept."""
        self.retained = retained
        retained.connect(self._config, self._telemetry, self._spawn)

    async def run(self) -> None:
        """Tick the relays and own the gateway's tasks until `close`."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            upkeep = [tasks.create_task(self._tick_forever())]
            if self.retained is not None:
                upkeep.append(tasks.create_task(self.retained.sweep_forever()))
            await self._closed.wait()
            for task in upkeep:
                task.cancel()

    def close(self) -> None:
        """Let `run` return once engines confirmed their stops."""
        self._closed.set()

    async def drain(self, grace_ms: Millis) -> None:
        """Refuse new work, let what is here finish within the grace, then end the rest as `shutdown`."""
        self._draining = True
        assert self._parts is not None
        try:
            await asyncio.wait_for(self._quiet.wait(), grace_ms / 1e3)
        except TimeoutError:
            for relay in list(self._relays):
                relay.stop(FinishReason.SHUTDOWN)
            with contextlib.suppress(TimeoutError):  # a client that reads nothing is left
                await asyncio.wait_for(self._quiet.wait(), self._parts.store_wait_ms / 1e3 + _LAST_WRITES_S)
        if self.retained is not None:
            self.retained.close()

    @property
    def in_flight(self) -> int:
        """Requests between acquire and their last byte."""
        return len(self._relays)

    # ── one request ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def generate(
        self,
        principal: Principal,
        request: InferenceRequest,
        answer: Answer,
        surface: str,
        replay: Replay | None = None,
        secure: SecureAs | None = None,
    ) -> None:
        """Serve one generation to its end; every failure is answered in the surface's shape.

        The client of one that is retained is a KeptClient. replay: answers a request id that has been served. secure: makes the
        output durable, under its generation's id, before it is charged for; only for what is not streamed.
        """
        if (closed := self._refusal_of_state()) is not None:
            await self._refuse(closed, answer)
            return
        try:
            plan = await self._planner.plan(principal, request, request.request_id or self._new_id("req"))
        except errors.WeirError as refusal:
            self.count_refusal(refusal)
            await answer.refuse(refusal, await self.standing(principal, request.model_alias), None)
            return
        if answer.client.is_lost:
            self._telemetry.left_early.inc()
            return
        if (closed := self._refusal_of_state()) is not None:  # again: a plan takes a while
            await self._refuse(closed, answer)
            return
        assert self._parts is not None
        relay = Relay(self._parts, plan, answer)
        relay.ref = self.inbox.open(relay)
        self._relays.add(relay)
        self._quiet.clear()
        answer.client.watch(relay)
        try:
            ids = Ids(relay.ref, plan.request_id, self._new_id("gen"))
            relay.secure = partial(secure, ids.generation_id) if secure is not None else None
            await self._serve(relay, plan, answer, ids, surface, replay)
        finally:
            answer.client.watch(None)
            relay.stop(FinishReason.DISCONNECT)
            self._relays.discard(relay)
            if not self._relays:
                self._quiet.set()
            self.inbox.close(relay.ref)

    async def count_input(self, principal: Principal, request: InferenceRequest) -> tuple[Tokens, InputBasis]:
        """Input tokens of a request that is not made: nothing is admitted, taken or recorded. Raises what refuses a request."""
        if (closed := self._refusal_of_state()) is not None:
            raise closed
        return await self._planner.count(principal, request, self._new_id("req"))

    def _refusal_of_state(self) -> errors.WeirError | None:
        if self.inbox.is_lost:
            return _without_coordinator()
        if self.inbox.fresh_ms == 0:
            detail = "The approved configuration could not be checked for too long."
            return errors.SnapshotExpired(detail, retry_after_ms=LOST_RETRY_MS)
        if self._draining:
            return errors.Draining("This gateway is draining.", retry_after_ms=_DRAINING_RETRY_MS)
        return None

    async def _serve(self, relay: Relay, plan: Plan, answer: Answer, ids: Ids, surface: str, replay: Replay | None) -> None:
        waited_ns = self._clock.monotonic_ns() - answer.client.read_ns
        if waited_ns >= ns_from_ms(plan.deadline_ms):
            await self._refuse_late(plan, answer, ms_from_ns(waited_ns))
            return
        assert self._parts is not None
        left_s = plan.deadline_ms / 1e3 - waited_ns / 1e9
        deadline = self._parts.loop.call_later(left_s, relay.stop, FinishReason.DEADLINE)
        try:
            if plan.request.retain and not await self._keep(plan, ids, answer, surface):
                return
            if not relay.is_over:  # it may have ended while its stream was begun
                waited_ns = self._clock.monotonic_ns() - answer.client.read_ns
                prefix = self._planner.prefix(plan)
                relay.acquire(acquire_of(plan, ids, self._planner.digest(plan), prefix, surface, waited_ns))
            await self._serve_decided(relay, plan, answer, ids, replay)
        finally:
            deadline.cancel()
            if plan.request.retain and not isinstance(relay.decision, Admitted):
                await self._drop_kept(plan, ids)

    async def _keep(self, plan: Plan, ids: Ids, answer: Answer, surface: str) -> bool:
        """Begin its stream, or refuse."""
        assert isinstance(answer.client, KeptClient) and self.retained is not None
        meta = StreamMeta(surface)
        try:
            name = StreamName(plan.principal.tenant, ids.generation_id)
            await self.retained.begin(answer.client, name, meta, _EVENT_BYTES_PER_BYTE * whole_answer_bytes_max(plan))
        except errors.WeirError as refusal:
            self.count_refusal(refusal)
            await answer.refuse(refusal, await self.standing(plan.principal, plan.alias.name), None)
            return False
        return True

    async def _drop_kept(self, plan: Plan, ids: Ids) -> None:
        """What was not admitted has no stream."""
        assert self.retained is not None
        with contextlib.suppress(errors.StreamStoreUnavailable):  # its time runs out in any case
            await self.retained.delete(plan.principal.tenant, ids.generation_id)

    async def _serve_decided(self, relay: Relay, plan: Plan, answer: Answer, ids: Ids, replay: Replay | None) -> None:
        """Wait for the decision, which may be late, never come, or have to be asked for again, and go on by it."""
        await relay.until(lambda: relay.decision is not None or relay.is_over)
        accepted = None
        if isinstance(relay.decision, Admitted):
            accepted = _accepted(plan, ids, relay.decision)
            if plan.request.retain and self.retained is not None:
                self._spawn(self.retained.admitted(plan.principal.tenant))
            if plan.request.stream:
                await self._open_stream(relay, answer, accepted)
            await relay.until(lambda: relay.is_over)
        match relay.decision:
            case Rejected() as rejected:
                if not await _is_replayed(rejected, replay):
                    await answer.refuse(error_of(rejected), rejected.standing, rejected.generation)
            case Admitted() as admitted:
                await self._end_admitted(relay, plan, answer, accepted or _accepted(plan, ids, admitted))
            case None:
                await self._end_undecided(relay, plan, answer)

    async def _end_undecided(self, relay: Relay, plan: Plan, answer: Answer) -> None:
        """It ended before anything was decided."""
        if relay.shows_no_answer:
            self._telemetry.left_early.inc()
        elif relay.is_lost:
            await self._refuse(_without_coordinator(), answer)
        elif relay.is_too_late:
            detail = "Nothing was decided before the deadline."
            members = {"predicted_ms": plan.deadline_ms, "deadline_ms": plan.deadline_ms}  # at least as long as it waited
            refusal = errors.DeadlineUnmeetableNow(detail, members=members, retry_after_ms=LOST_RETRY_MS)
            await self._refuse(refusal, answer)
        else:
            await self._refuse(errors.Draining("This gateway is draining.", retry_after_ms=_DRAINING_RETRY_MS), answer)

    async def _end_admitted(self, relay: Relay, plan: Plan, answer: Answer, accepted: Accepted) -> None:
        if relay.record is not None and not relay.shows_no_answer:
            await self._wait_until_durable(relay, plan, answer, relay.record)
        await self._end(relay, answer, accepted, streamed=plan.request.stream)

    async def _open_stream(self, relay: Relay, answer: Answer, accepted: Accepted) -> None:
        """Send the headers when dispatched with a durable hold, or early once that hold is durable; not if it ends before."""
        early_ms = self._config.early_headers_ms
        if not await relay.until(lambda: relay.is_startable or relay.is_over, early_ms):
            await relay.until(lambda: relay.hold_durable or relay.is_over)
        if not relay.is_over:
            await answer.open(accepted)
            relay.open_output()

    async def _wait_until_durable(self, relay: Relay, plan: Plan, answer: Answer, record: GenerationRecord) -> None:
        """The end is decided: wait for its record, as long as somebody waits for the answer, and never for long."""
        assert self._parts is not None
        completed = record.status is Status.COMPLETED
        if completed and relay.is_open:
            answer.finish_reason(record)
        # For a whole answer the coordinator bounds this: it tells when the settlement is durable, and when it is given up.
        bound_ms = None if completed and not plan.request.stream else self._parts.store_wait_ms
        await relay.until(lambda: relay.end_booked or relay.is_lost or relay.shows_no_answer, bound_ms)

    async def _end(self, relay: Relay, answer: Answer, accepted: Accepted, *, streamed: bool) -> None:
        if relay.shows_no_answer:
            answer.client.abort()
            return
        record = relay.record
        if record is None or (relay.is_lost and not relay.end_booked and not streamed):
            record = _lost_record(relay, accepted)  # a whole answer is shown only once its settlement is durable
        pieces = relay.whole_output() if record.status is Status.COMPLETED else []
        if isinstance(answer.client, KeptClient):
            answer.client.expect_end(record, accepted.standing)
        await answer.end(record, pieces, accepted.standing)

    async def _refuse(self, refusal: errors.WeirError, answer: Answer) -> None:
        self.count_refusal(refusal)
        await answer.refuse(refusal, None, None)

    async def _refuse_late(self, plan: Plan, answer: Answer, waited_ms: Millis) -> None:
        refusal = errors.DeadlineInfeasible(
            f"The deadline of {plan.deadline_ms} ms passed before the request could be admitted.",
            members={"field": "deadline_ms", "accepted": f"above {waited_ms}", "deadline_ms": plan.deadline_ms},
        )
        self.count_refusal(refusal)
        await answer.refuse(refusal, await self.standing(plan.principal, plan.alias.name), None)

    def count_refusal(self, refusal: errors.WeirError) -> None:
        """A request for a generation was refused before the coordinator saw it."""
        self._telemetry.rejected(refusal.code)

    # ── small ────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def standing(self, principal: Principal, alias: str) -> StandingView:
        """The caller's per-minute limits, for headers of what the coordinator did not see; none while it is lost."""
        try:
            async with asyncio.timeout(_STANDING_S):
                return await self.inbox.standing(principal, alias)
        except (errors.CoordinatorLost, TimeoutError):
            return StandingView()

    def _new_id(self, kind: str) -> str:
        return f"{kind}-{self._entropy.token(_ID_BYTES).hex()}"

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        assert self._tasks is not None
        if self._closed.is_set():  # nobody listens any more
            work.close()
        else:
            self._tasks.create_task(work)

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            now_ns = self._clock.monotonic_ns()
            for relay in list(self._relays):
                relay.tick(now_ns)


async def _is_replayed(rejected: Rejected, replay: Replay | None) -> bool:
    """Whether an id that has been served was answered with what was kept."""
    has_ended = rejected.code == errors.OutputNotRetained.code
    if not has_ended or rejected.generation is None or replay is None:
        return False
    return await replay(rejected.generation, rejected.standing)


def _accepted(plan: Plan, ids: Ids, admitted: Admitted) -> Accepted:
    return Accepted(ids.generation_id, ids.request_id, plan.alias.name, plan.revision.id, admitted.standing, plan.input_tokens)


def _without_coordinator() -> errors.WeirError:
    return errors.CoordinatorLost("No coordinator can be reached.", retry_after_ms=LOST_RETRY_MS)


def _lost_record(relay: Relay, accepted: Accepted) -> GenerationRecord:
    """What the gateway can say of a request whose coordinator it lost: what it cost is settled without it."""
    assert isinstance(relay.decision, Admitted)
    error = errors.CoordinatorLost
    return GenerationRecord(
        generation_id=accepted.generation_id,
        request_id=accepted.request_id,
        execution=relay.decision.execution,
        alias=accepted.alias,
        revision=accepted.revision,
        status=Status.FAILED,
        finish_reason=FinishReason.COORDINATOR_LOST,
        error_code=error.code,
    )


def error_of(rejected: Rejected) -> errors.WeirError:
    """A rejection's message as the error that surfaces show."""
    return errors.ERROR_BY_CODE[rejected.code](
        rejected.detail,
        members=rejected.members,
        retry_after_ms=rejected.retry_after_ms,
        should_retry=rejected.should_retry,
    )
