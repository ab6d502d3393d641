"""The one retry: which failures allow it, and a budget that no window overspends."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.core.endings import FinishReason
from weir.core.routing.retry import RetryBudget, is_retryable

SECOND_NS = 1_000_000_000
WINDOW_NS = 10 * SECOND_NS


def test_only_a_first_attempt_that_failed_on_our_side_undelivered_is_retried() -> None:
    """Protects clients from output twice, engines from a third run, and callers' faults from being repeated."""
    allowed = {
        (reason, attempt, delivered)
        for reason, attempt, delivered in product(FinishReason, (0, 1, 2), (False, True))
        if is_retryable(reason, attempt, delivered=delivered)
    }
    failures = (FinishReason.ENGINE_ERROR, FinishReason.REPLICA_LOST, FinishReason.STALLED)
    assert allowed == {(reason, 1, False) for reason in failures}


@given(
    least=st.integers(0, 5),
    percent=st.integers(0, 100),
    events=st.lists(st.tuples(st.integers(0, 3 * SECOND_NS), st.booleans()), max_size=120),
)
def test_no_window_overspends_the_budget(least: int, percent: int, events: list[tuple[int, bool]]) -> None:
    """Protects a failing pool from its own retries: in any window at most max(least, percent of what was admitted in it)."""
    budget, now_ns = RetryBudget(least, percent, WINDOW_NS), 0
    admitted: list[int] = []
    retried: list[int] = []
    for gap_ns, wants_retry in events:
        now_ns += gap_ns
        if not wants_retry:
            budget.admitted(now_ns)
            admitted.append(now_ns)
            continue
        within = [at for at in retried if at > now_ns - WINDOW_NS]
        if budget.take(now_ns):
            retried.append(now_ns)
            most = max(least, percent * sum(at > now_ns - WINDOW_NS for at in admitted) // 100)
            assert len(within) + 1 <= most
        else:
            assert len(within) >= least  # a quiet pool may always retry its least


@pytest.mark.parametrize(("admitted", "most"), [(0, 3), (30, 3), (59, 5), (500, 50)])
def test_the_budget_of_the_defaults(admitted: int, most: int) -> None:
    """Protects the stated figures: three in ten seconds, or a tenth of what was admitted; all of it again a window later."""
    budget = RetryBudget(3, 10, WINDOW_NS)
    for _ in range(admitted):
        budget.admitted(SECOND_NS)
    assert [budget.take(2 * SECOND_NS) for _ in range(most + 1)] == [True] * most + [False]
    assert [budget.take(2 * SECOND_NS + WINDOW_NS) for _ in range(4)] == [True] * 3 + [False]
    budget.admitted(3 * WINDOW_NS)
    assert [budget.take(3 * WINDOW_NS) for _ in range(4)] == [True] * 3 + [False]
