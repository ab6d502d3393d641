"""Both ends of links over real sockets in one event loop, with relays between them that cut, hold back and go on.

Each end has a clock of its own that stands until a test moves it, so that nobody is silent because the machine is busy. A stand
stops what it started, and then nothing may be left: no task, no socket, no failure that only the event loop saw.
"""

import asyncio
import contextlib
import gc
import ssl
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from weir import errors
from weir.core.registry.snapshot import Snapshot
from weir.link.channel import Channel
from weir.link.coordinator_end import CoordinatorEnd
from weir.link.frames import Frame, FrameSplitter, Kind, Terms, Welcome, encode, frame
from weir.link.gateway_end import Connect, GatewayEnd
from weir.messages import Down, FleetView, HoldBooked, Lookup, ReattachedAll, Register, Up
from weir.ports import GatewayInbox
from weir.units import Millis, Nanos, ns_from_ms

BOUND_S = 5
TERMS = Terms(b"d", b"s", step_tokens=64, store_wait_ms=500, heartbeat_ms=20, silence_ms=200, lease_ms=300)
FLEET = FleetView(())


async def until(condition: Callable[[], object], what: str) -> None:
    """Look again and again; fails past the bound."""
    loop = asyncio.get_running_loop()
    ends = loop.time() + BOUND_S
    while not condition():
        assert loop.time() < ends, f"never: {what}"
        await asyncio.sleep(0.002)


class HandClock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self._now_ns: Nanos = 0

    def monotonic_ns(self) -> Nanos:
        return self._now_ns

    def wall_ms(self) -> Millis:
        return self._now_ns // 1_000_000

    def advance(self, elapsed_ms: Millis) -> None:
        """Time passes."""
        self._now_ns += ns_from_ms(elapsed_ms)


@dataclass
class HostSession:
    """A session as the host sees it. received: what its gateway sent, in order."""

    register: Register
    inbox: GatewayInbox
    received: list[Up] = field(default_factory=list)

    def send(self, message: Up) -> None:
        self.received.append(message)

    @property
    def numbers(self) -> list[int]:
        """Of the look-ups among them."""
        return [message.query for message in self.received if isinstance(message, Lookup)]


class RecordingHost:
    """A coordinator that records. sessions: all that there ever were, by name, each name once. lost: in order.

    kept: names of sessions that a former coordinator had; nobody opens one of these.
    """

    def __init__(self) -> None:
        self.fresh_ms: Millis | None = None
        self.snapshot = Snapshot(version=1)
        self.sessions: dict[str, HostSession] = {}
        self.lost: list[str] = []
        self.kept: set[str] = set()

    def connect(self, register: Register, inbox: GatewayInbox) -> HostSession:
        if register.session in self.kept:
            raise errors.LinkFault("A session of this name is another gateway's.")
        assert register.session not in self.sessions
        session = self.sessions[register.session] = HostSession(register, inbox)
        inbox.deliver(self.snapshot)
        inbox.deliver(FLEET)
        return session

    def lose(self, session: str) -> None:
        assert session in self.open
        self.lost.append(session)

    @property
    def open(self) -> list[str]:
        """Names of the sessions that are open."""
        return [name for name in self.sessions if name not in self.lost]

    @property
    def only(self) -> HostSession:
        """The one session that is open."""
        (name,) = self.open
        return self.sessions[name]

    def publish(self, snapshot: Snapshot) -> None:
        """Tell every open session."""
        self.snapshot = snapshot
        for name in self.open:
            self.sessions[name].inbox.deliver(snapshot)


class RecordingInbox:
    """A gateway's incoming side. messages: all but snapshots, in order."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.snapshots: list[Snapshot] = []

    def deliver(self, message: Down) -> None:
        if isinstance(message, Snapshot):
            self.snapshots.append(message)
        else:
            self.messages.append(message)

    @property
    def numbers(self) -> list[int]:
        """References of the messages about requests."""
        return [message.ref for message in self.messages if hasattr(message, "ref")]

    @property
    def version(self) -> int:
        """Of the newest snapshot."""
        return self.snapshots[-1].version if self.snapshots else 0


class _Link:
    """One relayed connection. rising, falling: whether each direction goes on."""

    def __init__(self, *, rises: bool, falls: bool) -> None:
        self.rising, self.falling = asyncio.Event(), asyncio.Event()
        if rises:
            self.rising.set()
        if falls:
            self.falling.set()
        self.task: asyncio.Task[None]


class CuttingRelay:
    """Passes bytes on between a socket and another. opened: connections so far.

    cut_every: bytes after which a connection is cut, in the middle of a frame; 0: never. holds_answers: new connections get no
    answer; holds_all: and are not heard either.
    """

    def __init__(self, target: Path) -> None:
        self._target = target
        self._links: set[_Link] = set()
        self.opened = 0
        self.passed_up = 0
        self.cut_every = 0
        self.holds_answers = False
        self.holds_all = False
        self._left = 0

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A new connection."""
        self.opened += 1
        self._left = self.cut_every
        link = _Link(rises=not self.holds_all, falls=not (self.holds_all or self.holds_answers))
        link.task = asyncio.get_running_loop().create_task(self._carry(link, reader, writer))
        self._links.add(link)

    async def _carry(self, link: _Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            with contextlib.suppress(OSError):
                their_reader, their_writer = await asyncio.open_unix_connection(str(self._target))
                writers.append(their_writer)
                up = asyncio.get_running_loop().create_task(self._pump(reader, their_writer, link.rising, is_up=True))
                down = asyncio.get_running_loop().create_task(self._pump(their_reader, writer, link.falling, is_up=False))
                try:
                    await asyncio.wait((up, down), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    up.cancel()
                    down.cancel()
                    await asyncio.gather(up, down, return_exceptions=True)
        finally:
            for used in writers:
                used.transport.abort()
            self._links.discard(link)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, goes_on: asyncio.Event, *, is_up: bool
    ) -> None:
        while piece := await reader.read(4096):
            await goes_on.wait()
            if is_up:
                self.passed_up += len(piece)
            if self.cut_every:
                piece = piece[: self._left]
                self._left -= len(piece)
            writer.write(piece)
            await writer.drain()
            if self.cut_every and not self._left:
                return

    def cut(self) -> None:
        """Every connection ends at once."""
        for link in self._links:
            link.task.cancel()

    def hold_back(self, *, rising: bool = True, falling: bool = True) -> None:
        """Nothing arrives any more on the connections that there are; they stay. Or in one direction only."""
        for link in self._links:
            if rising:
                link.rising.clear()
            if falling:
                link.falling.clear()

    def go_on(self) -> None:
        """What was held back arrives, and from now on all does."""
        self.holds_answers = self.holds_all = False
        for link in self._links:
            link.rising.set()
            link.falling.set()

    @property
    def is_idle(self) -> bool:
        """Whether there is no connection."""
        return not self._links

    async def aclose(self) -> None:
        """Cut, and wait until that is done."""
        tasks = [link.task for link in self._links]
        self.cut()
        await asyncio.gather(*tasks, return_exceptions=True)


class StandingCoordinator:
    """A served coordinator's end."""

    def __init__(self, path: Path, epoch: int, token: str, terms: Terms) -> None:
        self.path = path
        self.clock = HandClock()
        self.host = RecordingHost()
        self.end = CoordinatorEnd(self.clock, self.host, epoch, terms, token)
        self._running: asyncio.Task[None] | None = None
        self._servers: list[asyncio.AbstractServer] = []

    async def serve(self) -> None:
        """Take connections."""
        self._servers.append(await asyncio.get_running_loop().create_unix_server(self.end.accept, str(self.path)))

    def run(self) -> None:
        """Beat, and tell snapshots."""
        self._running = asyncio.get_running_loop().create_task(self.end.run())

    async def serve_tls(self, tls: ssl.SSLContext) -> int:
        """Serve on a TCP port of the loopback too, and say which."""
        server = await asyncio.get_running_loop().create_server(self.end.accept, "127.0.0.1", 0, ssl=tls)
        self._servers.append(server)
        port: int = server.sockets[0].getsockname()[1]
        return port

    async def stop(self) -> None:
        """Like the end of its process. Idempotent."""
        for server in self._servers:
            server.close()
        running, self._running = self._running, None
        if running is None:
            return
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        self.path.unlink(missing_ok=True)


class StandingGateway:
    """A gateway's end that runs. lost, renewed: how often its session was. addresses: where it looks, changed in place."""

    def __init__(self, addresses: list[Connect], token: str, name: str) -> None:
        self.clock = HandClock()
        self.inbox = RecordingInbox()
        self.lost = self.renewed = 0
        self.addresses = addresses
        self.end = GatewayEnd(self.clock, addresses, token, self.inbox, name)
        self.end.on_lost, self.end.on_renewed = self._count, self._tell_again
        self.running = asyncio.get_running_loop().create_task(self.end.run())

    def _count(self) -> None:
        self.lost += 1

    def _tell_again(self) -> None:
        self.renewed += 1
        self.end.send(ReattachedAll())

    def send(self, *numbers: int) -> None:
        """A look-up for each number."""
        for number in numbers:
            self.end.send(Lookup(number, "acme", f"r{number}"))

    async def stop(self) -> None:
        """Like the end of its process. Idempotent."""
        self.running.cancel()
        await asyncio.wait((self.running,))


class OneWriteServer(asyncio.Protocol):
    """A coordinator that answers a greeting with a welcome and messages in one write. closes: and is gone then.

    number: of the frame of messages; received: what it says that it has.
    """

    def __init__(self, messages: list[Any], *, closes: bool, number: int = 1, received: int = 0) -> None:
        self._number = number
        self._received = received
        self._messages = messages
        self._closes = closes
        self._transport: asyncio.Transport
        self.greetings: list[Frame] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        found = FrameSplitter().feed(data)[0]
        if found.kind is not Kind.HELLO:
            return
        self.greetings.append(found)
        body = encode(Welcome(1, is_new=found.epoch == 0, terms=TERMS))
        welcome = frame(Kind.WELCOME, body, epoch=1, received=self._received)
        self._transport.write(welcome + frame(Kind.BATCH, encode(self._messages), epoch=1, number=self._number))
        if self._closes:
            self._transport.close()


def at(path: Path) -> Connect:
    """The address of a Unix socket."""

    async def connect(make: Callable[[], Channel]) -> None:
        await asyncio.get_running_loop().create_unix_connection(make, str(path))

    return connect


class LinkStand:
    """Coordinators, relays and gateways of one test."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._paths = count(1)
        self._names = count(1)
        self._coordinators: list[StandingCoordinator] = []
        self._relays: list[tuple[CuttingRelay, asyncio.AbstractServer]] = []
        self._gateways: list[StandingGateway] = []
        self.failures: list[str] = []

    def path(self) -> Path:
        """One that nothing has yet."""
        return self.directory / str(next(self._paths))

    async def coordinator(
        self, epoch: int = 1, *, token: str = "", terms: Terms = TERMS, path: Path | None = None, runs: bool = True
    ) -> StandingCoordinator:
        """One that runs, at this path or at a new one."""
        standing = StandingCoordinator(path or self.path(), epoch, token, terms)
        self._coordinators.append(standing)
        if runs:
            standing.run()
        await standing.serve()
        return standing

    async def relay(self, target: Path) -> tuple[CuttingRelay, Path]:
        """One that passes on to a path, and its own path."""
        relay, path = CuttingRelay(target), self.path()
        self._relays.append((relay, await asyncio.start_unix_server(relay.accept, str(path))))
        return relay, path

    def gateway(self, *addresses: Path | Connect, token: str = "") -> StandingGateway:
        """One that runs and looks for coordinators there."""
        found = [at(address) if isinstance(address, Path) else address for address in addresses]
        standing = StandingGateway(found, token, f"gateway-{next(self._names)}")
        self._gateways.append(standing)
        return standing

    def on_failure(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """What only the event loop saw."""
        self.failures.append(f"{context.get('message')}: {context.get('exception')!r}")

    async def aclose(self) -> None:
        """Stop everything."""
        for gateway in self._gateways:
            await gateway.stop()
        for coordinator in self._coordinators:
            await coordinator.stop()
        for relay, server in self._relays:
            server.close()
            await relay.aclose()


@asynccontextmanager
async def link_standing() -> AsyncIterator[LinkStand]:
    """A stand that leaves nothing behind, and fails where something would stay."""
    loop = asyncio.get_running_loop()
    with tempfile.TemporaryDirectory(prefix="weir-link-") as directory:
        stand = LinkStand(Path(directory))
        loop.set_exception_handler(stand.on_failure)
        try:
            yield stand
        finally:
            await stand.aclose()
    await until_nothing_is_left()
    gc.collect()  # a failure that nobody asked for is told when its future goes
    loop.set_exception_handler(None)
    assert stand.failures == []


async def until_nothing_is_left() -> None:
    """Wait until this test's task is the only one, and no connection is open."""
    loop = asyncio.get_running_loop()
    await until(lambda: asyncio.all_tasks() == {asyncio.current_task()}, "every task ends")
    await until(lambda: not _connections(loop), "every connection ends")


def _connections(loop: asyncio.AbstractEventLoop) -> list[Any]:
    """Transports that the loop still has; of those of a test, asyncio's own loop keeps a list."""
    transports: dict[int, Any] = dict(getattr(loop, "_transports", {}))
    return [transport for transport in transports.values() if not transport.is_closing()]


async def linked(stand: LinkStand) -> tuple[StandingCoordinator, StandingGateway]:
    """A coordinator and a gateway with an open session."""
    coordinator = await stand.coordinator()
    gateway = stand.gateway(coordinator.path)
    await until_settled(gateway)
    return coordinator, gateway


async def relayed(stand: LinkStand) -> tuple[StandingCoordinator, CuttingRelay, StandingGateway]:
    """The same with a relay between them."""
    coordinator = await stand.coordinator()
    relay, path = await stand.relay(coordinator.path)
    gateway = stand.gateway(path)
    await until_settled(gateway)
    return coordinator, relay, gateway


async def until_settled(gateway: StandingGateway, sessions: int = 1) -> None:
    """Wait until this many sessions in all have begun with a snapshot and the fleet."""
    inbox = gateway.inbox
    await until(
        lambda: gateway.end.is_linked and inbox.messages.count(FLEET) == sessions and len(inbox.snapshots) >= sessions,
        f"session {sessions} has its snapshot and its fleet",
    )


async def check_both_ways(coordinator: StandingCoordinator, gateway: StandingGateway, *numbers: int) -> None:
    """These arrive on both sides, after what came before."""
    session = coordinator.host.only
    gateway.send(*numbers)
    for number in numbers:
        session.inbox.deliver(HoldBooked(number))
    await until(lambda: session.numbers[-len(numbers) :] == list(numbers), "the coordinator has them")
    await until(lambda: gateway.inbox.numbers[-len(numbers) :] == list(numbers), "the gateway has them")
