"""One attempt's output on its way to the client: what may be handed out, what is booked, and how fast it came.

The rule. Output token n is handed to the client only once a durable `delivered_max` ≥ n exists. So a crash at any moment finds
a record that is at least what was delivered, and at most two steps above it: money is never under-booked, and never over-booked
by more than a known amount. The next step is asked for one step early, which hides the write behind the generation: a stream
that is not faster than 256 tokens per group commit never waits.

What n is. The engine's cumulative count where chunks carry one; else min(UTF-8 bytes relayed, max_output), because no token is
shorter than a byte. A chunk that carries several tokens is handed out whole or not at all.

Watermarks, all in tokens of all choices, each never falling:

    delivered ≤ booked (durable) ≤ asked ≤ max_output        arrived ≥ delivered

Times. TTFT is taken when the first output byte is handed out (arrival, for answers that are not streamed). TPOT spans the
first to the last output token. Both are arguments here, never read from a clock.

What was rejected: booking every token (a write each), and booking the whole output at dispatch (over-booked by max_output).
"""

from collections import deque
from collections.abc import Sequence

from weir.core.output import Delta, ShapedDelta
from weir.units import Nanos, Tokens

DELIVERY_STEP_TOKENS = 256
"""Default step: two of them bound what a crash over-books, and one lasts seconds at reading speed."""


class TokenStream:
    """max_output: tokens ≥ 1 of all choices. first_step: the delivered_max of the dispatch, 0 for answers not streamed.

    is_whole: of an answer that is not streamed everything is held for `drain`, also what has no tokens.
    """

    __slots__ = (
        "_held",
        "_is_whole",
        "_max",
        "_step",
        "_text_bytes",
        "arrived",
        "asked",
        "booked",
        "delivered",
        "first_ns",
        "held_bytes",
        "last_ns",
    )

    def __init__(
        self, max_output: Tokens, first_step: Tokens, step: Tokens = DELIVERY_STEP_TOKENS, *, is_whole: bool = False
    ) -> None:
        self._max = max_output
        self._step = step
        self._is_whole = is_whole
        self._held: deque[tuple[Tokens, Delta]] = deque()
        self._text_bytes = 0
        self.arrived: Tokens = 0
        self.asked: Tokens = first_step
        self.booked: Tokens = 0
        self.delivered: Tokens = 0
        self.held_bytes = 0
        self.first_ns: Nanos | None = None
        self.last_ns: Nanos | None = None

    def arrive(self, pieces: Sequence[Delta], now_ns: Nanos) -> list[Delta]:
        """Take in one read's pieces; returns those that may be handed out now, in order."""
        out: list[Delta] = []
        for piece in pieces:
            text = piece.text
            count = piece.tokens
            if count is None:
                self._text_bytes += len(text) if text.isascii() else len(text.encode())
                if isinstance(piece, ShapedDelta):
                    self._text_bytes += piece.generated_bytes
                count = self._text_bytes
            count = max(self.arrived, min(count, self._max))
            self.arrived = count
            if not text and not piece.extra_bytes:
                continue
            if self.first_ns is None:
                self.first_ns = now_ns
            if count <= self.booked and not self._held and not self._is_whole:
                self.delivered = count
                out.append(piece)
            else:
                self._held.append((count, piece))
                self.held_bytes += len(text.encode()) + piece.extra_bytes
        if self.arrived:
            self.last_ns = now_ns
        return out

    def book(self, delivered_max: Tokens) -> list[Delta]:
        """A step became durable; returns the held pieces that it lets out, in order."""
        self.booked = max(self.booked, delivered_max)
        out: list[Delta] = []
        while self._held and self._held[0][0] <= self.booked and not self._is_whole:
            count, piece = self._held.popleft()
            self.held_bytes -= len(piece.text.encode()) + piece.extra_bytes
            self.delivered = count
            out.append(piece)
        return out

    def ask(self) -> Tokens | None:
        """The next delivered_max to ask for, or None while the present one is far enough ahead.

        Never more than two steps above what was delivered, however much arrives while the store is slow; only a single piece
        that is larger by itself is asked for whole.
        """
        if self.asked >= self._max or self.arrived <= self.asked - self._step:
            return None
        next_piece = self._held[0][0] if self._held else 0
        wanted = min(self._max, max(self.asked, self.arrived) + self._step, max(self.delivered + 2 * self._step, next_piece))
        if wanted <= self.asked:
            return None
        self.asked = wanted
        return wanted

    def drain(self) -> list[Delta]:
        """Everything held, for an answer that is not streamed: it leaves whole, once its settlement is durable."""
        pieces = [piece for _, piece in self._held]
        self._held.clear()
        self.held_bytes = 0
        return pieces

    @property
    def held(self) -> list[Delta]:
        """What `drain` would give."""
        return [piece for _, piece in self._held]

    @property
    def is_held(self) -> bool:
        """Whether output waits for a durable step."""
        return bool(self._held)

    def tpot_ms(self, output_tokens: Tokens) -> float | None:
        """Milliseconds per output token after the first; None for fewer than two tokens."""
        if self.first_ns is None or self.last_ns is None or output_tokens < 2:
            return None
        return (self.last_ns - self.first_ns) / 1e6 / (output_tokens - 1)
