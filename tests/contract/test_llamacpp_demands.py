"""Tools, output forms and log probabilities on a real llama.cpp: what is asked for comes, counted, and leaves no slot taken."""

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from tests.contract.engine_servers import Children, Sink, UnderTest, llamacpp, stop_confirmed

from weir.core.demands import (
    NO_DEMANDS,
    Demands,
    FormKind,
    OutputForm,
    Tool,
    ToolCall,
    ToolChoice,
    ToolMode,
)
from weir.core.endings import FinishReason
from weir.core.output import Reply, replies
from weir.core.request import Message, Sampling
from weir.errors import EngineRejected

pytestmark = pytest.mark.model

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
}
WEATHER = Tool("get_weather", None, msgspec.json.encode(PARAMETERS).decode())
TIME = Tool("get_time", "The time in a city", '{"type":"object","properties":{"city":{"type":"string"}},"required":["city"]}')
QUESTION = (Message("user", "What is the weather in Paris?"),)
ANSWER_SCHEMA = (
    '{"type":"object","properties":{"answer":{"enum":["yes","no"]},"n":{"type":"integer"}},"required":["answer","n"],'
    '"additionalProperties":false}'
)


def _called(number: int, city: str) -> tuple[Message, Message]:
    call = ToolCall(f"c{number}", "get_weather", msgspec.json.encode({"city": city, "days": 2}).decode())
    return Message("user", f"Weather in {city}?"), Message("assistant", "", (call,))


SHOWN = (*_called(1, "Rome"), *_called(2, "Oslo"), *_called(3, "Bern"), Message("user", "Weather in Paris?"))
"""After these even a very small model makes a call."""
TOLD = (*_called(1, "Rome"), Message("tool", "sunny, 21 degrees", tool_call_id="c1"))


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    """Engine processes of this module."""
    started = Children()
    yield started
    started.close()


@pytest.fixture
async def with_tools(children: Children) -> AsyncIterator[UnderTest]:
    """A replica whose chat template tells the model of tools."""
    async with llamacpp(children, False, chat_template="smollm2-tools") as opened:
        yield opened


def _asked(under_test: UnderTest, prompt: Any, demands: Demands, *, chat: bool = True, most: int = 48, **sampling: Any) -> Any:
    call = under_test.call(prompt, chat=chat, most=most)
    return replace(call, demands=demands, sampling=Sampling(temperature=0.0, **sampling))


async def _reply(under_test: UnderTest, prompt: Any, demands: Demands, **asked: Any) -> tuple[Reply, Sink]:
    """A whole run; afterwards its slot is free."""
    sink = await under_test.finish(_asked(under_test, prompt, demands, **asked))
    await under_test.check_idle(0)
    [reply] = replies(sink.deltas, 1, "gen-test")
    return reply, sink


# ── tools ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "choice",
    [None, ToolChoice(ToolMode.AUTO), ToolChoice(ToolMode.REQUIRED), ToolChoice(ToolMode.NAMED, "get_weather")],
)
async def test_a_call_is_streamed(with_tools: UnderTest, choice: ToolChoice | None) -> None:
    """Protects tool calls: one call with an id, in several pieces with rising counts, whose arguments fit the schema."""
    tools = (WEATHER, TIME) if choice is not None and choice.mode is ToolMode.NAMED else (WEATHER,)
    reply, sink = await _reply(with_tools, SHOWN, Demands(tools=tools, tool_choice=choice))
    [call], [end] = reply.tool_calls, sink.ends
    arguments = msgspec.json.decode(call.arguments, type=dict[str, Any])
    assert call.id and call.name == "get_weather" and not reply.text
    assert set(arguments) == {"city", "days"} and type(arguments["city"]) is str and type(arguments["days"]) is int
    assert end.reason is FinishReason.TOOL_CALLS and end.usage is not None
    counts = [delta.tokens or 0 for delta in sink.deltas]
    assert len(counts) > 5 and counts == sorted(counts) and counts[-1] == end.usage.output_tokens


async def test_no_call_where_none_may_be_made(with_tools: UnderTest) -> None:
    """Protects `none`: what the model writes stays text."""
    reply, sink = await _reply(with_tools, SHOWN, Demands(tools=(WEATHER,), tool_choice=ToolChoice(ToolMode.NONE)))
    assert reply.text and not reply.tool_calls and sink.ends[0].reason in (FinishReason.STOP, FinishReason.LENGTH)


async def test_a_call_that_is_cut_ends_for_its_length(with_tools: UnderTest) -> None:
    """Protects callers from half a call that looks whole: it ends `length`, at exactly the bound."""
    reply, sink = await _reply(with_tools, SHOWN, Demands(tools=(WEATHER,)), most=18)
    [end] = sink.ends
    assert end.reason is FinishReason.LENGTH and end.usage is not None and end.usage.output_tokens == 18
    assert [call.name for call in reply.tool_calls] == ["get_weather"]


@pytest.mark.parametrize(
    ("prompt", "demands"),
    [
        (QUESTION, Demands(tools=(WEATHER, TIME))),
        (QUESTION, Demands(tools=(WEATHER, TIME), tool_choice=ToolChoice(ToolMode.NAMED, "get_time"))),
        (QUESTION, Demands(tools=(WEATHER, TIME), tool_choice=ToolChoice(ToolMode.NONE), parallel_tool_calls=True)),
        (QUESTION, Demands(form=OutputForm(FormKind.JSON_SCHEMA, "a", ANSWER_SCHEMA))),
        (TOLD, Demands(tools=(WEATHER,))),
        (TOLD, NO_DEMANDS),
        ((Message("user", "Hello", name="bob"),), NO_DEMANDS),
    ],
)
async def test_the_input_is_counted_with_all_that_the_template_writes(
    with_tools: UnderTest, prompt: tuple[Message, ...], demands: Demands
) -> None:
    """Protects holds: tools, calls that are told again and their results are counted as they are charged."""
    counted = None
    for _ in range(20):  # a busy machine may take longer than a count may
        counted = counted or await with_tools.engine.count_input(with_tools.replica, prompt, True, demands)
    _, sink = await _reply(with_tools, prompt, demands, most=1)
    assert sink.ends[0].usage is not None and sink.ends[0].usage.input_tokens == counted
    if demands.tools:
        assert counted != await with_tools.engine.count_input(with_tools.replica, prompt, True)


async def test_a_cancelled_call_frees_its_slot(with_tools: UnderTest) -> None:
    """Protects slots: a cancel between two pieces of a call stops the engine, and the next one runs there."""
    sink = Sink(on_first=lambda: run.cancel())
    run = with_tools.engine.start(_asked(with_tools, SHOWN, Demands(tools=(WEATHER,)), most=200), sink)
    await sink.begun()
    await stop_confirmed(run)
    await with_tools.check_idle(0)
    assert sink.calls == 1 and (await _reply(with_tools, QUESTION, NO_DEMANDS, most=2))[0].text


async def test_a_template_without_tools_is_found_and_never_silently_used(children: Children) -> None:
    """Protects callers: a model whose template drops tools says so, and a call that got there all the same fails."""
    async with llamacpp(children, True) as plain:
        assert not plain.replica.takes_tools
        sink = Sink()
        run = plain.engine.start(_asked(plain, QUESTION, Demands(tools=(WEATHER,))), sink)
        assert not sink.ends
        assert isinstance((await sink.end()).fault, EngineRejected)
        for act in (run.pause, run.resume, run.cancel):
            act()
        await stop_confirmed(run)


async def test_a_template_with_tools_writes_everything_else_as_the_models_own(
    with_tools: UnderTest, children: Children
) -> None:
    """Protects the demonstration's model: without tools its prompts and answers are those of the template that it came with."""
    assert with_tools.replica.takes_tools
    turns = (Message("system", "Be brief."), Message("user", "Hi"), Message("assistant", "Hello."), Message("user", "Count."))
    async with llamacpp(children, True) as plain:
        for prompt in (QUESTION, turns):
            ours, theirs = [(await _reply(one, prompt, NO_DEMANDS, most=12))[1] for one in (with_tools, plain)]
            assert ours.text == theirs.text and ours.ends == theirs.ends


# ── forms ────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_output_that_fits_a_schema(with_tools: UnderTest) -> None:
    """Protects structured output: it parses, and has exactly the schema's members."""
    reply, sink = await _reply(
        with_tools, QUESTION, Demands(form=OutputForm(FormKind.JSON_SCHEMA, "a", ANSWER_SCHEMA, strict=True)), most=120
    )
    assert sink.ends[0].reason is FinishReason.STOP
    made = msgspec.json.decode(reply.text, type=dict[str, Any])
    assert set(made) == {"answer", "n"} and made["answer"] in ("yes", "no") and type(made["n"]) is int


async def test_output_that_is_an_object(with_tools: UnderTest) -> None:
    """Protects JSON mode: whatever the model writes is the beginning of an object, or all of one."""
    reply, sink = await _reply(with_tools, QUESTION, Demands(form=OutputForm(FormKind.JSON_OBJECT)))
    assert reply.text.startswith("{")
    assert sink.ends[0].reason is FinishReason.LENGTH or isinstance(msgspec.json.decode(reply.text), dict)


@pytest.mark.parametrize(
    "schema", ['{"type":"zebra"}', '{"$ref":"#/$defs/zebra"}', '{"type":"string","pattern":"^(zebra$"}', '{"properties":5}']
)
async def test_a_schema_that_cannot_be_enforced_is_refused(with_tools: UnderTest, schema: str) -> None:
    """Protects callers and privacy: the request is at fault, the reason says so, and no word of theirs is in it."""
    for demands in (
        Demands(form=OutputForm(FormKind.JSON_SCHEMA, "a", schema)),
        Demands(tools=(replace(WEATHER, parameters=schema),), tool_choice=ToolChoice(ToolMode.REQUIRED)),
    ):
        _, sink = await _reply(with_tools, QUESTION, demands)
        fault = sink.ends[0].fault
        assert isinstance(fault, EngineRejected) and "cannot enforce a JSON schema" in fault.detail
        assert "zebra" not in fault.detail + repr(fault.members)


# ── log probabilities, seeds, stops ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("top", [0, 3])
async def test_log_probabilities(with_tools: UnderTest, chat: bool, top: int) -> None:
    """Protects log probabilities: one entry per token whose texts are the output, with as many alternatives as asked for."""
    reply, _ = await _reply(with_tools, QUESTION if chat else "1, 2, 3,", Demands(top_logprobs=top), chat=chat, most=5)
    assert "".join(entry.token for entry in reply.logprobs) == reply.text and len(reply.logprobs) == 5
    assert all(entry.logprob <= 0 and len(entry.top) == top for entry in reply.logprobs)
    assert all(entry.token_bytes == tuple(entry.token.encode()) for entry in reply.logprobs)


async def test_a_seed_repeats_and_a_stop_ends(with_tools: UnderTest) -> None:
    """Protects sampling: the same seed gives the same text, and output ends before a stop string."""
    hot = replace(_asked(with_tools, QUESTION, NO_DEMANDS, most=10), sampling=Sampling(temperature=1.5, seed=7))
    one, two = [(await with_tools.finish(hot)).text for _ in range(2)]
    assert one == two
    word = one.split()[1]
    stopped = await with_tools.finish(replace(hot, sampling=Sampling(temperature=1.5, seed=7, stop=(word,))))
    assert stopped.text == one.split(word)[0] and stopped.ends[0].reason is FinishReason.STOP
