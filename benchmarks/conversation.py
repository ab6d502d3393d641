"""A conversation as those who wait for answers hold it: streamed chat completions that arrive by chance, and what each saw.

Arrivals are a Poisson process with a fixed seed, so that every setting gets the same requests at the same times, whether or not
earlier answers are there. Times are the client's own, from the request's last byte to a chunk's arrival.
"""

import json
import random
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse

from benchmarks.programs import ALIAS, Gateway, call

_ANSWER_S_MAX = 120
_SYSTEM = "Be brief."
_QUESTIONS = (
    "What is a weir?",
    "Name a fish.",
    "Why do people build weirs in rivers? Name one reason.",
    "A mill stands beside a weir. How does the water turn its wheel? Explain it to a child.",
)
"""Of different lengths: what is read before the first token differs too."""


@dataclass(frozen=True)
class Turn:
    """A request. at_s: after the conversation's beginning."""

    at_s: float
    question: str


@dataclass(frozen=True)
class Answered:
    """What a client saw, in milliseconds. queue_ms: what Weir says of its wait for a lane; refused: no figure is one then."""

    queue_ms: float = 0.0
    ttft_ms: float = 0.0
    tpot_ms: float = 0.0
    refused: bool = False


def turns(seed: int, number: int, per_second: float) -> list[Turn]:
    """So many requests of one conversation, at this rate."""
    drawn, at_s, found = random.Random(seed), 0.0, []
    for _ in range(number):
        at_s += drawn.expovariate(per_second)
        found.append(Turn(at_s, drawn.choice(_QUESTIONS)))
    return found


def hold(cell: Gateway, name: str, asked: Sequence[Turn], tokens: int) -> list[Answered]:
    """Send each when it is due, and wait for every answer; name: of the conversation, unlike any other of this cell."""
    answers: dict[int, Answered] = {}
    begun = time.monotonic()

    def run(number: int, turn: Turn) -> None:
        time.sleep(max(0.0, begun + turn.at_s - time.monotonic()))
        answers[number] = _answered(cell, f"{name}.{number}", turn.question, tokens)

    threads = [threading.Thread(target=run, args=each) for each in enumerate(asked)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(answers) < len(asked):
        sys.exit(f"bench: {len(asked) - len(answers)} requests of {name} got no answer")
    return [answers[number] for number in range(len(asked))]


def _answered(cell: Gateway, request_id: str, question: str, tokens: int) -> Answered:
    messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": question}]
    body = {"model": ALIAS, "messages": messages, "max_tokens": tokens, "stream": True}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {cell.api_key}", "Idempotency-Key": request_id}
    connection = HTTPConnection("127.0.0.1", cell.port, timeout=_ANSWER_S_MAX)
    try:
        connection.request("POST", cell.path, json.dumps({**body, "stream_options": {"include_usage": True}}), headers)
        sent = time.monotonic()
        answer = connection.getresponse()
        if answer.status in (429, 503):
            return Answered(refused=True)
        times, made = _read(answer)
    finally:
        connection.close()
    record = call(cell.port, "GET", f"/v1/generations/{request_id}", None, cell.api_key or "")
    if answer.status != 200 or not times or record["status"] != "completed":
        raise RuntimeError(f"a request went wrong: {answer.status} {record}")
    tpot_ms = (times[-1] - times[0]) * 1e3 / (made - 1) if made > 1 else 0.0
    return Answered(record["timing"]["queue_ms"], (times[0] - sent) * 1e3, tpot_ms)


def _read(answer: HTTPResponse) -> tuple[list[float], int]:
    """When each piece of text came, and how many tokens the usage says."""
    times, made = [], 0
    for event in _events(answer):
        chunk = json.loads(event)
        if chunk.get("choices") and chunk["choices"][0]["delta"].get("content"):
            times.append(time.monotonic())
        made = (chunk.get("usage") or {}).get("completion_tokens", made)
    return times, made


def _events(answer: HTTPResponse) -> Iterator[bytes]:
    while line := answer.readline():
        if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
            yield line.removeprefix(b"data: ")
