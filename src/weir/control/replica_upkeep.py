"""One replica's life, again and again until it is let go: launch, warm up, probe, restart with backoff, drain and stop.

A launched replica is ready once it generated; one behind a URL, once its probe succeeded. Both are warmed up before, which
shows their pace, except where the platform does not own the engine: there a generation costs money. It reports facts to the
fleet and takes no part in placement; how many replicas there are, and which are let go, is the supervisor's.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Protocol

import msgspec
import structlog

from weir import errors
from weir.config import EngineConfig, read_api_key
from weir.control.pool_balance import KeptReplica
from weir.control.warm_up import WARM_UP_MS, WarmUp
from weir.core.registry.model import EngineKind, Pool, Revision
from weir.messages import ReplicaAddress
from weir.ports import Clock, Engine, Launcher, ReplicaProcess
from weir.units import Millis, Nanos, ns_from_ms

_log = structlog.get_logger("weir.supervisor")

_RETRY_STARTING_S = 0.2
_IDLE_CHECK_S = 1.0
_BACKOFF_MAX_S = 30.0
_LONG_MS: Millis = 60_000  # what ran so long did not fail to start
_URL_WARM_UP_MS: Millis = 10_000  # it may be another's engine that is busy: better ready without a pace than late
_STOP_GRACE_MS: Millis = 2_000


class FleetReports(Protocol):
    """What control tells the coordinator's fleet, and asks of it."""

    def add_pool(self, pool: Pool) -> None: ...

    def withdraw(self, pool: str) -> None: ...

    def add(self, name: str, pool: str, concurrency: int) -> None: ...

    def answered(self, address: ReplicaAddress) -> None: ...

    def doubted(self, pool: str, name: str) -> None: ...

    def drain(self, pool: str, name: str) -> None: ...

    def gone(self, pool: str, name: str) -> None: ...

    def is_idle(self, pool: str) -> bool: ...

    def is_unused(self, pool: str, name: str) -> bool: ...


@dataclass(slots=True, eq=False)
class KeptPool:
    """A pool as it is kept now. demanded: a replica is wanted, which one on demand is only once it was asked for.

    replicas: the oldest first. last_fault: why a start or a replica failed last; failures: how often since one got ready.
    going: what waits for its end, once it is not wanted any more. over_by_ns: it is to have no replica after that, if any.
    """

    pool: Pool
    revision: Revision
    demanded: asyncio.Event = field(default_factory=asyncio.Event)
    replicas: list[KeptReplica] = field(default_factory=list)
    was_ready: bool = False
    last_fault: str | None = None
    failures: int = 0
    going: asyncio.Task[None] | None = None
    over_by_ns: Nanos | None = None

    @property
    def name(self) -> str:
        """The pool's name."""
        return self.pool.name


class _Over(Enum):
    """Why a replica serves no more."""

    EXITED = auto()
    CONDEMNED = auto()
    IDLE = auto()
    LET_GO = auto()


_FAULTS: Mapping[_Over, tuple[type[errors.EngineFault], str]] = {
    _Over.EXITED: (errors.ReplicaLost, "The engine process exited."),
    _Over.CONDEMNED: (errors.EngineError, "The engine did not confirm that it stopped a generation."),
}


class ReplicaUpkeep:
    """engine_for: the client of an engine kind. name_of: a name that no replica had, by its pool's.

    on_change: told when a replica of a pool got ready or ended.
    """

    def __init__(
        self,
        fleet: FleetReports,
        launcher: Launcher,
        engine_for: Callable[[EngineKind], Engine],
        config: EngineConfig,
        clock: Clock,
        name_of: Callable[[str], str],
    ) -> None:
        self._fleet = fleet
        self._launcher = launcher
        self._engine_for = engine_for
        self._config = config
        self._url_api_key = read_api_key(config)
        self._clock = clock
        self._name_of = name_of
        self._condemned: dict[str, asyncio.Event] = {}
        self.on_change: Callable[[KeptPool], None] = lambda kept: None
        self.announce: Callable[[str], None] = lambda line: None
        self.on_located: Callable[[str, str], None] = lambda name, url: None

    def condemn(self, name: str) -> None:
        """Replace a replica that did not confirm a stop."""
        if (event := self._condemned.get(name)) is not None:
            event.set()

    async def keep_up(self, kept: KeptPool, replica: KeptReplica) -> None:
        """Until it was let go and has ended. One that is not ready as it is let go is to be cancelled."""
        first_s = backoff_s = self._config.restart_backoff_ms / 1e3
        while not replica.is_leaving:
            if not replica.kind.url:
                await kept.demanded.wait()
            started_ns, pause_s = self._clock.monotonic_ns(), 0.0
            try:
                await (self._run_behind_url if replica.kind.url else self._run_launched)(kept, replica)
            except errors.EngineFault as fault:
                kept.last_fault, kept.failures = fault.detail, kept.failures + 1
                _log.warning("replica_failed", pool=kept.name, revision=kept.revision.id, reason=fault.detail)
                pause_s = first_s if self._clock.monotonic_ns() - started_ns > ns_from_ms(_LONG_MS) else backoff_s
                backoff_s = min(2 * pause_s, _BACKOFF_MAX_S)
            self.on_change(kept)
            if pause_s and not replica.is_leaving:
                await asyncio.sleep(pause_s)

    async def _run_behind_url(self, kept: KeptPool, replica: KeptReplica) -> None:
        """Until it is condemned or let go."""
        url = replica.kind.url
        name = replica.name = self._name_of(kept.name)
        self.on_located(name, url)
        self._fleet.add(name, kept.name, replica.kind.concurrency)
        try:
            await self._serve(kept, replica, self._address(kept, name, url, self._url_api_key), None)
        finally:
            replica.is_ready, replica.address = False, None
            self._fleet.gone(kept.name, name)

    async def _run_launched(self, kept: KeptPool, replica: KeptReplica) -> None:
        """One process from launch to its end. Raises EngineFault unless it was stopped because it idled, or was let go."""
        name = replica.name = self._name_of(kept.name)
        self._fleet.add(name, kept.name, replica.kind.concurrency)
        self.announce(f"starting {kept.revision.id} ({name})")
        try:
            process = await self._launcher.launch(kept.revision, replace(kept.pool, concurrency=replica.kind.concurrency))
            try:
                address = self._address(kept, name, process.url, process.api_key)
                address = await self._warm_up(kept, await self._probe_until_answered(address), WARM_UP_MS)
                over = await self._serve(kept, replica, address, process)
            finally:
                await process.stop(_STOP_GRACE_MS)
        finally:
            replica.is_ready, replica.address = False, None
            self._fleet.gone(kept.name, name)
        if over in _FAULTS:
            fault, detail = _FAULTS[over]
            raise fault(detail)

    def _address(self, kept: KeptPool, name: str, url: str, api_key: str | None) -> ReplicaAddress:
        revision = kept.revision
        model = revision.artifact if revision.engine is EngineKind.OPENAI else revision.id
        return ReplicaAddress(
            name, kept.name, revision.id, revision.engine, url, model, revision.context_tokens, api_key=api_key
        )

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

    async def _warm_up(self, kept: KeptPool, address: ReplicaAddress, bound_ms: Millis) -> ReplicaAddress:
        """The address with the replica's pace. Raises EngineFault when it does not generate within the bound."""
        revision = kept.revision
        warm_up = WarmUp(self._engine_for(address.engine), self._clock, address, revision.chat, revision.embeds)
        return msgspec.structs.replace(address, pace=await warm_up.measure(bound_ms))

    # ── while it serves ──────────────────────────────────────────────────────────────────────────────────────────────

    async def _serve(
        self, kept: KeptPool, replica: KeptReplica, address: ReplicaAddress, process: ReplicaProcess | None
    ) -> _Over:
        """Why it serves no more; the first of the reasons where there are several. process: None behind a URL."""
        async with asyncio.TaskGroup() as tasks:
            loops = {
                _Over.CONDEMNED: tasks.create_task(self._watch(kept, replica, address)),
                _Over.LET_GO: tasks.create_task(self._drain_when_let_go(kept, replica)),
            }
            if process is not None:
                loops[_Over.EXITED] = tasks.create_task(_until_exited(process))
                loops[_Over.IDLE] = tasks.create_task(self._drain_when_idle(kept, replica))
            await asyncio.wait(loops.values(), return_when=asyncio.FIRST_COMPLETED)
            over = _first_of([each for each, task in loops.items() if task.done()])
            for task in loops.values():
                task.cancel()
        if over is _Over.IDLE:
            _log.info("replica_idle", pool=kept.name)
        return over

    async def _drain_when_let_go(self, kept: KeptPool, replica: KeptReplica) -> None:
        """Once it is let go, within its bound."""
        await replica.leaves.wait()
        await self._drain(kept, replica)

    async def _drain_when_idle(self, kept: KeptPool, replica: KeptReplica) -> None:
        """Once an on-demand pool had nothing to do for its idle time: no more work for its replica. Never for others."""
        idle_since_ns = self._clock.monotonic_ns()
        while True:
            await asyncio.sleep(_IDLE_CHECK_S)
            now_ns = self._clock.monotonic_ns()
            if not kept.pool.on_demand or not self._fleet.is_idle(kept.name):
                idle_since_ns = now_ns
            elif now_ns - idle_since_ns > ns_from_ms(kept.pool.idle_stop_ms):
                break
        kept.demanded.clear()
        await self._drain(kept, replica)

    async def _drain(self, kept: KeptPool, replica: KeptReplica) -> None:
        """No more work for it; what it runs, also what it was given in the same moment, may end by itself."""
        self._fleet.drain(kept.name, replica.name)
        while True:
            is_late = replica.is_leaving and self._clock.monotonic_ns() >= replica.leave_by_ns
            if is_late or self._fleet.is_unused(kept.name, replica.name):
                return
            await asyncio.sleep(_IDLE_CHECK_S)

    async def _watch(self, kept: KeptPool, replica: KeptReplica, address: ReplicaAddress) -> None:
        """Probe until the replica is condemned; the fleet hears of each answer and each fault, and knows what it is worth.

        Behind a URL it is warmed up once it answers, and the fleet hears of it afterwards. What a probe found, the next one is
        given.
        """
        condemned = self._condemned[address.name] = asyncio.Event()
        engine = self._engine_for(address.engine)
        is_cold = bool(replica.kind.url) and not kept.revision.external
        try:
            while not condemned.is_set():
                try:
                    address = _large_enough(await engine.probe(address), kept.revision)
                    if is_cold:
                        address, is_cold = await self._try_warm_up(kept, address), False
                    self._tell_ready(kept, replica, address)
                except errors.EngineFault as fault:
                    self._tell_fault(kept, replica, address, fault.detail)
                    address = msgspec.structs.replace(address, kv_tokens=None)  # it may come back with other memory
                try:
                    async with asyncio.timeout(self._config.probe_ms / 1e3):
                        await condemned.wait()
                except TimeoutError:
                    continue
        finally:
            del self._condemned[address.name]

    def _tell_ready(self, kept: KeptPool, replica: KeptReplica, address: ReplicaAddress) -> None:
        """It answered; one that was let go before it ever did gets no work in its last moment."""
        if replica.is_leaving and not replica.is_ready:
            return
        replica.address = address
        self._fleet.answered(address)
        if not kept.was_ready:
            self.announce(f"ready: {kept.revision.id} (pool {kept.name})")
        kept.was_ready = True
        if not replica.is_ready:
            replica.is_ready, kept.failures = True, 0
            self.on_change(kept)

    def _tell_fault(self, kept: KeptPool, replica: KeptReplica, address: ReplicaAddress, fault: str) -> None:
        """A probe failed. What keeps a pool from its first replica is announced, once for each reason."""
        if not kept.was_ready and kept.last_fault != fault:
            self.announce(f"pool {kept.name} waits for {address.url}: {fault}")
        kept.last_fault = fault
        replica.address = None
        kept.failures += not replica.is_ready
        self._fleet.doubted(kept.name, address.name)

    async def _try_warm_up(self, kept: KeptPool, address: ReplicaAddress) -> ReplicaAddress:
        """The address, with the replica's pace if it generates: whether it is ready, its probes say."""
        try:
            return await self._warm_up(kept, address, _URL_WARM_UP_MS)
        except errors.EngineFault as fault:
            _log.warning("replica_not_warm", pool=kept.name, replica=address.name, reason=fault.detail)
            return address


async def _until_exited(process: ReplicaProcess) -> None:
    await process.wait()


def _first_of(reasons: Sequence[_Over]) -> _Over:
    return min(reasons, key=lambda reason: reason.value)


def _large_enough(address: ReplicaAddress, revision: Revision) -> ReplicaAddress:
    """Raises EngineError where a replica takes less than what its revision promises."""
    if address.context_tokens < revision.context_tokens:
        raise errors.EngineError(
            f"Its context window of {address.context_tokens} tokens is smaller than the model's of {revision.context_tokens}."
        )
    return address
