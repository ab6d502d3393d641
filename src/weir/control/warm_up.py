"""The warm-up of a replica: it generates a little, and that shows how fast it is while it has nothing else to do.

Three generations of a few tokens each: a short prompt twice, for the first one also pays for what is loaded, compiled or
connected once, and a long one. It takes no part in readiness: the supervisor decides what a pace, or a fault, means. Its
prompts are always the same, its output is dropped. A model that makes embeddings embeds them.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice

from weir import errors
from weir.core.demands import Demands, Embedding
from weir.core.request import Message, Sampling
from weir.messages import ReplicaAddress, ReplicaPace
from weir.ports import Clock, Delta, Engine, EngineCall, EngineEnd
from weir.units import NANOS_PER_MILLI, Millis, Tokens, ceil_div

OUTPUT_TOKENS = 4
LONG_TOKENS_MAX: Tokens = 2_000
WARM_UP_MS: Millis = 60_000
_LONG_MS: Millis = 5_000  # a long prompt that would take longer to read is made shorter
_LEAST_MS = 0.001
_TELLING_TOKENS: Tokens = 16
_BYTES_PER_TOKEN = 4  # where nobody counts
_SHORT = "Name one river that flows to the sea."
_LONG = ("Rain", "over", "high", "land", "went", "down", "past", "mill", "gate", "weir")  # with a space, 5 bytes a word


@dataclass(frozen=True, slots=True)
class _Timed:
    """One generation as it was timed. input_tokens: ≥ 1, without those found in a cache; later: after the first output."""

    input_tokens: Tokens
    first_ms: float
    later_ms: float
    later_tokens: Tokens


@dataclass(frozen=True, slots=True)
class WarmUp:
    """The warm-up of one replica that runs nothing else. chat: its model takes conversations; embeds: it makes no text."""

    engine: Engine
    clock: Clock
    address: ReplicaAddress
    chat: bool
    embeds: bool = False

    async def measure(self, bound_ms: Millis = WARM_UP_MS) -> ReplicaPace:
        """Generate, and how fast that went. Raises EngineFault, also after the bound."""
        try:
            async with asyncio.timeout(bound_ms / 1e3):
                shorts = [await self._generate(_SHORT) for _ in range(2)]
                short = min(shorts, key=lambda timed: timed.first_ms)  # a late one would make input look as if it cost nothing
                return _pace_of(short, await self._generate(self._long_prompt(short)))
        except TimeoutError as late:
            raise errors.EngineError(f"The warm-up did not end within {bound_ms} ms.") from late

    def _long_prompt(self, short: _Timed) -> str:
        """About a quarter of the window, within the bounds of tokens and, by the short prompt's pace, of time."""
        readable = int(short.input_tokens * _LONG_MS / max(short.first_ms, _LEAST_MS))
        telling = short.input_tokens + 3 * _TELLING_TOKENS  # shorter, it would show nothing
        tokens = min(self.address.context_tokens // 4, LONG_TOKENS_MAX, max(readable, telling))
        return " ".join(islice(cycle(_LONG), max(1, tokens * 4 // 5)))

    async def _generate(self, text: str) -> _Timed:
        """One generation, timed. Raises EngineFault when it fails."""
        salt = f"warm-up-{self.clock.wall_ms()}-{self.clock.monotonic_ns()}"  # what an earlier warm-up left is not found
        watch = _Stopwatch(self.clock)
        call = self._call(text, salt)
        run = self.engine.start(call, watch)
        try:
            end = await watch.wait_end()
        finally:
            run.cancel()
        if end.fault is not None:
            raise end.fault
        await run.stopped()
        if end.usage is not None:
            return watch.read(end.usage.input_tokens - end.usage.cached_input_tokens)
        counted = await self.engine.count_input(self.address, call.prompt or text, call.chat)
        return watch.read(counted or ceil_div(len(text.encode()), _BYTES_PER_TOKEN))

    def _call(self, text: str, salt: str) -> EngineCall:
        if self.embeds:
            return EngineCall(self.address, 0, "", False, 1, Sampling(), salt, Demands(embedding=Embedding((text,))))
        prompt: str | tuple[Message, ...] = (Message("user", text),) if self.chat else text
        return EngineCall(self.address, 0, prompt, self.chat, OUTPUT_TOKENS, Sampling(), salt)


def _pace_of(short: _Timed, long: _Timed) -> ReplicaPace:
    """The line through both first outputs. Later tokens that did not come one by one count as the fixed part of a first.

    Where both prompts count nearly alike, as from an engine that does not count, a moment's delay would pass for the pace.
    """
    input_tokens = long.input_tokens - short.input_tokens
    input_ms = _at_least((long.first_ms - short.first_ms) / input_tokens) if input_tokens >= _TELLING_TOKENS else _LEAST_MS
    first_ms = _at_least(short.first_ms - input_ms * short.input_tokens)
    later_tokens = short.later_tokens + long.later_tokens
    output_ms = (short.later_ms + long.later_ms) / later_tokens if later_tokens else first_ms
    return ReplicaPace(first_ms, input_ms, _at_least(output_ms))


def _at_least(milliseconds: float) -> float:
    return max(_LEAST_MS, round(milliseconds, 3))


class _Stopwatch:
    """A generation's sink, made as it starts: notes when output came. A piece without a count is a token."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._started_ns = self._first_ns = self._last_ns = clock.monotonic_ns()
        self._first_tokens: Tokens = 0
        self._tokens: Tokens = 0
        self._end: EngineEnd | None = None
        self._ended = asyncio.Event()

    def on_deltas(self, deltas: Sequence[Delta]) -> None:
        """Output came."""
        self._last_ns = self._clock.monotonic_ns()
        tokens = deltas[-1].tokens or self._tokens + len(deltas)
        if not self._tokens:
            self._first_ns, self._first_tokens = self._last_ns, tokens
        self._tokens = tokens

    def on_end(self, end: EngineEnd) -> None:
        """The generation is over. Of one without output, this was what its prompt took."""
        if not self._tokens:
            self._first_ns = self._last_ns = self._clock.monotonic_ns()
        self._end = end
        self._ended.set()

    async def wait_end(self) -> EngineEnd:
        """The end, once it came."""
        await self._ended.wait()
        assert self._end is not None
        return self._end

    def read(self, input_tokens: Tokens) -> _Timed:
        """What was timed, of a generation with so many input tokens that were computed."""
        first_ms = (self._first_ns - self._started_ns) / NANOS_PER_MILLI
        later_ms = (self._last_ns - self._first_ns) / NANOS_PER_MILLI
        return _Timed(max(1, input_tokens), first_ms, later_ms, self._tokens - self._first_tokens)
