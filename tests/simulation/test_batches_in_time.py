"""Batches through deaths, budgets, cancels and their time, on the real coordinator, gateway and ledger in virtual time."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from tests.simulation.batch_world import Batches
from tests.simulation.stage import run_script

from weir import errors
from weir.batches import file_keys
from weir.batches.line_log import Made
from weir.core.batches.batch_records import BatchStatus
from weir.core.tenancy import Limits, Scope
from weir.sim.random_source import seeded_random
from weir.sim.world import SMALL_STEPS, Spec, World

LINES = 40
IN_FLIGHT = 8
SPEC = Spec(replicas=2, concurrency=4, coordinator=SMALL_STEPS)


def bodies_of(lines: int = LINES, most: int = 24) -> list[dict[str, Any]]:
    """Lines of native generations, each with a prompt of its own."""
    return [{"input": f"line {number} asks for something long", "max_output_tokens": most} for number in range(1, lines + 1)]


def played(script: Callable[[World, Batches], Awaitable[None]], spec: Spec = SPEC, seed: int = 1) -> World:
    """Run it with a worker from the start."""

    async def live(world: World) -> None:
        batches = Batches(world)
        batches.live()
        await script(world, batches)
        last = batches.lives[-1]
        last.worker.stop()
        await last.task

    return run_script(live, spec, seed)


async def check_whole(batches: Batches, batch: Any, lines: int = LINES) -> None:
    """Every line is answered once and charged once, and nothing else is left."""
    output, error = await batches.results(batch)
    assert error == [] and Counter(line["custom_id"] for line in output) == Counter(f"line-{n}" for n in range(1, lines + 1))
    assert all(line["response"]["status_code"] == 200 and line["response"]["body"]["output"] for line in output)
    paid = batches.paid(batch)
    assert {name: len(ends) for name, ends in paid.items()} == {f"{batch.record.id}:{n}": 1 for n in range(1, lines + 1)}
    assert sum(line["response"]["body"]["usage"]["cost_microusd"] for line in output) == sum(
        end.cost_microusd for ends in paid.values() for end in ends
    )
    assert await batches.left_over() == []


def code_of(line: Any) -> str:
    """Of an error: of a refusal, or of a generation that failed."""
    body = line["response"]["body"]
    code: str = body["code"] if "code" in body else body["error"]["code"]
    return code


def test_a_batch_runs_to_its_end() -> None:
    """Protects the plain case: every line once, in one file."""

    async def script(world: World, batches: Batches) -> None:
        batch = await batches.submit(bodies_of())
        done = await batches.until_done(batch)
        assert done.status is BatchStatus.COMPLETED and (done.counts.completed, done.counts.failed) == (LINES, 0)
        await check_whole(batches, batch)
        assert set(batches.started.values()) == {1}

    played(script)


@pytest.mark.parametrize("seed", range(12))
def test_deaths_at_any_moment(seed: int) -> None:
    """Protects results and money: whatever dies whenever, each line is told once and charged once."""

    async def script(world: World, batches: Batches) -> None:
        chance = seeded_random(seed, "deaths")
        batch = await batches.submit(bodies_of())
        deaths = 0
        while (await batches.view(batch)).end is None and deaths < 6:
            await asyncio.sleep(chance.uniform(0.0, 2.5))
            await batches.die(land=chance.random() < 0.5)
            deaths += 1
        done = await batches.until_done(batch)
        assert done.status is BatchStatus.COMPLETED and done.counts.completed == LINES
        await check_whole(batches, batch)
        assert sum(batches.started.values()) <= LINES + deaths * IN_FLIGHT

    played(script, seed=seed)


@pytest.mark.parametrize("seed", range(6))
def test_two_workers_at_once(seed: int) -> None:
    """Protects the case that a worker was taken for dead: both run all lines, and each is told once and charged once."""

    async def script(world: World, batches: Batches) -> None:
        batch = await batches.submit(bodies_of())
        await asyncio.sleep(0.1 * seed)
        second = batches.live()
        done = await batches.until_done(batch)
        assert done.status is BatchStatus.COMPLETED
        second.worker.stop()
        batches.lives[0].worker.stop()
        await asyncio.wait([life.task for life in batches.lives])
        await check_whole(batches, batch)

    played(script, seed=seed)


@pytest.mark.parametrize("seed", range(20))
def test_the_slower_of_two_workers_leaves_nothing(seed: int) -> None:
    """Protects results that are there: who still runs a batch that another one ended adds no file, no note, and lives on."""

    async def script(world: World, batches: Batches) -> None:
        batch = await batches.submit(bodies_of(10))
        await asyncio.sleep(0.05 * seed)
        batches.live()
        done = await batches.until_done(batch)
        await asyncio.sleep(30)
        for life in batches.lives:
            life.worker.stop()
        await asyncio.gather(*(life.task for life in batches.lives))
        await check_whole(batches, batch, 10)
        assert done.end is not None and done.end.output is not None
        records = [key for key in batches.store_keys(batch.record.tenant) if "/files/" in key and key.endswith(".json")]
        assert {key.rpartition("/")[2] for key in records} == {f"{batch.record.input_file_id}.json", f"{done.end.output}.json"}

    played(script, seed=seed)


@pytest.mark.parametrize("seed", range(6))
def test_a_store_that_fails_now_and_then(seed: int) -> None:
    """Protects lines from a disk or bucket that comes and goes: they wait for it, and are told and charged once."""

    async def script(world: World, batches: Batches) -> None:
        batch = await batches.submit(bodies_of())
        chance = seeded_random(seed, "files")
        batches.store.fault = lambda operation: chance.random() < 0.15
        await asyncio.sleep(60)
        batches.store.fault = None
        done = await batches.until_done(batch)
        assert done.status is BatchStatus.COMPLETED
        await check_whole(batches, batch)

    played(script, seed=seed)


def test_one_batch_that_cannot_be_read_stops_no_other() -> None:
    """Protects every tenant from one damaged note, wherever it is: the worker lives on, and runs what it can read."""

    async def script(world: World, batches: Batches) -> None:
        await batches.store.create(file_keys.open_batch("batch_00000000001"), b"{no")
        await batches.store.create(file_keys.open_batch("batch_00000000002"), b'{"tenant": "../up"}')
        broken = await batches.submit(bodies_of(3))
        made = [Made(1, "gen-1", b"\xc1")]  # of a generation that is charged for
        group = f"{file_keys.groups_folder(broken.record.tenant, broken.record.id)}/{0:09d}.earlier"
        await batches.store.create(group, msgspec.msgpack.encode(made)[:-1])
        batch = await batches.submit(bodies_of(LINES, 25))
        done = await batches.until_done(batch)
        assert done.status is BatchStatus.COMPLETED and not batches.lives[-1].task.done()
        await batches.store.replace(group, msgspec.msgpack.encode(["no entry", 1]))
        await asyncio.sleep(20)
        assert not batches.lives[-1].task.done() and (await batches.view(broken)).end is None
        await batches.store.delete(group)
        assert (await batches.until_done(broken)).status is BatchStatus.COMPLETED

    played(script)


def test_a_damaged_batch_ends_with_its_time() -> None:
    """Protects tenants from batches without an end: what cannot be read fails once it expires or is cancelled."""

    async def script(world: World, batches: Batches) -> None:
        expiring, given_up = await batches.submit(bodies_of(3), "60s"), await batches.submit(bodies_of(3, 25))
        for batch in (expiring, given_up):
            folder = file_keys.groups_folder(batch.record.tenant, batch.record.id)
            await batches.store.create(f"{folder}/{0:09d}.earlier", b"\xc1")
        await asyncio.sleep(30)
        assert (await batches.view(expiring)).end is None and (await batches.view(given_up)).end is None
        await batches.desk.cancel(batches.principal(), given_up.record.id)
        for batch in (given_up, expiring):
            done = await batches.until_done(batch, bound_s=150)
            assert done.status is BatchStatus.FAILED and done.end is not None
            assert [fault.code for fault in done.end.faults] == ["batch_damaged"]
        assert await batches.left_over() == []

    played(script)


def test_a_store_that_is_away_damages_nothing() -> None:
    """Protects results: a batch whose time passes while nothing can be read still tells what is done."""

    async def script(world: World, batches: Batches) -> None:
        batch = await batches.submit(bodies_of(LINES, 100), "8s")
        await batches.until_done(batch, lines=1)
        batches.store.fault = lambda operation: operation == "read"
        await batches.die(land=True)
        await asyncio.sleep(30)
        batches.store.fault = None
        done = await batches.until_done(batch)
        assert done.status is BatchStatus.EXPIRED and 0 < done.counts.completed < LINES
        assert done.counts.completed + done.counts.failed == LINES

    played(script)


def test_a_death_behind_its_end_leaves_no_output() -> None:
    """Protects tenants' outputs: what lines became is deleted once a batch has ended, by whichever worker."""

    async def script(world: World, batches: Batches) -> None:
        batch = await batches.submit(bodies_of(10))
        batches.store.fault = lambda operation: operation == "delete"
        await batches.until_done(batch)
        await batches.die(land=True)
        batches.store.fault = None
        await asyncio.sleep(30)
        await check_whole(batches, batch, 10)

    played(script)


@pytest.mark.parametrize("seed", range(4))
def test_a_ledger_that_fails_now_and_then(seed: int) -> None:
    """Protects lines from a database that comes and goes."""

    async def script(world: World, batches: Batches) -> None:
        batch = await batches.submit(bodies_of())
        chance = seeded_random(seed, "ledger")
        for _ in range(4):
            await asyncio.sleep(chance.uniform(0.1, 1.0))
            world.weather.failing = True
            await asyncio.sleep(3)
            world.weather.clear()
        done = await batches.until_done(batch)
        assert done.status is BatchStatus.COMPLETED
        await check_whole(batches, batch)

    played(script, seed=seed)


def test_narrow_limits_are_waited_for() -> None:
    """Protects lines from refusals that waiting cures: of rate, tokens and concurrency none becomes an error."""
    limits = Limits(requests_per_minute=30, tokens_per_minute=2_000, concurrency=2)

    async def script(world: World, batches: Batches) -> None:
        batch = await batches.submit(bodies_of())
        done = await batches.until_done(batch)
        assert done.status is BatchStatus.COMPLETED
        await check_whole(batches, batch)

    played(script, replace(SPEC, limits={Scope("tenant-0"): limits}))


def test_a_day_s_budget_pauses_it_until_tomorrow() -> None:
    """Protects budgets: it waits with its reason and the time, and goes on by itself, as often as that takes."""
    lines = 12

    async def script(world: World, batches: Batches) -> None:
        batch = await batches.submit(bodies_of(lines), "168h")
        await world.until(lambda: bool(batches.paid(batch)))
        world.change(limits={Scope("tenant-0"): Limits(tokens_per_day=300)})
        pauses = 0
        while (view := await batches.view(batch)).end is None and pauses < 4:
            if view.progress is not None and view.progress.paused_reason is not None:
                assert view.progress.paused_reason == "budget_exhausted" and view.progress.resumes_ms is not None
                assert 0 < view.counts.completed < lines and view.counts.failed == 0
                world.step_wall(view.progress.resumes_ms - world.clock.wall_ms() + 1)
                pauses += 1
                await asyncio.sleep(40)  # it asks again every half a minute, should somebody raise the budget
            await asyncio.sleep(1)
        done = await batches.until_done(batch)
        assert done.status is BatchStatus.COMPLETED and pauses >= 1
        await check_whole(batches, batch, lines)

    played(script)


def test_a_budget_without_a_reset_ends_it_at_its_time() -> None:
    """Protects what is done: a batch whose money is used up expires with it, and the rest is named in its errors."""
    lines = 12

    async def script(world: World, batches: Batches) -> None:
        batch = await batches.submit(bodies_of(lines), "10m")
        await world.until(lambda: bool(batches.paid(batch)))
        world.change(limits={Scope("tenant-0"): Limits(tokens_lifetime=200)})
        done = await batches.until_done(batch)
        assert done.status is BatchStatus.EXPIRED and 0 < done.counts.completed < lines
        output, error = await batches.results(batch)
        assert len(output) == done.counts.completed and len(error) == done.counts.failed == lines - len(output)
        assert {line["error"]["code"] for line in error} == {"batch_expired"}
        assert len({line["custom_id"] for line in (*output, *error)}) == lines
        assert len(batches.paid(batch)) == len(output)

    played(script)


def test_more_than_a_limit_allows_in_all_is_refused() -> None:
    """Protects budgets at creation, and at the start where the gateway that took it knows no limits."""

    async def script(world: World, batches: Batches) -> None:
        with pytest.raises(errors.ExceedsLimitCapacity):
            await batches.submit(bodies_of())
        whole = world.snapshot
        world.snapshot = replace(whole, limits={})
        batch = await batches.submit(bodies_of())
        world.snapshot = whole
        done = await batches.until_done(batch)
        assert done.status is BatchStatus.FAILED and done.end is not None
        assert [fault.code for fault in done.end.faults] == ["exceeds_limit_capacity"]
        assert await batches.left_over() == [] and not batches.paid(batch)

    played(script, replace(SPEC, limits={Scope("tenant-0"): Limits(tokens_per_day=500)}))


def test_a_cancel_keeps_what_is_done() -> None:
    """Protects a tenant that gives up: lines that run are waited for, none begins, the rest is named in the errors."""

    async def script(world: World, batches: Batches) -> None:
        batch = await batches.submit(bodies_of())
        await batches.until_done(batch, lines=5)
        view = await batches.desk.cancel(batches.principal(), batch.record.id)
        assert view.status is BatchStatus.CANCELLING
        done = await batches.until_done(batch)
        assert done.status is BatchStatus.CANCELLED and 5 <= done.counts.completed < LINES
        output, error = await batches.results(batch)
        assert len(output) == done.counts.completed == len(batches.paid(batch))
        assert {line["error"]["code"] for line in error} == {"batch_cancelled"} and len(output) + len(error) == LINES

    played(script)


def test_a_second_try_at_its_results_writes_the_same() -> None:
    """Protects lines that were charged for: with one result file written, no clock that steps back begins others."""

    async def script(world: World, batches: Batches) -> None:
        batch = await batches.submit(bodies_of(LINES, 100), "5s")
        commits = 0

        def second_commit(operation: str) -> bool:
            nonlocal commits
            commits += operation == "commit"
            return operation == "commit" and commits == 2

        batches.store.fault = second_commit
        await world.until(lambda: commits == 2)
        world.step_wall(-60_000)
        done = await batches.until_done(batch)
        output, error = await batches.results(batch)
        assert 0 < len(output) < LINES and len({line["custom_id"] for line in (*output, *error)}) == LINES
        assert (done.counts.completed, done.counts.failed) == (len(output), len(error))
        assert len(batches.paid(batch)) == len(output) == LINES - len(error)

    played(script)


def test_a_disabled_tenant_s_batch_ends_in_its_time() -> None:
    """Protects windows and cancels: also what never began, as long as its tenant is disabled, expires or is given up."""

    async def script(world: World, batches: Batches) -> None:
        expiring, given_up = await batches.submit(bodies_of(3), "30s"), await batches.submit(bodies_of(3, 25))
        tenants = {**world.snapshot.tenants, "tenant-0": replace(world.snapshot.tenants["tenant-0"], disabled=True)}
        world.change(tenants=tenants)
        await asyncio.sleep(10)
        await batches.desk.cancel(batches.principal(), given_up.record.id)
        for batch, status in ((given_up, BatchStatus.CANCELLED), (expiring, BatchStatus.EXPIRED)):
            done = await batches.until_done(batch, bound_s=60)
            assert done.status is status and done.counts.failed == 3
        assert await batches.left_over() == []

    played(script)


def test_wrong_lines_are_errors_and_the_others_go_on() -> None:
    """Protects a batch from a few of its lines: what can never work is told once, in its surface's shape, and costs nothing."""
    wrong = [
        {"input": "a wrong field", "temperature": 9},
        {"input": "a stream", "stream": True},
        {"input": "too much", "max_output_tokens": 100_000},
    ]

    async def script(world: World, batches: Batches) -> None:
        right = bodies_of(6)
        batch = await batches.submit([*right[:3], *wrong, *right[3:]])
        done = await batches.until_done(batch)
        assert done.status is BatchStatus.COMPLETED and (done.counts.completed, done.counts.failed) == (6, 3)
        _, error = await batches.results(batch)
        codes = [(line["custom_id"], line["response"]["status_code"], code_of(line)) for line in error]
        assert sorted(codes) == [
            ("line-4", 400, "invalid_request"),
            ("line-5", 400, "invalid_request"),
            ("line-6", 400, "invalid_request"),
        ]
        assert len(batches.paid(batch)) == 6

    played(script)


def test_a_disabled_tenant_is_waited_for_and_a_revoked_key_is_not() -> None:
    """Protects both: what an administrator may undo pauses the batch, what is for good ends its lines."""

    async def script(world: World, batches: Batches) -> None:
        first, second = await batches.submit(bodies_of()), await batches.submit(bodies_of(LINES, 25), tenant=1)
        await batches.until_done(first, lines=3)
        await batches.until_done(second, lines=3)
        tenants = {**world.snapshot.tenants, "tenant-0": replace(world.snapshot.tenants["tenant-0"], disabled=True)}
        keys = {name: replace(key, revoked=key.tenant == "tenant-1") for name, key in world.snapshot.keys.items()}
        world.change(tenants=tenants, keys=keys)
        ended = await batches.until_done(second)
        assert ended.status is BatchStatus.COMPLETED and 3 <= ended.counts.completed < LINES
        _, error = await batches.results(second)
        assert {code_of(line) for line in error} == {"revoked"}
        await asyncio.sleep(5)
        waiting = await batches.view(first)
        assert waiting.progress is not None and waiting.progress.paused_reason == "forbidden" and waiting.counts.failed == 0
        world.change(tenants={**tenants, "tenant-0": replace(tenants["tenant-0"], disabled=False)})
        assert (await batches.until_done(first)).status is BatchStatus.COMPLETED
        await check_whole(batches, first)

    played(script)


def test_paused_batches_leave_their_places_to_others() -> None:
    """Protects tenants from each other: as many batches as may run wait for budgets, and another tenant's runs all the same."""
    waiting = range(4)

    async def script(world: World, batches: Batches) -> None:
        bodies = [
            [{"input": f"{n}-{m}-{line}", "max_output_tokens": 100} for line in range(20)] for n in waiting for m in (0, 1)
        ]
        paused = [await batches.submit(lines, tenant=place // 2) for place, lines in enumerate(bodies)]
        for batch in paused:
            await batches.until_done(batch, lines=1)
        world.change(limits={Scope(f"tenant-{number}"): Limits(tokens_lifetime=300) for number in waiting})
        await asyncio.sleep(30)
        other = await batches.submit(bodies_of(4), tenant=4)
        assert (await batches.until_done(other, bound_s=60)).status is BatchStatus.COMPLETED
        assert all([(await batches.view(batch)).counts.failed == 0 for batch in paused])
        world.change(limits={})
        for batch in paused:
            assert (await batches.until_done(batch)).status is BatchStatus.COMPLETED

    played(script, replace(SPEC, tenants=5))
