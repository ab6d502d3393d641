"""Units and the few conversions between them, all on integers.

Tokens, micro-dollars (1 USD = 1,000,000), bytes, milliseconds and nanoseconds are plain `int`; the aliases below name the
unit in a signature, a suffix (`_ms`, `_ns`, `_bytes`, `_microusd`) names it in a variable. Nothing here rounds down money.
"""

from typing import NamedTuple, TypeAlias

Tokens: TypeAlias = int
MicroDollars: TypeAlias = int
Bytes: TypeAlias = int
Millis: TypeAlias = int
Nanos: TypeAlias = int


class Moment(NamedTuple):
    """One instant on both clocks: monotonic_ns for durations, wall_ms (Unix epoch) for budget windows and records."""

    monotonic_ns: Nanos
    wall_ms: Millis


NANOS_PER_MILLI = 1_000_000
NANOS_PER_SECOND = 1_000_000_000
NANOS_PER_MINUTE = 60 * NANOS_PER_SECOND
MILLION = 1_000_000

INT64_MAX = 2**63 - 1
"""The largest amount any store column holds; nothing settable may exceed it."""


def ceil_div(numerator: int, denominator: int) -> int:
    """numerator ÷ denominator rounded up. denominator: int ≥ 1."""
    return -(-numerator // denominator)


def ms_from_ns(nanos: Nanos) -> Millis:
    """Nanoseconds as whole milliseconds, rounded down."""
    return nanos // NANOS_PER_MILLI


def ns_from_ms(millis: Millis) -> Nanos:
    """Milliseconds as nanoseconds."""
    return millis * NANOS_PER_MILLI


def ceil_ms_from_ns(nanos: Nanos) -> Millis:
    """Nanoseconds as whole milliseconds, rounded up: a wait that is long enough."""
    return ceil_div(nanos, NANOS_PER_MILLI)
