"""Which sequences the next engine step computes, and what it yields: continuous batching as vLLM schedules it.

Running decodes come first, then started prefills, then new sequences while the step's token budget, the number of running
sequences and the KV blocks allow. A step is scheduled, takes its time, and is then completed: tokens exist at its end, and a
cancelled sequence leaves at the boundary after it. Where blocks run out, the newest sequence gives up its own and starts over.
Pure: the shell in `simulated` waits and talks, this never does.
"""

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from weir.engines.simulated_blocks import BLOCK_TOKENS, BlockPool, Holding
from weir.engines.step_time import StepTime
from weir.units import Tokens

WATERMARK_DIVISOR = 100
"""A hundredth of the blocks stays free when a sequence starts beside others, so that these do not run out at once."""


@dataclass(slots=True, eq=False)
class _Sequence:
    id: int
    prompt_tokens: Tokens
    output_tokens: Tokens
    holding: Holding
    known: Tokens  # prompt and emitted tokens: all of them must be computed before the next one exists
    computed: Tokens = 0  # tokens whose keys and values exist; kept up to date while it is not decoding
    room: Tokens = 0  # tokens that its blocks have room for
    decoding: bool = False
    counted: bool = False  # whether its look-up in the prefix cache is in the counters
    cancelled: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """One scheduled step: what it computes and how long that takes. prefills: (sequence id, chunk's tokens), in order.

    started: (sequence id, prompt tokens found in the prefix cache) of sequences that start here, or start over.
    """

    duration_ms: float
    decodes: tuple[int, ...]
    prefills: tuple[tuple[int, Tokens], ...]
    started: tuple[tuple[int, Tokens], ...] = ()


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a step yielded. emitted: (sequence id, cumulative output tokens), one new token each; finished: ids that left."""

    emitted: list[tuple[int, Tokens]] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)


class SimulatedBatch:
    """The sequences of one replica. concurrency: running sequences at most, ≥ 1. kv_tokens: None for those of the row.

    Call order: `schedule`, then `complete` with its step once its duration has passed, then `sweep`; submit and cancel anytime.
    Counters: preemptions; prefix_queries and prefix_hits, in prompt tokens looked up and found when a sequence first started.
    """

    def __init__(self, step_time: StepTime, concurrency: int, kv_tokens: Tokens | None = None) -> None:
        assert concurrency >= 1
        self.preemptions = 0
        self.prefix_queries: Tokens = 0
        self.prefix_hits: Tokens = 0
        self._step_time = step_time
        self._concurrency = concurrency
        self._pool = BlockPool((step_time.row.kv_tokens if kv_tokens is None else kv_tokens) // BLOCK_TOKENS)
        self._sequences: dict[int, _Sequence] = {}
        self._running: list[_Sequence] = []  # in the order in which they started
        self._waiting: deque[_Sequence] = deque()
        self._cancelled: set[int] = set()

    @property
    def running(self) -> int:
        """Sequences that were started and have neither left nor been preempted."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Sequences that are to start, or to start over."""
        return len(self._waiting)

    @property
    def kv_tokens(self) -> Tokens:
        """Tokens that all blocks together have room for; prompt and output of no sequence may be more."""
        return self._pool.total * BLOCK_TOKENS

    @property
    def kv_usage(self) -> float:
        """The share of blocks that running sequences hold, 0 … 1."""
        return self._pool.used / self._pool.total

    def submit(
        self,
        sequence_id: int,
        prompt_tokens: Tokens,
        output_tokens: Tokens,
        block_keys: Sequence[Hashable] = (),
        salt: str = "",
    ) -> None:
        """Queue a sequence that will emit output_tokens ≥ 1 after its prompt_tokens ≥ 1. sequence_id: unused so far.

        block_keys: what the prompt's blocks of BLOCK_TOKENS contain, in order; equal keys are equal tokens, and a prefix with
        equal keys and salt is not computed twice. One of a block that is not full is ignored; without any, nothing is cached.
        """
        assert sequence_id not in self._sequences and prompt_tokens >= 1 and output_tokens >= 1
        assert prompt_tokens + output_tokens <= self.kv_tokens
        holding = Holding(salt, block_keys[: prompt_tokens // BLOCK_TOKENS])
        sequence = _Sequence(sequence_id, prompt_tokens, output_tokens, holding, prompt_tokens)
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
        self._remove(freed)
        return freed

    def schedule(self) -> Step | None:
        """The next step; None when there is nothing to compute. New sequences in it count as running from now on."""
        budget = self._step_time.row.step_tokens_max
        decodes = self._decodes(budget)
        chunks = self._continued(budget - len(decodes))
        started = self._start(budget - len(decodes) - sum(chunk for _, chunk in chunks), chunks)
        if not decodes and not chunks:
            return None
        duration_ms = self._step_time.milliseconds(
            len(decodes),
            sum(chunk for _, chunk in chunks),
            sum([sequence.known for sequence in decodes]),
            sum(chunk * (sequence.computed + chunk / 2) for sequence, chunk in chunks),
        )
        decode_ids = tuple([sequence.id for sequence in decodes])
        return Step(duration_ms, decode_ids, tuple((sequence.id, chunk) for sequence, chunk in chunks), tuple(started))

    def complete(self, step: Step) -> StepOutcome:
        """Book the step that `schedule` gave last: its tokens exist now, and finished sequences have left."""
        prefilled: list[int] = []
        for sequence_id, chunk in step.prefills:
            sequence = self._sequences[sequence_id]
            sequence.computed += chunk
            if sequence.computed == sequence.known:
                sequence.decoding = True
                prefilled.append(sequence_id)
        outcome = StepOutcome()
        self._emit(step.decodes, outcome)
        self._emit(prefilled, outcome)
        if outcome.finished:
            self._remove(outcome.finished)
            self._running = [sequence for sequence in self._running if sequence.id in self._sequences]
        return outcome

    def _decodes(self, budget: Tokens) -> list[_Sequence]:
        """The sequences that decode one token each, oldest first. Who preempts takes from the end of this order."""
        decodes: list[_Sequence] = []
        for sequence in [sequence for sequence in self._running if sequence.decoding][:budget]:
            if not sequence.decoding or (sequence.known > sequence.room and not self._grow(sequence, sequence.known)):
                break
            decodes.append(sequence)
        return decodes

    def _continued(self, budget: Tokens) -> list[tuple[_Sequence, Tokens]]:
        """Chunks of started prefills. Without blocks such a one, always newer than any decode, preempts itself."""
        chunks: list[tuple[_Sequence, Tokens]] = []
        for sequence in [sequence for sequence in self._running if not sequence.decoding]:
            chunk = min(budget, sequence.known - sequence.computed)
            if not chunk or not self._grow(sequence, sequence.computed + chunk):
                break
            chunks.append((sequence, chunk))
            budget -= chunk
        return chunks

    def _start(self, budget: Tokens, chunks: list[tuple[_Sequence, Tokens]]) -> list[tuple[int, Tokens]]:
        """Let waiting sequences start, oldest first, and add their chunks; who started, with its hits."""
        started: list[tuple[int, Tokens]] = []
        while budget > 0 and (sequence := self._startable()) is not None:
            self._waiting.popleft()
            self._running.append(sequence)
            if not sequence.counted:
                sequence.counted = True
                self.prefix_queries += sequence.prompt_tokens if sequence.holding.keys else 0
                self.prefix_hits += sequence.computed
            started.append((sequence.id, sequence.computed))
            chunk = min(budget, sequence.known - sequence.computed)
            self._grow(sequence, sequence.computed + chunk)
            chunks.append((sequence, chunk))
            budget -= chunk
        return started

    def _startable(self) -> _Sequence | None:
        """The oldest waiting sequence, holding its cached prefix, if what it knows fits above the watermark; none passes it."""
        if not self._waiting or len(self._running) >= self._concurrency:
            return None
        spare = self._pool.available - (self._pool.total // WATERMARK_DIVISOR if self._running else 0)
        if spare <= 0:
            return None
        sequence = self._waiting[0]
        found = self._pool.find(sequence.holding, sequence.known - 1)
        if self._pool.needed(found, sequence.known) > spare:
            return None
        self._pool.take(sequence.holding, found)
        sequence.computed = len(found) * BLOCK_TOKENS
        return sequence

    def _grow(self, sequence: _Sequence, tokens: Tokens) -> bool:
        """Room for a sequence's first `tokens`, at the cost of the newest ones; False when that is the sequence itself.

        Who is preempted cannot start over in the same step: it would need at least the blocks that it just gave up.
        """
        while not self._pool.grow(sequence.holding, tokens):
            victim = self._running.pop()
            self._pool.release(victim.holding)
            victim.computed, victim.decoding = 0, False
            self._waiting.appendleft(victim)
            self.preemptions += 1
            if victim is sequence:
                return False
        sequence.room = sequence.holding.tokens
        return True

    def _emit(self, ids: Iterable[int], outcome: StepOutcome) -> None:
        for sequence_id in ids:
            sequence = self._sequences[sequence_id]
            if sequence.cancelled:
                continue
            sequence.known += 1
            tokens = sequence.known - sequence.prompt_tokens
            outcome.emitted.append((sequence_id, tokens))
            if tokens == sequence.output_tokens:
                outcome.finished.append(sequence_id)

    def _remove(self, ids: Iterable[int]) -> None:
        for sequence_id in ids:
            self._pool.release(self._sequences.pop(sequence_id).holding)
