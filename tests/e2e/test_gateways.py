"""Several gateways as processes on one coordinator: together they are one platform, and losing one loses only its own.

The bounds between gateways and the coordinator are short here, so that what takes fifteen seconds by default takes two.
"""

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.ending_stage import Stage, read_shown, stream_body, streaming, wait_until
from tests.e2e.processes import children_of, open_files, wait_process_gone
from tests.e2e.running_cell import RunningCell, kill_if_running, running_cell, start_cell, unused_ports
from tests.e2e.scripted_engine import Script, ScriptedEngine
from tests.e2e.sse_client import ask, calling

GATEWAYS = 2
LEASE_S = 2.0
CONFIG = """
[link]
heartbeat_ms = 200
silence_ms = 1200
lease_ms = 2000
"""
LONG = Script(tokens=2_000, gap_ms=20)
"""Forty seconds: longer than anything a test does with it."""


@pytest.fixture(scope="module")
def stage(engine: ScriptedEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A cell with two gateways on the scripted engine."""
    state = tmp_path_factory.mktemp("gateways") / "state"
    with running_cell(state, "--gateways", str(GATEWAYS), engine=(engine.url,), config=CONFIG) as cell:
        yield Stage(cell)
        assert "Traceback" not in cell.log.read_text()


def gateway_pids(cell: RunningCell) -> list[int]:
    """Processes of a cell's gateways, in the order of their start."""
    return sorted(pid for pid in children_of(cell.process.pid) if b"gateway" in _command(pid))


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def owner_of(url: str, cell: RunningCell) -> int:
    """The gateway process that listens at a URL by itself: the only one whose socket that is, beside the cell that made it."""
    port = int(url.rsplit(":", 1)[1])
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    inode = next(row[9] for row in rows if row[3] == "0A" and int(row[1].split(":")[1], 16) == port)
    for pid in gateway_pids(cell):
        if f"socket:[{inode}]" in open_files(pid):
            return pid
    raise AssertionError(f"nobody listens at {url}")


async def test_every_gateway_serves_knows_and_cancels_every_request(stage: Stage) -> None:
    """Protects one platform: what one gateway runs another one shows and cancels; the shared address reaches one."""
    caller = await stage.caller()
    first, second = stage.cell.ready["gateways"]
    async with streaming(first, caller, "across", LONG) as call:
        shown = await ask(second, "/v1/generations/across", key=caller.secret)
        assert (shown.status, shown.json["status"]) == (200, "running")
        cancelled = await ask(second, "/v1/generations/across/cancel", method="POST", key=caller.secret)
        assert (cancelled.status, cancelled.json["status"]) == (200, "cancelled")
        assert (await read_shown(call)).reason == "client"
    for url in (stage.cell.ready["api"], first, second):
        assert (await ask(url, "/readyz")).status == 200
        assert (await ask(url, "/v1/models", key=caller.secret)).status == 200
    await stage.check_ended(caller, "across", "client", "tenant")


async def test_each_gateway_shows_its_own_metrics(stage: Stage) -> None:
    """Protects dashboards: where a gateway's metrics are is logged as it starts, and they say whether it is linked."""
    lines = [json.loads(line) for line in stage.cell.log.read_text().splitlines() if '"gateway_started"' in line]
    latest = {line["gateway"]: line for line in lines}
    assert {line["url"] for line in latest.values()} == set(stage.cell.ready["gateways"])
    for line in latest.values():
        text = (await ask(line["metrics"], "/metrics")).body.decode()
        assert "weir_gateway_linked 1.0" in text and "weir_gateway_requests_in_flight 0.0" in text
        assert "weir_snapshot_valid_seconds" in text


async def test_one_id_at_two_gateways_runs_once(stage: Stage) -> None:
    """Protects idempotency across gateways: the second one learns that it is in flight, and afterwards that it has ended."""
    caller = await stage.caller()
    first, second = stage.cell.ready["gateways"]
    async with streaming(first, caller, "twice", LONG):
        body = stream_body("twice", LONG)
        again = await ask(second, "/v1/generations", method="POST", key=caller.secret, body=body)
        assert (again.status, again.json["code"]) == (409, "request_in_flight")
    await stage.wait_status(caller, "twice", "cancelled")
    again = await ask(second, "/v1/generations", method="POST", key=caller.secret, body=body)
    assert (again.status, again.json["code"]) == (409, "output_not_retained")


async def test_concurrency_is_exact_across_gateways(stage: Stage) -> None:
    """Protects limits: with room for three, three of twelve at once at two gateways run, and the rest are refused."""
    caller = await stage.caller()
    await stage.admin("PUT", "limits", {"scope": {"tenant": caller.tenant}, "concurrency": 3})
    urls = stage.cell.ready["gateways"]
    body = {"model_alias": "assistant", "input": Script(tokens=50, gap_ms=20).prompt(), "max_output_tokens": 60}
    answers = await asyncio.gather(
        *(ask(urls[number % 2], "/v1/generations", method="POST", key=caller.secret, body=body) for number in range(12))
    )
    assert sorted(answer.status for answer in answers) == [200] * 3 + [429] * 9
    assert {answer.json["code"] for answer in answers if answer.status == 429} == {"concurrency_limited"}
    await stage.check_quiet()


async def test_a_revoked_key_is_refused_everywhere_and_its_work_cancelled(stage: Stage) -> None:
    """Protects revocation: once the change is answered no gateway takes the key, and a running stream ends as revoked."""
    caller = await stage.caller()
    async with streaming(stage.cell.ready["gateways"][1], caller, "revoked", LONG) as call:
        await stage.revoke(caller)
        for url in stage.cell.ready["gateways"]:
            assert (await ask(url, "/v1/models", key=caller.secret)).status == 403
        assert (await read_shown(call)).reason == "revoked"
    await stage.check_ended(caller, "revoked", "revoked", "tenant")


async def test_a_killed_gateway_takes_only_its_own_with_it(stage: Stage, engine: ScriptedEngine) -> None:
    """Protects the rest: its streams break, their engines stop, holds and lanes return within the lease, it starts again."""
    lost, kept = await stage.caller(), await stage.caller()
    first, second = stage.cell.ready["gateways"]
    async with streaming(first, lost, "lost", LONG), streaming(second, kept, "kept", LONG) as other:
        os.kill(owner_of(first, stage.cell), signal.SIGKILL)

        async def is_resolved() -> bool:
            record = await stage.admin("GET", f"generations/{lost.tenant}/lost")
            return bool(record["finish_reason"] == "coordinator_lost")

        await wait_until(is_resolved, "the lost gateway's request is resolved", LEASE_S + 8)
        record = await stage.admin("GET", f"generations/{lost.tenant}/lost")
        assert record["status"] == "failed" and record["usage"]["cost_microusd"] == 0
        assert (await stage.admin("GET", f"ledger?tenant={lost.tenant}"))["open_holds"] == 0
        assert (await ask(second, "/v1/generations/kept", key=kept.secret)).json["status"] == "running"

        async def serves_again() -> bool:
            try:
                return (await ask(first, "/readyz")).status == 200
            except OSError:
                return False

        await wait_until(serves_again, "the gateway was started again at its address", 30)
        cancelled = await ask(first, "/v1/generations/kept/cancel", method="POST", key=kept.secret)
        assert cancelled.status == 200 and (await read_shown(other)).reason == "client"
    await stage.check_quiet()
    assert engine.running == 0


async def test_a_gateway_that_froze_comes_back_with_nothing_of_its_own(stage: Stage) -> None:
    """Protects exactly one end: the lease ended what it carried; woken, it tells its clients, and late words change nothing."""
    caller = await stage.caller()
    first, second = stage.cell.ready["gateways"]
    pid = owner_of(first, stage.cell)
    async with streaming(first, caller, "frozen", LONG) as call:
        os.kill(pid, signal.SIGSTOP)
        try:

            async def is_resolved() -> bool:
                record = await ask(second, "/v1/generations/frozen", key=caller.secret)
                return bool(record.json["status"] == "failed")

            await wait_until(is_resolved, "the frozen gateway's request is resolved", LEASE_S + 8)
            settled = await stage.admin("GET", f"generations/{caller.tenant}/frozen")
        finally:
            os.kill(pid, signal.SIGCONT)
        shown = await read_shown(call)
        assert (shown.status, shown.reason) == ("failed", "coordinator_lost")

    async def serves_again() -> bool:
        return (await ask(first, "/readyz")).status == 200

    await wait_until(serves_again, "the woken gateway serves", 20)
    assert await stage.admin("GET", f"generations/{caller.tenant}/frozen") == settled
    await stage.check_serves(caller)
    await stage.check_quiet()


async def test_a_gateway_that_is_stopped_finishes_its_streams(stage: Stage) -> None:
    """Protects a rolling restart: it is not ready at once, refuses new work, ends its stream properly, and is started again."""
    caller = await stage.caller()
    first, second = stage.cell.ready["gateways"]
    pid = owner_of(first, stage.cell)
    short = Script(tokens=100, gap_ms=20)
    body = {"request_id": "last", "model_alias": "assistant", "input": short.prompt(), "max_output_tokens": 200, "stream": True}
    headers = {"authorization": f"Bearer {caller.secret}"}
    async with calling(first, "/v1/generations", body=body, headers=headers) as call:
        assert await call.head() == 200
        os.kill(pid, signal.SIGTERM)

        async def is_draining() -> bool:
            return (await ask(first, "/readyz")).status == 503

        await wait_until(is_draining, "the gateway is not ready")
        refused = await ask(first, "/v1/generations", method="POST", key=caller.secret, body={**body, "request_id": "late"})
        assert (refused.status, refused.json["code"]) == (503, "draining")
        assert (await ask(second, "/readyz")).status == 200
        shown = await read_shown(call)
        assert (shown.status, shown.text) == ("completed", short.text)
    assert await asyncio.to_thread(wait_process_gone, pid, 20)

    async def serves_again() -> bool:
        try:
            return (await ask(first, "/readyz")).status == 200
        except OSError:
            return False

    await wait_until(serves_again, "the gateway was started again", 30)
    await stage.check_ended(caller, "last", "stop", "tenant")


def test_gateways_end_with_a_cell_that_is_killed(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Protects the machine: a cell that dies without a word leaves no gateway behind."""
    cell = start_cell(tmp_path_factory.mktemp("killed") / "state", "--gateways", "2", config=CONFIG)
    try:
        pids = gateway_pids(cell)
        assert len(pids) == 2
        kill_if_running(cell.process)
        assert all(wait_process_gone(pid, 20) for pid in pids)
    finally:
        kill_if_running(cell.process)


def test_a_cell_with_gateways_stops_cleanly(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Protects SIGTERM: the cell exits with 0, its gateways are gone, and the ready file names each of them before."""
    cell = start_cell(tmp_path_factory.mktemp("stopped") / "state", "--gateways", "3", config=CONFIG)
    try:
        pids = gateway_pids(cell)
        assert len(pids) == len(set(cell.ready["gateways"])) == 3
        assert cell.stop() == 0, cell.tail()
        assert all(wait_process_gone(pid, 5) for pid in pids)
        assert "Traceback" not in cell.log.read_text()
    finally:
        kill_if_running(cell.process)


async def test_a_killed_cell_can_be_started_again_at_once(engine: ScriptedEngine, tmp_path: Path) -> None:
    """Protects restarts: gateways that outlive their cell for a moment give its address up, also with a stream open."""
    port = str(unused_ports())
    cell = start_cell(tmp_path / "state", "--gateways", "2", "--listen", f"127.0.0.1:{port}", engine=(engine.url,))
    stage, again = Stage(cell), None
    try:
        async with streaming(cell.ready["api"], stage.demo_caller(), "open", LONG):
            pids = gateway_pids(cell)
            kill_if_running(cell.process)
            again = await asyncio.to_thread(start_cell, cell.state, "--listen", f"127.0.0.1:{port}", engine=(engine.url,))
            assert all(wait_process_gone(pid, 20) for pid in pids)
            assert (await Stage(again).run(Stage(again).demo_caller(), Script(), "after", stream=False)).http == 200
    finally:
        kill_if_running(cell.process)
        if again is not None:
            assert again.stop() == 0


def test_gateways_of_a_cell_need_no_token_of_links_from_elsewhere(tmp_path: Path) -> None:
    """Protects a cell with both: what gateways of other hosts must show is nothing that its own have to."""
    certificate, key, token = (tmp_path / name for name in ("certificate", "key", "token"))
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    subprocess.run([*command, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True, timeout=60)
    token.write_text("t" * 40)
    config = f"""[link]
listen = "127.0.0.1:0"
certificate_file = "{certificate}"
private_key_file = "{key}"
token_file = "{token}"
"""
    with running_cell(tmp_path / "state", "--gateways", "1", config=config) as cell:
        assert len(cell.ready["gateways"]) == 1
