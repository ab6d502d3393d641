"""Protects OpenAI's files: they are checked and stored as they arrive, are their tenant's alone, and leave nothing behind."""

import asyncio
import tracemalloc
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from openai import ConflictError, NotFoundError
from tests.contract.desk_stand import (
    BODY,
    FORM,
    OTHER_KEY,
    PURPOSE,
    SECOND_KEY,
    TWO_LINES,
    DeskStand,
    chopped,
    desk_standing,
    form,
    line,
    part,
    upload_form,
)
from tests.contract.tenant_stand import KEY, tenant_standing

from weir.batches.desk import DeskBounds
from weir.config import GatewayConfig
from weir.core.batches.batch_records import Purpose
from weir.core.tenancy import Principal, ServiceClass
from weir.storage.file_directory import FileDirectory
from weir.storage.file_memory import FileMemory

WAIT_S = 10
MIBIBYTE = 1024 * 1024
ACME = Principal("acme", "app", "0" * 12, ServiceClass.INTERACTIVE)
FILE = part("file", TWO_LINES, "in.jsonl")


@pytest.fixture
async def stand() -> AsyncIterator[DeskStand]:
    async with desk_standing() as made:
        yield made


def head(size: int) -> bytes:
    """The head of an upload whose form has so many bytes."""
    lines = f"POST /v1/files HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\ncontent-type: {FORM['content-type']}\r\n"
    return f"{lines}content-length: {size}\r\n\r\n".encode()


async def until(holds: Callable[[], bool]) -> None:
    """Wait for a condition on a served stand."""
    for _ in range(WAIT_S * 200):
        if holds():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not come")


async def begun(stand: DeskStand) -> None:
    """Wait until a file is on its way."""
    await until(lambda: stand.desk.arriving > 0)


async def nothing_left(stand: DeskStand) -> bool:
    """Wait until no upload is on its way; whether nothing of it is held or stored."""
    await until(lambda: stand.tenants.app.arriving.size == 0 and stand.desk.arriving == 0)
    return not await stand.stored()


# ── what the official SDK sees ───────────────────────────────────────────────────────────────────────────────────────


async def test_a_file_goes_its_way_with_the_official_sdk(stand: DeskStand) -> None:
    """Protects OpenAI's clients: upload, show, list, read byte by byte, delete."""
    client = stand.sdk()
    made = await client.files.create(file=("in.jsonl", TWO_LINES), purpose="batch")
    assert (made.object, made.bytes, made.filename, made.purpose) == ("file", len(TWO_LINES), "in.jsonl", "batch")
    assert made.status == "processed" and made.expires_at == made.created_at + 30 * 86_400
    assert await client.files.retrieve(made.id) == made
    assert [each async for each in client.files.list()] == [made]
    assert (await client.files.content(made.id)).content == TWO_LINES
    deleted = await client.files.delete(made.id)
    assert deleted.deleted and deleted.id == made.id
    with pytest.raises(NotFoundError):
        await client.files.content(made.id)
    assert await stand.stored() == []


async def test_an_upload_tells_how_long_it_is_kept(stand: DeskStand) -> None:
    """Protects the expiry, which is the client's to choose, and what is known of the file's lines."""
    expiry: Any = {"anchor": "created_at", "seconds": 3_600}
    made = await stand.sdk().files.create(file=("in.jsonl", TWO_LINES), purpose="batch", expires_after=expiry)
    assert made.expires_at == made.created_at + 3_600
    record = await stand.desk.file(ACME, made.id)
    assert (record.endpoint, record.lines, record.application) == ("/v1/chat/completions", 2, "app")
    assert [(demand.alias, demand.lines) for demand in record.demands] == [("assistant", 2)]
    stand.clock.now_ms += 3_600_000
    assert (await stand.ask("GET", f"/v1/files/{made.id}")).status_code == 404
    assert (await stand.ask("GET", f"/v1/files/{made.id}/content")).status_code == 404
    assert (await stand.ask("GET", "/v1/files")).json()["data"] == []


async def test_a_form_is_read_in_any_order_and_in_any_pieces(stand: DeskStand) -> None:
    """Protects clients that send the file first, and the parser from where pieces end."""
    expiry = part("expires_after[anchor]", b"created_at") + part("expires_after[seconds]", b"7200")
    body = form(part("file", TWO_LINES, "naïve “name”.jsonl".replace('"', "")), expiry, PURPOSE)
    reader, writer = await stand.tenants.connect()
    writer.write(head(len(body)))
    for piece in chopped(body):
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(0)
    answer = await asyncio.wait_for(reader.readuntil(b"}"), WAIT_S)
    assert answer.startswith(b"HTTP/1.1 200 ") and "naïve “name”".encode() in answer
    (record,), _ = await stand.desk.files(ACME, Purpose.BATCH, "", 10, is_rising=True)
    assert (await stand.ask("GET", f"/v1/files/{record.id}/content")).content == TWO_LINES


async def test_a_line_that_is_no_request_is_kept(stand: DeskStand) -> None:
    """Protects batches: what only one line's body has wrong is that line's error, later, and costs the others nothing."""
    content = line("one", {"model": "assistant", "stream": True}) + line("two") + line("three", {"anything": 1})
    record = await stand.desk.file(ACME, await stand.upload(content))
    assert record.lines == 3 and [(demand.alias, demand.lines) for demand in record.demands] == [("assistant", 1)]


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("body", "code", "field"),
    [
        (form(PURPOSE), "invalid_request", "file"),
        (form(FILE), "invalid_request", "purpose"),
        (form(part("purpose", b"vision"), FILE), "invalid_request", "purpose"),
        (form(FILE, part("purpose", b"assistants")), "invalid_request", "purpose"),
        (form(PURPOSE, PURPOSE, FILE), "invalid_request", "purpose"),
        (form(PURPOSE, FILE, FILE), "invalid_request", "file"),
        (form(PURPOSE, part("file", TWO_LINES)), "invalid_request", "file"),
        (form(PURPOSE, part("file", TWO_LINES, "x" * 256)), "invalid_request", "file"),
        (form(PURPOSE, part("name", b"x"), FILE), "unsupported_field", "name"),
        (form(PURPOSE, FILE, part("expires_after[anchor]", b"created_at")), "invalid_request", "expires_after[seconds]"),
        (form(PURPOSE, FILE, part("expires_after[seconds]", b"7200")), "invalid_request", "expires_after[anchor]"),
        (
            form(part("expires_after[anchor]", b"created_at"), part("expires_after[seconds]", b"3599"), PURPOSE, FILE),
            "invalid_request",
            "expires_after[seconds]",
        ),
        (form(part("purpose", b"x" * 300), FILE), "invalid_request", "purpose"),
        (PURPOSE + FILE, "invalid_request", "body"),
        (b"{}", "invalid_request", "body"),
        (form(PURPOSE, part("file", b"", "in.jsonl")), "invalid_request", "file"),
    ],
)
async def test_a_form_is_refused_by_what_is_wrong(stand: DeskStand, body: bytes, code: str, field: str) -> None:
    """Protects callers from options that would be ignored, and the store from what was refused."""
    answer = await stand.ask("POST", "/v1/files", body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["field"], error["param"]) == (400, code, field, field)
    assert await nothing_left(stand)


@pytest.mark.parametrize(
    "content_type", ["application/json", "multipart/form-data", f"multipart/form-data; boundary={'x' * 71}"]
)
async def test_what_is_no_form_is_refused(stand: DeskStand, content_type: str) -> None:
    """Protects callers from a body that would be read as something else."""
    headers = {"authorization": f"Bearer {KEY}", "content-type": content_type}
    answer = await stand.tenants.client.post("/v1/files", content=upload_form(), headers=headers)
    assert answer.status_code == 400 and answer.json()["error"]["field"] == "content-type"


async def test_a_wrong_line_is_named_by_its_number(stand: DeskStand) -> None:
    """Protects whoever made the file: the line is told, and nothing of it is repeated."""
    answer = await stand.ask("POST", "/v1/files", upload_form(line("one") + b'{"secret text": 1}\n'))
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["field"], error["line"]) == (400, "invalid_request", "file", 2)
    assert "secret" not in answer.text and await nothing_left(stand)


async def test_a_file_asks_for_so_many_models(stand: DeskStand) -> None:
    """Protects records from files that name a thousand models: the line is told that asks for one too many."""
    lines = [line(str(number), {**BODY, "model": f"model-{number}"}) for number in range(65)]
    answer = await stand.ask("POST", "/v1/files", upload_form(line("none", {}) + b"".join(lines)))
    error = answer.json()["error"]
    assert (answer.status_code, error["field"], error["line"]) == (400, "file", 66)
    assert await nothing_left(stand)


async def test_a_file_is_bounded(stand: DeskStand) -> None:
    """Protects the store: more than a file may have is refused as it is declared, or as it comes."""
    async with desk_standing(DeskBounds(file_bytes_max=1_000)) as small:
        for size in (1_001, 200_000):
            answer = await small.ask("POST", "/v1/files", upload_form(line("one") + b" " * size))
            assert answer.status_code == 413 and answer.json()["error"]["limit_bytes"] >= 1_000
        assert await nothing_left(small)


async def test_a_tenants_bytes_are_bounded() -> None:
    """Protects the place that all tenants share: a tenant at its bound is told so, and another one is not."""
    async with desk_standing(DeskBounds(tenant_bytes_max=3 * len(TWO_LINES))) as stand:
        kept = [await stand.upload() for _ in range(2)]
        answer = await stand.ask("POST", "/v1/files", upload_form(), SECOND_KEY)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["limit"]) == (409, "not_allowed_now", 3 * len(TWO_LINES))
        await stand.upload(key=OTHER_KEY)
        await stand.ask("DELETE", f"/v1/files/{kept[0]}")
        await stand.upload()


async def test_a_tenants_files_are_bounded() -> None:
    """Protects listings from growing without end."""
    async with desk_standing(DeskBounds(files_max=2)) as stand:
        await stand.upload()
        await stand.upload()
        answer = await stand.ask("POST", "/v1/files", upload_form())
        error = answer.json()["error"]
        assert (answer.status_code, error["limit"], error["used"]) == (409, 2, 2)


async def test_uploads_at_a_time_are_bounded_and_what_leaves_makes_room() -> None:
    """Protects memory from many slow uploads, and the tenant's next upload from those that ended."""
    async with desk_standing(DeskBounds(tenant_uploads_max=1)) as stand:
        _, slow = await stand.tenants.connect()
        slow.write(head(100_000) + PURPOSE + FILE[:-20])
        await begun(stand)
        answer = await stand.ask("POST", "/v1/files", upload_form())
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "queue_full"
        assert answer.headers["retry-after"]
        slow.close()
        assert await nothing_left(stand)
        await stand.upload()


async def test_a_client_that_sends_nothing_more_is_given_up() -> None:
    """Protects connections from uploads that never end: the refusal is sent, and nothing is kept."""
    async with desk_standing(config=GatewayConfig(body_wait_ms=200)) as stand:
        reader, writer = await stand.tenants.connect()
        writer.write(head(100_000) + PURPOSE + FILE)
        answer = await asyncio.wait_for(reader.read(), WAIT_S)
        assert answer.startswith(b"HTTP/1.1 400 ") and b'"param":"body"' in answer
        assert await nothing_left(stand)


@pytest.mark.parametrize("sent", [0, 40, 200])
async def test_a_client_that_leaves_leaves_nothing(stand: DeskStand, sent: int) -> None:
    """Protects the store from half files."""
    _, writer = await stand.tenants.connect()
    writer.write(head(100_000) + (PURPOSE + FILE)[:sent])
    await (until(lambda: bool(stand.tenants.server.server_state.tasks)) if sent < 200 else begun(stand))
    writer.close()
    await until(lambda: not stand.tenants.server.server_state.tasks)
    assert await nothing_left(stand)


async def test_a_refusal_reaches_a_client_that_sends_on(stand: DeskStand) -> None:
    """Protects clients that send everything before they read: they read the refusal, and their next request is served."""
    body = upload_form(b"no line\n" + b" " * (3 * MIBIBYTE))
    reader, writer = await stand.tenants.connect()
    writer.write(head(len(body)) + body)
    writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    answers = await asyncio.wait_for(reader.read(), WAIT_S)
    assert answers.startswith(b"HTTP/1.1 400 ") and answers.count(b"HTTP/1.1 200 ") == 1
    assert await nothing_left(stand)


async def test_an_upload_ends_with_its_key(stand: DeskStand) -> None:
    """Protects the store from a revoked key whose upload takes an hour."""
    reader, writer = await stand.tenants.connect()
    body = upload_form()
    writer.write(head(len(body)) + body[:-20])
    await begun(stand)
    stand.revoke(KEY)
    writer.write(body[-20:])
    assert (await asyncio.wait_for(reader.readuntil(b"\r\n"), WAIT_S)).startswith(b"HTTP/1.1 403 ")
    assert await nothing_left(stand)


@pytest.mark.parametrize("operation", ["begin", "write", "commit", "create", "files"])
async def test_a_store_that_fails_is_told_and_keeps_nothing(operation: str) -> None:
    """Protects clients and the store: the refusal says when to come again, and no half file is shown."""
    async with desk_standing() as stand:
        assert isinstance(stand.store, FileMemory)
        stand.store.fault = lambda asked: asked == operation
        answer = await stand.ask("POST", "/v1/files", upload_form())
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "file_store_unavailable")
        assert answer.headers["retry-after"]
        stand.store.fault = None
        assert await nothing_left(stand)
        await stand.upload()


async def test_without_a_place_there_are_no_files() -> None:
    """Protects clients of a gateway that keeps nothing: they learn why, in OpenAI's shape."""
    async with tenant_standing() as stand:
        for method, path in (
            ("GET", "/v1/files"),
            ("GET", "/v1/files/file-0"),
            ("GET", "/v1/batches"),
            ("POST", "/v1/batches"),
        ):
            answer = await stand.ask(method, path, None if method == "GET" else {})
            assert answer.status_code == 404 and "configured" in answer.json()["error"]["message"]


# ── whose they are ───────────────────────────────────────────────────────────────────────────────────────────────────


async def test_another_tenants_file_is_as_unknown_as_one_that_never_was(stand: DeskStand) -> None:
    """Protects tenants: an id of another one answers, byte by byte, as an id of nobody; applications of one tenant share."""
    file_id = await stand.upload()
    unknown = "file-" + "0" * (len(file_id) - 5)
    for method, action in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        theirs = await stand.ask(method, f"/v1/files/{file_id}{action}", key=OTHER_KEY)
        nobodys = await stand.ask(method, f"/v1/files/{unknown}{action}", key=OTHER_KEY)
        assert theirs.status_code == nobodys.status_code == 404 and theirs.content == nobodys.content
    assert (await stand.ask("GET", "/v1/files", key=OTHER_KEY)).json()["data"] == []
    assert (await stand.ask("GET", f"/v1/files/{file_id}/content", key=SECOND_KEY)).content == TWO_LINES
    assert (await stand.ask("GET", f"/v1/files/{file_id}")).json()["id"] == file_id


@pytest.mark.parametrize("name", ["file-..", "file-%2e%2e%2fx", "x", "FILE-0", "file-" + "0" * 500, "..", "%00"])
async def test_no_name_leaves_its_tenants_folder(stand: DeskStand, name: str) -> None:
    """Protects the store from names that are paths: what has not the form of an id is not looked for."""
    for key in (KEY, OTHER_KEY):
        assert (await stand.ask("GET", f"/v1/files/{name}", key=key)).status_code == 404


async def test_a_key_is_needed(stand: DeskStand) -> None:
    """Protects every path of files: without a key nothing is told."""
    for method, path in (
        ("POST", "/v1/files"),
        ("GET", "/v1/files"),
        ("GET", "/v1/files/x/content"),
        ("DELETE", "/v1/files/x"),
    ):
        answer = await stand.tenants.client.request(method, path)
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "unauthenticated"


# ── lists ────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_files_are_listed_page_by_page(stand: DeskStand) -> None:
    """Protects the SDK's paging in both orders, and pages from what is deleted between them."""
    made = []
    for _ in range(5):
        made.append(await stand.upload())
        stand.clock.now_ms += 1
    client = stand.sdk()
    assert [each.id async for each in client.files.list(limit=2)] == made[::-1]
    assert [each.id async for each in client.files.list(limit=2, order="asc", purpose="batch")] == made
    assert [each.id async for each in client.files.list(purpose="batch_output")] == []
    page = (await stand.ask("GET", "/v1/files?limit=2&order=asc")).json()
    assert (page["first_id"], page["last_id"], page["has_more"]) == (made[0], made[1], True)
    await stand.ask("DELETE", f"/v1/files/{made[1]}")
    rest = (await stand.ask("GET", f"/v1/files?limit=3&order=asc&after={made[1]}")).json()
    assert [each["id"] for each in rest["data"]] == made[2:] and not rest["has_more"]


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("limit=0", "limit"),
        ("limit=10001", "limit"),
        ("limit=x", "limit"),
        ("limit=1&limit=2", "limit"),
        ("order=up", "order"),
        ("purpose=vision", "purpose"),
        ("after=", "after"),
        ("before=x", "before"),
    ],
)
async def test_a_list_is_refused_by_name(stand: DeskStand, query: str, field: str) -> None:
    """Protects callers from options of a list that would be ignored."""
    answer = await stand.ask("GET", f"/v1/files?{query}")
    assert answer.status_code == 400 and answer.json()["error"]["field"] == field


# ── long files ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_memory_stays_flat_for_a_long_file(tmp_path: Path) -> None:
    """Protects gateways: 100 MiB go in and come out with a few in memory, and the answer is the file."""
    text = {**BODY, "messages": [{"role": "user", "content": "x" * 500_000}]}
    one, count = line("%06d", text), 200
    lines = one.replace(b"%06d", b"000000")
    size = len(lines) * count
    before, after = PURPOSE + part("file", b"", "in.jsonl")[:-2], b"\r\n--the-boundary--\r\n"
    async with desk_standing(store=FileDirectory(tmp_path)) as stand:
        reader, writer = await stand.tenants.connect()
        tracemalloc.start()
        try:
            writer.write(head(len(before) + size + len(after)) + before)
            for number in range(count):
                writer.write(one.replace(b"%06d", b"%06d" % number))
                await writer.drain()
            writer.write(after)
            answer = await asyncio.wait_for(reader.readuntil(b"}"), 60)
            assert answer.startswith(b"HTTP/1.1 200 ") and b'"bytes":%d' % size in answer
            (record,), _ = await stand.desk.files(ACME, None, "", 10, is_rising=True)
            writer.write(f"GET /v1/files/{record.id}/content HTTP/1.1\r\nhost: x\r\n".encode())
            writer.write(f"authorization: Bearer {KEY}\r\n\r\n".encode())
            await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WAIT_S)
            for number in range(count):
                assert await reader.readexactly(len(lines)) == one.replace(b"%06d", b"%06d" % number)
            assert tracemalloc.get_traced_memory()[1] < 16 * MIBIBYTE
        finally:
            tracemalloc.stop()


async def test_a_reader_that_takes_nothing_is_cut() -> None:
    """Protects gateways from downloads that are never read: the socket's grace is theirs too."""
    config = GatewayConfig(slow_client_grace_ms=200, stream_buffer_bytes=64 * 1024)
    text = {**BODY, "messages": [{"role": "user", "content": "x" * 900_000}]}
    async with desk_standing(config=config) as stand:
        content = b"".join(line(str(number), text) for number in range(20))
        file_id = await stand.upload(content)
        reader, writer = await stand.tenants.connect()
        writer.write(f"GET /v1/files/{file_id}/content HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n\r\n".encode())
        await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WAIT_S)
        await until(lambda: not stand.tenants.server.server_state.tasks)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await reader.readexactly(len(content))


async def test_the_input_of_an_open_batch_is_not_deleted(stand: DeskStand) -> None:
    """Protects batches: their lines stay until they have ended."""
    client = stand.sdk()
    file_id = await stand.upload()
    batch = await client.batches.create(input_file_id=file_id, endpoint="/v1/chat/completions", completion_window="24h")
    with pytest.raises(ConflictError) as refused:
        await client.files.delete(file_id)
    assert refused.value.code == "not_allowed_now" and batch.id in refused.value.message
    await client.files.delete(await stand.upload())
