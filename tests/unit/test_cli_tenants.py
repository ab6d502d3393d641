"""Protects the commands that decide how a tenant's streams are kept, and that delete a tenant."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.unit.cli_terminal import Terminal, terminal_of

POLICY = ("--retention-seconds", "3600", "--retention-bytes", "1048576")


@pytest.fixture
async def terminal(tmp_path: Path) -> AsyncIterator[Terminal]:
    async with terminal_of(tmp_path) as made:
        yield made


async def test_a_retention_is_set_field_by_field_shown_and_ended(terminal: Terminal) -> None:
    """Protects what a tenant is kept for: an option changes its field alone, other changes none, and no retention is said."""
    created = await terminal.good_here("tenant", "create", "initech", *POLICY)
    policy = {"seconds": 3_600, "bytes": 1_048_576, "resume_grace_seconds": 60}
    assert created["retention"] == policy and (await terminal.good_here("tenant", "show", "acme"))["retention"] is None
    assert (await terminal.good_here("tenant", "set", "initech", "--weight", "2"))["retention"] == policy
    changed = await terminal.good_here("tenant", "set", "initech", "--resume-grace-seconds", "5")
    assert changed["retention"] == policy | {"resume_grace_seconds": 5}
    assert (await terminal.good_here("tenant", "set", "acme", *POLICY))["retention"] == policy
    assert (await terminal.good_here("tenant", "set", "initech", "--no-retention"))["retention"] is None
    lines = [line for line in (await terminal.run_here("audit", "--limit", "1")).out.splitlines() if "tenant.patch" in line]
    [change] = [line.split(maxsplit=4)[4].strip() for line in lines]
    assert change == 'retention {"bytes": 1048576, "resume_grace_seconds": 5, "seconds": 3600} → none'


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("set", "acme", "--retention-seconds", "60"), "retention.bytes must be a whole number"),
        (("create", "x", "--retention-bytes", "65536"), "retention.seconds must be a whole number"),
        (("set", "acme", *POLICY[:2], "--retention-bytes", "65535"), "an integer 65536 … "),
        (("set", "acme", *POLICY, "--no-retention"), "--no-retention goes with none of"),
    ],
)
async def test_a_retention_that_is_none_is_refused_in_a_sentence(terminal: Terminal, words: list[str], said: str) -> None:
    """Protects whoever names half of one, too much, or both: nothing changes, and it is said what is missing."""
    version = await terminal.store.version()
    refused = await terminal.run_here("tenant", *words)
    assert (refused.status, refused.out) == (1, "") and said in refused.err
    assert await terminal.store.version() == version


@pytest.mark.parametrize("typed", ["", "n\n", "\n", "yess\n"])
async def test_a_tenant_is_not_deleted_without_a_yes(terminal: Terminal, typed: str) -> None:
    """Protects a tenant from a slip, and from a script that says nothing: only a yes deletes what never comes back."""
    version = await terminal.store.version()
    asked = await terminal.run_here("tenant", "delete", "acme", typed=typed)
    assert (asked.status, asked.out) == (1, "") and asked.err.startswith("Delete tenant acme for good?")
    assert "error: Nothing was deleted" in asked.err
    assert await terminal.store.version() == version


async def test_a_tenant_is_deleted_after_a_yes_or_without_asking(terminal: Terminal) -> None:
    """Protects the deletion: the answer is JSON whether it was asked or not, and a second one finds nothing."""
    await terminal.good_here("tenant", "set", "globex", *POLICY)
    asked = await terminal.run_here("tenant", "delete", "acme", typed="y\n")
    assert asked.status == 0 and json.loads(asked.out)["name"] == "acme"
    assert (await terminal.good_here("tenant", "delete", "globex", "--yes"))["revoked"] is True
    assert await terminal.good_here("tenant", "list", "--json") == []
    again = await terminal.run_here("tenant", "delete", "acme", "--yes")
    assert again.status == 1 and "not_found" in again.err
    [line] = [line for line in (await terminal.run_here("audit", "--limit", "1")).out.splitlines() if "tenant.delete" in line]
    assert line.split(maxsplit=4)[4].startswith("retention {") and line.rstrip().endswith("→ none, revoked false → true")
