"""Keeps gateway processes on this host: starts them, starts one again that exits, and takes them down with the cell.

They inherit the tenants' socket, so that a connection which one of them does not take another one does; each also listens on
one of its own. A gateway gets its settings as the first line of its input and ends when that closes, so that none outlives this
process however it ends. It has a session of its own, so that an interrupt from the terminal reaches it only through us, and
none of our secrets.
"""

import asyncio
import socket
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from pathlib import Path

import msgspec
import structlog

from weir.app.gateway_process import GatewayReady
from weir.app.servers import bind, url_of
from weir.config import WeirConfig, environment_of_gateway
from weir.units import Millis

_log = structlog.get_logger("weir.cell")

_START_S = 30.0
_BACKOFF_FIRST_S = 0.2
_BACKOFF_MAX_S = 10.0
_LAST_MS: Millis = 10_000  # after its grace a gateway still ends what is left, by the table


class GatewayKeeper:
    """A number of gateways. link: the Unix socket of the coordinator; listener: what all share. config: without secrets."""

    def __init__(self, number: int, link: Path, listener: socket.socket, config: WeirConfig) -> None:
        self._number = number
        self._link = link
        self._listener = listener
        self._settings = msgspec.json.encode(config) + b"\n"
        self._stop_ms = config.coordinator.drain_grace_ms + _LAST_MS
        host = listener.getsockname()[0]
        self._own = [bind(host, 0, config.gateway) for _ in range(number)]  # they stay when a gateway is started again
        self._ready: dict[int, GatewayReady] = {}
        self._all_ready = asyncio.Event()

    @property
    def urls(self) -> list[str]:
        """Where each listens by itself, whether it runs or is started again."""
        return [url_of(listener) for listener in self._own]

    async def wait_ready(self) -> bool:
        """True, once all have listened at the same time."""
        await self._all_ready.wait()
        return True

    async def run(self) -> None:
        """Keep them until cancelled; then ask all to finish, and kill what does not within its bound."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for number in range(self._number):
                    tasks.create_task(self._keep(number))
        finally:
            for listener in self._own:
                listener.close()

    async def _keep(self, number: int) -> None:
        backoff_s = _BACKOFF_FIRST_S
        while True:
            try:
                process = await self._start(number)
            except OSError as fault:  # no descriptors, processes or memory now
                _log.error("gateway_not_started", gateway=number + 1, reason=fault.strerror)
                await asyncio.sleep(_BACKOFF_MAX_S)
                continue
            try:
                if await self._listens(number, process):
                    backoff_s = _BACKOFF_FIRST_S
                    await process.wait()
            finally:
                self._ready.pop(number, None)
                await self._stop(process)
            _log.warning("gateway_exited", gateway=number + 1, status=process.returncode)
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _BACKOFF_MAX_S)

    async def _start(self, number: int) -> Process:
        inherited = self._own[number].fileno(), self._listener.fileno()
        names = [word for descriptor in inherited for word in ("--inherited", str(descriptor))]
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "weir.cli.main", "gateway", "--connect", f"unix:{self._link}", *names),
            stdin=PIPE,
            stdout=PIPE,
            pass_fds=inherited,
            start_new_session=True,
            env=environment_of_gateway(),
        )

    async def _listens(self, number: int, process: Process) -> bool:
        """Whether it said where, within its bound; what exited, or is not ready by then, is started again."""
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(self._settings)
        try:
            async with asyncio.timeout(_START_S):
                line = await process.stdout.readline()
            self._ready[number] = msgspec.json.decode(line, type=GatewayReady)
        except (TimeoutError, msgspec.MsgspecError, ValueError):
            return False
        found = self._ready[number]
        _log.info("gateway_started", gateway=number + 1, url=found.url, metrics=found.metrics)
        if len(self._ready) == self._number:
            self._all_ready.set()
        return True

    async def _stop(self, process: Process) -> None:
        """Closing its input asks it to finish."""
        assert process.stdin is not None
        process.stdin.close()
        if process.returncode is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._stop_ms / 1e3):
                    await process.wait()
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
