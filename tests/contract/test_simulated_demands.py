"""The simulated engine serves every demand, the same in this process as over HTTP, where it speaks as vLLM does."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageToolCall
from tests.contract.engine_servers import (
    API_KEY,
    CONTEXT_TOKENS,
    Children,
    Sink,
    UnderTest,
    simulated_server,
    stop_confirmed,
)

from weir.core.demands import NO_DEMANDS, Demands, FormKind, OutputForm, Tool, ToolCall, ToolChoice, ToolMode
from weir.core.endings import FinishReason
from weir.core.output import Delta, Reply, ShapedDelta, replies
from weir.core.registry.model import EngineKind
from weir.core.request import Message, Sampling
from weir.engines.simulated import SimulatedEngine, SimulatedReplica
from weir.engines.simulated_faults import Faults
from weir.errors import EngineRejected, ReplicaLost
from weir.messages import ReplicaAddress
from weir.ports import EngineCall

FIND = Tool("find", "Finds", '{"type":"object","properties":{"city":{"type":"string","minLength":6}},"required":["city"]}')
PING = Tool("ping")
SCHEMA = '{"type":"object","properties":{"a":{"type":"integer","minimum":3},"b":{"enum":["x"]}},"required":["a","b"]}'
REQUIRED, NONE = ToolChoice(ToolMode.REQUIRED), ToolChoice(ToolMode.NONE)


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    """The server's process."""
    started = Children()
    yield started
    started.close()


@pytest.fixture
async def served(children: Children) -> AsyncIterator[UnderTest]:
    """A replica behind HTTP."""
    async with simulated_server(children, False) as opened:
        yield opened


def _asked(under_test: UnderTest, prompt: Any, demands: Demands, most: int = 60, *, chat: bool = True) -> EngineCall:
    if chat and isinstance(prompt, str):
        prompt = (Message("user", prompt),)
    return replace(under_test.call(prompt, chat=chat, most=most), demands=demands, sampling=Sampling(seed=5))


async def _within(call: EngineCall) -> Sink:
    """The same call in this process."""
    engine, sink = SimulatedEngine(), Sink()
    address = ReplicaAddress("r", "p", "v", EngineKind.SIMULATED, "", "m", CONTEXT_TOKENS)
    run = engine.start(replace(call, replica=address), sink)
    await sink.end()
    await stop_confirmed(run)
    await engine.aclose()
    return sink


async def _reply(
    under_test: UnderTest, prompt: Any, demands: Demands, most: int = 60, *, chat: bool = True
) -> tuple[list[Reply], Sink]:
    """What came over HTTP, which is what comes in this process, choice by choice."""
    call = _asked(under_test, prompt, demands, most, chat=chat)
    sink, within = await under_test.finish(call), await _within(call)
    made = replies(sink.deltas, demands.choices, "gen-x")
    assert made == replies(within.deltas, demands.choices, "gen-x")
    assert sink.ends == within.ends
    return made, sink


# ── tools ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("words", "demands", "called"),
    [
        ("Hi", Demands(tools=(FIND, PING)), []),
        ("call:ping", Demands(tools=(FIND, PING)), ["ping"]),
        ("call:other", Demands(tools=(FIND, PING)), []),
        ("call:ping then call:find", Demands(tools=(FIND, PING)), ["ping", "find"]),
        ("call:ping then call:find", Demands(tools=(FIND, PING), parallel_tool_calls=False), ["ping"]),
        ("Hi", Demands(tools=(FIND, PING), tool_choice=REQUIRED), ["find"]),
        ("call:ping", Demands(tools=(FIND, PING), tool_choice=REQUIRED), ["ping"]),
        ("call:find", Demands(tools=(FIND, PING), tool_choice=ToolChoice(ToolMode.NAMED, "ping")), ["ping"]),
        ("call:find", Demands(tools=(FIND, PING), tool_choice=NONE), []),
        ("call:find", NO_DEMANDS, []),
    ],
)
async def test_which_tools_are_called(served: UnderTest, words: str, demands: Demands, called: list[str]) -> None:
    """A mark, or the caller's choice, decides; each call has an id of its own and arguments that fit its parameters."""
    [reply], sink = await _reply(served, (Message("user", words),), demands)
    assert [call.name for call in reply.tool_calls] == called and bool(reply.text) is not bool(called)
    arguments = {"find": {"city": "wwwwww"}, "ping": {}}
    assert [msgspec.json.decode(call.arguments) for call in reply.tool_calls] == [arguments[name] for name in called]
    assert len({call.id for call in reply.tool_calls}) == len(called)
    if called:
        assert sink.ends[0].reason is FinishReason.TOOL_CALLS


async def test_a_result_is_answered_with_words(served: UnderTest) -> None:
    """A mark that was answered does not call again, and what was told since is counted."""
    asked = (Message("user", "call:find"),)
    told = (*asked, Message("assistant", "", (ToolCall("c", "find", '{"city":"Rome"}'),)), Message("tool", "sunny", (), "c"))
    [reply], _ = await _reply(served, told, Demands(tools=(FIND,)))
    assert reply.text and not reply.tool_calls


@pytest.mark.parametrize("demands", [NO_DEMANDS, Demands(tools=(FIND,)), Demands(tools=(FIND, PING), choices=2)])
async def test_the_input_is_counted_with_its_tools(served: UnderTest, demands: Demands) -> None:
    """The count before is what is charged, once for all choices, and tools and calls that are told again are part of it."""
    told = (Message("user", "Hi"), Message("assistant", "", (ToolCall("c", "find", "{}"),)), Message("tool", "x", (), "c"))
    for prompt in ("Hi", told):
        counted = await served.engine.count_input(served.replica, prompt, True, demands)
        _, sink = await _reply(served, prompt, demands, 2)
        assert sink.ends[0].usage is not None and sink.ends[0].usage.input_tokens == counted
    assert await served.engine.count_input(served.replica, "Hi", True, Demands(tools=(FIND,))) == 8 + 4 + 25


@pytest.mark.parametrize("most", [1, 3])
async def test_a_call_that_is_cut(served: UnderTest, most: int) -> None:
    """The bound cuts a call as it cuts words."""
    [reply], sink = await _reply(served, "Hi", Demands(tools=(FIND,), tool_choice=REQUIRED), most)
    [call] = reply.tool_calls
    assert call.name == "find" and len(call.arguments) == 4 * (most - 1)
    assert sink.ends[0].reason is FinishReason.LENGTH and sink.ends[0].usage is not None
    assert sink.ends[0].usage.output_tokens == most


# ── forms, reasoning, log probabilities ──────────────────────────────────────────────────────────────────────────────


async def test_output_in_a_form(served: UnderTest) -> None:
    """An object, and the least that a schema admits."""
    [reply], sink = await _reply(served, "Hi", Demands(form=OutputForm(FormKind.JSON_OBJECT)))
    assert set(msgspec.json.decode(reply.text)) == {"answer"} and sink.ends[0].reason is FinishReason.STOP
    [reply], _ = await _reply(served, "Hi", Demands(form=OutputForm(FormKind.JSON_SCHEMA, "a", SCHEMA)))
    assert msgspec.json.decode(reply.text) == {"a": 3, "b": "x"}


@pytest.mark.parametrize(("most", "thoughts", "words"), [(60, 8, 52), (8, 8, 0), (3, 3, 0)])
async def test_reasoning_on_a_mark(served: UnderTest, most: int, thoughts: int, words: int) -> None:
    """Eight words of reasoning come first and count as output; the mark means nothing in a plain prompt."""
    [reply], sink = await _reply(served, "reason: flow 21", NO_DEMANDS, most)
    assert (len(reply.reasoning.split()), len(reply.text.split())) == (thoughts, words)
    assert sink.ends[0].usage is not None and sink.ends[0].usage.output_tokens == most
    [plain], _ = await _reply(served, "reason: flow 21", NO_DEMANDS, 5, chat=False)
    assert not plain.reasoning and len(plain.text.split()) == 5


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("top", [0, 1, 3])
async def test_log_probabilities(served: UnderTest, chat: bool, top: int) -> None:
    """One entry per token in either shape; the token is the likeliest of its alternatives."""
    call = _asked(served, "Hi", Demands(top_logprobs=top), 6, chat=chat)
    [reply] = replies((await served.finish(call)).deltas, 1, "gen-x")
    [within] = replies((await _within(call)).deltas, 1, "gen-x")
    assert "".join(entry.token for entry in reply.logprobs) == reply.text == within.text and len(reply.logprobs) == 6
    for entry, other in zip(reply.logprobs, within.logprobs, strict=True):
        assert (entry.token, entry.logprob) == (other.token, other.logprob) and entry.logprob < 0
        assert len(other.top) == top and len(entry.top) == (top if chat else max(top, 1))
        assert [one.logprob for one in other.top] == sorted((one.logprob for one in other.top), reverse=True)


# ── several choices ──────────────────────────────────────────────────────────────────────────────────────────────────


async def test_choices_are_the_seeds_that_follow(served: UnderTest) -> None:
    """Each choice is what its seed gives alone; counts rise over all of them, and the prompt is counted once."""
    made, sink = await _reply(served, "flow 21", Demands(choices=3), 20)
    alone = []
    for seed in (5, 6, 7):
        call = replace(_asked(served, "flow 21", NO_DEMANDS, 20), sampling=Sampling(seed=seed))
        alone.append((await served.finish(call)).text)
    assert [reply.text for reply in made] == alone and len(set(alone)) == 3
    assert {reply.finish for reply in made} == {FinishReason.LENGTH}
    counts = [delta.tokens or 0 for delta in sink.deltas]
    assert counts == sorted(counts) and counts[-1] == 60
    assert sink.ends[0].usage is not None and sink.ends[0].usage.output_tokens == 60


async def test_a_choice_may_end_before_the_others(served: UnderTest) -> None:
    """A stop string ends the one choice that has it; its end comes in its place, and nothing of it afterwards."""
    whole, _ = await _reply(served, "flow 21", Demands(choices=2), 20)
    stop = next(word for word in whole[0].text.split() if word not in whole[1].text)
    call = _asked(served, "flow 21", Demands(choices=2), 20)
    call = replace(call, sampling=Sampling(seed=5, stop=(stop,)))
    sink = await served.finish(call)
    first, second = replies(sink.deltas, 2, "gen-x")
    assert (first.finish, second.finish) == (FinishReason.STOP, FinishReason.LENGTH)
    assert second.text == whole[1].text and whole[0].text.startswith(first.text) and stop not in first.text
    shown = [delta for delta in sink.deltas if isinstance(delta, ShapedDelta)]
    end_at = next(at for at, delta in enumerate(shown) if delta.choice == 0 and delta.finish)
    assert all(delta.choice == 1 for delta in shown[end_at + 1 :]) and end_at < len(shown) - 2


async def test_a_cancel_ends_all_choices(served: UnderTest) -> None:
    """Every sequence leaves the batch, and the sink hears nothing more."""
    sink = Sink(on_first=lambda: run.cancel())
    run = served.engine.start(_asked(served, "flow 21", Demands(choices=8), 200), sink)
    await sink.begun()
    await stop_confirmed(run)
    await served.check_idle(0)
    assert sink.calls == 1


async def test_in_this_process_they_pause_fail_and_stop_as_one() -> None:
    """A paused run keeps the pieces of all choices in order; a loss, a stall and a prompt that is too long are told once."""
    address = ReplicaAddress("r", "p", "v", EngineKind.SIMULATED, "", "m", CONTEXT_TOKENS)
    call = EngineCall(address, 0, "flow 21", True, 30, Sampling(seed=5), demands=Demands(choices=3))
    whole = await _within(call)
    engine = SimulatedEngine(SimulatedReplica(faults=Faults(stall_marker="sleepy", stall_after_tokens=3)))
    paused = Sink(on_first=lambda: run.pause())
    run = engine.start(call, paused)
    await paused.begun()
    async with asyncio.timeout(10):
        await run.stopped()
    assert len(paused.batches) == 1 and not paused.ends
    run.resume()
    await paused.end()
    assert paused.deltas == whole.deltas and paused.ends == whole.ends
    stalled = Sink()
    run = engine.start(replace(call, prompt="sleepy"), stalled)
    await stalled.begun()
    engine.lose("r")
    fault = (await stalled.end()).fault
    assert isinstance(fault, ReplicaLost)
    with pytest.raises(ReplicaLost):
        await run.stopped()
    engine.restore("r")
    refused = Sink()
    engine.start(replace(call, max_output_tokens=CONTEXT_TOKENS), refused)
    assert isinstance((await refused.end()).fault, EngineRejected)
    left = Sink()
    run = engine.start(call, left)
    await engine.aclose()
    await stop_confirmed(run)
    assert not left.calls


# ── the official SDK, and what is refused ────────────────────────────────────────────────────────────────────────────


async def test_by_the_official_sdk(served: UnderTest) -> None:
    """Streamed and whole are the same calls, choices, log probabilities and usage, as its users see them."""
    tools: Any = [{"type": "function", "function": {"name": "find", "parameters": msgspec.json.decode(FIND.parameters or "")}}]
    options: Any = {"model": "m", "messages": [{"role": "user", "content": "call:find reason:"}], "n": 2, "seed": 3}
    options |= {"tools": tools, "logprobs": True, "top_logprobs": 2, "max_tokens": 40}

    def ask() -> tuple[Any, Any]:
        with OpenAI(base_url=f"{served.replica.url}/v1", api_key=API_KEY, max_retries=0) as client:
            whole = client.chat.completions.create(**options)
            with client.chat.completions.stream(**options, stream_options={"include_usage": True}) as stream:
                return whole, stream.get_final_completion()

    whole, streamed = await asyncio.to_thread(ask)
    assert whole.usage == streamed.usage and [choice.index for choice in whole.choices] == [0, 1]
    for one, other in zip(whole.choices, streamed.choices, strict=True):
        [call], [same] = one.message.tool_calls, other.message.tool_calls
        assert isinstance(call, ChatCompletionMessageToolCall) and (call.id, call.function.arguments) == (
            same.id,
            same.function.arguments,
        )
        assert one.finish_reason == other.finish_reason == "tool_calls" and one.message.content is None
        assert len(one.message.reasoning.split()) == 8
        assert one.logprobs.content == other.logprobs.content and len(one.logprobs.content) > 8


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 0},
        {"n": 17},
        {"tool_choice": "required"},
        {"tool_choice": "other"},
        {"tools": [{"function": {"name": "a"}}], "tool_choice": {"function": {"name": "b"}}},
        {"tools": [{"function": {}}]},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "grammar"}},
        {"top_logprobs": 2},
        {"logprobs": True, "top_logprobs": 21},
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}]}]},
    ],
)
async def test_demands_that_make_no_sense(served: UnderTest, fields: dict[str, Any]) -> None:
    """They are a 400 before any header of a stream."""
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 2, **fields}

    def ask() -> int:
        with OpenAI(base_url=f"{served.replica.url}/v1", api_key=API_KEY, max_retries=0) as client:
            with pytest.raises(Exception) as refused:
                client.post("/chat/completions", body=body, cast_to=object)
            return int(getattr(refused.value, "status_code", 0))

    assert await asyncio.to_thread(ask) == 400


def test_a_reply_is_known_beforehand() -> None:
    """An empty reply is put together as one, for whoever reads no piece."""
    assert replies([Delta("")], 2, "gen-x") == [Reply(), Reply()]
