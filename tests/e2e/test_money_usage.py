"""Usage as engines should not report it: nobody pays for what cannot be, nothing is booked twice, and the books stay clean."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from tests.e2e.ending_stage import Caller, Stage, Surface, price, wait_until
from tests.e2e.money_stage import CELLS, accounts_of, new_books
from tests.e2e.scripted_engine import Script, ScriptedEngine
from tests.e2e.sse_client import ask, bearer, calling

MOST, TOKENS, WORD = 100, 4, " word"
CACHED_MICROUSD = 50_000  # of the demonstration, per million tokens; uncached it is 200,000
TOKENS_MAX = 2**31 - 1
ANSWERS: list[tuple[Surface, bool]] = [("native", True), ("chat", False)]


@pytest.fixture(scope="module", params=CELLS)
def stage(engine: ScriptedEngine, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A cell on that engine, with its books in each database."""
    with new_books(request.param, tmp_path_factory.mktemp("usage")).running(engine.url, "") as cell:
        yield Stage(cell)


@dataclass(frozen=True)
class Row:
    """What the engine's last chunk says, and what is booked of it. usage: (input, cached, output), None: as it was sent.

    counts: whether the chunks before it count too. clamped: more than was held, which is alarmed.
    """

    last: dict[str, Any]
    usage: tuple[int, int, int] | None = None
    reason: str = "stop"
    counts: bool = True
    clamped: bool = False

    @property
    def script(self) -> Script:
        """What the engine is asked to do."""
        return Script(tokens=TOKENS, word=WORD, last_usage=self.last, counts=self.counts)

    @property
    def booked(self) -> tuple[int, int, int]:
        """What is shown and paid; without counts, one token for each byte that was relayed."""
        relayed = TOKENS if self.counts else TOKENS * len(WORD)
        return (self.script.input_tokens, 0, relayed) if self.usage is None else self.usage


def said(input_tokens: Any, output_tokens: Any, cached: Any = 0) -> dict[str, Any]:
    """A usage object."""
    details = {"cached_tokens": cached}
    return {"prompt_tokens": input_tokens, "completion_tokens": output_tokens, "prompt_tokens_details": details}


ROWS = {
    "empty": Row({}),
    "empty, never counted": Row({}, counts=False),
    "only a total": Row({"total_tokens": 14}, counts=False),
    "only the output": Row({"completion_tokens": 3}, counts=False),
    "zero": Row(said(0, 0), (0, 0, 0)),
    "zero output": Row(said(10, 0), (10, 0, 0)),
    "less than it sent": Row(said(10, 2), (10, 0, 2)),
    "cached": Row(said(1_000_000, 4, 999_990), (1_000_000, 999_990, 4), clamped=True),
    "more cached than read": Row(said(10, 4, 50), (10, 10, 4)),
    "beyond the hold": Row(said(10, 5_000), (10, 0, 5_000), clamped=True),
    "absurd": Row(said(2**40, 2**62), (TOKENS_MAX, 0, TOKENS_MAX), clamped=True),
    "beyond 64 bits": Row(said(10, 2**70), (10, 0, TOKENS_MAX), clamped=True),
    "negative input": Row(said(-3, 4), reason="engine_error"),
    "negative output": Row(said(10, -4), reason="engine_error"),
    "negative cached": Row(said(10, 4, -1), reason="engine_error"),
    "negative, never counted": Row(said(-3, -4), reason="engine_error", counts=False),
    "a fraction": Row(said(10, 4.5), reason="engine_error"),
    "text": Row(said("10", "4"), reason="engine_error"),
}


def cost(input_tokens: int, cached: int, output_tokens: int) -> int:
    """Micro-dollars, rounded up once."""
    micro = (input_tokens - cached) * 200_000 + cached * CACHED_MICROUSD + output_tokens * 600_000
    return -(-micro // 1_000_000)


@pytest.mark.parametrize(("surface", "stream"), ANSWERS)
@pytest.mark.parametrize("name", ROWS)
async def test_what_an_engine_reports(stage: Stage, name: str, surface: Surface, stream: bool) -> None:
    """The tenant pays no more than its hold, for what was measured, else for what was sent; the platform pays the rest."""
    row, caller = ROWS[name], await stage.caller()
    before = await clamped(stage)
    shown = await stage.run(caller, row.script, "odd", stream=stream, surface=surface, most=MOST)
    assert shown.reason == row.reason or shown.code == row.reason, shown
    usage = (await stage.admin("GET", f"generations/{caller.tenant}/odd"))["usage"]
    assert (usage["input_tokens"], usage["cached_input_tokens"], usage["output_tokens"]) == row.booked
    measured = row.counts or row.usage is not None
    assert usage["basis"] == ("engine" if measured else "estimated")
    total = cost(*row.booked)
    if row.reason == "engine_error":
        parts, tokens = (0, total), (0, 0, 0)
    else:
        input_tokens = min(row.booked[0], row.script.input_tokens)
        tokens = (input_tokens, min(row.booked[1], input_tokens), min(row.booked[2], MOST))
        part = min(cost(*tokens), price(row.script.input_tokens, MOST))
        parts = (part, total - part)
    await check_booked(stage, caller, parts, tokens)
    assert usage["cost_microusd"] == parts[0]
    assert await clamped(stage) - before == row.clamped


async def clamped(stage: Stage) -> float:
    """Settlements that were clamped to their hold."""
    return (await stage.metrics()).get("weir_clamped_settlements_total", 0)


async def check_booked(stage: Stage, caller: Caller, parts: tuple[int, int], tokens: tuple[int, int, int]) -> None:
    """One usage row and the account say these amounts: (the tenant's, the platform's) and the tenant's tokens."""
    [row] = await stage.usage(caller.tenant)
    assert (row["requests"], row["cost_microusd"], row["platform_cost_microusd"]) == (1, *parts)
    assert (row["input_tokens"], row["cached_input_tokens"], row["output_tokens"]) == tokens
    _, held, spent = (await accounts_of(stage, caller.tenant))["spend_microusd_lifetime", "tenant"]
    assert (held, spent) == (0, parts[0])


@pytest.mark.parametrize("counts", [True, False])
async def test_usage_that_arrives_after_a_cancel(stage: Stage, engine: ScriptedEngine, counts: bool) -> None:
    """A cancelled stream is booked once, by what was known then; what its engine goes on to say changes nothing."""
    caller = await stage.caller()
    script = Script(tokens=TOKENS, hold_at=TOKENS, counts=counts, last_usage=said(500, 90), note=caller.tenant)
    engine.hold()
    async with stage.call(caller, script, "late", most=MOST) as call:
        async for event in call.events():
            if "".join(seen.json.get("text", "") for seen in call.seen).count(WORD) == TOKENS or event.name == "done":
                break
        told = await stage.get(caller, "late", "/cancel")
        assert (told.status, told.json["finish_reason"]) == (200, "client")
    engine.release()

    async def is_idle() -> bool:
        return engine.running == 0

    await wait_until(is_idle, "the engine has said everything")
    await stage.check_quiet()
    await stage.check_ended(caller, "late", "client", "tenant")
    usage = (await stage.get(caller, "late")).json["usage"]
    assert usage == told.json["usage"] and usage["basis"] == ("engine" if counts else "estimated")
    assert usage["output_tokens"] == (TOKENS if counts else TOKENS * len(WORD))


async def test_choices_beyond_the_bound_are_refused(stage: Stage, engine: ScriptedEngine) -> None:
    """`n` is named in a clear refusal on both surfaces, nothing runs, and nothing is charged."""
    caller, started = await stage.caller(), engine.started
    chat = {"model": "assistant", "messages": [{"role": "user", "content": "Hi"}], "n": 17}
    for path, body, code in (
        ("/v1/chat/completions", chat, "invalid_request"),
        ("/v1/generations", {"model_alias": "assistant", "input": "Hi", "n": 2}, "unsupported_field"),
    ):
        async with calling(stage.cell.api, path, body=body, headers=bearer(caller.secret)) as call:
            answer = await call.answer()
        told = answer.json.get("error", answer.json)
        assert (answer.status, told["code"], told["field"]) == (400, code, "n")
    one = {"model": "assistant", "messages": [{"role": "user", "content": "Hi"}], "n": 1}
    assert await stage.usage(caller.tenant) == [] and engine.started == started
    served = await ask(stage.cell.api, "/v1/chat/completions", method="POST", key=caller.secret, body=one)
    assert served.status == 200 and engine.started == started + 1
