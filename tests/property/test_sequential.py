"""Bounds that hold at every look: exact probabilities of ever being wrong, and what must grow with what."""

from fractions import Fraction
from math import comb

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from weir.core.registry.sequential import lower_bound, upper_bound

alphas = st.floats(1e-9, 0.3)


@st.composite
def counts(draw: st.DrawFn, most: int = 1_000_000) -> tuple[int, int]:
    """(hits, trials)"""
    trials = draw(st.integers(1, most))
    return draw(st.integers(0, trials)), trials


def _probability_ever_wrong(rate: float, alpha: float, trials: int, *, below: bool) -> float:
    """Exactly: that the lower bound is ever above the rate, or the upper one below it, within so many trials.

    The bound moves with the hits, so at each number of trials one number of hits is where it begins to be wrong.
    """
    alive, wrong, edge = [1.0], 0.0, 0
    for done in range(1, trials + 1):
        after = [0.0] * (done + 1)
        for hits, probability in enumerate(alive):
            if probability:
                after[hits] += probability * (1.0 - rate)
                after[hits + 1] += probability * rate
        while edge <= done and not (
            lower_bound(edge, done, alpha) > rate if below else upper_bound(done - edge, done, alpha) < rate
        ):
            edge += 1
        for hits in range(done + 1):
            if (hits if below else done - hits) >= edge:
                wrong += after[hits]
                after[hits] = 0.0
        alive = after
    return wrong


@pytest.mark.parametrize("alpha", [0.05, 0.002])
@pytest.mark.parametrize("rate", [0.5, 0.1, 0.01])
@pytest.mark.parametrize("below", [True, False], ids=["lower", "upper"])
def test_it_is_ever_wrong_with_no_more_than_its_probability(rate: float, alpha: float, below: bool) -> None:
    """Protects the stated rate of false alarms: however often one looks, by exact enumeration and not by a draw."""
    assert _probability_ever_wrong(rate, alpha, 500, below=below) <= alpha


def test_it_is_not_far_stricter_than_it_says() -> None:
    """Protects what is found: a bound that is never wrong would tell nothing."""
    assert _probability_ever_wrong(0.5, 0.05, 500, below=True) > 0.025


@given(counts(60), st.sampled_from([0.3, 0.05, 0.001]))
def test_it_is_where_the_ratio_says(count: tuple[int, int], alpha: float) -> None:
    """Protects the arithmetic: against fractions, the mean likelihood is as many times that of the bound as it needs."""
    hits, trials = count
    assume(hits)

    def is_excluded(rate: Fraction) -> bool:
        mean_likelihood = Fraction(1, (trials + 1) * comb(trials, hits))
        return mean_likelihood >= rate**hits * (1 - rate) ** (trials - hits) * (rate + (1 - rate) / Fraction(alpha))

    bound = lower_bound(hits, trials, alpha)
    assert is_excluded(Fraction(bound * (1 - 1e-9)))
    assert not is_excluded(Fraction(bound) + (Fraction(hits, trials) - Fraction(bound)) / 10**6)


@given(counts(), alphas)
def test_the_bounds_contain_what_was_seen(count: tuple[int, int], alpha: float) -> None:
    """Protects against bounds that exclude the rate observed."""
    hits, trials = count
    assert 0.0 <= lower_bound(hits, trials, alpha) <= hits / trials <= upper_bound(hits, trials, alpha) <= 1.0


@given(counts(), alphas)
def test_more_of_one_kind_moves_the_bounds_that_way(count: tuple[int, int], alpha: float) -> None:
    """Protects the order: a hit lowers no bound, a miss raises none, and less risk of being wrong never narrows them."""
    hits, trials = count
    for bound in (lower_bound, upper_bound):
        here = bound(hits, trials, alpha)
        assert bound(hits + 1, trials + 1, alpha) >= here - 1e-12
        assert bound(hits, trials + 1, alpha) <= here + 1e-12
    assert lower_bound(hits, trials, alpha / 10) <= lower_bound(hits, trials, alpha)
    assert upper_bound(hits, trials, alpha / 10) >= upper_bound(hits, trials, alpha)


@given(counts(), alphas)
def test_hits_and_misses_are_alike(count: tuple[int, int], alpha: float) -> None:
    """Protects the upper bound: it is the lower one of the misses."""
    hits, trials = count
    assert upper_bound(hits, trials, alpha) == 1.0 - lower_bound(trials - hits, trials, alpha)


@given(st.integers(0, 1_000_000), alphas)
def test_what_was_never_seen_is_not_excluded(trials: int, alpha: float) -> None:
    """Protects the ends: without hits nothing is known from below, without misses nothing from above."""
    assert lower_bound(0, trials, alpha) == 0.0
    assert upper_bound(trials, trials, alpha) == 1.0
    if trials:
        assert lower_bound(trials, trials, alpha) > 0.0
        assert upper_bound(0, trials, alpha) < 1.0


def test_many_observations_leave_little_doubt() -> None:
    """Protects a busy alias: at a thousand million observations the sums still tell rates apart."""
    many = 10**9
    assert lower_bound(many // 2, many, 0.001) == pytest.approx(0.5, abs=2e-4)
    assert upper_bound(many // 100, many, 0.001) == pytest.approx(0.01, abs=4e-5)
