"""The gateway's end of the link: finds a coordinator, keeps one session with it, and takes it up again when a link breaks.

What is sent while there is no link waits. When no coordinator was heard for the bound, or one answers that knows nothing of the
session, everything in it is lost: the gateway is told, and a new session begins.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from math import inf
from typing import NamedTuple, TypeAlias

import structlog

from weir import errors
from weir.core.registry.snapshot_parts import SnapshotAssembly, SnapshotPart
from weir.link.channel import Channel
from weir.link.endpoint import Endpoint
from weir.link.frames import (
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
_RETRY_FIRST_S = 0.05
_RETRY_MAX_S = 0.25
_BEATS_MISSED = 3


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
    """One gateway's link. addresses: of coordinators, tried in turn. names: gives each session a name that no other ever had.

    on_lost: everything in the session is lost. terms: what the coordinator told; None before the first welcome.
    opened: set once the first snapshot is here.
    """

    def __init__(
        self, clock: Clock, addresses: Sequence[Connect], token: str, inbox: GatewayInbox, names: Callable[[], str]
    ) -> None:
        assert addresses
        self._clock = clock
        self._addresses = addresses
        self._token = token
        self._inbox = inbox
        self._names = names
        self._assembly = SnapshotAssembly()
        self._highest_epoch = 0
        self._greeting: _Greeting | None = None
        self._over = asyncio.Event()
        self._name = names()
        self._former = ""
        self._reasons: dict[Connect, str] = {}  # told already, of each address, since there was a coordinator
        self._endpoint = self._begin()
        self.on_lost: Callable[[], None] = lambda: None
        self.terms: Terms | None = None
        self.opened = asyncio.Event()

    def send(self, message: Up) -> None:
        """Never blocks, never raises."""
        self._endpoint.send(message)

    def give_up(self) -> None:
        """Lose the session unless there is a link: whoever had the coordinator is gone."""
        if self._endpoint.epoch and not self._endpoint.is_attached:
            self._lose("its coordinator is gone")

    async def leave(self) -> None:
        """Say that nothing more comes; `run` is to be cancelled then."""
        self._endpoint.send(Leaving())
        await asyncio.sleep(0)  # it leaves with this turn of the loop
        self._endpoint.finish()

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
                for address in self._addresses:
                    if await self._try(address):
                        wait_s = _RETRY_FIRST_S
                        await self._until_over()
                    self._give_up_if_silent()
                await asyncio.sleep(min(wait_s, self._patience_s))
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
            async with asyncio.timeout(min(_CONNECT_S, self._patience_s)):
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
        body = encode(Hello(self._name, self._token, former=self._former))
        channel.write(frame(Kind.HELLO, body, epoch=self._endpoint.epoch, received=self._endpoint.received))

    def _enter(self, greeting: _Greeting, found: Frame, welcome: Welcome) -> None:
        """The coordinator's answer is in force. Raises LinkFault."""
        if greeting.endpoint is not self._endpoint:
            raise errors.LinkFault("The session was lost before it was welcomed.")
        if found.epoch < self._highest_epoch:
            raise errors.LinkFault("An older coordinator answered.")
        self._highest_epoch = found.epoch
        if welcome.is_new and self._endpoint.epoch:
            self._lose("the coordinator does not know it")
            raise errors.LinkFault("The session was lost.")  # the next greeting opens a new one
        self._endpoint.epoch = found.epoch
        self.terms = welcome.terms
        self._reasons.clear()
        greeting.channel.greeted(self._endpoint)
        self._endpoint.attach(greeting.channel, found.received)
        _log.info("coordinator_connected", session=self._name, epoch=found.epoch)

    async def _until_over(self) -> None:
        """Beat while the link lives."""
        assert self.terms is not None
        beat_s, bound_ns = self.terms.heartbeat_ms / 1e3, ns_from_ms(_BEATS_MISSED * self.terms.heartbeat_ms)
        while not self._over.is_set():
            self._endpoint.beat()
            try:
                async with asyncio.timeout(beat_s):
                    await self._over.wait()
            except TimeoutError:
                if self._endpoint.silent_ns > bound_ns:
                    self._endpoint.detach()
                    break
        _log.warning("coordinator_disconnected", session=self._name)

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
        if self.terms is None or not self._endpoint.epoch:
            return inf
        return max(0.0, self.terms.silence_ms / 1e3 - self._endpoint.silent_ns / 1e9)

    def _give_up_if_silent(self) -> None:
        if not self._patience_s:
            self._lose("no coordinator was heard for too long")
        elif not self._endpoint.epoch:
            self._name = self._names()  # a greeting without an answer may have opened a session of that name

    def _lose(self, why: str) -> None:
        _log.warning("session_lost", session=self._name, reason=why)
        self._endpoint.detach()
        self._over.set()
        self._former = self._name
        self._name, self._endpoint = self._names(), self._begin()
        self._assembly = SnapshotAssembly()
        self.on_lost()

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def on_frame(self, channel: Channel, found: Frame) -> None:
        """One frame. Raises LinkFault."""
        if channel.session is None:
            self._on_welcome(channel, found)
        elif found.kind is Kind.REFUSED and self._endpoint.uses(channel):
            self._lose("its coordinator is gone")
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
