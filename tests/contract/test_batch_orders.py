"""Protects clients that order a batch again: one key of a tenant is one batch, whatever died, and through whatever gateway."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable
from contextlib import suppress
from typing import Any, TypeVar

import httpx2
import msgspec
import pytest
from tests.contract.admin_stand import ManualClock, SeededEntropy
from tests.contract.desk_stand import CHAT, OTHER_KEY, SECOND_KEY, DeskStand, desk_standing
from tests.contract.tenant_stand import KEY

from weir import errors
from weir.api.batch_lines import read_request
from weir.batches import file_keys
from weir.batches.desk import BatchDesk, DeskBounds
from weir.batches.kept_orders import BatchOrder, order_name
from weir.batches.upkeep import ORDER_DAYS, Upkeep
from weir.core.batches.batch_records import BatchCounts, BatchEnd, BatchStatus
from weir.core.batches.batch_view import BatchView
from weir.core.tenancy import Principal, ServiceClass
from weir.storage.file_memory import FileFault, FileMemory, FileOperation

T = TypeVar("T")
DAY_MS = 86_400_000
ACME = Principal("acme", "app", "0" * 12, ServiceClass.INTERACTIVE)
STEPS = 16
"""More than the operations of the store that an order takes."""


@pytest.fixture
async def stand() -> AsyncIterator[DeskStand]:
    async with desk_standing() as made:
        yield made


async def asked(stand: DeskStand, file_id: str, idempotency_key: str | None, key: str = KEY, **more: Any) -> httpx2.Response:
    """An order over HTTP."""
    headers = {"authorization": f"Bearer {key}"}
    if idempotency_key is not None:
        headers["idempotency-key"] = idempotency_key
    body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h", **more}
    return await stand.tenants.client.post("/v1/batches", json=body, headers=headers)


def failing_create(number: int) -> FileFault:
    """Fails one of the notes that are written once."""
    creates = itertools.count()
    return lambda operation: operation == "create" and next(creates) == number


class Gateways:
    """Two desks on one store."""

    def __init__(self, stand: DeskStand, file_id: str) -> None:
        assert isinstance(stand.store, FileMemory)
        self.store = stand.store
        self.snapshot = stand.tenants.inbox.snapshot
        self.first = stand.desk
        entropy = SeededEntropy()
        entropy.token(64)  # so that it draws other ids
        self.second = BatchDesk(stand.store, stand.clock, entropy, DeskBounds(), read_request)
        self.upkeep = Upkeep(stand.store, stand.clock, stand.tenants.inbox)
        self._order = BatchOrder(file_id, CHAT, "24h", {"run": "7"})

    async def order(self, desk: BatchDesk) -> BatchView:
        """The same order under the same key."""
        return await desk.create(ACME, self.snapshot, self._order, "rivers-1")

    def check_one(self, *views: BatchView) -> None:
        """There is one batch, which workers find, and all views are of it."""
        names = [key for key in self.store.keys if key.startswith(file_keys.batches_folder("acme")) and key.endswith(".json")]
        (batch_id,) = {view.record.id for view in views}
        assert names == [file_keys.batch_record("acme", batch_id)]
        assert file_keys.open_batch(batch_id) in self.store.keys
        assert len({view.record.created_ms for view in views}) == 1


# ── over HTTP ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_the_same_order_under_its_key_is_the_same_batch(stand: DeskStand) -> None:
    """Protects clients whose answer was lost: as it is by now, also when it has ended and its file is gone."""
    file_id = await stand.upload()
    first = await asked(stand, file_id, "Rivers:1", metadata={"a": "1", "b": "2"})
    assert first.status_code == 200 and first.headers["x-request-id"] == "Rivers:1"
    again = await asked(stand, file_id, "Rivers:1", key=SECOND_KEY, metadata={"b": "2", "a": "1"})
    assert again.json() == first.json()
    batch_id = first.json()["id"]
    end = BatchEnd(BatchStatus.COMPLETED, stand.clock.now_ms, BatchCounts(2, 2))
    await stand.store.create(file_keys.batch_end("acme", batch_id), msgspec.json.encode(end))
    await stand.store.delete(file_keys.open_batch(batch_id))
    assert (await stand.ask("DELETE", f"/v1/files/{file_id}")).status_code == 200
    last = await asked(stand, file_id, "Rivers:1", metadata={"a": "1", "b": "2"})
    assert (last.json()["id"], last.json()["status"]) == (batch_id, "completed")
    assert await stand.store.files(file_keys.OPEN_FOLDER) == []


async def test_another_order_under_a_key_is_refused(stand: DeskStand) -> None:
    """Protects clients from an answer to another question; another key, case and all, and another tenant's are apart."""
    file_id = await stand.upload()
    first = await asked(stand, file_id, "k")
    for more in ({"metadata": {"a": "1"}}, {"completion_window": "12h"}, {"input_file_id": await stand.upload()}):
        refused = await asked(stand, file_id, "k", **more)
        assert (refused.status_code, refused.json()["error"]["code"]) == (422, "request_id_reused")
    others = [await asked(stand, file_id, "K"), await asked(stand, await stand.upload(key=OTHER_KEY), "k", key=OTHER_KEY)]
    assert len({answer.json()["id"] for answer in (first, *others)}) == 3


@pytest.mark.parametrize("key", ["", "a b", "ä", "k" * 129])
async def test_a_key_that_is_none_is_refused(stand: DeskStand, key: str) -> None:
    """Protects clients from a key that would be ignored."""
    body = {"input_file_id": await stand.upload(), "endpoint": CHAT, "completion_window": "24h"}
    headers = [(b"authorization", f"Bearer {KEY}".encode()), (b"idempotency-key", key.encode("latin-1"))]
    answer = await stand.tenants.client.post("/v1/batches", json=body, headers=headers)
    assert (answer.status_code, answer.json()["error"]["field"]) == (400, "Idempotency-Key")
    assert await stand.store.files(file_keys.OPEN_FOLDER) == []


async def test_what_was_refused_keeps_no_key_and_no_key_keeps_nothing(stand: DeskStand) -> None:
    """Protects clients that correct an order, and the store from notes of orders without a key."""
    file_id = await stand.upload()
    assert (await asked(stand, "file-" + "0" * 27, "k")).status_code == 404
    assert (await asked(stand, file_id, "k")).status_code == 200
    ids = {(await asked(stand, file_id, None)).json()["id"] for _ in range(2)}
    notes = [key for key in await stand.stored() if key.endswith(".order")]
    assert len(ids) == 2 and notes == [file_keys.batch_order("acme", order_name("k"))]


# ── deaths, and two at once ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("at", range(STEPS))
@pytest.mark.parametrize("days", [0, 2])
async def test_a_try_that_died_anywhere_is_gone_on_with(stand: DeskStand, at: int, days: int) -> None:
    """Protects from a second batch: whatever was written when the first gateway died, and whatever was swept since."""
    gateways, operations = Gateways(stand, await stand.upload()), itertools.count()
    gateways.store.fault = lambda operation: next(operations) >= at
    with suppress(errors.FileStoreUnavailable):
        await gateways.order(gateways.first)
    gateways.store.fault = None
    stand.clock.now_ms += days * DAY_MS
    await gateways.upkeep.sweep()
    views = [await gateways.order(desk) for desk in (gateways.second, gateways.first)]
    gateways.check_one(*views)


@pytest.mark.parametrize("steps", range(STEPS))
async def test_two_gateways_at_once_make_one_batch(stand: DeskStand, steps: int) -> None:
    """Protects from a second batch where a client asks another gateway while the first one is about it."""
    gateways = Gateways(stand, await stand.upload())
    first = asyncio.get_running_loop().create_task(gateways.order(gateways.first))
    for _ in range(steps):
        await asyncio.sleep(0)
    second = await gateways.order(gateways.second)
    gateways.check_one(await first, second)


class SlowMemory(FileMemory):
    """A store of which some operations take several steps. slow: which."""

    slow: str = ""

    async def turn(self, operation: FileOperation) -> None:
        """As the store's, later."""
        for _ in range(4 if operation == self.slow else 0):
            await asyncio.sleep(0)
        await super().turn(operation)


@pytest.mark.parametrize(("first", "slow"), [(0, ""), (1, "create"), (2, "delete")])
@pytest.mark.parametrize("begins", ["upkeep", "order"])
async def test_the_mark_of_a_late_try_is_not_swept_away(begins: str, first: int, slow: str) -> None:
    """Protects a batch from never being run: its mark is a day old and stands for nothing, until just now."""
    for steps in range(first, 2 * STEPS, 3):  # each kind of store other moments
        store = SlowMemory(ManualClock().wall_ms)  # the desk's clock goes on without it
        async with desk_standing(store=store) as stand:
            gateways = Gateways(stand, await stand.upload())
            store.fault = failing_create(2)
            with pytest.raises(errors.FileStoreUnavailable):  # of the record, behind key and mark
                await gateways.order(gateways.first)
            store.fault, store.slow = None, slow
            stand.clock.now_ms += 2 * DAY_MS
            waits = (0, steps) if begins == "upkeep" else (steps, 0)
            sweep, order = gateways.upkeep.sweep(), gateways.order(gateways.second)
            _, view = await asyncio.gather(after(waits[0], sweep), after(waits[1], order))
            gateways.check_one(view)


async def after(steps: int, work: Awaitable[T]) -> T:
    """Do it so much later."""
    for _ in range(steps):
        await asyncio.sleep(0)
    return await work


# ── how long a key is known ──────────────────────────────────────────────────────────────────────────────────────────


async def test_a_key_goes_with_its_batch(stand: DeskStand) -> None:
    """Protects the store, and clients that use a key again after a month: it is a new one."""
    gateways = Gateways(stand, await stand.upload())
    view = await gateways.order(gateways.first)
    end = BatchEnd(BatchStatus.COMPLETED, stand.clock.now_ms, BatchCounts(2, 2))
    await stand.store.create(file_keys.batch_end("acme", view.record.id), msgspec.json.encode(end))
    await stand.store.delete(file_keys.open_batch(view.record.id))
    stand.clock.now_ms += 29 * DAY_MS
    await gateways.upkeep.sweep()
    assert (await gateways.order(gateways.second)).record == view.record
    stand.clock.now_ms += DAY_MS
    await gateways.upkeep.sweep()
    assert [each.key for each in await stand.store.files(file_keys.batches_folder("acme"))] == []


async def test_a_key_without_a_batch_goes_in_its_time(stand: DeskStand) -> None:
    """Protects the store from what a try left that nobody made again."""
    gateways = Gateways(stand, await stand.upload())
    gateways.store.fault = failing_create(1)
    with pytest.raises(errors.FileStoreUnavailable):
        await gateways.order(gateways.first)
    gateways.store.fault = None
    folder = file_keys.batches_folder("acme")
    for days, left in ((ORDER_DAYS - 1, 1), (1, 0)):
        stand.clock.now_ms += days * DAY_MS
        await gateways.upkeep.sweep()
        assert len(await stand.store.files(folder)) == left
