"""A gateway's retained streams: bounds of bytes and of time, and what a failing store means."""

import asyncio
from dataclasses import replace

import pytest
from tests.kept_stand import (
    META,
    NAME,
    POLICY,
    STREAM_HEADERS,
    WHOLE_MAX,
    KeptStand,
    PlainShape,
    TakingClient,
    end,
    in_world,
)

from weir import errors
from weir.core.registry.snapshot import Snapshot
from weir.core.request import DEADLINE_MS_MAX
from weir.core.tenancy import Tenant
from weir.gateway.kept_client import KeptClient, Manner
from weir.kept_streams import StreamName
from weir.storage.stream_memory import StreamOperation

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
        assert ending.is_not_kept is not is_there and not ending.is_told
        await end(client)
        await asyncio.sleep(0.1)
        assert inner.taken == (b"one\n\ntwo\n\nthree\n\ndone\n\n" if is_there else b"one\n\n")
        assert await desk.find(NAME.tenant, NAME.generation, has_ended=False) is None and await stand.store.tenants() == []

    in_world(scene, deferred=deferred, fault=lambda operation: operation in failing)


def test_nothing_begins_where_nothing_can_be_stored() -> None:
    """Protects the promise: who asks for a stream that is kept is refused where none can be begun."""

    async def scene(stand: KeptStand) -> None:
        client = KeptClient(TakingClient(), PlainShape(), Manner.EVENTS)
        with pytest.raises(errors.StreamStoreUnavailable):
            await stand.desk().begin(client, NAME, META, WHOLE_MAX)

    in_world(scene, fault=lambda operation: operation == "create")


def test_a_tenant_without_a_policy_keeps_nothing() -> None:
    """Protects tenants: nothing is kept that was not asked for, and what is left is not shown."""

    async def scene(stand: KeptStand) -> None:
        client, _ = await stand.begin(stand.desk(), TakingClient())
        await end(client)
        stand.policy = None
        desk = stand.desk()
        assert await desk.find(NAME.tenant, NAME.generation, has_ended=False) is None
        with pytest.raises(errors.UnsupportedField):
            await desk.begin(KeptClient(TakingClient(), PlainShape(), Manner.EVENTS), NAME, META, WHOLE_MAX)

    in_world(scene)


def test_the_oldest_streams_make_room_and_running_ones_do_not() -> None:
    """Protects a tenant's bytes: ended streams go, oldest first; where all that is left runs, one more is refused."""
    policy = replace(POLICY, bytes=10_000)

    async def keep(stand: KeptStand, number: int, *, is_ended: bool) -> None:
        client = KeptClient(TakingClient(), PlainShape(), Manner.EVENTS)
        desk = stand.desks[number % 2]
        await desk.begin(client, StreamName("acme", f"gen-{number}"), META, WHOLE_MAX)
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


def test_what_a_dead_gateway_left_makes_room() -> None:
    """Protects tenants from a crash: streams without an end that are older than any request do not count as running."""

    async def scene(stand: KeptStand) -> None:
        client, _ = await stand.begin(stand.desk(), TakingClient())
        client.write(b"x" * 9_500 + b"\n\n")
        desk, other = stand.desk(), KeptClient(TakingClient(), PlainShape(), Manner.EVENTS)
        with pytest.raises(errors.QueueFull):
            await desk.begin(other, StreamName("acme", "gen-2"), META, WHOLE_MAX)
        await asyncio.sleep(DEADLINE_MS_MAX / 1e3 + 1)
        await desk.begin(other, StreamName("acme", "gen-3"), META, WHOLE_MAX)
        await desk.admitted("acme")
        assert [stream.name.generation for stream in await stand.store.streams("acme")] == ["gen-3"]

    in_world(scene, policy=replace(POLICY, bytes=10_000, seconds=604_800))


def test_a_stream_that_is_too_large_is_cut() -> None:
    """Protects the bound: one stream alone above its tenant's bytes is kept no further, and its client gets all of it."""

    async def scene(stand: KeptStand) -> None:
        inner, desk = TakingClient(), stand.desk()
        client, _ = await stand.begin(desk, inner)
        for _ in range(30):  # at once: no look in between
            client.write(b"x" * 998 + b"\n\n")
        await end(client)
        assert len(inner.taken) == 30_006
        assert await desk.find(NAME.tenant, NAME.generation, has_ended=False) is None

    in_world(scene, policy=replace(POLICY, bytes=10_000))


def test_a_whole_answer_is_bounded() -> None:
    """Protects memory from an engine without end: what waits to be shown whole is bounded, and its client is cut off."""

    async def scene(stand: KeptStand) -> None:
        inner = TakingClient()
        client, ending = await stand.begin(stand.desk(), inner, Manner.WHOLE)
        for _ in range(20):
            client.write(b"x" * (WHOLE_MAX // 10) + b"\n\n")
        assert inner.is_lost
        await asyncio.sleep(POLICY.resume_grace_seconds + 1)
        assert ending.is_told

    in_world(scene)


# ── time ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_over_is_not_shown_and_is_deleted() -> None:
    """Protects the promise of time: a stream is gone when its seconds are over, also before anybody sweeps."""

    async def scene(stand: KeptStand) -> None:
        desk = stand.desk()
        client, _ = await stand.begin(desk, TakingClient())
        await end(client)
        await asyncio.sleep(POLICY.seconds)
        assert await desk.find(NAME.tenant, NAME.generation, has_ended=False) is not None
        await asyncio.sleep(0.1)
        assert await desk.find(NAME.tenant, NAME.generation, has_ended=False) is None
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
        assert await desk.find(NAME.tenant, NAME.generation, has_ended=False) is not None
        await asyncio.sleep(2)
        await desk.sweep()
        assert await stand.store.tenants() == []

    in_world(scene)


def test_a_stream_whose_record_has_ended_is_over_in_time() -> None:
    """Protects the promise of time: a reader that comes when the time is over does not begin it anew."""

    async def scene(stand: KeptStand) -> None:
        desk = stand.desk()
        client, _ = await stand.begin(desk, TakingClient())
        client.write(b"one\n\n")
        await asyncio.sleep(POLICY.seconds + 1)
        assert await desk.find(NAME.tenant, NAME.generation, has_ended=True) is None
        assert await desk.find(NAME.tenant, NAME.generation, has_ended=False) is not None

    in_world(scene)


def test_nothing_is_swept_while_nobody_knows_who_keeps_what() -> None:
    """Protects streams from a gateway that has just started: without a snapshot no tenant has a policy, and nothing goes."""

    async def scene(stand: KeptStand) -> None:
        client, _ = await stand.begin(stand.desk(), TakingClient())
        await end(client)
        await stand.desk(version=0).sweep()
        assert await stand.store.tenants() == ["acme"]
        stand.policy = None
        desk = stand.desk()
        await desk.sweep()
        await desk.sweep()
        assert await stand.store.tenants() == []

    in_world(scene)


def test_a_sweep_judges_nobody_by_one_look() -> None:
    """Protects running streams from a gateway whose snapshot is older than their policy, and from those of another cell."""

    async def scene(stand: KeptStand) -> None:
        desk = stand.desk()
        client, _ = await stand.begin(desk, TakingClient())
        stand.policy = None
        behind = stand.desk()
        await behind.sweep()
        assert await stand.store.tenants() == ["acme"]
        behind.inbox.snapshot = Snapshot(version=2, tenants={"acme": Tenant("acme", retention=POLICY)})
        await behind.sweep()
        behind.inbox.snapshot = Snapshot(version=3, tenants={})
        await behind.sweep()
        await behind.sweep()
        assert await stand.store.tenants() == ["acme"]
        await end(client)

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
