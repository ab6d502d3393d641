"""Simulated clients: the gateway's Client and Answer without HTTP, with a way to read and a moment to leave.

A client accepts bytes at its rate or gets stuck, and leaves when its habits say so. Its answer keeps what was handed over and
tells a witness first, so that checkers see exactly the bytes that a tenant got. It never decides anything for the gateway.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from weir.core.output import Delta, text_of
from weir.errors import WeirError
from weir.gateway.client import Accepted, Client, ClientWatcher
from weir.messages import GenerationRecord, StandingView
from weir.ports import Clock
from weir.units import NANOS_PER_SECOND, Bytes, Millis, Nanos, ns_from_ms

_EVENT_BYTES = 40
"""What a surface's framing adds to a piece of text."""

_FLUSH_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Habits:
    """How a client reads and when it goes. None: it does not do that.

    bytes_per_s: its reading speed, else at once. stuck_after: bytes after which it reads nothing more. leaves_after_bytes and
    leaves_after_ms: it closes the connection then. cancels_after_ms: it cancels its request by id then. headers_ms: how long
    its connection takes the headers.
    """

    bytes_per_s: int | None = None
    stuck_after: Bytes | None = None
    leaves_after_bytes: Bytes | None = None
    leaves_after_ms: Millis | None = None
    cancels_after_ms: Millis | None = None
    headers_ms: Millis = 0


PATIENT = Habits()


class SimClient:
    """One exchange's connection. grace_ms: how long `finish` waits for a reader before it cuts."""

    def __init__(self, clock: Clock, habits: Habits, grace_ms: Millis) -> None:
        self._clock = clock
        self._habits = habits
        self._grace_ms = grace_ms
        self._watcher: ClientWatcher | None = None
        self._accepted: Bytes = 0
        self._accepted_at_ns: Nanos = clock.monotonic_ns()
        self._read_ns: Nanos = clock.monotonic_ns()
        self.written: Bytes = 0
        self.is_lost = False

    @property
    def read_ns(self) -> Nanos:
        """When the request was read: when this object was made."""
        return self._read_ns

    @property
    def unsent(self) -> Bytes:
        """Bytes that the client has not read."""
        self._read()
        return self.written - self._accepted

    def _read(self) -> None:
        """Bring what the client accepted up to now; the part of a byte that a slow reader has read is kept as time."""
        habits, now_ns = self._habits, self._clock.monotonic_ns()
        wanted = self.written - self._accepted
        if habits.stuck_after is not None:
            wanted = min(wanted, max(0, habits.stuck_after - self._accepted))
        if habits.bytes_per_s is None:
            self._accepted += wanted
            return
        readable = (now_ns - self._accepted_at_ns) * habits.bytes_per_s // NANOS_PER_SECOND
        self._accepted += min(wanted, readable)
        caught_up = readable >= wanted
        self._accepted_at_ns = now_ns if caught_up else self._accepted_at_ns + readable * NANOS_PER_SECOND // habits.bytes_per_s

    def watch(self, watcher: ClientWatcher | None) -> None:
        """Tell this watcher from now on."""
        self._watcher = watcher

    async def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Headers carry nothing here, but may take their time."""
        if self._habits.headers_ms:
            await asyncio.sleep(self._habits.headers_ms / 1e3)

    def write(self, body: bytes, events: int = 1) -> None:
        """Hand over bytes; a client that has had enough leaves at the next turn of the loop."""
        if self.is_lost:
            return
        self._read()
        self.written += len(body)
        enough = self._habits.leaves_after_bytes
        if enough is not None and self.written >= enough:
            asyncio.get_running_loop().call_soon(self.leave)

    async def finish(self, body: bytes = b"") -> None:
        """Hand over the last bytes and wait until they are read, at most the grace, then cut."""
        self.write(body)
        deadline_ns = self._clock.monotonic_ns() + ns_from_ms(self._grace_ms)
        while not self.is_lost and self.unsent:
            if self._clock.monotonic_ns() > deadline_ns:
                self.abort()
                return
            await asyncio.sleep(_FLUSH_POLL_S)

    def abort(self) -> None:
        """The gateway cuts the connection; the watcher hears of it as of any loss, a turn later."""
        if not self.is_lost:
            self.is_lost = True
            asyncio.get_running_loop().call_soon(self._tell_lost)

    def leave(self) -> None:
        """The client closes the connection."""
        if not self.is_lost:
            self.is_lost = True
            self._tell_lost()

    def vanish(self) -> None:
        """The gateway's process is gone, and with it whoever could be told."""
        self.is_lost = True
        self._watcher = None

    def _tell_lost(self) -> None:
        if self._watcher is not None:
            self._watcher.client_lost()


class Witness(Protocol):
    """Who sees what an answer shows, before the client does."""

    def opened(self, answer: "SimAnswer", accepted: Accepted) -> None:
        """A stream's headers go out."""
        ...

    def handed_out(self, answer: "SimAnswer", texts: Sequence[str]) -> None:
        """Output goes out."""
        ...

    def answered(self, answer: "SimAnswer", record: GenerationRecord, text: str) -> None:
        """The terminal event, or the whole answer."""
        ...

    def refused(self, answer: "SimAnswer", error: WeirError) -> None:
        """A refusal."""
        ...


class SimAnswer:
    """One generation's shape: what was shown, in order, once each. name: of the exchange, for messages and traces."""

    def __init__(self, name: str, client: Client, witness: Witness) -> None:
        self.name = name
        self.client = client
        self._witness = witness
        self.accepted: Accepted | None = None
        self.text = ""
        self.record: GenerationRecord | None = None
        self.refusal: WeirError | None = None
        self.comments = 0

    @property
    def is_over(self) -> bool:
        """Whether a terminal event, an answer or a refusal was shown."""
        return self.record is not None or self.refusal is not None

    async def open(self, accepted: Accepted) -> None:
        """Headers and `accepted`."""
        assert self.accepted is None and not self.is_over, f"{self.name}: opened twice, or after its end"
        self.accepted = accepted
        self._witness.opened(self, accepted)
        await self.client.start(200, ())
        self.client.write(bytes(_EVENT_BYTES))

    def output(self, pieces: Sequence[Delta]) -> None:
        """Output events in one write."""
        assert self.accepted is not None and not self.is_over, f"{self.name}: output outside of its stream"
        texts = [piece.text for piece in pieces]
        self._witness.handed_out(self, texts)
        text = "".join(texts)
        self.text += text
        self.client.write(bytes(len(text.encode()) + _EVENT_BYTES * len(texts)))

    def finish_reason(self, record: GenerationRecord) -> None:
        """This surface tells it with the end."""

    def keep_alive(self) -> None:
        """A comment."""
        assert self.accepted is not None and not self.is_over, f"{self.name}: a comment outside of its stream"
        self.comments += 1
        self.client.write(bytes(_EVENT_BYTES))

    async def end(self, record: GenerationRecord, pieces: Sequence[Delta], standing: StandingView) -> None:
        """The terminal event, or the whole answer."""
        assert not self.is_over, f"{self.name}: ended twice"
        self.record = record
        text = text_of(pieces)
        self._witness.answered(self, record, text)
        await self.client.finish(bytes(len(text.encode()) + _EVENT_BYTES))

    async def refuse(self, error: WeirError, standing: StandingView | None, generation: GenerationRecord | None) -> None:
        """A refusal."""
        assert self.accepted is None and not self.is_over, f"{self.name}: refused after it was accepted or ended"
        self.refusal = error
        self._witness.refused(self, error)
        await self.client.finish(bytes(_EVENT_BYTES))
