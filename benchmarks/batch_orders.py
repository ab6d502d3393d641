"""Batches as a benchmark orders them over HTTP: a file of lines, the batch, its end and its results, each wait bounded."""

import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from http.client import HTTPConnection
from typing import Any

from benchmarks.programs import ALIAS, Gateway, call

ENDPOINT = "/v1/chat/completions"
ENDS = ("completed", "failed", "expired", "cancelled")
_BOUNDARY = "weir-bench"
_CALL_S_MAX = 120


def chat_lines(prompts: Iterable[str], tokens: int) -> list[dict[str, Any]]:
    """A line for each prompt, of so many output tokens at most."""
    bodies = ({"model": ALIAS, "messages": [{"role": "user", "content": text}], "max_tokens": tokens} for text in prompts)
    return [
        {"custom_id": f"line-{number}", "method": "POST", "url": ENDPOINT, "body": body} for number, body in enumerate(bodies)
    ]


def uploaded(cell: Gateway, lines: Sequence[Mapping[str, Any]]) -> str:
    """The id of a batch's file, once every line was checked."""
    content = "".join(json.dumps(line) + "\n" for line in lines)
    part = f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="'
    form = f'{part}purpose"\r\n\r\nbatch\r\n{part}file"; filename="x.jsonl"\r\n\r\n{content}\r\n--{_BOUNDARY}--\r\n'
    headers = {"Content-Type": f"multipart/form-data; boundary={_BOUNDARY}"}
    answer: dict[str, str] = json.loads(_read(cell, "POST", "/v1/files", form.encode(), headers))
    return answer["id"]


def created(cell: Gateway, file_id: str) -> str:
    """The id of a new batch."""
    asked = {"input_file_id": file_id, "endpoint": ENDPOINT, "completion_window": "1h"}
    batch: dict[str, str] = call(cell.port, "POST", "/v1/batches", asked, cell.api_key or "")
    return batch["id"]


def shown(cell: Gateway, batch_id: str) -> dict[str, Any]:
    """A batch as it is now."""
    batch: dict[str, Any] = call(cell.port, "GET", f"/v1/batches/{batch_id}", None, cell.api_key or "")
    return batch


def ended(cell: Gateway, batch_id: str, seconds: float) -> dict[str, Any]:
    """A batch once it has ended; ends the benchmark after so many seconds."""
    deadline = time.monotonic() + seconds
    batch = shown(cell, batch_id)
    while batch["status"] not in ENDS:
        if time.monotonic() > deadline:
            sys.exit(f"bench: the batch did not end: {batch}")
        time.sleep(0.2)
        batch = shown(cell, batch_id)
    return batch


def told(cell: Gateway, batch: Mapping[str, Any]) -> Counter[str]:
    """How often the results have each line, by what its own id says."""
    files = [batch[name] for name in ("output_file_id", "error_file_id") if batch.get(name)]
    lines = [line for each in files for line in _read(cell, "GET", f"/v1/files/{each}/content").splitlines()]
    return Counter(json.loads(line)["custom_id"] for line in lines)


def _read(cell: Gateway, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None) -> bytes:
    connection = HTTPConnection("127.0.0.1", cell.port, timeout=_CALL_S_MAX)
    try:
        connection.request(method, path, body, {**(headers or {}), "Authorization": f"Bearer {cell.api_key}"})
        answer = connection.getresponse()
        text = answer.read()
    finally:
        connection.close()
    if answer.status != 200:
        sys.exit(f"bench: {method} {path} was answered {answer.status}: {text[:500]!r}")
    return text
