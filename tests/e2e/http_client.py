"""An HTTP client on a plain socket, and the two APIs of a cell on top of it.

Tests need what libraries hide: the bytes as they were sent, requests that break off, half-closed and pipelined connections. It
blocks, every wait has a bound, and it checks the framing of what it reads.
"""

import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from urllib.parse import urlsplit

from tests.e2e.running_cell import RunningCell

WAIT_S = 20.0
GAUGES_AT_REST = ("weir_requests_in_flight", "weir_open_holds", "weir_live_executions", "weir_queue_entries")

Json = dict[str, Any]
_GENERATION: Json = {"model_alias": "assistant", "input": "Say something."}
_names = count(1)


@dataclass(frozen=True, slots=True)
class Event:
    """One server-sent event."""

    id: int | None
    name: str
    content: str

    @property
    def json(self) -> Json:
        """The event's content as an object."""
        parsed: Json = json.loads(self.content)
        return parsed


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer. headers: by lower-case name; body: empty for a stream, which is read as events."""

    status: int
    headers: Mapping[str, str]
    body: bytes = b""

    @property
    def json(self) -> Json:
        """The body as an object."""
        parsed: Json = json.loads(self.body)
        return parsed

    @property
    def is_stream(self) -> bool:
        """Whether events follow the headers."""
        return self.headers.get("content-type", "").startswith("text/event-stream")


class Wire:
    """One TCP connection to a base URL. Raises TimeoutError when an answer takes longer than WAIT_S."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._socket = socket.create_connection((parts.hostname or "", parts.port or 0), timeout=WAIT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._host = parts.netloc
        self._buffer = b""

    def send(self, content: bytes) -> None:
        """Raw bytes."""
        self._socket.sendall(content)

    def ask(
        self, method: str, path: str, *, key: str | None = None, body: object = None, headers: Mapping[str, str] | None = None
    ) -> None:
        """Send a request; body: bytes as they are, anything else as JSON."""
        self.send(self.request(method, path, key=key, body=body, headers=headers))

    def request(
        self, method: str, path: str, *, key: str | None = None, body: object = None, headers: Mapping[str, str] | None = None
    ) -> bytes:
        """The bytes of a request."""
        content = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        fields = {"host": self._host, "content-length": str(len(content)), **(headers or {})}
        if key is not None:
            fields.setdefault("authorization", f"Bearer {key}")
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + content

    def reply(self) -> Reply:
        """The next answer; of a stream only its head."""
        status, headers = self._head()
        while status == 100:  # bounded: an answer has at most one interim head here
            status, headers = self._head()
        reply = Reply(status, headers)
        return reply if reply.is_stream else Reply(status, headers, b"".join(self._parts(headers)))

    def interim(self) -> int:
        """The status of the next head, which has no body."""
        return self._head()[0]

    def events(self, headers: Mapping[str, str]) -> Iterator[Event]:
        """The events of a stream whose head was read, without comments, until its body ends."""
        pending = b""
        for part in self._parts(headers):
            pending += part
            *whole, pending = pending.split(b"\n\n")
            yield from (event for block in whole if (event := _event(block.decode())) is not None)
        assert not pending, "the stream ended within an event"

    def is_closed(self) -> bool:
        """Wait until the peer closes; whether it did without sending more."""
        try:
            return self._buffer == b"" and self._socket.recv(1) == b""
        except ConnectionResetError:
            return True

    def half_close(self) -> None:
        """Say that nothing more is sent."""
        self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Leave."""
        self._socket.close()

    def __enter__(self) -> "Wire":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _head(self) -> tuple[int, dict[str, str]]:
        lines = self._until(b"\r\n\r\n").decode("latin-1").split("\r\n")
        version, status, _ = lines[0].split(" ", 2)
        assert version in ("HTTP/1.0", "HTTP/1.1")
        headers: dict[str, str] = {}
        for line in filter(None, lines[1:]):
            name, _, value = line.partition(":")
            assert name.lower() not in headers, f"{name} came twice"
            headers[name.lower()] = value.strip()
        return int(status), headers

    def _parts(self, headers: Mapping[str, str]) -> Iterator[bytes]:
        if headers.get("transfer-encoding") == "chunked":
            while size := int(self._until(b"\r\n"), 16):  # bounded by the stream's end
                yield self._exactly(size)
                assert self._exactly(2) == b"\r\n"
            assert self._exactly(2) == b"\r\n"
        elif "content-length" in headers:
            yield self._exactly(int(headers["content-length"]))
        else:
            yield from self._rest()

    def _rest(self) -> Iterator[bytes]:
        yield self._buffer
        self._buffer = b""
        while more := self._socket.recv(65_536):  # bounded by the peer's close
            yield more

    def _until(self, mark: bytes) -> bytes:
        while mark not in self._buffer:  # bounded by the socket's timeout and the peer's close
            self._more()
        found, _, self._buffer = self._buffer.partition(mark)
        return found

    def _exactly(self, size: int) -> bytes:
        while len(self._buffer) < size:  # bounded likewise
            self._more()
        found, self._buffer = self._buffer[:size], self._buffer[size:]
        return found

    def _more(self) -> None:
        received = self._socket.recv(65_536)
        if not received:
            raise ConnectionResetError(f"the peer closed; unread before that: {len(self._buffer)} bytes")
        self._buffer += received


def _event(block: str) -> Event | None:
    fields = dict(line.split(": ", 1) for line in block.split("\n") if line and not line.startswith(":"))
    if not fields:
        return None
    number = fields.get("id")
    return Event(int(number) if number is not None else None, fields.get("event", ""), fields["data"])


class Stream:
    """A native stream: what came so far, event by event. events: all events read, in order."""

    def __init__(self, wire: Wire, head: Reply) -> None:
        assert head.status == 200 and head.is_stream, (head.status, head.body)
        self.wire = wire
        self.head = head
        self.events: list[Event] = []
        self._coming = wire.events(head.headers)

    def read(self, number: int) -> None:
        """Read this many further events."""
        for _ in range(number):
            self.events.append(next(self._coming))

    def finish(self) -> Json:
        """Read to the end; what `done` says. The stream must be well-formed from its first event on."""
        self.events += self._coming
        names = [event.name for event in self.events]
        assert [event.id for event in self.events] == list(range(len(names)))
        assert names == ["accepted", *["output"] * (len(names) - 2), "done"]
        return self.events[-1].json

    @property
    def text(self) -> str:
        """The output so far."""
        return "".join(event.json["text"] for event in self.events if event.name == "output")


@dataclass(frozen=True)
class Admin:
    """The management API with an admin key."""

    url: str
    key: str

    def ask(self, method: str, path: str, body: object = None) -> Reply:
        """One request below /admin/v1."""
        return exchange(
            self.url, method, f"/admin/v1{path}", key=self.key, body=body, headers={"content-type": "application/json"}
        )

    def done(self, method: str, path: str, body: object = None) -> Json:
        """One request that must succeed."""
        reply = self.ask(method, path, body)
        assert reply.status in (200, 201), (reply.status, reply.body)
        return reply.json


@dataclass(frozen=True)
class Account:
    """A tenant with one application and one key, through both APIs. wires: connections of streams, closed by `close`."""

    cell: RunningCell
    tenant: str
    application: str
    key: str
    key_id: str
    admin: Admin = field(repr=False)
    wires: list[Wire] = field(default_factory=list, repr=False)

    def connect(self) -> Wire:
        """A connection that lasts as long as this account."""
        self.wires.append(Wire(self.cell.api))
        return self.wires[-1]

    def close(self) -> None:
        """Leave every connection."""
        for wire in self.wires:
            wire.close()

    def __enter__(self) -> "Account":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None) -> Reply:
        """One request on a connection of its own."""
        return exchange(self.cell.api, method, path, key=self.key, body=body, headers=headers)

    def generate(self, **fields: Any) -> Reply:
        """A generation that is not streamed, of 8 tokens unless told otherwise."""
        return self.ask("POST", "/v1/generations", {**_GENERATION, "max_output_tokens": 8, **fields})

    def stream(self, **fields: Any) -> Stream:
        """A streamed generation whose headers came."""
        wire = self.connect()
        wire.ask("POST", "/v1/generations", key=self.key, body={**_GENERATION, **fields, "stream": True})
        return Stream(wire, wire.reply())

    def get(self, request_id: str) -> Reply:
        """A generation's record."""
        return self.ask("GET", f"/v1/generations/{request_id}")

    def cancel(self, request_id: str) -> Reply:
        """Cancel by id."""
        return self.ask("POST", f"/v1/generations/{request_id}/cancel")

    def ended(self, request_id: str) -> Json:
        """The record once it is terminal and posted."""
        found: list[Json] = []

        def is_posted() -> bool:
            found[:] = [self.get(request_id).json]
            return bool(found[0].get("usage", {}).get("settlement") == "posted")

        wait_until(is_posted)
        return found[0]

    def limit(self, scope: Mapping[str, str] | None = None, **limits: int | None) -> Json:
        """Set limits of this tenant, narrowed by `scope`."""
        return self.admin.done("PUT", "/limits", {"scope": {"tenant": self.tenant, **(scope or {})}, **limits})

    def usage(self, group_by: str = "") -> list[Json]:
        """The tenant's usage rows."""
        rows: list[Json] = self.admin.done("GET", f"/usage?tenant={self.tenant}&group_by={group_by}")["rows"]
        return rows

    def account(self, kind: str) -> Json:
        """The tenant's own account of one limit."""
        rows = self.admin.done("GET", f"/ledger?tenant={self.tenant}")["accounts"]
        found: list[Json] = [row for row in rows if row["kind"] == kind and row["scope"] == {"tenant": self.tenant}]
        assert len(found) == 1
        return found[0]


def exchange(
    url: str,
    method: str,
    path: str,
    *,
    key: str | None = None,
    body: object = None,
    headers: Mapping[str, str] | None = None,
) -> Reply:
    """One request and its whole answer on a connection of its own."""
    with Wire(url) as wire:
        wire.ask(method, path, key=key, body=body, headers=headers)
        return wire.reply()


def admin_of(cell: RunningCell) -> Admin:
    """The management API with the bootstrap's key."""
    return Admin(cell.ready["admin"], cell.ready["admin_key"])


def new_account(cell: RunningCell, **fields: Any) -> Account:
    """A tenant of one's own, without limits. fields: of the tenant."""
    admin, tenant = admin_of(cell), f"tenant-{next(_names)}-{time.monotonic_ns() % 10**9}"
    admin.done("POST", "/tenants", {"name": tenant, **fields})
    admin.done("POST", f"/tenants/{tenant}/applications", {"name": "app"})
    made = admin.done("POST", f"/tenants/{tenant}/applications/app/keys")
    return Account(cell, tenant, "app", made["secret"], made["id"], admin)


def demo_account(cell: RunningCell, tenant: str = "acme", application: str = "assistant") -> Account:
    """The demonstration's tenant: there on every start."""
    return Account(cell, tenant, application, cell.key(tenant, application), "", admin_of(cell))


def metrics(cell: RunningCell) -> dict[str, float]:
    """Every sample by its name with labels."""
    lines = exchange(cell.ready["metrics"], "GET", "/metrics").body.decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def is_at_rest(cell: RunningCell) -> bool:
    """Whether nothing runs, nothing is held and no lane is taken."""
    samples = metrics(cell)
    return not any(
        value
        for name, value in samples.items()
        if name.split("{")[0] in GAUGES_AT_REST or (name.startswith("weir_lanes{") and 'state="taken"' in name)
    )


def wait_until(reached: Callable[[], bool], bound_s: float = WAIT_S) -> None:
    """Ask until it is so. Raises AssertionError after the bound."""
    deadline = time.monotonic() + bound_s
    while not reached():
        assert time.monotonic() < deadline, f"not reached within {bound_s} s"
        time.sleep(0.02)
