"""Every part is replaced while tenants are served: what was admitted is answered whole, and the rest is told to come again."""

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import pytest
from tests.e2e.ending_stage import Caller, read_shown, wait_until
from tests.e2e.parts_stage import Part, generated, parts, served_again
from tests.e2e.processes import children_of
from tests.e2e.scripted_engine import Script, ScriptedEngine
from tests.e2e.sse_client import calling

PATIENT = "heartbeat_ms = 400\nsilence_ms = 8000\nlease_ms = 12000\n"
"""A takeover is shorter than what a gateway waits for."""
COMES_AGAIN = {"draining", "coordinator_lost", "no_capacity", "connection refused"}
"""What a client is told, or finds, that may simply ask again."""


@dataclass
class Load:
    """Clients that ask one after the other, at any gateway. told: how often each ending was shown."""

    urls: list[str]
    caller: Caller
    told: Counter[str] = field(default_factory=Counter)
    over: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, worker: int) -> None:
        """One client, until it is over."""
        for number in count():
            if self.over.is_set():
                return
            url, script = self.urls[number % len(self.urls)], Script(tokens=20, gap_ms=20)
            name = f"load-{worker}-{number}"
            try:
                shown = await (self._stream(url, name, script) if worker % 2 else self._whole(url, name, script))
            except ConnectionRefusedError:
                shown = "connection refused"
            self.told[shown] += 1
            if shown != "completed":
                await asyncio.sleep(0.05)

    async def _whole(self, url: str, name: str, script: Script) -> str:
        answer = await generated(url, self.caller, name, script)
        return "completed" if answer.status == 200 else str(answer.json.get("code") or answer.json["error"]["code"])

    async def _stream(self, url: str, name: str, script: Script) -> str:
        body = {"request_id": name, "model_alias": "assistant", "input": script.prompt(), "max_output_tokens": 60}
        headers = {"authorization": f"Bearer {self.caller.secret}"}
        async with calling(url, "/v1/generations", body=body | {"stream": True}, headers=headers) as call:
            shown = await read_shown(call)
        return shown.status if shown.status == "completed" else str(shown.code or shown.reason)

    @asynccontextmanager
    async def around(self, workers: int = 6) -> AsyncIterator[None]:
        """They ask for the length of a block; whatever was admitted was answered whole."""
        async with asyncio.TaskGroup() as tasks:
            for worker in range(workers):
                tasks.create_task(self.run(worker))
            try:
                yield
            finally:
                self.over.set()
        assert set(self.told) <= COMES_AGAIN | {"completed"} and self.told["completed"] > 50, self.told


async def stopped(part: Part) -> None:
    """It was asked to stop, and did."""
    assert await asyncio.to_thread(part.stop) == 0, part.tail()


async def stands_by(part: Part) -> None:
    """It has asked for the lease."""

    async def is_so() -> bool:
        return "standing by" in part.tail()

    await wait_until(is_so, "it stands by", 20)


async def test_every_part_is_restarted_under_load(engine: ScriptedEngine, tmp_path: Path) -> None:
    """Protects upgrades: coordinators, control and gateways are replaced one by one, and no admitted request fails.

    A coordinator does not wait for what runs where another one stands by: that one goes on with it.
    """
    with parts(tmp_path, link=PATIENT) as made:
        first = made.coordinator("a")
        first.said()
        control = made.control(engine.url, "ab")
        gateways = [made.gateway_at("127.0.0.1:0", name, "ab") for name in ("first", "second")]
        urls = [url for _, url in gateways]
        stage = made.stage(control, first, urls)
        caller = await stage.caller()
        load = Load(urls, caller)
        async with load.around():
            second = made.coordinator("b", "--standby")
            await stands_by(second)
            long = asyncio.get_running_loop().create_task(generated(urls[0], caller, "long", Script(tokens=250, gap_ms=20)))
            await stage.wait_status(caller, "long", "running")
            await stopped(first)
            assert "handing" in first.tail()
            await served_again(urls[0], caller, "second", [*COMES_AGAIN])
            assert not long.done() and (await long).status == 200
            await stopped(control)
            control = made.control(engine.url, "ab")
            await asyncio.to_thread(made.ready, control)
            for name, (gateway, url) in zip(("third", "fourth"), gateways, strict=True):
                await stopped(gateway)
                await asyncio.to_thread(made.gateway_at, url.removeprefix("http://"), name, "ab")
            first = made.coordinator("a", "--standby")
            await stands_by(first)
            await stopped(second)
            await served_again(urls[1], caller, "first", [*COMES_AGAIN])
        stage = made.stage(control, first, urls)
        await stage.check_quiet()
        assert (await stage.admin("GET", f"ledger?tenant={caller.tenant}"))["open_holds"] == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
async def test_load_outlives_a_coordinator(tmp_path: Path, number: signal.Signals) -> None:
    """Protects availability: engines are control's, so nothing that runs is lost, and gateways wait for who leads next."""
    with parts(tmp_path, link=PATIENT) as made:
        first = made.coordinator("a")
        first.said()
        control = made.control("simulated", "ab")
        urls = [made.gateway(name, "ab") for name in ("first", "second")]
        stage = made.stage(control, first, urls)
        caller = await stage.caller()
        engines = children_of(control.process.pid)
        load = Load(urls, caller)
        async with load.around():
            second = made.coordinator("b", "--standby")
            await has_completed(load, 10)
            first.process.send_signal(number)
            await asyncio.to_thread(second.said)
            await has_completed(load, load.told["completed"] + 40)
        # Of a frozen one control hears as late as gateways do: until then the next one knows of no engine.
        assert set(load.told) <= {"completed", *(["no_capacity"] if number is signal.SIGSTOP else [])}, load.told
        if number is signal.SIGSTOP:
            first.process.send_signal(signal.SIGCONT)
            assert await asyncio.to_thread(first.process.wait, 20) == 2
        assert children_of(control.process.pid) == engines
        stage = made.stage(control, second, urls)
        await stage.check_quiet()


async def has_completed(load: Load, number: int) -> None:
    """So many answers are whole."""

    async def is_so() -> bool:
        return load.told["completed"] >= number

    await wait_until(is_so, f"{number} answers are whole", 60)
