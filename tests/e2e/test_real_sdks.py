"""Every official SDK against a real model: all surfaces tell the same text, and what is used and paid is one account."""

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from tests.e2e.http_client import Account, new_account
from tests.e2e.running_cell import RunningCell, running_cell
from tests.e2e.test_node_sdks import check_anthropic, check_openai, needs_node

pytestmark = pytest.mark.model
PROMPT = "Name three rivers."
MOST = 12
CONFIG = "[coordinator]\nqueue_wait_ms = 60000\n"
GREEDY = {"temperature": 0}
"""No chance in what is drawn; Anthropic's SDK has no argument for it."""
TOOL: dict[str, Any] = {
    "name": "look_up",
    "description": "Looks a river up.",
    "parameters": {"type": "object", "properties": {"river": {"type": "string"}}, "required": ["river"]},
}


@pytest.fixture(scope="module")
def real_cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCell]:
    """A cell with the packaged model on llama.cpp."""
    with running_cell(tmp_path_factory.mktemp("real") / "state", engine=("llamacpp",), config=CONFIG) as cell:
        yield cell
        assert "Traceback" not in cell.tail()


@pytest.fixture
def real_account(real_cell: RunningCell) -> Iterator[Account]:
    """A tenant of its own."""
    with new_account(real_cell) as made:
        yield made


@pytest.fixture
def clients(real_account: Account) -> Iterator[tuple[openai.OpenAI, anthropic.Anthropic]]:
    """Both SDKs, as the same tenant."""
    api, key = real_account.cell.api, real_account.key
    with (
        openai.OpenAI(base_url=f"{api}/v1", api_key=key, max_retries=0, timeout=60) as one,
        anthropic.Anthropic(base_url=api, api_key=key, max_retries=0, timeout=60) as other,
    ):
        yield one, other


def test_all_surfaces_tell_the_same(clients: tuple[openai.OpenAI, anthropic.Anthropic], real_account: Account) -> None:
    """Protects a change of client: one prompt without chance has one text, count and price, streamed and whole, everywhere."""
    one, other = clients
    turns: list[Any] = [{"role": "user", "content": PROMPT}]
    chat = one.chat.completions.create(model="assistant", messages=turns, max_completion_tokens=MOST, temperature=0)
    chunks = one.chat.completions.create(
        model="assistant", messages=turns, max_completion_tokens=MOST, temperature=0, stream=True
    )
    response = one.responses.create(model="assistant", input=PROMPT, max_output_tokens=MOST, temperature=0)
    message = other.messages.create(model="assistant", messages=turns, max_tokens=MOST, extra_body=GREEDY)
    with other.messages.stream(model="assistant", messages=turns, max_tokens=MOST, extra_body=GREEDY) as stream:
        streamed = stream.get_final_text()
    native = real_account.generate(input=PROMPT, max_output_tokens=MOST, temperature=0).json
    texts = {
        chat.choices[0].message.content,
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
        response.output_text,
        "".join(block.text for block in message.content if block.type == "text"),
        streamed,
        native["output"],
    }
    assert len(texts) == 1 and texts.pop()
    assert chat.usage is not None and response.usage is not None
    used = native["usage"]["input_tokens"]
    assert chat.usage.prompt_tokens == response.usage.input_tokens == message.usage.input_tokens == used
    assert other.messages.count_tokens(model="assistant", messages=turns).input_tokens == used
    [row] = real_account.usage()
    assert row["requests"] == 6 and row["cost_microusd"] == 6 * native["usage"]["cost_microusd"] > 0


def test_a_tool_that_must_be_called_is_called(clients: tuple[openai.OpenAI, anthropic.Anthropic]) -> None:
    """Protects agents on a real model: whichever surface asks, a call has an id, the tool's name and arguments that fit."""
    one, other = clients
    turns: list[Any] = [{"role": "user", "content": "Look the Rhine up."}]
    function: Any = {"type": "function", "function": TOOL}
    chat = one.chat.completions.create(
        model="assistant", messages=turns, tools=[function], tool_choice="required", temperature=0, max_completion_tokens=80
    )
    message = other.messages.create(
        model="assistant",
        messages=turns,
        tools=[{"name": "look_up", "description": TOOL["description"], "input_schema": TOOL["parameters"]}],
        tool_choice={"type": "any"},
        extra_body=GREEDY,
        max_tokens=80,
    )
    asked = [part for part in message.content if part.type == "tool_use"]
    calls = chat.choices[0].message.tool_calls or []
    assert [call.function.name for call in calls if call.type == "function"] == [call.name for call in asked]
    assert all(call.id for call in asked) and all(isinstance(call.input, dict) for call in asked)


@needs_node
def test_node_clients(real_account: Account) -> None:
    """Protects Node's users on a real model: the same checks as on the simulated one."""
    with new_account(real_account.cell) as limited:
        limited.limit(spend_microusd_lifetime=0)
        check_openai(real_account, limited.key)
        check_anthropic(real_account, limited.key)
