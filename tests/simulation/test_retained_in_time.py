"""Generations that are retained, between a real gateway and a real coordinator: whatever happens, nothing of them is left."""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest
from tests.kept_stand import STREAM_HEADERS, PlainShape
from tests.simulation.front_stand import Asked, Front, Unmoved, play_front
from tests.simulation.session_stand import Stand
from tests.simulation.stage import LONG_PROMPTS

from weir import errors
from weir.core.endings import FinishReason, Status
from weir.core.ledger.records import SettleRecord
from weir.core.output import Delta
from weir.core.request import InferenceRequest
from weir.core.tenancy import Retention
from weir.gateway.client import Accepted
from weir.gateway.kept_client import KeptClient, Manner
from weir.gateway.retention import RetentionDesk
from weir.gateway.sealing import KeyRing
from weir.kept_streams import OnStored, StreamName
from weir.messages import GenerationRecord, StandingView
from weir.sim.clients import PATIENT, SimAnswer, SimClient
from weir.sim.random_source import SeededEntropy
from weir.sim.world import ALIAS, principal_of
from weir.storage.stream_memory import MemoryWriter, StreamMemory, StreamOperation

POLICY = Retention(seconds=600, bytes=1_000_000, resume_grace_seconds=2)
GRACE_MS = 5_000


class EventAnswer(SimAnswer):
    """A simulated answer whose stream has events."""

    async def open(self, accepted: Accepted) -> None:
        self.accepted = accepted
        await self.client.start(200, STREAM_HEADERS)
        self.client.write(b"accepted\n\n")

    def output(self, pieces: Sequence[Delta]) -> None:
        self.text += "".join(piece.text for piece in pieces)
        self.client.write(b"output\n\n" * len(pieces))

    async def end(self, record: GenerationRecord, pieces: Sequence[Delta], standing: StandingView) -> None:
        self.record = record
        if self.accepted is None:
            await self.client.start(503, ())
        else:
            self.client.write(b"done by %b\n\n" % str(record.finish_reason).encode())
        await self.client.finish()


class LateWriter(MemoryWriter):
    """Stores a segment a while after it was appended."""

    def __init__(self, inner: MemoryWriter, on_stored: OnStored, late_s: float) -> None:
        self._inner = inner
        self._tell = on_stored
        self._late_s = late_s
        self._late: deque[bytes] = deque()
        self._count = 0

    def append(self, segment: bytes) -> bool:
        self._late.append(segment)
        asyncio.get_running_loop().call_later(self._late_s, self._store_one)
        return False

    def _store_one(self) -> None:
        if self._late:
            self._inner.append(self._late.popleft())
            self._count += 1
            self._tell(self._count)

    @property
    def unstored(self) -> int:
        return sum(map(len, self._late))

    async def flush(self) -> None:
        if self._late:
            await asyncio.sleep(self._late_s)

    def close(self) -> None:
        self._late.clear()
        self._inner.close()


class SlowStore(StreamMemory):
    """create_s: how long it takes to begin a stream, late_s: to store a segment. failing: what it does not do."""

    def __init__(self, stand: Stand, create_s: float, late_s: float) -> None:
        super().__init__(stand.clock, fault=lambda operation: operation in self.failing)
        self.failing: set[StreamOperation] = set()
        self.writers: list[MemoryWriter] = []
        self._create_s = create_s
        self._late_s = late_s

    async def create(self, name: StreamName, head: bytes, on_stored: OnStored) -> MemoryWriter:
        await asyncio.sleep(self._create_s)
        writer = await super().create(name, head, on_stored)
        self.writers.append(LateWriter(writer, on_stored, self._late_s) if self._late_s else writer)
        return self.writers[-1]


def keeping(stand: Stand, front: Front, create_s: float = 0.0, late_s: float = 0.0) -> SlowStore:
    """Let the gateway keep streams."""
    store, ring = SlowStore(stand, create_s, late_s), KeyRing.new(SeededEntropy(3))

    async def keys() -> KeyRing:
        return ring

    desk = RetentionDesk(store, keys, stand.clock, SeededEntropy(4), front.inbox, 10_000)
    desk.policy = lambda tenant: POLICY  # type: ignore[method-assign]
    front.gateway.keep_with(desk)
    return store


def ask(front: Front, stand: Stand, manner: Manner = Manner.EVENTS, *, is_background: bool = False, **changes: Any) -> Asked:
    """A client asks for a generation that is kept."""
    client = SimClient(stand.clock, PATIENT, GRACE_MS)
    kept = KeptClient(client, PlainShape(), manner, is_background=is_background)
    asked = Asked(client, EventAnswer(f"exchange-{len(front.asked)}", kept, Unmoved()), stream=True)
    front.asked.append(asked)
    fields: dict[str, Any] = {"prompt": LONG_PROMPTS[0], "max_output_tokens": 400, **changes}
    request = InferenceRequest(ALIAS.name, stream=True, retain=True, **fields)

    async def converse() -> None:
        await front.gateway.generate(principal_of(0), request, asked.answer, "sim")
        asked.done_s = asyncio.get_running_loop().time()

    front.tasks.create_task(converse())
    return asked


def settled(stand: Stand) -> list[SettleRecord]:
    """What was settled."""
    return [record for record in stand.ledger.records if isinstance(record, SettleRecord)]


# ── while its stream is begun ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("delay_s", [0.0, 0.02])
def test_a_client_that_leaves_while_its_stream_is_begun_leaves_nothing(delay_s: float) -> None:
    """Protects holds: what is asked for by nobody is not asked for, and no stream of it is left."""

    async def script(stand: Stand, front: Front) -> None:
        store = keeping(stand, front, create_s=0.3)
        asked = ask(front, stand)
        await asyncio.sleep(0.1)
        asked.client.leave()
        await asyncio.sleep(5)
        assert asked.done_s is not None and await store.tenants() == [] and not stand.ledger.records

    play_front(script, delay_s)


@pytest.mark.parametrize("delay_s", [0.0, 0.02])
def test_a_gateway_that_drains_while_a_stream_is_begun_refuses(delay_s: float) -> None:
    """Protects clients of a gateway that stops: they are told to come back, and nothing was admitted."""

    async def script(stand: Stand, front: Front) -> None:
        store = keeping(stand, front, create_s=0.3)
        asked = ask(front, stand)
        await asyncio.sleep(0.1)
        await front.gateway.drain(1)
        assert isinstance(asked.answer.refusal, errors.Draining)
        assert await store.tenants() == [] and not stand.ledger.records

    play_front(script, delay_s)


def test_the_time_in_the_store_is_part_of_the_deadline() -> None:
    """Protects deadlines: a stream whose beginning takes longer than its request may take is not begun at all."""

    async def script(stand: Stand, front: Front) -> None:
        store = keeping(stand, front, create_s=8)
        asked = ask(front, stand, deadline_ms=4_000)
        await asyncio.sleep(10)
        assert isinstance(asked.answer.refusal, errors.DeadlineUnmeetableNow)
        assert await store.tenants() == [] and not stand.ledger.records

    play_front(script)


# ── while it runs ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_generation_without_a_reader_ends_after_its_grace() -> None:
    """Protects budgets: it goes on for the grace, then it is cancelled, the tenant pays what was made, and its end is kept."""

    async def script(stand: Stand, front: Front) -> None:
        store = keeping(stand, front)
        asked = ask(front, stand)
        await asyncio.sleep(0.5)
        asked.client.leave()
        await asyncio.sleep(5)
        [record] = settled(stand)
        assert (record.status, record.finish_reason) == (Status.CANCELLED, FinishReason.DISCONNECT)
        assert record.cost_microusd > 0
        [stored] = await store.streams(principal_of(0).tenant)
        assert stored.is_ended

    play_front(script)


@pytest.mark.parametrize("is_background", [False, True])
def test_the_platform_pays_for_a_stream_that_it_could_not_keep(is_background: bool) -> None:
    """Protects tenants: the store fails while nobody is connected; the generation ends as failed and costs them nothing."""

    async def script(stand: Stand, front: Front) -> None:
        store = keeping(stand, front)
        asked = ask(front, stand, Manner.BEGUN if is_background else Manner.EVENTS, is_background=is_background)
        await asyncio.sleep(0.5)
        if not is_background:
            asked.client.leave()
        store.failing.add("append")
        await asyncio.sleep(5)
        [record] = settled(stand)
        assert (record.status, record.finish_reason) == (Status.FAILED, FinishReason.LEDGER_UNAVAILABLE)
        assert record.cost_microusd == 0 and await store.tenants() == []

    play_front(script)


def test_output_that_is_not_stored_yet_is_not_complete() -> None:
    """Protects what was paid for: a generation is complete once all of it is stored, not when the engine has made it."""

    async def script(stand: Stand, front: Front) -> None:
        store = keeping(stand, front, late_s=1)
        asked = ask(front, stand)
        for _ in range(400):
            await asyncio.sleep(0.05)
            if settled(stand):
                break
        assert settled(stand) and store.writers[0].unstored == 0
        await asyncio.sleep(2)
        record = asked.answer.record
        assert record is not None and record.status is Status.COMPLETED
        [stored] = await store.streams(principal_of(0).tenant)
        assert stored.is_ended

    play_front(script)


def test_a_lost_coordinator_ends_what_is_kept() -> None:
    """Protects readers: what a coordinator took with it has an end in its stream, as its client was told."""

    async def script(stand: Stand, front: Front) -> None:
        store = keeping(stand, front)
        asked = ask(front, stand)
        await asyncio.sleep(0.5)
        front.lose()
        await asyncio.sleep(2)
        assert asked.answer.record is not None
        assert asked.answer.record.finish_reason is FinishReason.COORDINATOR_LOST
        [stored] = await store.streams(principal_of(0).tenant)
        assert stored.is_ended

    play_front(script)
