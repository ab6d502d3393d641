"""What every process of the platform does with its event loop and its memory."""

import asyncio
import gc
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

from weir import errors

Result = TypeVar("Result")

_YOUNG_OBJECTS = 20_000
"""Requests leave few cycles: collecting every 700 objects, as Python does, cost a tenth of the CPU of a request."""


def settle_garbage_collector() -> None:
    """What the start made lives as long as the process: leave it out of every collection, and collect less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, 10, 10)


def refuse_stripped_assertions() -> None:
    """Assertions guard the ledger; an interpreter that strips them must not serve. Raises InvalidRequest."""
    if sys.flags.optimize:
        raise errors.InvalidRequest("Weir refuses to run under python -O, which strips assertions.")


async def unless_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, Result]) -> Result | None:
    """What a part of the start gives; None when `stop` came first, and then that part was cancelled."""
    loop = asyncio.get_running_loop()
    tasks = loop.create_task(work), loop.create_task(stop.wait())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    return None if tasks[0].cancelled() else tasks[0].result()
