"""Runs a test's coroutine on both event loops: the product runs on uvloop, its tools on asyncio's own."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
import uvloop
from tests.unit.http_peer import BOUND_S, Run


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a coroutine on one of both loops, within a bound."""

    def run_bounded(main: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(asyncio.wait_for(main, BOUND_S))

    return run_bounded
