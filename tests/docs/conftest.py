"""The real cell on the simulated engine that the documentation is checked against, started once a session."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.e2e.running_cell import RunningCell, running_cell


@pytest.fixture(scope="session")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCell]:
    """A running cell with its demonstration tenants."""
    with running_cell(tmp_path_factory.mktemp("documented") / "state") as running:
        yield running
