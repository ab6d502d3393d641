"""The simulated engine's KV blocks: who waits, who is preempted, what stays cached, and which texts share a block."""

from collections.abc import Sequence

import pytest

from weir.core.request import Message
from weir.engines.simulated_batch import SimulatedBatch, Step
from weir.engines.simulated_blocks import BLOCK_TOKENS
from weir.engines.simulated_text import count_prompt_tokens, prompt_block_keys
from weir.engines.step_time import step_time

LLAMA = step_time("llama3.1-8b/h100_sxm/tp1")


def _batch(blocks: int) -> SimulatedBatch:
    return SimulatedBatch(LLAMA, 8, blocks * BLOCK_TOKENS)


def _scheduled(batch: SimulatedBatch) -> Step:
    step = batch.schedule()
    assert step is not None
    return step


def _advance(batch: SimulatedBatch, steps: int) -> None:
    for _ in range(steps):
        batch.complete(_scheduled(batch))


def _hits(batch: SimulatedBatch, number: int, keys: Sequence[str], salt: str = "") -> int:
    """Run a prompt of full blocks to its end, alone; the tokens found in the cache."""
    batch.submit(number, len(keys) * BLOCK_TOKENS, 1, keys, salt)
    step = _scheduled(batch)
    assert batch.complete(step).finished == [number]
    [(_, hits)] = step.started
    return hits


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_rows_say_how_much_fits() -> None:
    """Protects the calibration's meaning: without another figure a replica has the KV tokens of its row, in whole blocks."""
    assert SimulatedBatch(LLAMA, 1).kv_tokens == LLAMA.row.kv_tokens // BLOCK_TOKENS * BLOCK_TOKENS
    assert _batch(5).kv_tokens == 80


@pytest.mark.parametrize(("blocks", "starts"), [(98, True), (99, False)])
def test_a_newcomer_leaves_the_watermark_free(blocks: int, starts: bool) -> None:
    """Protects running decodes: beside others a prompt starts only if a hundredth of all blocks stays free after it."""
    batch = _batch(200)
    batch.submit(1, 100 * BLOCK_TOKENS, 10)
    batch.submit(2, blocks * BLOCK_TOKENS, 10)
    assert len(_scheduled(batch).started) == batch.running == 1 + starts


def test_alone_it_may_have_everything() -> None:
    """Protects progress: what fits a replica at all starts once nothing else runs there."""
    batch = _batch(200)
    batch.submit(1, 200 * BLOCK_TOKENS - 1, 1)
    assert batch.complete(_scheduled(batch)).finished == [1]


def test_the_newest_gives_way_and_starts_over() -> None:
    """Protects the older from the newer: a decode without a block takes those of the newest, which keeps what it emitted."""
    batch = _batch(20)
    batch.submit(1, 150, 100)
    batch.submit(2, 144, 50)
    _advance(batch, 11)
    assert (batch.kv_usage, batch.preemptions) == (1.0, 0)
    step = _scheduled(batch)
    assert (step.decodes, step.prefills) == ((1,), ())
    assert (batch.running, batch.waiting, batch.preemptions, batch.kv_usage) == (1, 1, 1, 11 / 20)
    batch.complete(step)
    _advance(batch, 88)
    step = _scheduled(batch)
    assert (step.decodes, step.prefills) == ((), ((2, 144 + 11),))
    assert batch.complete(step).emitted == [(2, 12)]


# ── prefix cache ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_longest_unused_is_forgotten_first() -> None:
    """Protects what is in use: blocks are taken from the prompt that nobody asked for longest, its end before its beginning."""
    batch = _batch(10)
    one, two, three = ([f"{name}/{number}" for number in range(4)] for name in ("one", "two", "three"))
    assert [_hits(batch, number, keys) for number, keys in enumerate((one, two, one, three, two, one))] == [0, 0, 48, 0, 32, 32]
    assert (batch.prefix_queries, batch.prefix_hits) == (6 * 64, 112)


def test_a_hit_needs_the_salt_and_everything_before() -> None:
    """Protects exactness: the same block after another one, or under another salt, is another block."""
    batch = _batch(50)
    keys = ["a", "b", "c", "d"]
    assert _hits(batch, 1, keys, "salt") == 0
    assert _hits(batch, 2, ["a", "x", "c", "d"], "salt") == 16
    assert _hits(batch, 3, ["b", "c", "d"], "salt") == _hits(batch, 4, keys) == _hits(batch, 5, keys, "other") == 0
    assert _hits(batch, 6, [*keys, "e"], "salt") == 64


def test_without_keys_nothing_is_cached() -> None:
    """Protects those who want none: a prompt without keys is neither kept nor looked up."""
    batch = _batch(50)
    batch.submit(1, 64, 1)
    batch.complete(_scheduled(batch))
    assert _hits(batch, 2, ["a"] * 4) == 0
    batch.submit(3, 64, 1)
    assert _scheduled(batch).started == ((3, 0),)
    assert (batch.prefix_queries, batch.prefix_hits) == (64, 0)


# ── texts ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _common(left: Sequence[bytes], right: Sequence[bytes]) -> int:
    return next((at for at, (one, two) in enumerate(zip(left, right, strict=False)) if one != two), min(len(left), len(right)))


@pytest.mark.parametrize("prompt", ["", "word" * 15, "word" * 16, "word" * 15 + "wor", "é漢🌊" * 40])
def test_plain_texts_share_their_common_blocks(prompt: str) -> None:
    """Protects what a hit means: as many keys as full blocks, all kept when text follows, all lost when text comes before."""
    keys = prompt_block_keys(prompt, False)
    assert len(keys) == count_prompt_tokens(prompt, False) // BLOCK_TOKENS
    longer = prompt_block_keys(prompt + "more" * 40, False)
    assert _common(keys, longer) == len(prompt.encode()) // (4 * BLOCK_TOKENS)
    assert _common(keys, prompt_block_keys("x" + prompt, False)) == 0


def test_a_conversation_goes_on_in_the_same_blocks() -> None:
    """Protects the reuse of a conversation: another turn changes only what follows; another role or word changes its block."""
    turns = (Message("system", "calm water " * 30), Message("user", "which way?"))
    keys = prompt_block_keys(turns, True)
    assert len(keys) == count_prompt_tokens(turns, True) // BLOCK_TOKENS
    longer = prompt_block_keys((*turns, Message("assistant", "down"), Message("user", "thanks " * 20)), True)
    assert _common(keys, longer) >= len(keys) - 1 >= 4
    assert _common(keys, prompt_block_keys((Message("user", turns[0].content), turns[1]), True)) == 0
    assert _common(keys, prompt_block_keys((turns[0], Message("user", "which wax?")), True)) == len(keys) - 1
    assert prompt_block_keys("hello" * 30, True) == prompt_block_keys((Message("user", "hello" * 30),), True)
    short, filled = ((Message("user", text), Message("user", "y" * 60)) for text in ("abc", "abc\0"))
    assert _common(prompt_block_keys(short, True), prompt_block_keys(filled, True)) == 0
