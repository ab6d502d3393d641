"""A gateway's retained streams: who may keep one, what a lost client and a failing store mean, bounds, and what is over."""

import asyncio
from collections.abc import Awaitable, Callable
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
    KeptStand,
    PlainShape,
    TakingClient,
)

from weir import errors
from weir.core.request import DEADLINE_MS_MAX
from weir.core.tenancy import Retention
from weir.gateway.kept_client import KeptClient, Manner
from weir.gateway.kept_reader import READERS_PER_TENANT_MAX
from weir.kept_streams import StreamName
from weir.messages import StandingView
from weir.sim.virtual_loop import VirtualLoop, run
from weir.storage.stream_memory import StreamOperation
from weir.units import Millis

DAY_MS: Millis = 86_400_000


def in_world(
    scene: Callable[[KeptStand], Awaitable[None]],
    *,
    deferred: bool = False,
    policy: Retention | None = POLICY,
    fault: Callable[[StreamOperation], bool] | None = None,
) -> None:
    """Play a scene in virtual time."""

    async def world() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        await scene(KeptStand(loop, deferred=deferred, policy=policy, fault=fault))

    run(world(), until_ms=3 * DAY_MS)


async def end(client: KeptClient) -> None:
    """End a stream as complete."""
    client.expect_end(COMPLETED, StandingView())
    client.write(b"done\n\n")
    await client.finish()


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


# ── stores that fail, tenants with too many bytes ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("is_there", [False, True])
def test_a_stream_that_cannot_be_stored_goes_on_for_its_client(deferred: bool, is_there: bool) -> None:
    """Protects answers from the store: it fails, the client gets every byte, nobody reads half; with no client it ends."""
    failing: set[StreamOperation] = set()

    async def scene(stand: KeptStand) -> None:
        inner, desk = TakingClient(), stand.desk()
        client, ending = await stand.begin(desk, inner)
        client.write(b"one\n\n")
        await asyncio.sleep(0.1)
        if not is_there:
            inner.leave()
        failing.add("append")
        client.write(b"two\n\n")
        await asyncio.sleep(0.1)
        client.write(b"three\n\n")
        assert ending.is_told is not is_there
        await end(client)
        await asyncio.sleep(0.1)
        assert inner.taken == (b"one\n\ntwo\n\nthree\n\ndone\n\n" if is_there else b"one\n\n")
        assert await desk.find(NAME.tenant, NAME.generation) is None and await stand.store.tenants() == []

    in_world(scene, deferred=deferred, fault=lambda operation: operation in failing)


@pytest.mark.parametrize("manner", [Manner.EVENTS, Manner.WHOLE])
def test_an_end_that_cannot_be_stored_is_shown(manner: Manner) -> None:
    """Protects the last event: the store fails at the end, and the client has a whole answer all the same."""
    failing: set[StreamOperation] = set()

    async def scene(stand: KeptStand) -> None:
        inner = TakingClient()
        client, _ = await stand.begin(stand.desk(), inner, manner)
        client.write(b"one\n\n")
        failing.add("end")
        await end(client)
        assert inner.is_finished and inner.taken == b"one\n\ndone\n\n"
        await asyncio.sleep(0.1)
        assert await stand.store.tenants() == []

    in_world(scene, fault=lambda operation: operation in failing)


def test_nothing_begins_where_nothing_can_be_stored() -> None:
    """Protects the promise: who asks for a stream that is kept is refused where none can be begun."""

    async def scene(stand: KeptStand) -> None:
        client = KeptClient(TakingClient(), PlainShape(), Manner.EVENTS)
        with pytest.raises(errors.StreamStoreUnavailable):
            await stand.desk().begin(client, NAME, META)

    in_world(scene, fault=lambda operation: operation == "create")


def test_a_tenant_without_a_policy_keeps_nothing() -> None:
    """Protects tenants: nothing is kept that was not asked for, and what is left is not shown."""

    async def scene(stand: KeptStand) -> None:
        client, _ = await stand.begin(stand.desk(), TakingClient())
        await end(client)
        stand.policy = None
        desk = stand.desk()
        assert await desk.find(NAME.tenant, NAME.generation) is None
        with pytest.raises(errors.UnsupportedField):
            await desk.begin(KeptClient(TakingClient(), PlainShape(), Manner.EVENTS), NAME, META)

    in_world(scene)


def test_the_oldest_streams_make_room_and_running_ones_do_not() -> None:
    """Protects a tenant's bytes: ended streams go, oldest first; where all that is left runs, one more is refused."""
    policy = replace(POLICY, bytes=10_000)

    async def keep(stand: KeptStand, number: int, *, is_ended: bool) -> None:
        client = KeptClient(TakingClient(), PlainShape(), Manner.EVENTS)
        desk = stand.desks[number % 2]
        await desk.begin(client, StreamName("acme", f"gen-{number}"), META)
        await desk.admitted("acme")
        await client.start(200, STREAM_HEADERS)
        client.write(b"x" * 1_800 + b"\n\n")
        await asyncio.sleep(1)
        if is_ended:
            await end(client)

    async def scene(stand: KeptStand) -> None:
        stand.desks = [stand.desk(), stand.desk()]
        for number in range(8):
            await keep(stand, number, is_ended=True)
        kept = [stream.name.generation for stream in await stand.store.streams("acme")]
        assert kept == [f"gen-{number}" for number in range(3, 8)][-len(kept) :] and len(kept) >= 4
        for number in range(8, 13):
            await keep(stand, number, is_ended=False)
        with pytest.raises(errors.QueueFull, match="10000 bytes"):
            await keep(stand, 14, is_ended=False)

    in_world(scene, policy=policy)


def test_a_stream_that_is_too_large_is_cut() -> None:
    """Protects the bound: one stream alone above its tenant's bytes is kept no further, and its client gets all of it."""

    async def scene(stand: KeptStand) -> None:
        inner, desk = TakingClient(), stand.desk()
        client, _ = await stand.begin(desk, inner)
        for _ in range(30):
            client.write(b"x" * 998 + b"\n\n")
            await asyncio.sleep(0.01)
        await end(client)
        assert len(inner.taken) == 30_006
        assert await desk.find(NAME.tenant, NAME.generation) is None

    in_world(scene, policy=replace(POLICY, bytes=10_000))


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
        await desk.begin(client, NAME, META)
        reading = stand.loop.create_task(stand.read(desk, -1, RUNNING))
        await asyncio.sleep(1)
        client.expect_end(FAILED, StandingView())
        await client.start(503, [(b"content-type", b"application/json")])
        await client.finish(b"{}")
        assert (inner.status, inner.taken) == (503, b"{}")
        assert await reading == b"closed 0 by coordinator_lost\n\n"

    in_world(scene)


# ── time ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_over_is_not_shown_and_is_deleted() -> None:
    """Protects the promise of time: a stream is gone when its seconds are over, also before anybody sweeps."""

    async def scene(stand: KeptStand) -> None:
        desk = stand.desk()
        client, _ = await stand.begin(desk, TakingClient())
        await end(client)
        await asyncio.sleep(POLICY.seconds)
        assert await desk.find(NAME.tenant, NAME.generation) is not None
        await asyncio.sleep(0.1)
        assert await desk.find(NAME.tenant, NAME.generation) is None
        await desk.sweep()
        assert await stand.store.tenants() == []

    in_world(scene)


def test_a_stream_without_an_end_may_still_run() -> None:
    """Protects running streams from the sweep: without an end one goes only when no request can run any more."""

    async def scene(stand: KeptStand) -> None:
        desk = stand.desk()
        await stand.begin(desk, TakingClient())
        await asyncio.sleep(DEADLINE_MS_MAX / 1e3 + POLICY.seconds - 1)
        await desk.sweep()
        assert await desk.find(NAME.tenant, NAME.generation) is not None
        await asyncio.sleep(2)
        await desk.sweep()
        assert await stand.store.tenants() == []

    in_world(scene)


def test_nothing_is_swept_while_nobody_knows_who_keeps_what() -> None:
    """Protects streams from a gateway that has just started: without a snapshot no tenant has a policy, and nothing goes."""

    async def scene(stand: KeptStand) -> None:
        client, _ = await stand.begin(stand.desk(), TakingClient())
        await end(client)
        await stand.desk(version=0).sweep()
        assert await stand.store.tenants() == ["acme"]
        stand.policy = None
        await stand.desk().sweep()
        assert await stand.store.tenants() == []

    in_world(scene)


def test_a_sweep_outlives_a_store_that_fails() -> None:
    """Protects upkeep: what could not be deleted is deleted later."""
    failing: set[StreamOperation] = {"tenants"}

    async def scene(stand: KeptStand) -> None:
        desk = stand.desk()
        client, _ = await stand.begin(desk, TakingClient())
        await end(client)
        sweeping = stand.loop.create_task(desk.sweep_forever())
        await asyncio.sleep(POLICY.seconds + 5)
        failing.clear()
        assert await stand.store.tenants() == ["acme"]
        await asyncio.sleep(2)
        assert await stand.store.tenants() == []
        sweeping.cancel()

    in_world(scene, fault=lambda operation: operation in failing)
