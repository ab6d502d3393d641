"""The process of a simulated engine: `python -m weir.engines.simulated_server`.

It reads one JSON line (`ServerSpec`) from standard input, listens, and writes {"url": ...} as one JSON line. It exits at the
end of its standard input, so that it never outlives its parent, or at SIGTERM, in both cases at once. With --foreground the
same server is started by hand from flags. Slow starts, refused connections and crashes are made here, where they were ordered;
what it answers is `simulated_api`'s.
"""

import argparse
import asyncio
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec
import uvicorn
import uvloop

from weir.clock import SystemClock
from weir.engines.simulated_api import ServerSpec, SimulatedApi
from weir.engines.simulated_faults import Faults
from weir.units import Millis

SPEC_BYTES_MAX = 64 * 1024
LISTEN_BACKLOG = 1_024
CRASH_STATUS = 70


class _Server(uvicorn.Server):
    """Says where it listens, leaves signals to this process, and refuses connections for a while when told to."""

    def __init__(self, config: uvicorn.Config, host: str, port: int) -> None:
        super().__init__(config)
        self._address = (host, port)
        self._refuses_until_s: float | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing is captured."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then say so."""
        await super().startup(sockets)
        host, port = self._address
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        sys.stdout.write(msgspec.json.encode({"url": url}).decode() + "\n")
        sys.stdout.flush()

    def refuse(self, refuse_ms: Millis) -> None:
        """Refuse connections from now on, and listen on the same port again after refuse_ms or a tenth of a second more."""
        self._refuses_until_s = asyncio.get_running_loop().time() + refuse_ms / 1_000
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()

    async def on_tick(self, counter: int) -> bool:
        """Called every tenth of a second. Raises OSError when the port was taken meanwhile."""
        if self._refuses_until_s is not None and asyncio.get_running_loop().time() >= self._refuses_until_s:
            self._refuses_until_s = None
            await super().startup([_listen(*self._address)])
        return await super().on_tick(counter)


async def serve(spec: ServerSpec, *, until_input_ends: bool) -> None:
    """Serve until the process is told to exit. Raises OSError when the address is taken, and what `ServerSpec.replica` does."""
    api = SimulatedApi(spec, SystemClock(), lambda: os._exit(CRASH_STATUS), lambda refuse_ms: server.refuse(refuse_ms))
    config = uvicorn.Config(
        api,
        http="httptools",
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, os._exit, 0)
    if until_input_ends:
        loop.add_reader(0, _exit_at_end_of_input)
    await asyncio.sleep(spec.start_ms / 1_000)
    listener = _listen(spec.host, spec.port)
    server = _Server(config, *listener.getsockname()[:2])
    await server.serve(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=LISTEN_BACKLOG)


def _exit_at_end_of_input() -> None:
    if not os.read(0, 4_096):
        os._exit(0)


def _spec_from_flags(arguments: Sequence[str]) -> ServerSpec | None:
    """The spec that flags describe; None when it is to be read from standard input."""
    parser = argparse.ArgumentParser(prog="python -m weir.engines.simulated_server")
    parser.add_argument("--foreground", action="store_true", help="take flags instead of a spec on standard input")
    default = ServerSpec()
    for name in ("model", "row", "preset", "host"):
        parser.add_argument(f"--{name}", default=getattr(default, name))
    for name in ("context_tokens", "concurrency", "seed", "port", "kv_tokens", "start_ms"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(default, name))
    parser.add_argument("--prefix-cache", action="store_true", help="reuse what prompts of one salt begin with")
    parser.add_argument("--embeddings", action="store_true", help="its model makes vectors, and no text")
    parser.add_argument("--faults", type=_faults, default=default.faults, help="faults from the start, as JSON")
    flags = vars(parser.parse_args(arguments))
    return ServerSpec(**flags) if flags.pop("foreground") else None


def _faults(text: str) -> Faults:
    return msgspec.json.decode(text, type=Faults)


def main(arguments: Sequence[str]) -> int:
    """Run the server; the exit status, 2 for a spec that makes no sense."""
    try:
        flagged = _spec_from_flags(arguments)
        spec = flagged or msgspec.json.decode(sys.stdin.buffer.readline(SPEC_BYTES_MAX), type=ServerSpec)
        spec.replica(lambda: None)
    except (msgspec.DecodeError, LookupError, ValueError) as error:
        sys.stderr.write(f"simulated server: {error}\n")
        return 2
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(spec, until_input_ends=flagged is None))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
