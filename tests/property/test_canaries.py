"""Evidence against a count by hand: in any order of events it is of what was admitted at the present step, and ended."""

from collections import defaultdict
from dataclasses import replace
from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.contract.stores import settle
from tests.unit.test_canaries import ALIAS, CANARY, REPLICA, STABLE, TRIED, Stand, snapshot_of

from weir.coordinator.execution import Execution, Placement
from weir.core.endings import FinishReason, ending
from weir.core.ledger.records import ReleaseRecord, Timing
from weir.core.registry.evidence import Arm, Outcome, Tally, outcome_of
from weir.core.registry.model import Alias, Canary

TENANTS = ("acme", "globex")
NAMES = ("assistant", "brief")
_REVISIONS = st.sampled_from([STABLE, TRIED, "sim@3", "elsewhere"])
_CANARIES = st.builds(
    replace,
    st.just(CANARY),
    rollout=st.sampled_from(["ro-1", "ro-2"]),
    step=st.integers(0, 2),
    revision=st.sampled_from([TRIED, "sim@3"]),
    weight=st.sampled_from([1, 50]),
)
_ALIASES = st.fixed_dictionaries(
    {(owner, name): st.none() | _CANARIES for owner in (None, TENANTS[0]) for name in NAMES},
)
"""By owner and name."""


class EvidenceMachine(RuleBasedStateMachine):
    """Configurations come into force while requests are admitted and end, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.stand = Stand()
        self.aliases: dict[tuple[str | None, str], Alias] = {}
        self.begun: dict[tuple[str | None, str], int] = {}  # of each alias with a canary, the number of its present step
        self.numbers = 0
        self.open: list[tuple[Execution, tuple[int, Arm] | None]] = []
        self.counted: defaultdict[tuple[int, Arm], list[Outcome]] = defaultdict(list)

    @rule(canaries=_ALIASES, owned=st.booleans())
    def publish(self, canaries: dict[tuple[str | None, str], Canary | None], owned: bool) -> None:
        """Another configuration. owned: a tenant has names of its own in it."""
        before, begun = self.aliases, self.begun
        self.aliases, self.begun = {}, {}
        for key, canary in canaries.items():
            owner, name = key
            if owner is not None and not owned:
                continue
            self.aliases[key] = replace(ALIAS, name=name, tenant=owner, canary=canary)
            known = before[key].canary if key in before else None
            if canary is None:
                continue
            if known is not None and (known.rollout, known.step) == (canary.rollout, canary.step):
                self.begun[key] = begun[key]
            else:
                self.numbers += 1
                self.begun[key] = self.numbers
        self.stand.canaries.publish(snapshot_of(*self.aliases.values()))

    @rule(tenant=st.sampled_from(TENANTS), name=st.sampled_from(NAMES), revision=_REVISIONS)
    def admit(self, tenant: str, name: str, revision: str) -> None:
        """A request, pinned to a revision by some configuration."""
        key = (tenant, name) if (tenant, name) in self.aliases else (None, name)
        alias, expected = self.aliases.get(key), None
        if alias is not None and alias.canary is not None:
            arms = {alias.revision: Arm.STABLE, alias.canary.revision: Arm.CANARY}
            expected = (self.begun[key], arms[revision]) if revision in arms else None
        self.open.append((self.stand.admit(revision, tenant=tenant, alias=name), expected))

    @rule(which=st.integers(0), reason=st.sampled_from(FinishReason), dispatched=st.booleans())
    def end(self, which: int, reason: FinishReason, dispatched: bool) -> None:
        """One of the open requests ends."""
        if not self.open:
            return
        execution, expected = self.open.pop(which % len(self.open))
        if dispatched:
            execution.placements.append(Placement(REPLICA, None, 1, 0))
            record: Any = msgspec.structs.replace(settle(9, execution.id), finish_reason=reason)
        else:
            record = ReleaseRecord(9, 0, execution.id, ending(reason).status, reason, (), Timing())
        execution.end_record = record
        self.stand.canaries.concluded(execution)
        self.stand.executions.end(execution)
        outcome = outcome_of(reason, was_dispatched=dispatched)
        if expected is not None and outcome is not Outcome.NOT_COUNTED:
            self.counted[expected].append(outcome)

    @invariant()
    def evidence_is_what_counts(self) -> None:
        """Each alias with a canary has the evidence of its present step, and no other has any."""
        steps = {(step.alias.tenant, step.alias.name): step for step in self.stand.canaries.steps}
        assert steps.keys() == self.begun.keys()
        for key, step in steps.items():
            assert step.canary == self.aliases[key].canary
            found = step.window.evidence()
            for arm, tally in ((Arm.STABLE, found.stable), (Arm.CANARY, found.canary)):
                known = self.counted[self.begun[key], arm]
                assert tally == Tally(len(known), known.count(Outcome.ERROR), known.count(Outcome.CANCELLED))

    @invariant()
    def what_is_live_is_counted(self) -> None:
        """Requests of a revision are those that have not ended."""
        for revision in (STABLE, TRIED):
            live = sum(execution.acquire.revision == revision for execution, _ in self.open)
            assert self.stand.canaries.running_on(revision) == live


TestEvidenceMachine = EvidenceMachine.TestCase
TestEvidenceMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
