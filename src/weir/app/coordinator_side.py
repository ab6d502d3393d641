"""The coordinator's side of a cell, beside control in one process or in one of its own: who leads, the books, what runs.

It is made before it leads, so that whatever may refuse a start comes first; `recover` makes the coordinator once it does.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import structlog

from weir import errors
from weir.app.link_sockets import LinkListener
from weir.app.process_parts import ProcessParts
from weir.app.running_view import FaultOf, RunningCell, gauges_of
from weir.app.runtime import unless_stopped
from weir.config import WeirConfig
from weir.control.pruning import Pruning
from weir.coordinator.coordinator import Coordinator, CoordinatorParts
from weir.coordinator.execution_table import ExecutionTable
from weir.coordinator.fleet import Adapting, Fleet
from weir.coordinator.leadership import Leadership
from weir.coordinator.recovery import Recovered, recover
from weir.coordinator.rejections import RejectionCounter
from weir.core.registry.snapshot import Snapshot
from weir.core.routing.replica import Replica, ReplicaState
from weir.gateway.inbox import Inbox
from weir.link.frames import Terms
from weir.ports import Entropy
from weir.storage.state_directory import BODY_DIGEST_SECRET, CACHE_SALT_SECRET, StateDirectory


class CoordinatorSide:
    """links: where gateways, and control of its own process, come in. terms: what gateways are told. Raises InvalidRequest."""

    def __init__(self, parts: ProcessParts) -> None:
        self._parts = parts
        config, stores = parts.config, parts.stores
        self.fleet = Fleet(parts.clock, _adapting(config))
        self.fleet.on_state = _log_state
        self._executions = ExecutionTable(
            stores.ledger,
            config.coordinator.remembered_executions,
            config.coordinator.request_id_ms,
            config.coordinator.store_wait_ms,
        )
        lease = stores.lease
        self._leadership = Leadership(lease, parts.clock, parts.entropy.token(12).hex()) if lease is not None else None
        self.terms = _terms_of(config, stores.directory, parts.entropy)
        self.links = LinkListener(config.link)
        self.coordinator: Coordinator | None = None
        self._recovered: Recovered | None = None

    async def lead(self, stop: asyncio.Event, lead: Callable[[], Awaitable[None]], *, standby: bool) -> None:
        """Run `lead` once this process leads, unless `stop` comes first, and give the lease back. Raises StaleEpoch.

        standby: wait until no other one leads, instead of taking its place.
        """
        leadership = self._leadership
        if leadership is None:
            await lead()
        elif await unless_stopped(stop, self._win(leadership, standby=standby)):
            async with asyncio.TaskGroup() as tasks:
                leading = tasks.create_task(leadership.run())
                await lead()
                leading.cancel()
            await leadership.give_back()

    async def _win(self, leadership: Leadership, *, standby: bool) -> bool:
        if standby:
            self._parts.announce("standing by until the cell that leads is gone")
        return await leadership.win(by_force=not standby)

    # ── once it leads ────────────────────────────────────────────────────────────────────────────────────────────────

    async def recover(self, snapshot: Snapshot) -> Coordinator:
        """The coordinator, with what the books say, on a snapshot that was just read. Raises StoreFault."""
        parts, config, link = self._parts, self._parts.config.coordinator, self._parts.config.link
        keeps_open = link.listen is not None  # gateways of its own end with this process
        recovered = self._recovered = await recover(
            parts.stores.ledger, parts.clock, snapshot, config.group_ms, keeps_open=keeps_open
        )
        if recovered.resolved:
            parts.announce(f"resolved {recovered.resolved} hold(s) that a crash left open")
        made = CoordinatorParts(
            clock=parts.clock,
            config=config,
            fleet=self.fleet,
            book=recovered.book,
            journal=recovered.journal,
            executions=self._executions,
            rejections=RejectionCounter(parts.stores.ledger, parts.clock),
            telemetry=parts.telemetry,
            leads=self._leadership.holds if self._leadership is not None else lambda: True,
            is_lease_away=self._leadership.is_store_away if self._leadership is not None else lambda: False,
            kept=recovered.kept if keeps_open else None,
            link=link,
        )
        coordinator = self.coordinator = Coordinator(made, snapshot)
        coordinator.renew(link.snapshot_valid_ms)
        if self._leadership is not None:
            self._leadership.on_regained = coordinator.leads_again
        parts.telemetry.read_gauges_from(
            lambda: gauges_of(coordinator, self._executions, recovered.book, self.fleet, lambda: recovered.journal.backlog)
        )
        return coordinator

    @property
    def epoch(self) -> int:
        """Of this coordinator."""
        assert self._recovered is not None
        return self._recovered.journal.epoch

    def view(self, fault_of: FaultOf, inbox: Inbox) -> RunningCell:
        """What administrators may ask it."""
        assert self.coordinator is not None and self._recovered is not None
        return RunningCell(self._parts.clock, self._recovered.book, self.coordinator, self.fleet, fault_of, inbox)

    def carries(self, pool: str) -> bool:
        """Whether anything of a pool's is live, also what no gateway has told of so far."""
        return any(execution.pool == pool for execution in self._executions.live)

    def start(self, tasks: asyncio.TaskGroup) -> list[asyncio.Task[Any]]:
        """Run the coordinator, which ends with `close`, and its upkeep, which is to be cancelled."""
        assert self.coordinator is not None
        tasks.create_task(self.coordinator.run())
        stores, kept = self._parts.stores, self._parts.config.ledger.retention_days
        pruning = Pruning(stores.ledger, self._parts.clock, self.epoch, kept, self._parts.telemetry.rolled_up.inc)
        return [tasks.create_task(pruning.run())]

    async def finish(self) -> None:
        """Leave what runs to the coordinator that stands by, which gateways find; without one, drain."""
        if self._leadership is not None and await self._leadership.is_awaited():
            self._parts.announce(f"handing {self._executions.in_flight} request(s) over to the coordinator that stands by")
        else:
            await self.drain()

    async def drain(self) -> None:
        """Admit nothing more, and end what is admitted: within the grace by itself, then as `shutdown`."""
        assert self.coordinator is not None
        self._parts.announce(f"draining {self._executions.in_flight} request(s)")
        await self.coordinator.drain(self._parts.config.coordinator.drain_grace_ms)


def _terms_of(config: WeirConfig, directory: StateDirectory, entropy: Entropy) -> Terms:
    """What gateways are told. Raises InvalidRequest for bounds that contradict each other."""
    coordinator, link = config.coordinator, config.link
    if not 3 * link.heartbeat_ms < link.silence_ms <= link.lease_ms - 4 * link.heartbeat_ms:
        raise errors.InvalidRequest(
            "link.silence_ms must be above 3 times link.heartbeat_ms, and at least 4 times that below link.lease_ms.",
            members={"field": "link.silence_ms"},
        )
    return Terms(
        digest_key=directory.secret(BODY_DIGEST_SECRET, entropy),
        salt_key=directory.secret(CACHE_SALT_SECRET, entropy),
        step_tokens=coordinator.delivery_step_tokens,
        store_wait_ms=coordinator.store_wait_ms,
        heartbeat_ms=link.heartbeat_ms,
        silence_ms=link.silence_ms,
        lease_ms=link.lease_ms,
    )


def _adapting(config: WeirConfig) -> Adapting:
    """How replicas adapt."""
    return Adapting(
        back_off_ms=config.engine.restart_backoff_ms,
        least_percent=config.coordinator.concurrency_min_percent,
    )


def _log_state(replica: Replica, before: ReplicaState, why: str) -> None:
    if before is not ReplicaState.STARTING:  # a start is announced as such
        structlog.get_logger("weir.fleet").warning(
            "replica_state", replica=replica.name, before=before.value, now=replica.state.value, why=why
        )
