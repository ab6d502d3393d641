"""Bounds of a rate that stay true however often one looks: a confidence sequence for yes-or-no observations.

Robbins' mixture ("Statistical Methods Related to the Law of the Iterated Logarithm", Annals of Mathematical Statistics 41,
1970) with a uniform prior; Waudby-Smith and Ramdas derive it as the prior-posterior-ratio martingale ("Confidence Sequences for
Sampling Without Replacement", NeurIPS 2020). At the true rate p, the mean likelihood of all rates over the likelihood of p is a
martingale that starts at 1, so it ever reaches 1/α with probability at most α (Ville). A rate at which it has is excluded, for
good: no number of looks needs a correction. Each bound here is one-sided: its prior is uniform over what lies on its side of p.
"""

from math import lgamma, log, log1p

_HALVINGS = 64
"""Of an interval no wider than 1: beyond what a float tells apart."""


def lower_bound(hits: int, trials: int, alpha: float) -> float:
    """What the rate is at least: with probability 1 − alpha it is never above the rate, at any number of trials.

    hits: int 0 … trials. alpha: above 0, below 1. Returns 0 … hits ÷ trials, rounded down; 0 without hits.

    Where each observation has a rate of its own that depends on what came before, a bound above r is as improbable while none
    of these rates is above r: the ratio to r's likelihood is a supermartingale then.
    """
    assert 0 <= hits <= trials and 0.0 < alpha < 1.0
    if not hits:
        return 0.0
    misses = trials - hits
    mean_likelihood = lgamma(hits + 1) + lgamma(misses + 1) - lgamma(trials + 2)
    low, high = 0.0, hits / trials
    for _ in range(_HALVINGS):
        rate = (low + high) / 2
        evidence = mean_likelihood - hits * log(rate) - misses * log1p(-rate)
        if evidence >= _evidence_needed(rate, alpha):
            low = rate
        else:
            high = rate
    return low


def upper_bound(hits: int, trials: int, alpha: float) -> float:
    """What the rate is at most: with probability 1 − alpha it is never below the rate, at any number of trials.

    hits: int 0 … trials. alpha: above 0, below 1. Returns hits ÷ trials … 1, rounded up; 1 where all are hits.
    """
    return 1.0 - lower_bound(trials - hits, trials, alpha)


def _evidence_needed(rate: float, alpha: float) -> float:
    """From which log ratio of the mean likelihood to that of `rate` on more than `rate` is true. rate: at most hits ÷ trials.

    The mean over all rates is rate × that over those below + (1 − rate) × that over those above. Those below explain the
    observations no better than `rate` itself, so their ratio is at most 1, and that of those above reaches 1/α where the whole
    reaches rate + (1 − rate)/α. The log ratio less the log of this is convex, infinite at 0 and not positive at hits ÷ trials:
    it changes its sign once.
    """
    return log(rate + (1.0 - rate) / alpha)
