"""The process of a simulated engine: `python -m weir.engines.simulated_server`.

It reads one JSON line (`ServerSpec`) from standard input, listens, and writes {"url": ...} as one JSON line. It exits at the
end of its standard input, so that it never outlives its parent, or at SIGTERM, in both cases at once. With --foreground the
same server is started by hand from flags. What it answers is `simulated_api`'s.
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
from weir.engines.step_time import step_time

SPEC_BYTES_MAX = 64 * 1024
LISTEN_BACKLOG = 1_024


class _Server(uvicorn.Server):
    """Says where it listens, and leaves signals to this process."""

    def __init__(self, config: uvicorn.Config, url: str) -> None:
        super().__init__(config)
        self._url = url

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing is captured."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then say so."""
        await super().startup(sockets)
        sys.stdout.write(msgspec.json.encode({"url": self._url}).decode() + "\n")
        sys.stdout.flush()


async def serve(spec: ServerSpec, *, until_input_ends: bool) -> None:
    """Serve until the process is told to exit. Raises OSError when the address is taken."""
    listener = _listen(spec.host, spec.port)
    host, port = listener.getsockname()[:2]
    config = uvicorn.Config(
        SimulatedApi(spec, SystemClock()),
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
    await _Server(config, f"http://{f'[{host}]' if ':' in host else host}:{port}").serve(sockets=[listener])


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
    for name in ("context_tokens", "concurrency", "seed", "port"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(default, name))
    flags = vars(parser.parse_args(arguments))
    return ServerSpec(**flags) if flags.pop("foreground") else None


def main(arguments: Sequence[str]) -> int:
    """Run the server; the exit status, 2 for a spec that makes no sense."""
    try:
        flagged = _spec_from_flags(arguments)
        spec = flagged or msgspec.json.decode(sys.stdin.buffer.readline(SPEC_BYTES_MAX), type=ServerSpec)
        step_time(spec.row, spec.preset)
    except (msgspec.DecodeError, LookupError) as error:
        sys.stderr.write(f"simulated server: {error}\n")
        return 2
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(spec, until_input_ends=flagged is None))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
