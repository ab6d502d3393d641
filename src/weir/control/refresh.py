"""Keeps what is in force from falling behind what is stored: every few seconds the catalog's version is asked for.

It decides when to ask. A change whose answer was lost, or that another process made, is stored and not in force: a revoked key
would work on until the next change. It publishes through the commands, in their turn, and must never put an older version in
force over a newer one.
"""

import asyncio
from collections.abc import Callable

import structlog

from weir import errors
from weir.control.commands import Commands

PERIOD_S = 2.0
"""A version is one number to read, and a change whose answer was lost is rare."""

_log = structlog.get_logger("weir.control")


class Refresh:
    """One cell's refresh. renew: called when what is in force was found to be what is stored.

    period_s: seconds between two questions, which bounds how long a stored change is not in force.
    """

    def __init__(self, commands: Commands, renew: Callable[[], None], period_s: float = PERIOD_S) -> None:
        self._commands = commands
        self._renew = renew
        self._period_s = period_s

    async def run(self) -> None:
        """Refresh until cancelled; a store that is away is asked again, and said to be away once."""
        away = False
        while True:
            await asyncio.sleep(self._period_s)
            try:
                if await self._commands.refresh():
                    _log.info("catalog_refreshed", version=self._commands.published.version)
                self._renew()
                away = False
            except errors.LedgerUnavailable:
                if not away:
                    _log.warning("refresh_postponed")
                away = True
