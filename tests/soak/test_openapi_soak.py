"""The document of the tenant API against a running cell, at length: other requests with every run.

The seed is printed, and `WEIR_SEED` repeats it.
"""

import os
import random
from pathlib import Path

from tests.e2e.openapi_run import documented_cell, run_schemathesis
from tests.soak.cell_size import FULL

EXAMPLES, BOUND_S = 400, 3_000.0

pytestmark = FULL


def test_many_generated_requests_are_answered_as_documented(tmp_path: Path) -> None:
    """Protects whoever generates a client from what a short run with one seed cannot find."""
    seed = int(os.environ.get("WEIR_SEED") or random.randrange(2**31))
    print(f"\nschemathesis: WEIR_SEED={seed}")  # noqa: T201
    with documented_cell(tmp_path) as cell:
        run_schemathesis(cell, tmp_path, examples=EXAMPLES, seed=seed, bound_s=BOUND_S)
