"""Protects the tenant API's edge where no cell is needed: headers, ids, names in paths, bodies in flight, failing parts."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.contract.tenant_stand import BODY, CHAT, KEY, TenantStand, tenant_standing
from tests.e2e.surfaces import ACTIVE, SURFACES, Asked

from weir.config import GatewayConfig
from weir.messages import Acquire

KIBIBYTE = 1024
CONFIG = GatewayConfig(bodies_bytes_max=256 * KIBIBYTE, body_bytes_max=200 * KIBIBYTE, body_wait_ms=5_000)
FORMS = [(SURFACES[name].path, SURFACES[name].body(Asked("x", stream=False))) for name in ACTIVE]
HEAD = f"POST /v1/generations HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n".encode()
WAIT_S = 10


@pytest.fixture
async def stand() -> AsyncIterator[TenantStand]:
    async with tenant_standing(CONFIG) as made:
        yield made


def refusal_of(document: Any) -> Any:
    """The members of a refusal, whatever its surface's shape."""
    return document.get("error", document)


async def answer_to(stand: TenantStand, request: bytes) -> tuple[bytes, Any]:
    """The head of the answer to a request that ends its connection, and its JSON."""
    reader, writer = await stand.connect()
    writer.write(request)
    head, _, body = (await asyncio.wait_for(reader.read(), WAIT_S)).partition(b"\r\n\r\n")
    return head, json.loads(body)


# ── headers ──────────────────────────────────────────────────────────────────────────────────────────────────────────

CHUNKED = b"POST %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n%b\r\n%x\r\n%b\r\n0\r\n%b\r\n"


@pytest.mark.parametrize(("path", "body"), FORMS)
async def test_what_follows_a_chunked_body_is_no_header(stand: TenantStand, path: str, body: dict[str, object]) -> None:
    """Protects authentication and ids from trailers: proxies check headers, and let trailers through."""
    content = json.dumps({**body, "unknown": 1}).encode()
    key = f"authorization: Bearer {KEY}\r\n".encode()
    trailer = CHUNKED % (path.encode(), b"", len(content), content, key + b"x-api-key: " + KEY.encode() + b"\r\n")
    head, document = await answer_to(stand, trailer)
    assert head.startswith(b"HTTP/1.1 401 ") and refusal_of(document)["code"] == "unauthenticated"
    named = CHUNKED % (path.encode(), key, len(content), content, b"idempotency-key: from-a-trailer\r\n")
    head, document = await answer_to(stand, named)
    assert head.startswith(b"HTTP/1.1 400 ") and refusal_of(document)["field"] == "unknown"
    assert b"from-a-trailer" not in head


@pytest.mark.parametrize(("path", "_"), FORMS)
@pytest.mark.parametrize("name", ["Authorization", "x-api-key", "Idempotency-Key", "weir-deadline-ms", "weir-anything"])
async def test_a_header_that_names_who_or_what_comes_once(stand: TenantStand, path: str, _: object, name: str) -> None:
    """Protects identity and idempotency: of two such headers a proxy could read one and we the other."""
    lines = f"{name}: first\r\nx-other: 1\r\nx-other: 2\r\n{name.upper()}: second\r\n".encode()
    head, document = await answer_to(stand, b"POST %b HTTP/1.0\r\n%b\r\n" % (path.encode(), lines))
    assert head.startswith(b"HTTP/1.1 400 ")
    refusal = refusal_of(document)
    assert (refusal["code"], refusal["field"], refusal["accepted"]) == (
        "invalid_request",
        name.lower(),
        "one header of this name",
    )


async def test_other_headers_may_repeat(stand: TenantStand) -> None:
    """Protects clients behind proxies that add their own lines."""
    lines = f"authorization: Bearer {KEY}\r\nx-forwarded-for: a\r\nx-forwarded-for: b\r\n".encode()
    head, _ = await answer_to(stand, b"GET /v1/models HTTP/1.0\r\n%b\r\n" % lines)
    assert head.startswith(b"HTTP/1.1 200 ")


# ── request ids ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("wrong", [{"unknown": 1}, {"temperature": 9}, {"model_alias": None}])
async def test_a_refused_body_is_answered_under_its_own_id(stand: TenantStand, wrong: dict[str, object]) -> None:
    """Protects correlation: a valid id is answered also where the rest of the request is wrong, an invalid one never."""
    answer = await stand.ask("POST", "/v1/generations", {**BODY, "request_id": "mine:1", **wrong})
    assert answer.status_code == 400 and answer.headers["x-request-id"] == answer.headers["request-id"] == "mine:1"
    answer = await stand.ask("POST", "/v1/generations", {**BODY, "request_id": "not valid", **wrong})
    assert answer.status_code == 400 and answer.headers["x-request-id"].startswith("req-")


@pytest.mark.parametrize("body", [{**CHAT, "functions": []}, {**CHAT, "model": None}, [], {"model": "absent"}])
async def test_a_refused_chat_is_answered_under_its_idempotency_key(stand: TenantStand, body: object) -> None:
    """Protects the same on the compatible surface, where the id is known before the body is."""
    answer = await stand.ask("POST", "/v1/chat/completions", body, **{"idempotency-key": "mine:1"})
    assert answer.status_code == 400 and answer.headers["x-request-id"] == answer.headers["request-id"] == "mine:1"
    answer = await stand.ask("POST", "/v1/chat/completions", body, **{"idempotency-key": "not valid"})
    assert answer.status_code == 400 and answer.headers["x-request-id"].startswith("req-")


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens", "/v1/messages/batches", "/v1/models/absent"])
async def test_anthropics_refusals_have_its_shape_and_the_request_id(stand: TenantStand, path: str) -> None:
    """Protects Anthropic's clients: whatever is refused below its paths, the body has the id that the headers have."""
    method = "GET" if "models" in path else "POST"
    answer = await stand.ask(method, path, None if method == "GET" else {}, **{"anthropic-version": "2023-06-01"})
    body = answer.json()
    assert 400 <= answer.status_code < 405 and body["type"] == "error"
    assert body["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    assert body["error"]["details"]["error_code"] == body["error"]["code"]


# ── models, as Anthropic lists them ──────────────────────────────────────────────────────────────────────────────────

VERSION = {"anthropic-version": "2023-06-01"}


@pytest.mark.parametrize(
    ("query", "names", "more"),
    [
        ("", ["50%", "assistant", "org/small"], False),
        ("?limit=2", ["50%", "assistant"], True),
        ("?limit=2&after_id=50%25", ["assistant", "org/small"], False),
        ("?limit=1&before_id=org%2Fsmall", ["assistant"], True),
        ("?after_id=org/small", [], False),
    ],
)
async def test_models_come_in_pages(stand: TenantStand, query: str, names: list[str], more: bool) -> None:
    """Protects Anthropic's paging; without its header the same path is OpenAI's."""
    page = (await stand.ask("GET", f"/v1/models{query}", **VERSION)).json()
    assert ([model["id"] for model in page["data"]], page["has_more"]) == (names, more)
    assert (page["first_id"], page["last_id"]) == ((names[0], names[-1]) if names else (None, None))
    assert (await stand.ask("GET", "/v1/models")).json()["object"] == "list"


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("?limit=0", "limit"),
        ("?limit=1001", "limit"),
        ("?limit=x", "limit"),
        ("?limit=%C2%B2", "limit"),
        ("?limit=", "limit"),
        ("?lifecycle=active", "lifecycle"),
        ("?after_id=a&before_id=b", "before_id"),
    ],
)
async def test_paging_is_refused_by_name(stand: TenantStand, query: str, field: str) -> None:
    """Protects callers from options of a list that would be ignored."""
    answer = await stand.ask("GET", f"/v1/models{query}", **VERSION)
    assert answer.status_code == 400 and answer.json()["error"]["field"] == field


# ── bodies that nobody reads ─────────────────────────────────────────────────────────────────────────────────────────


async def test_an_answer_before_the_body_ends_the_connection_and_is_the_only_one() -> None:
    """Protects framing: where a body stays away its refusal closes, and bytes of it never begin a second answer."""
    async with tenant_standing(GatewayConfig(body_wait_ms=200)) as stand:
        reader, writer = await stand.connect()
        writer.write(b"POST /v1/generations HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\n{")
        answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WAIT_S)
        writer.write(b" " * 10)
        rest = await asyncio.wait_for(reader.read(), WAIT_S)
        assert answer.startswith(b"HTTP/1.1 401 ") and b"\r\nconnection: close\r\n" in answer
        assert json.loads(rest)["code"] == "unauthenticated"


async def test_a_refused_body_that_does_arrive_leaves_the_connection_usable(stand: TenantStand) -> None:
    """Protects clients that send everything before they read: the refusal reaches them, and their next request is served."""
    reader, writer = await stand.connect()
    size = 150 * KIBIBYTE
    writer.write(b"POST /v1/generations HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % size + b" " * size)
    writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    answers = await asyncio.wait_for(reader.read(), WAIT_S)
    assert answers.startswith(b"HTTP/1.1 401 ") and answers.count(b"HTTP/1.1 200 ") == 1


async def test_nothing_is_written_to_a_connection_between_requests() -> None:
    """Protects pooled connections: line ends after a request begin none, so no time runs out and no refusal is written."""
    async with tenant_standing(GatewayConfig(body_wait_ms=50)) as stand:
        reader, writer = await stand.connect()
        ask = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"
        writer.write(ask)
        assert b" 200 " in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WAIT_S)
        assert await asyncio.wait_for(reader.readuntil(b"}"), WAIT_S)
        writer.write(b"\r\n")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 0.3)
        writer.write(ask)
        assert b" 200 " in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WAIT_S)


# ── names in paths ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("segment", "model"),
    [
        ("assistant", "assistant"),
        ("%61ssistant", "assistant"),
        ("%2561ssistant", None),
        ("org%2Fsmall", "org/small"),
        ("org/small", "org/small"),
        ("org%252Fsmall", None),
        ("50%25", "50%"),
    ],
)
async def test_a_models_name_is_decoded_once(stand: TenantStand, segment: str, model: str | None) -> None:
    """Protects names with slashes and per cents: what a path says is decoded once, never twice."""
    reader, writer = await stand.connect()
    writer.write(f"GET /v1/models/{segment} HTTP/1.0\r\nauthorization: Bearer {KEY}\r\n\r\n".encode())
    answer = await asyncio.wait_for(reader.read(), WAIT_S)
    if model is None:
        assert answer.startswith(b"HTTP/1.1 404") and b"unknown_alias" in answer
    else:
        assert answer.startswith(b"HTTP/1.1 200") and f'"id":"{model}"'.encode() in answer


# ── bodies in flight ─────────────────────────────────────────────────────────────────────────────────────────────────


async def send_part(stand: TenantStand, size: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Announce a body of 180 KiB and send so much of it."""
    reader, writer = await stand.connect()
    writer.write(HEAD + b"content-length: %d\r\n\r\n" % (180 * KIBIBYTE) + b" " * size)
    await writer.drain()
    return reader, writer


async def wait_in_flight(stand: TenantStand, size: int) -> None:
    """Wait until so many bytes of bodies are held."""
    for _ in range(WAIT_S * 200):
        if stand.app.arriving.size == size:
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"{stand.app.arriving.size} bytes are held, not {size}")


@pytest.mark.parametrize("ending", ["completed", "left", "too_large", "late"])
async def test_bodies_in_flight_are_bounded_together_and_given_back(ending: str) -> None:
    """Protects memory: beyond the bound of all bodies a further one is refused, and every way to end gives its bytes back."""
    config = GatewayConfig(bodies_bytes_max=256 * KIBIBYTE, body_bytes_max=200 * KIBIBYTE, body_wait_ms=1_000)
    async with tenant_standing(config) as stand:
        _, first = await send_part(stand, 150 * KIBIBYTE)
        await wait_in_flight(stand, 150 * KIBIBYTE)
        reader, second = await send_part(stand, 150 * KIBIBYTE)
        second.write(b" " * (30 * KIBIBYTE))
        refusal = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WAIT_S)
        assert refusal.startswith(b"HTTP/1.1 503") and re.search(rb"retry-after: [12]\r\n", refusal)
        assert b'"queue_full"' in await asyncio.wait_for(reader.read(KIBIBYTE), WAIT_S)
        assert (await stand.ask("POST", "/v1/generations", {"model_alias": "absent", "input": "x"})).status_code == 404
        match ending:
            case "completed":
                first.write(b" " * (30 * KIBIBYTE))
            case "left":
                first.close()
            case "too_large":
                _, chunked = await stand.connect()
                chunked.write(HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"%x\r\n" % (210 * KIBIBYTE))
                chunked.write(b" " * 90 * KIBIBYTE)
                first.close()
                await wait_in_flight(stand, 90 * KIBIBYTE)
                chunked.write(b" " * 120 * KIBIBYTE + b"\r\n0\r\n\r\n")
        await wait_in_flight(stand, 0)


# ── failures of a part ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("path", "body"), FORMS)
@pytest.mark.parametrize("fault", [AssertionError("inner text"), RuntimeError("inner text")], ids=["invariant", "bug"])
async def test_a_failing_part_is_answered_in_our_shape(
    stand: TenantStand, fault: Exception, path: str, body: dict[str, object]
) -> None:
    """Protects clients from bare text: a broken invariant answers `internal_error` too, and is still reported as broken."""

    def fail(message: Acquire) -> None:
        raise fault

    stand.link.on_acquire = fail
    answer = await stand.ask("POST", path, body)
    assert (answer.status_code, refusal_of(answer.json())["code"]) == (500, "internal_error")
    assert answer.headers["x-request-id"] and "inner text" not in answer.text
    assert stand.broken == ([fault] if isinstance(fault, AssertionError) else [])


@pytest.mark.parametrize(("path", "body"), FORMS)
async def test_a_request_that_the_server_gives_up_is_answered_in_our_shape(
    stand: TenantStand, path: str, body: dict[str, object]
) -> None:
    """Protects clients at the end of a cell: what its grace leaves over answers `shutdown`."""
    asked = asyncio.Event()
    stand.link.on_acquire = lambda message: asked.set()
    async with asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(stand.ask("POST", path, body))
        await asyncio.wait_for(asked.wait(), WAIT_S)
        for task in stand.server.server_state.tasks:
            task.cancel()
    answer = asking.result()
    assert (answer.status_code, refusal_of(answer.json())["code"]) == (503, "shutdown")
    assert stand.broken == []
