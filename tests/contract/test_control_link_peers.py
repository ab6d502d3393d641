"""Who is on the other side of control's link: what is refused for good, left for another, waited for, or not believed."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.contract.control_stand import (
    BEHIND,
    POOL,
    ControlStand,
    StandingDesk,
    control_standing,
    held_channels,
    serve_one,
)
from tests.contract.link_stand import BOUND_S, TERMS, at, until

from weir import errors
from weir.core.registry.model import Pool
from weir.core.registry.snapshot_parts import WholePart
from weir.core.routing.replica import ReplicaState
from weir.link import frames
from weir.link.channel import Channel
from weir.link.control_messages import (
    AnswerPart,
    ControlWelcome,
    Counted,
    Failed,
    PoolKept,
    Replayed,
    ReplicaDoubted,
    SnapshotRenewed,
)
from weir.link.frames import Frame, Hello, Kind, Refused, Role, encode, frame

READY, DRAINING = ReplicaState.READY, ReplicaState.DRAINING


@pytest.fixture
async def stand() -> AsyncIterator[ControlStand]:
    async with control_standing() as standing:
        yield standing


async def test_an_older_coordinator_is_no_coordinator(stand: ControlStand) -> None:
    """Control that has seen a newer coordinator neither obeys an older one nor changes it."""
    new, old = await stand.desk(5), await stand.desk(4)
    addresses = [at(new.coordinator.path)]
    control = stand.control(*addresses)
    await control.start()
    await until(lambda: control.end.is_linked, "the newer one has it")
    control.end._addresses = [at(old.coordinator.path)]
    await new.stop()
    channels: list[Channel] = []
    control.end._addresses = [held_channels(channels, old.coordinator.path)]
    await until(lambda: len(channels) >= 2, "it asks again and again")
    assert not control.end.is_linked and old.version == 0


TOKEN = "of control, and of it alone: 32 ."


@pytest.mark.parametrize("shown", ["", "wrong", TOKEN[::-1]], ids=["none", "wrong", "the gateways'"])
async def test_a_wrong_token_ends_control(stand: ControlStand, shown: str) -> None:
    """A gateway's token gives nobody control of the cell; what will never be taken in says so, instead of asking for ever."""
    desk = await stand.desk(token=TOKEN)
    control = stand.control(desk.coordinator.path, token=shown)
    await control.start()
    fault = await control.ended()
    assert isinstance(fault, errors.LinkFault) and fault.is_final and desk.version == 0


async def test_control_shows_its_own_token(stand: ControlStand) -> None:
    """With the token that only coordinators and control know, control is taken in."""
    desk = await stand.desk(token=TOKEN)
    control = stand.control(desk.coordinator.path, token=TOKEN)
    await control.start()
    await until(lambda: control.end.is_linked and desk.version == 1, "it is taken in")


async def test_a_cell_that_has_its_own_control_takes_no_other(stand: ControlStand) -> None:
    """The coordinator of `weir up` is not to be controlled from outside."""
    coordinator = await stand.links.coordinator()
    control = stand.control(coordinator.path)
    await control.start()
    fault = await control.ended()
    assert isinstance(fault, errors.LinkFault) and "no control" in fault.detail and coordinator.host.sessions == {}


async def test_a_welcome_that_comes_too_late_is_none(stand: ControlStand) -> None:
    """Control that gave an address up takes no session on it."""
    control = stand.control(stand.links.path())
    with pytest.raises(errors.LinkFault):
        control.end.on_frame(Channel(control.end), Frame(Kind.WELCOME, 1, 0, 0, WELCOME))
    assert not control.end.is_linked


async def test_a_welcome_in_the_last_moment_is_given_up(stand: ControlStand) -> None:
    """A session that began as the time for it ran out is not kept half: the next address gets everything."""
    desk = await stand.desk()

    async def too_slow(make: Callable[[], Channel]) -> None:
        channel = make()
        control.end.on_frame(channel, Frame(Kind.WELCOME, 1, 0, 0, WELCOME))
        raise TimeoutError

    control = stand.control(too_slow, desk.coordinator.path)
    await control.start()
    await until(lambda: control.end.is_linked, "the next one has it")
    assert desk.version == 1


async def test_a_drained_replica_is_idle_once_the_coordinator_says_so(stand: ControlStand) -> None:
    """What a replica was given in the moment in which control drains it keeps it from being stopped."""
    desk, control = await stand.linked()
    serve_one(control)
    await until(lambda: desk.states == {"pool-life-1": READY}, "it is ready")
    desk.host.counts = {"pool": 1}
    control.fleet.drain("pool", "pool-life-1")
    assert not control.fleet.is_idle("pool")
    await until(lambda: desk.states == {"pool-life-1": DRAINING}, "it is drained")
    desk.host.counts = {}
    await until(lambda: control.fleet.is_idle("pool"), "nothing runs there")


async def test_a_drained_replica_is_unused_once_the_coordinator_says_so(stand: ControlStand) -> None:
    """What runs on a replica that control lets go keeps it from being stopped, however busy or idle its pool is."""
    desk, control = await stand.linked()
    serve_one(control)
    serve_one(control, "pool-life-2")
    await until(lambda: [*desk.states.values()] == [READY, READY], "both are ready")
    desk.host.counts = {"pool": 2}
    lane = desk.fleet.pool("pool").replicas["pool-life-1"].take_lane()
    control.fleet.drain("pool", "pool-life-1")
    control.fleet.drain("pool", "pool-life-2")
    assert not control.fleet.is_unused("pool", "pool-life-2")
    await until(lambda: control.fleet.is_unused("pool", "pool-life-2"), "nothing runs on the second")
    assert not control.fleet.is_unused("pool", "pool-life-1") and not control.fleet.is_idle("pool")
    desk.fleet.pool("pool").replicas["pool-life-1"].free_lane(lane)
    await until(lambda: control.fleet.is_unused("pool", "pool-life-1"), "nor on the first")


async def test_an_older_coordinator_is_told_what_it_understands(stand: ControlStand, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that knows of no withdrawn pools hears of none, and where only pools are counted, those say what is unused."""
    monkeypatch.setattr(frames, "NEWEST_VERSION", frames.WITHDRAWING_VERSION - 1)
    desk, control = await stand.linked()
    control.fleet.add_pool(BEHIND)
    control.fleet.withdraw("behind")
    serve_one(control)
    await until(lambda: desk.states == {"pool-life-1": READY}, "what follows arrives")
    assert [view.name for view in desk.fleet.pools_of("rev")] == ["pool", "behind"]
    control.fleet.counted(Counted({"pool": 1}))
    assert not control.fleet.is_unused("pool", "pool-life-1")
    control.fleet.counted(Counted({"pool": 0}))
    assert control.fleet.is_unused("pool", "pool-life-1")


async def test_control_waits_for_a_coordinator(stand: ControlStand) -> None:
    """Without a coordinator control asks again and again, answers that there is none, and believes no engine to be idle."""
    path = stand.links.path()
    control = stand.control(path)
    control.fleet.add_pool(POOL)
    await control.start()
    with pytest.raises(errors.CoordinatorLost):
        await control.ask()
    assert not control.fleet.is_idle("pool")
    desk = await stand.desk(path=path)
    await until(lambda: control.end.is_linked, "it is found")
    assert control.fleet.is_idle("pool")
    desk.host.counts = {"pool": 3}
    await until(lambda: not control.fleet.is_idle("pool"), "it is counted")


PART = WholePart(0, 1, is_last=True)
ELSEWHERE = ReplicaDoubted("pool", "never named")


@pytest.mark.parametrize(
    ("epoch", "body"),
    [
        (1, b"\xc1"),
        (1, encode([Replayed()])),
        (1, encode([PART, Replayed(), Replayed()])),
        (1, encode([PART, Replayed(), ELSEWHERE])),
        (1, encode([PART, ELSEWHERE, Replayed()])),
        (1, encode([WholePart(7, 8, is_last=True)])),
        (2, encode([PART, Replayed()])),
    ],
    ids=["garbage", "no snapshot", "twice", "unknown replica", "replayed unknown", "another base", "another epoch"],
)
async def test_what_no_control_sends_ends_the_link(stand: ControlStand, epoch: int, body: bytes) -> None:
    """A coordinator is not harmed by what cannot be read or is out of turn: the link ends, and the next control is taken."""
    desk = await stand.desk()
    async with greeted(desk, "strange") as (reader, writer):
        writer.write(frame(Kind.BATCH, body, epoch=epoch, number=1))
        await until_closed(reader)
    control = stand.control(desk.coordinator.path)
    await control.start()
    await until(lambda: control.end.is_linked, "another one is taken")


async def test_nothing_behind_a_replay_that_is_refused_counts(stand: ControlStand) -> None:
    """What a control sends after what it is dismissed for is not heard, in the same frame or later."""
    desk, control = await stand.linked()
    await control.stop()
    desk.host.busy.add("pool")
    refused: list[Any] = [PART, PoolKept(Pool("pool", "other", 1, 1)), Replayed(), SnapshotRenewed(1, 60_000)]
    async with greeted(desk, "strange") as (reader, writer):
        writer.write(frame(Kind.BATCH, encode(refused), epoch=1, number=1))
        writer.write(frame(Kind.BATCH, encode([SnapshotRenewed(1, 60_000)]), epoch=1, number=2))
        await until_closed(reader)
    assert desk.host.renewed == [] and len(desk.host.published) == 1


async def test_the_same_life_may_have_two_links_for_a_moment(stand: ControlStand) -> None:
    """A control that greets again before its former link is seen to be over is taken on the new one."""
    desk = await stand.desk()
    async with greeted(desk, "life") as (former, _), greeted(desk, "life") as (_, writer):
        await until_closed(former)
        writer.write(frame(Kind.BATCH, encode([PART, Replayed()]), epoch=1, number=1))
        await until(lambda: desk.version == 1, "its replay is in force")


@asynccontextmanager
async def greeted(desk: StandingDesk, life: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A link on which a control of this name was welcomed; the test plays control."""
    reader, writer = await asyncio.open_unix_connection(str(desk.coordinator.path))
    try:
        writer.write(frame(Kind.HELLO, encode(Hello(life, "", role=Role.CONTROL))))
        await reader.readexactly(1)
        yield reader, writer
    finally:
        writer.transport.abort()


async def until_closed(reader: asyncio.StreamReader) -> None:
    """Read what comes until the other side ends the link."""
    async with asyncio.timeout(BOUND_S):
        with contextlib.suppress(ConnectionResetError):
            await reader.read()


WELCOME = encode(ControlWelcome(1, TERMS.heartbeat_ms))
UNASKED = encode([AnswerPart(5, b"", is_last=True), Failed(6, "unknown", "")])


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        frame(Kind.BATCH, epoch=9),
        frame(Kind.WELCOME, b"\xc1", epoch=9),
        frame(Kind.WELCOME, WELCOME, epoch=8),
        frame(Kind.REFUSED, encode(Refused("Not now.", is_final=False)), epoch=9),
        frame(Kind.WELCOME, WELCOME, epoch=9) + frame(Kind.BATCH, encode([Counted({})]), epoch=8, number=1),
        frame(Kind.WELCOME, WELCOME, epoch=9) + frame(Kind.WELCOME, WELCOME, epoch=9),
        frame(Kind.WELCOME, WELCOME, epoch=9) + frame(Kind.BATCH, b"\xc1", epoch=9, number=1),
        frame(Kind.WELCOME, WELCOME, epoch=9) + frame(Kind.REFUSED, encode(Refused("Later.", is_final=False)), epoch=9),
        frame(Kind.WELCOME, WELCOME, epoch=9) + frame(Kind.BATCH, UNASKED, epoch=9, number=1),
    ],
    ids=["nothing", "no welcome", "unreadable", "older", "not now", "other epoch", "twice", "garbage", "later", "unasked"],
)
async def test_a_strange_coordinator_is_left_for_another(stand: ControlStand, answer: bytes) -> None:
    """Whatever answers at one address, control goes on to the next, which gets everything."""
    desk, path, opened = await stand.desk(9), stand.links.path(), list[int]()

    def strange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened.append(1)
        writer.write(answer)
        writer.close()

    server = await asyncio.start_unix_server(strange, str(path))
    try:
        control = stand.control(desk.coordinator.path, path)
        await control.start()
        await until(lambda: control.end.is_linked, "the first one has it")
        await desk.stop()
        await until(lambda: len(opened) >= 2, "the strange one is asked")
        again = await stand.desk(9, path=desk.coordinator.path)
        await until(lambda: again.version == 1 and control.end.is_linked, "the next one has it")
        assert control.running is not None and not control.running.done()
    finally:
        server.close()
