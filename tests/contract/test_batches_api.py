"""Protects OpenAI's batches: they are asked for, shown and given up as its SDK knows it, and are their tenant's alone."""

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from openai import APIStatusError, ConflictError, NotFoundError
from openai.types import Batch
from tests.contract.desk_stand import CHAT, OTHER_KEY, SECOND_KEY, DeskStand, desk_standing, line

from weir.batches import file_keys
from weir.batches.batch_files import BatchFiles, Results
from weir.batches.desk import DeskBounds
from weir.core.batches.batch_records import (
    BatchCounts,
    BatchEnd,
    BatchFault,
    BatchProgress,
    BatchRecord,
    BatchStatus,
    CancelMark,
)
from weir.storage.file_memory import FileMemory

DAY_S = 86_400


@pytest.fixture
async def stand() -> AsyncIterator[DeskStand]:
    async with desk_standing() as made:
        yield made


async def create(stand: DeskStand, **more: Any) -> Batch:
    """A batch of two lines."""
    order: dict[str, Any] = {"input_file_id": await stand.upload(), "endpoint": CHAT, "completion_window": "24h", **more}
    return await stand.sdk().batches.create(**order)


async def shown(stand: DeskStand, batch: Batch) -> dict[str, Any]:
    """The batch as it is shown now."""
    answer = await stand.ask("GET", f"/v1/batches/{batch.id}")
    assert answer.status_code == 200
    body: dict[str, Any] = answer.json()
    return body


async def write(stand: DeskStand, key: str, content: msgspec.Struct) -> None:
    """What a worker stores."""
    await stand.store.replace(key, msgspec.json.encode(content))


async def end(stand: DeskStand, batch: Batch, status: BatchStatus, **more: Any) -> None:
    """The end that a worker stores."""
    await write(
        stand, file_keys.batch_end("acme", batch.id), BatchEnd(status, stand.clock.now_ms, BatchCounts(2, 1, 1), **more)
    )


# ── create and show ──────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_batch_is_created_and_shown_with_the_official_sdk(stand: DeskStand) -> None:
    """Protects OpenAI's clients: a new batch has everything that was asked for, and is what the list shows."""
    batch = await create(stand, metadata={"run": "7"})
    assert (batch.object, batch.status, batch.endpoint, batch.completion_window) == ("batch", "validating", CHAT, "24h")
    assert batch.expires_at == batch.created_at + DAY_S and batch.metadata == {"run": "7"}
    assert batch.request_counts is not None and batch.request_counts.total == 2
    assert (batch.output_file_id, batch.error_file_id, batch.errors) == (None, None, None)
    client = stand.sdk(SECOND_KEY)
    assert await client.batches.retrieve(batch.id) == batch
    assert [each async for each in client.batches.list()] == [batch]


async def test_the_mark_that_workers_look_for_is_there_before_the_batch() -> None:
    """Protects batches from being shown and never run: where the store fails between the two, nothing is shown."""
    async with desk_standing() as stand:
        file_id = await stand.upload()
        assert isinstance(stand.store, FileMemory)
        asked = iter((False, True))
        stand.store.fault = lambda operation: operation == "create" and next(asked)
        body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
        answer = await stand.ask("POST", "/v1/batches", body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "file_store_unavailable")
        stand.store.fault = None
        assert (await stand.ask("GET", "/v1/batches")).json()["data"] == []
        (mark,) = await stand.store.files(file_keys.OPEN_FOLDER)
        assert await stand.store.read(mark.key) == b'{"tenant":"acme"}'


async def test_what_a_worker_runs_by_is_recorded(stand: DeskStand) -> None:
    """Protects workers: whose key lines run as, until when, and for how long results are kept."""
    expiry = {"anchor": "created_at", "seconds": 7_200}
    batch = await create(stand, output_expires_after=expiry)
    content = await stand.store.read(file_keys.batch_record("acme", batch.id))
    assert content is not None
    record = msgspec.json.decode(content, type=BatchRecord)
    assert (record.tenant, record.application, record.key, record.lines) == ("acme", "app", "0" * 12, 2)
    assert record.output_expires_s == 7_200 and record.expires_ms == record.created_ms + DAY_S * 1_000


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"input_file_id": None}, "invalid_request", "input_file_id"),
    ({"input_file_id": 7}, "invalid_request", "input_file_id"),
    ({"endpoint": None}, "invalid_request", "endpoint"),
    ({"endpoint": "/v1/images/generations"}, "invalid_request", "endpoint"),
    ({"endpoint": ["/v1/embeddings"]}, "invalid_request", "endpoint"),
    ({"endpoint": "/v1/embeddings"}, "invalid_request", "endpoint"),
    ({"completion_window": None}, "invalid_request", "completion_window"),
    ({"completion_window": "soon"}, "invalid_request", "completion_window"),
    ({"completion_window": "x" * 33}, "invalid_request", "completion_window"),
    ({"metadata": {"x" * 65: "y"}}, "invalid_request", "metadata"),
    ({"metadata": {"x": "y" * 513}}, "invalid_request", "metadata"),
    ({"metadata": {str(number): "y" for number in range(17)}}, "invalid_request", "metadata"),
    ({"output_expires_after": 3_600}, "invalid_request", "output_expires_after"),
    ({"output_expires_after": {"anchor": "created_at"}}, "invalid_request", "output_expires_after.seconds"),
    ({"output_expires_after": {"seconds": 3_600}}, "invalid_request", "output_expires_after.anchor"),
    (
        {"output_expires_after": {"anchor": "created_at", "seconds": 2_592_001}},
        "invalid_request",
        "output_expires_after.seconds",
    ),
    (
        {"output_expires_after": {"anchor": "created_at", "seconds": 3_600, "x": 1}},
        "unsupported_field",
        "output_expires_after.x",
    ),
    ({"model": "assistant"}, "unsupported_field", "model"),
]


@pytest.mark.parametrize(("wrong", "code", "field"), WRONG)
async def test_a_batch_is_refused_by_what_is_wrong(stand: DeskStand, wrong: dict[str, Any], code: str, field: str) -> None:
    """Protects callers from options that would be ignored, and the store from what was refused."""
    body = {"input_file_id": await stand.upload(), "endpoint": CHAT, "completion_window": "24h", **wrong}
    answer = await stand.ask("POST", "/v1/batches", body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["field"]) == (400, code, field)
    assert await stand.store.files(file_keys.OPEN_FOLDER) == []


async def test_a_file_must_be_there_and_an_input(stand: DeskStand) -> None:
    """Protects callers: an unknown file and another tenant's are the same, and what a batch made is no input."""
    theirs = await stand.upload(key=OTHER_KEY)
    body = {"endpoint": CHAT, "completion_window": "24h"}
    answers = [
        await stand.ask("POST", "/v1/batches", {"input_file_id": file_id, **body})
        for file_id in (theirs, "file-" + "0" * 27, "../x")
    ]
    assert {answer.status_code for answer in answers} == {404} and len({answer.content for answer in answers}) == 1
    unknown = await stand.upload(line("one", {"model": "absent", "messages": [{"role": "user", "content": "x"}]}))
    answer = await stand.ask("POST", "/v1/batches", {"input_file_id": unknown, **body})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_alias")


async def test_open_batches_are_bounded_and_ended_ones_make_room() -> None:
    """Protects workers from a tenant that asks for batches without end."""
    async with desk_standing(DeskBounds(open_batches_max=1)) as stand:
        batch = await create(stand)
        with pytest.raises(ConflictError) as refused:
            await create(stand)
        body: Any = refused.value.body
        assert (body["code"], body["limit"], body["used"]) == ("not_allowed_now", 1, 1)
        await end(stand, batch, BatchStatus.COMPLETED)
        await create(stand)


# ── how it goes on ───────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_batch_that_waits_for_a_budget_tells_why_and_until_when(stand: DeskStand) -> None:
    """Protects whoever waits: a paused batch is in progress, with the code that it waits for."""
    batch = await create(stand)
    now_ms = stand.clock.now_ms
    counts = BatchCounts(2, 1, 0)
    progress = BatchProgress(counts, BatchStatus.IN_PROGRESS, now_ms, None, "budget_exhausted", now_ms + 60_000)
    await write(stand, file_keys.batch_progress("acme", batch.id), progress)
    body = await shown(stand, batch)
    assert (body["status"], body["paused_reason"]) == ("in_progress", "budget_exhausted")
    assert body["resumes_at"] == now_ms // 1000 + 60 and body["in_progress_at"] == now_ms // 1000
    assert body["request_counts"] == {"total": 2, "completed": 1, "failed": 0}


@pytest.mark.parametrize("status", [BatchStatus.COMPLETED, BatchStatus.FAILED, BatchStatus.EXPIRED, BatchStatus.CANCELLED])
async def test_an_end_is_shown_with_its_files_and_its_time(stand: DeskStand, status: BatchStatus) -> None:
    """Protects the SDK's readers: each end has its own time, and no other one's."""
    batch = await create(stand)
    fault = BatchFault("invalid_request", "Not a line.", 2, "body")
    await end(stand, batch, status, output="file-out", error="file-err", faults=(fault,))
    body = await shown(stand, batch)
    assert (body["status"], body["output_file_id"], body["error_file_id"]) == (status.value, "file-out", "file-err")
    ended = {f"{each.value}_at": body[f"{each.value}_at"] for each in (*BatchStatus,) if f"{each.value}_at" in body}
    assert ended[f"{status.value}_at"] == stand.clock.now_ms // 1000
    assert sum(ended[name] is not None for name in ("completed_at", "failed_at", "expired_at", "cancelled_at")) == 1
    said = {"code": "invalid_request", "message": "Not a line.", "line": 2, "param": "body"}
    assert body["errors"] == {"object": "list", "data": [said]} and body["paused_reason"] is None
    Batch.model_validate(body)


async def test_a_batch_is_cancelled_once_and_again(stand: DeskStand) -> None:
    """Protects callers that try again: a cancelled batch is cancelling until its worker ended it, and then refused."""
    batch = await create(stand)
    client = stand.sdk()
    first = await client.batches.cancel(batch.id)
    assert first.status == "cancelling" and first.cancelling_at == stand.clock.now_ms // 1000
    stand.clock.now_ms += 5_000
    assert await client.batches.cancel(batch.id) == first
    mark = await stand.store.read(file_keys.batch_cancel("acme", batch.id))
    assert mark is not None and msgspec.json.decode(mark, type=CancelMark).at_ms == stand.clock.now_ms - 5_000
    await end(stand, batch, BatchStatus.CANCELLED)
    with pytest.raises(ConflictError) as refused:
        await client.batches.cancel(batch.id)
    body: Any = refused.value.body
    assert (body["code"], body["state"]) == ("not_allowed_now", "cancelled")


async def test_a_cancellation_that_came_too_late_shows_nothing(stand: DeskStand) -> None:
    """Protects readers of a batch that completed: it was never given up, whatever was asked for in its last moment."""
    created = await create(stand)
    await stand.sdk().batches.cancel(created.id)
    content = await stand.store.read(file_keys.batch_record("acme", created.id))
    assert content is not None
    files = BatchFiles(stand.store, stand.clock, 1_000, 1_000)
    record, counts = msgspec.json.decode(content, type=BatchRecord), BatchCounts(2, 2, 0)
    assert await files.end(record, BatchStatus.COMPLETED, BatchProgress(counts), Results("file-out", None, counts))
    ended = await stand.sdk().batches.retrieve(created.id)
    assert (ended.status, ended.cancelling_at, ended.cancelled_at) == ("completed", None, None)


async def test_a_damaged_record_is_a_fault_of_the_store(stand: DeskStand) -> None:
    """Protects callers and the gateway: what cannot be read is said to be so, and is no bug that ends anything."""
    created = await create(stand)
    await stand.store.replace(file_keys.batch_record("acme", created.id), b'{"id":')
    with pytest.raises(APIStatusError) as caught:
        await stand.sdk().batches.retrieve(created.id)
    assert (caught.value.status_code, caught.value.code) == (503, "file_store_unavailable")


# ── whose they are, and lists ────────────────────────────────────────────────────────────────────────────────────────


async def test_another_tenants_batch_is_as_unknown_as_one_that_never_was(stand: DeskStand) -> None:
    """Protects tenants: an id of another one answers, byte by byte, as an id of nobody, and is not cancelled."""
    batch = await create(stand)
    unknown = "batch_" + "0" * (len(batch.id) - 6)
    for method, action in (("GET", ""), ("POST", "/cancel")):
        theirs = await stand.ask(method, f"/v1/batches/{batch.id}{action}", key=OTHER_KEY)
        nobodys = await stand.ask(method, f"/v1/batches/{unknown}{action}", key=OTHER_KEY)
        assert theirs.status_code == nobodys.status_code == 404 and theirs.content == nobodys.content
    assert (await stand.ask("GET", "/v1/batches", key=OTHER_KEY)).json()["data"] == []
    assert (await shown(stand, batch))["status"] == "validating"
    with pytest.raises(NotFoundError):
        await stand.sdk().batches.retrieve("..%2Fx")


async def test_batches_are_listed_page_by_page(stand: DeskStand) -> None:
    """Protects the SDK's paging: the youngest first, each once."""
    made = []
    for _ in range(5):
        made.append((await create(stand)).id)
        stand.clock.now_ms += 1
    assert [each.id async for each in stand.sdk().batches.list(limit=2)] == made[::-1]
    page = (await stand.ask("GET", f"/v1/batches?limit=1&after={made[3]}")).json()
    assert [each["id"] for each in page["data"]] == [made[2]] and page["has_more"]


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "limit=x", "after=", "order=asc"])
async def test_a_list_is_refused_by_name(stand: DeskStand, query: str) -> None:
    """Protects callers from options of a list that would be ignored."""
    answer = await stand.ask("GET", f"/v1/batches?{query}")
    assert answer.status_code == 400 and answer.json()["error"]["field"] == query.partition("=")[0]


async def test_answers_have_the_ids_and_methods_of_every_path(stand: DeskStand) -> None:
    """Protects correlation and clients that try another method."""
    answer = await stand.ask("GET", "/v1/batches")
    assert answer.headers["x-request-id"] == answer.headers["request-id"]
    answer = await stand.ask("DELETE", "/v1/batches")
    assert answer.status_code == 405 and answer.headers["allow"] == "GET, POST"
    assert (await stand.tenants.client.get("/v1/batches")).status_code == 401
