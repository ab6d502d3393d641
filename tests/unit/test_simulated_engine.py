"""The simulated batch schedules as vLLM does, and its replies and counts depend on nothing but the request."""

import asyncio
from collections.abc import Sequence
from statistics import median

import pytest

from weir.core.endings import FinishReason
from weir.core.metering import upper_bound_of_input
from weir.core.registry.model import EngineKind
from weir.core.request import Message, Sampling
from weir.engines.simulated import SimulatedEngine, SimulatedReplica
from weir.engines.simulated_batch import SimulatedBatch, StepOutcome
from weir.engines.simulated_text import ReplyBounds, count_prompt_tokens, natural_output_tokens, script
from weir.engines.step_time import step_time
from weir.messages import ReplicaAddress
from weir.ports import Delta, EngineCall, EngineEnd
from weir.sim.random_source import seeded_random, step_noise
from weir.sim.virtual_loop import VirtualLoop, run_seeds

LLAMA_ROW = "llama3.1-8b/h100_sxm/tp1"
LLAMA = step_time(LLAMA_ROW)


def _advance(batch: SimulatedBatch) -> StepOutcome:
    step = batch.schedule()
    assert step is not None
    outcome = batch.complete(step)
    batch.sweep()
    return outcome


# ── the batch ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_decodes_then_started_prefills_then_new_sequences() -> None:
    """The token budget of a step goes first to what runs, in vLLM's order, and prompts are cut to what is left."""
    batch = SimulatedBatch(LLAMA, concurrency=8)
    batch.submit(1, 100, 5)
    assert _advance(batch).emitted == [(1, 1)]
    batch.submit(2, 10_000, 5)
    batch.submit(3, 500, 5)
    step = batch.schedule()
    assert step is not None
    assert (step.decodes, step.prefills) == ((1,), ((2, 8_191),))
    assert step.duration_ms == pytest.approx(LLAMA.milliseconds(1, 8_191, 101, 8_191**2 / 2))
    assert (batch.running, batch.waiting) == (2, 1)
    assert batch.complete(step).emitted == [(1, 2)]
    step = batch.schedule()
    assert step is not None
    assert (step.decodes, step.prefills) == ((1,), ((2, 1_809), (3, 500)))
    assert step.duration_ms == pytest.approx(LLAMA.milliseconds(1, 2_309, 102, 1_809 * (8_191 + 1_809 / 2) + 500**2 / 2))
    assert batch.complete(step).emitted == [(1, 3), (2, 1), (3, 1)]


def test_running_sequences_are_bounded_and_start_in_order() -> None:
    """No more sequences run than the replica's limit; the oldest waiting one starts as soon as one has left."""
    batch = SimulatedBatch(LLAMA, concurrency=2)
    for number, length in ((1, 1), (2, 3), (3, 2), (4, 1)):
        batch.submit(number, 10, length)
    assert _advance(batch).finished == [1]
    assert (batch.running, batch.waiting) == (1, 2)
    assert _advance(batch).emitted == [(2, 2), (3, 1)]
    assert _advance(batch).finished == [2, 3]
    assert _advance(batch).finished == [4]
    assert batch.schedule() is None and batch.running == 0


def test_a_cancelled_sequence_emits_nothing_and_leaves_at_the_boundary() -> None:
    """A cancel during a step takes effect at its end, whether the sequence decodes or waits; repeating it is harmless."""
    batch = SimulatedBatch(LLAMA, concurrency=2)
    for number in (1, 2, 3):
        batch.submit(number, 10, 5)
    _advance(batch)
    step = batch.schedule()
    assert step is not None
    for number in (3, 1, 1, 99):
        batch.cancel(number)
    assert (batch.running, batch.waiting) == (2, 1)
    assert batch.complete(step).emitted == [(2, 2)]
    assert batch.sweep() == [1, 3]
    assert (batch.running, batch.waiting) == (1, 0)
    batch.cancel(1)
    assert batch.sweep() == []


# ── text and counts ──────────────────────────────────────────────────────────────────────────────────────────────────


def _text(prompt: str, seed: int, bounds: ReplyBounds) -> str:
    reply = script(prompt, seed, bounds)
    return "".join(reply.piece(position) for position in range(reply.tokens))


def test_a_reply_depends_on_prompt_seed_and_position_only() -> None:
    """Replies can be compared byte by byte across replicas, and hold characters of several bytes."""
    bounds = ReplyBounds(200, 200)
    text = _text("one", 1, bounds)
    assert text == _text("one", 1, bounds)
    assert len({text, _text("two", 1, bounds), _text("one", 2, bounds)}) == 3
    assert {len(character.encode()) for character in text} == {1, 2, 3, 4}
    assert text.startswith(_text("one", 1, ReplyBounds(200, 50)))


def test_natural_lengths_differ_within_their_range() -> None:
    """Replies end by themselves at lengths that prompts determine."""
    lengths = {natural_output_tokens(f"prompt {number}") for number in range(2_000)}
    assert min(lengths) == 8 and max(lengths) == 256


@pytest.mark.parametrize(
    ("natural", "limit", "tokens", "reason"),
    [(20, 30, 20, FinishReason.STOP), (20, 20, 20, FinishReason.STOP), (20, 5, 5, FinishReason.LENGTH)],
)
def test_a_reply_ends_by_itself_or_at_its_limit(natural: int, limit: int, tokens: int, reason: FinishReason) -> None:
    """The finish reason says which of the two came first."""
    reply = script("prompt", 0, ReplyBounds(natural, limit))
    assert (reply.tokens, reply.reason) == (tokens, reason)


def test_a_stop_string_is_cut_off_but_its_tokens_count() -> None:
    """No part of a stop string is shown, also when it spans tokens; the engine generated them all the same."""
    whole = _text("prompt", 0, ReplyBounds(60, 60))
    words = whole.split(" ")
    across = f"{words[11][-1]} {words[12]} {words[13][0]}"
    stops = ("never said", "", across)
    cut = script("prompt", 0, ReplyBounds(60, 60, stops))
    text = _text("prompt", 0, ReplyBounds(60, 60, stops))
    assert text == whole[: whole.index(across)]
    assert cut.reason is FinishReason.STOP
    assert cut.tokens == whole[: whole.index(across) + len(across)].count(" ")
    assert script("prompt", 0, ReplyBounds(60, 60, ("never said",))).tokens == 60


@pytest.mark.parametrize(
    ("prompt", "chat", "expected"),
    [("", False, 1), ("abcd", False, 1), ("é漢e", False, 2), ("abcde", True, 3 + 4 + 2)],
)
def test_prompt_tokens_are_bytes_in_fours(prompt: str, chat: bool, expected: int) -> None:
    """Counts are exact and simple enough to predict in a test, and never exceed the platform's upper bound."""
    assert count_prompt_tokens(prompt, chat) == expected <= upper_bound_of_input(len(prompt.encode()), 1)


def test_every_turn_of_a_conversation_counts() -> None:
    """The invented template adds per turn; a string is one user message."""
    turns = (Message("system", "abcd"), Message("user", "abcde"))
    assert count_prompt_tokens(turns, True) == 3 + (4 + 1) + (4 + 2)
    assert count_prompt_tokens((Message("user", "abc"),), True) == count_prompt_tokens("abc", True)


# ── the calibration, end to end in virtual time ──────────────────────────────────────────────────────────────────────

H100 = ReplicaAddress("h100", "pool", "revision", EngineKind.SIMULATED, "", "llama", 8_192)
PROMPT = "wave" * 2_000
OUTPUT_TOKENS = 300
LOAD_S = 100
CAPACITY_RPS = 11.11
"""The calibration's own figure for this row at 2,000 in and 300 out, nominal overhead and 8,192 tokens a step."""


class _Stopwatch:
    """A sink that keeps the times of the first and the last token."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._arrived_s = loop.time()
        self._first_s = self._last_s = 0.0
        self._tokens = 0
        self.ended: asyncio.Future[None] = loop.create_future()

    def on_deltas(self, deltas: Sequence[Delta]) -> None:
        self._last_s = self._loop.time()
        self._first_s = self._first_s or self._last_s
        self._tokens = deltas[-1].tokens or 0

    def on_end(self, end: EngineEnd) -> None:
        assert end.reason is not None and self._tokens == OUTPUT_TOKENS
        self.ended.set_result(None)

    @property
    def ttft_ms(self) -> float:
        return (self._first_s - self._arrived_s) * 1_000

    @property
    def tpot_ms(self) -> float:
        return (self._last_s - self._first_s) / (self._tokens - 1) * 1_000


async def _poisson_load(seed: int, rate: float) -> tuple[float, float]:
    """p95 of TTFT and TPOT, in milliseconds, of requests with 2,000 tokens in and 300 out, the first quarter left out."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    arrivals = seeded_random(seed, "arrivals")
    noise = step_noise(seeded_random(seed, "noise"))
    engine = SimulatedEngine(SimulatedReplica(LLAMA_ROW, noise=noise, output_length=lambda _: OUTPUT_TOKENS))
    watches: list[_Stopwatch] = []
    while loop.time() < LOAD_S:
        await asyncio.sleep(arrivals.expovariate(rate))
        watches.append(_Stopwatch(loop))
        engine.start(EngineCall(H100, 0, PROMPT, False, OUTPUT_TOKENS, Sampling()), watches[-1])
    await asyncio.wait([watch.ended for watch in watches])
    measured = watches[len(watches) // 4 :]
    position = len(measured) * 95 // 100
    ttft = sorted(watch.ttft_ms for watch in measured)[position]
    return ttft, sorted(watch.tpot_ms for watch in measured)[position]


def _p95_at(rate: float) -> tuple[float, float]:
    """Medians over three seeds of the p95 of TTFT and TPOT."""
    ttft, tpot = zip(*run_seeds((1, 3, 5), lambda seed: _poisson_load(seed, rate), until_ms=600_000), strict=True)
    return median(ttft), median(tpot)


def test_the_calibrated_capacity_keeps_its_targets() -> None:
    """Scheduler, step time and loop reproduce the rate, within 8 %, at which p95 TTFT < 1 s and p95 TPOT < 50 ms still hold."""
    ttft_ms, tpot_ms = _p95_at(CAPACITY_RPS * 0.92)
    assert ttft_ms < 1_000 and 30 < tpot_ms < 50
    _, tpot_above_ms = _p95_at(CAPACITY_RPS * 1.08)
    assert tpot_above_ms > 50
