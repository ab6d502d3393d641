"""The index of prompt prefixes: marks that stay, what replicas are believed to hold, and what makes it forget."""

import pytest

from weir.core.routing.prefixes import (
    KV_TOKENS,
    MARK_STEP_BYTES,
    MARKS_END_BYTES,
    MARKS_MAX,
    MARKS_PER_REPLICA_MAX,
    PrefixIndex,
    cached_tokens,
    marks_within,
)


def _prefix(path: str) -> tuple[bytes, ...]:
    """A prompt's digests: prompts that begin with the same letters share so many marks."""
    return tuple(path[:end].encode() for end in range(1, len(path) + 1))


def test_marks_are_close_at_first_and_bounded_in_number() -> None:
    """Protects the meaning of digests: changed offsets would make two versions of a gateway disagree."""
    assert marks_within(MARK_STEP_BYTES - 1) == ()
    assert marks_within(MARK_STEP_BYTES) == (512,)
    assert marks_within(3_000) == (512, 1_024, 1_536, 2_048, 2_560)
    marks = marks_within(1 << 40)
    assert len(marks) == MARKS_MAX and marks[-1] == MARKS_END_BYTES == 2_996_899
    assert marks_within(5_183) == marks[:9]


@pytest.mark.parametrize(
    ("marks_held", "prefix_bytes", "input_tokens", "cached"),
    [
        (0, 0, 0, 0),
        (0, 1_000, 250, 0),
        (1, 1_000, 250, 128),
        (3, 2_000, 500, 384),
        (1, 512, 64, 63),  # one token is always computed
        (2, 100, 64, 63),  # texts so short that most of what was digested divides them
        (1, 300, 0, 0),
    ],
)
def test_the_share_that_marks_cover(marks_held: int, prefix_bytes: int, input_tokens: int, cached: int) -> None:
    """Protects predictions: the share of the bytes, rounded down, and never the whole input."""
    assert cached_tokens(marks_held, prefix_bytes, input_tokens) == cached


def test_each_replica_holds_as_much_as_was_placed_there() -> None:
    """Protects affinity: leading marks are counted for each replica, also where another one holds more or fewer."""
    index = PrefixIndex()
    for replica, path in (("a", "xyz"), ("b", "xy"), ("c", "xyw"), ("d", "q")):
        index.placed(replica, _prefix(path), 100)
    assert index.held(_prefix("xyzv")) == {"a": 3, "b": 2, "c": 2}
    assert index.held(_prefix("xy")) == {"a": 2, "b": 2, "c": 2}
    assert index.held(_prefix("qx")) == {"d": 1}
    assert index.held(_prefix("v")) == {}
    assert index.held(()) == {}


def test_a_prompt_without_marks_leaves_no_trace() -> None:
    """Protects memory: what is too short to be digested is not kept."""
    index = PrefixIndex()
    index.placed("a", (), 10)
    assert len(index) == 0


def test_what_was_used_least_recently_goes_first_and_deep_marks_before_shallow() -> None:
    """Protects the estimate: a full replica forgets as an engine does, from the end of what it used longest ago."""
    index = PrefixIndex()
    index.bound("a", 100)
    index.placed("a", _prefix("xy"), 40)
    index.placed("a", _prefix("qr"), 40)
    index.placed("a", _prefix("xz"), 40)  # shares a mark, and so its tokens
    assert index.held(_prefix("xy")) == {"a": 2} and len(index) == 5
    index.placed("a", _prefix("w"), 20)
    assert index.held(_prefix("xy")) == {"a": 1}
    assert index.held(_prefix("qr")) == {"a": 2}
    index.placed("a", _prefix("v"), 10)
    assert index.held(_prefix("qr")) == {"a": 1}
    assert index.held(_prefix("xz")) == {"a": 2}


def test_a_bound_that_shrinks_takes_effect_at_once() -> None:
    """Protects the estimate of a replica that came back with less memory; without a figure the default holds."""
    index = PrefixIndex()
    index.bound("a", 10 * KV_TOKENS)
    index.placed("a", _prefix("xy"), 2 * KV_TOKENS)
    index.placed("a", _prefix("z"), 2)
    assert index.held(_prefix("xy")) == {"a": 2}
    index.bound("a", None)
    assert index.held(_prefix("xy")) == {}
    assert index.held(_prefix("z")) == {"a": 1}
    index.placed("b", _prefix("z"), KV_TOKENS + 1)
    assert index.held(_prefix("z")) == {"a": 1}


def test_a_prompt_larger_than_the_memory_keeps_its_beginning() -> None:
    """Protects long prompts: what does not fit is forgotten from the end."""
    index = PrefixIndex()
    index.bound("a", 100)
    index.placed("a", _prefix("wxyz"), 160)
    assert index.held(_prefix("wxyz")) == {"a": 2}


def test_the_number_of_marks_is_bounded_too() -> None:
    """Protects memory: inputs that are counted as nothing are forgotten as well, the oldest first."""
    index = PrefixIndex()
    for number in range(MARKS_PER_REPLICA_MAX + 5):
        index.placed("a", (number.to_bytes(4, "big"),), 0)
    assert len(index) == MARKS_PER_REPLICA_MAX
    assert index.held(((4).to_bytes(4, "big"),)) == {}
    assert index.held(((5).to_bytes(4, "big"),)) == {"a": 1}


def test_a_replica_that_is_gone_leaves_nothing_and_its_successor_inherits_nothing() -> None:
    """Protects memory and a new replica's name: neither is taken for the one before it."""
    index = PrefixIndex()
    for replica in "ab":
        index.placed(replica, _prefix("xy"), 100)
    index.placed("a", _prefix("q"), 100)
    assert index.held(_prefix("xy")) == {"a": 2, "b": 2}
    index.gone("a")
    index.gone("never heard of")
    assert index.held(_prefix("xy")) == {"b": 2} and len(index) == 2
    index.placed("c", _prefix("xy"), 100)
    assert index.held(_prefix("xy")) == {"b": 2, "c": 2}
    index.gone("b")
    index.gone("c")
    assert len(index) == 0


def test_any_mixture_of_replicas_is_told_apart() -> None:
    """Protects answers that are remembered: more sets of replicas than are kept are each still their own."""
    index = PrefixIndex()
    sets = range(1, 2_048)
    for replica in range(11):
        for members in sets:
            if members >> replica & 1:
                index.placed(str(replica), (members.to_bytes(2, "big"),), 1)
    for members in (*sets, *sets):
        expected = {str(replica): 1 for replica in range(11) if members >> replica & 1}
        assert index.held((members.to_bytes(2, "big"),)) == expected
