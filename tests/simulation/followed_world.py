"""A simulated cell whose replicas control's own supervisor keeps, beside the coordinator or over control's link.

What is approved changes as control publishes it: pools first, then the snapshot, then what is left goes. Processes exist only
here; everything else is as in the world that it extends, whose audit it passes at its end.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from tests.simulation.cables import Cable
from tests.simulation.link_world import compute_on_the_loop, until

from weir.config import EngineConfig
from weir.control.kept_pools import kept_pools
from weir.control.served_snapshots import ServedSnapshots
from weir.control.supervisor import Supervisor
from weir.coordinator.fleet import Fleet
from weir.core.registry.model import Alias, Canary, Pool, Revision
from weir.core.registry.snapshot import Snapshot
from weir.link.control_desk import ControlDesk
from weir.link.control_end import ControlEnd
from weir.link.control_fleet import ControlledFleet
from weir.link.control_messages import Question
from weir.link.control_reports import ReportedFleet
from weir.link.coordinator_end import CoordinatorEnd
from weir.link.frames import Terms
from weir.messages import Down, ReplicaAddress
from weir.sim.audit import Exchange
from weir.sim.places import Places
from weir.sim.process import Cell
from weir.sim.random_source import seeded_random
from weir.sim.replicas import Keeper
from weir.sim.world import ALIAS, REVISION, SMALL_STEPS, Order, Spec, World, play_in
from weir.units import Millis, Tokens

NEW = replace(REVISION, id="sim@2")
OLD_POOL = Pool("old", REVISION.id, 1, 4)
NEW_POOL = Pool("new", NEW.id, 1, 4)
PATIENT = replace(SMALL_STEPS, queue_wait_ms=60_000)
SPEC = Spec(pools=[OLD_POOL, NEW_POOL], revisions=[REVISION, NEW], coordinator=PATIENT)
TERMS = Terms(b"d", b"s", step_tokens=16, store_wait_ms=500)
START_S = 2.0
LATE_S = 2.0
GRACE_MS: Millis = 30_000


class Witnessed:
    """The cell's fleet; the world's witness hears which replicas there are, and the engine which have gone."""

    def __init__(self, fleet: Fleet, places: Places) -> None:
        self._fleet = fleet
        self._places = places
        self.last_added = ""

    def add_pool(self, pool: Pool) -> None:
        self._places.kept(pool)
        self._fleet.add_pool(pool)

    def withdraw(self, pool: str) -> None:
        self._fleet.withdraw(pool)

    def add(self, name: str, pool: str, concurrency: int) -> None:
        self.last_added = name
        self._places.added(name, pool)
        self._fleet.add(name, pool, concurrency)

    def answered(self, address: ReplicaAddress) -> None:
        self._fleet.answered(address)

    def doubted(self, pool: str, name: str) -> None:
        self._fleet.doubted(pool, name)

    def drain(self, pool: str, name: str) -> None:
        self._fleet.drain(pool, name)

    def gone(self, pool: str, name: str) -> None:
        self._places.gone(name)
        self._fleet.gone(pool, name)

    def is_idle(self, pool: str) -> bool:
        return self._fleet.is_idle(pool)

    def is_unused(self, pool: str, name: str) -> bool:
        return self._fleet.is_unused(pool, name)

    def at_once(self) -> AbstractContextManager[None]:
        return self._fleet.at_once()


class Reports(ReportedFleet):
    """What control tells over its link."""

    last_added = ""

    def add(self, name: str, pool: str, concurrency: int) -> None:
        self.last_added = name
        super().add(name, pool, concurrency)


class Process:
    """A process of the simulated engine."""

    url = "http://simulated"
    api_key = None

    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop = stop
        self.gone = asyncio.Event()

    async def wait(self) -> int:
        await self.gone.wait()
        return 0

    async def stop(self, grace_ms: Millis) -> None:
        self._stop()
        self.gone.set()


class Followed:
    """Control beside a cell: implements Keeper."""

    def __init__(self, world: "FollowedWorld", cell: Cell, prefix: str) -> None:
        self._cell = cell
        self._processes: dict[str, Process] = {}
        witnessed = Witnessed(cell.fleet, world.checker.places)
        self.link = Link(world, cell, witnessed, prefix) if world.is_linked else None
        self._reports = reports = self.link.reports if self.link is not None else witnessed
        config = EngineConfig(probe_ms=500, restart_backoff_ms=500)
        self.supervisor = Supervisor(reports, self, lambda kind: cell.engine.inner, config, world.clock, life=prefix)
        self.supervisor.drain_grace_ms = GRACE_MS
        if self.link is None:
            cell.fleet.on_condemned = self.supervisor.condemn
            self.served = ServedSnapshots(self.supervisor, world.take)
        else:
            self.link.end.on_condemned = self.supervisor.condemn
            self.served = ServedSnapshots(self.supervisor, self.link.end.publish)

    async def launch(self, revision: Revision, pool: Pool) -> Process:
        """Implements Launcher; whatever was added last is what is launched."""
        name = self._reports.last_added
        await asyncio.sleep(START_S)
        process = self._processes[name] = Process(lambda: self._stopped(name))
        return process

    def _stopped(self, name: str) -> None:
        if self._processes.pop(name, None) is not None:
            self._cell.engine.inner.lose(name)

    @property
    def names(self) -> list[str]:
        """Replicas that run."""
        return list(self._processes)

    def lose(self, name: str) -> None:
        """A replica's process dies."""
        process = self._processes[name]
        self._stopped(name)
        process.gone.set()

    async def run(self) -> None:
        """Until cancelled."""
        compute_on_the_loop()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.supervisor.run())
            if self.link is not None:
                tasks.create_task(self.link.run())


@dataclass
class _Host:
    """Implements ControlledHost and SessionHost."""

    world: "FollowedWorld"
    cell: Cell

    def publish(self, snapshot: Snapshot) -> None:
        self.world.publish(snapshot)

    def renew(self, version: int, valid_ms: Millis) -> None:
        """Nothing runs out here."""

    def running(self) -> Mapping[str, int]:
        return self.cell.fleet.occupied()

    async def answer(self, question: Question) -> Any:
        raise NotImplementedError

    def connect(self, register: Any, inbox: Any) -> Any:
        raise NotImplementedError

    def lose(self, session: str) -> None:
        raise NotImplementedError

    @property
    def fresh_ms(self) -> Millis | None:
        return None


class Link:
    """Control's link, both ends of it, on a cable."""

    def __init__(self, world: "FollowedWorld", cell: Cell, fleet: Witnessed, prefix: str) -> None:
        host = _Host(world, cell)
        self.reports = Reports()
        self._far = CoordinatorEnd(world.clock, host, 1, TERMS)
        controlled = ControlledFleet(fleet, cell.executions.carries)
        cell.fleet.on_condemned, cell.fleet.on_demand = controlled.condemned, controlled.demanded
        self._desk = ControlDesk(world.clock, host, controlled, 1, TERMS.heartbeat_ms)
        self._far.take_control(self._desk.greet, "")
        self.cable = Cable(seeded_random(world.seed, prefix), self._far.accept, (0.001, 0.05))
        self.end = ControlEnd(world.clock, [self.cable.connect], "", prefix, self.reports)

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for loop in (self._far.run, self._desk.run, self.end.run):
                tasks.create_task(loop())


class FollowedWorld(World):
    """approved: what control knows; the snapshot that is in force is what of it is served."""

    is_linked = False
    followed: Followed

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        first = self.spec.kept_pools[0]
        self.approved = replace(self.snapshot, pools={first.name: first})
        self.snapshot = self.approved

    def make_supervisor(self, cell: Cell, prefix: str) -> Keeper:
        """Control's own."""
        self.followed = Followed(self, cell, prefix)
        self.followed.supervisor.keep(kept_pools(self.approved, {}))
        if self.followed.link is not None:
            self.followed.link.end._wanted = self.snapshot
        return self.followed

    async def take(self, snapshot: Snapshot) -> None:
        """Put it in force."""
        self.publish(snapshot)

    async def approve(self, *pools: Pool, alias: Alias = ALIAS, revisions: Collection[Revision] = ()) -> None:
        """These pools are on record from now on, the alias means this, and these revisions are as they say: in force."""
        before = self.approved
        self.approved = replace(
            before,
            version=before.version + 1,
            pools={pool.name: pool for pool in pools},
            aliases={**before.aliases, alias.name: alias},
            revisions={**before.revisions, **{revision.id: revision for revision in revisions}},
        )
        await self.followed.served.publish(self.approved)
        await until(lambda: self.snapshot.version == self.approved.version, 10, "it is in force")

    def late(self) -> None:
        """From now on the gateway hears of each change only after a while."""
        inbox, loop = self.cell.inbox, asyncio.get_running_loop()
        deliver = inbox.deliver

        def deliver_late(message: Down) -> None:
            if isinstance(message, Snapshot):
                loop.call_later(LATE_S, deliver, message)
            else:
                deliver(message)

        inbox.deliver = deliver_late  # type: ignore[method-assign]

    async def until_ready(self, *pools: Pool) -> None:
        """Wait until all lanes of these can be used."""
        lanes = {pool.name: pool.replicas * pool.concurrency for pool in pools}
        await self.until(lambda: lanes.items() <= {view.name: view.lanes.usable for view in self.cell.fleet.pools}.items())

    async def until_gone(self, pool: Pool) -> None:
        """Wait until nobody keeps the pool, and it has no replicas."""
        view = self.cell.fleet.pool(pool.name)
        await self.until(lambda: not view.is_kept and not view.replicas)

    def ran_in(self, exchanges: Collection[Exchange]) -> Counter[str]:
        """How many of these requests each pool's replicas ran last."""
        prompts = {self.checker.prompts[exchange.answer.name] for exchange in exchanges}
        last = {call.prompt: call.replica for call in self.cell.engine.calls if call.prompt in prompts}
        return Counter(name.split("-")[0] for name in last.values())


class LinkedWorld(FollowedWorld):
    """The same with control on a link."""

    is_linked = True


KINDS = [FollowedWorld, LinkedWorld]


def promoted(alias: Alias = ALIAS) -> Alias:
    """The alias as it means the new revision."""
    return replace(alias, revision=NEW.id)


def tried(weight: int) -> Alias:
    """The alias as it sends so many percent to the new revision."""
    return replace(ALIAS, canary=Canary("ro-1", 1, NEW.id, weight))


class Clients:
    """Clients that ask again as soon as they are answered, all of them different. exchanges: all that they had."""

    def __init__(self, world: FollowedWorld, number: int, max_output_tokens: Tokens = 24) -> None:
        self._world = world
        self._max_output_tokens = max_output_tokens
        self._is_over = False
        self.exchanges: list[Exchange] = []
        self._tasks = [asyncio.get_running_loop().create_task(self._ask(each)) for each in range(number)]

    async def _ask(self, client: int) -> None:
        number = 0
        while not self._is_over:
            number += 1
            prompt, most = f"client {client} asks {number}", self._max_output_tokens
            order = Order(prompt, tenant=client % 2, stream=bool(client % 3), max_output_tokens=most)
            exchange = self._world.send(order)
            self.exchanges.append(exchange)
            await until(lambda asked=exchange: asked.is_done, 100, "it is answered")  # type: ignore[misc]

    async def stop(self) -> None:
        """Wait for the last answers."""
        self._is_over = True
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def check_all_completed(self) -> None:
        """AssertionError unless every request was served."""
        for exchange in self.exchanges:
            check_completed(exchange)


def check_completed(exchange: Exchange) -> None:
    """AssertionError unless it was served."""
    answer = exchange.answer
    assert answer.refusal is None, f"{answer.name} was refused: {answer.refusal}"
    assert answer.record is not None and answer.record.status == "completed", f"{answer.name}: {answer.record}"


def play(kind: type[FollowedWorld], script: Callable[[FollowedWorld], Awaitable[None]], spec: Spec = SPEC) -> None:
    """Run a script in a world whose first pool is ready, and audit it."""

    async def scenario(world: FollowedWorld) -> None:
        await world.until_ready(spec.kept_pools[0])
        await script(world)

    play_in(kind, spec, 1, scenario)
