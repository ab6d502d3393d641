"""One hold as a two-phase entry: held → SETTLED (engine · estimated · uncertain) · RELEASED.

Settling again returns the first result.
TigerBeetle's pending, post and void transfers, in our terms. A reservation knows its amounts and nothing of accounts; `book`
knows accounts.
"""

from typing import TypeAlias, assert_never

import msgspec

from weir.core.metering import Basis, Charge, Worst


class Held(msgspec.Struct, frozen=True, gc=False):
    """The worst case is set aside and nothing is posted."""

    worst: Worst


class Settled(msgspec.Struct, frozen=True, gc=False):
    """The actual amounts are posted and the rest was given back."""

    charge: Charge
    basis: Basis


class Released(msgspec.Struct, frozen=True, gc=False):
    """Nothing was used and everything was given back."""


Reservation: TypeAlias = Held | Settled | Released
Ended: TypeAlias = Settled | Released


def settle(reservation: Reservation, charge: Charge, basis: Basis) -> tuple[Ended, bool]:
    """Post a charge: the reservation after it and whether this call ended it. The tenant's part must lie within the hold."""
    match reservation:
        case Held(worst):
            assert charge.cost_microusd <= worst.cost_microusd and charge.tenant_tokens <= worst.tokens
            return Settled(charge, basis), True
        case Settled() | Released():
            return reservation, False
        case _:
            assert_never(reservation)


def release(reservation: Reservation) -> tuple[Ended, bool]:
    """Give everything back: the reservation after it and whether this call ended it."""
    match reservation:
        case Held():
            return Released(), True
        case Settled() | Released():
            return reservation, False
        case _:
            assert_never(reservation)
