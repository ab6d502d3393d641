"""Lets these suites import what they share as `tests.simulation`, however pytest was started, and what many seeds need."""

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

sys.path.insert(0, str(Path(__file__).parents[2]))


@pytest.fixture(scope="module")
def quick_collection_without_logs() -> Iterator[None]:
    """What is logged of so many links is of no interest, and what was there before is not collected again and again."""
    gc.collect()
    gc.freeze()
    try:
        with structlog.testing.capture_logs():
            yield
    finally:
        gc.unfreeze()
