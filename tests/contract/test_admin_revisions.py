"""Protects the management API's routes of revisions over a real socket: registered, shown, approved, priced, ended."""

import json
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from tests.contract.admin_stand import FRESH, NOON_MS, PRICE, REVISION, SIMULATED, Stand, standing
from tests.contract.artifact_folders import DIGEST, MODEL, signed, write

from weir import errors
from weir.control.bootstrap import bootstrap
from weir.control.declared_models import DeclaredModels
from weir.core.registry.golden_set import SET_BYTES_MAX
from weir.core.registry.model import EngineKind, RevisionState
from weir.core.tenancy import Role
from weir.ports import AuditEntry, CatalogChange


@pytest.fixture
async def stand() -> AsyncIterator[Stand]:
    async with standing() as made:
        yield made


# ── revisions ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_revision_shows_everything_that_makes_it_what_it_is(stand: Stand) -> None:
    """Protects whoever approves: what runs, how, whose it is, and whether anybody vouched for it."""
    verified = replace(
        FRESH,
        id="org/own@2",
        engine=EngineKind.LLAMACPP,
        artifact_digest="sha256:" + "1" * 64,
        arguments=(("batch_tokens", 512), ("flash_attention", True)),
        evaluation="sha256:" + "2" * 64,
        tenant="acme",
        adapter_of="next@1",
    )
    entry = AuditEntry(NOON_MS, "test", "put", "", "{}")
    await stand.commands.commit(lambda catalog: (None, CatalogChange(entry, revisions=[verified])))
    price = {"version": 1, "input_microusd": 200_000, "cached_input_microusd": 50_000, "output_microusd": 600_000}
    price["batch_percent"] = 100
    shown = await stand.good("GET", "/admin/v1/revisions/org/own@2")
    assert shown == {
        "id": "org/own@2",
        "engine": "llamacpp",
        "state": "registered",
        "revoked": False,
        "artifact": "row",
        "artifact_digest": "sha256:" + "1" * 64,
        "arguments": {"batch_tokens": 512, "flash_attention": True},
        "context_tokens": 4_096,
        "max_output_tokens": 1_024,
        "typical_output_tokens": 200,
        "chat": True,
        "external": False,
        "evaluation": "sha256:" + "2" * 64,
        "tenant": "acme",
        "adapter_of": "next@1",
        "registered_by": "ann",
        "approved_by": None,
        "price": price,
        "prices": [price],
    }
    assert (await stand.good("GET", "/admin/v1/revisions/org%2Fown%402")) == shown
    listed = {each["id"]: each for each in (await stand.good("GET", "/admin/v1/revisions"))["revisions"]}
    assert list(listed) == ["fresh@1", "next@1", "org/own@2", "small-1"] and listed["org/own@2"] == shown
    unverified = listed["small-1"]
    assert (unverified["artifact_digest"], unverified["state"], unverified["registered_by"]) == (
        "unverified",
        "live",
        "bootstrap",
    )


async def test_a_revision_is_approved_by_another_one_who_may(stand: Stand) -> None:
    """Protects what serves: a releaser cannot approve, its registrant neither whatever the role, and others once."""
    status, problem = await stand.bad("POST", "/admin/v1/revisions/fresh@1/approve", role=Role.RELEASER)
    assert (status, problem["code"]) == (403, "forbidden") and "approver" in problem["detail"]
    made = await stand.good("POST", "/admin/v1/admin-keys", {"actor": "ann", "role": "owner"}, 201)
    kept, stand.keys[Role.OWNER] = stand.keys[Role.OWNER], made["secret"]
    status, problem = await stand.bad("POST", "/admin/v1/revisions/fresh@1/approve")
    assert (status, problem["code"]) == (403, "forbidden") and "registered" in problem["detail"]
    stand.keys[Role.OWNER] = kept
    approved = await stand.good("POST", "/admin/v1/revisions/fresh@1/approve", role=Role.APPROVER)
    assert (approved["state"], approved["registered_by"], approved["approved_by"]) == ("approved", "ann", "approver")
    assert stand.published[-1].revisions["fresh@1"].state is RevisionState.APPROVED
    assert await stand.last_entry() == ("approver", "revision.approve", "fresh@1")
    status, problem = await stand.bad("POST", "/admin/v1/revisions/fresh@1/approve", role=Role.APPROVER)
    assert (status, problem["code"], problem["state"]) == (409, "not_allowed_now", "approved")
    assert problem["accepted"] == ["registered"]


async def test_a_revision_ends_only_once_nothing_needs_it_and_at_once_if_it_must(stand: Stand) -> None:
    """Protects aliases and rollouts from a revision's end, and everybody from a revision that must not run."""
    status, problem = await stand.bad("POST", "/admin/v1/revisions/next@1/retire", role=Role.RELEASER)
    assert (status, problem["code"]) == (409, "not_allowed_now")
    assert (problem["aliases"], problem["rollouts"]) == (["canary", "paused"], ["canary", "paused", "proposed"])
    retired = await stand.good("POST", "/admin/v1/revisions/fresh@1/retire", role=Role.RELEASER)
    assert (retired["state"], retired["revoked"]) == ("retired", False)
    assert await stand.last_entry() == ("releaser", "revision.retire", "fresh@1")
    assert (await stand.bad("POST", "/admin/v1/revisions/fresh@1/retire"))[1]["state"] == "retired"
    for _ in range(2):
        revoked = await stand.good("POST", "/admin/v1/revisions/next@1/revoke", role=Role.RELEASER)
        assert (revoked["state"], revoked["revoked"]) == ("revoked", True)
        assert await stand.last_entry() == ("releaser", "revision.revoke", "next@1")
    assert stand.published[-1].revisions["next@1"].revoked


async def test_a_revision_whose_id_has_slashes_has_a_price(stand: Stand) -> None:
    """Protects models that are named as their hub names them, written either way in a path."""
    other = replace(REVISION, id="org/small@1")
    await bootstrap(stand.commands, DeclaredModels((other,)), {})
    for number, name in enumerate(("org/small@1", "org%2Fsmall%401")):
        answer = await stand.good("PUT", f"/admin/v1/revisions/{name}/price", PRICE | {"output_microusd": number})
        assert (answer["revision"], answer["price"]["version"]) == ("org/small@1", number + 2)


# ── registration ─────────────────────────────────────────────────────────────────────────────────────────────────────

CASE = '{"id": "one", "input": "Grüß Gott, \\"you\\".", "max_output_tokens": 8, "expect": {"contains": "Gott"}}'


def signed_folder(place: Path) -> dict[str, Any]:
    """What asks to register a folder that the stand's key `build` signed."""
    folder, signature = write(place / "model"), place / "model.sig"
    signature.write_bytes(signed())
    artifact = {"folder": str(folder), "signature": str(signature)}
    return {"name": "small", "engine": "llamacpp", "context_tokens": 2_048, "price": PRICE, **artifact}


async def test_a_signed_artifact_becomes_a_revision_that_waits_for_approval(stand: Stand, tmp_path: Path) -> None:
    """Protects registration: what was verified is named by its digest, everything given is shown, and nothing serves."""
    body = signed_folder(tmp_path) | {
        "artifact": MODEL,
        "max_output_tokens": 512,
        "typical_output_tokens": 50,
        "chat": False,
        "external": None,
        "arguments": {"batch_tokens": 128, "flash_attention": True, "cache_type_k": "q8_0"},
        "evaluation": CASE + "\n",
        "tenant": "acme",
    }
    made = await stand.good("POST", "/admin/v1/revisions", body, 201, role=Role.RELEASER)
    price = {"version": 1, **PRICE, "batch_percent": 100}
    assert made == {
        "id": made["id"],
        "engine": "llamacpp",
        "state": "registered",
        "revoked": False,
        "artifact": MODEL,
        "artifact_digest": DIGEST,
        "arguments": body["arguments"],
        "context_tokens": 2_048,
        "max_output_tokens": 512,
        "typical_output_tokens": 50,
        "chat": False,
        "external": False,
        "evaluation": "sha256:" + sha256(body["evaluation"].encode()).hexdigest(),
        "tenant": "acme",
        "adapter_of": None,
        "registered_by": "releaser",
        "approved_by": None,
        "price": price,
        "prices": [price],
    }
    assert made["id"].startswith("small@") and await stand.last_entry() == ("releaser", "revision.register", made["id"])
    assert await stand.good("GET", f"/admin/v1/revisions/{made['id']}") == made
    status, problem = await stand.bad("POST", "/admin/v1/revisions", body)
    assert (status, problem["code"]) == (409, "already_exists") and made["id"] in problem["detail"]


async def test_an_artifact_that_is_not_what_was_signed_is_refused_with_the_reason(stand: Stand, tmp_path: Path) -> None:
    """Protects what serves: the reason and the file are named, and nothing is recorded."""
    body, version = signed_folder(tmp_path), await stand.version()
    (tmp_path / "model" / MODEL).write_bytes(b"GGUF other")
    status, problem = await stand.bad("POST", "/admin/v1/revisions", body)
    assert (status, problem["code"], problem["reason"], problem["file"]) == (422, "artifact_refused", "changed_file", MODEL)
    await stand.good("DELETE", "/admin/v1/signing-keys/build")
    status, problem = await stand.bad("POST", "/admin/v1/revisions", body)
    assert (status, problem["code"], problem["reason"]) == (422, "signature_refused", "revoked_key")
    assert await stand.version() == version + 1


async def test_the_largest_evaluation_set_fits_into_a_body(stand: Stand) -> None:
    """Protects evaluation sets from the bound of bodies, also where every character is escaped."""
    head, tail = '{"id": "one", "input": "', '", "max_output_tokens": 8, "expect": {"contains": "x"}}'
    lines = head + "é" * ((SET_BYTES_MAX - len(head + tail)) // 2) + tail
    content = json.dumps(SIMULATED | {"evaluation": lines}).encode()
    assert len(content) > 3 * (SET_BYTES_MAX - 1_000)
    answer = await stand.call("POST", "/admin/v1/revisions", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 201, answer.text
    status, problem = await stand.bad("POST", "/admin/v1/revisions", SIMULATED | {"evaluation": lines + " é"})
    assert (status, problem["field"]) == (400, "evaluation")


async def test_a_signature_that_is_no_file_holds_nothing_up(stand: Stand, tmp_path: Path) -> None:
    """Protects threads from a pipe that nobody writes to, and memory from a device that never ends."""
    body = signed_folder(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path / "absent", tmp_path, Path("/dev/zero")):
        status, problem = await stand.bad("POST", "/admin/v1/revisions", body | {"signature": str(path)})
        assert (status, problem["field"]) == (400, "signature") and problem["accepted"], path


NO_NUMBERS: tuple[Any, ...] = (0, "1", True, None, [1], {}, 10**400)
BAD_REVISIONS: tuple[tuple[dict[str, Any], str, str | None], ...] = (
    ({"name": None}, "invalid_request", "name"),
    ({"name": "Bad Name"}, "invalid_request", "name"),
    ({"engine": "onnx"}, "invalid_request", "engine"),
    ({"price": None}, "invalid_request", "price"),
    ({"price": PRICE | {"output_microusd": -1}}, "invalid_request", "output_microusd"),
    ({"price": PRICE | {"batch_percent": 101}}, "invalid_request", "batch_percent"),
    ({"price": {"input_microusd": 1}}, "invalid_request", "price.cached_input_microusd"),
    *(
        ({"context_tokens": wrong}, "invalid_request", "context_tokens")
        for wrong in (None, 0, 15, True, 1.5, "9", 10**9, 2**64)
    ),
    ({"max_output_tokens": 4_097}, "invalid_request", "max_output_tokens"),
    ({"typical_output_tokens": 0}, "invalid_request", "typical_output_tokens"),
    ({"chat": 1}, "invalid_request", "chat"),
    ({"artifact": None}, "invalid_request", "artifact"),
    ({"folder": "/tmp"}, "invalid_request", "folder"),
    ({"signature": "/tmp"}, "invalid_request", "signature"),
    ({"served": "m"}, "invalid_request", "served"),
    ({"external": True}, "invalid_request", "external"),
    ({"engine": "llamacpp", "folder": "model", "signature": "/x"}, "invalid_request", "folder"),
    ({"engine": "llamacpp", "folder": "/x", "signature": "x"}, "invalid_request", "signature"),
    ({"engine": "llamacpp"}, "invalid_request", "folder"),
    ({"engine": "openai", "artifact": None}, "invalid_request", "served"),
    ({"arguments": []}, "invalid_request", "arguments"),
    ({"arguments": {"x": 1}}, "invalid_request", "arguments.x"),
    *(({"arguments": {"slowdown": wrong}}, "invalid_request", "arguments.slowdown") for wrong in NO_NUMBERS),
    ({"evaluation": ""}, "invalid_request", None),
    ({"evaluation": "{}"}, "invalid_request", "id"),
    ({"evaluation": 5}, "invalid_request", "evaluation"),
    ({"tenant": "nobody"}, "not_found", None),
    ({"adapter_of": "nothing@1", "tenant": "acme"}, "not_found", None),
    ({"adapter_of": "next@1"}, "invalid_request", "tenant"),
    ({"adapter_of": "next@1", "tenant": "acme"}, "not_allowed_now", None),
    ({"state": "approved"}, "invalid_request", "state"),
    ({"registered_by": "bob"}, "invalid_request", "registered_by"),
)


async def test_a_wrong_registration_is_refused_by_field(stand: Stand) -> None:
    """Protects whoever registers: code, field and what is accepted, whatever is sent, and nothing is recorded."""
    version = await stand.version()
    for change, code, field in BAD_REVISIONS:
        status, problem = await stand.bad("POST", "/admin/v1/revisions", SIMULATED | change)
        assert (problem["code"], problem.get("field")) == (code, field), (change, problem)
        assert status == errors.ERROR_BY_CODE[code].http_status
    sent = {"content-type": "application/json"}
    for written in ("NaN", "Infinity", "1e999"):
        content = json.dumps(SIMULATED | {"arguments": {"slowdown": "x"}}).replace('"x"', written)
        _, problem = await stand.bad("POST", "/admin/v1/revisions", content=content.encode(), headers=sent)
        assert problem["field"] == "arguments.slowdown"
    assert await stand.version() == version
