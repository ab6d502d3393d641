"""The link between control and a coordinator: everything is replayed whole, nothing by halves, and one control is the one."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.contract.admin_stand import StandingCell
from tests.contract.control_stand import (
    BEHIND,
    POOL,
    ControlStand,
    StandingControl,
    StandingDesk,
    address_of,
    control_standing,
    held_channels,
    snapshot_of,
)
from tests.contract.link_stand import BOUND_S, TERMS, at, until

from weir import errors
from weir.app.cell_over_link import LinkedCell, answer_of
from weir.core.registry.model import Pool
from weir.core.registry.snapshot import Snapshot
from weir.core.registry.snapshot_parts import WholePart
from weir.core.routing.replica import ReplicaState
from weir.link import control_desk
from weir.link.channel import Channel
from weir.link.control_messages import (
    AnswerPart,
    AskBehind,
    AskOpenHolds,
    ControlWelcome,
    Counted,
    Failed,
    PoolKept,
    Question,
    Replayed,
    ReplicaDoubted,
    SnapshotRenewed,
)
from weir.link.frames import Frame, Hello, Kind, Refused, Role, encode, frame

READY, DRAINING = ReplicaState.READY, ReplicaState.DRAINING
SILENCE_MS = 3 * TERMS.heartbeat_ms + 1


@pytest.fixture
async def stand() -> AsyncIterator[ControlStand]:
    async with control_standing() as standing:
        yield standing


def serve_one(control: StandingControl, name: str = "pool-life-1", pool: Pool = POOL, url: str = "") -> None:
    """Control reports a pool with a replica that is ready."""
    control.fleet.add_pool(pool)
    if url:
        control.fleet.locate(name, url)
    control.fleet.add(name, pool.name, pool.concurrency)
    control.fleet.answered(address_of(name, pool.name, url or "http://launched"))


# ── a replay ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_replay_puts_all_in_force(stand: ControlStand) -> None:
    """A session begins with everything: the snapshot with its limits, for how long it is good, pools and replicas."""
    desk = await stand.desk()
    control = stand.control(desk.coordinator.path)
    serve_one(control)
    control.fleet.add("pool-life-2", "pool", 2)
    control.fleet.add("pool-life-3", "pool", 2)
    control.fleet.answered(address_of("pool-life-3"))
    control.fleet.doubted("pool", "pool-life-3")
    control.fleet.add("pool-life-4", "pool", 2)
    control.fleet.answered(address_of("pool-life-4"))
    control.fleet.drain("pool", "pool-life-4")
    control.fleet.add("pool-life-5", "pool", 2)
    control.fleet.gone("pool", "pool-life-5")
    control.end.renew(7, 60_000)
    await control.start(7, "acme", "globex")
    await until(lambda: control.end.is_linked, "the replay is in force")
    assert control.end.in_force.is_set() and desk.host.published == [snapshot_of(7, "acme", "globex")]
    assert [*desk.states.values()] == [READY, ReplicaState.STARTING, ReplicaState.SUSPECT, DRAINING]
    await until(lambda: desk.host.renewed == [(7, 60_000)], "it is said to be checked")
    assert control.fleet.pools == {"pool"}


async def test_what_changes_is_said_as_it_does(stand: ControlStand) -> None:
    """After the replay each change goes alone: snapshots, renewals and reports, in order."""
    desk, control = await stand.linked()
    control.fleet.add("pool-life-1", "pool", 2)
    control.fleet.answered(address_of("pool-life-1"))
    await control.end.publish(snapshot_of(2, "acme", "globex"))
    control.end.renew(2, 1_000)
    await until(lambda: desk.host.renewed == [(2, 1_000)], "all of it arrives")
    assert desk.host.published[1:] == [snapshot_of(2, "acme", "globex")] and desk.states == {"pool-life-1": READY}
    control.fleet.doubted("pool", "pool-life-1")
    await until(lambda: desk.states == {"pool-life-1": ReplicaState.SUSPECT}, "it is doubted")
    control.fleet.gone("pool", "pool-life-1")
    await until(lambda: not desk.states, "it is gone")


async def test_a_renewal_that_ran_out_is_not_said_again(stand: ControlStand) -> None:
    """A coordinator that is found late is told what is left of the time, and nothing where none is."""
    control = stand.control(stand.links.directory / "later")
    control.end.renew(1, 1_000)
    await control.start()
    control.clock.advance(400)
    first = await stand.desk(path=stand.links.directory / "later")
    await until(lambda: first.host.renewed == [(1, 600)], "what is left is said")
    await first.stop()
    await until(lambda: not control.end.is_linked, "it is lost")
    control.clock.advance(600)
    second = await stand.desk(2, path=stand.links.directory / "later")
    await until(lambda: control.end.is_linked, "the next one has all")
    assert await control.ask() == 0 and second.host.renewed == []


async def test_another_coordinator_gets_everything_again(stand: ControlStand) -> None:
    """The next coordinator knows what the last one did, with what changed while there was none."""
    first = await stand.desk()
    paths = first.coordinator.path, stand.links.path()
    control = stand.control(*paths)
    serve_one(control)
    await control.start()
    await until(lambda: first.states == {"pool-life-1": READY}, "the first one has all")
    await first.stop()
    await until(lambda: not control.end.is_linked, "it is lost")
    await control.end.publish(snapshot_of(5, "globex"))
    control.fleet.add("pool-life-2", "pool", 2)
    second = await stand.desk(2, path=paths[1])
    await until(lambda: control.end.is_linked, "the second one has all")
    assert second.states == {"pool-life-1": READY, "pool-life-2": ReplicaState.STARTING}
    assert second.host.published == [snapshot_of(5, "globex")]


async def test_a_broken_link_is_followed_by_a_replay(stand: ControlStand) -> None:
    """The same coordinator loses nothing: lanes stay, what is gone meanwhile goes, and a condemnation is said again."""
    desk = await stand.desk()
    relay, path = await stand.links.relay(desk.coordinator.path)
    control = stand.control(path)
    serve_one(control)
    for number in (2, 3):
        control.fleet.add(f"pool-life-{number}", "pool", 2)
        control.fleet.answered(address_of(f"pool-life-{number}"))
    await control.start()
    await until(lambda: len(desk.states) == 3, "all are there")
    replica = desk.fleet.pool("pool").replicas["pool-life-1"]
    replica.take_lane()
    relay.hold_back()
    relay.cut()
    desk.fleet.condemn("pool", "pool-life-2")
    control.fleet.gone("pool", "pool-life-3")
    await until(lambda: control.condemned == ["pool-life-2"], "it hears what it missed")
    assert desk.states == {"pool-life-1": READY, "pool-life-2": DRAINING} and relay.opened == 2
    assert desk.fleet.pool("pool").replicas["pool-life-1"] is replica and replica.running == 1


async def test_changes_in_the_middle_of_a_replay_come_after_it(stand: ControlStand) -> None:
    """What is published and reported while the snapshot is on its way is in force with it, or right behind it."""
    desk = await stand.desk()
    control = stand.control(desk.coordinator.path)
    serve_one(control)
    await control.start()
    publishing = [asyncio.get_running_loop().create_task(control.end.publish(snapshot_of(n, "acme"))) for n in range(2, 9)]
    control.fleet.add("pool-life-2", "pool", 2)
    await asyncio.gather(*publishing)
    await until(lambda: desk.version == 8 and len(desk.states) == 2, "the last one is in force")
    versions = [snapshot.version for snapshot in desk.host.published]
    assert versions == sorted(versions)


async def test_the_fleet_stays_when_control_is_gone(stand: ControlStand) -> None:
    """A coordinator without control goes on with what it knows, and renews nothing."""
    desk, control = await stand.linked()
    serve_one(control)
    await until(lambda: desk.states == {"pool-life-1": READY}, "it is ready")
    await control.stop()
    desk.fleet.demand(desk.fleet.pool("pool"))
    desk.fleet.condemn("pool", "pool-life-1")
    assert desk.states == {"pool-life-1": DRAINING} and desk.host.renewed == []


async def test_an_engine_behind_a_url_is_the_same_for_the_next_life(stand: ControlStand) -> None:
    """Another life of control names the engine anew: its replica stays, with lanes and first name, and hears the new name."""
    desk = await stand.desk()
    first = stand.control(desk.coordinator.path, life="one")
    serve_one(first, "behind-one-1", BEHIND, "http://engine")
    serve_one(first, "pool-one-1")
    await first.start()
    await until(lambda: len(desk.states) == 2, "all are there")
    replica = desk.fleet.pool("behind").replicas["behind-one-1"]
    replica.take_lane()
    await first.stop()
    second = stand.control(desk.coordinator.path, life="two")
    serve_one(second, "behind-two-1", BEHIND, "http://engine")
    await second.start()
    await until(lambda: second.end.is_linked, "its replay is in force")
    assert desk.states == {"behind-one-1": READY} and desk.fleet.pool("behind").replicas["behind-one-1"] is replica
    desk.fleet.condemn("behind", "behind-one-1")
    await until(lambda: second.condemned == ["behind-two-1"], "it hears its own name")


async def test_a_replay_that_contradicts_what_runs_is_refused_for_good(stand: ControlStand) -> None:
    """A pool that still has requests cannot serve another revision: control ends, and what runs is not touched."""
    desk, first = await stand.linked("one")
    await first.stop()
    desk.host.busy.add("pool")
    second = stand.control(desk.coordinator.path, life="two")
    second.fleet.add_pool(Pool("pool", "other", 1, 2))
    await second.start(9)
    fault = await second.ended()
    assert isinstance(fault, errors.LinkFault) and fault.is_final and "another revision" in fault.detail
    assert desk.version == 1 and desk.fleet.pool("pool").revision == "rev"


# ── one control ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_the_last_control_is_the_one(stand: ControlStand) -> None:
    """A second control dismisses the first, which does not come back; the second is not disturbed."""
    desk, first = await stand.linked("one")
    second = stand.control(desk.coordinator.path, life="two")
    second.fleet.add_pool(POOL)
    await second.start(2)
    fault = await first.ended()
    assert isinstance(fault, errors.LinkFault) and (fault.detail, fault.is_final) == ("Another control was started.", True)
    await until(lambda: second.end.is_linked, "the second one is the one")
    again = stand.control(desk.coordinator.path, life="one")
    await again.start()
    assert isinstance(await again.ended(), errors.LinkFault)
    assert second.end.is_linked and await second.ask() == 0 and desk.version == 2


async def test_a_dismissed_control_that_was_away_does_not_come_back(stand: ControlStand) -> None:
    """A control whose link was broken as another was started is refused when it finds the coordinator again."""
    desk = await stand.desk()
    relay, path = await stand.links.relay(desk.coordinator.path)
    first = stand.control(path, life="one")
    await first.start()
    await until(lambda: first.end.is_linked, "the first one is linked")
    relay.holds_all = True
    relay.cut()
    await until(lambda: not first.end.is_linked, "it is away")
    second = stand.control(desk.coordinator.path, life="two")
    await second.start()
    await until(lambda: second.end.is_linked, "the second one is the one")
    relay.go_on()
    assert isinstance(await first.ended(), errors.LinkFault) and second.end.is_linked


async def test_a_control_that_greets_again_replaces_its_own_session(stand: ControlStand) -> None:
    """A coordinator that has not noticed yet that a link broke takes the same control on its next one."""
    desk = await stand.desk()
    relay, path = await stand.links.relay(desk.coordinator.path)
    control = stand.control(path)
    await control.start()
    await until(lambda: control.end.is_linked, "it is linked")
    relay.hold_back()
    control.clock.advance(SILENCE_MS)
    await until(lambda: relay.opened == 2 and control.end.is_linked, "it is linked again")
    assert await control.ask() == 0 and len(desk.host.published) == 2


async def test_a_silent_control_loses_its_session(stand: ControlStand) -> None:
    """Three beats without a word end the session at the coordinator's side too."""
    desk = await stand.desk()
    relay, path = await stand.links.relay(desk.coordinator.path)
    control = stand.control(path)
    await control.start()
    await until(lambda: control.end.is_linked, "it is linked")
    relay.hold_back(falling=False)
    desk.clock.advance(SILENCE_MS)
    await until(lambda: relay.opened == 2 and control.end.is_linked, "it is linked again")


# ── who answers, and who is refused ──────────────────────────────────────────────────────────────────────────────────


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


async def test_a_wrong_token_ends_control(stand: ControlStand) -> None:
    """What will never be taken in says so, instead of asking for ever."""
    desk = await stand.desk(token="t" * 32)
    control = stand.control(desk.coordinator.path, token="wrong")
    await control.start()
    fault = await control.ended()
    assert isinstance(fault, errors.LinkFault) and fault.is_final and desk.version == 0


async def test_a_cell_that_has_its_own_control_takes_no_other(stand: ControlStand) -> None:
    """The coordinator of `weir up` is not to be controlled from outside."""
    coordinator = await stand.links.coordinator()
    control = stand.control(coordinator.path)
    await control.start()
    fault = await control.ended()
    assert isinstance(fault, errors.LinkFault) and "its own process" in fault.detail and coordinator.host.sessions == {}


async def test_a_welcome_that_comes_too_late_is_none(stand: ControlStand) -> None:
    """Control that gave an address up takes no session on it."""
    control = stand.control(stand.links.path())
    with pytest.raises(errors.LinkFault):
        control.end.on_frame(Channel(control.end), Frame(Kind.WELCOME, 1, 0, 0, WELCOME))
    assert not control.end.is_linked


async def test_a_drained_replica_is_idle_once_the_coordinator_says_so(stand: ControlStand) -> None:
    """What a replica was given in the moment in which control drains it keeps it from being stopped."""
    desk, control = await stand.linked()
    serve_one(control)
    await until(lambda: desk.states == {"pool-life-1": READY}, "it is ready")
    desk.host.counts = {"pool": 1}
    control.fleet.drain("pool", "pool-life-1")
    assert control.fleet.running_in("pool") == 1
    await until(lambda: desk.states == {"pool-life-1": DRAINING}, "it is drained")
    desk.host.counts = {}
    await until(lambda: control.fleet.running_in("pool") == 0, "nothing runs there")


async def test_control_waits_for_a_coordinator(stand: ControlStand) -> None:
    """Without a coordinator control asks again and again, answers that there is none, and believes no engine to be idle."""
    path = stand.links.path()
    control = stand.control(path)
    control.fleet.add_pool(POOL)
    await control.start()
    with pytest.raises(errors.CoordinatorLost):
        await control.ask()
    assert control.fleet.running_in("pool") == 1
    desk = await stand.desk(path=path)
    await until(lambda: control.end.is_linked, "it is found")
    assert control.fleet.running_in("pool") == 0
    desk.host.counts = {"pool": 3}
    await until(lambda: control.fleet.running_in("pool") == 3, "it is counted")


PART = WholePart(0, 1, is_last=True)
ELSEWHERE = ReplicaDoubted("pool", "never named")


@pytest.mark.parametrize(
    ("epoch", "body"),
    [
        (1, b"\xc1"),
        (1, encode([Replayed()])),
        (1, encode([PART, Replayed(), Replayed()])),
        (1, encode([PART, Replayed(), ELSEWHERE])),
        (2, encode([PART, Replayed()])),
    ],
    ids=["garbage", "no snapshot", "twice", "unknown replica", "another epoch"],
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


# ── questions ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_questions_are_answered_beside_one_another(stand: ControlStand) -> None:
    """Each answer finds its question, also a failed one, with the error that the coordinator had."""
    desk, control = await stand.linked()
    desk.host.answers = 42
    assert await asyncio.gather(*(control.ask() for _ in range(10))) == [42] * 10
    desk.host.answers = errors.LedgerUnavailable("The ledger cannot be read now.", retry_after_ms=5)
    with pytest.raises(errors.LedgerUnavailable) as refused:
        await control.ask()
    assert (refused.value.detail, refused.value.retry_after_ms) == ("The ledger cannot be read now.", 5)


async def test_a_question_without_an_answer_is_bounded(stand: ControlStand) -> None:
    """An administrator does not wait for ever; what comes too late is dropped."""
    desk, control = await stand.linked()
    desk.host.answers = late = asyncio.Event()
    with pytest.raises(errors.CoordinatorLost):
        await control.end.ask(AskBehind(1, 10), int, bound_ms=20)
    late.set()
    desk.host.answers = 1
    assert await control.ask() == 1


async def test_questions_of_a_lost_session_fail_at_once(stand: ControlStand) -> None:
    """A coordinator that dies answers nothing: who asked hears it without waiting for the bound."""
    desk, control = await stand.linked()
    desk.host.answers = asyncio.Event()
    asking = asyncio.get_running_loop().create_task(control.ask())
    await until(lambda: desk.host.asked, "it is asked")
    began = time.monotonic()
    await desk.stop()
    with pytest.raises(errors.CoordinatorLost):
        await asking
    assert time.monotonic() - began < 1


async def test_too_many_questions_are_refused(stand: ControlStand) -> None:
    """A coordinator answers a bounded number at once, and the others hear so."""
    desk, control = await stand.linked()
    desk.host.answers = held = asyncio.Event()
    most = control_desk.ANSWERS_MAX
    asking = [asyncio.get_running_loop().create_task(control.ask()) for _ in range(most)]
    await until(lambda: len(desk.host.asked) == most, "all are asked")
    with pytest.raises(errors.CoordinatorLost):
        await control.ask()
    held.set()
    assert await asyncio.gather(*asking) == [0] * most


async def test_a_long_answer_arrives_whole_and_one_too_long_is_refused(
    stand: ControlStand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers longer than a frame come in pieces; one beyond the bound is refused instead of ending the coordinator."""
    desk, control = await stand.linked()
    desk.host.answers = long = "word " * 1_500_000
    assert await control.end.ask(AskOpenHolds("acme"), str) == long
    monkeypatch.setattr(control_desk, "ANSWER_BYTES_MAX", 1_000_000)
    with pytest.raises(errors.CoordinatorLost):
        await control.end.ask(AskOpenHolds("acme"), str)
    desk.host.answers = 3
    assert await control.ask() == 3


async def test_a_slow_answer_is_given_up_by_the_coordinator(stand: ControlStand, monkeypatch: pytest.MonkeyPatch) -> None:
    """A question cannot occupy the coordinator for ever."""
    monkeypatch.setattr(control_desk, "_ANSWER_S", 0.02)
    desk, control = await stand.linked()
    desk.host.answers = asyncio.Event()
    with pytest.raises(errors.CoordinatorLost, match="in time"):
        await control.ask()


async def test_demand_is_heard(stand: ControlStand) -> None:
    """A request for a pool on demand reaches control."""
    desk, control = await stand.linked()
    control.fleet.add_pool(Pool("asked", "rev", 1, 1, on_demand=True))
    await until(lambda: len(list(desk.fleet.pools)) == 2, "the pool is there")
    desk.fleet.demand(desk.fleet.pool("asked"))
    await until(lambda: control.demanded == ["asked"], "it is heard")


class ViewedHost:
    """Answers from a cell that stands still, as the coordinator's process does."""

    def __init__(self, desk: StandingDesk, cell: StandingCell) -> None:
        self._cell = cell
        desk.host.answer = self.answer  # type: ignore[method-assign]

    async def answer(self, question: Question) -> object:
        assert not isinstance(question, AskBehind)
        return await answer_of(self._cell, question)


async def test_what_administrators_ask_is_the_same_over_the_link(stand: ControlStand) -> None:
    """Every question of the management API has the same answer as in one process; why nothing is ready is control's word."""
    desk, control = await stand.linked()
    here, there = StandingCell(), LinkedCell(control.end, lambda pool: f"{pool} does not start")
    ViewedHost(desk, here)
    assert await there.accounts("acme") == await here.accounts("acme")
    assert await there.open_holds("acme") == await here.open_holds("acme")
    assert await there.generation("acme", "r:1") == await here.generation("acme", "r:1")
    assert await there.generation("acme", "unknown") == await here.generation("acme", "unknown")
    mine, theirs = await here.explanations("r:1"), await there.explanations("r:1")
    assert [*map(dict, theirs.timelines)] == [*map(dict, mine.timelines)] and theirs.kept == mine.kept
    assert [pool.name for pool in await there.pools()] == [pool.name for pool in await here.pools()]
    for shown, known in zip(await there.replicas(), await here.replicas(), strict=True):
        assert shown.name == known.name and shown.capabilities == known.capabilities
        assert shown.detail == (known.detail if known.state == READY else f"{shown.pool} does not start")


async def test_snapshots_of_control_are_whole(stand: ControlStand) -> None:
    """A snapshot of many parts is in force with its last one; limits that are removed are removed at the coordinator too."""
    desk, control = await stand.linked()
    many = snapshot_of(1, *(f"t{number}" for number in range(3_000)))
    await control.end.publish(many)
    await until(lambda: desk.host.published[-1] == many, "it is in force")
    assert len(desk.host.published) == 2
    await control.end.publish(Snapshot(2, {}))
    await until(lambda: desk.version == 2, "it is in force")
    assert desk.host.published[-1] == Snapshot(2) and desk.host.published[-1].limits == {}
