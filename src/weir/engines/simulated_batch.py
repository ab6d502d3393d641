"""Which sequences the next engine step computes, and what it yields: continuous batching as vLLM schedules it.

Running decodes come first, then started prefills, then new sequences while the step's token budget and the number of running
sequences allow. A step is scheduled, takes its time, and is then completed: tokens exist at its end, and a cancelled sequence
leaves at the boundary after it. Pure: the shell in `simulated` waits and talks, this never does.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from weir.engines.step_time import StepTime
from weir.units import Tokens


@dataclass(slots=True, eq=False)
class _Sequence:
    id: int
    prompt_tokens: Tokens
    output_tokens: Tokens
    computed: Tokens = 0  # prompt tokens whose keys and values exist
    emitted: Tokens = 0
    cancelled: bool = False

    @property
    def decoding(self) -> bool:
        return self.computed == self.prompt_tokens


@dataclass(frozen=True, slots=True)
class Step:
    """One scheduled step: what it computes and how long that takes. prefills: (sequence id, chunk's tokens), in order."""

    duration_ms: float
    decodes: tuple[int, ...]
    prefills: tuple[tuple[int, Tokens], ...]


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a step yielded. emitted: (sequence id, cumulative output tokens), one new token each; finished: ids that left."""

    emitted: list[tuple[int, Tokens]] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)


class SimulatedBatch:
    """The sequences of one replica. concurrency: running sequences at most, ≥ 1.

    Call order: `schedule`, then `complete` with its step once its duration has passed, then `sweep`; submit and cancel anytime.
    """

    def __init__(self, step_time: StepTime, concurrency: int) -> None:
        assert concurrency >= 1
        self._step_time = step_time
        self._concurrency = concurrency
        self._sequences: dict[int, _Sequence] = {}
        self._running: list[_Sequence] = []
        self._waiting: deque[_Sequence] = deque()
        self._cancelled: set[int] = set()

    @property
    def running(self) -> int:
        """Sequences that were started and have not left."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Sequences that were never part of a step."""
        return len(self._waiting)

    def submit(self, sequence_id: int, prompt_tokens: Tokens, output_tokens: Tokens) -> None:
        """Queue a sequence that will emit output_tokens ≥ 1 after its prompt_tokens ≥ 1. sequence_id: unused so far."""
        assert sequence_id not in self._sequences and prompt_tokens >= 1 and output_tokens >= 1
        sequence = _Sequence(sequence_id, prompt_tokens, output_tokens)
        self._sequences[sequence_id] = sequence
        self._waiting.append(sequence)

    def cancel(self, sequence_id: int) -> None:
        """It emits nothing more and leaves at the next `sweep`; idempotent, also for one that left."""
        sequence = self._sequences.get(sequence_id)
        if sequence is not None:
            sequence.cancelled = True
            self._cancelled.add(sequence_id)

    def sweep(self) -> list[int]:
        """Remove what was cancelled, between two steps; the ids removed, oldest first."""
        if not self._cancelled:
            return []
        freed = sorted(self._cancelled)
        self._cancelled.clear()
        self._running = [sequence for sequence in self._running if not sequence.cancelled]
        self._waiting = deque(sequence for sequence in self._waiting if not sequence.cancelled)
        for sequence_id in freed:
            del self._sequences[sequence_id]
        return freed

    def schedule(self) -> Step | None:
        """The next step; None when there is nothing to compute. New sequences in it count as running from now on."""
        decodes = [sequence for sequence in self._running if sequence.decoding]
        budget = self._step_time.row.step_tokens_max
        decodes = decodes[:budget]
        budget -= len(decodes)
        chunks: list[tuple[_Sequence, Tokens]] = []
        prefilling = self._prefilling()
        while budget > 0 and (sequence := next(prefilling, None)) is not None:
            chunk = min(budget, sequence.prompt_tokens - sequence.computed)
            chunks.append((sequence, chunk))
            budget -= chunk
        if not decodes and not chunks:
            return None
        duration_ms = self._step_time.milliseconds(
            len(decodes),
            sum(chunk for _, chunk in chunks),
            sum(sequence.prompt_tokens + sequence.emitted for sequence in decodes),
            sum(chunk * (sequence.computed + chunk / 2) for sequence, chunk in chunks),
        )
        decode_ids = tuple(sequence.id for sequence in decodes)
        return Step(duration_ms, decode_ids, tuple((sequence.id, chunk) for sequence, chunk in chunks))

    def complete(self, step: Step) -> StepOutcome:
        """Book the step that `schedule` gave last: its tokens exist now, and finished sequences have left."""
        for sequence_id, chunk in step.prefills:
            self._sequences[sequence_id].computed += chunk
        prefilled = (sequence_id for sequence_id, _ in step.prefills if self._sequences[sequence_id].decoding)
        outcome = StepOutcome()
        self._emit(step.decodes, outcome)
        self._emit(prefilled, outcome)
        if outcome.finished:
            for sequence_id in outcome.finished:
                del self._sequences[sequence_id]
            self._running = [sequence for sequence in self._running if sequence.id in self._sequences]
        return outcome

    def _prefilling(self) -> Iterator[_Sequence]:
        """Started prefills, then new sequences, each of which starts as it is taken."""
        yield from [sequence for sequence in self._running if not sequence.decoding]
        while self._waiting and self._can_start():
            sequence = self._waiting.popleft()
            self._running.append(sequence)
            yield sequence

    def _can_start(self) -> bool:
        """Whether the oldest waiting sequence may start: the place where KV blocks would be counted."""
        return len(self._running) < self._concurrency

    def _emit(self, ids: Iterable[int], outcome: StepOutcome) -> None:
        for sequence_id in ids:
            sequence = self._sequences[sequence_id]
            if sequence.cancelled:
                continue
            sequence.emitted += 1
            outcome.emitted.append((sequence_id, sequence.emitted))
            if sequence.emitted == sequence.output_tokens:
                outcome.finished.append(sequence_id)
