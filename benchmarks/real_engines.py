"""Cells in front of llama.cpp with the packaged model, and one llama.cpp server more that no cell knows, pinned to cores."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

from benchmarks.programs import ALIAS, BUILD, GATEWAY_CORE, LOAD_CORE, START_S_MAX, STOP_S_MAX, Gateway, Program, call
from weir.engines.packaged_models import smollm2_path

OTHER_CORE = GATEWAY_CORE
_WAIT_S_MAX = 60
_CONTEXT_TOKENS = 2_048
_ENVIRONMENT = {**os.environ, "GOMP_SPINCOUNT": "2000"}  # as Weir starts its own


@dataclass(frozen=True)
class RealCell:
    """A running cell. ready: its ready file; pid: of `weir up`, whose children are its engines."""

    ready: Mapping[str, Any]
    pid: int

    def of(self, tenant: str) -> Gateway:
        """Its API as a tenant of the demonstration reaches it."""
        owner = next(each for each in self.ready["tenants"] if each["name"] == tenant)
        key = owner["applications"][0]["key"]
        return Gateway("weir", port_of(self.ready["api"]), ALIAS, key, self.pid)

    def _admin(self, path: str) -> Any:
        return call(port_of(self.ready["admin"]), "GET", f"/admin/v1/{path}", None, self.ready["admin_key"])

    def wait_full(self, pool: str) -> None:
        """Wait until all lanes of a pool are taken; ends the benchmark otherwise."""
        deadline = time.monotonic() + _WAIT_S_MAX
        while time.monotonic() < deadline:
            found = next(each for each in self._admin("pools")["pools"] if each["name"] == pool)
            if found["running"] >= found["concurrency"]:
                return
            time.sleep(0.1)
        sys.exit(f"bench: the batch did not fill {pool}")

    def preempted(self) -> int:
        """Executions of lines that gave way so far."""
        connection = HTTPConnection("127.0.0.1", port_of(self.ready["metrics"]), timeout=_WAIT_S_MAX)
        try:
            connection.request("GET", "/metrics")
            lines = connection.getresponse().read().decode().splitlines()
        finally:
            connection.close()
        found = (line for line in lines if line.startswith("weir_requests_total{") and '"preempted"' in line)
        return sum(int(float(line.rsplit(" ", 1)[1])) for line in found)

    def engine_of(self, pool: str) -> int:
        """The process of a pool's only replica: the one that listens at its address."""
        address = next(each["url"] for each in self._admin("replicas")["replicas"] if each["pool"] == pool)
        rows = [line.split() for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]]
        inode = next(row[9] for row in rows if row[3] == "0A" and int(row[1].split(":")[1], 16) == port_of(address))
        for pid in _children_of(self.pid):
            if f"socket:[{inode}]" in _open_files(pid):
                return pid
        sys.exit(f"bench: nobody listens at {address}")

    def move_engine(self, pool: str) -> None:
        """Let a pool's engine run on the other core, all its threads."""
        for task in Path(f"/proc/{self.engine_of(pool)}/task").iterdir():
            os.sched_setaffinity(int(task.name), {OTHER_CORE})


@contextmanager
def real_cell(name: str, configuration: str) -> Iterator[RealCell]:
    """`weir up` with the packaged model on an empty state directory, everything of it on the load's core."""
    with TemporaryDirectory(prefix="weir-bench-") as folder:
        ready_file, config = Path(folder) / "ready", Path(folder) / "weir.toml"
        config.write_text(configuration, encoding="utf-8")
        command: list[str | Path] = [sys.executable, "-m", "weir.cli.main", "up", "--engine", "llamacpp", "--config", config]
        command += ["--state", Path(folder) / "state", "--listen", "127.0.0.1:0", "--ready-file", ready_file]
        with Program(f"weir-{name}", command, LOAD_CORE) as program:
            ready = program.wait_until(
                lambda: json.loads(ready_file.read_text(encoding="utf-8")) if ready_file.exists() else None
            )
            yield RealCell(ready, program.pid)


@dataclass(frozen=True)
class OtherEngine:
    """A llama.cpp server that no cell knows, on the other core."""

    pid: int
    port: int
    api_key: str
    lanes: int

    @contextmanager
    def kept_busy(self, prompts: Sequence[str], tokens: int) -> Iterator[list[str]]:
        """On each lane one prompt after the other for as long as the block lasts; what is done so far."""
        done: list[str] = []
        is_over = threading.Event()

        faults: list[Exception] = []

        def run(lane: int) -> None:
            number = lane
            while not is_over.is_set():
                try:
                    self._ask(prompts[number % len(prompts)], tokens)
                except (OSError, RuntimeError) as fault:
                    faults.append(fault)
                    return
                done.append(prompts[number % len(prompts)])
                number += self.lanes

        threads = [threading.Thread(target=run, args=(lane,)) for lane in range(self.lanes)]
        for thread in threads:
            thread.start()
        try:
            yield done
        finally:
            is_over.set()
            for thread in threads:
                thread.join()
        if faults:
            sys.exit(f"bench: the engine beside failed: {faults[0]!r}")

    def _ask(self, prompt: str, tokens: int) -> None:
        body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "cache_prompt": False}
        connection = HTTPConnection("127.0.0.1", self.port, timeout=_WAIT_S_MAX)
        try:
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.api_key}"}
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            answer.read()
        finally:
            connection.close()
        if answer.status != 200:
            raise RuntimeError(f"llama.cpp answered {answer.status}")


@contextmanager
def other_engine(lanes: int) -> Iterator[OtherEngine]:
    """One more llama.cpp process with the same model, of one thread, as a cell would start it."""
    key = "bench"
    spec = {"model": str(smollm2_path()), "alias": "bench", "slots": lanes, "context_tokens": _CONTEXT_TOKENS, "threads": 1}
    command = ["taskset", "-c", str(OTHER_CORE), sys.executable, "-m", "weir.engines.llamacpp_child"]
    with (BUILD / "other-engine.log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=_ENVIRONMENT)
    assert process.stdin is not None and process.stdout is not None
    watchdog = threading.Timer(START_S_MAX, process.kill)
    watchdog.start()
    try:
        process.stdin.write(json.dumps({**spec, "api_key": key}).encode() + b"\n")
        process.stdin.flush()
        line = process.stdout.readline()
        watchdog.cancel()
        if not line:
            sys.exit(f"bench: llama.cpp did not start\n{(BUILD / 'other-engine.log').read_text(errors='replace')[-2_000:]}")
        yield OtherEngine(process.pid, port_of(json.loads(line)["url"]), key, lanes)
    finally:
        process.terminate()
        process.wait(STOP_S_MAX)
        process.stdin.close()
        process.stdout.close()


def port_of(url: str) -> int:
    """The port of a URL."""
    port = urlsplit(url).port
    assert port is not None
    return port


def _children_of(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text(encoding="ascii").split()]


def _open_files(pid: int) -> set[str]:
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found.add(str(entry.readlink()))
    return found
