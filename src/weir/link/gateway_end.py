"""The gateway's end of the link: finds a coordinator, keeps one session with it, and takes it up again when a link breaks.

What is sent while there is no link waits. When another coordinator answers than the one that the session is with, a new session
begins, and the gateway tells in it what it carries. When none was heard for the bound, or the same one knows nothing of the
session, everything in it is lost: the gateway is told, and a new session begins.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from math import inf
from typing import NamedTuple, TypeAlias

import structlog

from weir import errors
from weir.core.registry.snapshot_parts import SnapshotAssembly, SnapshotPart
from weir.link.channel import Channel
from weir.link.endpoint import Endpoint
from weir.link.frames import (
    REATTACHING_VERSION,
    Frame,
    Hello,
    Kind,
    Leaving,
    SnapshotHeld,
    Terms,
    Welcome,
    WireDown,
    decode_down,
    decode_welcome,
    encode,
    frame,
)
from weir.messages import Up
from weir.ports import Clock, GatewayInbox
from weir.units import ns_from_ms

_log = structlog.get_logger("weir.link")

_CONNECT_S = 3.0
_CONNECT_TO_SILENT_S = 0.5
"""Where a coordinator fell silent another one may lead soon, elsewhere: that is not to be missed for long."""
_RETRY_FIRST_S = 0.05
_RETRY_MAX_S = 0.25
_LATE_BEATS = 1.25
"""After so many one is late: sooner than anything else may be taken for late."""


Connect: TypeAlias = Callable[[Callable[[], Channel]], Awaitable[None]]
"""Makes a connection to one address, with the protocol that it is given. Raises OSError."""


class _Greeting(NamedTuple):
    """The one under way: on which link, for which session, and its answer."""

    channel: Channel
    endpoint: Endpoint
    welcomed: asyncio.Future[None]

    def awaits(self, channel: Channel) -> bool:
        """Whether what happens on this link is its answer."""
        return self.channel is channel and not self.welcomed.done()


class GatewayEnd:
    """One gateway's link. addresses: of coordinators, tried in turn. name: of this run of the gateway, which no other ever had.

    on_lost: everything in the session is lost. on_renewed: another coordinator leads, and is told now what goes on.
    terms: what the coordinator told; None before the first welcome. opened: set once the first snapshot is here.
    """

    def __init__(self, clock: Clock, addresses: Sequence[Connect], token: str, inbox: GatewayInbox, name: str) -> None:
        assert addresses
        self._clock = clock
        self._addresses = addresses
        self._token = token
        self._inbox = inbox
        self._names = map(f"{name}.{{}}".format, count(1))
        self._assembly = SnapshotAssembly()
        self._highest_epoch = 0
        self._greeting: _Greeting | None = None
        self._over = asyncio.Event()
        self._name = next(self._names)
        self._former = ""
        self._renews = False  # the session takes over what the former one carried, and is not welcomed yet
        self._silent: Connect | None = None  # where a coordinator was heard no more, though the link stood
        self._reasons: dict[Connect, str] = {}  # told already, of each address, since there was a coordinator
        self._endpoint = self._begin()
        self.on_lost: Callable[[], None] = lambda: None
        self.on_renewed: Callable[[], None] = lambda: None
        self.terms: Terms | None = None
        self.opened = asyncio.Event()

    def send(self, message: Up) -> None:
        """Never blocks, never raises."""
        self._endpoint.send(message)

    def give_up(self) -> None:
        """Lose the session unless there is a link: whoever had the coordinator is gone."""
        if self._carries and not self._endpoint.is_attached:
            self._lose("its coordinator is gone")

    async def leave(self) -> None:
        """Say that nothing more comes; `run` is to be cancelled then."""
        self._endpoint.send(Leaving())
        await asyncio.sleep(0)  # it leaves with this turn of the loop
        self._endpoint.finish()

    @property
    def is_heard(self) -> bool:
        """Whether a coordinator is connected, and was heard when it had to say that it lives."""
        return (
            self.terms is not None
            and self._endpoint.is_attached
            and self._endpoint.silent_ns < _LATE_BEATS * ns_from_ms(self.terms.heartbeat_ms)
        )

    @property
    def session(self) -> str:
        """The name of the session, should a coordinator know of it."""
        return self._name

    @property
    def is_linked(self) -> bool:
        """Whether a coordinator is connected."""
        return self._endpoint.is_attached

    # ── life ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def run(self) -> None:
        """Keep the link until cancelled. Raises LinkFault when a coordinator refuses for good."""
        wait_s = _RETRY_FIRST_S
        try:
            while True:
                for address in sorted(self._addresses, key=lambda each: each is self._silent):
                    if await self._try(address):
                        wait_s = _RETRY_FIRST_S
                        self._silent = address if await self._until_silent() else None
                    self._give_up_if_silent()
                await asyncio.sleep(min(_RETRY_FIRST_S if self._renews else wait_s, self._patience_s))
                wait_s = min(2 * wait_s, _RETRY_MAX_S)
        finally:
            self._endpoint.detach()

    async def _try(self, connect: Connect) -> bool:
        """Whether the session is open on a link to this address."""
        channel = Channel(self)
        self._over.clear()
        welcomed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._greeting = _Greeting(channel, self._endpoint, welcomed)
        try:
            bound_s = _CONNECT_TO_SILENT_S if connect is self._silent else _CONNECT_S
            async with asyncio.timeout(min(bound_s, self._patience_s)):
                await connect(lambda: channel)
                self._greet(channel)
                await welcomed
        except (OSError, TimeoutError, UnicodeError, errors.LinkFault) as fault:
            if isinstance(fault, errors.LinkFault) and fault.is_final:
                raise
            self._tell_once(connect, f"{type(fault).__name__}: {fault}")
            return False
        finally:
            self._greeting = None
            if not self._endpoint.uses(channel):
                channel.close()
        return True

    def _tell_once(self, connect: Connect, reason: str) -> None:
        if self._reasons.get(connect) != reason:
            _log.warning("no_coordinator", reason=reason)
            self._reasons[connect] = reason

    def _greet(self, channel: Channel) -> None:
        body = encode(Hello(self._name, self._token, former=self._former, reattaches=self._renews))
        channel.write(frame(Kind.HELLO, body, epoch=self._endpoint.epoch, received=self._endpoint.received))

    def _enter(self, greeting: _Greeting, found: Frame, welcome: Welcome) -> None:
        """The coordinator's answer is in force. Raises LinkFault."""
        if greeting.endpoint is not self._endpoint:
            raise errors.LinkFault("The session was lost before it was welcomed.")
        if found.epoch < self._highest_epoch:
            raise errors.LinkFault("An older coordinator answered.")
        is_another, self._highest_epoch = found.epoch > self._highest_epoch, found.epoch
        if welcome.is_new and self._endpoint.epoch:
            if is_another:
                self._renew()
            else:
                self._lose("the coordinator does not know it")
            raise errors.LinkFault("The session is over.")  # the next greeting opens a new one
        if self._renews and welcome.version < REATTACHING_VERSION:
            self._lose("the coordinator is of an older version")
            raise errors.LinkFault("The session is over.")
        self._endpoint.epoch, self._renews = found.epoch, False
        self.terms = welcome.terms
        self._reasons.clear()
        greeting.channel.greeted(self._endpoint)
        self._endpoint.attach(greeting.channel, found.received)
        _log.info("coordinator_connected", session=self._name, epoch=found.epoch)

    async def _until_silent(self) -> bool:
        """Beat while the link lives; whether it fell silent, instead of being cut."""
        assert self.terms is not None
        heartbeat_ms = self.terms.heartbeat_ms
        while not self._over.is_set():
            self._endpoint.beat()
            try:
                async with asyncio.timeout(heartbeat_ms / 1e3):
                    await self._over.wait()
            except TimeoutError:
                if self._endpoint.fell_silent(heartbeat_ms):
                    self._endpoint.detach()
                    _log.warning("coordinator_silent", session=self._name)
                    return True
        _log.warning("coordinator_disconnected", session=self._name)
        return False

    # ── sessions ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _begin(self) -> Endpoint:
        endpoint = Endpoint(self._clock, decode_down, self._take)
        endpoint.on_broken = lambda why: self._break(endpoint, why)
        return endpoint

    def _break(self, endpoint: Endpoint, why: str) -> None:
        if endpoint is self._endpoint:
            self._lose(why)

    @property
    def _patience_s(self) -> float:
        """For how long what the session carries may still wait for a coordinator; without end where there is nothing."""
        if self.terms is None or not self._carries:
            return inf
        return max(0.0, self.terms.silence_ms / 1e3 - self._endpoint.silent_ns / 1e9)

    @property
    def _carries(self) -> bool:
        """Whether a coordinator knows of the session, or is to hear of it what another one knew."""
        return self._endpoint.epoch > 0 or self._renews

    def _give_up_if_silent(self) -> None:
        if not self._patience_s:
            self._lose("no coordinator was heard for too long")
        elif not self._endpoint.epoch:
            self._name = next(self._names)  # a greeting without an answer may have opened a session of that name

    def _lose(self, why: str) -> None:
        _log.warning("session_lost", session=self._name, reason=why)
        self._end_session()
        self._renews = False
        self.on_lost()

    def _renew(self) -> None:
        _log.info("session_renewed", session=self._name)
        self._end_session()
        self._renews = True
        self.on_renewed()

    def _end_session(self) -> None:
        self._endpoint.detach()
        self._over.set()
        self._former = self._name
        self._name, self._endpoint = next(self._names), self._begin()
        self._assembly = SnapshotAssembly()

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def on_frame(self, channel: Channel, found: Frame) -> None:
        """One frame. Raises LinkFault."""
        if channel.session is None:
            self._on_welcome(channel, found)
        elif found.kind is not Kind.BATCH or found.epoch < self._highest_epoch:
            raise errors.LinkFault("An older coordinator speaks.")
        elif self._endpoint.uses(channel):
            self._endpoint.receive(found)

    def _on_welcome(self, channel: Channel, found: Frame) -> None:
        greeting = self._greeting
        if greeting is None or not greeting.awaits(channel):
            raise errors.LinkFault("A welcome came too late.")
        try:
            self._enter(greeting, found, decode_welcome(found))
        except errors.LinkFault as fault:
            greeting.welcomed.set_exception(fault)
            raise
        greeting.welcomed.set_result(None)

    def on_closed(self, channel: Channel) -> None:
        """The link is over."""
        greeting = self._greeting
        if greeting is not None and greeting.awaits(channel):
            greeting.welcomed.set_exception(errors.LinkFault("The link closed before it was welcomed."))
        if self._endpoint.uses(channel):
            self._endpoint.detach()
            self._over.set()

    def _take(self, messages: Sequence[WireDown]) -> None:
        for message in messages:
            if not isinstance(message, SnapshotPart):
                self._inbox.deliver(message)
            elif (snapshot := self._assembly.take(message)) is not None:
                self._inbox.deliver(snapshot)
                self.opened.set()
                self._endpoint.send(SnapshotHeld(snapshot.version))
