"""The document of the tenant API against a running cell: generated requests find nothing in the code that it does not tell."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.http_client import exchange
from tests.e2e.openapi_run import documented_cell, run_schemathesis
from tests.e2e.running_cell import RunningCell

SEED, EXAMPLES, BOUND_S = 20_261_130, 5, 240.0


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCell]:
    with documented_cell(tmp_path_factory.mktemp("openapi")) as running:
        yield running


def test_generated_requests_are_answered_as_documented(cell: RunningCell, tmp_path: Path) -> None:
    """Protects whoever generates a client: statuses, headers, bodies and events, for right requests and for wrong ones."""
    printed = run_schemathesis(cell, tmp_path, examples=EXAMPLES, seed=SEED, bound_s=BOUND_S)
    paths = exchange(cell.api, "GET", "/openapi.json").json["paths"]
    asked = sum(len(operations) for path, operations in paths.items() if path != "/openapi.json")  # which it has read by then
    assert f"Tested: {asked}\n" in printed and "✅ Stateful" in printed, printed


def test_the_document_needs_no_key_and_may_be_kept_for_a_while(cell: RunningCell) -> None:
    """Protects tools that fetch it before they have a key, and again and again."""
    first, second = (exchange(cell.api, "GET", "/openapi.json") for _ in range(2))
    assert first.status == 200 and first.json["openapi"].startswith("3.1")
    assert first.headers["content-type"] == "application/json"
    assert first.headers["cache-control"] == "public, max-age=300"
    assert first.headers["etag"] == second.headers["etag"] and first.body == second.body
