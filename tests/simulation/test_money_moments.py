"""Money and limits at the moments that worlds meet only now and then, each played out by itself."""

import asyncio
from dataclasses import replace

import pytest
from tests.simulation.stage import LONG_PROMPTS, blocker, cost_of, end_of, run_script, subject, until_output

from weir import errors
from weir.core.ledger.records import HoldRecord, SettleRecord
from weir.core.metering import Price
from weir.core.tenancy import Limits, Scope
from weir.core.windows import FormerZone
from weir.engines.simulated_text import count_prompt_tokens
from weir.ports import EngineCall
from weir.sim.random_source import seeded_random
from weir.sim.world import BATCH_CALLER, PRICE, REVISION, SMALL_STEPS, Order, Spec, World

TENANT = Scope("tenant-0")
DAY_MS = 86_400_000
NO_REUSE = replace(SMALL_STEPS, request_id_ms=1_000 * DAY_MS)
INPUT = count_prompt_tokens(LONG_PROMPTS[0], chat=True)


def limited(**limits: int) -> Spec:
    """A world in which tenant 0 has these limits."""
    return Spec(limits={TENANT: Limits(**limits)}, coordinator=NO_REUSE)


async def ask(world: World, name: str, max_output_tokens: int = 8) -> errors.WeirError | None:
    """One request of tenant 0 to its end; the refusal, if it was refused."""
    exchange = world.send(Order(f"ask {name}", request_id=name, max_output_tokens=max_output_tokens))
    await world.until(lambda: exchange.is_done)
    return exchange.answer.refusal


def windows_of(world: World, request_id: str) -> tuple[str, ...]:
    """The windows that a request's hold counts in."""
    holds = [record for record in world.ledger.records if isinstance(record, HoldRecord)]
    return next(hold.windows for hold in holds if hold.id.request_id == request_id)


# ── settled once ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_settlement_after_recovery_changes_nothing() -> None:
    """Protects balances: what recovery ended stays as it ended it; the late settlement is kept beside and counted."""

    async def script(world: World) -> None:
        exchange = world.send(subject())
        await until_output(world, exchange)
        await world.crash(land=False)
        await world.start()
        world.settle_late(seeded_random(1, "late"))

    world = run_script(script)
    assert end_of(world).finish_reason == "coordinator_lost" and cost_of(end_of(world)) == 0
    assert world.checker.durable.late_count == 1


def test_a_finish_that_is_heard_again_changes_nothing() -> None:
    """Protects settlements: the first report counts, whatever a repetition says and when it comes."""

    async def script(world: World) -> None:
        for number in range(12):
            world.send(Order(f"ask {number}", max_output_tokens=8, stream=number % 2 == 0))
        await asyncio.sleep(10)

    run_script(script, Spec(replicas=4, concurrency=4, echoes=1.0))


def test_the_report_of_a_lost_attempt_that_is_heard_again() -> None:
    """Protects the second attempt: it is not ended by a repetition of what ended the first one."""

    tried: set[object] = set()

    def first_fails(call: EngineCall) -> tuple[int, errors.WeirError] | None:
        is_first = call.prompt not in tried
        tried.add(call.prompt)
        return (0, errors.EngineError()) if is_first else None

    async def script(world: World) -> None:
        world.cell.engine.fault_plan = first_fails
        for number in range(3):
            world.send(Order(f"ask {number}", request_id=f"ask-{number}", max_output_tokens=300))
        await asyncio.sleep(10)

    world = run_script(script, Spec(replicas=2, concurrency=4, echoes=1.0))
    assert {end_of(world, f"ask-{number}").status for number in range(3)} == {"completed"}


def test_a_process_that_was_superseded_writes_nothing() -> None:
    """Protects the single writer: what a stale process decides is refused by the store, and its clients get no more."""

    async def script(world: World) -> None:
        exchange = world.send(subject())
        await until_output(world, exchange)
        world.weather.extra_ms = 300
        world.send(blocker())
        await asyncio.sleep(0.1)
        old = world.cell
        await world.take_over()
        world.weather.clear()
        assert exchange.cut and old.journal.backlog and all(service.done() for service in old.services)
        again = world.send(blocker(1))
        await world.until(lambda: again.is_done)

    end = end_of(run_script(script))
    assert isinstance(end, SettleRecord) and end.finish_reason == "coordinator_lost"


# ── limits and prices that change ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["spend_microusd_per_day", "spend_microusd_per_month", "spend_microusd_lifetime"])
def test_a_limit_lowered_below_what_is_spent(name: str) -> None:
    """Protects what runs and the new limit: nothing is cut, nothing more is admitted, and raised again it counts from there."""

    async def script(world: World) -> None:
        running = world.send(subject(max_output_tokens=100))
        await until_output(world, running)
        world.change(limits={TENANT: Limits(**{name: 10})})
        assert isinstance(await ask(world, "refused"), errors.BudgetExhausted)
        await world.until(lambda: running.is_done)
        world.change(limits={})
        assert await ask(world, "unlimited") is None
        spent, needed = world.checker.tally.spent(TENANT), PRICE.cost(count_prompt_tokens("ask again", chat=True), 0, 8)
        world.change(limits={TENANT: Limits(**{name: spent + needed - 1})})
        assert isinstance(await ask(world, "again"), errors.BudgetExhausted)
        world.change(limits={TENANT: Limits(**{name: spent + needed})})
        assert await ask(world, "again") is None

    world = run_script(script, limited(**{name: 200}))
    assert end_of(world).status == "completed"


def test_a_price_is_pinned_by_the_hold() -> None:
    """Protects tenants from a price that comes while they wait: what is settled is the price of the hold, also by recovery."""

    def dearer(world: World) -> None:
        price = replace(PRICE, version=2, input_microusd=9_000_000, output_microusd=9_000_000)
        prices = {**world.snapshot.prices, (REVISION.id, 2): price}
        world.change(revisions={REVISION.id: replace(REVISION, price=price)}, prices=prices)

    async def script(world: World) -> None:
        running, lost = world.send(subject(max_output_tokens=60)), world.send(subject("lost", prompt=LONG_PROMPTS[1]))
        await until_output(world, lost)
        dearer(world)
        await world.until(lambda: running.is_done)
        await world.crash(land=False)
        await world.start()
        assert await ask(world, "dearer") is None

    world = run_script(script)
    ends = [end for name in ("subject", "lost", "dearer") if isinstance(end := end_of(world, name), SettleRecord)]
    assert ends[0].cost_microusd == PRICE.cost(INPUT, 0, 60)
    assert ends[1].platform_microusd == PRICE.cost(ends[1].input_tokens, 0, ends[1].output_tokens)
    assert ends[2].cost_microusd == 9 * (ends[2].input_tokens + ends[2].output_tokens)


def test_what_batch_pays_is_pinned_by_the_hold() -> None:
    """Protects discounts: the part that was held is settled, also by recovery, and budgets and reports count that."""

    def change(world: World) -> None:
        price = replace(PRICE, version=2, batch_percent=33)
        prices = {**world.snapshot.prices, (REVISION.id, 2): price}
        world.change(revisions={REVISION.id: replace(REVISION, price=price)}, prices=prices)

    async def script(world: World) -> None:
        running = world.send(subject(max_output_tokens=60, caller=BATCH_CALLER))
        lost = world.send(subject("lost", prompt=LONG_PROMPTS[1], caller=BATCH_CALLER))
        await until_output(world, lost)
        change(world)
        await world.until(lambda: running.is_done)
        await world.crash(land=False)
        await world.start()
        after = world.send(subject("after", prompt=LONG_PROMPTS[2], max_output_tokens=60, caller=BATCH_CALLER))
        await world.until(lambda: after.is_done)

    half, third = Price(1, 100_000, 25_000, 300_000), Price(2, 66_000, 16_500, 198_000)
    world = run_script(script)
    ends = [end for name in ("subject", "lost", "after") if isinstance(end := end_of(world, name), SettleRecord)]
    assert ends[0].cost_microusd == half.cost(INPUT, 0, 60)
    assert ends[1].platform_microusd == half.cost(ends[1].input_tokens, 0, ends[1].output_tokens)
    assert ends[2].cost_microusd == third.cost(ends[2].input_tokens, 0, 60)
    assert world.checker.tally.spent(TENANT) == ends[0].cost_microusd + ends[2].cost_microusd


# ── clocks ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("spends", [True, False])
def test_a_clock_set_back_after_a_restart(spends: bool) -> None:
    """Protects budgets: a window that was present at the start stays, so that none comes back whose balance was not read."""

    async def script(world: World) -> None:
        assert await ask(world, "first") is None
        world.step_wall(40 * DAY_MS)
        await world.shut_down(100)
        await world.start()
        if spends:
            assert await ask(world, "second") is None
        world.clock.step_wall(-40 * DAY_MS)
        assert await ask(world, "third") is None

    world = run_script(script, limited(tokens_per_month=60))
    assert windows_of(world, "first")[:2] == ("day/2026-01-01", "month/2026-01")
    assert windows_of(world, "third")[:2] == ("day/2026-02-10", "month/2026-02")


@pytest.mark.parametrize(
    ("hours", "window"), [(0, "day/2026-01-01"), (23, "day/2026-01-01"), (25, "day/2026-01-02"), (36, "day/2026-01-03")]
)
def test_a_tenant_that_moves(hours: int, window: str) -> None:
    """Protects budgets: a new zone counts from the next window on, and the day is never cut or doubled."""

    async def script(world: World) -> None:
        tenant = world.snapshot.tenants["tenant-0"]
        former = (FormerZone(tenant.time_zone, world.clock.wall_ms()),)
        moved = replace(tenant, time_zone="Pacific/Kiritimati", former_time_zones=former)
        world.change(tenants={**world.snapshot.tenants, tenant.name: moved})
        world.step_wall(hours * 3_600_000)
        assert await ask(world, "subject") is None

    assert windows_of(run_script(script, limited(tokens_per_day=500)), "subject")[0] == window
