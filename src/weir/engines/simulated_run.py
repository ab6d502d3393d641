"""One generation of the simulated engine: what its sink was told, what waits while it is paused, and how it ended.

The batch decides when a token exists; this says it to the sink, in order and once, and never after the end or a cancel.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from weir.engines.simulated_text import Script
from weir.errors import EngineRejected, ReplicaLost
from weir.ports import Delta, EngineEnd, EngineSink, EngineUsage
from weir.units import Millis, Tokens


class Reply(Protocol):
    """A reply that is known beforehand; tokens: its length."""

    @property
    def tokens(self) -> Tokens: ...


class SequenceRun(Protocol):
    """What the driver of a batch does with one of its sequences. on_cancel: takes it out of the batch, None while in none."""

    input_tokens: Tokens
    on_cancel: Callable[[], None] | None

    @property
    def reply(self) -> Reply: ...

    def begin(self, cached_tokens: Tokens) -> None: ...
    def emit(self, tokens: Tokens) -> None: ...
    def complete(self) -> None: ...
    def fail(self, fault: EngineRejected | ReplicaLost) -> None: ...
    def cancel(self) -> None: ...
    def leave(self, *, lost: bool = False) -> None: ...


class SimulatedRun:
    """An EngineRun. on_cancel: takes it out of its batch, None while it is in none."""

    def __init__(self, sink: EngineSink, reply: Script | None, input_tokens: Tokens, stop_ms: Millis) -> None:
        """reply: None where its choices have theirs."""
        self._reply = reply
        self.input_tokens = input_tokens
        self._cached_tokens: Tokens | None = None
        self.on_cancel: Callable[[], None] | None = None
        self._sink = sink
        self._stop_ms = stop_ms
        self._paused = False
        self._silent = False  # the sink was told the end, or is not to be told
        self._emitted: Tokens = 0
        self._pending: list[Delta] = []
        self._pending_end: EngineEnd | None = None
        self._out = asyncio.Event()
        self._lost = False

    def sequences(self) -> "Sequence[SequenceRun]":
        """What the batch computes for it."""
        return (self,)

    @property
    def reply(self) -> Script:
        """The whole reply."""
        assert self._reply is not None
        return self._reply

    def pause(self) -> None:
        """The engine goes on; its output waits here, at most the reply's length."""
        self._paused = True

    def resume(self) -> None:
        """What waited arrives in one piece, on the loop."""
        if self._paused:
            self._paused = False
            asyncio.get_running_loop().call_soon(self._flush)

    def cancel(self) -> None:
        """Leaves the batch at the next step."""
        self._silent = True
        if self.on_cancel is not None:
            self.on_cancel()

    async def stopped(self) -> None:
        """Returns once the batch holds it no more. Raises ReplicaLost when the replica is lost or silent for too long."""
        try:
            async with asyncio.timeout(self._stop_ms / 1_000):
                await self._out.wait()
        except TimeoutError:
            raise ReplicaLost("The replica did not confirm the stop") from None
        if self._lost:
            raise ReplicaLost("The replica was lost before it confirmed the stop")

    def begin(self, cached_tokens: Tokens) -> None:
        """The batch computes it from now on; cached_tokens: found in the prefix cache. Starting over changes no usage."""
        if self._cached_tokens is None:
            self._cached_tokens = cached_tokens

    def emit(self, tokens: Tokens) -> None:
        """One more token exists; tokens: the cumulative count."""
        self._emitted = tokens
        if self._silent:
            return
        self._tell(self.piece_of(tokens))

    def _tell(self, delta: Delta) -> None:
        """A piece, now or behind what waits."""
        if self._paused or self._pending:
            self._pending.append(delta)
        else:
            self._sink.on_deltas((delta,))

    def complete(self) -> None:
        """The reply ended by itself."""
        self.leave()
        self.end(EngineEnd(self.reply.reason, self.usage(), output_tokens_seen=self._emitted))

    def piece_of(self, tokens: Tokens) -> Delta:
        """What the newest of so many tokens adds."""
        return Delta(self.reply.piece(tokens - 1), tokens)

    def usage(self) -> EngineUsage:
        """What it used when it ended by itself."""
        return EngineUsage(self.input_tokens, self._cached_tokens or 0, self._emitted)

    def fail(self, fault: EngineRejected | ReplicaLost) -> None:
        """The run is over with a fault."""
        self.end(EngineEnd(None, None, fault, self._emitted or None))

    def leave(self, *, lost: bool = False) -> None:
        """The batch holds it no more. lost: nobody can confirm that, the replica is gone."""
        self._lost = lost
        self._out.set()

    def end(self, end: EngineEnd) -> None:
        """Tell the sink, after everything that waits."""
        if self._silent:
            return
        if self._paused or self._pending:
            self._pending_end = end
        else:
            self._silent = True
            self._sink.on_end(end)

    def _flush(self) -> None:
        if self._paused or self._silent:
            return
        pending, self._pending = self._pending, []
        if pending:
            self._sink.on_deltas(pending)
        end, self._pending_end = self._pending_end, None
        if end is not None:
            self.end(end)
