"""`weir batch` against a live cell: a file becomes a batch and then results, with the status that scripts read."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.e2e.batch_stage import input_of, line_of
from tests.e2e.http_client import Account, new_account
from tests.e2e.running_cell import RunningCell, running_cell
from tests.e2e.scripted_engine import Script, ScriptedEngine

CONFIG = "[batches]\npoll_ms = 50\nlines_in_flight = 4\n"
COMMAND_S = 60
LONG = Script(tokens=400, gap_ms=100)


@pytest.fixture(scope="module")
def cell(engine: ScriptedEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCell]:
    """A cell on an engine that does what a line says."""
    with running_cell(tmp_path_factory.mktemp("commands") / "state", engine=(engine.url,), config=CONFIG) as started:
        yield started


@dataclass(frozen=True)
class Terminal:
    """Where commands are typed: a folder, and a tenant's key in the environment."""

    account: Account
    folder: Path

    def run(self, *words: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        """One command, which must end with this status."""
        environment = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
        environment |= {"WEIR_API_URL": self.account.cell.api, "WEIR_API_KEY": self.account.key}
        command = [sys.executable, "-m", "weir.cli.main", "batch", *words]
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=COMMAND_S)
        assert done.returncode == status, done
        return done

    def write(self, *scripts: Script) -> None:
        """A file of lines."""
        lines = [line_of(number, script) for number, script in enumerate(scripts)]
        (self.folder / "lines.jsonl").write_bytes(input_of(lines))

    def read(self, name: str) -> list[dict[str, object]]:
        """The lines of a file of results."""
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]


@pytest.fixture
def terminal(cell: RunningCell, tmp_path: Path) -> Iterator[Terminal]:
    with new_account(cell) as account:
        yield Terminal(account, tmp_path)


def test_a_file_is_run_and_its_answers_are_fetched(terminal: Terminal) -> None:
    """Protects the first batch of everybody: submit and watch, look at it, fetch the answers."""
    scripts = [Script(word=f" w{number}") for number in range(12)]
    terminal.write(*scripts)
    done = terminal.run("submit", "lines.jsonl", "--watch", "--metadata", "run=monday")
    [batch] = done.stdout.split()
    assert batch.startswith("batch_") and "12 lines for /v1/chat/completions" in done.stderr and "completed" in done.stderr
    status = terminal.run("status", batch).stdout
    assert batch in status and "12 of 12 lines done, 0 failed" in status
    shown = json.loads(terminal.run("status", batch, "--json").stdout)
    assert (shown["status"], shown["metadata"]) == ("completed", {"run": "monday"})
    assert batch in terminal.run("list").stdout
    none = terminal.run("results", batch, "--output", "answers.jsonl", "--errors", "errors.jsonl")
    assert "errors" in none.stderr or "failed" in none.stderr
    answers = terminal.read("answers.jsonl")
    assert sorted(str(line["custom_id"]) for line in answers) == sorted(f"line-{number}" for number in range(12))
    assert not (terminal.folder / "errors.jsonl").exists()
    assert terminal.run("results", batch).stdout == (terminal.folder / "answers.jsonl").read_text()
    assert "is there already" in terminal.run("results", batch, "--output", "answers.jsonl", status=1).stderr


def test_failed_lines_have_a_status_and_a_file(terminal: Terminal) -> None:
    """Protects scripts: status 3 where lines failed, and their errors beside the answers."""
    terminal.write(Script(), Script(status=400), Script())
    batch = terminal.run("submit", "lines.jsonl", "--watch", status=3).stdout.strip()
    terminal.run("results", batch, "--output", "answers.jsonl", "--errors", "errors.jsonl")
    assert len(terminal.read("answers.jsonl")) == 2
    [wrong] = terminal.read("errors.jsonl")
    assert wrong["custom_id"] == "line-1"


def test_a_wrong_line_is_named(terminal: Terminal) -> None:
    """Protects whoever wrote the file: its line is said, and nothing is submitted."""
    terminal.write(Script(), Script())
    with (terminal.folder / "lines.jsonl").open("a") as file:
        file.write('{"custom_id":\n')
    refused = terminal.run("submit", "lines.jsonl", status=1)
    assert "Line 3 is not valid JSON" in refused.stderr and refused.stdout == ""
    assert json.loads(terminal.run("list", "--json").stdout) == []


def test_a_batch_is_cancelled_and_its_watch_ends(terminal: Terminal) -> None:
    """Protects whoever gives up: cancel says so, a watch ends with status 4, results show what had no turn."""
    terminal.write(*[LONG] * 8)
    batch = terminal.run("submit", "lines.jsonl", "--window", "2s").stdout.strip()
    early = terminal.run("results", batch, status=1)
    assert early.stdout == ""
    assert "cancelling" in terminal.run("cancel", batch).stdout
    terminal.run("watch", batch, status=4)
    terminal.run("results", batch, "--errors", "errors.jsonl")
    assert len(terminal.read("errors.jsonl")) == 8
    assert terminal.run("cancel", batch, status=1).stderr
