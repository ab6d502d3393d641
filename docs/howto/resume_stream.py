"""Streams a generation that Weir retains, and goes on where it was whenever the connection is lost. Standard library only.

    WEIR_API_URL=http://127.0.0.1:8080 WEIR_API_KEY=weir-… python resume_stream.py "What is a weir?"

The request id is made here and sent with every try, so that a generation is made, and paid, at most once, whatever is lost on
the way. Events come once and in order: each is given out when it is whole, and a connection goes on behind the last of them.
"""

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

TRIES_MAX = 8
"""In a row without an event: 20 seconds in all, well within a resume grace of 60."""
PAUSE_S, PAUSE_S_MAX = 0.25, 5.0
SILENCE_S = 30
"""A connection that says nothing for so long is lost: a comment comes every 10 seconds."""


@dataclass(frozen=True)
class Event:
    """One event. number: its id; data: its JSON; raw: its bytes as they came."""

    number: int
    name: str
    data: Any
    raw: bytes


class Refused(Exception):
    """An answer that is no stream. wait_s: after which it may be another one; None: it will stay the same."""

    def __init__(self, status: int, code: str, detail: str, wait_s: float | None) -> None:
        super().__init__(f"{status} {code}: {detail}")
        self.code = code
        self.wait_s = wait_s


class ResumedStream:
    """The events of one generation, across as many connections as it takes. body: of the request, without `stream`."""

    def __init__(self, url: str, key: str, body: dict[str, Any], pause: Callable[[float], None] = time.sleep) -> None:
        self.request_id: str = body.get("request_id") or f"resumed-{uuid4()}"
        self.connections = 0
        self._url = urlsplit(url)
        self._key = key
        self._body = {**body, "request_id": self.request_id, "stream": True, "retain": True}
        self._pause = pause
        self._last = -1
        self._is_known = False  # whether this request id has a stream to go on with

    def events(self) -> Iterator[Event]:
        """All events, `done` last. Raises what the last of too many tries in a row raised, or a refusal that will stay."""
        tries = 0
        while True:
            failed: Exception = ConnectionError("the stream ended before its last event")
            try:
                for event in self._connect():
                    self._last, tries = event.number, 0
                    yield event
                    if event.name == "done":
                        return
            except (OSError, HTTPException, Refused) as lost:
                failed = lost
            tries += 1
            wait_s = self._wait_s(failed)
            if tries > TRIES_MAX:
                raise failed
            backoff_s = min(PAUSE_S_MAX, PAUSE_S * 2 ** (tries - 1)) * random.uniform(0.5, 1)
            self._pause(max(wait_s, backoff_s))

    def _wait_s(self, failed: Exception) -> float:
        """How long to wait at least, with what to ask for next decided. Raises a refusal that will stay."""
        if not isinstance(failed, Refused):
            self._is_known = True  # perhaps: only the answer may have been lost
            return 0
        if failed.code in ("not_found", "request_in_flight") and self._last < 0:
            self._is_known = failed.code == "request_in_flight"  # else nothing came of it: ask again, with the same id
            return 0
        if failed.wait_s is None:
            raise failed
        return failed.wait_s

    def _connect(self) -> Iterator[Event]:
        """The events of one connection, which may end anywhere."""
        self.connections += 1
        kind = HTTPSConnection if self._url.scheme == "https" else HTTPConnection
        connection = kind(self._url.netloc, timeout=SILENCE_S)
        headers = {"Authorization": f"Bearer {self._key}"}
        path = f"{self._url.path.rstrip('/')}/v1/generations"
        try:
            if self._is_known:
                if self._last >= 0:
                    headers["Last-Event-ID"] = str(self._last)
                connection.request("GET", f"{path}/{self.request_id}/events", headers=headers)
            else:
                connection.request("POST", path, json.dumps(self._body), headers)
            answer = connection.getresponse()
            if not answer.headers.get("content-type", "").startswith("text/event-stream"):
                raise refusal_of(answer)
            self._is_known = True
            yield from events_in(answer)
        finally:
            connection.close()


def events_in(answer: HTTPResponse) -> Iterator[Event]:
    """Whole events; what was cut off at the end is left out, and so are comments."""
    lines: list[bytes] = []
    while line := answer.readline():
        lines.append(line)
        if line != b"\n":
            continue
        fields = dict(given.rstrip(b"\n").split(b": ", 1) for given in lines[:-1] if not given.startswith(b":"))
        if fields:
            yield Event(int(fields[b"id"]), fields[b"event"].decode(), json.loads(fields[b"data"]), b"".join(lines))
        lines = []


def refusal_of(answer: HTTPResponse) -> Refused:
    """What an answer says that is no stream: a problem, or the record of a generation that ended before its stream began.

    Raises ConnectionError where it says nothing.
    """
    try:
        told = json.loads(answer.read())
    except ValueError as cut:
        raise ConnectionError("the answer was cut off, or is not Weir's") from cut
    told = told.get("error", told)
    again = answer.headers.get("x-should-retry") or str(answer.status in (408, 429) or answer.status >= 500).lower()
    wait_s = int(answer.headers.get("retry-after-ms", 0)) / 1000 if again == "true" else None
    return Refused(answer.status, told.get("code", ""), told.get("detail", ""), wait_s)


def main() -> None:
    """The output as it comes; what it cost, and over how many connections it came, behind it."""
    body = {"model_alias": "assistant", "input": sys.argv[1], "max_output_tokens": 64}
    stream = ResumedStream(os.environ["WEIR_API_URL"], os.environ["WEIR_API_KEY"], body)
    for event in stream.events():
        if event.name == "output":
            print(event.data["text"], end="", flush=True)
        elif event.name == "done":
            print(f"\n{event.data['status']}, {event.data['usage']['output_tokens']} tokens,", end=" ")
    print(f"connections: {stream.connections}")


if __name__ == "__main__":
    main()
