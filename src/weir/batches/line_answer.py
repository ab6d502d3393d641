"""The client and the answer of a line: nobody is connected, and what would be sent is taken down."""

from collections.abc import Sequence
from dataclasses import dataclass

from weir.core.output import Delta
from weir.errors import WeirError
from weir.gateway.client import Accepted, Answer, Client, ClientWatcher
from weir.messages import GenerationRecord, StandingView
from weir.units import Bytes, Nanos


class LineClient:
    """Takes one whole answer. leave: it is not waited for any more."""

    def __init__(self, read_ns: Nanos) -> None:
        self.written: Bytes = 0
        self.read_ns = read_ns
        self.unsent: Bytes = 0
        self.is_lost = False
        self.status = 0
        self.body = b""
        self._watcher: ClientWatcher | None = None

    def watch(self, watcher: ClientWatcher | None) -> None:
        """Tell this watcher when the line is given up."""
        self._watcher = watcher

    async def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Of the head only the status is kept."""
        self.status = status

    def write(self, body: bytes, events: int = 1) -> None:
        """A part of the body."""
        self.body += body

    async def finish(self, body: bytes = b"") -> None:
        """The rest of it."""
        self.body += body

    def abort(self) -> None:
        """It gets no answer."""
        self.is_lost = True

    def reset(self, read_ns: Nanos) -> None:
        """The line is run again."""
        self.read_ns, self.written, self.status, self.body = read_ns, 0, 0, b""

    def leave(self) -> None:
        """End its generation."""
        if not self.is_lost:
            self.is_lost = True
            if self._watcher is not None:
                self._watcher.client_lost()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one try. refusal: why there was no generation; record: how it ended, or that of its request id."""

    refusal: WeirError | None = None
    record: GenerationRecord | None = None


class LineAnswer:
    """An answer in its surface's shape, and beside it what became of the try: None where it was left."""

    def __init__(self, shown: Answer) -> None:
        self.client: Client = shown.client
        self.outcome: Outcome | None = None
        self._shown = shown

    async def open(self, accepted: Accepted) -> None:
        """Nothing is streamed."""
        raise AssertionError("a line is answered whole")

    def output(self, pieces: Sequence[Delta]) -> None:
        """Nothing is streamed."""
        raise AssertionError("a line is answered whole")

    def finish_reason(self, record: GenerationRecord) -> None:
        """Its end tells that."""

    def keep_alive(self) -> None:
        """Nobody waits."""

    async def end(self, record: GenerationRecord, pieces: Sequence[Delta], standing: StandingView) -> None:
        """The whole answer."""
        self.outcome = Outcome(record=record)
        await self._shown.end(record, pieces, standing)

    async def refuse(self, error: WeirError, standing: StandingView | None, generation: GenerationRecord | None) -> None:
        """No generation, or not another one."""
        self.outcome = Outcome(error, generation)
        await self._shown.refuse(error, standing, generation)
