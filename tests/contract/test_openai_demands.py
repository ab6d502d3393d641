"""What is demanded beyond text is sent as OpenAI's fields, is counted with the input, and comes back as pieces."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from tests.contract.engine_servers import DONE, HEAD, ScriptedServer, Sink, Wire, stop_confirmed, usage_of

from weir.core.demands import Demands, FormKind, OutputForm, Tool, ToolCall, ToolChoice, ToolMode
from weir.core.endings import FinishReason
from weir.core.output import Delta, ShapedDelta, TokenLogprob
from weir.core.request import Message, Sampling
from weir.engines.openai_compatible import OpenAICompatibleEngine
from weir.errors import EngineError
from weir.ports import EngineCall, EngineUsage

TOOL = Tool("find", "Finds", '{"type":"object","properties":{"a":{"type":"integer"}}}', strict=True)
SENT_TOOL = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Finds",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        "strict": True,
    },
}
NAMED = Demands(
    tools=(TOOL, Tool("other")),
    tool_choice=ToolChoice(ToolMode.NAMED, "find"),
    parallel_tool_calls=False,
    form=OutputForm(FormKind.JSON_SCHEMA, "pick", '{"enum":[1]}', strict=False, description="One"),
    choices=3,
    top_logprobs=2,
)
TOLD = (
    Message("user", "Hi", name="bob"),
    Message("assistant", "", (ToolCall("c1", "find", '{"a":1}'),)),
    Message("tool", "found", tool_call_id="c1"),
)


async def _run(server: ScriptedServer, demands: Demands, *, chat: bool = True) -> Sink:
    engine, sink = OpenAICompatibleEngine(), Sink()
    address = server.address(model="m", continuous_usage=True)
    run = engine.start(EngineCall(address, 0, TOLD if chat else "Hi", chat, 9, Sampling(top_k=4), demands=demands), sink)
    await sink.end()
    await stop_confirmed(run)
    await engine.aclose()
    return sink


def _part(index: int, finish: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"index": index, "delta": delta, "finish_reason": finish}


async def _script(chunks: list[Any], demands: Demands) -> Sink:
    async def script(wire: Wire, body: dict[str, Any]) -> None:
        await wire.raw(HEAD)
        await wire.events(*chunks)
        await wire.end()

    async with ScriptedServer(script).running() as server:
        return await _run(server, demands)


async def test_what_is_sent() -> None:
    """Every demand is one of OpenAI's fields, a schema is passed on as it came, and the count is asked for with the tools."""
    async with ScriptedServer().running() as server:
        await _run(server, NAMED)
        await _run(server, Demands(top_logprobs=2), chat=False)
        engine = OpenAICompatibleEngine()
        await engine.count_input(server.address(model="m"), TOLD, True, NAMED)
        await engine.aclose()
    (_, chat), (_, plain), (_, counted) = server.requests
    tools = {
        "tools": [SENT_TOOL, {"type": "function", "function": {"name": "other"}}],
        "tool_choice": {"type": "function", "function": {"name": "find"}},
        "parallel_tool_calls": False,
    }
    assert {name: chat[name] for name in tools} == tools == {name: counted[name] for name in tools}
    schema = {"name": "pick", "description": "One", "schema": {"enum": [1]}, "strict": False}
    assert chat["response_format"] == {"type": "json_schema", "json_schema": schema}
    assert (chat["n"], chat["logprobs"], chat["top_logprobs"], chat["top_k"]) == (3, True, 2, 4)
    assert plain["logprobs"] == 2 and "top_logprobs" not in plain and "n" not in plain
    function = {"name": "find", "arguments": '{"a":1}'}
    assert chat["messages"] == counted["messages"] == [
        {"role": "user", "content": "Hi", "name": "bob"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "type": "function", "function": function}]},
        {"role": "tool", "content": "found", "tool_call_id": "c1"},
    ]  # fmt: skip


async def test_several_choices_end_one_by_one() -> None:
    """Each choice's pieces and end are its own; counts are vLLM's, per choice on a chunk; the whole ends for its weightiest."""
    chunks = [
        {"choices": [_part(0, content="a")], **usage_of(7, 1)},
        {"choices": [_part(1, content="b")], **usage_of(7, 1)},
        {"choices": [_part(1, "length")], **usage_of(7, 1)},
        {
            "choices": [_part(0, reasoning="c", tool_calls=[{"index": 0, "id": "x", "function": {"name": "find"}}])],
            **usage_of(7, 3),
        },
        {"choices": [_part(0, "stop")], **usage_of(7, 3)},
        {"choices": [], **usage_of(7, 4)},
        DONE,
    ]
    sink = await _script(chunks, Demands(choices=2))
    assert sink.ends[0].reason is FinishReason.LENGTH and sink.ends[0].usage == EngineUsage(7, 0, 4)
    shown = [(delta.choice, delta.text, delta.tokens, delta.finish) for delta in sink.deltas if isinstance(delta, ShapedDelta)]
    assert shown == [
        (0, "a", 1, None), (1, "b", 2, None), (1, "", 2, "length"), (0, "", 4, None), (0, "", 4, "stop")
    ]  # fmt: skip


@pytest.mark.parametrize("mark", [True, False])
async def test_a_choice_that_never_ended_is_no_whole_answer(mark: bool) -> None:
    """A stream that ends while a choice has not is the engine's fault, not a completed reply with half of it missing."""
    chunks: list[Any] = [{"choices": [_part(0, "stop", content="a")], **usage_of(7, 1)}, {"choices": [], **usage_of(7, 1)}]
    sink = await _script([*chunks, DONE] if mark else chunks, Demands(choices=2))
    assert isinstance(sink.ends[0].fault, EngineError)


class _CountingSink(Sink):
    """counted: fifteen tokens are known."""

    def __init__(self) -> None:
        super().__init__()
        self.counted = asyncio.Event()

    def on_deltas(self, deltas: Sequence[Delta]) -> None:
        super().on_deltas(deltas)
        if (deltas[-1].tokens or 0) >= 15:
            self.counted.set()


async def test_a_cancelled_stream_of_choices_keeps_its_count() -> None:
    """What was made of all choices is known when the stream is cut."""
    release = asyncio.Event()

    async def script(wire: Wire, body: dict[str, Any]) -> None:
        await wire.raw(HEAD)
        await wire.events(*({"choices": [_part(index, content="a")], **usage_of(7, 5)} for index in range(3)))
        await release.wait()

    async with ScriptedServer(script).running() as server:
        engine, sink = OpenAICompatibleEngine(), _CountingSink()
        address = server.address(model="m", continuous_usage=True)
        run = engine.start(EngineCall(address, 0, "Hi", True, 9, Sampling(), demands=Demands(choices=3)), sink)
        async with asyncio.timeout(10):
            await sink.counted.wait()
        run.cancel()
        assert sink.deltas[-1].tokens == 15
        await stop_confirmed(run)
        await engine.aclose()
        release.set()


async def test_log_probabilities_of_both_shapes() -> None:
    """Chat's entries and completions' columns are the same tokens; a first token without a value is no crash."""
    entry = {"token": "a", "logprob": -1.0, "bytes": [97], "top_logprobs": [{"token": "b", "logprob": -2.0}]}
    columns = {"tokens": ["a", "b"], "token_logprobs": [None, -1.0], "top_logprobs": [None, {"b": -1.0}], "text_offset": [0, 1]}
    chunk = {"choices": [{"index": 0, "delta": {"content": "a"}, "logprobs": {"content": [entry]}}]}
    other = {"choices": [{"index": 0, "text": "ab", "logprobs": columns, "finish_reason": "stop"}]}
    sink = await _script([chunk, other, DONE], Demands(top_logprobs=1))
    one, two = (delta.logprobs for delta in sink.deltas if isinstance(delta, ShapedDelta))
    assert one == (TokenLogprob("a", -1.0, (97,), (TokenLogprob("b", -2.0),)),)
    assert two == (TokenLogprob("a", 0.0), TokenLogprob("b", -1.0, None, (TokenLogprob("b", -1.0),)))
