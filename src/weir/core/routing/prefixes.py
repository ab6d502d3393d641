"""Which replicas are believed to hold which beginnings of prompts, as what was dispatched to them suggests.

A prompt is known by digests of its beginnings at fixed offsets, its marks, so that a prompt which another one continues shares
all of that one's marks. Digests come keyed by tenant and revision: one index serves all, and tells nothing about a text. It is
an estimate for placement; it must never decide whose turn it is. It restarts empty.
"""

from bisect import bisect_right
from collections import OrderedDict

from weir.units import Bytes, Tokens

MARKS_MAX = 64
"""Of one prompt."""
MARK_STEP_BYTES: Bytes = 512
"""The first mark, and the least distance of two."""
KV_TOKENS = 100_000
"""What a replica that does not say is believed to keep: 12 GiB of an 8B model's KV blocks."""
MARKS_PER_REPLICA_MAX = 20_000
"""A mark is of 128 tokens or more of ordinary text: enough for a KV memory of two million tokens."""
_GROUPS_MAX = 1_024


def _marks() -> tuple[Bytes, ...]:
    marks = [MARK_STEP_BYTES]
    while len(marks) < MARKS_MAX:
        marks.append(marks[-1] + max(MARK_STEP_BYTES, marks[-1] // 8))
    return tuple(marks)


_MARKS = _marks()
MARKS_END_BYTES = _MARKS[-1]
"""2,996,899: what follows the last mark is not looked at."""


def marks_within(size: Bytes) -> tuple[Bytes, ...]:
    """The offsets, ascending, at which a prompt of this size is digested; of a longer one they are the first of more."""
    return _MARKS[: bisect_right(_MARKS, size)]


def cached_tokens(marks_held: int, prefix_bytes: Bytes, input_tokens: Tokens) -> Tokens:
    """The part of an input that its first marks cover, rounded down; an engine always computes one token.

    prefix_bytes: of the whole input, ≥ 0; it may be counted without what divides its messages.
    """
    if marks_held == 0:
        return 0
    covered = _MARKS[marks_held - 1]
    if covered >= prefix_bytes:
        return max(0, input_tokens - 1)
    return min(input_tokens * covered // prefix_bytes, max(0, input_tokens - 1))


class _Memory:
    """What one replica is believed to hold. bit: its own in the masks of holders. marks: tokens by digest, oldest use first."""

    __slots__ = ("bit", "marks", "tokens", "tokens_max")

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.marks: OrderedDict[bytes, Tokens] = OrderedDict()
        self.tokens: Tokens = 0
        self.tokens_max: Tokens = KV_TOKENS


class PrefixIndex:
    """Beginnings by replica. A prefix: one digest per mark, each of the whole beginning up to it; at most MARKS_MAX.

    A replica keeps at most MARKS_PER_REPLICA_MAX marks, and of as many tokens as its bound; those used least recently go
    first, of one prompt the deeper before the shallower.
    """

    def __init__(self) -> None:
        self._memories: dict[str, _Memory] = {}
        self._names: dict[int, str] = {}  # by bit
        self._bits_taken = 0
        self._holders: dict[bytes, int] = {}  # digest → mask of bits: one look-up and one `and` per mark, for any fleet
        self._groups: dict[int, tuple[str, ...]] = {}

    def __len__(self) -> int:
        """Digests that any replica is believed to hold."""
        return len(self._holders)

    def held(self, prefix: tuple[bytes, ...]) -> dict[str, int]:
        """How many of its leading marks each replica holds, for those that hold any. No step for marks that nobody holds."""
        found: dict[str, int] = {}
        holders = self._holders
        current = holders.get(prefix[0], 0) if prefix else 0
        if not current:
            return found
        for depth in range(1, len(prefix)):
            deeper = current & holders.get(prefix[depth], 0)
            if deeper != current:
                found.update(dict.fromkeys(self._group(current ^ deeper), depth))
                if not deeper:
                    return found
                current = deeper
        found.update(dict.fromkeys(self._group(current), len(prefix)))
        return found

    def depth(self, replica: str, prefix: tuple[bytes, ...]) -> int:
        """How many of its leading marks one replica holds: for a few replicas cheaper than `held`."""
        memory = self._memories.get(replica)
        if memory is None:
            return 0
        marks = memory.marks
        for depth, digest in enumerate(prefix):
            if digest not in marks:
                return depth
        return len(prefix)

    def _group(self, mask: int) -> tuple[str, ...]:
        """The replicas of a mask, remembered: a beginning that all share would cost a step for each of them every time."""
        group = self._groups.get(mask)
        if group is None:
            if len(self._groups) >= _GROUPS_MAX:
                self._groups.clear()
            group = self._groups[mask] = tuple(name for bit, name in self._names.items() if mask & bit)
        return group

    def bound(self, replica: str, kv_tokens: Tokens | None) -> None:
        """How many tokens its KV memory has room for; None: unknown."""
        memory = self._memory(replica)
        memory.tokens_max = KV_TOKENS if kv_tokens is None else kv_tokens
        self._trim(memory)

    def placed(self, replica: str, prefix: tuple[bytes, ...], tokens: Tokens) -> None:
        """A request with this beginning and so many input tokens was dispatched there, which is the latest use of its marks."""
        if not prefix:
            return
        memory = self._memory(replica)
        marks, holders, end = memory.marks, self._holders, _MARKS[len(prefix) - 1]
        for depth in range(len(prefix) - 1, -1, -1):
            digest = prefix[depth]
            if digest in marks:
                marks.move_to_end(digest)
            else:
                before = tokens * _MARKS[depth - 1] // end if depth else 0
                marks[digest] = added = tokens * _MARKS[depth] // end - before
                memory.tokens += added
                holders[digest] = holders.get(digest, 0) | memory.bit
        self._trim(memory)

    def gone(self, replica: str) -> None:
        """It is stopped or lost: nothing is held there."""
        memory = self._memories.pop(replica, None)
        if memory is None:
            return
        memory.tokens_max = -1  # less than nothing
        self._trim(memory)
        del self._names[memory.bit]
        self._bits_taken ^= memory.bit
        self._groups.clear()  # the bit will be another's

    # ── small ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _memory(self, replica: str) -> _Memory:
        memory = self._memories.get(replica)
        if memory is None:
            bit = ~self._bits_taken & (self._bits_taken + 1)  # the lowest that is free, so that masks stay short
            self._bits_taken |= bit
            self._names[bit] = replica
            memory = self._memories[replica] = _Memory(bit)
        return memory

    def _trim(self, memory: _Memory) -> None:
        marks, holders, bit = memory.marks, self._holders, memory.bit
        while marks and (memory.tokens > memory.tokens_max or len(marks) > MARKS_PER_REPLICA_MAX):
            digest, tokens = marks.popitem(last=False)
            memory.tokens -= tokens
            left = holders[digest] ^ bit
            if left:
                holders[digest] = left
            else:
                del holders[digest]
