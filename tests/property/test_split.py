"""The split of an alias between two revisions: exact in its weights, sticky, and one way as they rise."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.core.registry.split import BUCKETS, bucket_of, takes_canary

CALLERS = 10_000
_STANDARD_ERRORS = 4.5
_IDS = st.text(min_size=1, max_size=16)


@pytest.mark.parametrize("weight", [0, 1, 10, 50, 99, 100])
def test_each_weight_is_met_exactly(weight: int) -> None:
    """Protects the weights: of 10,000 distinct callers each gets its share, within what chance allows; none and all exactly."""
    for rollout in ("ro-1", "ro-2", "ro-3"):
        taken = sum(takes_canary(rollout, weight, "acme", f"caller-{n}") for n in range(CALLERS))
        share = weight / 100
        assert abs(taken - CALLERS * share) <= _STANDARD_ERRORS * math.sqrt(CALLERS * share * (1 - share))


def test_the_buckets_are_even() -> None:
    """Protects every weight between: a hundred callers in each hundredth, within what chance allows."""
    counts = [0] * 100
    for n in range(CALLERS):
        counts[bucket_of("ro-1", "acme", f"caller-{n}") * 100 // BUCKETS] += 1
    statistic = sum((count - CALLERS / 100) ** 2 / (CALLERS / 100) for count in counts)
    assert statistic < 99 + _STANDARD_ERRORS * math.sqrt(2 * 99)


@given(_IDS, _IDS, _IDS, st.integers(0, 100), st.integers(0, 100))
def test_a_raised_weight_moves_nobody_back(rollout: str, tenant: str, caller: str, one: int, other: int) -> None:
    """Protects stickiness: whoever has the canary keeps it while the weight rises."""
    low, high = sorted((one, other))
    assert takes_canary(rollout, high, tenant, caller) or not takes_canary(rollout, low, tenant, caller)
    assert takes_canary(rollout, 100, tenant, caller) and not takes_canary(rollout, 0, tenant, caller)


def test_tenants_and_rollouts_are_drawn_apart() -> None:
    """Protects fairness of trials: the same session of another tenant, or in another rollout, is another draw."""
    first = [takes_canary("ro-1", 50, "acme", f"c{n}") for n in range(1_000)]
    for other in (
        [takes_canary("ro-1", 50, "globex", f"c{n}") for n in range(1_000)],
        [takes_canary("ro-2", 50, "acme", f"c{n}") for n in range(1_000)],
    ):
        assert 400 < sum(a == b for a, b in zip(first, other, strict=True)) < 600
    assert bucket_of("ro-1", "a", "bc") != bucket_of("ro-1", "ab", "c")
