"""Another coordinator leads: what a relay tells it in each state of its request, and what follows where nothing is held."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
import pytest
from tests.simulation.test_late_messages import ASKED
from tests.unit.test_relay_attempts import STEP, Scene, play

from weir.core.endings import FinishReason, ending
from weir.core.registry.model import EngineKind
from weir.gateway.inbox import Inbox
from weir.messages import (
    Acquire,
    Admitted,
    DeliveryBooked,
    Down,
    EndBooked,
    Ended,
    EndUnbooked,
    Finish,
    GenerationRecord,
    Granted,
    HoldBooked,
    NotHeld,
    Reattach,
    Reattached,
    ReattachedAll,
    Rejected,
    ReplicaAddress,
    StandingView,
    Stopped,
    Up,
)
from weir.sim.virtual_loop import VirtualClock, VirtualLoop
from weir.sim.world import ALIAS, REVISION
from weir.units import ns_from_ms

State: TypeAlias = Callable[[Scene], Awaitable[None]]
QUESTION = msgspec.structs.replace(ASKED, ref=0, deadline_left_ms=60_000, waited_ns=5_000_000)
ELAPSED_S = 0.5
"""From the question to the takeover, at least."""


def record(reason: FinishReason) -> GenerationRecord:
    """The end that a coordinator tells."""
    return GenerationRecord("gen-it", "it", 1, ALIAS.name, REVISION.id, ending(reason).status, reason)


# ── states ───────────────────────────────────────────────────────────────────────────────────────────────────────────


async def undecided(scene: Scene) -> None:
    """Nothing was answered."""
    scene.relay.acquire(QUESTION)
    await asyncio.sleep(ELAPSED_S)


async def queued(scene: Scene) -> None:
    """It waits with its hold durable."""
    await undecided(scene)
    scene.admit()
    scene.relay.deliver(HoldBooked(0))


async def granted(scene: Scene) -> None:
    """Its engine was called."""
    await undecided(scene)
    scene.admit()
    scene.grant(1)


async def streaming(scene: Scene) -> None:
    """Its client has output."""
    await granted(scene)
    scene.relay.deliver(HoldBooked(0))
    await scene.open()
    scene.relay.deliver(DeliveryBooked(0, 1, STEP))
    await asyncio.sleep(0.02)
    assert scene.answer.text


async def finished(scene: Scene) -> None:
    """Its engine ended, and the report is not answered."""
    await streaming(scene)
    scene.relay.deliver(DeliveryBooked(0, 1, 40))
    await asyncio.sleep(5)
    assert len(scene.of(Finish)) == len(scene.of(Stopped)) == 1


async def left(scene: Scene) -> None:
    """Its client left; whether its engine stopped is not known yet."""
    await streaming(scene)
    scene.relay.client_lost()


async def left_and_stopped(scene: Scene) -> None:
    """Its client left, and its engine confirmed."""
    await left(scene)
    await asyncio.sleep(1)
    assert scene.of(Stopped)


async def failed(scene: Scene) -> None:
    """Its first attempt failed before the headers were out; its engine cannot confirm."""
    await granted(scene)
    await asyncio.sleep(0.02)
    scene.engine.lose("r1")
    await asyncio.sleep(0.02)
    assert scene.of(Finish)[0].reason is FinishReason.REPLICA_LOST and not scene.of(Stopped)[0].confirmed


async def failed_and_left(scene: Scene) -> None:
    """Its client left while it waited for the second attempt."""
    await failed(scene)
    scene.relay.client_lost()


async def tried_again(scene: Scene) -> None:
    """Its second attempt runs."""
    await failed(scene)
    scene.grant(2)


async def finished_the_second_time(scene: Scene) -> None:
    """Its second attempt's engine ended, and the report is not answered."""
    await tried_again(scene)
    scene.relay.deliver(HoldBooked(0))
    await scene.open()
    scene.relay.deliver(DeliveryBooked(0, 2, 40))
    await asyncio.sleep(5)
    assert [report.attempt for report in scene.of(Finish)] == [1, 2]


async def expired(scene: Scene) -> None:
    """It ended in its queue, and that is not durable."""
    await queued(scene)
    scene.relay.deliver(Ended(0, record(FinishReason.QUEUE_WAIT)))


async def refused_a_second_time(scene: Scene) -> None:
    """Its first attempt failed, and there is no second: the end is not durable."""
    await failed(scene)
    scene.relay.deliver(Ended(0, record(FinishReason.REPLICA_LOST)))


async def expired_after_a_failure(scene: Scene) -> None:
    """Its first attempt failed, and it ended while it waited for the second: that is not durable."""
    await failed(scene)
    scene.relay.deliver(Ended(0, record(FinishReason.QUEUE_WAIT)))


async def rejected(scene: Scene) -> None:
    """It was refused."""
    await undecided(scene)
    scene.relay.deliver(Rejected(0, "concurrency_limited", "", {}, StandingView()))


async def left_undecided(scene: Scene) -> None:
    """Its client left before a decision."""
    await undecided(scene)
    scene.relay.client_lost()


async def booked(scene: Scene) -> None:
    """Its end is durable."""
    await finished(scene)
    scene.relay.deliver(EndBooked(0, record(FinishReason.LENGTH)))


async def given_up(scene: Scene) -> None:
    """Its answer was dropped, and the end is what the ledger says."""
    await expired(scene)
    scene.relay.deliver(EndUnbooked(0, record(FinishReason.LEDGER_UNAVAILABLE)))


async def lost(scene: Scene) -> None:
    """No coordinator carries it any more."""
    await streaming(scene)
    scene.relay.coordinator_lost()


# ── what is told ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Told:
    """run, earlier: attempt, whether it has output, whether its client has some, whether its engine has stopped.

    asked: for delivery, of the run. finish: attempt and reason; is_ended: the former coordinator's end. after: what follows.
    """

    run: tuple[int, bool, bool, bool] | None = None
    earlier: tuple[int, bool, bool, bool] | None = None
    finish: tuple[int, str] | None = None
    after: tuple[object, ...] = ()
    asked: int = STEP
    is_ended: bool = False


FIRST_FAILED = (1, True, False, False)
IN_DOUBT = (Stopped, 1, False)
TOLD: dict[State, Told] = {
    undecided: Told(),
    queued: Told(),
    granted: Told((1, False, False, False)),
    streaming: Told((1, True, True, False), asked=2 * STEP),
    finished: Told((1, True, True, True), finish=(1, "length"), asked=40),
    left: Told((1, True, True, False), finish=(1, "disconnect"), asked=2 * STEP),
    left_and_stopped: Told((1, True, True, True), finish=(1, "disconnect"), asked=2 * STEP),
    failed: Told(FIRST_FAILED, finish=(1, "replica_lost"), after=(IN_DOUBT,)),
    failed_and_left: Told(FIRST_FAILED, finish=(1, "replica_lost"), after=(IN_DOUBT, (Finish, 0, "disconnect"))),
    tried_again: Told((2, False, False, False), FIRST_FAILED, after=(IN_DOUBT,)),
    finished_the_second_time: Told((2, True, True, True), FIRST_FAILED, finish=(2, "length"), after=(IN_DOUBT,), asked=40),
    expired: Told(finish=(0, "queue_wait"), is_ended=True),
    refused_a_second_time: Told(FIRST_FAILED, finish=(1, "replica_lost"), after=(IN_DOUBT,), is_ended=True),
    expired_after_a_failure: Told(FIRST_FAILED, finish=(1, "queue_wait"), after=(IN_DOUBT,), is_ended=True),
}


def shown(message: Up) -> object:
    """What follows a re-attachment, in short."""
    if isinstance(message, Stopped):
        return Stopped, message.attempt, message.confirmed
    assert isinstance(message, Finish) and message.usage is None
    return Finish, message.attempt, message.reason.value


def check_question(asked: Acquire, ref: int) -> None:
    """AssertionError unless it is what was asked at the beginning, with the time that it took since, and its deadline."""
    elapsed_ms = QUESTION.deadline_left_ms - asked.deadline_left_ms
    assert 0 <= elapsed_ms - asyncio.get_running_loop().time() * 1e3 < 1
    waited_ns = QUESTION.waited_ns + ns_from_ms(elapsed_ms)
    left_ms = QUESTION.deadline_left_ms - elapsed_ms
    assert asked == msgspec.structs.replace(QUESTION, ref=ref, deadline_left_ms=left_ms, waited_ns=waited_ns)


@pytest.mark.parametrize("state", TOLD, ids=lambda state: state.__name__)
def test_each_state_is_told_as_it_is(state: State) -> None:
    """Protects what goes on: another coordinator hears which attempt runs where, and what was reported and not answered."""

    async def script(scene: Scene) -> None:
        await state(scene)
        expected = TOLD[state]
        told, *after = scene.relay.reattach()
        assert isinstance(told, Reattach)
        check_question(told.acquire, ref=0)
        for run, short in ((told.run, expected.run), (told.earlier, expected.earlier)):
            assert (run and (run.attempt, run.has_output, run.first_output, run.is_stopped)) == short
            assert run is None or (run.replica.name, run.lane) == (f"r{run.attempt}", 0)
        assert (told.finish and (told.finish.attempt, told.finish.reason.value)) == expected.finish
        assert told.run is None or told.run.delivered_max == expected.asked
        assert [shown(message) for message in after] == list(expected.after)
        assert told.is_ended == expected.is_ended
        if told.finish is not None and told.finish.attempt and not told.is_ended:
            assert told.finish in scene.of(Finish)

    play(script, is_admitted=False)


@pytest.mark.parametrize("state", [rejected, left_undecided, booked, given_up, lost], ids=lambda state: state.__name__)
def test_nothing_is_told_of_what_is_over(state: State) -> None:
    """Protects ids and holds: what was refused, left undecided, is booked or lost binds nothing at another coordinator."""

    async def script(scene: Scene) -> None:
        await state(scene)
        assert scene.relay.reattach() == ()

    play(script, is_admitted=False)


@pytest.mark.parametrize("state", [undecided, queued, granted], ids=lambda state: state.__name__)
def test_a_whole_answer_is_told_until_it_is_booked(state: State) -> None:
    """Protects whole answers: nothing of one is with its client before the settlement is durable, so its report is repeated."""

    async def script(scene: Scene) -> None:
        await state(scene)
        if state is not granted:
            [told] = scene.relay.reattach()
            assert isinstance(told, Reattach) and (told.run, told.finish) == (None, None)
            return
        await asyncio.sleep(5)
        [report] = scene.of(Finish)
        scene.relay.deliver(Ended(0, record(FinishReason.LENGTH)))
        [told] = scene.relay.reattach()
        assert isinstance(told, Reattach) and told.finish == report and told.run is not None
        assert (told.run.has_output, told.run.first_output, told.run.is_stopped) == (True, False, True)
        scene.relay.deliver(EndBooked(0, record(FinishReason.LENGTH)))
        assert scene.relay.reattach() == () and scene.relay.whole_output()

    play(script, is_admitted=False, stream=False)


def test_since_a_grant_it_runs() -> None:
    """Protects predictions: the new coordinator hears for how long an attempt has run."""

    async def script(scene: Scene) -> None:
        await granted(scene)
        await asyncio.sleep(0.25)
        [told] = scene.relay.reattach()
        assert isinstance(told, Reattach) and told.run is not None
        assert told.run.since_ns == 250_000_000

    play(script, is_admitted=False)


@pytest.mark.parametrize("state", [undecided, queued, granted], ids=lambda state: state.__name__)
def test_what_is_held_goes_on(state: State) -> None:
    """Protects a request whose decision was not heard: it is admitted with its hold durable, and asks nothing again."""

    async def script(scene: Scene) -> None:
        await state(scene)
        before = list(scene.sent)
        scene.relay.deliver(Reattached(0, 3, StandingView()))
        decision = scene.relay.decision
        assert isinstance(decision, Admitted) and decision.execution == (3 if state is undecided else 1)
        assert scene.relay.hold_durable and scene.relay.is_startable == (state is granted)
        assert scene.sent == before and not scene.relay.is_over

    play(script, is_admitted=False)


# ── nothing is held ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("state", [undecided, queued, granted, failed, tried_again], ids=lambda state: state.__name__)
def test_what_is_not_held_is_asked_for_afresh(state: State) -> None:
    """Protects clients: nothing was delivered, so it begins anew under its ids and deadline, and its engine stops."""

    async def script(scene: Scene) -> None:
        await state(scene)
        running = "r1" if state is granted else "r2" if state is tried_again else None
        before = len(scene.sent)
        scene.relay.deliver(NotHeld(0))
        assert scene.reopened == [1] and scene.relay.ref == 1
        [asked] = [message for message in scene.sent[before:] if isinstance(message, Acquire)]
        check_question(asked, ref=1)
        assert scene.relay.decision is None and not scene.relay.hold_durable and not scene.relay.is_over
        await asyncio.sleep(1)
        stopped = [message for message in scene.sent[before:] if isinstance(message, Stopped)]
        assert [(each.ref, each.confirmed) for each in stopped] == ([(0, True)] if running else [])
        assert running is None or scene.engine.running(running) == 0
        scene.relay.deliver(Admitted(1, 1, StandingView()))
        scene.relay.deliver(HoldBooked(1))
        assert not scene.relay.is_startable and not scene.relay.is_over
        told, *after = scene.relay.reattach()
        assert isinstance(told, Reattach) and (told.run, told.earlier, told.finish, after) == (None, None, None, [])
        assert told.acquire.ref == 1

    play(script, is_admitted=False)


@pytest.mark.parametrize(
    "state", [streaming, finished, left, failed_and_left, expired, refused_a_second_time], ids=lambda state: state.__name__
)
def test_what_cannot_begin_anew_is_lost(state: State) -> None:
    """Protects clients from a second beginning: what was opened or has ended is not asked for again, and its engine stops."""

    async def script(scene: Scene) -> None:
        await state(scene)
        before = len(scene.sent)
        scene.relay.deliver(NotHeld(0))
        assert scene.relay.is_lost and scene.relay.is_over and not scene.reopened
        await asyncio.sleep(1)
        assert not any(isinstance(message, Acquire) for message in scene.sent[before:])
        assert scene.engine.running("r1") == 0
        assert scene.relay.reattach() == ()

    play(script, is_admitted=False)


@pytest.mark.parametrize("state", [undecided, queued, granted, streaming, failed], ids=lambda state: state.__name__)
def test_what_may_be_held_is_not_asked_for_again(state: State) -> None:
    """Protects ids: while the store cannot say whether it is held, it is lost here, and never runs beside itself."""

    async def script(scene: Scene) -> None:
        await state(scene)
        scene.relay.deliver(NotHeld(0, is_known=False))
        assert scene.relay.is_lost and scene.relay.is_over and not scene.reopened
        await asyncio.sleep(1)
        assert scene.engine.running("r1") == 0 and len(scene.of(Acquire)) == 1

    play(script, is_admitted=False)


# ── the inbox ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Line:
    """A link that keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[Up] = []

    def send(self, message: Up) -> None:
        """The coordinator's port."""
        self.sent.append(message)


class Kept:
    """A request that ended: pending until its end is durable."""

    def __init__(self) -> None:
        self.is_pending = True
        self.heard: list[Down] = []

    def deliver(self, message: Down) -> None:
        """A message about it."""
        self.heard.append(message)
        self.is_pending = not isinstance(message, EndBooked)

    def coordinator_lost(self) -> None:
        """No more will come."""
        self.is_pending = False

    def reattach(self) -> list[Up]:
        """What another coordinator must know."""
        return [Reattach(ASKED, finish=Finish(1, 0, FinishReason.QUEUE_WAIT))] if self.is_pending else []


def inbox_on(line: Line) -> Inbox:
    """An inbox whose session is open."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    inbox = Inbox(VirtualClock(loop))
    inbox.link = line
    return inbox


def test_what_was_closed_unbooked_is_told_until_it_is_booked() -> None:
    """Protects settlements: its client has its answer and is gone, and its end is told until it is durable."""

    async def script(scene: Scene) -> None:
        line, kept = Line(), Kept()
        inbox = inbox_on(line)
        ref = inbox.open(kept)
        inbox.close(ref)
        assert inbox.open_requests == 0
        for _ in range(2):
            line.sent.clear()
            inbox.renew()
            assert [type(message) for message in line.sent] == [Reattach, ReattachedAll]
        inbox.deliver(EndBooked(ref, record(FinishReason.QUEUE_WAIT)))
        assert kept.heard
        line.sent.clear()
        inbox.renew()
        assert line.sent == [ReattachedAll()]

    play(script)


def test_what_is_said_of_the_former_ref_is_late() -> None:
    """Protects a request that is asked for afresh: words about its first asking are not its, and a grant's lane returns."""

    async def script(scene: Scene) -> None:
        line, kept = Line(), Kept()
        inbox = inbox_on(line)
        ref = inbox.open(kept)
        again = inbox.reopen(ref)
        assert again != ref and inbox.open_requests == 1
        address = ReplicaAddress("r1", "pool", REVISION.id, EngineKind.SIMULATED, "", "model", 10)
        inbox.deliver(Ended(ref, record(FinishReason.QUEUE_WAIT)))
        assert not kept.heard
        inbox.deliver(Granted(ref, 1, address, 0, STEP))
        assert line.sent == [Stopped(ref, 1)]
        inbox.deliver(HoldBooked(again))
        assert kept.heard == [HoldBooked(again)]

    play(script)
