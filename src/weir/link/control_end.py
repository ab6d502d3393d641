"""Control's end of its link: finds the coordinator that leads, replays everything to it, then says what changes, and asks.

A session is as long as its link. Whatever ended it, the next one begins with the whole snapshot and the whole fleet, so that
neither side needs to know what the other had. It looks for a coordinator for ever, and ends only when one dismisses it.
"""

import asyncio
from collections.abc import Callable, Sequence
from itertools import count
from typing import TypeVar

import msgspec
import structlog

from weir import errors
from weir.core.registry.snapshot import Snapshot
from weir.core.registry.snapshot_parts import whole_parts_between
from weir.link.channel import Channel
from weir.link.control_messages import (
    AnswerPart,
    Asked,
    Condemned,
    ControlDown,
    ControlWelcome,
    Counted,
    Demanded,
    Failed,
    FleetReport,
    PoolWithdrawn,
    Question,
    Replayed,
    SnapshotRenewed,
    decode_control_down,
    decode_control_welcome,
    version_of,
)
from weir.link.control_reports import ReportedFleet
from weir.link.endpoint import Endpoint
from weir.link.frames import WITHDRAWING_VERSION, Frame, Hello, Kind, Role, encode, frame
from weir.link.gateway_end import Connect
from weir.ports import Clock
from weir.units import Millis, ms_from_ns, ns_from_ms

Answer = TypeVar("Answer")

_log = structlog.get_logger("weir.link")

ANSWER_MS: Millis = 2_000
"""How long an administrator waits for what the coordinator knows."""
_CONNECT_S = 3.0
_RETRY_FIRST_S = 0.05
_RETRY_MAX_S = 0.5
_LOST_RETRY_MS: Millis = 1_000
_NOTHING = Snapshot()


class _Waiting:
    """A question whose answer is arriving."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.body: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def fail(self, fault: errors.WeirError) -> None:
        """There is no answer."""
        if not self.body.done():
            self.body.set_exception(fault)

    def take(self, part: AnswerPart) -> None:
        """One part of it."""
        self.pieces.append(part.piece)
        if part.is_last and not self.body.done():
            self.body.set_result(b"".join(self.pieces))


class _Session:
    """One session. version: of its messages. told: the snapshot that the coordinator has. is_live: everything was replayed.

    is_in_force: the coordinator says so. refused: why it was dismissed.
    """

    def __init__(self, channel: Channel, endpoint: Endpoint, welcome: ControlWelcome) -> None:
        self.channel = channel
        self.endpoint = endpoint
        self.version = welcome.version
        self.heartbeat_ms = welcome.heartbeat_ms
        self.told = _NOTHING
        self.telling = asyncio.Lock()
        self.is_live = False
        self.is_in_force = False
        self.over = asyncio.Event()
        self.refused: errors.LinkFault | None = None
        self.waiting: dict[int, _Waiting] = {}


class ControlEnd:
    """life: a name of this run of control that no other ever had. addresses: of coordinators, tried in turn.

    in_force: set once a coordinator works by what was replayed. on_demanded, on_condemned: told pools and replicas.
    """

    def __init__(self, clock: Clock, addresses: Sequence[Connect], token: str, life: str, fleet: ReportedFleet) -> None:
        assert addresses
        self._clock = clock
        self._addresses = addresses
        self._token = token
        self._life = life
        self._fleet = fleet
        self._wanted = _NOTHING
        self._renewed = (0, 0)  # version, and until when in nanoseconds
        self._highest_epoch = 0
        self._greeting: tuple[Channel, asyncio.Future[_Session]] | None = None
        self._session: _Session | None = None
        self._reasons: dict[Connect, str] = {}
        self._queries = count(1)
        self.in_force = asyncio.Event()
        self.on_demanded: Callable[[str], None] = lambda pool: None
        self.on_condemned: Callable[[str], None] = lambda replica: None
        fleet.tell = self._report

    @property
    def is_linked(self) -> bool:
        """Whether a coordinator works by what was replayed."""
        return self._session is not None and self._session.is_in_force

    # ── said to the coordinator ──────────────────────────────────────────────────────────────────────────────────────

    async def publish(self, snapshot: Snapshot) -> None:
        """Returns once it was sent to the coordinator, if there is one; any later one gets it with the replay."""
        self._wanted = snapshot
        if self._session is not None:
            await self._tell_snapshot(self._session)

    def renew(self, version: int, valid_ms: Millis) -> None:
        """The snapshot of this version was checked against the store: it may be worked by for so long from now."""
        self._renewed = version, self._clock.monotonic_ns() + ns_from_ms(valid_ms)
        if self._session is not None and self._session.is_live:
            self._say_renewed(self._session)

    def _say_renewed(self, session: _Session) -> None:
        version, until_ns = self._renewed
        valid_ms = ms_from_ns(until_ns - self._clock.monotonic_ns())
        if valid_ms > 0:
            session.endpoint.send(SnapshotRenewed(version, valid_ms))

    def _report(self, report: FleetReport) -> None:
        session = self._session
        if session is None or not session.is_live:
            return
        if session.version >= WITHDRAWING_VERSION or not isinstance(report, PoolWithdrawn):
            session.endpoint.send(report)

    async def _tell_snapshot(self, session: _Session) -> None:
        """What differs, reckoned off the event loop: it may be of 100,000 rows."""
        async with session.telling:
            while session.told is not self._wanted and not session.over.is_set():
                before, after = session.told, self._wanted
                for part in await asyncio.to_thread(lambda: list(whole_parts_between(before, after))):  # noqa: B023  awaited here
                    session.endpoint.send(part)
                    await asyncio.sleep(0)  # what others send goes between
                session.told = after

    async def _replay(self, session: _Session) -> None:
        await self._tell_snapshot(session)
        for report in self._fleet.replay():
            session.endpoint.send(report)
        session.endpoint.send(Replayed())
        session.is_live = True  # from here on what changes is said; nothing came between
        self._say_renewed(session)

    async def ask(self, question: Question, kind: type[Answer], bound_ms: Millis = ANSWER_MS) -> Answer:
        """The coordinator's answer. Raises CoordinatorLost where none comes within the bound, and what it says."""
        session = self._session
        if session is None or not session.is_live:
            raise _lost("No coordinator is connected.")
        if session.version < version_of(question):
            raise _lost("The coordinator that leads is of an older version and cannot answer this.")
        query, waiting = next(self._queries), _Waiting()
        session.waiting[query] = waiting
        session.endpoint.send(Asked(query, question))
        try:
            async with asyncio.timeout(bound_ms / 1e3):
                body = await waiting.body
        except TimeoutError:
            raise _lost("The coordinator did not answer in time.") from None
        finally:
            session.waiting.pop(query, None)
        return msgspec.msgpack.decode(body, type=kind)

    # ── life ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def run(self) -> None:
        """Keep a session until cancelled. Raises LinkFault when a coordinator refuses for good, or dismisses this control."""
        wait_s = _RETRY_FIRST_S
        try:
            while True:
                for address in self._addresses:
                    if await self._try(address):
                        wait_s = _RETRY_FIRST_S
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, _RETRY_MAX_S)
        finally:
            if self._session is not None:
                self._end(self._session)

    async def _try(self, address: Connect) -> bool:
        """Keep a session there, if there is a coordinator; whether what was replayed came into force. Raises LinkFault."""
        session = await self._open(address)
        if session is None:
            return False
        await self._keep(session)
        if session.refused is not None:
            raise session.refused
        return session.is_in_force

    async def _open(self, connect: Connect) -> _Session | None:
        """A session on a link to this address, or None."""
        channel = Channel(self)
        welcomed: asyncio.Future[_Session] = asyncio.get_running_loop().create_future()
        self._greeting = channel, welcomed
        try:
            async with asyncio.timeout(_CONNECT_S):
                await connect(lambda: channel)
                body = encode(Hello(self._life, self._token, role=Role.CONTROL))
                channel.write(frame(Kind.HELLO, body, epoch=self._highest_epoch))
                return await welcomed
        except (OSError, TimeoutError, UnicodeError, errors.LinkFault) as fault:
            if isinstance(fault, errors.LinkFault) and fault.is_final:
                raise
            if self._session is not None:  # it was welcomed as its time ran out
                self._end(self._session)
            self._tell_once(connect, f"{type(fault).__name__}: {fault}")
            return None
        finally:
            self._greeting = None
            if self._session is None:
                channel.close()

    def _tell_once(self, connect: Connect, reason: str) -> None:
        if self._reasons.get(connect) != reason:
            _log.warning("no_coordinator", reason=reason)
            self._reasons[connect] = reason

    async def _keep(self, session: _Session) -> None:
        """Replay, and beat while the link lives."""
        async with asyncio.TaskGroup() as tasks:
            replaying = tasks.create_task(self._replay(session))
            while not session.over.is_set():
                session.endpoint.beat()
                try:
                    async with asyncio.timeout(session.heartbeat_ms / 1e3):
                        await session.over.wait()
                except TimeoutError:
                    if session.endpoint.fell_silent(session.heartbeat_ms):
                        self._end(session)
            replaying.cancel()

    def _end(self, session: _Session) -> None:
        """Nothing that was asked is answered, and nobody knows what runs."""
        if session is not self._session:
            return
        self._session = None
        _log.warning("coordinator_disconnected", life=self._life)
        session.over.set()
        session.endpoint.detach()
        self._fleet.counted(None)
        for waiting in session.waiting.values():
            waiting.fail(_lost("The coordinator was lost."))

    # ── links ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def on_frame(self, channel: Channel, found: Frame) -> None:
        """One frame. Raises LinkFault."""
        session: _Session | None = channel.session
        if session is None:
            self._on_welcome(channel, found)
        elif found.kind is Kind.REFUSED:
            self._on_dismissal(session, found)
        elif found.kind is not Kind.BATCH or found.epoch != session.endpoint.epoch:
            raise errors.LinkFault("Another coordinator speaks.")
        elif session is self._session:  # else it is over
            session.endpoint.receive(found)

    def _on_welcome(self, channel: Channel, found: Frame) -> None:
        if self._greeting is None or self._greeting[0] is not channel or self._greeting[1].done():
            raise errors.LinkFault("A welcome came too late.")
        welcomed = self._greeting[1]
        try:
            session = self._begin(channel, found)
        except errors.LinkFault as fault:
            welcomed.set_exception(fault)
            raise
        welcomed.set_result(session)

    def _begin(self, channel: Channel, found: Frame) -> _Session:
        welcome = decode_control_welcome(found)
        if found.epoch < self._highest_epoch:
            raise errors.LinkFault("An older coordinator answered.")
        self._highest_epoch = found.epoch
        endpoint = Endpoint(self._clock, decode_control_down, self._take)
        session = self._session = _Session(channel, endpoint, welcome)
        endpoint.epoch = found.epoch
        endpoint.on_broken = lambda why: self._end(session)
        self._reasons.clear()
        channel.greeted(session)
        endpoint.attach(channel, 0)
        _log.info("coordinator_connected", life=self._life, epoch=found.epoch)
        return session

    def _on_dismissal(self, session: _Session, found: Frame) -> None:
        try:
            decode_control_welcome(found)
        except errors.LinkFault as fault:
            session.refused = fault if fault.is_final else None
        self._end(session)

    def on_closed(self, channel: Channel) -> None:
        """The link is over."""
        if self._greeting is not None and self._greeting[0] is channel and not self._greeting[1].done():
            self._greeting[1].set_exception(errors.LinkFault("The link closed before it was welcomed."))
        if channel.session is not None:
            self._end(channel.session)

    def _take(self, messages: Sequence[ControlDown]) -> None:
        session = self._session
        assert session is not None
        for message in messages:
            match message:
                case Counted():
                    self._fleet.counted(message)
                    session.is_in_force = True
                    self.in_force.set()
                case Demanded():
                    self.on_demanded(message.pool)
                case Condemned():
                    self.on_condemned(message.replica)
                case AnswerPart() if (waiting := session.waiting.get(message.query)) is not None:
                    waiting.take(message)
                case Failed() if (waiting := session.waiting.get(message.query)) is not None:
                    waiting.fail(_fault_of(message))
                case _:
                    continue  # nobody waits for it any more


def _lost(detail: str) -> errors.CoordinatorLost:
    return errors.CoordinatorLost(detail, retry_after_ms=_LOST_RETRY_MS)


def _fault_of(failed: Failed) -> errors.WeirError:
    """The coordinator's error; one that this version does not know is the platform's."""
    kind = errors.ERROR_BY_CODE.get(failed.code, errors.InternalError)
    return kind(failed.detail, retry_after_ms=failed.retry_after_ms)
