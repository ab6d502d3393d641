"""Protects the keys of retained streams: they rotate without losing one, and no secret is ever shown or left open to others."""

import fcntl
import json
import os
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from weir.cli.main import command_line
from weir.gateway.sealing import KEYS_MAX, parse_key_ring


def run(*words: str) -> Result:
    return CliRunner().invoke(command_line(["retention"]), ["retention", *words])


def ids(*words: str) -> list[str]:
    """Ids that a command shows, newest first."""
    done = run(*words, "--json")
    assert done.exit_code == 0, done.output
    shown = json.loads(done.output)
    assert [key["newest"] for key in shown] == [number == 0 for number in range(len(shown))]
    return [key["id"] for key in shown]


def test_keys_are_made_rotated_and_dropped(tmp_path: Path) -> None:
    """Protects rotation by hand: each new key is the newest, older ones stay in order, a dropped one is gone for good."""
    file = tmp_path / "retention-keys"
    where = ("--state", str(tmp_path))
    (first,) = ids("rotate-key", *where)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    second, *rest = ids("rotate-key", *where)
    assert rest == [first] and ids("keys", "--key-file", str(file)) == [second, first]
    ring = parse_key_ring(file.read_text())
    assert [key.id for key in ring.keys] == [second, first]
    assert ids("drop-key", first, *where) == [second]
    assert parse_key_ring(file.read_text()).keys == ring.keys[:1] and list(tmp_path.iterdir()) == [file]


def test_no_secret_is_shown(tmp_path: Path) -> None:
    """Protects keys from terminals and logs, in every form of every answer."""
    file = tmp_path / "keys"
    outputs = [run("rotate-key", "--key-file", str(file)).output for _ in range(2)]
    outputs += [run("keys", "--key-file", str(file), *form).output for form in ([], ["--json"])]
    ring = parse_key_ring(file.read_text())
    outputs += [run("drop-key", key.id, "--key-file", str(file)).output for key in ring.keys]
    secrets = [word for line in file.read_text().splitlines() for word in line.split() if len(word) == 44]
    assert secrets and not any(secret in output for secret in secrets for output in outputs)
    assert all(ring.newest.id in output for output in outputs[1:4])


def test_the_newest_key_and_unknown_ones_are_not_dropped(tmp_path: Path) -> None:
    """Protects what runs: its key stays, and a mistyped id changes nothing."""
    file = tmp_path / "keys"
    (newest,) = ids("rotate-key", "--key-file", str(file))
    before = file.read_text()
    for key_id in (newest, "00000000", "--", ""):
        refused = run("drop-key", "--key-file", str(file), "--", key_id)
        assert refused.exit_code == 1 and refused.output.startswith("error: ") and file.read_text() == before


def test_a_full_ring_says_what_to_do(tmp_path: Path) -> None:
    """Protects old keys: the one too many is refused, and none is pushed out."""
    file = tmp_path / "keys"
    for _ in range(KEYS_MAX):
        assert run("rotate-key", "--key-file", str(file)).exit_code == 0
    refused = run("rotate-key", "--key-file", str(file))
    assert refused.exit_code == 1 and "drop" in refused.output and len(parse_key_ring(file.read_text()).keys) == KEYS_MAX


@pytest.mark.parametrize("command", [["keys"], ["rotate-key"], ["drop-key", "0a0b0c0d"]])
def test_a_damaged_file_is_neither_read_nor_replaced(tmp_path: Path, command: list[str]) -> None:
    """Protects keys that are still in a damaged file: it stays as it is, and nothing of it is shown."""
    file = tmp_path / "keys"
    for content in ("hunter2 hunter2\n", "x" * 20_000):
        file.write_text(content)
        refused = run(*command, "--key-file", str(file))
        assert refused.exit_code == 1 and str(file) in refused.output.replace("\n", "") and "hunter2" not in refused.output
        assert file.read_text() == content


@pytest.mark.parametrize("command", [["keys"], ["rotate-key"], ["drop-key", "0a0b0c0d"]])
def test_a_place_that_is_not_there_is_named(tmp_path: Path, command: list[str]) -> None:
    """Protects from a mistyped path: one line that names it, and nothing is made."""
    refused = run(*command, "--state", str(tmp_path / "absent"))
    assert refused.exit_code == 1 and "absent" in refused.output and "No such file" in refused.output
    assert list(tmp_path.iterdir()) == []
    both = run(*command, "--state", str(tmp_path), "--key-file", str(tmp_path / "keys"))
    assert both.exit_code == 2 and "not both" in both.output


def test_two_changes_at_once_lose_no_key(tmp_path: Path) -> None:
    """Protects a key that another command is adding: the second one is refused instead of writing over it."""
    file = tmp_path / "keys"
    before = ids("rotate-key", "--key-file", str(file))
    holder = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(holder, fcntl.LOCK_EX)
        refused = run("rotate-key", "--key-file", str(file))
        assert refused.exit_code == 1 and "another command" in refused.output.replace("\n", " ")
    finally:
        os.close(holder)
    assert ids("keys", "--key-file", str(file)) == before
