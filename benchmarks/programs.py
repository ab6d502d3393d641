"""The programs of a benchmark: the C engine and load generator, nginx, and Weir, each pinned to one core.

Engine and generator share core 0, the gateway under test has core 1. Every program listens on a loopback port of its own, is
stopped by whoever started it, and every wait is bounded. A gateway's CPU time and memory are those of its process tree.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

Found = TypeVar("Found")

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "bench"
PROFILE = BUILD / "weir.prof"
LOAD_CORE, GATEWAY_CORE = 0, 1
START_S_MAX, STOP_S_MAX, CONTROL_S_MAX = 60, 45, 10
UPSTREAM_CONNECTIONS = 512
TENANT, APPLICATION, ALIAS = "bench", "bench", "assistant"
RETENTION = {"seconds": 1, "bytes": 2**32}
"""Of streams that ask for it: what is kept is deleted as fast as it is made."""


@dataclass(frozen=True)
class Gateway:
    """What requests are sent to, and at which path. pid: the process whose tree is measured, None for the engine alone.

    fields: more of a body, as JSON behind a comma; on surfaces that are Weir's own or responses.
    """

    name: str
    port: int
    model: str = "m"
    api_key: str | None = None
    pid: int | None = None
    path: str = "/v1/chat/completions"
    fields: str = ""


class Program:
    """A running process, pinned to a core; leaving the context stops it."""

    def __init__(self, name: str, command: Sequence[str | Path], core: int) -> None:
        self.name = name
        self._log = BUILD / f"{name}.log"
        pinned = ["taskset", "-c", str(core), *map(str, command)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(pinned, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=ROOT)

    @property
    def pid(self) -> int:
        """The process id: taskset becomes the program."""
        return self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def wait_until(self, ready: Callable[[], Found | None]) -> Found:
        """What `ready` finds once it finds something; ends the benchmark with the program's log if that takes too long."""
        end = time.monotonic() + START_S_MAX
        while time.monotonic() < end and self._process.poll() is None:
            found = ready()
            if found is not None:
                return found
            time.sleep(0.05)
        sys.exit(f"bench: {self.name} did not start\n{self._log.read_text(encoding='utf-8', errors='replace')[-2_000:]}")


def build() -> None:
    """Compile the engine and the generator where their sources are newer."""
    BUILD.mkdir(parents=True, exist_ok=True)
    for name in ("engine", "load"):
        source, binary = ROOT / "benchmarks" / f"{name}.c", BUILD / name
        if not binary.exists() or binary.stat().st_mtime < source.stat().st_mtime:
            subprocess.run(["gcc", "-O2", "-o", str(binary), str(source), "-lm"], check=True, timeout=120)


def free_port() -> int:
    """A loopback port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _answers(port: int) -> bool | None:
    try:
        with socket.create_connection(("127.0.0.1", port), 1):
            return True
    except OSError:
        return None


def call(port: int, method: str, path: str, body: dict[str, Any] | None = None, key: str = "") -> Any:
    """One JSON request to a loopback server; ends the benchmark on an answer other than 2xx."""
    connection = HTTPConnection("127.0.0.1", port, timeout=CONTROL_S_MAX)
    try:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        text = answer.read().decode()
    finally:
        connection.close()
    if answer.status // 100 != 2:
        sys.exit(f"bench: {method} {path} answered {answer.status}: {text[:500]}")
    return json.loads(text)


@contextmanager
def run_engine() -> Iterator[Gateway]:
    """The C engine on the generator's core."""
    port = free_port()
    with Program("engine", [BUILD / "engine", str(port)], LOAD_CORE) as program:
        program.wait_until(lambda: _answers(port))
        yield Gateway("engine alone", port)


NGINX_CONFIGURATION = """
daemon off;
worker_processes 1;
worker_rlimit_nofile 8192;
pid {build}/nginx.pid;
error_log {build}/nginx-error.log;
events {{ worker_connections 4096; }}
http {{
    access_log off;
    client_body_temp_path {build}/nginx-body;
    proxy_temp_path {build}/nginx-proxy;
    fastcgi_temp_path {build}/nginx-fastcgi;
    uwsgi_temp_path {build}/nginx-uwsgi;
    scgi_temp_path {build}/nginx-scgi;
    keepalive_requests 100000000;
    upstream engine {{
        server 127.0.0.1:{engine};
        keepalive {connections};
        keepalive_requests 100000000;
    }}
    server {{
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass http://engine;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
        }}
    }}
}}
"""


@contextmanager
def run_nginx(engine_port: int) -> Iterator[Gateway]:
    """nginx with one worker, upstream keep-alive and no buffering: a relay that does no work per event."""
    port = free_port()
    path = BUILD / "nginx.conf"
    filled = NGINX_CONFIGURATION.format(build=BUILD, engine=engine_port, port=port, connections=UPSTREAM_CONNECTIONS)
    path.write_text(filled, encoding="utf-8")
    with Program("nginx", ["nginx", "-e", BUILD / "nginx-error.log", "-c", path], GATEWAY_CORE) as program:
        program.wait_until(lambda: _answers(port))
        yield Gateway("nginx", port, pid=program.pid)


def weir_configuration() -> str:
    """Settings that let the load through: the engine takes any number at once."""
    return f"[pool]\nconcurrency = {UPSTREAM_CONNECTIONS}\n"


@contextmanager
def run_weir(weir: Sequence[str | Path], engine_port: int, *arguments: str) -> Iterator[Gateway]:
    """Weir in one process on an empty state directory, with a tenant of its own. weir: the command, with its program."""
    with TemporaryDirectory(prefix="weir-bench-") as folder:
        ready_file, configuration = Path(folder) / "ready", Path(folder) / "weir.toml"
        configuration.write_text(weir_configuration(), encoding="utf-8")
        command = [*weir, "up", "--engine", f"http://127.0.0.1:{engine_port}", "--state", Path(folder) / "state"]
        command += ["--listen", "127.0.0.1:0", "--ready-file", ready_file, "--config", configuration, *arguments]
        with Program("weir", command, GATEWAY_CORE) as program:
            ready = program.wait_until(
                lambda: json.loads(ready_file.read_text(encoding="utf-8")) if ready_file.exists() else None
            )
            key = _tenant_with_generous_limits(_port_of(ready["admin"]), ready["admin_key"])
            yield Gateway("weir", _port_of(ready["api"]), ALIAS, key, program.pid)


def _port_of(url: str) -> int:
    port = urlsplit(url).port
    assert port is not None
    return port


def _tenant_with_generous_limits(admin_port: int, admin_key: str) -> str:
    """An API key whose limits are all in force and never reached, so that their cost is measured too."""
    call(admin_port, "POST", "/admin/v1/tenants", {"name": TENANT, "retention": RETENTION}, admin_key)
    call(admin_port, "POST", f"/admin/v1/tenants/{TENANT}/applications", {"name": APPLICATION}, admin_key)
    keys = f"/admin/v1/tenants/{TENANT}/applications/{APPLICATION}/keys"
    created = call(admin_port, "POST", keys, {}, admin_key)
    limits = {
        "requests_per_minute": 10**9,
        "tokens_per_minute": 10**12,
        "concurrency": 10**6,
        "spend_microusd_lifetime": 10**15,
    }
    call(admin_port, "PUT", "/admin/v1/limits", {"scope": {"tenant": TENANT}, **limits}, admin_key)
    secret: str = created["secret"]
    return secret


# ── what a process tree uses ─────────────────────────────────────────────────────────────────────────────────────────


def _tree_of(pid: int) -> list[int]:
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(
                path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1]
            )
        except OSError:  # it ended meanwhile
            continue
    tree = [pid]
    for member in tree:
        tree += [child for child, parent in parents.items() if parent == member]
    return tree


def cpu_ns(pid: int) -> int:
    """CPU time of a process tree with all its threads: what utime + stime of /proc/PID/stat show in ticks, in nanoseconds."""
    return sum(time.clock_gettime_ns((~member << 3) | 2) for member in _tree_of(pid))


def busy_ns(core: int) -> int:
    """Time that a core worked, for whomever, in nanoseconds; of a virtual machine also what its host took."""
    row = next(
        line.split() for line in Path("/proc/stat").read_text(encoding="ascii").splitlines() if line.startswith(f"cpu{core} ")
    )
    user, nice, system, _, _, irq, softirq, steal = map(int, row[1:9])
    return (user + nice + system + irq + softirq + steal) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    """Resident memory of a process tree."""
    pages = (Path(f"/proc/{member}/statm").read_text(encoding="utf-8").split()[1] for member in _tree_of(pid))
    return sum(map(int, pages)) * os.sysconf("SC_PAGE_SIZE")
