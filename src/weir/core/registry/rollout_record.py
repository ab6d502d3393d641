"""A rollout as it is stored: what it moves from where to where, by which plan, and how far it is.

Its alias's canary and its pools follow from it, and change with it in one transaction (`control/rollout_commands.py`).
"""

from dataclasses import dataclass

from weir.core.registry.golden_set import Score
from weir.core.registry.rollout import OnCanary, Paused, RolloutState, is_terminal
from weir.core.registry.rollout_plan import RolloutPlan
from weir.units import Millis


@dataclass(frozen=True, slots=True)
class Rollout:
    """An alias's move to another revision. id: random, the key of its split. tenant: whose the alias is; None: shared.

    stable, canary: revision ids. score: of the canary's evaluation, once it passed. pools: those that it made for the canary;
    former_pools: those of the stable revision, which are retired once the canary is promoted.
    """

    id: str
    alias: str
    stable: str
    canary: str
    plan: RolloutPlan
    state: RolloutState
    proposed_by: str
    proposed_at_ms: Millis
    tenant: str | None = None
    score: Score | None = None
    pools: tuple[str, ...] = ()
    former_pools: tuple[str, ...] = ()

    @property
    def is_over(self) -> bool:
        """Whether nothing follows."""
        return is_terminal(self.state)

    @property
    def step(self) -> int | None:
        """The step that it is at, also while it is paused there; None before the first and after the last."""
        at = self.state.was if isinstance(self.state, Paused) else self.state
        return at.step if isinstance(at, OnCanary) else None
