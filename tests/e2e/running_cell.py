"""A real `weir up` process for tests: started on free ports, asked over HTTP, stopped by pid, nothing left behind."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, Self

START_S = 60.0
STOP_S = 20.0


def unused_ports(count: int = 3) -> int:
    """The first of so many free ports in a row, outside the range from which the kernel hands out others."""
    for _ in range(50):
        first = random.randrange(20_000, 30_000)
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise AssertionError("no free ports")


@dataclass
class RunningCell:
    """A started cell. ready: the ready file's content; log: everything that it wrote to its standard streams."""

    process: subprocess.Popen[bytes]
    ready: dict[str, Any]
    state: Path
    log: Path
    _turns: Iterator[int] = field(default_factory=count)

    @property
    def api(self) -> str:
        """Base URL of the tenant API; of a cell with gateways that of each of them in turn."""
        return self._urls[next(self._turns) % len(self._urls)]

    def doors(self) -> list[Self]:
        """The same cell as it is reached through each of its gateways alone; without gateways, as it is."""
        return [replace(self, ready={**self.ready, "gateways": [url]}) for url in self._urls]

    @property
    def _urls(self) -> list[str]:
        return list(self.ready.get("gateways") or [self.ready["api"]])

    def key(self, tenant: str = "acme", application: str = "assistant") -> str:
        """A bootstrap API key."""
        owner = next(entry for entry in self.ready["tenants"] if entry["name"] == tenant)
        return str(next(entry["key"] for entry in owner["applications"] if entry["name"] == application))

    def wait_ready(self) -> None:
        """Wait for its ready file, and read it; killed after a bound."""
        ready_file = self.state.with_suffix(".ready.json")
        deadline = time.monotonic() + START_S
        while not ready_file.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                kill_if_running(self.process)
                raise AssertionError(f"the cell did not start: {self.tail()}")
            time.sleep(0.02)
        self.ready = json.loads(ready_file.read_text())

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Signal it and wait for its exit status; killed after a bound."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(STOP_S)
            raise AssertionError(f"the cell did not exit within {STOP_S} s after {number.name}: {self.tail()}") from None

    def tail(self) -> str:
        """The end of what it printed."""
        return self.log.read_text(errors="replace")[-4_000:]


def start_cell(state: Path, *arguments: str, engine: Sequence[str] = ("simulated",), config: str = "") -> RunningCell:
    """Start a cell and wait until its ready file is there."""
    cell = spawn_cell(state, *arguments, engine=engine, config=config)
    cell.wait_ready()
    return cell


def spawn_cell(state: Path, *arguments: str, engine: Sequence[str] = ("simulated",), config: str = "") -> RunningCell:
    """A cell that is starting; `ready` is empty."""
    state.parent.mkdir(parents=True, exist_ok=True)
    ready_file, log = state.with_suffix(".ready.json"), state.with_suffix(".log")
    ready_file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "weir.cli.main", "up", "--state", str(state), "--listen", "127.0.0.1:0"]
    command += ["--ready-file", str(ready_file), *arguments]
    for name in engine:
        command += ["--engine", name]
    if config:
        config_file = state.with_suffix(".toml")
        config_file.write_text(config)
        command += ["--config", str(config_file)]
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True)
    return RunningCell(process, {}, state, log)


def kill_if_running(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that may be gone already."""
    if process.poll() is None:
        os.kill(process.pid, signal.SIGKILL)
    process.wait(STOP_S)


@contextmanager
def running_cell(
    state: Path, *arguments: str, engine: Sequence[str] = ("simulated",), config: str = ""
) -> Iterator[RunningCell]:
    """A cell for the length of a block; it must exit cleanly at the end."""
    cell = start_cell(state, *arguments, engine=engine, config=config)
    try:
        yield cell
    finally:
        status = cell.stop()
    assert status == 0, f"exit status {status}: {cell.tail()}"
