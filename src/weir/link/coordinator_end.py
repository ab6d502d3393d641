"""The coordinator's end of the links: greets gateways, keeps their sessions while links break, gives up those that are silent.

It decides nothing about requests. A session ends when its gateway leaves, says nothing for its lease, or falls too far behind;
then the coordinator ends what it carried.
"""

import asyncio
import hmac
from collections.abc import Callable, Sequence
from typing import Protocol

import structlog

from weir import errors
from weir.core.registry.snapshot import Snapshot
from weir.core.registry.snapshot_parts import SnapshotPart, parts_between
from weir.link.channel import Channel
from weir.link.endpoint import Endpoint
from weir.link.frames import (
    REATTACHING_VERSION,
    Frame,
    Hello,
    Kind,
    Leaving,
    Refused,
    Role,
    SnapshotHeld,
    Terms,
    Welcome,
    WireUp,
    agreed_version,
    decode_hello,
    decode_up,
    encode,
    frame,
)
from weir.messages import Down, Register, SnapshotFresh
from weir.ports import Clock, CoordinatorLink, GatewayInbox
from weir.units import Bytes, Millis, ns_from_ms

_log = structlog.get_logger("weir.link")

_NOTHING = Snapshot()
LINKS_MAX = 1_024
_GREETING_S = 3.0
_GREETING_BYTES_MAX: Bytes = 4_096
_HOLD_CHECK_S = 0.01


class SessionHost(Protocol):
    """The coordinator, as far as links need it."""

    def connect(self, register: Register, inbox: GatewayInbox) -> CoordinatorLink: ...

    def lose(self, session: str) -> None: ...

    @property
    def fresh_ms(self) -> Millis | None:
        """For how long the snapshot may still be worked by; None: no bound was told."""
        ...


class _RemoteSession:
    """A gateway's session in another process. As an inbox it sends what it is given, a snapshot as what changed."""

    def __init__(
        self,
        name: str,
        endpoint: Endpoint,
        tell_snapshots: Callable[["_RemoteSession"], None],
        on_leaving: Callable[[str, str], None],
    ) -> None:
        self.name = name
        self.endpoint = endpoint
        self.link: CoordinatorLink | None = None
        self.told = _NOTHING
        self.wanted = self.told
        self.held_version = 0
        self.is_telling = False
        self._tell_snapshots = tell_snapshots
        self._on_leaving = on_leaving

    def deliver(self, message: Down) -> None:
        """One message of the coordinator."""
        if isinstance(message, Snapshot):
            self.wanted = message
            self._tell_snapshots(self)
        else:
            self.endpoint.send(message)

    def receive(self, messages: Sequence[WireUp]) -> None:
        """What the gateway sent."""
        assert self.link is not None
        for message in messages:
            if isinstance(message, SnapshotHeld):
                self.held_version = message.version
            elif isinstance(message, Leaving):
                self._on_leaving(self.name, "it left")
                return
            else:
                self.link.send(message)


class CoordinatorEnd:
    """Serves links. terms: what gateways are told. token: what they must show; empty where the socket's owner is enough."""

    def __init__(self, clock: Clock, host: SessionHost, epoch: int, terms: Terms, token: str = "") -> None:
        self._clock = clock
        self._host = host
        self._epoch = epoch
        self._terms = terms
        self._token = token
        self._sessions: dict[str, _RemoteSession] = {}
        self._links: set[Channel] = set()
        self._is_abandoned = False
        self._tasks: asyncio.TaskGroup | None = None
        self._change: tuple[Snapshot, Snapshot, list[SnapshotPart]] | None = None
        self._reckoning = asyncio.Lock()
        self._control_token = ""
        self._on_control: Callable[[Channel, Hello, int], None] | None = None

    def take_control(self, on_control: Callable[[Channel, Hello, int], None], token: str) -> None:
        """Hand links over on which control greets. on_control: takes each, with the version of messages that both speak.

        token: what control must show, which gateways do not know; empty where the socket's owner is enough.
        """
        self._on_control, self._control_token = on_control, token

    def accept(self) -> Channel:
        """The protocol of a new connection."""
        return Channel(self, self._opened, body_bytes_max=_GREETING_BYTES_MAX)

    async def run(self) -> None:
        """Beat, and give up what is silent, until cancelled; then every link is cut."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                for session in self._sessions.values():
                    self._tell(session)
                while True:
                    await asyncio.sleep(self._terms.heartbeat_ms / 1e3)
                    self._tick()
        finally:
            self._tasks = None
            for channel in list(self._links):
                channel.close()

    def _tick(self) -> None:
        for session in list(self._sessions.values()):
            endpoint = session.endpoint
            if endpoint.silent_ns > ns_from_ms(self._terms.lease_ms):
                self._lose(session.name, "it was silent for its lease")
            elif endpoint.fell_silent(self._terms.heartbeat_ms):
                endpoint.detach()
            else:
                self._beat(endpoint)

    def _beat(self, endpoint: Endpoint) -> None:
        """What is left of the snapshot's time goes along, so that one told late is not believed for long."""
        fresh_ms = self._host.fresh_ms
        if fresh_ms is None or not endpoint.is_attached:
            endpoint.beat()
        else:
            endpoint.send(SnapshotFresh(fresh_ms))

    def abandon(self) -> None:
        """The coordinator is no more: every gateway is to look for another one at once, and none is heard again."""
        self._is_abandoned = True
        for channel in list(self._links):
            channel.finish()

    # ── links ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _opened(self, channel: Channel) -> None:
        if self._is_abandoned or len(self._links) >= LINKS_MAX:
            channel.close()
            return
        self._links.add(channel)
        asyncio.get_running_loop().call_later(_GREETING_S, self._close_unless_greeted, channel)

    def _close_unless_greeted(self, channel: Channel) -> None:
        if channel.session is None:
            channel.close()

    def on_closed(self, channel: Channel) -> None:
        """The link is over; its session waits for another."""
        self._links.discard(channel)
        session = channel.session
        if session is not None and session.endpoint.uses(channel):
            session.endpoint.detach()

    def on_frame(self, channel: Channel, found: Frame) -> None:
        """One frame. Raises LinkFault."""
        if channel.session is None:
            self._greet(channel, found)
        elif found.epoch != self._epoch or found.kind is not Kind.BATCH:
            raise errors.LinkFault("A gateway speaks to another coordinator.")
        elif channel.session.endpoint.uses(channel):  # else it was taken up on another link
            channel.session.endpoint.receive(found)

    def _greet(self, channel: Channel, found: Frame) -> None:
        if found.kind is not Kind.HELLO:
            raise errors.LinkFault("A link did not begin with a greeting.")
        hello = decode_hello(found.body)
        version = agreed_version(hello)
        token = self._token if hello.role is Role.GATEWAY else self._control_token
        if token and not hmac.compare_digest(hello.token.encode(), token.encode()):
            self._refuse(channel, Refused("The token of this link is another.", is_final=True))
        elif version is None:
            self._refuse(channel, Refused("Gateway and coordinator share no version of their messages.", is_final=True))
        elif found.epoch > self._epoch:
            self._refuse(channel, Refused("A newer coordinator was seen.", is_final=False))
        elif hello.role is Role.CONTROL:
            self._hand_over(channel, hello, version)
        else:
            self._welcome(channel, hello, version, found)

    def _hand_over(self, channel: Channel, hello: Hello, version: int) -> None:
        """A link that is no gateway's."""
        if self._on_control is None:
            self._refuse(channel, Refused("This coordinator takes no control on a link.", is_final=True))
        else:
            self._links.discard(channel)
            self._on_control(channel, hello, version)

    def _refuse(self, channel: Channel, refused: Refused) -> None:
        _log.warning("link_refused", reason=refused.detail)
        channel.write(frame(Kind.REFUSED, encode(refused), epoch=self._epoch))
        channel.finish()

    def _welcome(self, channel: Channel, hello: Hello, version: int, found: Frame) -> None:
        session = self._sessions.get(hello.session)
        is_new = session is None or found.epoch != self._epoch
        if is_new and found.epoch:  # it has to give up the one that it had first: no session comes of this greeting
            channel.write(frame(Kind.WELCOME, encode(Welcome(version, is_new, self._terms)), epoch=self._epoch))
            channel.finish()
            return
        if session is None:
            if hello.former:
                self._lose(hello.former, "it was given up")
            session = self._open(hello, reattaches=hello.reattaches and version >= REATTACHING_VERSION)
        elif is_new:
            raise errors.LinkFault("A session of this name is another gateway's.")
        welcome = Welcome(version, is_new, self._terms)
        channel.write(frame(Kind.WELCOME, encode(welcome), epoch=self._epoch, received=session.endpoint.received))
        channel.greeted(session)
        session.endpoint.attach(channel, found.received if not is_new else 0)

    # ── sessions ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _open(self, hello: Hello, *, reattaches: bool) -> _RemoteSession:
        session = self._sessions[hello.session] = _RemoteSession(
            hello.session, self._endpoint(hello.session), self._tell, self._lose
        )
        try:
            session.link = self._host.connect(Register(hello.session, hello.former, reattaches), session)
        except errors.LinkFault:
            del self._sessions[hello.session]
            raise
        _log.info("gateway_connected", session=hello.session)
        return session

    def _endpoint(self, name: str) -> Endpoint:
        endpoint = Endpoint(self._clock, decode_up, lambda messages: self._sessions[name].receive(messages))
        endpoint.epoch = self._epoch
        endpoint.on_broken = lambda why: self._lose(name, why)
        return endpoint

    def _lose(self, name: str, why: str) -> None:
        session = self._sessions.pop(name, None)
        if session is not None:
            _log.info("gateway_disconnected", session=name, reason=why)
            session.endpoint.detach()
            self._host.lose(name)

    async def all_hold(self, version: int, bound_ms: Millis) -> tuple[str, ...]:
        """The sessions that do not work by this snapshot version, or a newer one, once all do or after the bound."""
        deadline_ns = self._clock.monotonic_ns() + ns_from_ms(bound_ms)
        while behind := tuple(session.name for session in self._sessions.values() if session.held_version < version):
            if self._clock.monotonic_ns() >= deadline_ns:
                return behind
            await asyncio.sleep(_HOLD_CHECK_S)
        return ()

    @property
    def sessions(self) -> tuple[str, ...]:
        """Names of the sessions that are open."""
        return tuple(self._sessions)

    # ── snapshots ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _tell(self, session: _RemoteSession) -> None:
        if self._tasks is not None and not session.is_telling:  # else it ends, or has not begun and tells all then
            session.is_telling = True
            self._tasks.create_task(self._tell_until_told(session))

    async def _tell_until_told(self, session: _RemoteSession) -> None:
        try:
            while session.told is not session.wanted:
                wanted = session.wanted
                for part in await self._changes_between(session.told, wanted):
                    session.endpoint.send(part)
                    await asyncio.sleep(0)  # what others send goes between
                session.told = wanted
        finally:
            session.is_telling = False

    async def _changes_between(self, before: Snapshot, after: Snapshot) -> list[SnapshotPart]:
        """Reckoned once for all gateways that have the same, and not on the event loop: it may be of 100,000 rows."""
        async with self._reckoning:
            known = self._change
            if known is not None and known[0] is before and known[1] is after:
                return known[2]
            parts = await asyncio.to_thread(lambda: list(parts_between(before, after)))
            self._change = before, after, parts
            return parts
