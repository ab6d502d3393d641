"""Gateways that keep streams, in a world of virtual time: desks that share a store, and clients that take what they are given.

The store, the sealing, the desks and the clients that keep are the real ones; only HTTP is left out.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from weir.config import GatewayConfig
from weir.core.endings import FinishReason, Status
from weir.core.registry.snapshot import Snapshot
from weir.core.tenancy import Retention, Tenant
from weir.gateway.client import ClientWatcher
from weir.gateway.inbox import Inbox
from weir.gateway.kept_client import KeptClient, Manner
from weir.gateway.kept_reader import StreamMeta
from weir.gateway.retention import RetentionDesk
from weir.gateway.sealing import KeyRing
from weir.kept_streams import StreamName
from weir.messages import GenerationRecord, StandingView
from weir.sim.virtual_loop import VirtualClock, VirtualLoop, run
from weir.storage.stream_memory import StreamFault, StreamMemory, StreamOperation
from weir.telemetry import Telemetry
from weir.units import Bytes

BUFFER: Bytes = 200
WHOLE_MAX: Bytes = 100_000
NAME = StreamName("acme", "gen-1")
META = StreamMeta("generations")
RUNNING = GenerationRecord("gen-1", "req-1", 1, "assistant", "rev", Status.RUNNING)
COMPLETED = GenerationRecord("gen-1", "req-1", 1, "assistant", "rev", Status.COMPLETED, FinishReason.STOP)
FAILED = GenerationRecord(
    "gen-1", "req-1", 1, "assistant", "rev", Status.FAILED, FinishReason.COORDINATOR_LOST, error_code="coordinator_lost"
)
POLICY = Retention(seconds=60, bytes=1_000_000, resume_grace_seconds=10)
STREAM_HEADERS = [(b"content-type", b"text/event-stream")]


class Numbers:
    """Entropy that is the same in every run."""

    def __init__(self) -> None:
        self._next = 0

    def token(self, size: int) -> bytes:
        """Never the same twice."""
        self._next += 1
        return self._next.to_bytes(size, "big")


class Whole:
    """A plain answer that says what it was made of."""

    def __init__(self, body: bytes) -> None:
        self.status = 200
        self.body = body

    def head(self, extra: Sequence[tuple[bytes, bytes]] = ()) -> Sequence[tuple[bytes, bytes]]:
        """None of its own."""
        return extra


class PlainShape:
    """Events without a surface: what closes a stream names the number that it has there."""

    def closing(self, record: GenerationRecord, pieces: Sequence[bytes]) -> bytes:
        """One event."""
        number = sum(piece.count(b"\n\n") for piece in pieces)
        return b"closed %d by %s\n\n" % (number, str(record.finish_reason).encode())

    def whole(self, pieces: Sequence[bytes], record: GenerationRecord, standing: StandingView | None) -> Whole:
        """Everything."""
        return Whole(b"".join(pieces))

    def begun(self, first: bytes, headers: list[tuple[bytes, bytes]]) -> Whole:
        """The beginning."""
        return Whole(first)


class TakingClient:
    """A client that takes all it is given, unless it is stopped."""

    def __init__(self) -> None:
        self.written: Bytes = 0
        self.read_ns = 0
        self.taken = b""
        self.status = 0
        self.is_lost = self.is_stopped = self.is_finished = False
        self._unsent = b""
        self._watcher: ClientWatcher | None = None

    @property
    def unsent(self) -> Bytes:
        """What was written while it was stopped."""
        return len(self._unsent)

    def watch(self, watcher: ClientWatcher | None) -> None:
        """As the port says."""
        self._watcher = watcher

    def leave(self) -> None:
        """Cut the connection."""
        self.is_lost = True
        if self._watcher is not None:
            self._watcher.client_lost()

    def go_on(self) -> None:
        """Take what was written meanwhile, and everything from now on."""
        self.is_stopped = False
        self.taken, self._unsent = self.taken + self._unsent, b""

    def take(self, size: Bytes) -> None:
        """Take so much of what waits, while it is stopped."""
        self.taken, self._unsent = self.taken + self._unsent[:size], self._unsent[size:]

    async def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """As the port says."""
        assert not self.status
        self.status = status

    def write(self, body: bytes, events: int = 1) -> None:
        """As the port says."""
        assert self.status and not self.is_finished
        self.written += len(body)
        if self.is_lost or body.startswith(b":"):
            return
        self._unsent += body
        if not self.is_stopped:
            self.go_on()

    async def finish(self, body: bytes = b"") -> None:
        """As the port says."""
        if body:
            self.write(body)
        self.is_finished = True

    def abort(self) -> None:
        """As the port says."""
        self.leave()


class Ending:
    """What a relay would do: whether it was told that nobody reads, or that nothing is kept."""

    def __init__(self) -> None:
        self.is_told = self.is_not_kept = False

    def client_not_kept(self) -> None:
        """A fault of the platform."""
        self.is_not_kept = True

    def client_lost(self) -> None:
        """Nobody reads."""
        self.is_told = True

    def client_blocked(self) -> None:
        """No matter."""

    def client_writable(self) -> None:
        """No matter."""


class KeptStand:
    """Some gateways on one store, inside a running virtual loop."""

    def __init__(
        self, loop: VirtualLoop, *, deferred: bool = False, policy: Retention | None = POLICY, fault: StreamFault | None = None
    ) -> None:
        self.loop = loop
        self.clock = VirtualClock(loop)
        self.store = StreamMemory(self.clock, deferred=deferred, fault=fault)
        self.entropy = Numbers()
        self.ring = KeyRing.new(self.entropy)
        self.policy = policy
        self.tasks: list[Any] = []
        self.desks: list[RetentionDesk] = []

    async def _now(self) -> KeyRing:
        return self.ring

    def desk(self, version: int = 1) -> RetentionDesk:
        """A gateway's. version: of its snapshot, 0 before it has one."""
        inbox = Inbox(self.clock)
        inbox.snapshot = Snapshot(version=version, tenants={"acme": Tenant("acme", retention=self.policy)})
        desk = RetentionDesk(self.store, self._now, self.clock, self.entropy, inbox, 1_000)
        desk.connect(GatewayConfig(stream_buffer_bytes=BUFFER), Telemetry(), self.spawn)
        return desk

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """A task of a gateway."""
        self.tasks.append(self.loop.create_task(work))

    async def begin(
        self, desk: RetentionDesk, inner: TakingClient, manner: Manner = Manner.EVENTS, *, is_background: bool = False
    ) -> tuple[KeptClient, Ending]:
        """A stream whose headers are out."""
        client, ending = KeptClient(inner, PlainShape(), manner, is_background=is_background), Ending()
        await desk.begin(client, NAME, META, WHOLE_MAX)
        await desk.admitted(NAME.tenant)
        client.watch(ending)
        await client.start(200, STREAM_HEADERS)
        return client, ending

    async def read(
        self, desk: RetentionDesk, after: int, record: GenerationRecord = COMPLETED, client: TakingClient | None = None
    ) -> bytes:
        """What a reader gets."""
        reader, client = await desk.find(NAME.tenant, NAME.generation, has_ended=False), client or TakingClient()
        assert reader is not None
        await client.start(200, STREAM_HEADERS)

        async def told() -> GenerationRecord:
            return record

        await desk.follow(reader, client, PlainShape(), told, after)
        return client.taken


def in_world(
    scene: Callable[[KeptStand], Awaitable[None]],
    *,
    deferred: bool = False,
    policy: Retention | None = POLICY,
    fault: Callable[[StreamOperation], bool] | None = None,
) -> None:
    """Play a scene in virtual time."""

    async def world() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        await scene(KeptStand(loop, deferred=deferred, policy=policy, fault=fault))

    run(world(), until_ms=3 * 86_400_000)


async def end(client: KeptClient) -> None:
    """End a stream as complete."""
    client.expect_end(COMPLETED, StandingView())
    client.write(b"done\n\n")
    await client.finish()
