"""One attempt as the gateway has it: its grant, the engine's run, its output so far and what it used.

It keeps state and computes figures from it; the relay decides what is handed out and when it ends. A request that is granted
a second attempt gets a new one: nothing of the first, neither text nor counts nor booked steps, passes over.
"""

from weir import errors
from weir.core.endings import FinishReason
from weir.core.metering import Basis, InputBasis
from weir.core.stream import TokenStream
from weir.gateway.planning import Plan
from weir.messages import AttemptUsage, Granted, Run, Stopped
from weir.ports import Delta, EngineEnd, EngineRun
from weir.units import Nanos, Tokens, ceil_div

_REPORTED_MAX: Tokens = 2**53


class Attempt:
    """granted: None until the coordinator grants it; run: set with it. pieces: released before the headers were out.

    counted: the engine counts its tokens on its chunks. held_since_ns: since when output waits for a durable step.
    stopped: what the coordinator was told of the engine's stop, None while it runs.
    """

    def __init__(self, plan: Plan, step_tokens: Tokens) -> None:
        self._plan = plan
        self._paused = False
        request = plan.request
        most = plan.max_output_tokens * request.demands.choices
        self.stream = TokenStream(most, 0, step_tokens, is_whole=not request.stream)
        self.granted: Granted | None = None
        self.granted_ns: Nanos = 0
        self.stopped: Stopped | None = None
        self.run: EngineRun | None = None
        self.end: EngineEnd | None = None
        self.counted = False
        self.detail: str | None = None
        self.pieces: list[Delta] = []
        self.held_since_ns: Nanos | None = None

    @property
    def number(self) -> int:
        """1 or 2; 0 while it is not granted."""
        return self.granted.attempt if self.granted is not None else 0

    def told(self, now_ns: Nanos, *, first_output: bool) -> Run | None:
        """What another coordinator must know of it; None if it was never granted. first_output: handed to the client."""
        granted = self.granted
        if granted is None:
            return None
        return Run(
            attempt=granted.attempt,
            replica=granted.replica,
            lane=granted.lane,
            since_ns=now_ns - self.granted_ns,
            delivered_max=self.stream.asked,
            has_output=self.stream.arrived > 0,
            first_output=first_output,
            is_stopped=self.stopped is not None and self.stopped.confirmed,
        )

    @property
    def is_paused(self) -> bool:
        """Whether the engine is held back."""
        return self._paused

    def hold_back(self, wanted: bool) -> None:
        """Pause the engine, or let it go on; idempotent."""
        if self.run is None or wanted == self._paused:
            return
        self._paused = wanted
        if wanted:
            self.run.pause()
        else:
            self.run.resume()

    @property
    def reached(self) -> bool:
        """False once it is known that its replica never got the request."""
        fault = self.end.fault if self.end is not None else None
        return not isinstance(fault, errors.ReplicaLost) or fault.reached

    def output_tokens(self) -> Tokens:
        """The engine's own figure where it arrived, else what was counted here."""
        usage = self.end.usage if self.end else None
        return _sendable(usage.output_tokens if usage else self.stream.arrived)

    def tpot_ms(self) -> float | None:
        """Milliseconds per output token of one choice: all are made at once, so that several are no faster than one."""
        choices = self._plan.request.demands.choices
        return self.stream.tpot_ms(min(_REPORTED_MAX, ceil_div(max(0, self.output_tokens()), choices)))

    def usage(self, reason: FinishReason) -> AttemptUsage | None:
        """What it used when it ended for this reason; None if it was never granted."""
        if self.granted is None:
            return None
        measured = self.end.usage if self.end else None
        if measured is not None:
            read, cached = _sendable(measured.input_tokens), _sendable(measured.cached_input_tokens)
            return AttemptUsage(read, cached, _sendable(measured.output_tokens), Basis.ENGINE)
        if reason is FinishReason.ENGINE_REJECTED:
            return AttemptUsage(0, 0, 0, Basis.ENGINE)
        exact = self.counted and self._plan.input_basis is InputBasis.EXACT
        basis = Basis.ENGINE if exact else Basis.ESTIMATED
        return AttemptUsage(self._plan.input_tokens, 0, _sendable(self.stream.arrived), basis)


def _sendable(reported: Tokens) -> Tokens:
    """What an engine reported, no further from zero than a message carries; absurd it is either way."""
    return max(-_REPORTED_MAX, min(reported, _REPORTED_MAX))
