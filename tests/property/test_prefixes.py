"""The index of prompt prefixes against a model that keeps a plain list per replica."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from weir.core.routing.prefixes import KV_TOKENS, PrefixIndex, cached_tokens, marks_within
from weir.units import Bytes, Tokens

REPLICAS = ("a", "b", "c")
paths = st.text("xy", min_size=1, max_size=6)
amounts = st.integers(0, 600)


def _prefix(path: str) -> tuple[bytes, ...]:
    return tuple(path[:end].encode() for end in range(1, len(path) + 1))


@dataclass
class _Replica:
    """uses: (digest, tokens), latest use last."""

    tokens_max: Tokens = KV_TOKENS
    uses: list[tuple[bytes, Tokens]] = field(default_factory=list)

    @property
    def digests(self) -> set[bytes]:
        return {digest for digest, _ in self.uses}

    def trim(self) -> None:
        while sum(tokens for _, tokens in self.uses) > self.tokens_max:
            del self.uses[0]

    def placed(self, path: str, tokens: Tokens) -> None:
        marks = marks_within(512 * len(path))
        ends = [tokens * mark // marks[-1] for mark in marks]
        shares = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        known = dict(self.uses)
        for digest, share in reversed(list(zip(_prefix(path), shares, strict=True))):
            self.forget(digest)
            self.uses.append((digest, known.get(digest, share)))
        self.trim()

    def forget(self, forgotten: bytes) -> None:
        self.uses = [use for use in self.uses if use[0] != forgotten]

    def held(self, path: str) -> int:
        return next((depth for depth, digest in enumerate(_prefix(path)) if digest not in self.digests), len(path))


steps = st.one_of(
    st.tuples(st.just("placed"), st.sampled_from(REPLICAS), paths, amounts),
    st.tuples(st.just("bound"), st.sampled_from(REPLICAS), st.just(""), st.one_of(st.none(), amounts)),
    st.tuples(st.just("gone"), st.sampled_from(REPLICAS), st.just(""), st.none()),
)


def _play(index: PrefixIndex, model: dict[str, _Replica], step: tuple[str, str, str, Tokens | None]) -> None:
    what, name, path, amount = step
    replica = model.setdefault(name, _Replica())
    match what, amount:
        case "placed", int(tokens):
            index.placed(name, _prefix(path), tokens)
            replica.placed(path, tokens)
        case "bound", _:
            index.bound(name, amount)
            replica.tokens_max = KV_TOKENS if amount is None else amount
            replica.trim()
        case _:
            index.gone(name)
            del model[name]


@given(st.lists(steps, max_size=40), st.lists(paths, min_size=1, max_size=5))
def test_the_index_knows_what_a_plain_list_knows(played: list[tuple[str, str, str, Tokens | None]], asked: list[str]) -> None:
    """Protects affinity and memory: leading marks as counted one by one, bounds kept, nothing kept that no replica holds."""
    index, model = PrefixIndex(), dict[str, _Replica]()
    for step in played:
        _play(index, model, step)
        for path in asked:
            counts = {name: replica.held(path) for name, replica in model.items()}
            assert index.held(_prefix(path)) == {name: depth for name, depth in counts.items() if depth}
        assert len(index) == len(set().union(*(replica.digests for replica in model.values())))
    for name in REPLICAS:
        index.gone(name)
    assert len(index) == 0


@given(st.integers(0, 2_000_000), st.integers(0, 2_000_000))
def test_a_longer_prompt_keeps_every_mark(size: Bytes, more: Bytes) -> None:
    """Protects conversations: what is appended moves no mark, and neighbouring marks are at most an eighth apart."""
    marks, longer = marks_within(size), marks_within(size + more)
    assert longer[: len(marks)] == marks
    assert all(mark <= size for mark in marks)
    assert all(end - start == max(512, start // 8) for start, end in zip((0, *longer), longer, strict=False))


@given(st.integers(0, 64), st.integers(0, 2_000_000), st.integers(0, 1_000_000))
def test_more_marks_never_cover_less(marks_held: int, prefix_bytes: Bytes, input_tokens: Tokens) -> None:
    """Protects placement: deeper is never worse, and no belief makes an input free."""
    cached = cached_tokens(marks_held, prefix_bytes, input_tokens)
    assert 0 <= cached <= max(0, input_tokens - 1)
    assert cached >= cached_tokens(max(0, marks_held - 1), prefix_bytes, input_tokens)
