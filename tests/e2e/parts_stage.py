"""A cell whose parts are processes of their own: coordinators, one control, gateways, on one PostgreSQL database.

Every part is started on free ports and its own state directory, stopped by its pid, and leaves nothing behind.
"""

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e.ending_stage import Caller, Stage
from tests.e2e.running_cell import START_S, STOP_S, RunningCell, kill_if_running
from tests.e2e.scripted_engine import Script
from tests.e2e.sse_client import Answer, ask
from tests.postgres_server import shared_server

TAKEOVER_S = 10.0
LINK = "heartbeat_ms = 200\nsilence_ms = 2000\nlease_ms = 3000\n"


@dataclass
class Part:
    """One process. log: what it wrote to its standard error; said: to its standard output, which a start waits for."""

    process: subprocess.Popen[bytes]
    log: Path
    output: Path

    def said(self) -> dict[str, Any]:
        """The first line of its standard output, as JSON; killed where none comes within a bound."""
        deadline = time.monotonic() + START_S
        while b"\n" not in (content := self.output.read_bytes()):
            if self.process.poll() is not None or time.monotonic() > deadline:
                kill_if_running(self.process)
                raise AssertionError(f"it did not start: {self.tail()}")
            time.sleep(0.02)
        found: dict[str, Any] = json.loads(content.splitlines()[0])
        return found

    def stop(self) -> int:
        """Ask it to stop; its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_S)

    def kill(self) -> None:
        """As a crash does."""
        kill_if_running(self.process)

    def tail(self) -> str:
        """The end of what it logged."""
        return self.log.read_text(errors="replace")[-4_000:]


@dataclass
class Parts:
    """folder: of sockets, settings, states and logs. valid_ms: how long a snapshot may be worked by. parts: ever started.

    link: settings of links; more: of other sections.
    """

    folder: Path
    url: str
    valid_ms: int = 60_000
    link: str = LINK
    more: str = ""
    parts: list[Part] = field(default_factory=list)

    def start(self, name: str, *arguments: str, config: str = "") -> Part:
        """A command of `weir` with the settings that all share."""
        settings = self.folder / f"{name}.toml"
        settings.write_text(f"[link]\nsnapshot_valid_ms = {self.valid_ms}\n{self.link}{config}{self.more}")
        command = [sys.executable, "-m", "weir.cli.main", *arguments, "--config", str(settings)]
        log, output = self.folder / f"{name}.log", self.folder / f"{name}.out"
        with log.open("ab") as errors, output.open("wb") as said:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=errors, start_new_session=True)
        part = Part(process, log, output)
        self.parts.append(part)
        return part

    def socket(self, coordinator: str) -> Path:
        """Where a coordinator is reached."""
        return self.folder / f"{coordinator}.link"

    def coordinator(self, name: str, *flags: str) -> Part:
        """One that is starting; the second has the secrets of the first."""
        state = self.folder / name
        state.mkdir(mode=0o700, exist_ok=True)
        secrets = self.folder / "a" / "secrets.json"
        if secrets.exists() and name != "a":
            (state / "secrets.json").write_bytes(secrets.read_bytes())
        place = ("--database", self.url, "--state", str(state))
        return self.start(name, "coordinator", *place, *flags, config=f'listen = "unix:{self.socket(name)}"\n')

    def _connect(self, coordinators: Sequence[str]) -> list[str]:
        return [word for name in coordinators for word in ("--connect", f"unix:{self.socket(name)}")]

    def control(self, engine: str, coordinators: Sequence[str] = "a", name: str = "control") -> Part:
        """One that is starting, on an engine."""
        ready = self.folder / f"{name}.ready.json"
        ready.unlink(missing_ok=True)
        place = ("--database", self.url, "--state", str(self.folder / name), "--ready-file", str(ready))
        asked = ("--engine", engine, "--listen", "127.0.0.1:0")
        return self.start(name, "control", *self._connect(coordinators), *place, *asked)

    def ready(self, control: Part, name: str = "control") -> dict[str, Any]:
        """Its ready file, once it is there."""
        path, deadline = self.folder / f"{name}.ready.json", time.monotonic() + START_S
        while not path.exists():
            if control.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"it did not start: {control.tail()}")
            time.sleep(0.02)
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def gateway(self, name: str, coordinators: Sequence[str] = "a") -> str:
        """One that serves; its URL."""
        return self.gateway_at("127.0.0.1:0", name, coordinators)[1]

    def gateway_at(self, own: str, name: str, coordinators: Sequence[str] = "a") -> tuple[Part, str]:
        """One that serves at an address of its own, and its URL."""
        part = self.start(name, "gateway", *self._connect(coordinators), "--own", own)
        return part, part.said()["url"]

    def stage(self, control: Part, coordinator: Part, gateways: Sequence[str]) -> Stage:
        """All of it as tenants and administrators reach it."""
        ready = self.ready(control)
        ready |= {"control_metrics": ready["metrics"], "metrics": coordinator.said()["metrics"]}
        ready |= {"api": gateways[0], "gateways": [*gateways]}
        return Stage(RunningCell(control.process, ready, self.folder / "control", control.log))

    def end(self) -> None:
        """Stop what runs, gateways first; nothing may have failed."""
        for part in reversed(self.parts):
            kill_if_running(part.process)
        assert not [part.log.name for part in self.parts if "Traceback" in part.log.read_text()]


@contextmanager
def parts(folder: Path, valid_ms: int = 60_000, link: str = LINK) -> Iterator[Parts]:
    """Parts on a database of their own, all ended with the block."""
    made = Parts(folder, shared_server().migrated_database(keep=True), valid_ms, link)
    try:
        yield made
    finally:
        made.end()


async def generated(url: str, caller: Caller, request_id: str, script: Script | None = None) -> Answer:
    """A whole answer through one gateway."""
    body = {
        "request_id": request_id,
        "model_alias": "assistant",
        "input": (script or Script()).prompt(),
        "max_output_tokens": 600,
    }
    return await ask(url, "/v1/generations", method="POST", key=caller.secret, body=body)


async def served_again(url: str, caller: Caller, name: str, waits_for: Sequence[str]) -> float:
    """Seconds until a gateway serves; each refusal until then is one of these codes, which help to wait for."""
    began = time.monotonic()
    for number in range(1_000):
        answer = await generated(url, caller, f"{name}-{number}")
        if answer.status == 200:
            return time.monotonic() - began
        assert answer.status == 503, answer.body
        assert _code(answer) in waits_for and time.monotonic() - began < TAKEOVER_S, answer.body
        await asyncio.sleep(0.05)
    raise AssertionError("it never served again")


def _code(answer: Answer) -> str:
    body = answer.json
    return str(body["code"] if "code" in body else body["error"]["code"])


async def refusal(url: str, caller: Caller, name: str) -> str:
    """The code of a refused request; empty where it was served."""
    answer = await generated(url, caller, name)
    return "" if answer.status == 200 else _code(answer)


async def value_of(metrics: str, name: str) -> float:
    """A gauge without labels."""
    text = (await ask(metrics, "/metrics")).body.decode()
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith(f"{name} "))
