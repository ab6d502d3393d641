"""The rollout loop over a memory catalog, a cell that is made up and a clock that is moved by hand."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from tests.unit.registry_desk import RegistryDesk, registered

from weir import errors
from weir.control.cell_view import GatheredEvidence, PoolReport
from weir.control.rollout_loop import RolloutLoop
from weir.core.registry.evidence import Evidence, Pairs, Tally
from weir.core.registry.model import Alias, Pool, RevisionState
from weir.core.registry.rollout import name_of
from weir.core.registry.rollout_decision import (
    Evaluation,
    NothingToEvaluate,
)
from weir.core.registry.rollout_plan import RolloutPlan, Step
from weir.core.registry.rollout_record import Rollout

NEXT = registered("small@2", state=RevisionState.APPROVED)
THIRD = registered("small@3", state=RevisionState.APPROVED)
INTERVAL_MS = 1_000
PLAN = RolloutPlan(
    steps=(Step(10, 20, 2_000), Step(50, 20, 2_000), Step(100, 20, 2_000)),
    interval_ms=INTERVAL_MS,
    ready_ms=20_000,
    evaluation_ms=20_000,
    lost_ms=3_000,
    warm_ms=2_000,
    back_ms=5_000,
)
HEALTHY = Evidence(Tally(180, 1, 5), Tally(20, 0, 1), Pairs(20, 8), Pairs(20, 10), Pairs(18, 3), Pairs(18, 5))
FAILING = Evidence(Tally(2_000, 8, 60), Tally(20, 14, 0))
NOTHING = NothingToEvaluate()
TO_LIVE = ["verify", "raise_weight", "raise_weight", "raise_weight", "promote", "finish"]


@dataclass
class Cell:
    """A running cell as it is seen. missing: replicas that are not ready, by revision. away: nobody answers.

    by_step: the evidence of a revision's step; HEALTHY for others. meanwhile: happens as evidence is asked for, once.
    """

    desk: RegistryDesk
    missing: dict[str, int] = field(default_factory=dict)
    by_step: dict[tuple[str, int], Evidence] = field(default_factory=dict)
    running: int = 0
    away: bool = False
    faults: dict[str, str] = field(default_factory=dict)
    meanwhile: Callable[[], Awaitable[Any]] | None = None

    async def pools(self) -> list[PoolReport]:
        if self.away:
            raise errors.CoordinatorLost()
        left = dict(self.missing)
        return [self._report(pool, left) for pool in self.desk.snapshot.pools.values()]

    def _report(self, pool: Pool, left: dict[str, int]) -> PoolReport:
        missing = min(left.get(pool.revision, 0), pool.replicas)
        left[pool.revision] = left.get(pool.revision, 0) - missing
        ready = pool.replicas - missing
        return PoolReport(pool.name, pool.revision, pool.replicas, ready, pool.concurrency, 0, 0, pool.on_demand)

    async def evidence(self, rollout: str, revision: str) -> GatheredEvidence:
        aliases = [*self.desk.snapshot.aliases.values(), *self.desk.snapshot.tenant_aliases.values()]
        steps = [alias.canary.step for alias in aliases if alias.canary is not None and alias.canary.rollout == rollout]
        gathered = GatheredEvidence(self.running)
        if steps:
            gathered = GatheredEvidence(self.running, steps[0], self.by_step.get((revision, steps[0]), HEALTHY))
        if (meanwhile := self.meanwhile) is not None:
            self.meanwhile = None
            await meanwhile()
        return gathered

    def fault_of(self, pool: str) -> str | None:
        return self.faults.get(pool)


class Evaluations:
    """Answers at once, or only once it is let. asked: rollouts, by id; stopped: how many were cancelled."""

    def __init__(self, found: Evaluation = NOTHING) -> None:
        self.found = found
        self.asked: list[str] = []
        self.stopped = 0
        self.let = asyncio.Event()
        self.let.set()

    async def evaluate(self, rollout: Rollout) -> Evaluation:
        self.asked.append(rollout.id)
        try:
            await self.let.wait()
        except asyncio.CancelledError:
            self.stopped += 1
            raise
        return self.found


class Stand:
    """A loop over a memory catalog, a cell and a clock that is moved by hand."""

    def __init__(self, found: Evaluation = NOTHING) -> None:
        self.desk = RegistryDesk()
        self.cell = Cell(self.desk)
        self.evaluations = Evaluations(found)
        self.decided: list[tuple[str, str]] = []
        self.restart()

    def restart(self) -> None:
        """Another control begins with what is stored."""
        self.loop = RolloutLoop(self.desk.commands, self.desk.rollouts, self.cell, self.cell, self.evaluations, self.desk.clock)
        self.loop.on_decided = lambda decision, reason: self.decided.append((decision, reason))

    async def open(self) -> "Stand":
        await self.desk.open()
        await self.desk.put(NEXT, THIRD)
        return self

    async def propose(self, revision: str = NEXT.id, alias: str = "assistant", **changes: Any) -> str:
        rollout, _ = await self.desk.rollouts.propose("ada", alias, revision, replace(PLAN, **changes))
        return rollout.id

    async def tick(self, passed_ms: int = INTERVAL_MS) -> int:
        """Let time pass, and everything happen that is due; how many looks there were."""
        self.desk.clock.now_ms += passed_ms
        looks = await self.loop.tick()
        await asyncio.gather(*looks)
        await asyncio.sleep(0)  # an evaluation that needs nothing is over
        return len(looks)

    async def ticks(self, count: int) -> None:
        for _ in range(count):
            await self.tick()

    async def until(self, rollout_id: str, state: str, step: int | None = None) -> Rollout:
        """Tick until it is there, for a minute at most."""
        for _ in range(60):
            rollout = await self.stored(rollout_id)
            if name_of(rollout.state) == state and (step is None or rollout.step == step):
                return rollout
            await self.tick()
        raise AssertionError(f"it is {rollout.state}")

    async def stored(self, rollout_id: str) -> Rollout:
        catalog = await self.desk.commands.catalog()
        [rollout] = [each for each in catalog.rollouts if each.id == rollout_id]
        return rollout

    def alias(self, name: str = "assistant") -> Alias:
        return self.desk.snapshot.aliases[name]

    async def course(self, rollout_id: str) -> list[str]:
        """What the loop did with it, in order."""
        acts = [(actor, action) for actor, action, subject in await self.desk.audited() if subject == rollout_id]
        return [action.removeprefix("rollout.") for actor, action in acts if actor == "rollout"]
