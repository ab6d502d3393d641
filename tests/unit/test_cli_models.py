"""Protects the commands of models, keys, aliases and pools: each on a served API, and what they say when it goes wrong."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.contract.artifact_folders import DIGEST, MODEL, signed, write
from tests.signing_keys import private_key
from tests.unit.cli_terminal import REVISION, Terminal, terminal_of

from weir.core.registry.model import EngineKind, RevisionState
from weir.core.registry.signatures import public_key_of
from weir.core.tenancy import Role
from weir.ports import AuditEntry, CatalogChange

PRICES = ("--input", "1", "--cached-input", "2", "--output", "3")
CASE = '{"id": "one", "input": "Grüß Gott", "max_output_tokens": 8, "expect": {"contains": "Gott"}}\n'


@pytest.fixture
async def terminal(tmp_path: Path) -> AsyncIterator[Terminal]:
    async with terminal_of(tmp_path) as made:
        yield made


async def row_of(terminal: Terminal, *words: str, name: str) -> list[str]:
    """The cells of a table's line that begins with this name."""
    lines = (await terminal.run_here(*words)).out.splitlines()
    [line] = [line for line in lines if line.split()[:1] == [name]]
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


async def trust(terminal: Terminal, place: Path) -> None:
    """The key that `signed` signs with."""
    (place / "key.pub").write_text(public_key_of(private_key(1)))
    added = await terminal.good_here("key-ring", "add", "build", str(place / "key.pub"), "--role", "model", "--role", "adapter")
    assert (added["roles"], added["tenant"], added["not_after"]) == (["adapter", "model"], None, None)


async def test_a_model_from_its_signed_folder_to_an_alias(terminal: Terminal, tmp_path: Path) -> None:
    """Protects the way of a model: trusted key, registration with all that may be said, approval, pool, alias."""
    await trust(terminal, tmp_path)
    folder, signature, cases = write(tmp_path / "model"), tmp_path / "model.sig", tmp_path / "cases.jsonl"
    signature.write_bytes(signed())
    cases.write_text(CASE)
    words = ["model", "register", str(folder), "--signature", str(signature), "--name", "small", "--engine", "llamacpp"]
    words += ["--file", MODEL, "--context-tokens", "2048", "--max-output-tokens", "512", "--typical-output-tokens", "50"]
    words += ["--base-model", "--evaluation", str(cases), "--tenant", "acme", *PRICES, "--batch-percent", "7"]
    words += ["--argument", "batch_tokens=64", "--argument", "flash_attention=true", "--argument", "cache_type_k=q8_0"]
    made = await terminal.good_here(*words)
    assert (made["artifact"], made["artifact_digest"], made["state"]) == (MODEL, DIGEST, "registered")
    assert made["arguments"] == {"batch_tokens": 64, "cache_type_k": "q8_0", "flash_attention": True}
    assert (made["context_tokens"], made["max_output_tokens"], made["typical_output_tokens"]) == (2_048, 512, 50)
    assert (made["chat"], made["tenant"]) == (False, "acme")
    assert (made["price"]["output_microusd"], made["price"]["batch_percent"]) == (3, 7)
    assert made["evaluation"].startswith("sha256:")
    revision = made["id"]
    assert await terminal.good_here("model", "show", revision) == made
    assert await row_of(terminal, "model", "list", name=revision) == [
        revision,
        "registered",
        "llamacpp",
        DIGEST[:19],
        "acme",
        "owner",
    ]
    own = await terminal.run_here("model", "approve", revision)
    assert own.status == 1 and "another administrator" in own.err
    (_, approver), _ = await terminal.commands.create_admin_key("test", "bob", Role.APPROVER)
    approved = await terminal.good_here("model", "approve", revision, "--admin-key", approver)
    assert (approved["state"], approved["approved_by"]) == ("approved", "bob")
    pool = await terminal.good_here(
        "pool", "create", "own", revision, "--tenant", "acme", "--replicas", "1", "--concurrency", "4"
    )
    assert (pool["tenant"], pool["replicas"], pool["concurrency"]) == ("acme", 1, 4)
    alias = await terminal.good_here(
        "alias", "set", "assistant", revision, "--tenant", "acme", "--default-max-output-tokens", "99"
    )
    assert (alias["tenant"], alias["default_max_output_tokens"]) == ("acme", 99)
    table = (await terminal.run_here("alias", "list")).out.splitlines()
    rows = [line.split() for line in table if "assistant" in line]
    assert rows == [["assistant", "small-1", "256"], ["assistant", "acme", revision, "99"]]
    refused = await terminal.run_here("model", "retire", revision)
    assert refused.status == 1 and "still needed by assistant" in refused.err
    assert (await terminal.good_here("model", "revoke", revision))["revoked"] is True


async def test_a_relative_path_is_the_callers_and_control_says_why_it_refuses(
    terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Protects whoever registers from a directory of their own: what is refused is refused with the file and the reason."""
    await trust(terminal, tmp_path)
    write(tmp_path / "model", {MODEL: b"GGUF changed"})
    (tmp_path / "model.sig").write_bytes(signed({MODEL: b"GGUF as signed"}))
    monkeypatch.chdir(tmp_path)
    words = ("model", "register", "model", "--signature", "model.sig", "--name", "x", "--engine", "llamacpp", *PRICES)
    refused = await terminal.run_here(*words, "--context-tokens", "64")
    assert refused.status == 1 and MODEL in refused.err and "artifact_refused" in refused.err
    assert (await terminal.run_here(*words)).err.startswith("error: context_tokens must be")


async def test_a_served_model_has_no_folder(terminal: Terminal) -> None:
    """Protects engines behind a URL: registered by the name that they serve, shown as unverified, with a pool of addresses."""
    words = ("model", "register", "--name", "far", "--engine", "openai", "--served", "gpt-x", "--external", *PRICES)
    made = await terminal.good_here(*words, "--context-tokens", "64")
    assert (made["artifact"], made["artifact_digest"], made["external"], made["chat"]) == ("gpt-x", "unverified", True, True)
    served = replace(REVISION, id="far@1", engine=EngineKind.OPENAI, state=RevisionState.APPROVED)
    await terminal.put(CatalogChange(AuditEntry(0, "test", "put", "", "{}"), revisions=[served]))
    create = ("pool", "create", "far", "far@1", "--url", "http://127.0.0.1:1/v1", "--url", "http://127.0.0.1:2", "--on-demand")
    pool = await terminal.good_here(*create, "--idle-stop-ms", "5000", "--service-class", "batch", "--input-tokens-max", "9")
    assert (pool["urls"], pool["on_demand"], pool["idle_stop_ms"]) == (
        ["http://127.0.0.1:1/v1", "http://127.0.0.1:2"],
        True,
        5_000,
    )
    assert (pool["service_classes"], pool["input_tokens_max"]) == (["batch"], 9)
    changed = await terminal.good_here(
        "pool", "patch", "far", "--replicas", "3", "--concurrency", "2", "--service-class", "interactive"
    )
    assert (changed["replicas"], changed["concurrency"], changed["service_classes"]) == (3, 2, ["interactive"])
    assert (await terminal.good_here("pool", "retire", "far"))["retired"] is True


async def test_pools_are_listed_as_they_do(terminal: Terminal) -> None:
    """Protects operators: how many replicas are wanted and ready, and what a pool takes."""
    assert await row_of(terminal, "pool", "list", name="small") == [
        "small",
        "small-1",
        "acme",
        "2",
        "1",
        "4",
        "3",
        "5",
        "batch, up to 9,000 tokens",
    ]
    assert [pool["name"] for pool in await terminal.good_here("pool", "list", "--json")] == ["small"]


async def test_trusted_keys_are_listed_and_revoked_and_private_ones_never_sent(terminal: Terminal, tmp_path: Path) -> None:
    """Protects the key ring, and private keys that are named by mistake."""
    await trust(terminal, tmp_path)
    (tmp_path / "other.pub").write_text(public_key_of(private_key(2)))
    words = ("key-ring", "add", "theirs", str(tmp_path / "other.pub"), "--role", "adapter", "--tenant", "acme")
    added = await terminal.good_here(*words, "--not-before", "2023-01-01", "--not-after", "2030-01-01T00:00:00Z")
    assert (added["not_before"], added["not_after"]) == ("2023-01-01T00:00:00.000Z", "2030-01-01T00:00:00.000Z")
    row = await row_of(terminal, "key-ring", "list", name="theirs")
    assert row[:3] == ["theirs", "adapter", "acme"] and row[-1] == added["fingerprint"][:16]
    assert (await terminal.good_here("key-ring", "revoke", "theirs"))["revoked"] is True
    assert "yes" in await row_of(terminal, "key-ring", "list", name="theirs")
    assert [key["name"] for key in await terminal.good_here("key-ring", "list", "--json")] == ["build", "theirs"]
    (tmp_path / "private").write_text(private_key(3))
    for file, said in (("private", "it stays with whoever signs"), ("absent", "No such file")):
        refused = await terminal.run_here("key-ring", "add", "mine", str(tmp_path / file), "--role", "model")
        assert refused.status == 1 and said in refused.err
    assert (await terminal.run_here("key-ring", "add", "mine", str(tmp_path / "key.pub"))).status == 2


async def test_what_cannot_be_sent_is_one_sentence(terminal: Terminal, tmp_path: Path) -> None:
    """Protects a person from tracebacks: arguments and files of another form."""
    (tmp_path / "latin").write_bytes(b"\xff")
    words = ("model", "register", "--name", "x", "--engine", "simulated", "--file", "row", "--context-tokens", "64", *PRICES)
    for more, said in (
        (("--argument", "threads"), "NAME=VALUE"),
        (("--argument", "=4"), "NAME=VALUE"),
        (("--evaluation", str(tmp_path / "absent")), "No such file"),
        (("--evaluation", str(tmp_path / "latin")), "not UTF-8"),
        (("--argument", "slowdown=fast"), "arguments.slowdown"),
    ):
        refused = await terminal.run_here(*words, *more)
        assert refused.status == 1 and said in refused.err and refused.err.count("\n") == 1, refused
    made = json.loads((await terminal.run_here(*words, "--argument", "slowdown=1.5")).out)
    assert made["arguments"] == {"slowdown": 1.5}
