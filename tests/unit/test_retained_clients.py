"""Clients of retained streams: what a lost or slow one means, who may read, and the one end that everybody sees."""

import asyncio
from dataclasses import replace

import pytest
from tests.kept_stand import (
    COMPLETED,
    FAILED,
    META,
    NAME,
    POLICY,
    RUNNING,
    STREAM_HEADERS,
    WHOLE_MAX,
    KeptStand,
    PlainShape,
    TakingClient,
    end,
    in_world,
)

from weir import errors
from weir.gateway.kept_client import KeptClient, Manner
from weir.gateway.kept_reader import READERS_PER_TENANT_MAX
from weir.messages import GenerationRecord, StandingView
from weir.storage.stream_memory import StreamOperation

# ── who reads ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_lost_client_has_a_grace() -> None:
    """Protects budgets: nobody reads for the grace, and the generation is to end; not a moment before."""

    async def scene(stand: KeptStand) -> None:
        inner = TakingClient()
        _, ending = await stand.begin(stand.desk(), inner)
        await asyncio.sleep(100)
        assert not ending.is_told
        inner.leave()
        await asyncio.sleep(POLICY.resume_grace_seconds - 0.1)
        assert not ending.is_told
        await asyncio.sleep(0.2)
        assert ending.is_told

    in_world(scene)


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_a_reader_prolongs_the_grace(is_elsewhere: bool) -> None:
    """Protects resumed streams: with a reader, here or at another gateway, it goes on; without one for a grace more."""

    async def scene(stand: KeptStand) -> None:
        inner, here = TakingClient(), stand.desk()
        _, ending = await stand.begin(here, inner)
        inner.leave()
        reader = TakingClient()
        reading = stand.loop.create_task(stand.read(stand.desk() if is_elsewhere else here, -1, client=reader, record=RUNNING))
        await asyncio.sleep(10 * POLICY.resume_grace_seconds)
        assert not ending.is_told
        reader.leave()
        await reading
        await asyncio.sleep(2 * POLICY.resume_grace_seconds + 1)
        assert ending.is_told

    in_world(scene)


def test_background_work_needs_no_reader() -> None:
    """Protects offline work: its client leaves, and nothing ends it."""

    async def scene(stand: KeptStand) -> None:
        inner = TakingClient()
        client, ending = await stand.begin(stand.desk(), inner, Manner.BEGUN, is_background=True)
        client.write(b"begun\n\n")
        await asyncio.sleep(0.1)
        assert inner.is_finished and inner.taken == b"begun\n\n"
        inner.leave()
        await asyncio.sleep(3_600)
        assert not ending.is_told
        await end(client)
        assert await stand.read(stand.desk(), -1) == b"begun\n\ndone\n\n"

    in_world(scene)


def test_a_client_that_is_lost_before_it_is_watched_is_noticed() -> None:
    """Protects against a lost moment: who left between the request and the watch has the same grace."""

    async def scene(stand: KeptStand) -> None:
        inner = TakingClient()
        inner.is_lost = True
        _, ending = await stand.begin(stand.desk(), inner)
        await asyncio.sleep(POLICY.resume_grace_seconds + 1)
        assert ending.is_told

    in_world(scene)


@pytest.mark.parametrize("grace_s", [1, 2, 10])
def test_a_slow_reader_elsewhere_keeps_it_alive(grace_s: int) -> None:
    """Protects resumed streams with a short grace: an idle reader, and one that takes little by little, count as readers."""

    async def scene(stand: KeptStand) -> None:
        stand.store.poll_ms = 500
        inner, here, reader = TakingClient(), stand.desk(), TakingClient()
        client, ending = await stand.begin(here, inner)
        inner.leave()
        reading = stand.loop.create_task(stand.read(stand.desk(), -1, RUNNING, reader))
        await asyncio.sleep(5 * grace_s)
        assert not ending.is_told
        reader.is_stopped = True
        client.write(b"x" * 3_000 + b"\n\n")
        for _ in range(5 * grace_s):
            await asyncio.sleep(1)
            reader.take(100)
        assert not ending.is_told and not reader.is_lost
        reader.leave()
        await reading

    in_world(scene, policy=replace(POLICY, resume_grace_seconds=grace_s))


def test_readers_are_bounded() -> None:
    """Protects a gateway: a tenant's readers at once are so many, and one more is told to come back."""

    async def scene(stand: KeptStand) -> None:
        desk = stand.desk()
        await stand.begin(desk, TakingClient())
        readers = [stand.loop.create_task(stand.read(desk, -1, RUNNING)) for _ in range(READERS_PER_TENANT_MAX)]
        desk.check_room(NAME.tenant)
        await asyncio.sleep(0.1)
        desk.check_room("another")
        with pytest.raises(errors.QueueFull):
            desk.check_room(NAME.tenant)
        desk.close()
        assert await asyncio.gather(*readers) == [b""] * READERS_PER_TENANT_MAX

    in_world(scene)


def test_a_reader_that_takes_nothing_is_dropped() -> None:
    """Protects memory: what waits for a reader is bounded, and so is for how long."""

    async def scene(stand: KeptStand) -> None:
        desk, reader = stand.desk(), TakingClient()
        client, _ = await stand.begin(desk, TakingClient())
        reading = stand.loop.create_task(stand.read(desk, -1, RUNNING, reader))
        reader.is_stopped = True
        for number in range(1_000):
            client.write(b"%d:%b\n\n" % (number, b"x" * 100))
        await asyncio.sleep(10)
        assert reader.is_lost and reader.unsent < 400_000 and reading.done()
        await end(client)
        assert (await stand.read(desk, 998)) == b"999:%b\n\ndone\n\n" % (b"x" * 100)

    in_world(scene)


def test_a_reader_that_may_read_no_more_is_ended_within_a_second() -> None:
    """Protects revocation: it ends what runs, readers too, within a second, also of those that wait for nothing."""

    async def scene(stand: KeptStand) -> None:
        desk, client, allowed = stand.desk(), TakingClient(), [True]
        await stand.begin(desk, TakingClient())
        reader = await desk.find(NAME.tenant, NAME.generation, has_ended=False)
        assert reader is not None
        await client.start(200, STREAM_HEADERS)

        async def told() -> GenerationRecord:
            return RUNNING

        following = desk.follow(reader, client, PlainShape(), told, is_allowed=lambda: allowed[0])
        reading = stand.loop.create_task(following)
        await asyncio.sleep(30)
        allowed.clear()
        allowed.append(False)
        await asyncio.sleep(1)
        assert reading.done() and reading.result() is False

    in_world(scene)


def test_a_deleted_stream_ends_its_readers() -> None:
    """Protects deletion: who reads at that moment is told of a fault, and never of an end without what came before it."""

    async def scene(stand: KeptStand) -> None:
        desk = stand.desk()
        client, _ = await stand.begin(desk, TakingClient())
        client.write(b"one\n\n")
        reading = stand.loop.create_task(stand.read(desk, -1, record=FAILED))
        await asyncio.sleep(0.5)
        await desk.delete(NAME.tenant, NAME.generation)
        await asyncio.sleep(40)
        assert reading.done() and reading.exception() is None and reading.result() == b"one\n\n"

    in_world(scene)


# ── one end ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("manner", [Manner.EVENTS, Manner.WHOLE])
def test_a_gateway_that_was_taken_for_dead_shows_no_second_end(manner: Manner) -> None:
    """Protects one history: a stream that was ended elsewhere has that end; its late owner cuts its client off."""

    async def scene(stand: KeptStand) -> None:
        inner, owner = TakingClient(), stand.desk()
        client, _ = await stand.begin(owner, inner, manner)
        client.write(b"one\n\n")
        elsewhere = await stand.read(stand.desk(), -1, FAILED)
        client.write(b"two\n\n")
        await end(client)
        assert inner.is_lost and b"done" not in inner.taken
        assert await stand.read(owner, -1, COMPLETED) == elsewhere == b"one\n\nclosed 1 by coordinator_lost\n\n"

    in_world(scene)


def test_what_ended_before_it_began_is_told_to_readers() -> None:
    """Protects readers of a request that waited in vain: its client gets a plain answer, they get the events of its end."""

    async def scene(stand: KeptStand) -> None:
        inner, desk = TakingClient(), stand.desk()
        client = KeptClient(inner, PlainShape(), Manner.EVENTS)
        await desk.begin(client, NAME, META, WHOLE_MAX)
        reading = stand.loop.create_task(stand.read(desk, -1, RUNNING))
        await asyncio.sleep(1)
        client.expect_end(FAILED, StandingView())
        await client.start(503, [(b"content-type", b"application/json")])
        await client.finish(b"{}")
        assert (inner.status, inner.taken) == (503, b"{}")
        assert await reading == b"closed 0 by coordinator_lost\n\n"

    in_world(scene)


def test_a_stream_that_lost_its_last_events_is_not_shown_as_whole() -> None:
    """Protects readers from half an answer: events that are missing before the end are a fault, not an end."""

    async def scene(stand: KeptStand) -> None:
        client, _ = await stand.begin(stand.desk(), TakingClient())
        for number in range(5):
            client.write(b"%d\n\n" % number)
        await end(client)
        stand.store.lose_last(NAME, 2)
        with pytest.raises(errors.StreamStoreUnavailable):
            await stand.read(stand.desk(), -1)

    in_world(scene)


def test_an_end_that_fails_again_and_again_is_left_to_the_record() -> None:
    """Protects what was kept: the end cannot be stored, nothing is deleted, and readers end the stream by its record later."""
    failing: set[StreamOperation] = {"end"}

    async def scene(stand: KeptStand) -> None:
        inner = TakingClient()
        client, _ = await stand.begin(stand.desk(), inner)
        client.write(b"one\n\n")
        await end(client)
        assert inner.is_finished and inner.taken == b"one\n\ndone\n\n"
        failing.clear()
        assert await stand.read(stand.desk(), -1, COMPLETED) == b"one\n\nclosed 1 by stop\n\n"

    in_world(scene, fault=lambda operation: operation in failing)


def test_a_whole_answer_whose_end_cannot_be_stored_is_shown() -> None:
    """Protects the last event: the store fails at the end, and the client has a whole answer all the same."""

    async def scene(stand: KeptStand) -> None:
        inner = TakingClient()
        client, _ = await stand.begin(stand.desk(), inner, Manner.WHOLE)
        client.write(b"one\n\n")
        await end(client)
        assert inner.is_finished and inner.taken == b"one\n\ndone\n\n"

    in_world(scene, fault=lambda operation: operation == "end")


def test_a_client_that_is_behind_does_not_wait_for_an_end_that_cannot_be_stored() -> None:
    """Protects a gateway from requests that never end: who reads from the store is cut where the store takes no end."""

    async def scene(stand: KeptStand) -> None:
        inner = TakingClient()
        client, _ = await stand.begin(stand.desk(), inner)
        inner.is_stopped = True
        for number in range(5):
            client.write(b"%d:%b\n\n" % (number, b"x" * 100))
        inner.go_on()
        await asyncio.sleep(1)
        await end(client)
        assert inner.is_lost and not inner.is_finished

    in_world(scene, fault=lambda operation: operation == "end")
