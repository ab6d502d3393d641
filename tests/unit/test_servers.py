"""The listeners' bounds: scrapes at once, and how many descriptors tenants may take."""

import resource
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from weir.app.servers import MetricsServer, within_open_files
from weir.config import GatewayConfig
from weir.telemetry import Telemetry

WAIT_S = 10.0
SCRAPES_AT_ONCE = 8


@pytest.fixture
def metrics() -> Iterator[tuple[str, int]]:
    """The address of a metrics listener."""
    server = MetricsServer("127.0.0.1", 0, Telemetry())
    host, port = server.url.removeprefix("http://").split(":")
    yield host, int(port)
    server.close()


def scraped(address: tuple[str, int]) -> bytes:
    """What a scrape gets; nothing when it is turned away."""
    with socket.create_connection(address, timeout=WAIT_S) as wire:
        try:
            wire.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            return wire.makefile("rb").read()
        except ConnectionError:
            return b""


def test_scrapes_that_say_nothing_are_few(metrics: tuple[str, int]) -> None:
    """Protects the process from idle connections to its metrics: few threads, and they are free again once those left."""
    idle = [socket.create_connection(metrics, timeout=WAIT_S) for _ in range(SCRAPES_AT_ONCE)]
    assert scraped(metrics) == b""
    for wire in idle:
        wire.close()
    assert any(b"weir_requests" in scraped(metrics) for _ in range(1_000))


def test_tenants_take_at_most_half_of_the_open_files() -> None:
    """Protects the management side on a small machine: the configured bound, or half of what there is."""
    config = GatewayConfig(connections_max=100)
    assert [within_open_files(config, files).connections_max for files in (1_000, 200, 64, 1)] == [100, 100, 32, 1]
    assert within_open_files(config, 64).body_bytes_max == config.body_bytes_max


def test_a_start_takes_the_open_files_that_it_may_have() -> None:
    """Protects large cells from a small default: the soft limit becomes the hard one."""
    program = (
        "import resource; from weir.app.servers import raise_open_files; hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1];"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard)); print(raise_open_files())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert int(done.stdout) == resource.getrlimit(resource.RLIMIT_NOFILE)[1]
