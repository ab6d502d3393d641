"""A cell that stands by: it leads once the one that leads is gone, frozen or stopped, and gateways find it by themselves."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.ending_stage import Caller, Stage, read_shown
from tests.e2e.money_stage import Books
from tests.e2e.running_cell import START_S, RunningCell, kill_if_running, spawn_cell, start_cell
from tests.e2e.scripted_engine import Script, ScriptedEngine
from tests.e2e.sse_client import Call, ask, calling
from tests.postgres_server import shared_server

TAKEOVER_S = 10.0
"""Twice what a frozen leader may take, because this machine may be busy: the benchmark measures."""
SHORT = "heartbeat_ms = 500\nsilence_ms = 6000\nlease_ms = 8000\n"
"""A takeover is shorter than what a gateway waits for, also on a busy machine."""


@dataclass
class Pair:
    """A cell that leads, one that stands by, and a gateway that knows both."""

    books: Books
    leader: RunningCell
    standby: RunningCell
    gateway: "subprocess.Popen[str]"
    url: str

    @property
    def stage(self) -> Stage:
        """The leader's management."""
        return Stage(self.leader)

    async def asked(self, caller: Caller, request_id: str, script: Script | None = None, max_output_tokens: int = 50) -> int:
        """The status of a whole answer through the gateway."""
        body = _body(request_id, script or Script()) | {"max_output_tokens": max_output_tokens}
        return (await ask(self.url, "/v1/generations", method="POST", key=caller.secret, body=body)).status

    def stream(self, caller: Caller, request_id: str, script: Script) -> contextlib.AbstractAsyncContextManager[Call]:
        """A stream through the gateway."""
        body = _body(request_id, script) | {"stream": True, "max_output_tokens": 600}
        return calling(self.url, "/v1/generations", body=body, headers={"authorization": f"Bearer {caller.secret}"})

    async def refused_for_concurrency(self, caller: Caller) -> None:
        """A coordinator answers again, and what runs still counts: one more is refused, and was never admitted."""
        began = time.monotonic()
        while True:
            body = _body(f"more-{time.monotonic_ns()}", Script())
            answer = await ask(self.url, "/v1/generations", method="POST", key=caller.secret, body=body)
            if answer.status == 429:
                assert answer.json["code"] == "concurrency_limited"
                return
            assert answer.status == 503 and time.monotonic() - began < TAKEOVER_S, answer.json
            await asyncio.sleep(0.05)

    async def taken_over(self, caller: Caller, name: str) -> float:
        """Seconds until the gateway serves again; every request until then must be refused as what helps to wait for."""
        began = time.monotonic()
        for number in range(1_000):
            status = await self.asked(caller, f"{name}-{number}")
            if status == 200:
                return time.monotonic() - began
            assert status == 503 and time.monotonic() - began < TAKEOVER_S, status
            await asyncio.sleep(0.05)
        raise AssertionError("it never served again")

    def wait_standby_ready(self) -> Stage:
        """The management of the cell that took over."""
        self.standby.wait_ready()
        return Stage(self.standby)


def _body(request_id: str, script: Script) -> dict[str, Any]:
    return {"request_id": request_id, "model_alias": "assistant", "input": script.prompt(), "max_output_tokens": 50}


def _config(path: Path) -> str:
    return f'[link]\nlisten = "unix:{path}"\n{SHORT}'


@pytest.fixture
def pair(engine: ScriptedEngine, tmp_path: Path) -> Iterator[Pair]:
    """Both on one database and one engine."""
    url = shared_server().migrated_database(keep=True)
    sockets = [tmp_path / "a", tmp_path / "b"]
    first, second = tmp_path / "first", tmp_path / "second"
    leader = start_cell(first, "--database", url, engine=(engine.url,), config=_config(sockets[0]))
    second.mkdir(mode=0o700)
    shutil.copy(first / "secrets.json", second / "secrets.json")
    standby = spawn_cell(second, "--database", url, "--standby", engine=(engine.url,), config=_config(sockets[1]))
    command = [sys.executable, "-m", "weir.cli.main", "gateway"]
    command += [word for path in sockets for word in ("--connect", f"unix:{path}")]
    with (tmp_path / "gateway.log").open("w") as log:
        gateway = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert gateway.stdout is not None
        yield Pair(Books(first, url), leader, standby, gateway, json.loads(gateway.stdout.readline())["url"])
        assert "Traceback" not in leader.log.read_text() + standby.log.read_text()
    finally:
        for process in (leader.process, standby.process):
            kill_if_running(process)
        gateway.kill()
        gateway.communicate(timeout=20)


@pytest.mark.parametrize("how", ["killed", "frozen"])
async def test_what_runs_goes_on_under_the_next_leader(pair: Pair, how: str) -> None:
    """Protects clients, limits and money: streams and whole answers end as if nothing had happened, and count all the time.

    Woken, a leader that froze admits nothing, writes nothing, and ends saying why.
    """
    caller = await pair.stage.caller()
    await pair.stage.admin("PUT", "limits", {"scope": {"tenant": caller.tenant}, "concurrency": 3})
    assert await pair.asked(caller, "before") == 200
    script = Script(tokens=600, gap_ms=25)  # longer than a takeover on a busy machine
    stream, other = pair.stream(caller, "stream", script), pair.stream(caller, "other", script)
    whole = asyncio.get_running_loop().create_task(pair.asked(caller, "whole", script, max_output_tokens=700))
    async with stream as call, other as second:
        assert await call.head() == await second.head() == 200
        await pair.stage.wait_status(caller, "whole", "running")
        os.kill(pair.leader.process.pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        try:
            await pair.refused_for_concurrency(caller)
            shown = [await read_shown(each) for each in (call, second)]
        finally:
            if how == "frozen":
                os.kill(pair.leader.process.pid, signal.SIGCONT)
        assert [(each.status, each.reason) for each in shown] == [("completed", "stop")] * 2
        assert [each.text.count(" ") for each in shown] == [600] * 2
        assert await whole == 200
    stage = await asyncio.to_thread(pair.wait_standby_ready)
    if how == "frozen":
        assert await asyncio.to_thread(pair.leader.process.wait, 20) == 2
        assert "A newer coordinator writes to this store" in pair.leader.tail()
    await stage.check_quiet()
    for name in ("stream", "other", "whole"):
        record = await stage.admin("GET", f"generations/{caller.tenant}/{name}")
        assert (record["status"], record["usage"]["output_tokens"], record["usage"]["basis"]) == ("completed", 600, "engine")
    assert (await ask(pair.url, "/v1/generations/before", key=caller.secret)).json["status"] == "completed"
    assert await pair.asked(caller, "later") == 200
    assert (await pair.books.verified())["open holds"] == 0


async def test_a_gateway_that_dies_with_its_coordinator_holds_until_its_lease(pair: Pair) -> None:
    """Protects tenants and lanes: what nobody tells the next leader of is held, then ends by rule at the platform's cost."""
    caller = await pair.stage.caller()
    async with pair.stream(caller, "open", Script(tokens=500, gap_ms=20)) as call:
        assert await call.head() == 200
        os.kill(pair.leader.process.pid, signal.SIGKILL)
        pair.gateway.kill()
        stage = await asyncio.to_thread(pair.wait_standby_ready)
        assert (await stage.admin("GET", f"ledger?tenant={caller.tenant}"))["open_holds"] == 1
        await stage.wait_status(caller, "open", "failed")
    record = await stage.admin("GET", f"generations/{caller.tenant}/open")
    assert (record["finish_reason"], record["usage"]["cost_microusd"]) == ("coordinator_lost", 0)
    await stage.check_quiet()
    assert (await pair.books.verified())["open holds"] == 0


async def test_a_leader_that_stops_hands_over_at_once(pair: Pair) -> None:
    """Protects a rolling restart: what runs is finished, and the standby leads without waiting for the lease."""
    caller = await pair.stage.caller()
    running = asyncio.get_running_loop().create_task(pair.asked(caller, "running", Script(tokens=40, gap_ms=20)))
    await pair.stage.wait_status(caller, "running", "running")
    pair.leader.process.send_signal(signal.SIGTERM)
    assert await running == 200
    assert await asyncio.to_thread(pair.leader.process.wait, 20) == 0
    await pair.taken_over(caller, "after")
    stage = await asyncio.to_thread(pair.wait_standby_ready)
    assert (await stage.get(caller, "running")).json["status"] == "completed"


def test_a_standby_needs_a_shared_database(tmp_path: Path) -> None:
    """Protects operators: on SQLite there is nothing to stand by for, and the start says so."""
    cell = spawn_cell(tmp_path / "state", "--standby")
    assert cell.process.wait(START_S) == 2 and "--standby needs a PostgreSQL database" in cell.tail()


async def test_a_leader_that_is_replaced_ends_its_gateways_work_at_once(engine: ScriptedEngine, tmp_path: Path) -> None:
    """Protects clients of the old one: its gateways are told, a whole answer gets its one refusal, and it exits soon."""
    url = shared_server().migrated_database(keep=True)
    old = start_cell(tmp_path / "old", "--database", url, "--gateways", "1", engine=(engine.url,))
    try:
        caller = await Stage(old).caller()
        body = {"model_alias": "assistant", "input": Script(tokens=300, gap_ms=20).prompt(), "max_output_tokens": 400}
        asking = asyncio.get_running_loop().create_task(
            ask(old.ready["api"], "/v1/generations", method="POST", key=caller.secret, body={**body, "request_id": "old"})
        )
        await Stage(old).wait_status(caller, "old", "running")
        new = start_cell(tmp_path / "new", "--database", url, engine=(engine.url,))
        try:
            answer = await asyncio.wait_for(asking, TAKEOVER_S)
            assert (answer.status, answer.json["error"]["code"]) == (503, "coordinator_lost")
            assert await asyncio.to_thread(old.process.wait, TAKEOVER_S) == 2
            assert (await Stage(new).get(caller, "old")).json["status"] == "failed"
        finally:
            assert new.stop() == 0
    finally:
        kill_if_running(old.process)


async def test_a_start_that_cannot_be_replaces_nobody(engine: ScriptedEngine, tmp_path: Path) -> None:
    """Protects the leader: ports, bounds and files are looked at before another cell takes its place."""
    url = shared_server().migrated_database(keep=True)
    leader = start_cell(tmp_path / "leader", "--database", url, engine=(engine.url,))
    try:
        caller = await Stage(leader).caller()
        taken = leader.ready["api"].removeprefix("http://")
        wrong = {
            "taken": (("--listen", taken), ""),
            "bounds": ((), "[link]\nsilence_ms = 100\n"),
            "files": ((), '[link]\nlisten = "127.0.0.1:0"\n'),
            "folder": ((), '[link]\nlisten = "unix:/nowhere/at/all"\n'),
            "engine": ((), "[engine]\nstart_ms = 1000\n"),
        }
        for name, (arguments, config) in wrong.items():
            serving = ("http://127.0.0.1:9",) if name == "engine" else (engine.url,)
            other = spawn_cell(tmp_path / name, "--database", url, *arguments, engine=serving, config=config)
            assert await asyncio.to_thread(other.process.wait, START_S) == 2, other.tail()
            assert "Traceback" not in other.tail()
        assert (await Stage(leader).run(caller, Script(), "after", stream=False)).http == 200
        assert leader.stop() == 0
    finally:
        kill_if_running(leader.process)
