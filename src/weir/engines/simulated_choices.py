"""A generation of the simulated engine that is more than one text: one sequence of the batch for each choice, one sink for all.

It counts what all choices made, tells each one's end where there are several, and ends once all have.
"""

from collections.abc import Callable, Sequence

from weir.core.endings import FinishReason
from weir.core.output import end_of_all
from weir.engines.simulated_replies import ShapedReply
from weir.engines.simulated_run import SimulatedRun
from weir.errors import EngineRejected, ReplicaLost
from weir.ports import EngineEnd, EngineSink
from weir.units import Millis, Tokens


class ChoiceRun:
    """One choice's sequence, as the batch's driver has it."""

    def __init__(self, whole: "ChoicesRun", reply: ShapedReply) -> None:
        self.reply = reply
        self.input_tokens = whole.input_tokens
        self.on_cancel: Callable[[], None] | None = None
        self._whole = whole

    def begin(self, cached_tokens: Tokens) -> None:
        """The batch computes it from now on."""
        self._whole.begin(cached_tokens)

    def emit(self, tokens: Tokens) -> None:
        """One more token of it exists."""
        self._whole.emit_of(self.reply, tokens)

    def complete(self) -> None:
        """It ended by itself."""
        self._whole.complete_of(self.reply)

    def fail(self, fault: EngineRejected | ReplicaLost) -> None:
        """All are over with a fault, told once."""
        self._whole.fail(fault)

    def cancel(self) -> None:
        """All leave the batch."""
        self._whole.cancel()

    def leave(self, *, lost: bool = False) -> None:
        """The batch holds it no more."""
        self._whole.left(lost=lost)


class ChoicesRun(SimulatedRun):
    """An EngineRun of several sequences."""

    def __init__(self, sink: EngineSink, replies: Sequence[ShapedReply], input_tokens: Tokens, stop_ms: Millis) -> None:
        super().__init__(sink, None, input_tokens, stop_ms)
        self._choices = tuple(ChoiceRun(self, reply) for reply in replies)
        self._ended: list[FinishReason] = []
        self._within = len(self._choices)

    def sequences(self) -> Sequence[ChoiceRun]:
        """One for each choice."""
        return self._choices

    def cancel(self) -> None:
        """Leaves the batch at the next step, with every choice."""
        super().cancel()
        for choice in self._choices:
            if choice.on_cancel is not None:
                choice.on_cancel()

    def emit_of(self, reply: ShapedReply, tokens: Tokens) -> None:
        """One more token of a choice exists; tokens: of that choice."""
        self._emitted += 1
        if self._silent:
            return
        delta = reply.piece(tokens - 1)
        delta.tokens = self._emitted
        if tokens == reply.tokens and len(self._choices) > 1:
            delta.finish = reply.reason
        self._tell(delta)

    def complete_of(self, reply: ShapedReply) -> None:
        """A choice ended by itself."""
        self._ended.append(reply.reason)
        self.left()
        if len(self._ended) == len(self._choices):
            self.end(EngineEnd(end_of_all(self._ended), self.usage(), output_tokens_seen=self._emitted))

    def left(self, *, lost: bool = False) -> None:
        """The batch holds one choice less."""
        self._within -= 1
        if self._within <= 0 or lost:
            self.leave(lost=lost)
