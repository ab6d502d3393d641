"""The client and the surface as the pipeline sees them. `api` implements both; the simulator has its own.

`Client` is one HTTP exchange: headers once, then writes that never block, with what the socket has not accepted yet in plain
sight. `Answer` is a surface's way to show one generation: it turns events into bytes and nothing else.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from weir.core.output import Delta
from weir.errors import WeirError
from weir.messages import GenerationRecord, StandingView
from weir.units import Bytes, Nanos, Tokens


class ClientWatcher(Protocol):
    """Who wants to know what happens to the client while its request runs. Called on the event loop."""

    def client_lost(self) -> None:
        """The connection is gone, also by half-close."""
        ...

    def client_blocked(self) -> None:
        """More than the stream's buffer waits for the socket."""
        ...

    def client_writable(self) -> None:
        """The socket took enough of it."""
        ...

    def client_not_kept(self) -> None:
        """What was to be kept cannot be, and nobody is connected: a fault of the platform."""
        ...


class Client(Protocol):
    """One HTTP exchange with a tenant's client. written: bytes handed over so far, monotone."""

    written: Bytes

    @property
    def read_ns(self) -> Nanos:
        """When the last byte of the request was read."""
        ...

    @property
    def is_lost(self) -> bool:
        """Whether nobody can read an answer any more."""
        ...

    @property
    def unsent(self) -> Bytes:
        """Bytes handed over and not yet accepted by the socket."""
        ...

    def watch(self, watcher: ClientWatcher | None) -> None:
        """Tell this watcher from now on; None: nobody. A client that is lost already is not told again."""
        ...

    async def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Send the status line and headers; once."""
        ...

    def write(self, body: bytes, events: int = 1) -> None:
        """Hand over body bytes; never blocks. After `start`, before `finish`.

        events: how many whole events these are, which only a client that keeps them asks; a comment is none.
        """
        ...

    async def finish(self, body: bytes = b"") -> None:
        """Hand over the last bytes and end the exchange; returns once the socket took them, or gave up on it."""
        ...

    def abort(self) -> None:
        """Cut the connection."""
        ...


class WholeAnswer(Protocol):
    """A plain HTTP answer."""

    @property
    def status(self) -> int: ...

    @property
    def body(self) -> bytes: ...

    def head(self, extra: Sequence[tuple[bytes, bytes]] = ()) -> Sequence[tuple[bytes, bytes]]:
        """All its headers, and these."""
        ...


@dataclass(frozen=True, slots=True)
class Accepted:
    """What a client learns when its request is admitted. input_tokens: as counted, or their upper bound."""

    generation_id: str
    request_id: str
    alias: str
    revision: str
    standing: StandingView
    input_tokens: Tokens = 0


class Answer(Protocol):
    """One generation in the shape of its surface. Before `open`, a failure is a plain HTTP answer; after it, an event."""

    client: Client

    async def open(self, accepted: Accepted) -> None:
        """Streams only: headers and the event that says accepted."""
        ...

    def output(self, pieces: Sequence[Delta]) -> None:
        """Streams only, after `open`: output events, all in one write."""
        ...

    def finish_reason(self, record: GenerationRecord) -> None:
        """Streams only: the engine ended; surfaces whose shape tells that before the usage write it now."""
        ...

    def keep_alive(self) -> None:
        """Streams only, after `open`: a comment."""
        ...

    async def end(self, record: GenerationRecord, pieces: Sequence[Delta], standing: StandingView) -> None:
        """The terminal event of a stream that is open, else the whole answer with the HTTP status of its ending.

        pieces: the whole output of an answer that is not streamed.
        """
        ...

    async def refuse(self, error: WeirError, standing: StandingView | None, generation: GenerationRecord | None) -> None:
        """A refusal, as a plain HTTP answer; never after `open`."""
        ...
