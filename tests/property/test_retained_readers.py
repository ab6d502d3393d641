"""Whoever reads a retained stream, from wherever, whenever and however slowly, reads the same bytes."""

import asyncio
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st
from tests.kept_stand import BUFFER, COMPLETED, FAILED, NAME, RUNNING, KeptStand, TakingClient

from weir.gateway.kept_client import Manner
from weir.messages import StandingView
from weir.sim.virtual_loop import VirtualLoop, run

EVENTS_MAX = 12


@dataclass(frozen=True)
class Reading:
    """A reader: when it comes (ms), behind which event, at which of two gateways, when it stops taking, and for how long."""

    comes_ms: int
    after: int
    is_elsewhere: bool
    stops_ms: int
    stays_ms: int


READINGS = st.lists(
    st.builds(
        Reading,
        st.integers(0, 400),
        st.integers(-1, EVENTS_MAX + 1),
        st.booleans(),
        st.integers(0, 400),
        st.integers(0, 3_000),
    ),
    min_size=1,
    max_size=5,
)
PIECES = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 60), st.integers(0, 2 * BUFFER)), max_size=6)
"""How many events are written at once, how long after the ones before (ms), and how long each is."""


def events_of(pieces: list[tuple[int, int, int]]) -> list[list[bytes]]:
    """Each piece's events; all are numbered."""
    numbers = iter(range(1_000))
    return [[b"%d:%b\n\n" % (next(numbers), b"x" * size) for _ in range(count)] for count, _, size in pieces]


async def stops(client: TakingClient, reading: Reading) -> None:
    """A client that takes nothing for a while."""
    await asyncio.sleep(reading.stops_ms / 1e3)
    client.is_stopped = True
    await asyncio.sleep(reading.stays_ms / 1e3)
    client.go_on()


@given(PIECES, READINGS, st.booleans(), st.none() | st.integers(0, 600), st.sampled_from([Manner.EVENTS, Manner.WHOLE]))
def test_any_interleaving_of_readers_sees_the_same_bytes(
    pieces: list[tuple[int, int, int]], readings: list[Reading], deferred: bool, leaves_ms: int | None, manner: Manner
) -> None:
    """Protects resumption: no gap, no byte twice, no byte changed, for any number of readers at two gateways.

    The one that asked for the stream stops taking as the first reader does. deferred: the store takes its time. leaves_ms: when
    it leaves, None: never.
    """

    async def world() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        stand = KeptStand(loop, deferred=deferred)
        here, elsewhere = stand.desk(), stand.desk()
        first, written = TakingClient(), events_of(pieces)
        client, _ = await stand.begin(here, first, manner)
        stream = [event for piece in written for event in piece] + [b"done\n\n"]
        stopping = loop.create_task(stops(first, readings[0]))
        if leaves_ms is not None:
            loop.call_later(leaves_ms / 1e3, first.leave)

        async def read(reading: Reading) -> bytes:
            await asyncio.sleep(reading.comes_ms / 1e3)
            reader = TakingClient()
            taking = loop.create_task(stops(reader, reading))
            await stand.read(elsewhere if reading.is_elsewhere else here, reading.after, RUNNING, reader)
            await taking
            return reader.taken

        readers = [loop.create_task(read(reading)) for reading in readings]
        for (_, gap_ms, _), events in zip(pieces, written, strict=True):
            await asyncio.sleep(gap_ms / 1e3)
            client.write(b"".join(events), len(events))
            client.write(b": keep-alive\n\n")
        client.expect_end(COMPLETED, StandingView())
        client.write(stream[-1])
        await client.finish()
        for reading, taken in zip(readings, await asyncio.gather(*readers), strict=True):
            assert taken == b"".join(stream[reading.after + 1 :])
        await stopping
        assert first.is_lost or (first.is_finished and first.taken == b"".join(stream))

    run(world(), until_ms=60_000)


@given(PIECES, READINGS, st.booleans())
def test_readers_of_a_stream_whose_gateway_died_see_the_same_end(
    pieces: list[tuple[int, int, int]], readings: list[Reading], deferred: bool
) -> None:
    """Protects the one end: whoever finds that a stream has none makes one of the record, and then that is everybody's."""

    async def world() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        stand = KeptStand(loop, deferred=deferred)
        client, _ = await stand.begin(stand.desk(), TakingClient())
        for events in events_of(pieces):
            client.write(b"".join(events), len(events))
        await asyncio.sleep(0.1)  # and then nothing more is ever heard of it
        stored = [event for events in events_of(pieces) for event in events]
        stream = [*stored, b"closed %d by %s\n\n" % (len(stored), str(FAILED.finish_reason).encode())]
        desks = [stand.desk(), stand.desk()]

        async def read(reading: Reading) -> bytes:
            await asyncio.sleep(reading.comes_ms / 1e3)
            return await stand.read(desks[reading.is_elsewhere], reading.after, FAILED)

        for reading, taken in zip(readings, await asyncio.gather(*map(read, readings)), strict=True):
            assert taken == b"".join(stream[reading.after + 1 :])
        assert (await stand.store.find(NAME)) is not None

    run(world(), until_ms=60_000)
