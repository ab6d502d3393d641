"""A hold ends once: whatever is asked of it later, the first ending stands."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.core.ledger.reservation import Held, Released, Reservation, Settled, release, settle
from weir.core.metering import NO_CHARGE, Basis, Charge, Worst

WORST = Worst(100, 50, 1_000)


def charge_of(cost_microusd: int, input_tokens: int, output_tokens: int) -> Charge:
    return Charge(input_tokens, 0, output_tokens, cost_microusd, 0, False)


CHARGES = st.builds(charge_of, st.integers(0, 1_000), st.integers(0, 100), st.integers(0, 50))
ENDINGS = st.lists(st.none() | st.tuples(CHARGES, st.sampled_from(Basis)), min_size=1, max_size=6)


def apply(reservation: Reservation, wanted: tuple[Charge, Basis] | None) -> tuple[Settled | Released, bool]:
    return release(reservation) if wanted is None else settle(reservation, *wanted)


@given(ENDINGS)
def test_the_first_ending_stands(endings: list[tuple[Charge, Basis] | None]) -> None:
    """Protects settling once: exactly the first call ends the hold, and every later one returns that result."""
    first = endings[0]
    expected = Released() if first is None else Settled(*first)
    reservation: Reservation = Held(WORST)
    for index, wanted in enumerate(endings):
        reservation, ended_here = apply(reservation, wanted)
        assert reservation == expected
        assert ended_here == (index == 0)


@pytest.mark.parametrize("charge", [charge_of(1_001, 0, 0), charge_of(0, 100, 51)])
def test_nothing_beyond_the_hold_is_posted(charge: Charge) -> None:
    """Protects the tenant: a settlement above the hold, in money or in tokens, is a broken invariant."""
    with pytest.raises(AssertionError):
        settle(Held(WORST), charge, Basis.ENGINE)


def test_a_hold_may_settle_to_nothing() -> None:
    """Protects explicit zero: a charge of nothing is a settlement, not a release."""
    assert settle(Held(WORST), NO_CHARGE, Basis.UNCERTAIN) == (Settled(NO_CHARGE, Basis.UNCERTAIN), True)
