"""Expected output: between what was seen and what was declared, never above the limit, and it follows the caller."""

from hypothesis import given
from hypothesis import strategies as st

from weir.core.scheduling.output_lengths import OutputLengths

CALLER = ("acme", "app", "revision")
lengths = st.integers(0, 10_000)


@given(st.lists(lengths, max_size=400), st.integers(1, 10_000), st.integers(1, 10_000))
def test_the_expectation_lies_within_evidence_and_limit(seen: list[int], limit: int, typical: int) -> None:
    """Protects charges: 1 … limit, and never outside of what was seen and what was declared."""
    known = OutputLengths()
    for tokens in seen:
        known.observe(CALLER, tokens)
    expected = known.expected(CALLER, limit, typical)
    whole = [min(tokens, limit) for tokens in (*seen, typical)]
    assert 1 <= expected <= limit
    assert max(1, min(whole)) <= expected <= max(1, *whole)


def test_before_anything_was_seen_the_declared_length_counts() -> None:
    """Protects a new revision: what its registrant declared, but not more than is asked for."""
    assert OutputLengths().expected(CALLER, 1_000, 128) == 128
    assert OutputLengths().expected(CALLER, 50, 128) == 50


def test_a_young_caller_is_expected_to_be_like_its_revision() -> None:
    """Protects newcomers and everybody else: few own answers weigh little, many decide."""
    known = OutputLengths()
    for _ in range(200):
        known.observe(CALLER, 400)
    newcomer = ("globex", "app", "revision")
    assert abs(known.expected(newcomer, 1_000, 10) - 385) <= 10
    known.observe(newcomer, 20)
    assert known.expected(newcomer, 1_000, 10) > 300
    for _ in range(200):
        known.observe(newcomer, 20)
    assert known.expected(newcomer, 1_000, 10) < 40
    assert known.expected(("globex", "app", "another"), 1_000, 10) == 10


def test_old_answers_fade() -> None:
    """Protects a caller that changed: a thousand new answers count for more than a thousand old ones."""
    known = OutputLengths()
    for tokens in (1_000, 50):
        for _ in range(1_000):
            known.observe(CALLER, tokens)
    assert known.expected(CALLER, 2_000, 128) < 100


def test_callers_are_forgotten_when_there_are_too_many() -> None:
    """Protects memory: the callers seen last are known, earlier ones are like their revision."""
    known = OutputLengths()
    for _ in range(100):
        known.observe(CALLER, 5)
    for number in range(10_000):
        known.observe((str(number), "app", "revision"), 1_000)
    assert known.expected(CALLER, 2_000, 128) > 900
