"""Cells that the end-to-end tests share, each started once a session, and the check that every test leaves them at rest."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.e2e.ending_stage import Stage
from tests.e2e.http_client import Account, is_at_rest, new_account, wait_until
from tests.e2e.running_cell import RunningCell, running_cell
from tests.e2e.scripted_engine import ScriptedEngine

BODY_WAIT_MS = 2_000
SLOW_ROW = "llama3.1-70b/a100_sxm/tp4"
"""About 31 ms a token: a stream of two hundred tokens lasts longer than anything a test does with it."""


@contextmanager
def engine_process(*flags: str) -> Iterator[str]:
    """An OpenAI-compatible engine in a process of its own; its base URL."""
    command = [sys.executable, "-m", "weir.engines.simulated_server", "--foreground", *flags]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()
            process.wait(20)


@contextmanager
def checked_cell(cell: RunningCell) -> Iterator[RunningCell]:
    """A shared cell whose log must show no fault at the end."""
    yield cell
    log = cell.log.read_text()
    assert "Traceback" not in log
    assert "Exception" not in log and "ASGI" not in log


@pytest.fixture(scope="session")
def fast_cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCell]:
    """A cell whose engine makes about 500 tokens a second, and that waits two seconds for a body."""
    config = f"[gateway]\nbody_wait_ms = {BODY_WAIT_MS}\n"
    with running_cell(tmp_path_factory.mktemp("fast") / "state", config=config) as cell, checked_cell(cell):
        yield cell


@pytest.fixture(scope="session")
def slow_cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCell]:
    """A cell on an engine behind a URL that takes about 30 ms a token."""
    state = tmp_path_factory.mktemp("slow") / "state"
    with (
        engine_process("--row", SLOW_ROW, "--concurrency", "64") as url,
        running_cell(state, engine=(url,)) as cell,
        checked_cell(cell),
    ):
        yield cell


@pytest.fixture
def account(fast_cell: RunningCell) -> Iterator[Account]:
    """A tenant of the test's own on the fast cell, which is at rest afterwards."""
    yield from _account_of(fast_cell)


@pytest.fixture
def slow_account(slow_cell: RunningCell) -> Iterator[Account]:
    """A tenant of the test's own on the slow cell, which is at rest afterwards."""
    yield from _account_of(slow_cell)


def _account_of(cell: RunningCell) -> Iterator[Account]:
    made = new_account(cell)
    yield made
    made.close()
    wait_until(lambda: is_at_rest(cell))


@pytest.fixture(scope="module")
def engine() -> Iterator[ScriptedEngine]:
    """An engine that does what a prompt tells it."""
    with ScriptedEngine() as started:
        yield started


@pytest.fixture(scope="module")
def stage(engine: ScriptedEngine, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A cell on that engine with the module's CONFIG."""
    state = tmp_path_factory.mktemp("stage") / "state"
    with running_cell(state, engine=(engine.url,), config=request.module.CONFIG) as cell:
        yield Stage(cell)
        assert "Traceback" not in cell.tail()
