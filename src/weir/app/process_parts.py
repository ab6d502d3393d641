"""What each part of a process works with, and what ends a process: a broken invariant, wherever it shows."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog

from weir.app.stores import Stores
from weir.config import WeirConfig
from weir.ports import Clock, Entropy
from weir.telemetry import Telemetry

_log = structlog.get_logger("weir.process")


@dataclass(frozen=True, slots=True)
class ProcessParts:
    """announce: takes a line for whoever watches the start."""

    config: WeirConfig
    stores: Stores
    clock: Clock
    entropy: Entropy
    telemetry: Telemetry
    announce: Callable[[str], None]

    def new_name(self, kind: str) -> str:
        """A name that nothing else has."""
        return f"{kind}-{self.entropy.token(12).hex()}"


class Watchdog:
    """Ends its process, through the task that runs it, once an invariant is broken: it must not serve on wrong figures."""

    def __init__(self) -> None:
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().set_exception_handler(self._on_loop_fault)

    async def run(self) -> None:
        """Raises what `fail` was told."""
        await self._broken

    def fail(self, fault: BaseException) -> None:
        """A broken invariant."""
        if not self._broken.done():
            self._broken.set_exception(fault)

    def _on_loop_fault(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback of the loop failed; a broken invariant in it ends the process like any other."""
        fault = context.get("exception")
        _log.error("loop_fault", message=context.get("message"), fault=type(fault).__name__, exc_info=fault)
        if isinstance(fault, AssertionError):
            self.fail(fault)
