"""A session over links that break: each side gets what the other sent, once and in order, and keeps nothing it need not."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weir import errors
from weir.link.delivery import Inward, Outbox
from weir.link.endpoint import _MESSAGES_PER_FRAME, OUTBOX_BYTES_MAX, Endpoint
from weir.link.frames import FRAME_BYTES_MAX, Frame, FrameSplitter, Kind, decode_up, encode, frame
from weir.units import Nanos

_EPOCH = 7
_MIB = 1024 * 1024
_ROUNDS_MAX = 20


class HandClock:
    """Time that a test moves by hand."""

    def __init__(self) -> None:
        self.now_ns: Nanos = 0

    def monotonic_ns(self) -> Nanos:
        return self.now_ns

    def wall_ms(self) -> int:
        return 0


class End:
    """One end of one link: as a wire it takes what its side writes to the other."""

    def __init__(self, link: "Link", side: int) -> None:
        self.link = link
        self.side = side
        self.in_flight = bytearray()  # to this end
        self.splitter = FrameSplitter()
        self.is_closed = False

    def write(self, piece: bytes) -> None:
        if not self.is_closed and not self.link.is_broken:
            self.link.ends[1 - self.side].in_flight += piece

    def finish(self) -> None:
        self.is_closed = True

    def close(self) -> None:
        self.is_closed = True


class Link:
    """A network between two ends, first in first out each way. Once broken, what is in flight or written to it is lost."""

    def __init__(self) -> None:
        self.is_broken = False
        self.ends = (End(self, 0), End(self, 1))

    def break_off(self) -> None:
        self.is_broken = True
        for end in self.ends:
            end.in_flight.clear()


class Session:
    """Two endpoints and every link that they ever had. Side 0 dials and greets, as a gateway does; side 1 answers."""

    def __init__(self) -> None:
        clock = HandClock()
        self.sent: tuple[list[int], list[int]] = ([], [])
        self.got: tuple[list[int], list[int]] = ([], [])
        self.sides = tuple(Endpoint(clock, msgspec.msgpack.decode, got.extend) for got in self.got)
        self.links: list[Link] = []
        for side in self.sides:
            side.epoch = _EPOCH

    def send(self, side: int, number: int) -> None:
        for _ in range(number):
            self.sides[side].send(len(self.sent[side]))
            self.sent[side].append(len(self.sent[side]))

    def dial(self) -> None:
        """Another link, whatever became of the last one; it is in use once its greeting was answered."""
        self.sides[0].detach()
        self.links.append(Link())
        self.links[-1].ends[0].write(frame(Kind.HELLO, epoch=_EPOCH, received=self.sides[0].received))

    def notice(self, side: int) -> None:
        """A side learns, or thinks, that its link is broken."""
        self.sides[side].detach()

    def deliver(self, side: int, age: int, number: int) -> None:
        """Some bytes of what is in flight to a side on a link of that age: 0 is the newest."""
        if age >= len(self.links):
            return
        end = self.links[-1 - age].ends[side]
        piece = bytes(end.in_flight[:number])
        del end.in_flight[:number]
        for found in end.splitter.feed(piece):
            if not end.is_closed:
                self._take(end, found)

    def _take(self, end: End, found: Frame) -> None:
        side = self.sides[end.side]
        assert found.epoch == _EPOCH
        if found.kind is Kind.HELLO:
            end.write(frame(Kind.WELCOME, epoch=_EPOCH, received=side.received))
            side.attach(end, found.received)
        elif found.kind is Kind.WELCOME:
            if end.link is self.links[-1]:
                side.attach(end, found.received)
        elif side.uses(end):
            side.receive(found)

    def check(self) -> None:
        """What came is always the beginning of what was sent."""
        for got, sent in zip(self.got, reversed(self.sent), strict=True):
            assert got == sent[: len(got)]

    async def settle(self) -> None:
        """A last link, and everything on it arrives."""
        for link in self.links:
            link.break_off()
        self.dial()
        for _ in range(_ROUNDS_MAX):
            await asyncio.sleep(0)
            for side in (0, 1):
                self.deliver(side, 0, len(self.links[-1].ends[side].in_flight))
        assert all(side.is_attached for side in self.sides)

    def count_kept(self) -> int:
        """The frames that either side would repeat on another link."""
        repeated = 0
        for side, other in zip(self.sides, reversed(self.sides), strict=True):
            link = Link()
            side.attach(link.ends[0], other.received)
            repeated += len(FrameSplitter().feed(bytes(link.ends[1].in_flight)))
        return repeated


_SIDES = st.integers(0, 1)
Step: TypeAlias = tuple[str, tuple[int, ...]]


def _step(name: str, *numbers: st.SearchStrategy[int]) -> st.SearchStrategy[Step]:
    return st.tuples(st.just(name), st.tuples(*numbers))


_SOME = st.integers(1, 100) | st.just(10_000)
_STEPS = st.lists(
    st.one_of(
        _step("send", _SIDES, st.integers(1, 4)),
        _step("turn"),
        _step("beat", _SIDES),
        _step("deliver", _SIDES, st.just(0), _SOME),
        _step("deliver", _SIDES, st.integers(0, 2), _SOME),
        _step("turn_and_deliver", _SIDES),
        _step("break"),
        _step("notice", _SIDES),
        _step("dial"),
        _step("dial_and_greet"),
    ),
    max_size=60,
)


async def _play(session: Session, steps: Sequence[Step]) -> None:
    everything = 10_000
    actions: dict[str, Callable[..., None]] = {
        "send": session.send,
        "beat": lambda side: session.sides[side].beat(),
        "deliver": session.deliver,
        "turn_and_deliver": lambda side: session.deliver(side, 0, everything),
        "break": lambda: session.links[-1].break_off() if session.links else None,
        "notice": session.notice,
        "dial": session.dial,
    }
    for name, numbers in steps:
        if name.startswith("turn"):
            await asyncio.sleep(0)
        if name == "dial_and_greet":
            session.dial()
            session.deliver(1, 0, everything)
            session.deliver(0, 0, everything)
        elif name in actions:
            actions[name](*numbers)
        session.check()


@settings(max_examples=300)
@given(_STEPS)
def test_each_side_gets_what_the_other_sent_once_and_in_order(steps: list[Step]) -> None:
    """Protects requests over links that break: whatever is cut, lost or repeated, no message is missing, doubled or early."""

    async def play() -> None:
        session = Session()
        await _play(session, steps)
        await session.settle()
        assert session.got == (session.sent[1], session.sent[0])
        for endpoint in session.sides:
            endpoint.beat()
        for side in (0, 1):
            session.deliver(side, 0, 10_000)
        assert session.count_kept() == 0

    asyncio.run(play())


async def test_what_was_on_a_broken_link_is_sent_again_and_what_had_come_is_not() -> None:
    """Protects the middle of a break: of three frames two had come, unacknowledged, and one was lost; only that is repeated."""
    session = Session()
    await session.settle()
    for arrives in (True, True, False):
        session.send(0, 2)
        await asyncio.sleep(0)
        if arrives:
            session.deliver(1, 0, 10_000)
    session.links[-1].break_off()
    session.dial()
    session.deliver(1, 0, 10_000)
    session.deliver(0, 0, 10_000)
    in_flight = bytes(session.links[-1].ends[1].in_flight)
    assert [(each.number, msgspec.msgpack.decode(each.body)) for each in FrameSplitter().feed(in_flight)] == [(3, [4, 5])]
    await session.settle()
    assert session.got[1] == session.sent[0]


# ── an endpoint ──────────────────────────────────────────────────────────────────────────────────────────────────────


class RecordingWire:
    """Keeps what is written to it."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.is_closed = False

    def write(self, piece: bytes) -> None:
        self.pieces.append(piece)

    def finish(self) -> None:
        self.is_closed = True

    def close(self) -> None:
        self.is_closed = True

    def frames(self) -> list[Frame]:
        """What was written, as the other side reads it."""
        return FrameSplitter().feed(b"".join(self.pieces))


def _endpoint(clock: HandClock | None = None) -> tuple[Endpoint, RecordingWire, list[Any]]:
    """One with a link, and what came to it."""
    got: list[Any] = []
    endpoint, wire = Endpoint(clock or HandClock(), msgspec.msgpack.decode, got.extend), RecordingWire()
    endpoint.attach(wire, 0)
    return endpoint, wire, got


@given(st.lists(st.integers(0, _MESSAGES_PER_FRAME), min_size=1, max_size=4))
def test_what_is_sent_in_one_turn_leaves_in_one_frame(turns: list[int]) -> None:
    """Protects the rate that a link carries: a turn of the loop costs one frame, numbered from 1; nothing sent, no frame."""

    async def play() -> list[Frame]:
        endpoint, wire, _ = _endpoint()
        for turn, number in enumerate(turns):
            for _ in range(number):
                endpoint.send(turn)
            await asyncio.sleep(0)
        return wire.frames()

    found = asyncio.run(play())
    assert [msgspec.msgpack.decode(each.body) for each in found] == [[turn] * n for turn, n in enumerate(turns) if n]
    assert [each.number for each in found] == list(range(1, len(found) + 1))


async def test_more_messages_than_a_frame_holds_leave_in_several() -> None:
    """Protects what is behind a flood: frames stay short, whatever is sent in one turn."""
    endpoint, wire, _ = _endpoint()
    number = 2 * _MESSAGES_PER_FRAME + 1
    for message in range(number):
        endpoint.send(message)
    await asyncio.sleep(0)
    bodies = [msgspec.msgpack.decode(each.body) for each in wire.frames()]
    assert [len(body) for body in bodies] == [_MESSAGES_PER_FRAME, _MESSAGES_PER_FRAME, 1]
    assert [message for body in bodies for message in body] == list(range(number))


@settings(max_examples=12)
@given(st.lists(st.sampled_from([0, _MIB, 2 * _MIB, FRAME_BYTES_MAX - 10]), max_size=5))
def test_a_batch_larger_than_a_frame_is_cut(sizes: list[int]) -> None:
    """Protects the other side's bound: no body is larger than a frame's, and every message comes, in order."""

    async def play() -> list[Frame]:
        endpoint, wire, _ = _endpoint()
        for size in sizes:
            endpoint.send(bytes(size))
        await asyncio.sleep(0)
        return wire.frames()

    bodies = [found.body for found in asyncio.run(play())]
    assert all(len(body) <= FRAME_BYTES_MAX for body in bodies)
    assert [len(message) for body in bodies for message in msgspec.msgpack.decode(body)] == sizes
    assert len(bodies) <= max(len(sizes), 1) and (sum(sizes) < 2 * FRAME_BYTES_MAX or len(bodies) > 1)


@pytest.mark.parametrize("is_attached", [True, False])
async def test_a_side_that_falls_too_far_behind_is_reported(is_attached: bool) -> None:
    """Protects memory: what waits for a link, or for an acknowledgement, is bounded, and the owner hears when it is more."""
    endpoint, wire, _ = _endpoint()
    if not is_attached:
        endpoint.detach()
    told: list[bool] = []
    endpoint.on_broken = lambda why: told.append(True)
    message = bytes(3 * _MIB)
    for _ in range(OUTBOX_BYTES_MAX // len(message)):
        endpoint.send(message)
        await asyncio.sleep(0)
        wire.pieces.clear()
    assert told == []
    endpoint.send(message)
    await asyncio.sleep(0)
    assert told == [True]


async def test_acknowledged_messages_make_room() -> None:
    """Protects long sessions: many times the bound passes through a link whose other side keeps up, and nothing is kept."""
    endpoint, wire, _ = _endpoint()
    told: list[bool] = []
    endpoint.on_broken = lambda why: told.append(True)
    for number in range(1, 3 * OUTBOX_BYTES_MAX // (3 * _MIB)):
        endpoint.send(bytes(3 * _MIB))
        await asyncio.sleep(0)
        wire.pieces.clear()
        endpoint.receive(Frame(Kind.BATCH, 0, 0, number, b""))
    other = RecordingWire()
    endpoint.attach(other, number)
    assert told == [] and other.pieces == []


async def test_a_beat_says_what_has_come_and_takes_no_number() -> None:
    """Protects acknowledgement on a link with one direction: a beat is enough, and changes nothing else."""
    endpoint, wire, got = _endpoint()
    endpoint.epoch = _EPOCH
    for number in (1, 2, 2, 1):
        endpoint.receive(Frame(Kind.BATCH, _EPOCH, number, 0, encode([number])))
    endpoint.beat()
    endpoint.receive(Frame(Kind.BATCH, _EPOCH, 0, 0, b""))
    endpoint.send("message")
    await asyncio.sleep(0)
    beat, batch = wire.frames()
    assert beat == Frame(Kind.BATCH, _EPOCH, 0, 2, b"")
    assert (batch.number, batch.received, endpoint.received) == (1, 2, 2) and got == [1, 2]


@pytest.mark.parametrize(("number", "received"), [(2, 0), (2**64 - 1, 0), (0, 2), (1, 2), (0, 2**64 - 1)])
async def test_a_peer_with_other_numbers_ends_the_link(number: int, received: int) -> None:
    """Protects exactly once: a gap, or word of a frame that was never sent, is a LinkFault, and nothing of it is taken."""
    endpoint, _, got = _endpoint()
    endpoint.send("message")
    await asyncio.sleep(0)
    with pytest.raises(errors.LinkFault):
        endpoint.receive(Frame(Kind.BATCH, 0, number, received, encode(["theirs"])))
    assert got == [] and endpoint.received == 0
    endpoint.receive(Frame(Kind.BATCH, 0, 1, 1, encode(["next"])))
    assert got == ["next"]


async def test_a_link_that_another_replaces_is_closed() -> None:
    """Protects sockets: one link is in use, the one before is closed; a refused one leaves the side without any."""
    endpoint, first, _ = _endpoint()
    second = RecordingWire()
    endpoint.attach(second, 0)
    assert [(wire.is_closed, endpoint.uses(wire)) for wire in (first, second)] == [(True, False), (False, True)]
    with pytest.raises(errors.LinkFault):
        endpoint.attach(RecordingWire(), 1)
    assert second.is_closed and not endpoint.is_attached
    endpoint.detach()
    endpoint.beat()
    assert second.pieces == [] and not endpoint.uses(second)


async def test_silence_is_counted_from_what_was_heard_last() -> None:
    """Protects the lease: a frame, whatever is in it, and a new link end the silence; what this side sends does not."""
    clock = HandClock()
    endpoint, _, _ = _endpoint(clock)
    clock.now_ns = 5
    endpoint.beat()
    assert endpoint.silent_ns == 5
    endpoint.receive(Frame(Kind.BATCH, 0, 0, 0, b""))
    assert endpoint.silent_ns == 0
    clock.now_ns = 8
    endpoint.detach()
    assert endpoint.silent_ns == 3
    endpoint.attach(RecordingWire(), 0)
    assert endpoint.silent_ns == 0


# ── numbers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(st.lists(st.binary(max_size=9), max_size=12), st.lists(st.integers(0, 12), max_size=6), st.integers(0, 40))
def test_an_outbox_keeps_what_is_not_acknowledged_and_no_more(bodies: list[bytes], told: list[int], bytes_max: int) -> None:
    """Protects memory and repeats: exactly the bodies above the highest number told are kept, with theirs, and counted."""
    outbox = Outbox(bytes_max)
    assert [outbox.add(body) for body in bodies] == list(range(1, len(bodies) + 1))
    highest = 0
    for number in told:
        if number > len(bodies):
            with pytest.raises(errors.LinkFault):
                outbox.acknowledge(number)
            continue
        outbox.acknowledge(number)
        highest = max(highest, number)
        kept = [(at, body) for at, body in enumerate(bodies, 1) if at > highest]
        assert outbox.unacknowledged() == kept
        assert outbox.is_overfull == (sum(len(body) for _, body in kept) > bytes_max)


def test_an_outbox_is_overfull_only_above_its_bound() -> None:
    """Protects the bound's meaning: as much as it says is kept, one byte more is too much, until it is acknowledged."""
    outbox = Outbox(3)
    found: list[bool] = []
    for body in (b"123", b"4"):
        outbox.add(body)
        found.append(outbox.is_overfull)
    outbox.acknowledge(1)
    assert [*found, outbox.is_overfull] == [False, True, False] and outbox.unacknowledged() == [(2, b"4")]


@given(st.lists(st.integers(1, 8), max_size=30))
def test_frames_are_taken_once_and_in_order(numbers: list[int]) -> None:
    """Protects exactly once: the next number is taken, an earlier one is skipped, a later one is a LinkFault."""
    inward = Inward()
    for number in numbers:
        before = inward.number
        if number > before + 1:
            with pytest.raises(errors.LinkFault):
                inward.accept(number)
        else:
            assert inward.accept(number) is (number == before + 1)
        assert inward.number == before + (number == before + 1)


@pytest.mark.parametrize("body", [b"\xc1", encode([{"type": "no such message"}])])
async def test_what_cannot_be_worked_on_breaks_the_session(body: bytes) -> None:
    """Protects both sides' knowledge: a frame counts as received, so one that was not worked on must not be passed over."""
    endpoint = Endpoint(HandClock(), decode_up, lambda messages: None)
    told: list[str] = []
    endpoint.on_broken = told.append
    with pytest.raises(errors.LinkFault):
        endpoint.receive(Frame(Kind.BATCH, 0, 1, 0, body))
    assert len(told) == 1


async def test_what_cannot_be_written_breaks_the_session() -> None:
    """Protects what was sent with it in the same turn: the session ends rather than going on without them."""
    endpoint, _, _ = _endpoint()
    told: list[str] = []
    faults: list[object] = []
    endpoint.on_broken = told.append
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: faults.append(context["exception"]))
    endpoint.send(b"fine")
    endpoint.send("\ud800")
    await asyncio.sleep(0)
    assert len(told) == 1 and len(faults) == 1


async def test_one_direction_alone_is_acknowledged() -> None:
    """Protects the sender's memory: who only receives says every so often what it has."""
    endpoint, wire, _ = _endpoint()
    for number in range(1, 65):
        endpoint.receive(Frame(Kind.BATCH, 0, number, 0, encode([b"x"])))
    assert [found.received for found in wire.frames()] == [64]
