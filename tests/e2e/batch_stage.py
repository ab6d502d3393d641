"""Batches as tenants run them: the official SDK uploads, watches and reads, in front of an engine that counts what it is asked.

Each line's answer names the line, so that a line that is told twice, not at all, or with another's answer shows.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI
from openai.types import Batch
from tests.e2e.ending_stage import price, wait_until
from tests.e2e.running_cell import RunningCell
from tests.e2e.scripted_engine import Script

ENDS = ("completed", "failed", "expired", "cancelled")
MOST = 64
RUN_S = 300.0


def openai_of(cell: RunningCell, key: str) -> AsyncOpenAI:
    """The SDK, which tries nothing again."""
    return AsyncOpenAI(api_key=key, base_url=f"{cell.api}/v1", max_retries=0, timeout=30)


def script_of(number: int, tokens: int = 3, gap_ms: int = 60) -> Script:
    """What a line's generation does: its words name the line."""
    return Script(tokens=tokens, gap_ms=gap_ms, word=f" w{number}")


def line_of(number: int, script: Script, **fields: Any) -> dict[str, Any]:
    """One line of a batch of chat completions."""
    messages = [{"role": "user", "content": script.prompt()}]
    return line_for("/v1/chat/completions", number, {"messages": messages, "max_completion_tokens": MOST, **fields})


def line_for(endpoint: str, number: int, body: Mapping[str, Any]) -> dict[str, Any]:
    """One line of a batch of any endpoint, of the only model."""
    model = {"model_alias" if endpoint == "/v1/generations" else "model": "assistant"}
    return {"custom_id": f"line-{number}", "method": "POST", "url": endpoint, "body": {**model, **body}}


def input_of(lines: Sequence[Mapping[str, Any]]) -> bytes:
    """A batch's file."""
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


@dataclass(frozen=True)
class Results:
    """The lines of both files, in the order in which they are there."""

    output: list[dict[str, Any]]
    error: list[dict[str, Any]]

    @property
    def times(self) -> Counter[str]:
        """How often each line is told."""
        return Counter(line["custom_id"] for line in (*self.output, *self.error))


async def submitted(client: AsyncOpenAI, content: bytes, window: str = "24h", **fields: Any) -> Batch:
    """A batch, of chat completions unless its fields name another endpoint."""
    file = await client.files.create(file=("lines.jsonl", content), purpose="batch")
    create: Any = client.batches.create
    asked = {"endpoint": "/v1/chat/completions", "completion_window": window, **fields}
    batch: Batch = await create(input_file_id=file.id, **asked)
    return batch


async def until_done(client: AsyncOpenAI, batch_id: str, lines: int = 0) -> Batch:
    """The batch once it has ended, or, where lines are given, once so many of them are done."""
    found: Batch | None = None

    async def is_done() -> bool:
        nonlocal found
        found = await client.batches.retrieve(batch_id)
        counts = found.request_counts
        assert counts is not None
        await asyncio.sleep(0.1)
        return found.status in ENDS or 0 < lines <= counts.completed + counts.failed

    await wait_until(is_done, f"{batch_id} done", RUN_S)
    assert found is not None
    return found


async def until_half(client: AsyncOpenAI, batch_id: str, lines: int) -> None:
    """Half of its lines are done, and not all of them."""
    found = await until_done(client, batch_id, lines // 2)
    counts = found.request_counts
    assert found.status == "in_progress" and counts is not None and counts.completed < lines - 20


async def results_of(client: AsyncOpenAI, batch: Batch) -> Results:
    """What its files say."""
    found = []
    for file_id in (batch.output_file_id, batch.error_file_id):
        content = (await client.files.content(file_id)).content if file_id else b""
        found.append([json.loads(line) for line in content.splitlines()])
    return Results(*found)


def check_answers(results: Results, scripts: Sequence[Script]) -> int:
    """Each line is there once, with its own answer; what they cost in all."""
    assert results.error == [] and results.times == Counter({f"line-{number}": 1 for number in range(len(scripts))})
    cost = 0
    for line in results.output:
        script = scripts[int(line["custom_id"].removeprefix("line-"))]
        assert line["error"] is None and line["response"]["status_code"] == 200
        body = line["response"]["body"]
        assert body["choices"][0]["message"]["content"] == script.text
        usage = body["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (script.input_tokens, script.tokens)
        cost += price(script.input_tokens, script.tokens)
    return cost
