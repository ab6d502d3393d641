"""A run of schemathesis against a cell: requests made from its document, right and wrong ones, and every answer checked by it.

All checks are on. `object_level_authorization` finds nothing with one key: that a record is shown to nobody else is
`test_bad_input.py::test_foreign_records_stay_foreign`.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.e2e.conftest import checked_cell
from tests.e2e.http_client import exchange, wait_until
from tests.e2e.openapi_aliases import VECTORS
from tests.e2e.rollout_stage import Rollouts, rollouts_of
from tests.e2e.running_cell import RunningCell, running_cell

ROOT = Path(__file__).resolve().parents[2]

CELL = """
[pool]
default_max_output_tokens = 4
context_tokens = 100000
"""
"""Short answers; and 10,000 messages, as many as a conversation may have, fit the window."""

CONFIG = """
# Sequences follow the links of the document. Guessed ones would begin with lists alone: to a guess, `request_id` is the id of
# something that nobody makes.
[phases.stateful.inference]
algorithms = ["location-headers"]

[[operations]]
include-operation-id = "listGenerationEvents"
# A schema cannot say which events a stream has, nor whether it is retained.
checks.positive_data_acceptance.expected-statuses = ["200", "400", "404", "410"]
checks.negative_data_rejection.expected-statuses = ["400", "404", "410"]

[[operations]]
include-operation-id = "deleteGenerationEvents"
checks.positive_data_acceptance.expected-statuses = ["200", "404", "409", "410"]

[[operations]]
include-operation-id = "getResponse"
# The same; and `starting_after` needs `stream`, which parameters cannot say either.
checks.positive_data_acceptance.expected-statuses = ["200", "400", "404", "410"]

[[operations]]
include-operation-id = "deleteResponse"
checks.positive_data_acceptance.expected-statuses = ["200", "404", "409", "410"]

[[operations]]
include-operation-id = "countMessageTokens"
# Its body is a part of a message's, read by the same code, which the same cases of each field try there.
phases.coverage.enabled = false
"""


@contextmanager
def documented_cell(folder: Path) -> Iterator[RunningCell]:
    """A cell on which no generated request takes long; its log must show no fault at the end."""
    with running_cell(folder / "state", config=CELL) as cell, checked_cell(cell):
        stage = rollouts_of(cell)
        _serve_vectors(stage)
        stage.admin.done("PATCH", "/tenants/acme", {"retention": {"seconds": 600, "bytes": 2**30}})
        yield cell


def _serve_vectors(stage: Rollouts) -> None:
    """An alias of a model that embeds, beside the one that makes text."""
    revision = stage.approved("vectors", arguments={"embeddings": True})
    stage.admin.done("POST", "/pools", {"name": VECTORS, "revision": revision, "concurrency": 4})
    stage.admin.done("PUT", f"/aliases/{VECTORS}", {"revision": revision})
    asked, key = {"model": VECTORS, "input": "a river"}, stage.cell.key()
    wait_until(lambda: exchange(stage.cell.api, "POST", "/v1/embeddings", key=key, body=asked).status == 200)


def run_schemathesis(cell: RunningCell, folder: Path, *, examples: int, seed: int, bound_s: float) -> str:
    """What it printed. Raises AssertionError with that when it found anything, or took longer than the bound."""
    config = folder / "schemathesis.toml"
    config.write_text(CONFIG, encoding="utf-8")
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(config), "run", f"{cell.api}/openapi.json"]
    command += ["--checks", "all", "--header", f"Authorization: Bearer {cell.key()}", "--request-timeout", "20"]
    command += ["--max-examples", str(examples), "--seed", str(seed), "--generation-database", "none", "--no-color"]
    command += ["--suppress-health-check", "too_slow"]  # a busy machine is no finding
    ended = subprocess.run(
        command,
        cwd=folder,
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=bound_s,
        text=True,
    )
    shown = "\n".join(line[:400] for line in ended.stdout.splitlines())
    assert ended.returncode == 0, shown
    return shown


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "SCHEMATHESIS_HOOKS": "tests.e2e.openapi_hooks"}
