"""The running cell as administrators and scrapes see it: read only, from the coordinator's own figures."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from weir.control.cell_view import Explanations, GatheredEvidence, PoolReport, ReplicaReport
from weir.coordinator.canaries import CanaryStep
from weir.coordinator.coordinator import Coordinator
from weir.coordinator.execution_table import ExecutionTable
from weir.coordinator.fleet import Fleet, PoolView
from weir.core.ledger.book import Book
from weir.core.registry.evidence import Arm, Outcome
from weir.core.routing.replica import Replica, ReplicaState
from weir.gateway.inbox import Inbox
from weir.messages import GenerationRecord
from weir.ports import Clock
from weir.telemetry import GaugeReading, snapshot_gauges
from weir.units import Moment

FaultOf: TypeAlias = Callable[[str], str | None]


class RunningCell:
    """Implements control's CellView beside the coordinator. fault_of: why a pool's replicas are not ready, where that is known.

    inbox: a session for look-ups.
    """

    def __init__(
        self, clock: Clock, book: Book, coordinator: Coordinator, fleet: Fleet, fault_of: FaultOf, inbox: Inbox
    ) -> None:
        self._clock = clock
        self._book = book
        self._coordinator = coordinator
        self._fleet = fleet
        self._fault_of = fault_of
        self._inbox = inbox

    async def accounts(self, tenant: str) -> Sequence[Mapping[str, Any]]:
        """One row per scope and limit in force."""
        return self._book.accounts_of(tenant, Moment(self._clock.monotonic_ns(), self._clock.wall_ms()))

    async def open_holds(self, tenant: str) -> int:
        """Number of the tenant's holds that have not ended."""
        return self._book.open_holds_of(tenant)

    async def generation(self, tenant: str, request_id: str) -> GenerationRecord | None:
        """The latest execution of a request id."""
        return (await self._inbox.lookup(tenant, request_id)).record

    async def explanations(self, request_id: str, tenant: str | None = None) -> Explanations:
        """What the coordinator remembers of a request id."""
        timelines = self._coordinator.timelines
        return Explanations(timelines.of(request_id, tenant), len(timelines), timelines.since_ms)

    async def evidence(self, rollout: str, revision: str) -> GatheredEvidence:
        """What is known of a rollout's canary."""
        canaries = self._coordinator.canaries
        running, step = canaries.running_on(revision), canaries.step_of(rollout)
        return GatheredEvidence(running, step.canary.step, step.window.evidence()) if step else GatheredEvidence(running)

    async def replicas(self) -> Sequence[ReplicaReport]:
        """Every replica that is known."""
        reports = []
        for pool in self._fleet.pools:
            for replica in pool.replicas.values():
                address = self._fleet.known_address(replica.name)
                reports.append(
                    ReplicaReport(
                        name=replica.name,
                        pool=pool.name,
                        revision=pool.revision,
                        engine=self._coordinator.snapshot.revisions[pool.revision].engine,
                        state=replica.state,
                        url=address.url if address else "",
                        model=address.model if address else "",
                        context_tokens=address.context_tokens if address else 0,
                        concurrency=replica.limits.concurrency,
                        allowed=replica.allowed,
                        running=replica.running,
                        capabilities={
                            "counts_tokens": address is not None and address.counts_tokens,
                            "continuous_usage": address is not None and address.continuous_usage,
                            "cache_salt": address is not None and address.cache_salt,
                            "takes_tools": address is not None and address.takes_tools,
                        },
                        kv_tokens=address.kv_tokens if address else None,
                        kv_tokens_reserved=replica.room.kv_tokens,
                        prefill_tokens=replica.room.prefill_tokens,
                        pace=msgspec.structs.asdict(address.pace) if address and address.pace else None,
                        detail=None if replica.state is ReplicaState.READY else self._fault_of(pool.name),
                    )
                )
        return sorted(reports, key=lambda report: report.name)

    async def pools(self) -> Sequence[PoolReport]:
        """Every pool."""
        shown = (view for view in self._fleet.pools if _is_there(view, self._coordinator))
        return sorted(map(self._pool, shown), key=lambda report: report.name)

    def _pool(self, view: PoolView) -> PoolReport:
        pool = view.pool
        replicas, ready = pool.replicas_wanted, sum(each.state is ReplicaState.READY for each in view.replicas.values())
        return PoolReport(
            name=pool.name,
            revision=pool.revision,
            replicas=replicas,
            ready=ready,
            concurrency=pool.concurrency,
            queued=self._coordinator.queued_in(pool.name),
            running=view.running,
            on_demand=pool.on_demand,
            tenant=pool.tenant,
            service_classes=pool.service_classes,
            input_tokens_max=pool.input_tokens_max,
            detail=None if ready >= replicas else self._fault_of(pool.name),
        )


def _is_there(view: PoolView, coordinator: Coordinator) -> bool:
    """Whether anybody keeps a pool, or something of it is left."""
    return view.is_kept or bool(view.replicas) or coordinator.queued_in(view.name) > 0


def gauges_of(
    coordinator: Coordinator, executions: ExecutionTable, book: Book, fleet: Fleet, backlog: Callable[[], int]
) -> Iterable[GaugeReading]:
    """What metrics show of the present; safe from another thread: whole numbers and copies of dictionaries."""
    yield from snapshot_gauges(coordinator.snapshot.version, coordinator.fresh_ms)
    yield "weir_requests_in_flight", "Admitted requests that have not ended.", {}, executions.in_flight
    yield "weir_open_holds", "Holds that have not ended.", {}, book.open_holds
    yield "weir_live_executions", "Executions that are not quiet yet.", {}, executions.live_count
    yield "weir_journal_backlog", "Ledger records that are not durable yet.", {}, backlog()
    for pool in [view for view in list(fleet.pools) if _is_there(view, coordinator)]:
        labels = {"revision": pool.revision, "pool": pool.name}
        yield "weir_queue_entries", "Admitted requests that wait.", labels, coordinator.queued_in(pool.name)
        replicas = list(pool.replicas.values())
        taken = sum(replica.running for replica in replicas)
        free = sum(replica.free for replica in replicas)
        withheld = sum(_withheld(replica) for replica in replicas)
        for state in ReplicaState:
            number = sum(replica.state is state for replica in replicas)
            yield "weir_replicas", "Replicas by state.", {**labels, "state": state.value}, number
        yield "weir_lanes", "Lanes of replicas.", {**labels, "state": "taken"}, taken
        yield "weir_lanes", "Lanes of replicas.", {**labels, "state": "free"}, free
        yield "weir_lanes", "Lanes of replicas.", {**labels, "state": "withheld"}, withheld
    for step in coordinator.canaries.steps:
        yield from _canary_gauges(step)


def _canary_gauges(step: CanaryStep) -> Iterable[GaugeReading]:
    """Of one alias. The rollout tells aliases of the same name apart, which may be of several tenants."""
    labels = {"alias": step.alias.name, "rollout": step.canary.rollout}
    yield "weir_canary_weight", "Percent of an alias's requests for its canary.", labels, step.canary.weight
    evidence = step.window.evidence()
    for arm, tally in ((Arm.STABLE, evidence.stable), (Arm.CANARY, evidence.canary)):
        good = tally.requests - tally.errors - tally.cancellations
        counts = {Outcome.GOOD: good, Outcome.ERROR: tally.errors, Outcome.CANCELLED: tally.cancellations}
        for outcome, number in counts.items():
            text = "Ended requests that count, since the rollout's step began."
            yield "weir_canary_requests", text, {**labels, "arm": arm.value, "outcome": outcome.value}, number


def _withheld(replica: Replica) -> int:
    """Lanes of a ready replica that are not taken, and that its adaptation keeps from new work."""
    if replica.state is not ReplicaState.READY:
        return 0
    return replica.limits.concurrency - max(replica.allowed, replica.running)
