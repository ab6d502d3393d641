"""Keeps every pool at its number of replicas: starts, warms up, probes, restarts with backoff, drains and stops.

A launched replica is ready once it generated; a replica behind a URL, once its probe succeeded. Both are warmed up before,
which shows their pace, except where the platform does not own the engine: there a generation costs money. The supervisor
reports facts to the fleet and takes no part in placement. Its loops end with its task group, and then every process that it
started is stopped.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import structlog

from weir import errors
from weir.config import EngineConfig, read_api_key
from weir.control.warm_up import WARM_UP_MS, WarmUp
from weir.core.registry.model import EngineKind, Pool, Revision
from weir.messages import ReplicaAddress
from weir.ports import Clock, Engine, Launcher, ReplicaProcess
from weir.units import Millis, ns_from_ms

_log = structlog.get_logger("weir.supervisor")

_RETRY_STARTING_S = 0.2
_IDLE_CHECK_S = 1.0
_BACKOFF_MAX_S = 30.0
_URL_WARM_UP_MS: Millis = 10_000  # it may be another's engine that is busy: better ready without a pace than late
_STOP_GRACE_MS: Millis = 2_000


class FleetReports(Protocol):
    """What the supervisor tells the coordinator's fleet."""

    def add_pool(self, pool: Pool) -> None: ...

    def add(self, name: str, pool: str, concurrency: int) -> None: ...

    def answered(self, address: ReplicaAddress) -> None: ...

    def doubted(self, pool: str, name: str) -> None: ...

    def drain(self, pool: str, name: str) -> None: ...

    def gone(self, pool: str, name: str) -> None: ...

    def running_in(self, pool: str) -> int: ...


@dataclass(slots=True)
class _PoolKeeping:
    """A pool's loop: what it keeps, and the signals that wake it."""

    pool: Pool
    revision: Revision
    wanted: asyncio.Event = field(default_factory=asyncio.Event)
    was_ready: bool = False
    last_fault: str | None = None


class Supervisor:
    """Keeps the pools of a cell. engine_for: the client of an engine kind.

    life: in the names of replicas, where the fleet outlives the supervisor; no other one ever had it.
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
        self._launcher = launcher
        self._engine_for = engine_for
        self._config = config
        self._url_api_key = read_api_key(config)
        self._clock = clock
        self._pools: dict[str, _PoolKeeping] = {}
        self._ready: dict[str, asyncio.Event] = {}  # by revision
        self._condemned: dict[str, asyncio.Event] = {}
        self._answering: dict[str, ReplicaAddress] = {}
        self._life = f"{life}-" if life else ""
        self._serial = 0
        self.announce: Callable[[str], None] = lambda line: None
        self.on_located: Callable[[str, str], None] = lambda replica, url: None
        """Told where a replica that is about to be added runs already."""

    def add_pool(self, pool: Pool, revision: Revision) -> None:
        """Keep this pool once `run` runs."""
        keeping = self._pools[pool.name] = _PoolKeeping(pool, revision)
        self._ready.setdefault(revision.id, asyncio.Event())
        if not pool.on_demand:
            keeping.wanted.set()
        self._fleet.add_pool(pool)

    def demand(self, pool: str) -> None:
        """A request asked for a pool that is on demand."""
        if (keeping := self._pools.get(pool)) is not None:
            keeping.wanted.set()

    def condemn(self, replica: str) -> None:
        """Replace a replica that did not confirm a stop."""
        if (event := self._condemned.get(replica)) is not None:
            event.set()

    def fault_of(self, pool: str) -> str | None:
        """Why the pool's last start or replica failed, if it did. None also for a pool that is not kept."""
        keeping = self._pools.get(pool)
        return keeping.last_fault if keeping is not None else None

    def ready_of(self, pool: str) -> list[ReplicaAddress]:
        """The replicas of a pool that answered their last probe."""
        return [address for address in self._answering.values() if address.pool == pool]

    async def wait_ready(self) -> bool:
        """True, once every revision that has a pool which is not on demand had a ready replica in one of them."""
        for revision in {each.revision.id for each in self._pools.values() if not each.pool.on_demand}:
            await self._ready[revision].wait()
        return True

    async def run(self) -> None:
        """Keep the pools until cancelled; then stop what was started."""
        async with asyncio.TaskGroup() as tasks:
            for keeping in self._pools.values():
                for url in keeping.pool.urls:
                    tasks.create_task(self._keep_url(keeping, url))
                if not keeping.pool.urls:
                    for _ in range(keeping.pool.replicas):
                        tasks.create_task(self._keep_launched(keeping))

    def _name(self, keeping: _PoolKeeping) -> str:
        self._serial += 1
        return f"{keeping.pool.name}-{self._life}{self._serial}"

    def _address(self, keeping: _PoolKeeping, name: str, url: str, api_key: str | None) -> ReplicaAddress:
        revision = keeping.revision
        model = revision.artifact if revision.engine is EngineKind.OPENAI else revision.id
        return ReplicaAddress(
            name, keeping.pool.name, revision.id, revision.engine, url, model, revision.context_tokens, api_key=api_key
        )

    # ── replicas behind a URL ────────────────────────────────────────────────────────────────────────────────────────

    async def _keep_url(self, keeping: _PoolKeeping, url: str) -> None:
        while True:
            name = self._name(keeping)
            self.on_located(name, url)
            self._fleet.add(name, keeping.pool.name, keeping.pool.concurrency)
            try:
                address = self._address(keeping, name, url, self._url_api_key)
                await self._watch(keeping, address, cold=not keeping.revision.external)
            finally:
                self._fleet.gone(keeping.pool.name, name)

    # ── launched replicas ────────────────────────────────────────────────────────────────────────────────────────────

    async def _keep_launched(self, keeping: _PoolKeeping) -> None:
        backoff_s = self._config.restart_backoff_ms / 1e3
        while True:
            await keeping.wanted.wait()
            started_ns = self._clock.monotonic_ns()
            try:
                await self._run_replica(keeping)
            except errors.EngineFault as fault:
                keeping.last_fault = fault.detail
                _log.warning("replica_failed", pool=keeping.pool.name, revision=keeping.revision.id, reason=fault.detail)
                if self._clock.monotonic_ns() - started_ns > ns_from_ms(60_000):
                    backoff_s = self._config.restart_backoff_ms / 1e3
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, _BACKOFF_MAX_S)

    async def _run_replica(self, keeping: _PoolKeeping) -> None:
        """One process from launch to its end. Raises EngineFault unless it was stopped because it idled."""
        name = self._name(keeping)
        self._fleet.add(name, keeping.pool.name, keeping.pool.concurrency)
        self.announce(f"starting {keeping.revision.id} ({name})")
        try:
            process = await self._launcher.launch(keeping.revision, keeping.pool)
            try:
                address = self._address(keeping, name, process.url, process.api_key)
                address = await self._warm_up(keeping, await self._probe_until_answered(address), WARM_UP_MS)
                await self._serve_until_over(keeping, address, process)
            finally:
                await process.stop(_STOP_GRACE_MS)
        finally:
            self._fleet.gone(keeping.pool.name, name)

    async def _probe_until_answered(self, address: ReplicaAddress) -> ReplicaAddress:
        """The engine listens, but may still load. Raises EngineError after the start bound."""
        engine = self._engine_for(address.engine)
        deadline_ns = self._clock.monotonic_ns() + ns_from_ms(self._config.start_ms)
        while True:
            try:
                return await engine.probe(address)
            except errors.EngineFault as fault:
                if self._clock.monotonic_ns() > deadline_ns:
                    raise errors.EngineError(f"The engine did not become healthy: {fault.detail}") from fault
            await asyncio.sleep(_RETRY_STARTING_S)

    async def _warm_up(self, keeping: _PoolKeeping, address: ReplicaAddress, bound_ms: Millis) -> ReplicaAddress:
        """The address with the replica's pace. Raises EngineFault when it does not generate within the bound."""
        warm_up = WarmUp(self._engine_for(address.engine), self._clock, address, keeping.revision.chat)
        return msgspec.structs.replace(address, pace=await warm_up.measure(bound_ms))

    async def _serve_until_over(self, keeping: _PoolKeeping, address: ReplicaAddress, process: ReplicaProcess) -> None:
        async with asyncio.TaskGroup() as tasks:
            exit_status = tasks.create_task(process.wait())
            watch = tasks.create_task(self._watch(keeping, address))
            idle = tasks.create_task(self._drain_when_idle(keeping, address.name))
            await asyncio.wait((exit_status, watch, idle), return_when=asyncio.FIRST_COMPLETED)
            over = (exit_status.done(), watch.done())
            for task in (exit_status, watch, idle):
                task.cancel()
        if over[0]:
            raise errors.ReplicaLost("The engine process exited.")
        if over[1]:
            raise errors.EngineError("The engine did not confirm that it stopped a generation.")
        _log.info("replica_idle", pool=keeping.pool.name)

    async def _drain_when_idle(self, keeping: _PoolKeeping, name: str) -> None:
        """Once an on-demand pool had nothing to do for its idle time: no more work for its replica. Never for others."""
        idle_since_ns = self._clock.monotonic_ns()
        while True:
            await asyncio.sleep(_IDLE_CHECK_S)
            now_ns = self._clock.monotonic_ns()
            if not keeping.pool.on_demand or self._fleet.running_in(keeping.pool.name):
                idle_since_ns = now_ns
            elif now_ns - idle_since_ns > ns_from_ms(keeping.pool.idle_stop_ms):
                break
        keeping.wanted.clear()
        self._fleet.drain(keeping.pool.name, name)
        await self._until_unused(keeping.pool.name)  # it may have been given something in the same moment

    async def _until_unused(self, pool: str) -> None:
        while True:
            if not self._fleet.running_in(pool):
                return
            await asyncio.sleep(_IDLE_CHECK_S)

    async def _watch(self, keeping: _PoolKeeping, address: ReplicaAddress, *, cold: bool = False) -> None:
        """Probe until the replica is condemned; the fleet hears of each answer and each fault, and knows what it is worth.

        cold: it is warmed up once it answers, and the fleet hears of it afterwards. What a probe found, the next one is given.
        """
        condemned = self._condemned[address.name] = asyncio.Event()
        engine = self._engine_for(address.engine)
        try:
            while not condemned.is_set():
                try:
                    address = _large_enough(await engine.probe(address), keeping.revision)
                    if cold:
                        address, cold = await self._try_warm_up(keeping, address), False
                    self._answering[address.name] = address
                    self._fleet.answered(address)
                    self._tell_ready(keeping)
                except errors.EngineFault as fault:
                    self._tell(keeping, address, fault.detail)
                    self._answering.pop(address.name, None)
                    address = msgspec.structs.replace(address, kv_tokens=None)  # it may come back with other memory
                    self._fleet.doubted(keeping.pool.name, address.name)
                try:
                    async with asyncio.timeout(self._config.probe_ms / 1e3):
                        await condemned.wait()
                except TimeoutError:
                    continue
        finally:
            del self._condemned[address.name]
            self._answering.pop(address.name, None)

    def _tell_ready(self, keeping: _PoolKeeping) -> None:
        if not keeping.was_ready:
            self.announce(f"ready: {keeping.revision.id} (pool {keeping.pool.name})")
        keeping.was_ready = True
        self._ready[keeping.revision.id].set()

    def _tell(self, keeping: _PoolKeeping, address: ReplicaAddress, fault: str) -> None:
        """What keeps a pool from its first replica is announced, once for each reason."""
        if not keeping.was_ready and keeping.last_fault != fault:
            self.announce(f"pool {keeping.pool.name} waits for {address.url}: {fault}")
        keeping.last_fault = fault

    async def _try_warm_up(self, keeping: _PoolKeeping, address: ReplicaAddress) -> ReplicaAddress:
        """The address, with the replica's pace if it generates: whether it is ready, its probes say."""
        try:
            return await self._warm_up(keeping, address, _URL_WARM_UP_MS)
        except errors.EngineFault as fault:
            _log.warning("replica_not_warm", pool=keeping.pool.name, replica=address.name, reason=fault.detail)
            return address


def _large_enough(address: ReplicaAddress, revision: Revision) -> ReplicaAddress:
    """Raises EngineError where a replica takes less than what its revision promises."""
    if address.context_tokens < revision.context_tokens:
        raise errors.EngineError(
            f"Its context window of {address.context_tokens} tokens is smaller than the model's of {revision.context_tokens}."
        )
    return address
