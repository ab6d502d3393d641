"""Several choices of one chat completion on the simulated engine: held, delivered, ended and paid as one request."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from tests.e2e.conftest import SLOW_ROW, engine_process
from tests.e2e.ending_stage import PRICE_INPUT, PRICE_OUTPUT, Caller, Stage, wait_until
from tests.e2e.running_cell import running_cell
from tests.e2e.sse_client import Call, bearer, calling

CHOICES, MOST = 3, 40

PROMPT = "flow 21"
"""Its choices would go on for 238 tokens."""


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    state = tmp_path_factory.mktemp("choices") / "state"
    with engine_process("--row", SLOW_ROW) as url, running_cell(state, engine=(url,)) as cell:
        yield Stage(cell)
        assert "Traceback" not in cell.tail()


def _asking(stage: Stage, caller: Caller, key: str, **fields: Any) -> Any:
    body = {
        "model": "assistant",
        "messages": [{"role": "user", "content": PROMPT}],
        "n": CHOICES,
        "seed": 3,
        "max_completion_tokens": MOST,
        **fields,
    }
    if body.get("stream"):
        body["stream_options"] = {"include_usage": True}
    headers = bearer(caller.secret) | {"idempotency-key": key}
    return calling(stage.cell.api, "/v1/chat/completions", body=body, headers=headers)


async def _chunks(call: Call) -> list[dict[str, Any]]:
    """A whole stream's chunks."""
    assert await call.head() == 200
    events = [event async for event in call.events()]
    assert events[-1].data == "[DONE]"
    return [event.json for event in events[:-1]]


def _put_together(chunks: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Text and end of each choice. Every choice begins with its role, ends once, and says nothing afterwards."""
    texts, ends, begun = [""] * CHOICES, [""] * CHOICES, [False] * CHOICES
    for chunk in chunks:
        for choice in chunk["choices"]:
            index = choice["index"]
            assert not ends[index]
            begun[index] |= "role" in choice["delta"]
            assert begun[index]
            texts[index] += choice["delta"].get("content", "")
            ends[index] = choice["finish_reason"] or ""
    assert all(ends)
    return list(zip(texts, ends, strict=True))


async def _admitted(stage: Stage, caller: Caller, key: str) -> dict[str, Any]:
    explained = await stage.admin("GET", f"generations/{caller.tenant}/{key}/explanation")
    [timeline] = explained["timelines"]
    [event] = [event for event in timeline["events"] if event["event"] == "admitted"]
    found: dict[str, Any] = event
    return found


async def test_streamed_and_whole(stage: Stage) -> None:
    """The same choices either way; the hold is for all, the charge is the engine's usage: the prompt once, and all output."""
    caller, other = await stage.caller(), await stage.caller()
    async with _asking(stage, caller, "it", stream=True) as call:
        chunks = await _chunks(call)
    streamed, usage = _put_together(chunks), chunks[-1]["usage"]
    async with _asking(stage, other, "it") as call:
        whole = (await call.answer()).json
    shown = [(choice["message"]["content"], choice["finish_reason"]) for choice in whole["choices"]]
    assert shown == streamed and len(set(shown)) == CHOICES and {end for _, end in shown} == {"length"}
    assert [choice["index"] for choice in whole["choices"]] == list(range(CHOICES))
    assert usage == whole["usage"] and usage["completion_tokens"] == CHOICES * MOST
    for one in (caller, other):
        await stage.check_ended(one, "it", "length", "tenant")
        record = await stage.admin("GET", f"generations/{one.tenant}/it")
        assert record["usage"]["output_tokens"] == CHOICES * MOST and record["usage"]["basis"] == "engine"
        admitted = await _admitted(stage, one, "it")
        assert admitted["worst_output_tokens"] == CHOICES * MOST
        assert admitted["worst_input_tokens"] == CHOICES * usage["prompt_tokens"]
        worst = CHOICES * (usage["prompt_tokens"] * PRICE_INPUT + MOST * PRICE_OUTPUT)
        assert admitted["held_microusd"] == -(-worst // 1_000_000)


def _only_in_the_first(texts: list[str]) -> str:
    """Two words that follow each other in the first text alone."""
    words = texts[0].split()
    pairs = (" ".join(pair) for pair in pairwise(words))
    return next(pair for pair in pairs if not any(pair in text for text in texts[1:]))


async def test_a_choice_that_ends_early(stage: Stage) -> None:
    """A stop string ends one choice: its end is told while the others go on, and the whole ends for the others' reason."""
    caller = await stage.caller()
    async with _asking(stage, caller, "first") as call:
        texts = [choice["message"]["content"] for choice in (await call.answer()).json["choices"]]
    stop = _only_in_the_first(texts)
    async with _asking(stage, await stage.caller(), "it", stream=True, stop=stop) as call:
        chunks = await _chunks(call)
    found = _put_together(chunks)
    assert [end for _, end in found] == ["stop", "length", "length"]
    assert [text for text, _ in found[1:]] == texts[1:] and stop not in found[0][0]
    order = [choice for chunk in chunks for choice in chunk["choices"]]
    end_at = next(at for at, choice in enumerate(order) if choice["index"] == 0 and choice["finish_reason"])
    assert any(choice["delta"].get("content") for choice in order[end_at + 1 :])
    async with _asking(stage, caller, "whole", stop=stop) as call:
        whole = (await call.answer()).json
    assert [(choice["message"]["content"], choice["finish_reason"]) for choice in whole["choices"]] == found
    assert whole["usage"] == chunks[-1]["usage"]


async def test_a_cancel_in_the_middle_is_paid_for_all_choices(stage: Stage) -> None:
    """What the engine had made of every choice by then is measured and paid, and never less than what was delivered."""
    caller = await stage.caller()
    async with _asking(stage, caller, "it", stream=True, max_completion_tokens=200) as call:
        assert await call.head() == 200
        delivered = 0
        async for event in call.events():
            if event.data == "[DONE]":
                break
            chunk = event.json
            delivered += sum(1 for choice in chunk.get("choices", ()) if choice["delta"].get("content"))
            if delivered == 5 * CHOICES:
                assert (await stage.get(caller, "it", "/cancel")).json["finish_reason"] == "client"
    await stage.check_ended(caller, "it", "client", "tenant")
    usage = (await stage.admin("GET", f"generations/{caller.tenant}/it"))["usage"]
    assert 5 * CHOICES <= delivered <= usage["output_tokens"] < 200 * CHOICES
    assert usage["basis"] == "engine"
    await stage.check_quiet()


async def test_time_per_output_token_is_of_one_choice(stage: Stage) -> None:
    """Protects targets and concurrency: three choices at once are not three times as fast."""
    paces = {}
    for choices in (1, CHOICES):
        caller = await stage.caller()
        async with _asking(stage, caller, "it", n=choices) as call:
            assert (await call.answer()).status == 200

        async def is_posted(caller: Caller = caller) -> bool:
            return bool((await stage.get(caller, "it")).json["timing"]["tpot_ms"])

        await wait_until(is_posted, "it is settled")
        paces[choices] = (await stage.get(caller, "it")).json["timing"]["tpot_ms"]
    assert paces[CHOICES] > 0.7 * paces[1]
