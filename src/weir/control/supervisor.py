"""Keeps the pools that are wanted, and follows what is wanted while it runs: how many replicas there are, and which are let go.

What is new starts at once. What changed takes effect with the least that it takes: what only concerns who is served where is
the fleet's at once; replicas with other lanes or addresses follow one another. A pool that is not wanted any more keeps its
replicas until nothing waits or runs there, within the grace; then they are drained and stopped, and the fleet forgets it. It
reports facts and takes no part in placement. All of it ends with its task group, and then every process that it started is
stopped.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable

import structlog

from weir.config import EngineConfig
from weir.control.kept_pools import Wanted
from weir.control.pool_balance import KeptReplica, Start, balance, kinds_of
from weir.control.replica_upkeep import FleetReports, KeptPool, ReplicaUpkeep
from weir.core.registry.model import EngineKind
from weir.messages import ReplicaAddress
from weir.ports import Clock, Engine, Launcher
from weir.units import Millis, Nanos, ns_from_ms

_log = structlog.get_logger("weir.supervisor")

_QUIET_MS: Millis = 3_000
"""A gateway that has not heard of a change asks for what it pinned before: it is waited for longer than administrators are."""
_QUIET_CHECK_S = 0.5


class Supervisor:
    """Keeps the pools of a cell. engine_for: the client of an engine kind.

    life: in the names of replicas, where the fleet outlives the supervisor; no other one ever had it. drain_grace_ms: how long
    what runs on a replica that is let go, or waits in its pool, may still take.
    """

    def __init__(
        self,
        fleet: FleetReports,
        launcher: Launcher,
        engine_for: Callable[[EngineKind], Engine],
        config: EngineConfig,
        clock: Clock,
        *,
        life: str = "",
    ) -> None:
        self._fleet = fleet
        self._clock = clock
        self._upkeep = ReplicaUpkeep(fleet, launcher, engine_for, config, clock, self._new_name)
        self._upkeep.on_change = self._changed
        self._upkeep.announce = lambda line: self.announce(line)
        self._upkeep.on_located = lambda replica, url: self.on_located(replica, url)
        self._pools: dict[str, KeptPool] = {}
        self._life = f"{life}-" if life else ""
        self._serial = 0
        self._tasks: asyncio.TaskGroup | None = None
        self._progress = asyncio.Event()
        self.drain_grace_ms: Millis = 30_000
        self.announce: Callable[[str], None] = lambda line: None
        self.on_located: Callable[[str, str], None] = lambda replica, url: None
        """Told where a replica that is about to be added runs already."""

    # ── what is wanted ───────────────────────────────────────────────────────────────────────────────────────────────

    def keep(self, wanted: Iterable[Wanted]) -> None:
        """Keep these pools too, as they are from now on: before anybody is told that they take work."""
        for pool, revision in wanted:
            assert pool.revision == revision.id
            kept = self._pools.get(pool.name)
            if kept is None:
                kept = self._pools[pool.name] = KeptPool(pool, revision)
                self._fleet.add_pool(pool)
            assert kept.revision.id == revision.id, "a pool's revision never changes"
            if kept.pool != pool:
                self._fleet.add_pool(pool)
            kept.pool, kept.revision = pool, revision
            if not pool.on_demand:
                kept.demanded.set()
            self._come_back(kept)
            self._balance(kept)
        self._tell_progress()

    def follow(self, wanted: Collection[Wanted], revoked: Collection[str] = ()) -> None:
        """Keep these pools and no others: once everybody was told that those take no work.

        revoked: revisions whose pools go without waiting for those who were not told.
        """
        self.keep(wanted)
        names = {pool.name for pool, _ in wanted}
        for kept in [each for each in self._pools.values() if each.name not in names]:
            self._let_go_of(kept, at_once=kept.revision.id in revoked)
        self._tell_progress()

    def demand(self, pool: str) -> None:
        """A request asked for a pool that is on demand."""
        if (kept := self._pools.get(pool)) is not None:
            kept.demanded.set()

    def condemn(self, replica: str) -> None:
        """Replace a replica that did not confirm a stop."""
        self._upkeep.condemn(replica)

    # ── how it goes ──────────────────────────────────────────────────────────────────────────────────────────────────

    def fault_of(self, pool: str) -> str | None:
        """Why the pool's last start or replica failed, if it did. None also for a pool that is not kept."""
        kept = self._pools.get(pool)
        return kept.last_fault if kept is not None else None

    def ready_of(self, pool: str) -> list[ReplicaAddress]:
        """The replicas of a pool that answered their last probe, and are to stay."""
        replicas = self._pools[pool].replicas if pool in self._pools else ()
        return [each.address for each in replicas if each.address is not None and not each.is_leaving]

    def failures_of(self, pool: str) -> int:
        """How often a start or a replica failed since one of the pool's got ready; behind URLs, how many first probes."""
        kept = self._pools.get(pool)
        return kept.failures if kept is not None else 0

    async def wait_ready(self, revisions: Collection[str]) -> bool:
        """True, once each of these revisions had a ready replica, unless its pools want none, or only on demand."""
        while any(self._is_awaited(revision) for revision in revisions):
            await self._progress.wait()
        return True

    def _is_awaited(self, revision: str) -> bool:
        serving = [kept for kept in self._pools.values() if kept.revision.id == revision and kept.going is None]
        expected = any(kept.pool.replicas_wanted and not kept.pool.on_demand for kept in serving)
        return expected and not any(kept.was_ready for kept in serving)

    def _tell_progress(self) -> None:
        self._progress.set()
        self._progress = asyncio.Event()

    # ── life ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def run(self) -> None:
        """Keep the pools until cancelled; then stop what was started."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            try:
                for kept in self._pools.values():
                    self._balance(kept)
                await asyncio.get_running_loop().create_future()
            finally:
                self._tasks = None  # nothing is started any more

    def _changed(self, kept: KeptPool) -> None:
        """A replica got ready, or ended."""
        self._balance(kept)
        self._tell_progress()

    def _balance(self, kept: KeptPool) -> None:
        """Let go what is too much, and start what is missing."""
        if self._tasks is None:
            return
        wanted = kinds_of(kept.pool) if kept.over_by_ns is None else []
        changes = balance(wanted, kept.replicas)
        for replica in changes.leave:
            self._let_go(replica, kept.over_by_ns or self._grace_ns())
        for start in changes.start:
            self._start(self._tasks, kept, start)

    def _start(self, tasks: asyncio.TaskGroup, kept: KeptPool, start: Start) -> None:
        replica = KeptReplica(start.kind, start.replaces)
        kept.replicas.append(replica)
        replica.task = tasks.create_task(self._upkeep.keep_up(kept, replica))
        replica.task.add_done_callback(lambda task: self._ended(kept, replica, task))

    def _ended(self, kept: KeptPool, replica: KeptReplica, task: asyncio.Task[None]) -> None:
        """A replica is gone for good, or all of it failed."""
        kept.replicas.remove(replica)
        for each in kept.replicas:
            if each.replaces is replica:
                each.replaces = None
        if task.cancelled() or task.exception() is None:
            self._changed(kept)

    def _let_go(self, replica: KeptReplica, by_ns: Nanos) -> None:
        assert replica.task is not None
        replica.leave_by_ns = by_ns
        replica.leaves.set()
        if not replica.is_ready:
            replica.task.cancel()  # nothing runs there

    def _grace_ns(self) -> Nanos:
        return self._clock.monotonic_ns() + ns_from_ms(self.drain_grace_ms)

    def _new_name(self, pool: str) -> str:
        self._serial += 1
        return f"{pool}-{self._life}{self._serial}"

    # ── pools that go ────────────────────────────────────────────────────────────────────────────────────────────────

    def _let_go_of(self, kept: KeptPool, *, at_once: bool) -> None:
        if self._tasks is None:
            self._forget(kept)
            return
        if kept.going is None:
            _log.info("pool_goes", pool=kept.name, revision=kept.revision.id)
            kept.going = self._tasks.create_task(self._see_off(kept, self._grace_ns()))
        if at_once:
            self._end(kept, self._grace_ns())

    async def _see_off(self, kept: KeptPool, by_ns: Nanos) -> None:
        """Wait until nobody needs it any more, or for the grace; then let its replicas go, and forget it."""
        await self._until_quiet(kept, by_ns)
        self._end(kept, by_ns)
        while ending := [replica.task for replica in kept.replicas if replica.task is not None]:
            await asyncio.wait(ending)
        self._forget(kept)
        _log.info("pool_gone", pool=kept.name)

    async def _until_quiet(self, kept: KeptPool, by_ns: Nanos) -> None:
        """Until nothing waited or ran there for a while."""
        quiet_since_ns = now_ns = self._clock.monotonic_ns()
        while kept.over_by_ns is None and now_ns < by_ns and now_ns - quiet_since_ns < ns_from_ms(_QUIET_MS):
            await asyncio.sleep(_QUIET_CHECK_S)
            now_ns = self._clock.monotonic_ns()
            if not self._fleet.is_idle(kept.name):
                quiet_since_ns = now_ns

    def _end(self, kept: KeptPool, by_ns: Nanos) -> None:
        """It is to have no replica any more."""
        if kept.over_by_ns is None:
            kept.over_by_ns = by_ns
            self._balance(kept)

    def _forget(self, kept: KeptPool) -> None:
        del self._pools[kept.name]
        self._fleet.withdraw(kept.name)

    def _come_back(self, kept: KeptPool) -> None:
        """It is wanted again: what was not let go of it stays."""
        if kept.going is not None:
            kept.going.cancel()
            kept.going = kept.over_by_ns = None
