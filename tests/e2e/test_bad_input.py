"""What strangers and broken clients send: each gets a clear refusal in the right shape, and the next request works.

The refusal names the field and what is accepted, never the value. After every test the cell is at rest: nothing in flight, no
hold open, no lane taken; its log shows no fault.
"""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from tests.e2e.conftest import BODY_WAIT_MS
from tests.e2e.http_client import Account, Json, Reply, Wire, exchange, new_account, wait_until
from tests.e2e.running_cell import RunningCell
from tests.e2e.surfaces import ACTIVE, SURFACES, Asked

MEBIBYTE = 1024 * 1024
MARK = "unmistakable-value"
NATIVE: Json = {"model_alias": "assistant", "input": "x", "max_output_tokens": 1}
CHAT: Json = {"model": "assistant", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
FORMS = [(SURFACES[name].path, SURFACES[name].body(Asked("x", stream=False, most=1))) for name in ACTIVE]
LONG: Json = {"model_alias": "assistant", "input": "river"}
"""213 tokens: half a second on the fast cell, seven on the slow one."""


def refusal_of(reply: Reply) -> Json:
    """The refusal's members, whatever the surface's shape."""
    if reply.headers["content-type"] == "application/problem+json":
        problem = reply.json
        assert problem["status"] == reply.status and problem["title"] and problem["detail"]
        return problem
    is_anthropic = reply.json.get("type") == "error"
    return SURFACES["messages" if is_anthropic else "chat"].refusal(reply.json)


def assert_refused(account: Account, reply: Reply, status: int, code: str, field: str | None = None) -> Json:
    """A refusal that helps, and a platform that still serves."""
    assert reply.status == status, (reply.status, reply.body)
    members = refusal_of(reply)
    assert members["code"] == code, members
    assert reply.headers["x-request-id"] == reply.headers["request-id"] != ""
    if field is not None:
        assert members["field"] == field and members["accepted"], members
    assert MARK.encode() not in reply.body
    assert account.ask("POST", "/v1/generations", NATIVE).status == 200
    return members


def chat_part(**fields: Any) -> Json:
    """A chat whose one text part has further fields."""
    return {**CHAT, "messages": [{"role": "user", "content": [{"type": "text", "text": "x", **fields}]}]}


def pairs_of(table: Mapping[str, list[Any]]) -> list[tuple[str, Any]]:
    return [(field, value) for field, values in table.items() for value in values]


# ── bodies ───────────────────────────────────────────────────────────────────────────────────────────────────────────

BODIES = [
    b"",
    b"{",
    b"null",
    b"[]",
    b'"text"',
    b"12",
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"\xff\xfe",
    b'{"model_alias": "\xff"}',
    b'{"input": "\\ud800"}',
    b'{"\\ud800": 1}',
    b'{"temperature": NaN}',
    b'{"temperature": 1e999}',
    b'{"seed": ' + b"9" * 10_000 + b"}",
    b"\x00" * 100,
    b"model_alias=assistant",
]


@pytest.mark.parametrize(("path", "_"), FORMS, ids=ACTIVE)
@pytest.mark.parametrize("body", BODIES, ids=[repr(body[:24]) for body in BODIES])
def test_a_body_that_is_no_json_object_is_refused(account: Account, path: str, _: Json, body: bytes) -> None:
    """Protects the parser: nested, truncated, huge or not text at all, it answers 400 for `body`."""
    assert_refused(account, account.ask("POST", path, body), 400, "invalid_request", "body")


NUMBERS = [2_147_483_647, 10**18, 1e18, 10**400, 1.5, -1, 0, "5", True, [], {}]
WRONG_NATIVE: dict[str, list[Any]] = {
    "max_output_tokens": NUMBERS,
    "deadline_ms": [*NUMBERS[1:], 3_600_001],
    "temperature": [-0.1, 2.1, 10**400, "1", True, []],
    "top_p": [-1, 1.1, "1"],
    "presence_penalty": [-2.5, 3, "0"],
    "frequency_penalty": [-2.5, 3, {}],
    "seed": [-1, 2**32, 1.5, "1"],
    "stop": [5, [5], [""], ["a"] * 5, ["x" * 1_001], {}],
    "stream": ["true", 1, []],
    "retain": ["true", 1],
    "session": [5, "", "s" * 129],
    "request_id": [5, "", "a b", "ä", "x" * 129, "a\n", "a/b"],
    "model_alias": [5, "", None, [], "m" * 257],
    "input": [5, "", None, [], {}, True],
}


@pytest.mark.parametrize(("field", "value"), pairs_of(WRONG_NATIVE), ids=lambda value: str(value)[:20])
def test_a_wrong_value_of_a_native_field_is_named(account: Account, field: str, value: Any) -> None:
    """Protects every field's type and range on the native surface."""
    assert_refused(account, account.ask("POST", "/v1/generations", {**NATIVE, field: value}), 400, "invalid_request", field)


NAMELESS = {"type": "function", "function": {"name": "a b"}}
SCHEMALESS = {"type": "json_schema"}
CHOSEN = {"type": "function", "function": {"name": "find"}, "strict": True}
SEVENTEEN = dict.fromkeys("abcdefghijklmnopq", "x")
WRONG_CHAT: dict[str, list[Any]] = {
    "max_tokens": NUMBERS,
    "temperature": [-0.1, 10**400, "1"],
    "n": [0, "1", 1.0, 17],
    "tools": [5, {}],
    "tool_choice": [5, "always", {"type": "function"}],
    "response_format": [5, {}, {"type": "xml"}],
    "logprobs": [1, "true"],
    "stream": ["true", 0],
    "stop": [5, ["a"] * 5],
    "model": [5, "", None],
    "messages": [None, [], "x", {}, 5],
    "user": [5, [], "", "u" * 257],
    "metadata": [5, [], "x", {"a": 1}, {"a": None}, {"": "x"}, {"a" * 65: "x"}, {"a": "x" * 513}, SEVENTEEN],
}


@pytest.mark.parametrize(("field", "value"), pairs_of(WRONG_CHAT), ids=lambda value: str(value)[:20])
def test_a_wrong_value_of_a_chat_field_is_named(account: Account, field: str, value: Any) -> None:
    """Protects every field's type and range on the chat surface, as `param` and as `field`."""
    reply = account.ask("POST", "/v1/chat/completions", {**CHAT, field: value})
    assert assert_refused(account, reply, 400, "invalid_request", field)["param"] == field


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([MARK], "messages[0]"),
        ([{"content": MARK}], "messages[0].role"),
        ([{"role": MARK, "content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": "x"}, {"role": "user", "content": 5}], "messages[1].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": MARK}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [None]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [], "name": 5}], "messages[0].name"),
    ],
)
def test_a_wrong_message_is_found(account: Account, messages: list[Any], field: str) -> None:
    """Protects that a caller with many messages learns which one is wrong, on both surfaces."""
    reply = account.ask("POST", "/v1/chat/completions", {**CHAT, "messages": messages})
    assert_refused(account, reply, 400, "invalid_request", field)
    if "content[" not in field and "name" not in field:
        native = account.ask("POST", "/v1/generations", {**NATIVE, "input": messages})
        assert_refused(account, native, 400, "invalid_request", field.replace("messages", "input"))


@pytest.mark.parametrize(
    ("path", "body", "code", "field"),
    [
        ("/v1/generations", {**NATIVE, "max_tokens": MARK}, "unsupported_field", "max_tokens"),
        ("/v1/generations", {**NATIVE, "retain": True}, "unsupported_field", "retain"),
        ("/v1/generations", {**NATIVE, "x" * 5_000: 1}, "unsupported_field", "x" * 100),
        ("/v1/generations", {**NATIVE, "input": [{"role": "user", "name": MARK}]}, "unsupported_field", "input[0].name"),
        ("/v1/chat/completions", {**CHAT, "functions": [MARK]}, "unsupported_field", "functions"),
        ("/v1/chat/completions", chat_part(cached=MARK), "unsupported_field", "messages[0].content[0].cached"),
        ("/v1/chat/completions", {**CHAT, "logit_bias": {}}, "unsupported_field", "logit_bias"),
        ("/v1/chat/completions", {**CHAT, "tools": [5]}, "invalid_request", "tools[0]"),
        ("/v1/chat/completions", {**CHAT, "tools": [NAMELESS]}, "invalid_request", "tools[0].function.name"),
        ("/v1/chat/completions", {**CHAT, "response_format": SCHEMALESS}, "invalid_request", "response_format.json_schema"),
        ("/v1/chat/completions", {**CHAT, "tool_choice": "auto"}, "conflicting_fields", "tool_choice"),
        ("/v1/chat/completions", {**CHAT, "tool_choice": CHOSEN}, "unsupported_field", "tool_choice.strict"),
        ("/v1/chat/completions", {**CHAT, "store": True}, "unsupported_field", "store"),
        ("/v1/chat/completions", {**CHAT, "max_completion_tokens": 1}, "conflicting_fields", "max_tokens"),
        ("/v1/chat/completions", {**CHAT, "stream_options": {}}, "conflicting_fields", "stream_options"),
        ("/v1/chat/completions", {**CHAT, "stream": True, "stream_options": {"x": 1}}, "unsupported_field", "stream_options.x"),
        ("/v1/chat/completions", {**CHAT, "stream": True, "stream_options": 5}, "invalid_request", "stream_options"),
    ],
)  # fmt: skip
def test_unknown_and_conflicting_fields_are_named(account: Account, path: str, body: Json, code: str, field: str) -> None:
    """Protects that nothing is dropped silently."""
    assert_refused(account, account.ask("POST", path, body), 400, code, field)


@pytest.mark.parametrize(("path", "body"), FORMS, ids=ACTIVE)
def test_null_is_absent_and_the_last_of_equal_keys_counts(account: Account, path: str, body: Json) -> None:
    """Protects that null never refuses, whatever the field, and that odd but valid JSON is served."""
    optional = ["temperature", "top_p", "seed", "stop", "presence_penalty", "frequency_penalty", "stream", "unknown"]
    assert account.ask("POST", path, {**body, **dict.fromkeys(optional)}).status == 200
    twice = b'{"temperature": "wrong", ' + json.dumps({**body, "temperature": 1}).encode()[1:]
    assert account.ask("POST", path, twice).status == 200
    nul = json.dumps(body).replace('"x"', '"a\\u0000b"').encode()
    assert account.ask("POST", path, nul).status == 200


def test_input_beyond_the_window_says_how_long_it_is(account: Account) -> None:
    """Protects input_too_long: counted exactly, with the window beside it."""
    reply = account.ask("POST", "/v1/generations", {**NATIVE, "input": MARK * 10_000})
    members = assert_refused(account, reply, 400, "input_too_long")
    assert members["limit"] == 32_768 < members["input_tokens"]


@pytest.mark.parametrize(("path", "_"), FORMS, ids=ACTIVE)
def test_a_body_above_the_bound_is_413(account: Account, path: str, _: Json) -> None:
    """Protects memory: declared, chunked, or announced with Expect, nine mebibytes are refused; what is not read, closes."""
    nine = b" " * (9 * MEBIBYTE)
    declared = account.ask("POST", path, nine)
    with Wire(account.cell.api) as wire:
        wire.ask("POST", path, key=account.key, headers={"content-length": str(len(nine)), "expect": "100-continue"})
        expected = wire.reply()
        assert wire.is_closed() and expected.headers["connection"] == "close"
    with Wire(account.cell.api) as wire:
        head = wire.request("POST", path, key=account.key, headers={"transfer-encoding": "chunked"})
        wire.send(head.replace(b"content-length: 0\r\n", b""))
        for _piece in range(9):
            wire.send(b"%x\r\n%b\r\n" % (MEBIBYTE, b" " * MEBIBYTE))
        wire.send(b"0\r\n\r\n")
        chunked = wire.reply()
    for reply in (declared, expected, chunked):
        assert assert_refused(account, reply, 413, "request_too_large")["limit_bytes"] == 8 * MEBIBYTE


def test_a_body_just_below_the_bound_is_read_after_100_continue(account: Account) -> None:
    """Protects Expect: 100-continue for a body that is welcome, and that its size alone refuses nothing."""
    body = json.dumps(NATIVE).encode() + b" " * (7 * MEBIBYTE)
    with Wire(account.cell.api) as wire:
        head = wire.request("POST", "/v1/generations", key=account.key, headers={"expect": "100-continue"})
        wire.send(head.replace(b"content-length: 0", b"content-length: %d" % len(body)))
        assert wire.interim() == 100
        wire.send(body)
        assert wire.reply().status == 200


def test_a_refused_expectation_closes_the_connection(account: Account) -> None:
    """Protects framing: whoever was refused before its body may send it or not, so nothing is read as a next request."""
    with Wire(account.cell.api) as wire:
        wire.ask("POST", "/v1/generations", key=MARK, headers={"content-length": "50", "expect": "100-continue"})
        reply = wire.reply()
        assert wire.is_closed()
    assert_refused(account, reply, 401, "unauthenticated")


# ── callers and paths ────────────────────────────────────────────────────────────────────────────────────────────────


def test_keys_that_are_not_ours_are_401(account: Account) -> None:
    """Protects the door on both surfaces: absent, malformed, mistyped and made-up keys look alike."""
    mistyped = account.key[:-1] + ("0" if account.key[-1] != "0" else "1")
    shapes: list[dict[str, str]] = [{}, {"authorization": account.key}, {"authorization": f"Basic {account.key}"}]
    keys = ["", "sk-" + MARK, mistyped, account.key[:-1], account.key + "0", "ÿ" * 20, account.key.upper(), "weir-" + "0" * 84]
    shapes += [{"authorization": f"Bearer {key}"} for key in keys] + [{"x-api-key": MARK}]
    for path, body in FORMS:
        details = set()
        for headers in shapes:
            encoded = {name: value.encode().decode("latin-1") for name, value in headers.items()}
            reply = exchange(account.cell.api, "POST", path, body=body, headers=encoded)
            details.add(assert_refused(account, reply, 401, "unauthenticated").get("detail"))
            assert reply.headers["www-authenticate"] == "Bearer"
        assert len(details) == 1
    for headers in ({"authorization": f"bearer {account.key}"}, {"x-api-key": account.key}):
        assert exchange(account.cell.api, "POST", "/v1/generations", body=NATIVE, headers=headers).status == 200


def test_aliases_that_are_not_ours_are_404(account: Account) -> None:
    """Protects that an alias is its exact name."""
    for name in ("absent", "Assistant", "assistant ", "simulated", "\u0000", "../assistant"):
        native = account.ask("POST", "/v1/generations", {**NATIVE, "model_alias": name})
        assert_refused(account, native, 404, "unknown_alias")
        assert_refused(account, account.ask("POST", "/v1/chat/completions", {**CHAT, "model": name}), 404, "unknown_alias")


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/v1/generations", "POST"),
        ("DELETE", "/v1/generations/some-id", "GET"),
        ("GET", "/v1/generations/some-id/cancel", "POST"),
        ("POST", "/v1/generations/some-id/events", "DELETE, GET"),
        ("GET", "/v1/chat/completions", "POST"),
        ("POST", "/v1/models", "GET"),
        ("DELETE", "/v1/models/assistant", "GET"),
        ("OPTIONS", "/healthz", "GET"),
        ("PATCH", "/readyz", "GET"),
    ],
)
def test_a_wrong_method_is_405_with_allow(account: Account, method: str, path: str, allow: str) -> None:
    """Protects that a caller learns which method the path takes."""
    reply = account.ask(method, path)
    assert assert_refused(account, reply, 405, "method_not_allowed")["allowed"] == allow.split(", ")
    assert reply.headers["allow"] == allow


NOWHERE = "/ // /v1 /v1/ /v2/generations /v1/generations/a/b /v1/responses/a/input_items /v1/audio/speech /metrics"


@pytest.mark.parametrize("path", NOWHERE.split())
def test_a_wrong_path_is_404_in_its_surfaces_shape(account: Account, path: str) -> None:
    """Protects paths that do not exist; those that OpenAI's client could ask answer in its shape."""
    reply = account.ask("GET", path + "?query=" + MARK)
    assert_refused(account, reply, 404, "not_found")
    openai_shaped = path.startswith("/v1/") and not path.startswith("/v1/generations")
    assert ("error" in reply.json) == openai_shaped


def test_a_head_request_has_no_body(account: Account) -> None:
    """Protects framing: nothing follows the head of an answer to HEAD, and the connection serves on."""
    with Wire(account.cell.api) as wire:
        wire.ask("HEAD", "/healthz")
        assert wire.interim() == 405
        wire.ask("GET", "/healthz")
        assert wire.reply().status == 200


# ── the wire ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_body_that_never_ends_is_given_up(account: Account) -> None:
    """Protects connections: the refusal comes when the body's time is over, and closes."""
    with Wire(account.cell.api) as wire, Wire(account.cell.api) as chunked:
        wire.ask("POST", "/v1/generations", key=account.key, body=b'{"input', headers={"content-length": "500"})
        head = chunked.request("POST", "/v1/chat/completions", key=account.key, headers={"transfer-encoding": "chunked"})
        chunked.send(head.replace(b"content-length: 0\r\n", b"") + b'5\r\n{"mod')
        for late in (wire, chunked):
            reply = late.reply()
            assert str(BODY_WAIT_MS).encode() in reply.body
            assert_refused(account, reply, 400, "invalid_request")
            assert late.is_closed()


@pytest.mark.parametrize("begun", [b"\r\n", b"POST /v1/gen", b"POST /v1/generations HTTP/1.1\r\nhost: x\r\nx-never"])
def test_headers_that_never_end_are_given_up(account: Account, begun: bytes) -> None:
    """Protects connections that begin a request, and those that only pretend to."""
    with Wire(account.cell.api) as wire:
        wire.send(begun)
        assert_refused(account, wire.reply(), 400, "invalid_request")
        assert wire.is_closed()


def test_headers_above_the_bound_are_refused(account: Account) -> None:
    """Protects memory: 64 KiB of headers are refused once, in one line, in many, and in the target."""
    one = b"GET /healthz HTTP/1.1\r\nhost: x\r\nx-long: " + b"a" * 70_000 + b"\r\n\r\n"
    many = b"GET /healthz HTTP/1.1\r\nhost: x\r\n" + b"".join(b"x-%d: %b\r\n" % (n, b"a" * 1_000) for n in range(70)) + b"\r\n"
    target = b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n"
    endless = b"GET /healthz HTTP/1.1\r\nhost: x\r\nx-long: " + b"a" * 200_000
    for content in (one, many, target, endless):
        with Wire(account.cell.api) as wire:
            wire.send(content)
            reply = wire.reply()
            assert wire.is_closed()
        assert assert_refused(account, reply, 413, "request_too_large")["limit_bytes"] == 65_536


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
        b"hello\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /healthz HTTP/9.9\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /he\x00althz HTTP/1.1\r\nhost: x\r\n\r\n",
        b"CONNECT example.org:443 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"POST /v1/generations HTTP/1.1\r\ncontent-length: -5\r\n\r\n",
        b"POST /v1/generations HTTP/1.1\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
def test_garbage_is_refused_and_closed(account: Account, garbage: bytes) -> None:
    """Protects the parser's edge: one refusal in our shape, then the connection closes."""
    with Wire(account.cell.api) as wire:
        wire.send(garbage)
        reply = wire.reply()
        assert wire.is_closed()
    assert_refused(account, reply, 400, "invalid_request")


def test_a_chunked_body_that_breaks_is_refused(account: Account) -> None:
    """Protects framing inside a body: a wrong chunk size is a 400, not a hang."""
    with Wire(account.cell.api) as wire:
        head = wire.request("POST", "/v1/generations", key=account.key, headers={"transfer-encoding": "chunked"})
        wire.send(head.replace(b"content-length: 0\r\n", b"") + b"zz\r\n{}\r\n")
        assert_refused(account, wire.reply(), 400, "invalid_request")


def test_an_upgrade_that_is_not_taken_is_served_as_it_is(account: Account) -> None:
    """Protects clients that offer HTTP/2 with every request."""
    offer = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2-settings": "AAMAAABk"}
    assert account.ask("POST", "/v1/generations", NATIVE, headers=offer).status == 200


def test_a_request_behind_another_is_cancelled_with_its_client(slow_account: Account) -> None:
    """Protects keep-alive and pipelining: the end of one request does not blind its connection for the next."""
    wire = slow_account.connect()
    first = wire.request("POST", "/v1/generations", key=slow_account.key, body=NATIVE)
    second = wire.request("POST", "/v1/generations", key=slow_account.key, body={**LONG, "request_id": "second"})
    wire.send(first + second)
    assert wire.reply().status == 200
    wait_until(lambda: slow_account.get("second").json.get("status") == "running")
    wire.close()
    assert slow_account.ended("second")["finish_reason"] == "disconnect"


@pytest.mark.parametrize("behind", [b"", b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n", b"POST /v1/gen", b"garbage\r\n\r\n"])
@pytest.mark.parametrize("leave", ["close", "half_close"])
def test_a_client_that_leaves_is_seen_behind_pipelined_bytes(slow_account: Account, behind: bytes, leave: str) -> None:
    """Protects engines from work that nobody reads: bytes behind a running stream hide no disconnect, nor a half-close."""
    stream = slow_account.stream(**LONG, request_id="hidden")
    stream.read(2)
    stream.wire.send(behind)
    getattr(stream.wire, leave)()
    record = slow_account.ended("hidden")
    assert (record["status"], record["finish_reason"]) == ("cancelled", "disconnect")
    assert record["usage"]["output_tokens"] < 213


@pytest.mark.parametrize("leave", ["close", "half_close"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_at_once_leaves_nothing(account: Account, leave: str, stream: bool) -> None:
    """Protects against work that nobody reads, and logs from faults, when a client leaves right behind its request."""
    for sent in (b"POST /v1/gen", b"POST /v1/generations HTTP/1.1\r\ncontent-length: 9\r\n\r\n{", None):
        wire = account.connect()
        wire.send(sent or wire.request("POST", "/v1/generations", key=account.key, body={**LONG, "stream": stream}))
        getattr(wire, leave)()
    assert account.generate().status == 200


def test_garbage_behind_a_stream_is_never_mixed_into_it(slow_account: Account) -> None:
    """Protects the framing of an answer that is on its way: the connection is cut, and no second answer stands in its body."""
    stream = slow_account.stream(**LONG, request_id="framed")
    stream.read(2)
    stream.wire.send(b"garbage\r\n\r\n")
    with pytest.raises(ConnectionResetError):
        stream.finish()
    assert slow_account.ended("framed")["finish_reason"] == "disconnect"


def test_foreign_records_stay_foreign(account: Account, fast_cell: RunningCell) -> None:
    """Protects tenants from one another's ids: neither read nor cancelled."""
    other = new_account(fast_cell)
    other.generate(request_id="theirs")
    assert_refused(account, account.get("theirs"), 404, "not_found")
    assert_refused(account, account.cancel("theirs"), 404, "not_found")
    assert other.get("theirs").json["status"] == "completed"
