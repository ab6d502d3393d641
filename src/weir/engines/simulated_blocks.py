"""The KV blocks of one simulated replica: which sequence holds them, and which still keep a prompt's prefix to be reused.

A prefix is found block by block from its salt on, each block known by the one before it and its own content. So a hit means the
same salt and the same tokens from the first one, exactly; nothing is found under another salt. Released blocks keep what they
hold until they are needed, the longest unused first. Pure, and blind to time; `simulated_batch` decides who gets blocks.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from weir.units import Tokens, ceil_div

BLOCK_TOKENS: Tokens = 16


@dataclass(slots=True, eq=False)
class CachedBlock:
    """A block that can be found again; or, without a prefix, `size` released blocks that cannot.

    prefix: the block before it (of a first block the salt), and the content. holders: sequences that hold it.
    """

    prefix: "tuple[CachedBlock | str, Hashable] | None" = field(repr=False)
    size: int = 1
    holders: int = 0


@dataclass(slots=True, eq=False)
class Holding:
    """What one sequence holds: cached blocks of its prompt, in order, then `own` blocks that only it uses.

    keys: the contents of the prompt's full blocks, as opaque values; empty for a prompt that is not to be cached.
    """

    salt: str = ""
    keys: Sequence[Hashable] = ()
    cached: list[CachedBlock] = field(default_factory=list)
    own: int = 0

    @property
    def tokens(self) -> Tokens:
        """Tokens that its blocks have room for."""
        return (len(self.cached) + self.own) * BLOCK_TOKENS


class BlockPool:
    """All blocks of a replica. total: their number, ≥ 1."""

    def __init__(self, total: int) -> None:
        assert total >= 1
        self.total = total
        self._used = 0
        self._free = total
        self._released: OrderedDict[CachedBlock, None] = OrderedDict()
        self._index: dict[tuple[CachedBlock | str, Hashable], CachedBlock] = {}

    @property
    def used(self) -> int:
        """Blocks that sequences hold, a shared one counted once."""
        return self._used

    @property
    def available(self) -> int:
        """Blocks that can be handed out: never used, given back, or cached and held by nobody."""
        return self.total - self._used

    def find(self, holding: Holding, tokens_max: Tokens) -> list[CachedBlock]:
        """The longest cached prefix of a prompt, at most tokens_max long. Takes nothing."""
        found: list[CachedBlock] = []
        before: CachedBlock | str = holding.salt
        for key in holding.keys[: tokens_max // BLOCK_TOKENS]:
            block = self._index.get((before, key))
            if block is None:
                break
            found.append(block)
            before = block
        return found

    def needed(self, found: Sequence[CachedBlock], tokens: Tokens) -> int:
        """How many available blocks it takes to hold `tokens` that begin with a prefix just found."""
        return ceil_div(tokens, BLOCK_TOKENS) - sum(1 for block in found if block.holders)

    def take(self, holding: Holding, found: Sequence[CachedBlock]) -> None:
        """Let an empty holding begin with a prefix just found."""
        assert not holding.cached and not holding.own
        for block in found:
            self._hold(block)
            holding.cached.append(block)

    def grow(self, holding: Holding, tokens: Tokens) -> bool:
        """Give a sequence room for its first `tokens`, and cache what of its prompt they fill; False, and nothing, if short."""
        missing = ceil_div(max(0, tokens - holding.tokens), BLOCK_TOKENS)
        if missing > self.available:
            return False
        self._allocate(missing)
        holding.own += missing
        for key in holding.keys[len(holding.cached) : tokens // BLOCK_TOKENS]:
            self._cache(holding, key)
        return True

    def release(self, holding: Holding) -> None:
        """Take everything back; the end of a prefix is given away before its beginning."""
        if holding.own:
            self._used -= holding.own
            self._released[CachedBlock(None, holding.own)] = None
            holding.own = 0
        while holding.cached:
            block = holding.cached.pop()
            block.holders -= 1
            if not block.holders:
                self._used -= 1
                self._released[block] = None

    def _allocate(self, number: int) -> None:
        while self._free < number:  # bounded by what is released, which `available` counts
            block, _ = self._released.popitem(last=False)
            if block.prefix is not None:
                del self._index[block.prefix]
            self._free += block.size
        self._free -= number
        self._used += number

    def _cache(self, holding: Holding, key: Hashable) -> None:
        """Make a sequence's first own block one that others find. Where there is one already, it holds that one instead."""
        prefix = (holding.cached[-1] if holding.cached else holding.salt, key)
        block = self._index.get(prefix)
        holding.own -= 1
        if block is None:
            block = self._index[prefix] = CachedBlock(prefix, holders=1)
        else:
            self._used -= 1
            self._free += 1
            self._hold(block)
        holding.cached.append(block)

    def _hold(self, block: CachedBlock) -> None:
        if not block.holders:
            del self._released[block]
            self._used += 1
        block.holders += 1
