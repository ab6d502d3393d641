"""Protects what holds on every route of the management API: roles, secrets, the form of problems, bounds."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.contract.admin_stand import SIMULATED, SeededEntropy, Stand, standing
from tests.signing_keys import private_key

from weir import errors
from weir.api.admin_auth import authenticate
from weir.api.admin_bodies import parse_time
from weir.control.commands import Commands
from weir.core.registry.signatures import public_key_of
from weir.core.tenancy import LIMIT_NAMES, Role
from weir.ports import Catalog
from weir.storage.memory import MemoryCatalog


@pytest.fixture
async def stand() -> AsyncIterator[Stand]:
    async with standing() as made:
        yield made


# ── roles and secrets ────────────────────────────────────────────────────────────────────────────────────────────────

READS = (
    "tenants",
    "tenants/acme",
    "tenants/acme/applications",
    "tenants/acme/applications/assistant",
    "tenants/acme/applications/assistant/keys",
    "limits",
    "usage",
    "ledger?tenant=acme",
    "replicas",
    "pools",
    "audit",
    "revisions",
    "revisions/small-1",
    "signing-keys",
    "aliases",
    "aliases/assistant",
    "rollouts",
    "rollouts/canary",
    "generations/acme/r:1",
    "generations/acme/r:1/explanation",
)
CHANGES: tuple[tuple[str, str, Any], ...] = (
    ("POST", "tenants", {"name": "fresh"}),
    ("PATCH", "tenants/acme", {"disabled": False}),
    ("POST", "tenants/acme/applications", {"name": "fresh"}),
    ("PATCH", "tenants/acme/applications/assistant", {"aliases": None}),
    ("POST", "tenants/acme/applications/batch-jobs/revoke", None),
    ("POST", "tenants/acme/applications/assistant/keys", None),
    ("DELETE", "tenants/acme/applications/assistant/keys/{key}", None),
    ("PUT", "limits", {"scope": {"tenant": "acme"}, "concurrency": 9}),
    ("POST", "pools", {"name": "more", "revision": "next@1"}),
    ("PATCH", "pools/more", {"replicas": 2}),
    ("POST", "pools/more/retire", None),
)
RELEASERS: tuple[tuple[str, str, Any], ...] = (
    (
        "PUT",
        "revisions/small-1/price",
        {"input_microusd": 1, "cached_input_microusd": 1, "output_microusd": 1},
    ),
    ("PUT", "aliases/assistant", {"revision": "small-1"}),
    ("POST", "rollouts", {"alias": "assistant", "revision": "next@1"}),
    ("POST", "rollouts/proposed/pause", None),
    ("POST", "rollouts/paused/resume", None),
    ("POST", "rollouts/canary/promote", None),
    ("POST", "rollouts/canary/roll-back", None),
    ("POST", "revisions/fresh@1/retire", None),
    ("POST", "revisions", SIMULATED),
    ("POST", "revisions/next@1/revoke", None),
)
APPROVERS: tuple[tuple[str, str, Any], ...] = (("POST", "revisions/fresh@1/approve", None),)
OWNERS: tuple[tuple[str, str, Any], ...] = (
    ("GET", "admin-keys", None),
    ("POST", "admin-keys", {"actor": "ann", "role": "viewer"}),
    ("DELETE", "admin-keys/{admin_key}", None),
    ("POST", "tenants/globex/revoke", None),
    ("DELETE", "tenants/globex", None),
    ("POST", "signing-keys", {"name": "other", "public_key": public_key_of(private_key(2)), "roles": ["model"]}),
    ("DELETE", "signing-keys/build", None),
)


@pytest.mark.parametrize("role", [None, *Role])
async def test_each_role_may_do_its_own_and_nothing_more(stand: Stand, role: Role | None) -> None:
    """Protects the role matrix, on every route."""
    catalog = await stand.store.load()
    names = {
        "key": next(key.id for key in catalog.keys if (key.tenant, key.application) == ("acme", "assistant")),
        "admin_key": next(key.id for key in catalog.admin_keys if key.role is Role.APPROVER),
    }
    may_read, may_change = role is not None, role not in (None, Role.VIEWER)
    requests = [("GET", path, None, may_read) for path in READS]
    requests += [(method, path, body, may_change) for method, path, body in CHANGES]
    requests += [(method, path, body, role in (Role.APPROVER, Role.OWNER)) for method, path, body in APPROVERS]
    may_release = role in (Role.RELEASER, Role.APPROVER, Role.OWNER)
    requests += [(method, path, body, may_release) for method, path, body in RELEASERS]
    requests += [(method, path, body, role is Role.OWNER) for method, path, body in OWNERS]
    for method, path, body, allowed in requests:
        answer = await stand.call(method, "/admin/v1/" + path.format(**names), body, role)
        refused = 401 if role is None else 403
        assert (answer.status_code in (200, 201)) is allowed, (method, path, answer.text)
        if not allowed:
            assert answer.status_code == refused, (method, path)
            assert answer.json()["code"] == ("unauthenticated" if role is None else "forbidden")
            assert answer.headers.get("www-authenticate") == ("Bearer" if role is None else None)


async def test_the_role_matrix_covers_every_route(stand: Stand) -> None:
    """Protects the role matrix from forgetting a new route."""
    document = await stand.good("GET", "/admin/openapi.json", role=None)
    routes = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    covered = len(READS) + len(CHANGES) + len(RELEASERS) + len(APPROVERS) + len(OWNERS)
    assert len(routes) == covered


@pytest.mark.parametrize("credential", ["Bearer nonsense", "Basic abc", "Bearer", "weir", "Bearer weir-0-0"])
async def test_other_credentials_are_unauthenticated(stand: Stand, credential: str) -> None:
    """Protects authentication from whatever is not an admin key."""
    status, problem = await stand.bad("GET", "/admin/v1/tenants", role=None, headers={"authorization": credential})
    assert (status, problem["code"]) == (401, "unauthenticated")


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer nonsense"}])
async def test_who_is_unknown_learns_nothing_of_its_body(stand: Stand, headers: dict[str, str]) -> None:
    """Protects the parser from strangers: whatever a body is, without a key the answer is 401."""
    for path, content in (("tenants", b"{"), ("tenants", b'{"colour": 1}'), ("limits?user=x", b"[" * 100_000), ("limits", b"")):
        method = "POST" if path == "tenants" else "PUT"
        sent = {"content-type": "application/json", **headers}
        status, problem = await stand.bad(method, f"/admin/v1/{path}", role=None, content=content, headers=sent)
        assert (status, problem["code"]) == (401, "unauthenticated"), path
    assert (await stand.bad("GET", "/admin/v1/usage?since=x", role=None, headers=headers))[0] == 401


class ClosedCatalog(MemoryCatalog):
    """A store that cannot be read."""

    async def load(self) -> Catalog:
        raise errors.LedgerUnavailable


@pytest.mark.parametrize("presented", [None, "", "nonsense", "weir-" + "0" * 84])
async def test_what_cannot_be_a_key_asks_no_store(stand: Stand, presented: str | None) -> None:
    """Protects the store from strangers: a malformed key is refused without reading the catalog."""
    commands = Commands(ClosedCatalog(), stand.publish, stand.clock, SeededEntropy())
    with pytest.raises(errors.Unauthenticated):
        await authenticate(commands, presented)
    with pytest.raises(errors.LedgerUnavailable):
        await authenticate(commands, stand.keys[Role.VIEWER])


async def test_an_api_key_is_no_admin_key(stand: Stand) -> None:
    """Protects administration from tenants' keys."""
    path = "/admin/v1/tenants/acme/applications/assistant/keys"
    secret = (await stand.good("POST", path, status=201))["secret"]
    status, _ = await stand.bad("GET", "/admin/v1/tenants", role=None, headers={"authorization": f"Bearer {secret}"})
    assert status == 401


async def test_no_answer_shows_a_digest_or_a_stored_secret(stand: Stand) -> None:
    """Protects secrets and digests."""
    catalog = await stand.store.load()
    digests = [key.secret_sha256.hex() for key in catalog.keys] + [key.secret_sha256.hex() for key in catalog.admin_keys]
    for path in (*READS, "admin-keys"):
        text = (await stand.call("GET", f"/admin/v1/{path}")).text
        assert "sha256" not in text and "secret" not in text
        assert not any(hidden in text for hidden in (*digests, *stand.keys.values()))


# ── form ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_bodies_that_are_no_json_are_problems(stand: Stand) -> None:
    """Protects the parser from malformed and hostile bodies."""
    json_type = {"content-type": "application/json"}
    for content in (b"{", b"\xff\xfe", b"{} {}", b"[" * 100_000, b'{"name": ' + b"9" * 5_000 + b"}"):
        status, problem = await stand.bad("POST", "/admin/v1/tenants", content=content, headers=json_type)
        assert (status, problem["code"]) == (400, "invalid_request"), content[:10]
    status, problem = await stand.bad("POST", "/admin/v1/tenants", content=b'{"name": "x"}')
    assert (status, problem["field"]) == (400, "body")
    nan = b'{"scope": {"tenant": "acme"}, "concurrency": NaN}'
    assert (await stand.bad("PUT", "/admin/v1/limits", content=nan, headers=json_type))[1]["field"] == "concurrency"


async def test_a_body_beyond_four_mebibytes_is_refused_whether_announced_or_not(stand: Stand) -> None:
    """Protects memory from large bodies."""

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(65):
            yield b" " * 65_536

    for content in (b" " * (4 * 1024 * 1024 + 1), pieces()):
        status, problem = await stand.bad(
            "POST", "/admin/v1/tenants", content=content, headers={"content-type": "application/json"}
        )
        assert (status, problem["code"], problem["limit_bytes"]) == (413, "request_too_large", 4 * 1024 * 1024)


NASTY: tuple[Any, ...] = (None, True, -1, 0, 2**64, 10**400, 1.5, "", " ", "x" * 3_000, "\0", "\ud800", [], [None], {}, {"": 1})
BODIES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    *((method, path, body) for method, path, body in (*CHANGES, *RELEASERS, *OWNERS) if isinstance(body, dict)),
    ("POST", "revisions", SIMULATED | {"engine": "llamacpp", "folder": "/x", "signature": "/x", "evaluation": "{}"}),
    ("POST", "revisions", SIMULATED | {"engine": "openai", "served": "m", "external": True, "arguments": {"slowdown": 1}}),
    ("POST", "pools", {"name": "p", "revision": "next@1", "urls": ["http://x"], "tenant": "acme", "idle_stop_ms": 1}),
    ("POST", "pools", {"name": "p", "revision": "next@1", "service_classes": ["batch"], "input_tokens_max": 1}),
    ("POST", "signing-keys", {"name": "k", "public_key": "x", "roles": ["model"], "not_before": "x", "not_after": "x"}),
    ("POST", "rollouts", {"alias": "over", "revision": "next@1", "tenant": "acme", "plan": {}}),
    ("PUT", "aliases/over", {"revision": "next@1", "default_max_output_tokens": 9, "tenant": "acme"}),
    ("POST", "rollouts/paused/roll-back", {"detail": "x"}),
    ("PATCH", "pools/spare", {"replicas": 1, "concurrency": 1, "service_classes": ["batch"]}),
)


@pytest.mark.parametrize(("method", "path", "body"), BODIES)
async def test_no_value_of_any_field_breaks_a_route(stand: Stand, method: str, path: str, body: dict[str, Any]) -> None:
    """Protects the platform from whatever a field may hold, and from a name that is none: an answer of ours, never a fault."""
    sent = {"content-type": "application/json"}
    for field in (*body, "\ud800", "surprise"):
        for value in NASTY:
            content = json.dumps(body | {field: value}).encode()
            answer = await stand.call(method, f"/admin/v1/{path}", content=content, headers=sent)
            assert answer.status_code < 500, (field, value, answer.text)


async def test_a_wrong_method_names_all_that_the_path_takes(stand: Stand) -> None:
    """Protects the Allow header of a path with several routes."""
    answer = await stand.call("PUT", "/admin/v1/tenants/acme")
    assert (answer.status_code, answer.json()["code"]) == (405, "method_not_allowed")
    assert answer.json()["allowed"] == ["DELETE", "GET", "PATCH"] and answer.headers["allow"] == "DELETE, GET, PATCH"


async def test_a_store_that_fails_answers_503_with_a_time_to_come_back(stand: Stand) -> None:
    """Protects clients from guessing when to come back."""
    stand.cell.fault = errors.LedgerUnavailable(retry_after_ms=1_500)
    answer = await stand.call("GET", "/admin/v1/ledger?tenant=acme")
    assert (answer.status_code, answer.json()["code"]) == (503, "ledger_unavailable")
    assert answer.headers["retry-after"] == "2" and 1_500 <= int(answer.headers["retry-after-ms"]) <= 1_875


async def test_a_bug_is_a_problem_without_its_text(stand: Stand) -> None:
    """Protects the inside of the platform from showing in an answer."""
    stand.ledger.fault = lambda operation: RuntimeError("inner text")
    status, problem = await stand.bad("GET", "/admin/v1/usage")
    assert (status, problem["code"]) == (500, "internal_error") and "inner text" not in json.dumps(problem)


async def test_the_document_describes_every_route_and_no_page_loads_from_elsewhere(stand: Stand) -> None:
    """Protects the OpenAPI document, and browsers from foreign scripts."""
    document = await stand.good("GET", "/admin/openapi.json", role=None)
    assert document["openapi"].startswith("3.1") and "HTTPValidationError" not in json.dumps(document)
    limits = document["components"]["schemas"]["LimitsBody"]
    assert set(limits["properties"]) == {"scope", *LIMIT_NAMES} and limits["additionalProperties"] is False
    for page in ("/docs", "/redoc", "/admin/docs"):
        assert (await stand.call("GET", page)).status_code == 404


@pytest.mark.parametrize("text", ["1970-01-01", "1970-01-01T00:00:00Z", "1970-01-01T01:00:00.0+01:00"])
def test_times_mean_the_same_instant_in_each_form(text: str) -> None:
    """Protects the meaning of times and dates."""
    assert parse_time("from", text) == 0


@pytest.mark.parametrize("text", ["", "19700101", "1970-13-01", "1970-01-01T00:00Z", "0", "1970-01-01T00:00:00+25:00"])
def test_other_forms_of_time_are_refused(text: str) -> None:
    """Protects ranges from times that could be read in two ways."""
    with pytest.raises(errors.InvalidRequest):
        parse_time("from", text)
