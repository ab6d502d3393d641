"""Lines that make room do so where it helps: on replicas that take work, with enough memory, for whom has waited long enough.

The gateway only listens. Each of two replicas has two lanes, unless a scene says otherwise.
"""

import asyncio
from dataclasses import replace

import pytest
from tests.simulation.session_stand import CONFIG, Stand, finish_of, play
from tests.simulation.test_preemption import (
    GRACE_S,
    LANES,
    LINE,
    LONG,
    a_moment,
    asked_to_stop,
    end_all,
    learned,
    lines,
    make_room,
    obey,
    replica_of,
)

from weir.core.endings import FinishReason
from weir.core.tenancy import ServiceClass
from weir.messages import Granted, Stopped
from weir.sim.world import POOL


def test_lines_of_a_replica_that_takes_no_work_are_left_alone() -> None:
    """Protects both: what makes room on a replica that drains helps nobody."""

    async def script(stand: Stand) -> None:
        gateway = stand.gateway("one.1")
        obey(gateway)
        running, others = [], []
        for _ in range(2):  # each on the emptier replica
            running += await lines(gateway, 1)
            others.append(gateway.ask(1, **LONG))
            await a_moment()
        drained = replica_of(gateway, running[0])
        assert {replica_of(gateway, ref) for ref in running} == {drained}
        stand.fleet.drain(POOL, drained)
        waiting = gateway.ask(2, **LONG)
        await asyncio.sleep(4 * GRACE_S)
        assert not asked_to_stop(gateway, running)
        await end_all(stand, gateway, [*running, *others, waiting])

    play(script, LANES)


def test_memory_is_made_where_it_is_enough() -> None:
    """Protects large requests, and lines: as many stop as are in the way on one replica, and no line comes between."""

    async def script(stand: Stand) -> None:
        gateway = stand.gateway("one.1")
        obey(gateway)
        running = []
        for _ in range(40):
            running.append(gateway.ask(0, **LINE | LONG | {"max_output_tokens": 50}))
            await a_moment()
        assert stand.waiting == 20 and stand.running == 20
        large = gateway.ask(1, **LONG | {"input_tokens": 900, "max_output_tokens": 50})
        await asyncio.sleep(3 * GRACE_S)
        asked = asked_to_stop(gateway, running)
        assert gateway.about(large, Granted) and len(asked) == 6
        assert {replica_of(gateway, ref) for ref in asked} == {replica_of(gateway, large)}
        await end_all(stand, gateway, [*running, large])

    play(script, 16, kv_tokens=1_600)


def test_what_only_slipped_past_keeps_no_lane() -> None:
    """Protects large requests: a line that took what they could not use stops for them like every other."""

    async def script(stand: Stand) -> None:
        gateway = stand.gateway("one.1")
        obey(gateway)
        running = []
        for _ in range(22):
            running.append(gateway.ask(0, **LINE | LONG | {"max_output_tokens": 50}))
            await a_moment()
        large = gateway.ask(1, **LONG | {"input_tokens": 900, "max_output_tokens": 50})
        gateway.end(running[0])
        await a_moment()
        slipped = running[20]
        assert gateway.about(slipped, Granted)
        await asyncio.sleep(3 * GRACE_S)
        assert gateway.about(large, Granted) and slipped in asked_to_stop(gateway, running)
        await end_all(stand, gateway, [*running, large])

    play(script, 16, kv_tokens=1_600)


def test_a_batch_has_its_turns_again_once_room_was_made() -> None:
    """Protects batches: however long others wait without a break, room is kept for them for a moment only."""

    async def script(stand: Stand) -> None:
        gateway = stand.gateway("one.1")
        obey(gateway)
        running = await lines(gateway, 4)
        talking = [gateway.ask(1, **LONG) for _ in range(7)]
        await asyncio.sleep(2 * GRACE_S)
        assert len(asked_to_stop(gateway, running)) == 4
        behind = await lines(gateway, 1, tenant=2)
        for _ in range(60):
            if not gateway.about(behind[0], Granted):
                assert stand.waiting > len(behind), "somebody always waits"
                ended = next(ref for ref in talking if gateway.about(ref, Granted))
                talking.remove(ended)
                gateway.end(ended)
                talking.append(gateway.ask(1, **LONG))
                await a_moment()
        assert gateway.about(behind[0], Granted)
        await end_all(stand, gateway, [*running, *behind, *talking])

    play(script, LANES, config=replace(CONFIG, queue_wait_ms=60_000))


def test_lines_that_read_stop_last() -> None:
    """Protects whoever waits: an engine in the middle of a prompt stops late, and one that writes at once."""

    async def script(stand: Stand) -> None:
        gateway = stand.gateway("one.1")
        writing = await lines(gateway, 2)
        reading = await lines(gateway, 2, writes=False)
        waiting = [gateway.ask(1, **LONG) for _ in range(3)]
        await asyncio.sleep(1.2 * GRACE_S)
        assert asked_to_stop(gateway, writing) == writing and asked_to_stop(gateway, reading) == reading[1:]
        for ref in [*writing, reading[1]]:
            make_room(gateway, ref)
        await a_moment()
        await end_all(stand, gateway, [*writing, *reading, *waiting])

    play(script, LANES)


def test_each_waits_for_its_own_grace() -> None:
    """Protects lines: who has just come has not waited."""

    async def script(stand: Stand) -> None:
        gateway = stand.gateway("one.1")
        running = await lines(gateway, 4)
        first = gateway.ask(1, **LONG)
        await asyncio.sleep(0.8 * GRACE_S)
        second = gateway.ask(1, **LONG)
        await asyncio.sleep(0.4 * GRACE_S)
        assert len(asked_to_stop(gateway, running)) == 1
        await asyncio.sleep(1.2 * GRACE_S)
        assert len(asked_to_stop(gateway, running)) == 2
        for ref in asked_to_stop(gateway, running):
            make_room(gateway, ref)
        await a_moment()
        await end_all(stand, gateway, [*running, first, second])

    play(script, LANES)


def test_a_second_attempt_is_made_room_for_elsewhere() -> None:
    """Protects retries: lines stop on a replica other than the one that failed, and only there."""

    async def script(stand: Stand) -> None:
        gateway = stand.gateway("one.1")
        obey(gateway)
        failed = gateway.ask(1, **LONG)
        await a_moment()
        running = await lines(gateway, 5)
        beside = next(ref for ref in running if replica_of(gateway, ref) == replica_of(gateway, failed))
        gateway.end(beside)
        running += await lines(gateway, 1)
        assert replica_of(gateway, running[-1]) == replica_of(gateway, failed), "the last begun would be the first to stop"
        gateway.say(finish_of(failed, 1, FinishReason.ENGINE_ERROR, 0))
        await asyncio.sleep(2 * GRACE_S)
        gateway.say(Stopped(failed, 1))
        await a_moment()
        first, second = (granted.replica.name for granted in gateway.about(failed, Granted))
        (asked,) = asked_to_stop(gateway, running)
        assert replica_of(gateway, asked) == second != first
        gateway.end(failed, 2)
        await end_all(stand, gateway, running)

    play(script, 3)


@pytest.mark.parametrize("why", ["its gateway is silent", "its attempt has failed"])
def test_one_that_does_not_stop_is_not_waited_for(why: str) -> None:
    """Protects whoever waits: another line makes room where the first one does not."""

    async def script(stand: Stand) -> None:
        gateway, other = stand.gateway("one.1"), stand.gateway("two.1")
        obey(gateway)
        running = await lines(gateway, 3)
        (last,) = await lines(other, 1)
        if why == "its attempt has failed":
            other.say(finish_of(last, 1, FinishReason.CLIENT, 0))
        waiting = gateway.ask(1, **LONG)
        await asyncio.sleep(2)
        assert len(asked_to_stop(gateway, running)) == 1 and gateway.about(waiting, Granted)
        if why == "its gateway is silent":
            assert asked_to_stop(other, [last])
            make_room(other, last)
        other.say(Stopped(last, 1))
        await end_all(stand, gateway, [*running, waiting])

    play(script, LANES)


def test_a_wait_shorter_than_the_grace_stops_nobody() -> None:
    """Protects lines beside short answers: that somebody always waits, each for a moment, is no reason to stop."""

    async def script(stand: Stand) -> None:
        gateway = stand.gateway("one.1")
        running = await lines(gateway, 2)
        talking = [gateway.ask(1, **LONG) for _ in range(2)]
        await a_moment()
        for _ in range(40):
            talking.append(gateway.ask(1, **LONG))
            await asyncio.sleep(0.04)
            gateway.end(talking[-3])
            await asyncio.sleep(0.01)
            assert gateway.about(talking[-1], Granted)
        assert not asked_to_stop(gateway, running)
        await end_all(stand, gateway, [*running, *talking[-3:]])

    play(script, LANES)


def test_batch_applications_have_their_part_beside_a_kept_line() -> None:
    """Protects their clients: lines that keep the share of lanes hold back lines, and no request that somebody waits for."""

    async def script(stand: Stand) -> None:
        gateway = stand.gateway("one.1")
        await learned(gateway, 0.3)
        talking = [gateway.ask(1, **LONG) for _ in range(7)]

        async def one_more_answer() -> None:
            ended = next(ref for ref in talking if gateway.about(ref, Granted))
            talking.remove(ended)
            gateway.end(ended)
            talking.append(gateway.ask(1, **LONG))
            await a_moment()

        (line,) = await lines(gateway, 1)
        for _ in range(20):
            if not gateway.about(line, Granted):
                await one_more_answer()
        asked = gateway.ask(2, **LONG | {"service_class": ServiceClass.BATCH})
        behind = await lines(gateway, 1, tenant=3)
        for _ in range(20):
            await one_more_answer()
        assert gateway.about(asked, Granted) and not gateway.about(behind[0], Granted)
        assert gateway.about(line, Granted) and not asked_to_stop(gateway, [line])
        await end_all(stand, gateway, [line, asked, *talking, *behind])

    play(script, LANES, config=replace(CONFIG, queue_wait_ms=60_000))
