"""What a replica has room for beside its lanes: tokens in its KV memory, and prompt tokens that it has still to read.

KV tokens are reserved at dispatch, input and expected output, and corrected as the answer grows beyond that. Prompt tokens
queue until the first output; how many may be before a request depends on its class, and on whether it waits alone or is one of
many of its tenant; its own do not count, or a long one would wait for ever. Own counts are the truth: nothing here waits for an
engine's metrics. A replica that runs nothing takes whatever comes, so that no figure can lock it.
"""

import msgspec

from weir.units import NANOS_PER_MILLI, Bytes, Millis, Nanos, Tokens


class Need(msgspec.Struct, frozen=True, gc=False):
    """What a request takes of a replica. kv_tokens: its input and expected output. prefix: digests of its beginnings.

    prefix_bytes: of the whole input. backlog_ms: how long the prompts before it may take to be read; None: no bound.
    of_many_backlog_ms: the same while more of its tenant wait; None: no other.
    """

    kv_tokens: Tokens = 0
    input_tokens: Tokens = 0
    prefix: tuple[bytes, ...] = ()
    prefix_bytes: Bytes = 0
    backlog_ms: Millis | None = None
    of_many_backlog_ms: Millis | None = None

    def of_many(self) -> "Need":
        """The same while more of its tenant wait: what asks for more than it gets is read a little at a time."""
        if self.of_many_backlog_ms is None:
            return self
        bound_ms = self.of_many_backlog_ms
        return Need(self.kv_tokens, self.input_tokens, self.prefix, self.prefix_bytes, bound_ms, bound_ms)


NOTHING = Need()


class Room:
    """Of one replica. kv_tokens_max, and input_ms: to read a prompt token; None while unknown, which bounds nothing."""

    __slots__ = ("_kv_tokens", "_prefills", "_reading_since_ns", "input_ms", "kv_tokens", "kv_tokens_max", "prefill_tokens")

    def __init__(self) -> None:
        self.kv_tokens_max: Tokens | None = None
        self.input_ms: float | None = None
        self.kv_tokens: Tokens = 0
        self.prefill_tokens: Tokens = 0
        self._kv_tokens: dict[int, Tokens] = {}  # by lane
        self._prefills: dict[int, Tokens] = {}  # of lanes without output
        self._reading_since_ns: Nanos = 0  # the prompt that is read now

    @property
    def left(self) -> Tokens:
        """KV tokens that are not reserved; of a memory that is not known, the fewer the more is."""
        return (self.kv_tokens_max or 0) - self.kv_tokens

    def holds(self, kv_tokens: Tokens) -> bool:
        """Whether the memory has room for so many more, or nothing is in it."""
        return not self._kv_tokens or self.kv_tokens_max is None or self.kv_tokens + kv_tokens <= self.kv_tokens_max

    def fits(self, need: Need) -> bool:
        """Whether this may start beside what runs."""
        kv_tokens_max = self.kv_tokens_max
        if kv_tokens_max is not None and not self.holds(need.kv_tokens):
            return False
        if not self.prefill_tokens or self.input_ms is None or need.backlog_ms is None:
            return True
        return self.prefill_tokens * self.input_ms < need.backlog_ms

    def unread_ms(self, now_ns: Nanos) -> float:
        """Until the prompts that it has are read, at its pace: 0 while that is unknown."""
        passed_ms = (now_ns - self._reading_since_ns) / NANOS_PER_MILLI
        return max(0.0, self.prefill_tokens * (self.input_ms or 0.0) - passed_ms)

    def take(self, lane: int, kv_tokens: Tokens, prefill_tokens: Tokens, now_ns: Nanos) -> None:
        """A request starts on this lane."""
        if not self._prefills:
            self._reading_since_ns = now_ns
        self._kv_tokens[lane] = kv_tokens
        self._prefills[lane] = prefill_tokens
        self.kv_tokens += kv_tokens
        self.prefill_tokens += prefill_tokens

    def taken(self, lane: int) -> Tokens:
        """KV tokens that are reserved for a lane that is taken."""
        return self._kv_tokens[lane]

    def prefilled(self, lane: int, now_ns: Nanos) -> None:
        """Its first output exists, and the next prompt is read."""
        self.prefill_tokens -= self._prefills.pop(lane, 0)
        self._reading_since_ns = now_ns

    def grew(self, lane: int, kv_tokens: Tokens) -> None:
        """Input and output are so many tokens by now; less than was reserved changes nothing."""
        more = kv_tokens - self._kv_tokens[lane]
        if more > 0:
            self._kv_tokens[lane] = kv_tokens
            self.kv_tokens += more

    def free(self, lane: int) -> None:
        """The lane is free again."""
        self.prefill_tokens -= self._prefills.pop(lane, 0)
        self.kv_tokens -= self._kv_tokens.pop(lane)
