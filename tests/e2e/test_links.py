"""Links between processes that break and freeze, and gateways that are restarted one by one under load: nobody notices."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.contract.link_stand import CuttingRelay
from tests.e2e.ending_stage import Caller, Stage, read_shown, wait_until
from tests.e2e.running_cell import running_cell
from tests.e2e.scripted_engine import Script, ScriptedEngine
from tests.e2e.sse_client import calling
from tests.e2e.test_gateways import owner_of

SHORT = "heartbeat_ms = 200\nsilence_ms = 3000\nlease_ms = 6000\n"
TOKENS = 200
GATEWAYS = 2


@pytest.fixture(scope="module")
def sockets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the sockets of links."""
    return tmp_path_factory.mktemp("l")


@pytest.fixture(scope="module")
def stage(engine: ScriptedEngine, sockets: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A cell with gateways of its own that takes links of others, with small delivery steps."""
    config = f'[link]\nlisten = "unix:{sockets / "coordinator"}"\n{SHORT}[coordinator]\ndelivery_step_tokens = 16\n'
    state = tmp_path_factory.mktemp("links") / "state"
    with running_cell(state, "--gateways", str(GATEWAYS), engine=(engine.url,), config=config) as cell:
        yield Stage(cell)
        assert "Traceback" not in cell.log.read_text()


@asynccontextmanager
async def gateway_behind(path: Path) -> AsyncIterator["subprocess.Popen[str]"]:
    """A gateway process that knows the coordinator at one path."""
    command = [sys.executable, "-m", "weir.cli.main", "gateway", "--connect", f"unix:{path}"]
    process = subprocess.Popen(  # noqa: ASYNC220  it takes a moment, and has no other way to be waited for in a thread
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        yield process
    finally:
        process.terminate()
        await asyncio.to_thread(process.communicate, timeout=30)


@asynccontextmanager
async def relayed_gateway(sockets: Path) -> AsyncIterator[tuple[CuttingRelay, str]]:
    """A gateway of its own behind a relay; its URL."""
    relay, path = CuttingRelay(sockets / "coordinator"), sockets / "relay"
    server = await asyncio.start_unix_server(relay.accept, str(path))
    try:
        async with gateway_behind(path) as process:
            assert process.stdout is not None
            yield relay, json.loads(await asyncio.to_thread(process.stdout.readline))["url"]
    finally:
        server.close()
        await relay.aclose()
        path.unlink()


def stream_body(request_id: str, gap_ms: int) -> dict[str, object]:
    return {
        "request_id": request_id,
        "model_alias": "assistant",
        "input": Script(tokens=TOKENS, gap_ms=gap_ms).prompt(),
        "max_output_tokens": TOKENS + 50,
        "stream": True,
    }


async def test_a_stream_outlives_links_that_are_cut(stage: Stage, sockets: Path) -> None:
    """Protects streams: the link is cut every 100 ms in the middle of booking; all output comes, once, and is paid once."""
    caller = await stage.caller()
    async with relayed_gateway(sockets) as (relay, url):
        headers = {"authorization": f"Bearer {caller.secret}"}
        async with calling(url, "/v1/generations", body=stream_body("cut", 10), headers=headers) as call:
            assert await call.head() == 200
            reading = asyncio.get_running_loop().create_task(read_shown(call))
            cuts = 0
            while not reading.done():
                await asyncio.wait([reading], timeout=0.1)
                relay.cut()
                cuts += 1
            shown = await reading
    assert (shown.status, shown.text) == ("completed", " word" * TOKENS) and cuts >= 10 <= relay.opened
    await stage.check_ended(caller, "cut", "stop", "tenant")
    await stage.check_quiet()


async def test_a_stream_outlives_a_link_that_is_frozen(stage: Stage, sockets: Path) -> None:
    """Protects streams: nothing passes on a link that stays open; both sides give it up and go on with another."""
    caller = await stage.caller()
    async with relayed_gateway(sockets) as (relay, url):
        headers = {"authorization": f"Bearer {caller.secret}"}
        async with calling(url, "/v1/generations", body=stream_body("frozen", 15), headers=headers) as call:
            assert await call.head() == 200
            relay.hold_back()
            shown = await read_shown(call)
            assert relay.opened >= 2
    assert (shown.status, shown.text) == ("completed", " word" * TOKENS)
    await stage.check_ended(caller, "frozen", "stop", "tenant")


Seen = tuple[int, str | None, str | None]


async def _load(stage: Stage, caller: Caller, over: asyncio.Event, worker: int, seen: list[Seen]) -> None:
    """One client after the other at the shared address until it is over; seen: (HTTP status, status, code) of each answer."""
    script = Script(tokens=10, gap_ms=10)
    for number in range(10_000):
        if over.is_set():
            return
        body = {
            "request_id": f"load-{worker}-{number}",
            "model_alias": "assistant",
            "input": script.prompt(),
            "max_output_tokens": 20,
        }
        body |= {"stream": number % 2 == 0}
        headers = {"authorization": f"Bearer {caller.secret}"}
        async with calling(stage.cell.ready["api"], "/v1/generations", body=body, headers=headers) as call:
            status = await call.head()
            shown = await read_shown(call)
        seen.append((status, shown.status, shown.code))
    raise AssertionError("the load never ended")


async def test_gateways_restarted_one_by_one_fail_nothing_that_was_admitted(stage: Stage) -> None:
    """Protects upgrades: under load each gateway is stopped and comes back; every answer is whole, or a refusal."""
    caller, over, loop = await stage.caller(), asyncio.Event(), asyncio.get_running_loop()
    seen: list[Seen] = []
    workers = [loop.create_task(_load(stage, caller, over, worker, seen)) for worker in range(6)]
    try:
        for url in stage.cell.ready["gateways"]:
            pid = owner_of(url, stage.cell)
            os.kill(pid, signal.SIGTERM)

            async def is_another(url: str = url, pid: int = pid) -> bool:
                try:
                    return owner_of(url, stage.cell) != pid
                except (AssertionError, OSError):
                    return False

            await wait_until(is_another, "the gateway was started again", 30)
        before = len(seen)

        async def is_served() -> bool:
            return len(seen) >= before + 12

        await wait_until(is_served, "the load went on", 30)
    finally:
        over.set()
        await asyncio.gather(*workers)
    assert sum(status == 200 for status, _, _ in seen) >= 12
    for status, ended, code in seen:
        assert (status, ended, code) == (200, "completed", None) or (status, code) == (503, "draining"), (status, ended, code)
    await stage.check_quiet()
