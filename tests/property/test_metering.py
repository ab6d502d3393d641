"""Money and tokens: a charge stays within its hold, loses nothing, and falls on whom the table of endings names."""

from dataclasses import replace
from fractions import Fraction
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weir.core.endings import ENDING_BY_REASON, EndingRule, FinishReason, Payer
from weir.core.metering import (
    TEMPLATE_TOKENS,
    TEMPLATE_TOKENS_PER_TURN,
    Basis,
    Charge,
    Price,
    Usage,
    Worst,
    charge,
    upper_bound_of_input,
    worst_case,
)
from weir.core.tenancy import ServiceClass

RATES = st.one_of(st.sampled_from([0, 1, 50_000, 200_000, 600_000]), st.integers(0, 10**9))
PERCENTS = st.one_of(st.sampled_from([0, 1, 50, 99, 100]), st.integers(0, 100))
SCHEDULE = st.builds(Price, st.just(1), RATES, RATES, RATES, PERCENTS)
CLASSES = st.sampled_from(ServiceClass)
PRICES = st.builds(Price.of, SCHEDULE, CLASSES)
"""As requests pay them, of both classes."""
TOKENS = st.integers(0, 10_000)
RULES = st.sampled_from(list(ENDING_BY_REASON.values()))
BASES = st.sampled_from(Basis)


@st.composite
def usages(draw: st.DrawFn) -> Usage:
    input_tokens = draw(TOKENS)
    return Usage(input_tokens, draw(st.integers(0, input_tokens)), draw(TOKENS), draw(BASES))


HOLDS = st.tuples(st.integers(0, 10_000), st.integers(1, 10_000), st.integers(1, 4))


@given(PRICES, usages())
def test_a_cost_is_rounded_up_once(price: Price, usage: Usage) -> None:
    """Protects money: the cost is the exact sum over the three prices, rounded up to a whole micro-dollar."""
    exact = Fraction(
        (usage.input_tokens - usage.cached_input_tokens) * price.input_microusd
        + usage.cached_input_tokens * price.cached_input_microusd
        + usage.output_tokens * price.output_microusd,
        10**6,
    )
    assert price.cost(usage.input_tokens, usage.cached_input_tokens, usage.output_tokens) == ceil(exact)


@given(PRICES, HOLDS, st.data())
def test_nothing_within_its_bounds_costs_more_than_the_hold(
    price: Price, sizes: tuple[int, int, int], data: st.DataObject
) -> None:
    """Protects the worst case: any mix of cached and uncached input and any shorter output costs at most what is held."""
    input_tokens, max_output_tokens, choices = sizes
    worst = worst_case(price, input_tokens, max_output_tokens, choices)
    assert (worst.input_tokens, worst.output_tokens) == (choices * input_tokens, choices * max_output_tokens)
    assert worst.tokens == choices * (input_tokens + max_output_tokens)
    used_input = data.draw(st.integers(0, worst.input_tokens))
    cached = data.draw(st.integers(0, used_input))
    output = data.draw(st.integers(0, worst.output_tokens))
    assert price.cost(used_input, cached, output) <= worst.cost_microusd


@settings(max_examples=300)
@given(PRICES, RULES, usages(), TOKENS, HOLDS)
def test_a_charge_stays_within_its_hold_and_loses_nothing(
    price: Price, rule: EndingRule, usage: Usage, delivered_tokens: int, sizes: tuple[int, int, int]
) -> None:
    """Protects the ledger: the tenant's part lies within the hold, and both parts add up to the price of what was used."""
    held = worst_case(price, *sizes)
    result = charge(rule, usage, delivered_tokens, held, price)
    assert 0 <= result.cost_microusd <= held.cost_microusd
    assert 0 <= result.tenant_cached_input_tokens <= result.tenant_input_tokens <= held.input_tokens
    assert 0 <= result.tenant_output_tokens <= held.output_tokens
    assert 0 <= result.tenant_tokens <= held.tokens
    assert result.platform_microusd >= 0
    total = price.cost(usage.input_tokens, usage.cached_input_tokens, usage.output_tokens)
    assert result.cost_microusd + result.platform_microusd == total


@given(SCHEDULE, usages(), st.data())
def test_batch_pays_its_part_of_each_amount_rounded_up(price: Price, usage: Usage, data: st.DataObject) -> None:
    """Protects the discount: each amount is the least whole one that is not below its part, and costs add up from those."""
    paid, percent = price.of(ServiceClass.BATCH), Fraction(price.batch_percent, 100)
    amounts = [(price.input_microusd, paid.input_microusd), (price.cached_input_microusd, paid.cached_input_microusd)]
    for whole, part in [*amounts, (price.output_microusd, paid.output_microusd)]:
        assert part == ceil(whole * percent) and 0 <= part <= whole
    used = (usage.input_tokens, usage.cached_input_tokens, usage.output_tokens)
    exact = Fraction(
        (usage.input_tokens - usage.cached_input_tokens) * paid.input_microusd
        + usage.cached_input_tokens * paid.cached_input_microusd
        + usage.output_tokens * paid.output_microusd,
        10**6,
    )
    assert paid.cost(*used) == ceil(exact) and 0 <= paid.cost(*used) <= price.cost(*used)
    assert paid.version == price.version
    assert paid.of(data.draw(CLASSES)) == paid, "no part is taken of a part"


@given(SCHEDULE)
def test_nothing_is_taken_off_for_interactive_requests_nor_at_the_whole_price(price: Price) -> None:
    """Protects every price from before: without a discount, and for who waits for answers, it is what it was."""
    assert price.of(ServiceClass.INTERACTIVE) == price
    whole = replace(price, batch_percent=100)
    assert whole.of(ServiceClass.BATCH) == whole


PRICE = Price(1, 1_000_000, 500_000, 2_000_000)
HELD = worst_case(PRICE, 100, 50, 1)
USED = Usage(100, 40, 30, Basis.ENGINE)
TOTAL = 60 + 20 + 60
GENERATED = Charge(100, 40, 30, TOTAL, 0, False)
DELIVERED_10 = Charge(100, 40, 10, 60 + 20 + 20, 40, False)
PLATFORM = Charge(0, 0, 0, 0, TOTAL, False)

PAID_BY = {
    FinishReason.STOP: GENERATED,
    FinishReason.LENGTH: GENERATED,
    FinishReason.TOOL_CALLS: GENERATED,
    FinishReason.CONTENT_FILTER: GENERATED,
    FinishReason.CLIENT: GENERATED,
    FinishReason.DISCONNECT: GENERATED,
    FinishReason.SLOW_CLIENT: GENERATED,
    FinishReason.REVOKED: GENERATED,
    FinishReason.DEADLINE: DELIVERED_10,
    FinishReason.QUEUE_WAIT: PLATFORM,
    FinishReason.ENGINE_ERROR: PLATFORM,
    FinishReason.REPLICA_LOST: PLATFORM,
    FinishReason.STALLED: PLATFORM,
    FinishReason.NO_CAPACITY: PLATFORM,
    FinishReason.LEDGER_UNAVAILABLE: PLATFORM,
    FinishReason.COORDINATOR_LOST: PLATFORM,
    FinishReason.SHUTDOWN: PLATFORM,
    FinishReason.PREEMPTED: PLATFORM,
    FinishReason.QUARANTINED: PLATFORM,
    FinishReason.ENGINE_REJECTED: PLATFORM,
}


@pytest.mark.parametrize("reason", FinishReason)
def test_each_ending_is_paid_by_whom_the_table_names(reason: FinishReason) -> None:
    """Protects the table of endings: 30 tokens were generated and 10 of them delivered, and the named payer pays."""
    assert charge(ENDING_BY_REASON[reason], USED, 10, HELD, PRICE) == PAID_BY[reason]


@pytest.mark.parametrize("reason", FinishReason)
def test_without_output_only_a_completed_request_is_paid_by_its_tenant(reason: FinishReason) -> None:
    """Protects tenants: an ending that produced nothing for them costs the platform, unless the engine completed it so."""
    rule = ENDING_BY_REASON[reason]
    used = Usage(100, 0, 0, Basis.ENGINE)
    expected = Charge(100, 0, 0, 100, 0, False) if rule.error is None else Charge(0, 0, 0, 0, 100, False)
    assert charge(rule, used, 0, HELD, PRICE) == expected


def test_generated_but_undelivered_output_of_an_expired_request_is_not_paid_by_the_tenant() -> None:
    """Protects tenants at a deadline: where nothing was handed over the platform pays all of it."""
    assert charge(ENDING_BY_REASON[FinishReason.DEADLINE], USED, 0, HELD, PRICE) == PLATFORM


def test_a_delivery_above_the_engines_count_is_charged_by_the_count() -> None:
    """Protects tenants at a deadline: a byte bound on what was delivered never exceeds the measured output."""
    assert charge(ENDING_BY_REASON[FinishReason.DEADLINE], USED, 45, HELD, PRICE) == GENERATED


@pytest.mark.parametrize(
    ("used", "expected"),
    [
        (Usage(130, 0, 30, Basis.ENGINE), Charge(100, 0, 30, 160, 30, True)),
        (Usage(100, 0, 80, Basis.ENGINE), Charge(100, 0, 50, 200, 60, True)),
        (Usage(130, 120, 10, Basis.ENGINE), Charge(100, 100, 10, 70, 20, True)),
    ],
)
def test_what_exceeds_the_hold_is_clamped_alarmed_and_platform_cost(used: Usage, expected: Charge) -> None:
    """Protects budgets from an engine that reports more than was held: the tenant pays up to the hold and it is alarmed."""
    assert charge(ENDING_BY_REASON[FinishReason.STOP], used, used.output_tokens, HELD, PRICE) == expected


def test_payers_of_the_table_are_the_four_that_are_tested() -> None:
    """Protects this file: a payer added to the table needs a row here."""
    assert {rule.payer for rule in ENDING_BY_REASON.values()} == set(Payer)


@given(st.integers(0, 10**7), st.integers(1, 1_000))
def test_the_bound_of_an_input_grows_with_bytes_and_turns(prompt_bytes: int, turns: int) -> None:
    """Protects holds without an exact count: at least one token per byte, and the template's allowance for every turn."""
    bound = upper_bound_of_input(prompt_bytes, turns)
    assert bound == prompt_bytes + TEMPLATE_TOKENS + turns * TEMPLATE_TOKENS_PER_TURN


@pytest.mark.parametrize(("input_tokens", "max_output_tokens", "choices"), [(-1, 1, 1), (0, 0, 1), (0, 1, 0)])
def test_a_hold_of_impossible_sizes_is_a_bug(input_tokens: int, max_output_tokens: int, choices: int) -> None:
    """Protects the ledger: amounts that admission must have refused never become a hold."""
    with pytest.raises(AssertionError):
        worst_case(PRICE, input_tokens, max_output_tokens, choices)


def test_worst_is_a_value() -> None:
    """Protects recovery: a hold rebuilt from its record equals the one that was taken."""
    assert worst_case(PRICE, 100, 50, 1) == Worst(100, 50, 200)
