"""A gateway is gone: whatever it carried ends once and for the platform, and everything that it held is there for others."""

import asyncio
from collections.abc import Callable
from random import Random

import pytest
from tests.simulation.session_stand import (
    INPUT_TOKENS,
    OUTPUT_TOKENS,
    REQUESTS_PER_MINUTE,
    TOKENS_PER_MINUTE,
    Listening,
    Stand,
    play,
)

from weir.core.endings import FinishReason
from weir.core.ledger.records import EndRecord, HoldRecord, ReleaseRecord, SettleRecord, StepRecord
from weir.core.metering import Basis
from weir.core.request import Queued
from weir.core.scheduling.orders import BYPASSES_MAX
from weir.core.tenancy import ServiceClass, scopes_of
from weir.messages import (
    AskStanding,
    CancelById,
    EndBooked,
    Ended,
    Finish,
    Found,
    Granted,
    Lookup,
    Progress,
    Rejected,
    Stopped,
    StopRequest,
)
from weir.sim.random_source import seeded_random
from weir.sim.virtual_loop import SeedFailed
from weir.sim.world import POOL, REVISION, key_of, tenant_name

LOST, OTHER = 0, 1
"""Tenants, each at a gateway of its own."""


async def a_moment() -> None:
    """What was decided becomes durable."""
    await asyncio.sleep(0.1)


async def fill(gateway: Listening, tenant: int) -> list[int]:
    """Requests that take both lanes."""
    refs = [gateway.ask(tenant) for _ in range(2)]
    await a_moment()
    assert all(gateway.about(ref, Granted) for ref in refs)
    return refs


def taken(stand: Stand, tenant: int) -> tuple[int, int]:
    """What is missing of a tenant's buckets at this instant: requests and tokens."""
    scopes = scopes_of(tenant_name(tenant), "app", key_of(tenant), "assistant", ServiceClass.INTERACTIVE)
    standing = stand.book.standing(scopes, stand.clock.monotonic_ns())
    assert standing.requests.remaining is not None and standing.tokens.remaining is not None
    return REQUESTS_PER_MINUTE - standing.requests.remaining, TOKENS_PER_MINUTE - standing.tokens.remaining


# ── each phase ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_asks_the_store_is_forgotten() -> None:
    """Protects holds: a request whose id is looked up as its gateway is lost takes nothing, and nobody is answered."""

    async def script(stand: Stand) -> None:
        stand.store_s["find_execution"] = 0.5
        lost = stand.gateway("lost")
        told = len(lost.heard)
        lost.ask(LOST, request_id_given=True)
        await a_moment()
        stand.coordinator.lose("lost")
        await asyncio.sleep(1)
        assert not stand.ledger.records and len(lost.heard) == told

    play(script)


@pytest.mark.parametrize("code", ["found", "unavailable"])
def test_a_question_that_the_store_answers_late_is_told_to_nobody(code: str) -> None:
    """Protects a session's end: what its gateway asked the store, and what it cancelled, is answered to no lost gateway."""

    async def script(stand: Stand) -> None:
        stand.store_s["find_execution"] = 0.5 if code == "found" else 5.0
        lost = stand.gateway("lost")
        told = len(lost.heard)
        lost.say(Lookup(900, tenant_name(LOST), "unknown"))
        lost.say(CancelById(901, tenant_name(LOST), "unknown"))
        lost.ask(LOST, request_id_given=True)
        await a_moment()
        stand.coordinator.lose("lost")
        await asyncio.sleep(6)
        assert not stand.ledger.records and len(lost.heard) == told

    play(script)


def test_what_waits_is_released() -> None:
    """Protects the tenant and the queue: a request that waits for a lane costs nobody anything, and its place is free."""

    async def script(stand: Stand) -> None:
        lost, other = stand.gateway("lost"), stand.gateway("other")
        running = await fill(other, OTHER)
        waiting = [lost.ask(LOST) for _ in range(3)]
        await a_moment()
        assert stand.waiting == 3
        told = len(lost.heard)
        stand.coordinator.lose("lost")
        assert stand.waiting == 0 and stand.book.open_holds == 2
        await a_moment()
        for ref in waiting:
            assert isinstance(stand.end_of(ref), ReleaseRecord)
            stand.check_ended(ref)
        assert len(lost.heard) == told
        for ref in running:
            assert not other.about(ref, Ended)
            other.end(ref)

    play(script)


def test_no_lane_that_comes_free_is_for_what_is_lost() -> None:
    """Protects those who wait: a lost gateway's lanes go to others at once, not to what it had waiting, which was never run."""

    async def script(stand: Stand) -> None:
        lost, other = stand.gateway("lost"), stand.gateway("other")
        running = await fill(lost, LOST)
        behind = [lost.ask(LOST) for _ in range(4)]
        theirs = [other.ask(OTHER) for _ in range(2)]
        await a_moment()
        stand.coordinator.lose("lost")
        assert [len(other.about(ref, Granted)) for ref in theirs] == [1, 1]
        await a_moment()
        assert all(isinstance(stand.end_of(ref), ReleaseRecord) for ref in behind)
        for ref in (*running, *behind):
            stand.check_ended(ref)
        for ref in theirs:
            other.end(ref)

    play(script)


def test_kept_room_is_for_nobody_else_that_is_lost() -> None:
    """Protects the ledger's truth: what waits behind a large request's room, with it at the lost gateway, is not started."""
    large = {"input_tokens": 900, "max_output_tokens": 200}

    async def script(stand: Stand) -> None:
        lost, other = stand.gateway("lost"), stand.gateway("other")
        stand.fleet.drain(POOL, "second")
        running = other.ask(OTHER, **large)
        lost.ask(LOST, **large)
        await a_moment()
        for _ in range(BYPASSES_MAX):
            passing = other.ask(2)
            await a_moment()
            other.end(passing)
        behind = [lost.ask(3) for _ in range(3)]
        await a_moment()
        assert stand.waiting == 4 and stand.running == 1
        stand.coordinator.lose("lost")
        await a_moment()
        assert not any(stand.records_of(ref, StepRecord) for ref in behind)
        other.end(running)

    play(script, lanes=16, kv_tokens=1_900)


def test_buckets_get_their_tokens_back_at_once() -> None:
    """Protects the tenant's next minute: of what is lost, running or waiting, only the requests themselves stay counted."""

    async def script(stand: Stand) -> None:
        lost = stand.gateway("lost")
        for _ in range(5):
            lost.ask(LOST)
        assert stand.running == 2 and taken(stand, LOST) == (5, 5 * (INPUT_TOKENS + OUTPUT_TOKENS))
        stand.coordinator.lose("lost")
        assert taken(stand, LOST) == (5, 0)

    play(script)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("shown", [False, True])
def test_what_runs_is_settled_for_the_platform(stream: bool, shown: bool) -> None:
    """Protects the tenant: it pays nothing for what nobody can account for, and what was booked ahead is the platform's."""

    async def script(stand: Stand) -> None:
        lost = stand.gateway("lost")
        ref = lost.ask(LOST, stream=stream)
        await a_moment()
        if shown:
            lost.say(Progress(ref, 1, has_output=True))
            if stream:
                lost.show(ref, delivered_max=OUTPUT_TOKENS)
            await a_moment()
        told = len(lost.heard)
        stand.coordinator.lose("lost")
        assert stand.running == 0 and stand.book.open_holds == 0
        await a_moment()
        stand.check_ended(ref)
        end, steps = stand.end_of(ref), stand.records_of(ref, StepRecord)
        assert isinstance(end, SettleRecord) and end.basis is Basis.UNCERTAIN and end.attempt == 1
        booked = steps[-1].delivered_max
        assert (end.input_tokens, end.output_tokens, end.delivered_tokens) == (INPUT_TOKENS, booked, booked)
        assert booked == (0 if not stream else OUTPUT_TOKENS if shown else steps[0].delivered_max)
        assert end.platform_microusd == REVISION.price.cost(INPUT_TOKENS, 0, booked)
        assert len(lost.heard) == told

    play(script)


async def waits_again(stand: Stand, lost: Listening, other: Listening) -> tuple[int, int]:
    """A request whose first attempt failed, and that waits for a lane elsewhere; who runs there."""
    ref = lost.ask(LOST)
    blocking = other.ask(OTHER)
    await a_moment()
    lost.finish(ref, reason=FinishReason.REPLICA_LOST, tokens=3)
    execution = stand.execution(ref)
    assert execution is not None and isinstance(execution.state, Queued) and stand.waiting == 1
    return ref, blocking


@pytest.mark.parametrize("stopped", [False, True])
def test_what_waits_for_its_second_attempt_ends_with_what_the_first_one_used(stopped: bool) -> None:
    """Protects the platform's books: the failed attempt is its cost, also where its engine had not confirmed; lanes return."""

    async def script(stand: Stand) -> None:
        lost, other = stand.gateway("lost"), stand.gateway("other")
        ref, blocking = await waits_again(stand, lost, other)
        if stopped:
            lost.say(Stopped(ref, 1))
        stand.coordinator.lose("lost")
        assert stand.running == 1 and stand.waiting == 0 and stand.book.open_holds == 1
        await a_moment()
        stand.check_ended(ref)
        end = stand.end_of(ref)
        assert isinstance(end, SettleRecord) and end.platform_microusd == REVISION.price.cost(INPUT_TOKENS, 0, 3)
        other.end(blocking)

    play(script)


def test_a_second_attempt_is_settled_with_the_first() -> None:
    """Protects the platform's books: what both attempts used is in the one settlement, and both lanes return."""

    async def script(stand: Stand) -> None:
        lost, other = stand.gateway("lost"), stand.gateway("other")
        ref, blocking = await waits_again(stand, lost, other)
        other.end(blocking)
        await a_moment()
        assert [granted.attempt for granted in lost.about(ref, Granted)] == [1, 2] and stand.running == 2
        stand.coordinator.lose("lost")
        assert stand.running == 0
        await a_moment()
        stand.check_ended(ref)
        end = stand.end_of(ref)
        assert isinstance(end, SettleRecord) and (end.attempt, end.basis) == (2, Basis.UNCERTAIN)
        lost_first = REVISION.price.cost(INPUT_TOKENS, 0, 3)
        assert end.platform_microusd == lost_first + REVISION.price.cost(INPUT_TOKENS, 0, end.output_tokens)

    play(script)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("stopped", [True, False])
@pytest.mark.parametrize("durable", [True, False])
def test_an_end_that_was_decided_stays(stream: bool, stopped: bool, durable: bool) -> None:
    """Protects what was settled: an end that the gateway reported is the end, whether it is durable, and its lane returns."""

    async def script(stand: Stand) -> None:
        lost = stand.gateway("lost")
        ref = lost.ask(LOST, stream=stream)
        await a_moment()
        if not durable:
            stand.store_s["write"] = 0.5
        lost.finish(ref)
        if stopped:
            lost.say(Stopped(ref, 1))
        await a_moment()
        told = len(lost.heard)
        assert bool(lost.about(ref, EndBooked)) == durable
        stand.coordinator.lose("lost")
        assert stand.running == 0 and stand.book.open_holds == 0
        await asyncio.sleep(2)
        end = stand.end_of(ref)
        assert isinstance(end, SettleRecord) and (end.status, end.output_tokens) == ("completed", 8)
        assert len(lost.heard) == told

    play(script)


def test_a_whole_answer_that_nobody_will_get_is_free() -> None:
    """Protects the tenant: its gateway was lost before the answer was durable, and no write has taken the settlement."""

    async def script(stand: Stand) -> None:
        lost = stand.gateway("lost")
        ref = lost.ask(LOST, stream=False)
        await a_moment()
        stand.store_s["write"] = 4.0
        lost.ask(LOST)  # its hold is the write that is under way
        await asyncio.sleep(0.02)
        lost.end(ref)
        stand.coordinator.lose("lost")
        await asyncio.sleep(20)
        end = stand.end_of(ref)
        assert isinstance(end, SettleRecord) and (end.finish_reason, end.cost_microusd) == ("coordinator_lost", 0)
        stand.store_s["write"] = 0.001

    play(script)


def test_what_was_asked_to_stop_ends_and_who_asked_is_answered() -> None:
    """Protects a cancel at another gateway: nobody stops the request any more, and its terminal status comes all the same."""

    async def script(stand: Stand) -> None:
        lost, other = stand.gateway("lost"), stand.gateway("other")
        ref = lost.ask(LOST)
        await a_moment()
        other.say(CancelById(900, tenant_name(LOST), f"id-{ref}"))
        lost.say(CancelById(901, tenant_name(LOST), f"id-{ref}"))
        assert len(lost.about(ref, StopRequest)) == 1
        told = len(lost.heard)
        stand.coordinator.lose("lost")
        await a_moment()
        stand.check_ended(ref)
        [found] = [message for message in other.heard if isinstance(message, Found)]
        assert found.record is not None and found.record.finish_reason is FinishReason.COORDINATOR_LOST
        assert len(lost.heard) == told

    play(script)


# ── afterwards ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_late_words_of_a_lost_session_change_nothing() -> None:
    """Protects everybody from a gateway that comes back to a session that is over: it is not heard, and not answered."""

    async def script(stand: Stand) -> None:
        lost, other = stand.gateway("lost"), stand.gateway("other")
        running, theirs = lost.ask(LOST), other.ask(OTHER)
        await a_moment()
        waiting = lost.ask(LOST)
        stand.coordinator.lose("lost")
        await a_moment()
        told, records = len(lost.heard), list(stand.ledger.records)
        for ref in (running, waiting):
            lost.show(ref, delivered_max=64)
            lost.end(ref)
            lost.say(Finish(ref, 0, FinishReason.DISCONNECT))
        lost.ask(LOST)
        lost.ask(LOST, request_id_given=True)
        lost.say(CancelById(900, tenant_name(OTHER), f"id-{theirs}"))
        lost.say(Lookup(901, tenant_name(OTHER), f"id-{theirs}"))
        lost.say(Lookup(902, tenant_name(OTHER), "unknown"))
        lost.say(AskStanding(903, tenant_name(LOST), "app", key_of(LOST), "assistant"))
        await asyncio.sleep(1)
        assert stand.ledger.records == records and len(lost.heard) == told and stand.running == 1
        assert not other.about(theirs, StopRequest)
        other.end(theirs)

    play(script)


def test_a_gateway_that_returns_begins_anew() -> None:
    """Protects idempotency through a gateway's loss: in its next session an id that delivered nothing runs again."""

    async def script(stand: Stand) -> None:
        first = stand.gateway("first")
        delivered = first.ask(LOST, request_id="delivered", request_id_given=True)
        undelivered = first.ask(LOST, request_id="undelivered", request_id_given=True, stream=False)
        await a_moment()
        waiting = first.ask(LOST, request_id="waiting", request_id_given=True)
        await a_moment()
        first.show(delivered, delivered_max=64)
        await a_moment()
        stand.coordinator.lose("first")
        second = stand.gateway("second")
        again = {
            name: second.ask(
                LOST, request_id=name, request_id_given=True, body_digest=b"%d" % ref, stream=name != "undelivered"
            )
            for name, ref in (("delivered", delivered), ("undelivered", undelivered), ("waiting", waiting))
        }
        await a_moment()
        [refused] = second.about(again["delivered"], Rejected)
        assert refused.code == "output_not_retained"
        for name in ("undelivered", "waiting"):
            assert second.about(again[name], Granted)
            second.end(again[name])
        assert not any(isinstance(message, Ended) and message.ref == waiting for message in second.heard)

    play(script)


# ── many seeds ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Busy:
    """A gateway whose requests run through their lives at random moments; alive: until its end, and half the time beyond."""

    def __init__(self, gateway: Listening, random: Random, tenant: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._random = random
        self._tenant = tenant
        self.gateway = gateway
        self.refs: list[int] = []
        self.is_silent = False
        gateway.on_granted = self._start

    def _later(self, longest_s: float, step: Callable[[], None]) -> float:
        delay_s = self._random.uniform(0, longest_s)
        self._loop.call_later(delay_s, lambda: None if self.is_silent else step())
        return delay_s

    def ask(self) -> None:
        """One more request, of any kind; some ask the store first, and some leave while they wait."""
        named, stream = self._random.random() < 0.4, self._random.random() < 0.6
        ref = self.gateway.ask(self._tenant, request_id_given=named, stream=stream)
        self.refs.append(ref)
        if self._random.random() < 0.15:
            self._later(1.0, lambda: self.gateway.say(Finish(ref, 0, FinishReason.DISCONNECT)))

    def _start(self, granted: Granted) -> None:
        ref, attempt, gateway = granted.ref, granted.attempt, self.gateway
        fails = attempt == 1 and self._random.random() < 0.3
        if not fails and self._random.random() < 0.7:
            self._later(0.3, lambda: gateway.show(ref, attempt, 64))
        self._loop.call_later(0.3, lambda: self._later(1.0, lambda: self._end(ref, attempt, fails=fails)))

    def _end(self, ref: int, attempt: int, *, fails: bool) -> None:
        self.gateway.finish(ref, attempt, FinishReason.REPLICA_LOST if fails else FinishReason.STOP)
        self._later(0.5, lambda: self.gateway.say(Stopped(ref, attempt)))


def _states(stand: Stand, refs: list[int]) -> dict[int, tuple[bool, EndRecord | None]]:
    """Of what was admitted and has something pending: whether it ever ran, and its end where that is decided."""
    executions = {ref: stand.execution(ref) for ref in refs}
    return {ref: (bool(each.placements), each.end_record) for ref, each in executions.items() if each is not None}


async def _busy_scene(stand: Stand, random: Random) -> None:
    stand.store_s |= {"write": random.choice([0.001, 0.05, 0.4]), "find_execution": random.choice([0.001, 0.3])}
    lost, other = (Busy(stand.gateway(name), random, tenant) for tenant, name in enumerate(("lost", "other")))
    for _ in range(random.randint(4, 14)):
        random.choice([lost, lost, other]).ask()
        await asyncio.sleep(random.uniform(0, 0.25))
    before, told = _states(stand, lost.refs), len(lost.gateway.heard)
    lost.is_silent = random.random() < 0.5
    stand.coordinator.lose("lost")
    assert stand.book.open_holds_of(tenant_name(LOST)) == 0
    assert not any(execution.holds_lane for execution in map(stand.execution, lost.refs) if execution is not None)
    await asyncio.sleep(15)
    assert len(lost.gateway.heard) == told
    assert [ref for ref in lost.refs if stand.records_of(ref, HoldRecord)] == list(before)
    for ref, (ran, end) in before.items():
        if end is None:
            stand.check_ended(ref)
            assert bool(stand.records_of(ref, StepRecord)) == ran
        else:
            final = stand.end_of(ref)
            if final.finish_reason != end.finish_reason:  # a whole answer that nobody will get
                assert isinstance(final, SettleRecord) and final.finish_reason == FinishReason.COORDINATOR_LOST
                assert final.cost_microusd == 0
    for ref in other.refs:
        ended = [message.record.finish_reason for message in other.gateway.about(ref, EndBooked)]
        assert FinishReason.COORDINATOR_LOST not in ended and (ended or not stand.records_of(ref, HoldRecord))


def test_a_gateway_may_be_lost_at_any_moment() -> None:
    """Protects money and lanes: whatever two gateways do, one is lost between any two steps, and all it held ends."""
    for seed in range(150):

        async def script(stand: Stand, seed: int = seed) -> None:
            await _busy_scene(stand, seeded_random(seed, "lost gateways"))

        try:
            play(script)
        except Exception as failure:
            raise SeedFailed(seed) from failure
