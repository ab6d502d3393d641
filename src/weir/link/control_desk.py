"""The coordinator's end of control's link: one session with one control, whose replay is in force or not at all.

The control that greeted last is the one: another that has a session is dismissed and never taken again. When the session is
over nothing changes: fleet and snapshot stay as they are, and the snapshot runs out as it would. Questions are answered beside
one another, each within a bound.
"""

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import structlog

from weir import errors
from weir.core.registry.snapshot import Snapshot
from weir.core.registry.snapshot_parts import SnapshotAssembly, WholePart
from weir.link.channel import Channel
from weir.link.control_fleet import ControlledFleet
from weir.link.control_messages import (
    AnswerPart,
    Asked,
    ControlDown,
    ControlUp,
    ControlWelcome,
    Counted,
    Failed,
    FleetReport,
    Question,
    Replayed,
    ReplicaDrained,
    SnapshotRenewed,
    decode_control_up,
)
from weir.link.endpoint import Endpoint
from weir.link.frames import Frame, Hello, Kind, Refused, encode, frame
from weir.ports import Clock
from weir.units import Bytes, Millis

_log = structlog.get_logger("weir.link")

ANSWERS_MAX = 64
"""Questions that are being answered at once."""
ANSWER_BYTES_MAX: Bytes = 32 * 1024 * 1024
_PIECE_BYTES: Bytes = 1024 * 1024
_ANSWER_S = 3.0
"""Longer than whoever asked waits."""
_DISMISSED_MAX = 1_024


class ControlledHost(Protocol):
    """The coordinator, as far as control needs it."""

    def publish(self, snapshot: Snapshot) -> None:
        """Put it in force, unless it is older than what is."""
        ...

    def renew(self, version: int, valid_ms: Millis) -> None:
        """What is in force, if it is of this version, may be worked by for so long."""
        ...

    def running(self) -> Mapping[str, int]:
        """By pool, above 0 where anything runs or waits."""
        ...

    async def answer(self, question: Question) -> Any:
        """What MessagePack can write. Raises errors of ours."""
        ...


class _Session:
    """A control's session. replay: reports until it is complete, None afterwards; snapshot: the last that is complete."""

    def __init__(self, life: str, channel: Channel, endpoint: Endpoint) -> None:
        self.life = life
        self.channel = channel
        self.endpoint = endpoint
        self.assembly = SnapshotAssembly()
        self.snapshot: Snapshot | None = None
        self.replay: list[FleetReport] | None = []
        self.answering = 0


class ControlDesk:
    """epoch: the coordinator's. heartbeat_ms: as of all links; three of them without a word end the session."""

    def __init__(self, clock: Clock, host: ControlledHost, fleet: ControlledFleet, epoch: int, heartbeat_ms: Millis) -> None:
        self._clock = clock
        self._host = host
        self._fleet = fleet
        self._epoch = epoch
        self._heartbeat_ms = heartbeat_ms
        self._session: _Session | None = None
        self._life = ""  # of the control that greeted last
        self._dismissed: deque[str] = deque(maxlen=_DISMISSED_MAX)
        self._tasks: asyncio.TaskGroup | None = None
        fleet.tell = self._tell

    async def run(self) -> None:
        """Beat, answer, and give up a control that is silent, until cancelled; then its link is cut."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                while True:
                    await asyncio.sleep(self._heartbeat_ms / 1e3)
                    if self._session is not None:
                        self._beat(self._session)
        finally:
            self._tasks = None
            if self._session is not None:
                self._end(self._session, "the coordinator stops")

    def _beat(self, session: _Session) -> None:
        if session.endpoint.fell_silent(self._heartbeat_ms):
            self._end(session, "it was silent")
        elif session.replay is None:
            session.endpoint.send(self._counted())
        else:
            session.endpoint.beat()

    # ── sessions ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def greet(self, channel: Channel, hello: Hello, version: int) -> None:
        """Control greets on this link, by a version of messages that both speak."""
        if hello.session in self._dismissed:
            self._refuse(channel, errors.LinkFault("Another control was started."))
            return
        if self._life not in ("", hello.session):
            self._dismissed.append(self._life)
        former, self._life = self._session, hello.session
        if former is not None and former.life != hello.session:
            self._dismiss(former, errors.LinkFault("Another control was started."))
        elif former is not None:
            self._end(former, "it greeted again")
        endpoint = Endpoint(self._clock, decode_control_up, lambda messages: self._receive(session, messages))
        session = self._session = _Session(hello.session, channel, endpoint)
        endpoint.epoch = self._epoch
        endpoint.on_broken = lambda why: self._end(session, why)
        channel.hand_over(self)
        channel.write(frame(Kind.WELCOME, encode(ControlWelcome(version, self._heartbeat_ms)), epoch=self._epoch))
        channel.greeted(session)
        endpoint.attach(channel, 0)
        _log.info("control_connected", life=hello.session)

    def _refuse(self, channel: Channel, why: errors.LinkFault) -> None:
        channel.write(frame(Kind.REFUSED, encode(Refused(why.detail, is_final=True)), epoch=self._epoch))
        channel.finish()

    def _dismiss(self, session: _Session, why: errors.LinkFault) -> None:
        """For good: it is not to come back."""
        self._refuse(session.channel, why)
        self._end(session, why.detail)

    def _end(self, session: _Session, why: str) -> None:
        if session is self._session:
            self._session = None
            _log.warning("control_disconnected", life=session.life, reason=why)
        session.endpoint.detach()

    def on_closed(self, channel: Channel) -> None:
        """The link is over, and the session with it."""
        self._end(channel.session, "its link ended")

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def on_frame(self, channel: Channel, found: Frame) -> None:
        """One frame. Raises LinkFault."""
        session: _Session = channel.session
        if found.epoch != self._epoch or found.kind is not Kind.BATCH:
            raise errors.LinkFault("Control speaks to another coordinator.")
        if session is self._session:  # else it was dismissed
            session.endpoint.receive(found)

    def _receive(self, session: _Session, messages: Sequence[ControlUp]) -> None:
        for message in messages:
            if session is not self._session:
                return  # dismissed by what came before
            match message:
                case WholePart():
                    self._take_part(session, message)
                case SnapshotRenewed():
                    self._host.renew(message.version, message.valid_ms)
                case Replayed():
                    self._put_in_force(session)
                case Asked():
                    self._start_answer(session, message)
                case _ if session.replay is not None:
                    session.replay.append(message)
                case _:
                    self._fleet.apply(message)
                    if isinstance(message, ReplicaDrained):
                        self._tell(self._counted())  # control stops it once it knows that nothing runs

    def _take_part(self, session: _Session, part: WholePart) -> None:
        if part.base not in (0, session.assembly.current.version):
            raise errors.LinkFault("Control tells a change of a snapshot that it did not tell.")
        snapshot = session.assembly.take(part)
        if snapshot is None:
            return
        session.snapshot = snapshot
        if session.replay is None:
            self._host.publish(snapshot)

    def _put_in_force(self, session: _Session) -> None:
        """All that control replayed, in one step."""
        reports, session.replay = session.replay, None
        if reports is None or session.snapshot is None:
            raise errors.LinkFault("Control replayed no snapshot, or twice.")
        try:
            self._fleet.check(reports)
        except errors.LinkFault as conflict:
            if not conflict.is_final:
                raise
            self._dismiss(session, conflict)
            return
        self._host.publish(session.snapshot)
        self._fleet.replay(reports)
        session.endpoint.send(self._counted())
        _log.info("control_replayed", life=session.life, version=session.snapshot.version)

    def _counted(self) -> Counted:
        return Counted(dict(self._host.running()), self._fleet.unused())

    def _tell(self, message: ControlDown) -> None:
        """Heard if control's replay is in force; what matters is said again after the next one."""
        if self._session is not None and self._session.replay is None:
            self._session.endpoint.send(message)

    # ── questions ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _start_answer(self, session: _Session, asked: Asked) -> None:
        if self._tasks is None or session.answering >= ANSWERS_MAX:
            _fail(session, asked, errors.CoordinatorLost("The coordinator has too many questions to answer."))
            return
        session.answering += 1
        self._tasks.create_task(self._answer(session, asked))

    async def _answer(self, session: _Session, asked: Asked) -> None:
        try:
            async with asyncio.timeout(_ANSWER_S):
                answer = await self._host.answer(asked.question)
            _send_answer(session, asked, encode(answer))
        except TimeoutError:
            _fail(session, asked, errors.CoordinatorLost("The coordinator did not answer in time."))
        except errors.WeirError as fault:
            _fail(session, asked, fault)
        finally:
            session.answering -= 1


def _send_answer(session: _Session, asked: Asked, body: bytes) -> None:
    """In pieces, each well below a frame."""
    if len(body) > ANSWER_BYTES_MAX:
        _fail(session, asked, errors.CoordinatorLost("The answer is too long for the link."))
        return
    starts = range(0, len(body), _PIECE_BYTES)
    for start in starts:
        piece = body[start : start + _PIECE_BYTES]
        session.endpoint.send(AnswerPart(asked.query, piece, is_last=start == starts[-1]))


def _fail(session: _Session, asked: Asked, fault: errors.WeirError) -> None:
    session.endpoint.send(Failed(asked.query, fault.code, fault.detail, fault.retry_after_ms))
