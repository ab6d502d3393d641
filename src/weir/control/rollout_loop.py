"""Looks at every rollout that is not over, once per interval of its plan, and applies what follows.

What is seen is the coordinator's: what is ready there is what gets requests. What follows is `rollout_decision.py`'s, and is
decided again on the rollout as it is stored, within the commit: an administrator may have moved it meanwhile. Where the store
or the coordinator is away it holds; nothing is ever rolled back for that. It keeps nothing that a restart would miss.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

from weir import errors
from weir.control.catalog_lookup import require_revision
from weir.control.cell_view import GatheredEvidence, PoolReport
from weir.control.evaluation import Approved, leads_to
from weir.control.rollout_commands import ACTOR, EVENT_NAMES, RolloutCommands
from weir.core.registry.comparison import Comparison, compare
from weir.core.registry.evidence import Evidence
from weir.core.registry.rollout import (
    OnCanary,
    Paused,
    Proposed,
    RollBack,
    RollingBack,
    RolloutEvent,
    name_of,
    next_weight,
    weight_of,
)
from weir.core.registry.rollout_decision import Decision, Evaluation, Observation, Verdict, can_carry, decide
from weir.core.registry.rollout_record import Rollout
from weir.ports import Catalog, Clock
from weir.units import NANOS_PER_SECOND, Millis, Nanos, ns_from_ms

TICK_S = 0.5
"""How long a rollout that was just proposed is not noticed, at most."""
ENDED_MAX = 16
"""Rollouts that are over whose last look is kept: who watched one sees how it ended."""
_REST_MIN_S = 0.02

_log = structlog.get_logger("weir.control")


class CanaryView(Protocol):
    """What is asked of the running cell. Each may raise LedgerUnavailable or CoordinatorLost."""

    async def pools(self) -> Sequence[PoolReport]:
        """Every pool."""
        ...

    async def evidence(self, rollout: str, revision: str) -> GatheredEvidence:
        """What is known of a rollout's canary, whose revision this is."""
        ...


class Starts(Protocol):
    """Who starts replicas."""

    def fault_of(self, pool: str) -> str | None:
        """Why the pool's last start or replica failed, if it did."""
        ...


class Evaluates(Protocol):
    """Who runs evaluation sets."""

    async def evaluate(self, rollout: Rollout) -> Evaluation:
        """How the rollout's canary does on its set."""
        ...


@dataclass(frozen=True, slots=True)
class Look:
    """A rollout as it was seen at one time, and what followed from that. at_ms: wall clock.

    evidence, comparisons: of the step that it was at; None and none where it had none, or it is not known.
    """

    at_ms: Millis
    verdict: Verdict
    evidence: Evidence | None
    ready_replicas: int
    running: int
    comparisons: tuple[Comparison, ...]


@dataclass(frozen=True, slots=True)
class _Sight:
    """What was seen at once of one rollout's revisions. serving: those of the two that may.

    evaluated: the state that `evaluation` belongs to.
    """

    now_ms: Millis
    ready_replicas: int
    canary_lanes: int
    stable_lanes: int
    gathered: GatheredEvidence
    serving: frozenset[str]
    start_fault: str | None
    seen_since_ms: Millis
    is_first_start: bool
    evaluated: Proposed | None
    evaluation: Evaluation | None

    def of(self, rollout: Rollout) -> Observation:
        """What of it concerns the rollout as it is now: the evidence of another step does not, nor a former evaluation."""
        weight = next_weight(rollout.plan, rollout.state)
        return Observation(
            self.now_ms,
            self.ready_replicas,
            carries_share=can_carry(self.canary_lanes, self.stable_lanes, weight),
            evaluation=self.evaluation if rollout.state == self.evaluated else None,
            evidence=self.gathered.evidence if self.gathered.step == rollout.step else None,
            running=self.gathered.running,
            start_fault=self.start_fault,
            serves=rollout.canary in self.serving,
            stable_serves=rollout.stable in self.serving,
            seen_since_ms=self.seen_since_ms,
            is_first_start=self.is_first_start,
        )


@dataclass(slots=True, eq=False)
class _Watch:
    """What is remembered of one rollout between looks. seen_since_ms: None while the cell cannot be seen.

    was_ready: a replica of its canary was, since then. evaluated: the state that `evaluation` belongs to.
    """

    due_ns: Nanos
    looking: asyncio.Task[None] | None = None
    latest: Look | None = None
    seen_since_ms: Millis | None = None
    was_ready: bool = False
    evaluated: Proposed | None = None
    evaluation: asyncio.Task[Evaluation] | None = None
    is_postponed: bool = False

    def lose_sight(self) -> None:
        """What happens in the cell is not known."""
        self.seen_since_ms, self.was_ready = None, False


class RolloutLoop:
    """The rollouts of a cell. Only the control that leads may run it."""

    def __init__(
        self,
        approved: Approved,
        rollouts: RolloutCommands,
        view: CanaryView,
        starts: Starts,
        evaluator: Evaluates,
        clock: Clock,
    ) -> None:
        self._approved = approved
        self._rollouts = rollouts
        self._view = view
        self._starts = starts
        self._evaluator = evaluator
        self._clock = clock
        self._watches: dict[str, _Watch] = {}
        self._ended: dict[str, Look] = {}
        self._stopping: set[asyncio.Task[Evaluation]] = set()
        self._version = -1  # of the catalog that was read last
        self._is_store_away = False
        self.on_decided: Callable[[str, str], None] = lambda decision, reason: None
        """Told of each event that it applied, by name, and why where that is a rollback, else `none`."""

    def latest(self, rollout_id: str) -> Look | None:
        """The last look at a rollout that runs, or was among the last to end; None if there is none."""
        watch = self._watches.get(rollout_id)
        return self._ended.get(rollout_id) if watch is None else watch.latest

    async def run(self) -> None:
        """Look until cancelled."""
        try:
            while True:
                await self.tick()
                await asyncio.sleep(self._rest_s())
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """End every look and every evaluation that is under way."""
        tasks: list[asyncio.Task[None] | asyncio.Task[Evaluation]] = [*self._stopping]
        for watch in self._watches.values():
            tasks += [task for task in (watch.looking, watch.evaluation) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def tick(self) -> list[asyncio.Task[None]]:
        """Begin a look at each rollout whose time has come; the looks that were begun. Raises what an earlier one failed with.

        One that takes long, because a gateway is slow to confirm, keeps no other waiting.
        """
        for watch in self._watches.values():
            if watch.looking is not None and watch.looking.done():
                watch.looking.result()
                watch.looking = None
        now_ns = self._clock.monotonic_ns()
        if self._version >= self._approved.published.version and not self._due(now_ns):
            return []
        try:
            catalog = await self._approved.catalog()
        except errors.LedgerUnavailable as away:
            self._lose_store(away)
            return []
        self._is_store_away = False
        self._version = catalog.version
        running = {rollout.id: rollout for rollout in catalog.rollouts if not rollout.is_over}
        self._follow(running, now_ns)
        self._hasten_what_is_over(running, catalog, now_ns)
        due = [name for name in self._due(now_ns) if name in running]
        return [self._begin(self._watches[name], running[name], catalog, now_ns) for name in due]

    # ── which rollouts, and when ─────────────────────────────────────────────────────────────────────────────────────

    def _due(self, now_ns: Nanos) -> list[str]:
        return [name for name, watch in self._watches.items() if watch.looking is None and watch.due_ns <= now_ns]

    def _rest_s(self) -> float:
        """Until the next look is due; a store that is away is not asked all the time."""
        if self._is_store_away:
            return TICK_S
        now_ns = self._clock.monotonic_ns()
        waiting = [(watch.due_ns - now_ns) / NANOS_PER_SECOND for watch in self._watches.values() if watch.looking is None]
        return max(_REST_MIN_S, min([TICK_S, *waiting]))

    def _follow(self, running: dict[str, Rollout], now_ns: Nanos) -> None:
        """Watch these and no others."""
        over = [name for name, watch in self._watches.items() if name not in running and watch.looking is None]
        for name in over:
            watch = self._watches.pop(name)
            self._stop_evaluation(watch)
            if watch.latest is not None:
                self._ended[name] = watch.latest
        for name in list(self._ended)[:-ENDED_MAX]:
            del self._ended[name]
        for name in running.keys() - self._watches.keys():
            self._watches[name] = _Watch(now_ns)

    def _hasten_what_is_over(self, running: dict[str, Rollout], catalog: Catalog, now_ns: Nanos) -> None:
        """An alias may mean a revision that serves nobody any more: its rollout is looked at now, or once more after that."""
        for name, rollout in running.items():
            if not isinstance(rollout.state, RollingBack) and not require_revision(catalog, rollout.canary).serves:
                self._watches[name].due_ns = now_ns

    def _lose_store(self, away: errors.LedgerUnavailable) -> None:
        if not self._is_store_away:
            _log.warning("rollouts_postponed", reason=away.code)
        self._is_store_away = True
        for watch in self._watches.values():
            watch.lose_sight()

    # ── one look ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _begin(self, watch: _Watch, rollout: Rollout, catalog: Catalog, now_ns: Nanos) -> asyncio.Task[None]:
        watch.due_ns = now_ns + ns_from_ms(rollout.plan.interval_ms)
        both = (require_revision(catalog, name) for name in (rollout.stable, rollout.canary))
        serving = frozenset(revision.id for revision in both if revision.serves)
        watch.looking = asyncio.get_running_loop().create_task(self._look(watch, rollout, serving))
        return watch.looking

    async def _look(self, watch: _Watch, rollout: Rollout, serving: frozenset[str]) -> None:
        """See, decide, and act on it; what cannot be done now is done by a later look."""
        try:
            sight = await self._see(watch, rollout, serving)
        except (errors.LedgerUnavailable, errors.CoordinatorLost) as away:
            watch.lose_sight()
            self._postpone(watch, rollout, away)
            return
        decision = decide(rollout.plan, rollout.state, sight.of(rollout))
        watch.latest = _look_at(rollout, sight, decision)
        try:
            if decision.event is not None:
                await self._act(watch, rollout, sight)
        except (errors.LedgerUnavailable, errors.AlreadyExists, errors.NotAllowedNow) as away:
            self._postpone(watch, rollout, away)
        else:
            watch.is_postponed = False

    def _postpone(self, watch: _Watch, rollout: Rollout, why: errors.WeirError) -> None:
        if not watch.is_postponed:
            _log.warning("rollout_postponed", rollout=rollout.id, reason=why.code)
        watch.is_postponed = True

    async def _see(self, watch: _Watch, rollout: Rollout, serving: frozenset[str]) -> _Sight:
        """Raises LedgerUnavailable, CoordinatorLost."""
        reports = await self._view.pools()
        gathered = await self._view.evidence(rollout.id, rollout.canary)
        now_ms = self._clock.wall_ms()
        own = [report for report in reports if report.revision == rollout.canary]
        ready = sum(report.ready for report in own)
        if watch.seen_since_ms is None:
            watch.seen_since_ms = now_ms
        watch.was_ready = watch.was_ready or ready > 0
        return _Sight(
            now_ms=now_ms,
            ready_replicas=ready,
            canary_lanes=_lanes(own),
            stable_lanes=_lanes(report for report in reports if report.revision == rollout.stable),
            gathered=gathered,
            serving=serving,
            start_fault=self._fault_of(own),
            seen_since_ms=watch.seen_since_ms,
            is_first_start=not watch.was_ready,
            evaluation=self._evaluation_of(watch, rollout, gathered.running),
            evaluated=watch.evaluated,
        )

    def _fault_of(self, own: Sequence[PoolReport]) -> str | None:
        """Why a replica that is missing is missing."""
        missing = (report.name for report in own if report.ready < report.replicas)
        return next((fault for name in missing if (fault := self._starts.fault_of(name)) is not None), None)

    async def _act(self, watch: _Watch, rollout: Rollout, sight: _Sight) -> None:
        """Raises LedgerUnavailable, AlreadyExists, NotAllowedNow."""
        events: list[RolloutEvent | None] = []

        def choose(stored: Rollout) -> RolloutEvent | None:
            decision = decide(stored.plan, stored.state, sight.of(stored))
            watch.latest = _look_at(stored, sight, decision)
            events.append(decision.event)
            return decision.event

        moved, _ = await self._rollouts.act(ACTOR, rollout.id, choose)
        if (event := events[-1]) is not None:
            self._tell(moved, event)

    def _tell(self, moved: Rollout, event: RolloutEvent) -> None:
        decision = EVENT_NAMES[type(event)]
        reason = event.reason.value if isinstance(event, RollBack) else "none"
        state, weight = name_of(moved.state), weight_of(moved.plan, moved.state)
        _log.info(
            "rollout_moved", rollout=moved.id, decision=decision, reason=reason, state=state, step=moved.step, weight=weight
        )
        self.on_decided(decision, reason)

    # ── its evaluation ───────────────────────────────────────────────────────────────────────────────────────────────

    def _evaluation_of(self, watch: _Watch, rollout: Rollout, running: int) -> Evaluation | None:
        """What the evaluation found, once it is over; begun as soon as nobody's request is on the canary.

        One for another state is stopped: who pauses a rollout before its first step begins anew.
        """
        if rollout.state != watch.evaluated:
            self._stop_evaluation(watch)
        if not isinstance(rollout.state, Proposed):
            return None
        is_free = not running or leads_to(self._approved.published, rollout.canary)  # in the end no replica is asked
        if watch.evaluation is None and is_free:
            watch.evaluated = rollout.state
            watch.evaluation = asyncio.get_running_loop().create_task(self._evaluator.evaluate(rollout))
            watch.evaluation.add_done_callback(lambda task: self._hasten(watch))
        return watch.evaluation.result() if watch.evaluation is not None and watch.evaluation.done() else None

    def _hasten(self, watch: _Watch) -> None:
        """What it found is worth a look now."""
        watch.due_ns = self._clock.monotonic_ns()

    def _stop_evaluation(self, watch: _Watch) -> None:
        task, watch.evaluation, watch.evaluated = watch.evaluation, None, None
        if task is not None and not task.done():
            task.cancel()
            self._stopping.add(task)
            task.add_done_callback(self._stopping.discard)


def _lanes(reports: Iterable[PoolReport]) -> int:
    return sum(report.ready * report.concurrency for report in reports)


def _look_at(rollout: Rollout, sight: _Sight, decision: Decision) -> Look:
    seen = sight.of(rollout)
    at = rollout.state.was if isinstance(rollout.state, Paused) else rollout.state
    comparisons: tuple[Comparison, ...] = ()
    if isinstance(at, OnCanary) and seen.evidence is not None:
        comparisons = compare(rollout.plan, at.step, seen.evidence, at.baseline)
    return Look(seen.now_ms, decision.verdict, seen.evidence, seen.ready_replicas, seen.running, comparisons)
