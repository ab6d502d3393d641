"""Two engines, one of which fails: its client sees one clean answer, pays once, and never gets output twice."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest
from tests.e2e.ending_stage import Caller, Stage, Surface, price, read_shown, wait_until
from tests.e2e.running_cell import running_cell
from tests.e2e.scripted_engine import Script, ScriptedEngine
from tests.e2e.surfaces import ANSWERS, Shown

CONFIG = """
[pool]
concurrency = 4
[engine]
first_output_ms = 700
idle_ms = 700
probe_ms = 100
restart_backoff_ms = 10
"""
RESET = Script(tokens=0, first_ms=1, end="reset")
FAILURES = {
    "reset": RESET,
    "answers 500": Script(status=500),
    "silent": Script(tokens=0, end="stall"),
    "garbage": Script(tokens=0, end="garbage"),
}


@dataclass(frozen=True)
class Pair:
    """A cell on two engines. The first one is asked first while both are idle, and fails as it is told."""

    stage: Stage
    failing: ScriptedEngine
    sound: ScriptedEngine

    async def run(self, failure: Script, caller: Caller, asked: Script, surface: Surface, stream: bool) -> Shown:
        """One generation that the failing engine is asked for first."""
        await wait_until(self.both_ready, "both replicas are ready")
        self.failing.always = failure
        async with self.stage.call(caller, asked, "it", surface=surface, stream=stream) as call:
            return await read_shown(call)

    async def mend(self) -> None:
        """The failing engine answers, and is asked until its replica is trusted in full again."""
        self.failing.always, caller, numbers = None, self.stage.demo_caller(), count(1)

        async def is_trusted() -> bool:
            if await self.both_ready():
                return True
            await self.stage.run(caller, Script(), f"mend-{self.failing.started}-{next(numbers)}", stream=False)
            return False

        await wait_until(is_trusted, "both replicas are ready")

    async def both_ready(self) -> bool:
        """Whether both replicas are trusted in full."""
        replicas = (await self.stage.admin("GET", "replicas"))["replicas"]
        return len(replicas) == 2 and all(replica["state"] == "ready" for replica in replicas)

    async def paid(self, caller: Caller) -> tuple[int, int]:
        """(the tenant's, the platform's) micro-dollars of its one request."""
        [row] = await self.stage.usage(caller.tenant)
        assert row["requests"] == 1
        ledger = await self.stage.admin("GET", f"ledger?tenant={caller.tenant}")
        spent = {account["kind"]: account["spent"] for account in ledger["accounts"]}
        assert ledger["open_holds"] == 0 and spent["spend_microusd_lifetime"] == row["cost_microusd"]
        return row["cost_microusd"], row["platform_cost_microusd"]


@asynccontextmanager
async def engines(state: Path, config: str = CONFIG) -> AsyncIterator[Pair]:
    """Two engines and a cell on them."""
    async with AsyncExitStack() as stack:
        failing, sound = (stack.enter_context(ScriptedEngine()) for _ in range(2))
        cell = stack.enter_context(running_cell(state, engine=(failing.url, sound.url), config=config))
        pair = Pair(Stage(cell), failing, sound)
        await wait_until(pair.both_ready, "both replicas are ready")
        failing.started = sound.started = 0  # what warmed them up does not count
        yield pair
        assert "Traceback" not in cell.tail()


async def test_a_failed_attempt_is_followed_by_one_clean_answer(tmp_path: Path) -> None:
    """On each surface, streamed or not, however the first engine failed: the answer of the second, charged once."""
    async with engines(tmp_path / "state", CONFIG + "[coordinator]\nretries_min = 100\n") as pair:
        asked = Script(tokens=6, note="asked")
        for name, failure in FAILURES.items():
            for surface, stream in ANSWERS:
                await pair.mend()
                caller, started = await pair.stage.caller(), pair.failing.started
                shown = await pair.run(failure, caller, asked, surface, stream)
                case = (name, surface, stream, shown)
                assert pair.failing.started == started + 1, case
                assert (shown.http, shown.status, shown.reason) == (0 if stream else 200, "completed", "stop"), case
                assert shown.text == asked.text, case
                assert await pair.paid(caller) == (price(asked.input_tokens, 6), price(asked.input_tokens, 0)), case
                record = (await pair.stage.get(caller, "it")).json
                assert (record["status"], record["usage"]["output_tokens"]) == ("completed", 6), case
        seen = await pair.stage.metrics()
        assert seen["weir_retries_total"] == len(FAILURES) * len(ANSWERS)
        await pair.stage.check_quiet()


@pytest.mark.parametrize(("surface", "stream"), ANSWERS)
async def test_output_that_a_client_got_is_never_followed_by_another_attempt(
    tmp_path: Path, surface: Surface, stream: bool
) -> None:
    """A stream that broke after output ends; a whole answer was not delivered, so its text is dropped and made again."""
    async with engines(tmp_path / "state") as pair:
        caller, asked = await pair.stage.caller(), Script(tokens=6)
        shown = await pair.run(Script(tokens=3, gap_ms=20, end="reset"), caller, asked, surface, stream)
        lost = price(asked.input_tokens, 3)
        if stream:
            assert (shown.text, shown.code) == (" word" * 3, "replica_lost") and not pair.sound.started
            assert await pair.paid(caller) == (0, lost)
        else:
            assert (shown.text, shown.status, pair.sound.started) == (asked.text, "completed", 1)
            assert await pair.paid(caller) == (price(asked.input_tokens, 6), lost)
        await pair.stage.check_quiet()


async def test_an_exhausted_budget_ends_it(tmp_path: Path) -> None:
    """Without a retry left the failure is told, at the platform's cost, and an SDK may send it again."""
    async with engines(tmp_path / "state", CONFIG + "[coordinator]\nretries_min = 0\nretry_percent = 0\n") as pair:
        caller = await pair.stage.caller()
        shown = await pair.run(RESET, caller, Script(), "native", False)
        await pair.stage.check_ended(caller, "it", "replica_lost", "platform", shown)
        assert shown.http == 502 and "x-should-retry" not in shown.headers and not pair.sound.started


async def test_both_engines_fail(tmp_path: Path) -> None:
    """Two attempts are all: one ending, nothing for the tenant, both attempts for the platform."""
    async with engines(tmp_path / "state") as pair:
        caller, asked = await pair.stage.caller(), Script(tokens=2, end="error", gap_ms=20)
        pair.sound.always = asked
        shown = await pair.run(Script(tokens=1, gap_ms=20, end="reset"), caller, asked, "native", False)
        assert (shown.http, shown.reason) == (502, "engine_error")
        assert (pair.failing.started, pair.sound.started) == (1, 1)
        both = price(asked.input_tokens, 1) + price(asked.input_tokens, 2)
        assert await pair.paid(caller) == (0, both)
        await pair.stage.check_quiet()
