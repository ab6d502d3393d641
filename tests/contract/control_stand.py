"""Both ends of control's link over real sockets in one event loop, on the stand of links: its clocks, relays, last checks."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.contract.link_stand import TERMS, HandClock, LinkStand, StandingCoordinator, at, link_standing, until

from weir import errors
from weir.coordinator.fleet import Fleet
from weir.core.registry.model import EngineKind, Pool
from weir.core.registry.snapshot import Snapshot
from weir.core.routing.replica import ReplicaState
from weir.core.tenancy import Limits, Scope, Tenant
from weir.link.channel import Channel
from weir.link.control_desk import ControlDesk
from weir.link.control_end import ControlEnd
from weir.link.control_fleet import ControlledFleet
from weir.link.control_messages import AskOpenHolds, Question
from weir.link.control_reports import ReportedFleet
from weir.link.gateway_end import Connect
from weir.messages import ReplicaAddress
from weir.units import Millis

POOL = Pool("pool", "rev", 1, 2)
BEHIND = Pool("behind", "rev", 1, 2, urls=("http://engine",))


def snapshot_of(version: int, *tenants: str) -> Snapshot:
    """A snapshot with a limit for each tenant."""
    rows = {name: Tenant(name) for name in tenants}
    return Snapshot(version, rows, limits={Scope(name): Limits(concurrency=version) for name in tenants})


def address_of(name: str, pool: str = "pool", url: str = "http://launched") -> ReplicaAddress:
    """Where a replica is."""
    return ReplicaAddress(name, pool, "rev", EngineKind.SIMULATED, url, "demo", 1_000)


class RecordingControlled:
    """A coordinator that records what control puts in force.

    answers: what questions get; a fault is raised, an event awaited. busy: pools with requests.
    """

    def __init__(self) -> None:
        self.published: list[Snapshot] = []
        self.renewed: list[tuple[int, Millis]] = []
        self.asked: list[Question] = []
        self.counts: dict[str, int] = {}
        self.answers: Any = 0
        self.busy: set[str] = set()

    def publish(self, snapshot: Snapshot) -> None:
        self.published.append(snapshot)

    def renew(self, version: int, valid_ms: Millis) -> None:
        self.renewed.append((version, valid_ms))

    def running(self) -> Mapping[str, int]:
        return self.counts

    async def answer(self, question: Question) -> Any:
        self.asked.append(question)
        if isinstance(self.answers, asyncio.Event):
            await self.answers.wait()
            return 0
        if isinstance(self.answers, errors.WeirError):
            raise self.answers
        return self.answers


class StandingDesk:
    """A coordinator that takes control in. clock: its own."""

    def __init__(self, coordinator: StandingCoordinator, epoch: int, token: str) -> None:
        self.coordinator = coordinator
        self.clock = coordinator.clock
        self.host = RecordingControlled()
        self.fleet = Fleet(self.clock)
        self.controlled = ControlledFleet(self.fleet, lambda pool: pool in self.host.busy)
        self.fleet.on_condemned, self.fleet.on_demand = self.controlled.condemned, self.controlled.demanded
        self.desk = ControlDesk(self.clock, self.host, self.controlled, epoch, TERMS.heartbeat_ms)
        coordinator.end.take_control(self.desk.greet, token)
        self._running: asyncio.Task[None] | None = asyncio.get_running_loop().create_task(self.desk.run())

    @property
    def version(self) -> int:
        """Of the snapshot in force."""
        return self.host.published[-1].version if self.host.published else 0

    @property
    def states(self) -> dict[str, ReplicaState]:
        """Of every replica by its name in the fleet."""
        return {name: replica.state for pool in self.fleet.pools for name, replica in pool.replicas.items()}

    async def stop(self) -> None:
        """Like the end of its process. Idempotent."""
        running, self._running = self._running, None
        await self.coordinator.stop()
        if running is not None:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running


class StandingControl:
    """Control's end that runs. demanded, condemned: what it was told."""

    def __init__(self, addresses: list[Connect], life: str, token: str = "") -> None:
        self.clock = HandClock()
        self.fleet = ReportedFleet()
        self.end = ControlEnd(self.clock, addresses, token, life, self.fleet)
        self.demanded: list[str] = []
        self.condemned: list[str] = []
        self.end.on_demanded, self.end.on_condemned = self.demanded.append, self.condemned.append
        self.running: asyncio.Task[None] | None = None

    async def start(self, version: int = 1, *tenants: str) -> None:
        """Look for a coordinator, with something to replay."""
        await self.end.publish(snapshot_of(version, *(tenants or ("acme",))))
        self.running = asyncio.get_running_loop().create_task(self.end.run())

    async def ended(self) -> BaseException | None:
        """What its run ended with."""
        assert self.running is not None
        await asyncio.wait((self.running,), timeout=5)
        return self.running.exception()

    async def stop(self) -> None:
        """Like the end of its process. Idempotent."""
        if self.running is not None:
            self.running.cancel()
            await asyncio.wait((self.running,))

    async def ask(self) -> int:
        """A question."""
        return await self.end.ask(AskOpenHolds("acme"), int)


def serve_one(control: StandingControl, name: str = "pool-life-1", pool: Pool = POOL, url: str = "") -> None:
    """Control reports a pool with a replica that is ready."""
    control.fleet.add_pool(pool)
    if url:
        control.fleet.locate(name, url)
    control.fleet.add(name, pool.name, pool.concurrency)
    control.fleet.answered(address_of(name, pool.name, url or "http://launched"))


class ControlStand:
    """Desks and controls of one test. links: the stand below."""

    def __init__(self, links: LinkStand) -> None:
        self.links = links
        self._desks: list[StandingDesk] = []
        self._controls: list[StandingControl] = []

    async def desk(self, epoch: int = 1, *, path: Path | None = None, token: str = "") -> StandingDesk:
        """A coordinator that runs, at this path or at a new one."""
        gateways_token = token and token[::-1]
        made = StandingDesk(await self.links.coordinator(epoch, path=path, token=gateways_token), epoch, token)
        self._desks.append(made)
        return made

    def control(self, *addresses: Path | Connect, life: str = "life", token: str = "") -> StandingControl:
        """One that is to be started."""
        found = [at(address) if isinstance(address, Path) else address for address in addresses]
        made = StandingControl(found, life, token)
        self._controls.append(made)
        return made

    async def linked(self, life: str = "life") -> tuple[StandingDesk, StandingControl]:
        """One of each, with a pool, and control's replay in force."""
        desk = await self.desk()
        control = self.control(desk.coordinator.path, life=life)
        control.fleet.add_pool(POOL)
        await control.start()
        await until(lambda: control.end.is_linked, "the replay is in force")
        return desk, control

    async def aclose(self) -> None:
        """Stop everything."""
        for control in self._controls:
            await control.stop()
        for desk in self._desks:
            await desk.stop()


@asynccontextmanager
async def control_standing() -> AsyncIterator[ControlStand]:
    """A stand that leaves nothing behind."""
    async with link_standing() as links:
        stand = ControlStand(links)
        try:
            yield stand
        finally:
            await stand.aclose()


def held_channels(channels: list[Channel], target: Path) -> Connect:
    """The address of a Unix socket; each channel is kept for the test to cut."""

    async def connect(make: Any) -> None:
        channels.append(make())
        await asyncio.get_running_loop().create_unix_connection(lambda: channels[-1], str(target))

    return connect
