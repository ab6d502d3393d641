"""A coordinator whose lanes are taken by lines of batches, and somebody who waits: who is asked to stop, and when.

The gateway only listens. Each of two replicas has two lanes, unless a scene says otherwise.
"""

import asyncio
from collections.abc import Sequence

import pytest
from tests.simulation.session_stand import CONFIG, INPUT_TOKENS, Listening, Stand, finish_of, play, run_of

from weir.coordinator.preemption import RUNS_IN_VAIN_MAX
from weir.core.endings import FinishReason
from weir.core.ledger.records import SettleRecord
from weir.core.metering import Basis
from weir.core.tenancy import ServiceClass
from weir.messages import Admitted, AttemptUsage, Down, Finish, Granted, Progress, Rejected, Stopped, StopRequest

LANES = 2
GRACE_S = CONFIG.yield_after_ms / 1e3
LINE = {"service_class": ServiceClass.BATCH, "stream": False, "yields": True}
LONG = {"deadline_left_ms": 600_000}


async def a_moment() -> None:
    """For what is durable, and its answers."""
    await asyncio.sleep(0.05)


async def lines(gateway: Listening, number: int, tenant: int = 0, *, writes: bool = True) -> list[int]:
    """So many lines of a batch, one after the other. writes: those that start have read their prompts."""
    refs = []
    for _ in range(number):
        refs.append(gateway.ask(tenant, **LINE | LONG))
        await a_moment()
        if writes and gateway.about(refs[-1], Granted):
            gateway.say(Progress(refs[-1], 1, has_output=True))
    return refs


def asked_to_stop(gateway: Listening, refs: Sequence[int]) -> list[int]:
    """Those of them that were asked to make room."""
    return [ref for ref in refs if FinishReason.PREEMPTED in [stop.reason for stop in gateway.about(ref, StopRequest)]]


def make_room(gateway: Listening, ref: int) -> None:
    """Its engine has stopped."""
    made = AttemptUsage(INPUT_TOKENS, 0, 8, Basis.ENGINE)
    gateway.say(Finish(ref, 1, FinishReason.PREEMPTED, delivered_tokens=0, usage=made))
    gateway.say(Stopped(ref, 1, 20.0))


async def end_all(stand: Stand, gateway: Listening, refs: Sequence[int]) -> None:
    """Whatever runs ends by itself, as often as something follows."""
    for _ in range(len(refs) + 1):
        for ref in refs:
            execution = stand.execution(ref)
            if execution is not None and execution.end_record is None and gateway.about(ref, Granted):
                gateway.end(ref)
        await a_moment()


def test_lines_make_room_for_those_who_wait() -> None:
    """Protects whoever waits for an answer: after a grace as many lines as wait stop, the last first, at no tenant's cost."""

    async def script(stand: Stand) -> None:
        gateway = stand.gateway("one.1")
        running = await lines(gateway, 4)
        waiting = [gateway.ask(1, **LONG) for _ in range(2)]
        await asyncio.sleep(0.8 * GRACE_S)
        assert not asked_to_stop(gateway, running)
        await asyncio.sleep(0.4 * GRACE_S)
        assert asked_to_stop(gateway, running) == running[2:]
        await asyncio.sleep(3 * GRACE_S)
        assert asked_to_stop(gateway, running) == running[2:], "no other one, while these stop"
        for ref in running[2:]:
            make_room(gateway, ref)
        await a_moment()
        assert all(gateway.about(ref, Granted) for ref in waiting)
        end = stand.end_of(running[3])
        assert isinstance(end, SettleRecord) and (end.status, end.finish_reason) == ("failed", "preempted")
        assert end.cost_microusd == 0 and end.platform_microusd > 0
        await end_all(stand, gateway, [*running[:2], *waiting])
        stand.check_accounts(0)

    play(script, LANES)


@pytest.mark.parametrize(
    "kind",
    [
        {"service_class": ServiceClass.INTERACTIVE},
        {"service_class": ServiceClass.BATCH},
        {"service_class": ServiceClass.BATCH, "stream": False},
    ],
    ids=["interactive", "batch application, streamed", "batch application, whole"],
)
def test_what_somebody_waits_for_never_makes_room(kind: dict[str, object]) -> None:
    """Protects clients: only lines of batches are stopped for others."""

    async def script(stand: Stand) -> None:
        gateway = stand.gateway("one.1")
        running = [gateway.ask(0, **kind | LONG) for _ in range(4)]
        await a_moment()
        waiting = gateway.ask(1, **LONG)
        await asyncio.sleep(4 * GRACE_S)
        assert not asked_to_stop(gateway, running) and not gateway.about(waiting, Granted)
        await end_all(stand, gateway, [*running, waiting])

    play(script, LANES)


def test_batches_that_wait_make_nobody_stop() -> None:
    """Protects batches from each other: a line waits for its turn."""

    async def script(stand: Stand) -> None:
        gateway = stand.gateway("one.1")
        running = await lines(gateway, 4)
        more = await lines(gateway, 2, tenant=1)
        await asyncio.sleep(4 * GRACE_S)
        assert not asked_to_stop(gateway, running)
        await end_all(stand, gateway, [*running, *more])

    play(script, LANES)


def test_a_lane_that_was_given_up_is_whose_it_was_for() -> None:
    """Protects whoever waits: lines that wait as well have no turn on it, and get theirs when a lane comes free by itself."""

    async def script(stand: Stand) -> None:
        gateway = stand.gateway("one.1")
        running = await lines(gateway, 4)
        behind = await lines(gateway, 3, tenant=2)
        waiting = [gateway.ask(1, **LONG) for _ in range(3)]
        await asyncio.sleep(1.2 * GRACE_S)
        asked = asked_to_stop(gateway, running)
        assert len(asked) == 3
        for ref in asked:
            make_room(gateway, ref)
            await a_moment()
        assert all(gateway.about(ref, Granted) for ref in waiting)
        assert not any(gateway.about(ref, Granted) for ref in behind)
        await end_all(stand, gateway, [*running, *behind, *waiting])

    play(script, LANES)


def test_a_line_that_gave_way_often_keeps_its_lane() -> None:
    """Protects batches: what ran a few times in vain is not stopped again, and what has not still is."""

    async def script(stand: Stand) -> None:
        gateway = stand.gateway("one.1")
        name = {"request_id": "again", "body_digest": b"the same"}
        for _ in range(RUNS_IN_VAIN_MAX):
            ref = gateway.ask(0, **LINE | LONG | name)
            await a_moment()
            make_room(gateway, ref)
            await a_moment()
        often = gateway.ask(0, **LINE | LONG | name)
        await a_moment()
        (admitted,) = gateway.about(often, Admitted)
        assert admitted.execution == RUNS_IN_VAIN_MAX + 1
        others = await lines(gateway, 3)
        waiting = [gateway.ask(1, **LONG) for _ in range(4)]
        await asyncio.sleep(2 * GRACE_S)
        assert sorted(asked_to_stop(gateway, [often, *others])) == others
        for ref in others:
            make_room(gateway, ref)
        gateway.end(often)
        await a_moment()
        for ref in waiting:
            gateway.end(ref)
        await a_moment()

    play(script, LANES)


def test_the_next_coordinator_asks_as_the_one_before() -> None:
    """Protects whoever waits behind a takeover: lines that went on are known to yield."""

    async def script(stand: Stand) -> None:
        gateway = stand.gateway("one.1")
        running = await lines(gateway, 4)
        granted = {ref: gateway.about(ref, Granted)[0] for ref in running}
        await stand.take_over()
        again = stand.again(gateway)
        for ref in running:
            again.tell(ref, run_of(granted[ref]))
        again.tell_all()
        await asyncio.sleep(1)
        waiting = again.ask(1, **LONG)
        await asyncio.sleep(2 * GRACE_S)
        (asked,) = asked_to_stop(again, running)
        make_room(again, asked)
        await a_moment()
        assert again.about(waiting, Granted)
        for ref in [*(each for each in running if each != asked), waiting]:
            again.end(ref)
        await a_moment()

    play(script, LANES)


def test_who_left_wants_no_lane() -> None:
    """Protects lines: whoever gave up within the grace stops nothing."""

    async def script(stand: Stand) -> None:
        gateway = stand.gateway("one.1")
        running = await lines(gateway, 4)
        waiting = gateway.ask(1, **LONG)
        await a_moment()
        gateway.say(finish_of(waiting, attempt=0, reason=FinishReason.DISCONNECT))
        await asyncio.sleep(4 * GRACE_S)
        assert not asked_to_stop(gateway, running)
        await end_all(stand, gateway, running)

    play(script, LANES)


def test_a_lane_that_is_free_is_nobody_s_loss() -> None:
    """Protects lines: as long as there is room nothing stops."""

    async def script(stand: Stand) -> None:
        gateway = stand.gateway("one.1")
        running = await lines(gateway, 3)
        there = gateway.ask(1, **LONG)
        await asyncio.sleep(4 * GRACE_S)
        assert gateway.about(there, Granted) and not asked_to_stop(gateway, running)
        await end_all(stand, gateway, [*running, there])

    play(script, LANES)


def obey(gateway: Listening, after_s: float = 0.02) -> None:
    """Lines of this gateway stop as they are asked to."""
    deliver = gateway.deliver

    def heard(message: Down) -> None:
        deliver(message)
        if isinstance(message, StopRequest):
            asyncio.get_running_loop().call_later(after_s, make_room, gateway, message.ref)

    gateway.deliver = heard  # type: ignore[method-assign]


def replica_of(gateway: Listening, ref: int) -> str:
    """Where its last attempt was placed."""
    return gateway.about(ref, Granted)[-1].replica.name


async def learned(gateway: Listening, seconds: float, times: int = 6, **whose: object) -> None:
    """How long requests take, so that waits are predicted by it."""
    for _ in range(times):
        done = gateway.ask(3, **LONG | whose)
        await asyncio.sleep(seconds)
        gateway.end(done)


def test_one_that_would_be_made_room_for_is_not_refused() -> None:
    """Protects short deadlines: that answers took long is no reason to refuse what lines make room for, while there are any."""

    async def script(stand: Stand) -> None:
        gateway = stand.gateway("one.1")
        await learned(gateway, 20)
        running = await lines(gateway, 4)
        hasty = [gateway.ask(tenant, deadline_left_ms=10_000) for tenant in range(2)]
        await asyncio.sleep(1.2 * GRACE_S)
        hasty.append(gateway.ask(2, deadline_left_ms=10_000))  # while the first two are on their way
        await a_moment()
        assert all(gateway.about(ref, Admitted) for ref in hasty)
        obey(gateway)
        for ref in asked_to_stop(gateway, running):
            make_room(gateway, ref)
        await asyncio.sleep(2 * GRACE_S)
        assert all(gateway.about(ref, Granted) for ref in hasty)
        await end_all(stand, gateway, [*running, *hasty])

    play(script, LANES)


@pytest.mark.parametrize("kind", ["no line", "a line that reads"])
def test_none_is_let_in_for_what_makes_no_room_soon(kind: str) -> None:
    """Protects deadlines: without a line that stops soon the wait is predicted as ever."""

    async def script(stand: Stand) -> None:
        gateway = stand.gateway("one.1")
        await learned(gateway, 20)
        if kind == "no line":
            running = [gateway.ask(0, **LONG) for _ in range(4)]
        else:
            running = await lines(gateway, 4, writes=False)
        await a_moment()
        hasty = gateway.ask(1, deadline_left_ms=10_000)
        await a_moment()
        assert gateway.about(hasty, Rejected)
        await end_all(stand, gateway, running)

    play(script, LANES)


def test_a_promise_that_lines_keep_late_corrects_no_other() -> None:
    """Protects tenants: that engines stop slowly says nothing of waits in which nobody makes room."""

    async def script(stand: Stand) -> None:
        gateway = stand.gateway("one.1")
        obey(gateway, after_s=1.5)
        await learned(gateway, 20, service_class=ServiceClass.BATCH)
        for _ in range(6):
            running = await lines(gateway, 4)
            waiting = gateway.ask(1, **LONG)
            await asyncio.sleep(3)
            await end_all(stand, gateway, [*running, waiting])
        busy = [gateway.ask(2, **LONG) for _ in range(4)]
        await a_moment()
        honest = [gateway.ask(tenant, **LONG) for tenant in (1, 0)]
        await a_moment()
        theirs, others = (execution.predicted_wait_ms for ref in honest if (execution := stand.execution(ref)) is not None)
        assert theirs <= 2 * others
        await end_all(stand, gateway, [*busy, *honest])

    play(script, LANES)
