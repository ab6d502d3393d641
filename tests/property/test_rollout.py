"""A rollout under any observations, people and restarts: what never happens, and what always can."""

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from weir.core.registry.comparison import compare
from weir.core.registry.evidence import Evidence, Pairs, Tally
from weir.core.registry.golden_set import Score
from weir.core.registry.rollout import (
    Finish,
    IllegalRolloutTransition,
    OnCanary,
    Pause,
    Paused,
    Promote,
    Promoting,
    Proposed,
    RaiseWeight,
    Resume,
    RollBack,
    RollbackReason,
    RolledBack,
    RollingBack,
    RolloutEvent,
    RolloutState,
    Route,
    Verified,
    advance,
    is_terminal,
    route_of,
    weight_of,
)
from weir.core.registry.rollout_decision import (
    Breach,
    Evaluated,
    Evaluation,
    Hold,
    NotEvaluated,
    NothingToEvaluate,
    Observation,
    decide,
)
from weir.core.registry.rollout_plan import RolloutPlan, Step

PLAN = RolloutPlan(
    steps=(Step(5, 10, 1_000), Step(50, 20, 2_000), Step(100, 20, 2_000)),
    ready_ms=5_000,
    evaluation_ms=5_000,
    lost_ms=3_000,
    warm_ms=2_000,
    back_ms=4_000,
)

hits = st.one_of(st.just(0), st.integers(0, 2), st.integers(0, 60))


@st.composite
def tallies(draw: st.DrawFn) -> Tally:
    """Mostly good, now and then broken."""
    good, errors, cancellations = draw(st.integers(0, 400)), draw(hits), draw(hits)
    return Tally(good + errors + cancellations, errors, cancellations)


@st.composite
def pairs(draw: st.DrawFn) -> Pairs:
    """Mostly alike, now and then worse."""
    alike, worse = draw(st.integers(0, 200)), draw(hits)
    return Pairs(alike + worse, worse)


evidences = st.builds(Evidence, tallies(), tallies(), pairs(), pairs(), pairs(), pairs())
evaluations: st.SearchStrategy[Evaluation | None] = st.one_of(
    st.none(),
    st.just(NothingToEvaluate()),
    st.builds(Evaluated, st.builds(Score, st.integers(7, 10), st.just(10)), st.none()),
    st.just(NotEvaluated("the replica was lost")),
)


class Rollouts(RuleBasedStateMachine):
    """One rollout at a time, and a new one after each end."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ms = 1_000
        self.state: RolloutState = Proposed(self.now_ms)

    def _apply(self, event: RolloutEvent) -> None:
        before = weight_of(PLAN, self.state)
        self.state = advance(self.state, event)
        if not isinstance(event, RaiseWeight | Promote):
            assert weight_of(PLAN, self.state) <= before

    @rule(passed_ms=st.sampled_from([0, 500, 1_000, 2_500, 6_000]))
    def time_passes(self, passed_ms: int) -> None:
        self.now_ms += passed_ms

    @rule(
        ready_replicas=st.integers(0, 2),
        carries_share=st.booleans(),
        evaluation=evaluations,
        evidence=st.none() | evidences,
        running=st.integers(0, 3),
        start_fault=st.sampled_from([None, "out of memory"]),
    )
    def an_analysis(
        self,
        ready_replicas: int,
        carries_share: bool,
        evaluation: Evaluation | None,
        evidence: Evidence | None,
        running: int,
        start_fault: str | None,
    ) -> None:
        seen = Observation(self.now_ms, ready_replicas, carries_share, evaluation, evidence, running, start_fault)
        self._analyse(seen)

    @rule(gap_ms=st.integers(0, 6_000), evidence=st.none() | evidences)
    def an_analysis_after_a_gap(self, gap_ms: int, evidence: Evidence | None) -> None:
        """Whoever looks began to just now: nothing that is missing is held against it yet."""
        since_ms = self.now_ms
        self.now_ms += gap_ms
        seen = Observation(self.now_ms, 0, evidence=evidence, seen_since_ms=since_ms, is_first_start=True)
        before, breached = self.state, self._is_breached(seen)
        self._analyse(seen)
        if gap_ms < PLAN.ready_ms and not breached and not isinstance(before, RollingBack):
            assert self.state == before

    @precondition(lambda self: not isinstance(self.state, RollingBack) and not is_terminal(self.state))
    @rule(doubts=st.integers(0, 9))
    def an_analysis_of_what_was_revoked(self, doubts: int) -> None:
        if doubts < 9:
            return
        decision = decide(PLAN, self.state, Observation(self.now_ms, 1, carries_share=True, serves=False))
        assert isinstance(decision.event, RollBack) and decision.event.reason is RollbackReason.REVOKED
        self._apply(decision.event)

    @rule(requests=st.integers(0, 40), passed_ms=st.sampled_from([0, 1_000, 2_000]))
    def an_analysis_of_a_healthy_canary(self, requests: int, passed_ms: int) -> None:
        self.now_ms += passed_ms
        healthy = Evidence(Tally(40), Tally(requests), Pairs(requests, requests // 3))
        self._analyse(Observation(self.now_ms, 1, carries_share=True, evaluation=NothingToEvaluate(), evidence=healthy))

    @rule(requests=st.integers(20, 40))
    def a_while_of_healthy_analyses(self, requests: int) -> None:
        for _ in range(3):
            self.an_analysis_of_a_healthy_canary(requests, 2_000)

    def _analyse(self, seen: Observation) -> None:
        state, decision = self.state, decide(PLAN, self.state, seen)
        if is_terminal(state):
            assert decision.event is None
            return
        breached = self._is_breached(seen)
        assert isinstance(decision.verdict, Breach) == breached
        if breached:
            assert isinstance(decision.event, RollBack)
        if isinstance(decision.event, RaiseWeight | Promote):
            self._check_gates(state, seen)
        if decision.event is None:
            assert isinstance(decision.verdict, Hold) and decision.verdict.waits
        else:
            self._apply(decision.event)

    def _is_breached(self, seen: Observation) -> bool:
        at = self.state.was if isinstance(self.state, Paused) else self.state
        if not isinstance(at, OnCanary) or seen.evidence is None:
            return False
        return any(comparison.is_breach for comparison in compare(PLAN, at.step, seen.evidence, at.baseline))

    @staticmethod
    def _check_gates(state: RolloutState, seen: Observation) -> None:
        assert seen.carries_share and seen.ready_replicas
        assert isinstance(state, Verified | OnCanary) and state.lost_since_ms is None
        if isinstance(state, OnCanary):
            step = PLAN.steps[state.step]
            assert seen.evidence is not None and seen.evidence.canary.requests >= step.samples_min
            assert seen.now_ms - state.since_ms >= step.time_min_ms

    @precondition(lambda self: isinstance(self.state, Proposed | Verified | OnCanary))
    @rule()
    def somebody_pauses_it(self) -> None:
        before = route_of(self.state), weight_of(PLAN, self.state)
        self._apply(Pause(self.now_ms))
        assert (route_of(self.state), weight_of(PLAN, self.state)) == before

    @precondition(lambda self: isinstance(self.state, Paused))
    @rule()
    def somebody_resumes_it(self) -> None:
        before = route_of(self.state), weight_of(PLAN, self.state)
        self._apply(Resume(self.now_ms))
        assert (route_of(self.state), weight_of(PLAN, self.state)) == before

    @precondition(lambda self: is_terminal(self.state))
    @rule()
    def another_is_proposed(self) -> None:
        for event in (Pause(self.now_ms), Resume(self.now_ms), RollBack(self.now_ms, RollbackReason.REVOKED, "")):
            try:
                advance(self.state, event)
            except IllegalRolloutTransition:
                continue
            raise AssertionError("something followed a terminal state")
        self.state = Proposed(self.now_ms)

    @precondition(lambda self: isinstance(self.state, Verified | OnCanary | Promoting | Paused))
    @rule(doubts=st.integers(0, 3))
    def somebody_may_roll_it_back(self, doubts: int) -> None:
        if doubts < 3:
            return
        self._apply(RollBack(self.now_ms, RollbackReason.OPERATOR, "asked"))
        assert route_of(self.state) is Route.OLD

    @invariant()
    def a_restart_changes_nothing(self) -> None:
        self.state = msgspec.json.decode(msgspec.json.encode(self.state), type=RolloutState)

    @invariant()
    def the_way_back_is_open(self) -> None:
        """From every state that is not over, at once for whoever asks next, and to its end within its bound."""
        if is_terminal(self.state):
            return
        back = self.state
        if not isinstance(back, RollingBack):
            back = advance(back, RollBack(self.now_ms, RollbackReason.OPERATOR, "asked"))
        assert weight_of(PLAN, back) == 0
        assert isinstance(back, RollingBack)
        late = Observation(back.since_ms + PLAN.back_ms, 0, running=3)
        event = decide(PLAN, back, late).event
        assert isinstance(event, Finish) and isinstance(advance(back, event), RolledBack)


TestRollouts = Rollouts.TestCase
TestRollouts.settings = settings(max_examples=100, stateful_step_count=40)
