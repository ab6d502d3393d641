"""What the coordinator makes of an end: absurd figures are clamped and told, and never reach the store."""

import pytest

from weir.coordinator.ledger_entries import outcome_of
from weir.core.endings import FinishReason
from weir.core.metering import Basis, Price, worst_case
from weir.messages import AttemptUsage, Finish
from weir.units import INT64_MAX

PRICE = Price(1, 200_000, 50_000, 600_000)
WORST = worst_case(PRICE, 100, 50, 1)


def _finish(input_tokens: int, cached: int, output_tokens: int) -> Finish:
    usage = AttemptUsage(input_tokens, cached, output_tokens, Basis.ENGINE)
    return Finish(1, 1, FinishReason.STOP, delivered_tokens=output_tokens, usage=usage)


@pytest.mark.parametrize("absurd", [10**9 * 9, 9 * 10**18, 10**19, 10**30])
def test_absurd_usage_is_clamped_and_alarmed(absurd: int) -> None:
    """Protects the cell from a broken engine: a thousand such answers still sum within the store's integers."""
    outcome = outcome_of(_finish(absurd, absurd, absurd), WORST, PRICE)
    assert outcome.charge.clamped
    assert outcome.charge.cost_microusd <= WORST.cost_microusd
    assert 1_000 * max(outcome.usage.input_tokens, outcome.usage.output_tokens) < INT64_MAX
    assert 1_000 * outcome.charge.platform_microusd < INT64_MAX


@pytest.mark.parametrize(("reported", "usage"), [((-5, -1, -3), (0, 0, 0)), ((10, 50, 2), (10, 10, 2))])
def test_impossible_usage_becomes_what_is_possible(reported: tuple[int, int, int], usage: tuple[int, int, int]) -> None:
    """Protects the books from negative counts and from more cached input than input; both are alarmed."""
    outcome = outcome_of(_finish(*reported), WORST, PRICE)
    found = outcome.usage
    assert (found.input_tokens, found.cached_input_tokens, found.output_tokens) == usage
    assert outcome.charge.clamped


def test_plausible_usage_stays_as_it_is() -> None:
    """Protects honest engines: nothing is clamped, nothing is alarmed, zero stays zero."""
    for figures in ((100, 20, 50), (0, 0, 0)):
        outcome = outcome_of(_finish(*figures), WORST, PRICE)
        found = outcome.usage
        assert (found.input_tokens, found.cached_input_tokens, found.output_tokens) == figures
        assert not outcome.charge.clamped
