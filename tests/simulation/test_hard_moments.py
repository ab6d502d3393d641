"""Moments in which parts race each other or a store is away: each one was wrong once, or nearly."""

import asyncio
from dataclasses import replace

import pytest
from tests.simulation.stage import LONG_PROMPTS, blocker, end_of, run_script, subject, until_output

from weir import errors
from weir.app.running_view import gauges_of
from weir.core.endings import Status
from weir.core.ledger.records import SettleRecord
from weir.sim.clients import Habits
from weir.sim.world import SMALL_STEPS, Spec, World, play
from weir.storage.memory import Operation

FAST_SMALL_STEPS = Spec(slowness=2.0, coordinator=replace(SMALL_STEPS, delivery_step_tokens=4))


def test_a_slow_write_books_no_more_than_two_steps_ahead() -> None:
    """Protects the crash bound: a stream that waits for its step does not ask for further ones, so a crash over-books two."""

    async def script(world: World) -> None:
        world.send(subject())
        await asyncio.sleep(0.05)
        world.weather.extra_ms = 700
        await asyncio.sleep(1.6)  # the write under way carries everything that was asked for during the one before
        await world.crash(land=True)
        await world.start()

    end = end_of(run_script(script, FAST_SMALL_STEPS))
    assert isinstance(end, SettleRecord) and end.output_tokens > 0


def test_a_request_is_in_flight_until_its_end_is_durable() -> None:
    """Protects what operators watch: a whole answer that waits for its settlement has no hold any more and is in flight."""
    seen: list[tuple[float, float]] = []

    async def script(world: World) -> None:
        cell = world.cell
        world.send(subject(stream=False, max_output_tokens=30))
        await world.until(lambda: cell.book.open_holds == 1)
        world.weather.extra_ms = 700
        await world.until(lambda: not cell.book.open_holds)
        gauges = gauges_of(cell.coordinator, cell.executions, cell.book, cell.fleet, lambda: cell.journal.backlog)
        read = {name: value for name, _, _, value in gauges}
        seen.append((read["weir_requests_in_flight"], read["weir_open_holds"]))
        world.weather.clear()

    assert end_of(run_script(script)).status is Status.COMPLETED
    assert seen == [(1, 0)]


def test_slow_headers_book_no_more_than_two_steps_ahead() -> None:
    """Protects the crash bound: what waits for the headers is not delivered, and asks for nothing further."""

    async def script(world: World) -> None:
        world.send(subject(habits=Habits(headers_ms=5_000)))
        await asyncio.sleep(1)
        await world.crash(land=False)
        await world.start()

    end = end_of(run_script(script, FAST_SMALL_STEPS))
    assert isinstance(end, SettleRecord) and end.output_tokens == 4


def test_nothing_follows_the_end_of_a_stream() -> None:
    """Protects the terminal event: a reader that is slow to take it gets no keep-alive comment behind it."""
    gateway = replace(Spec().gateway, keep_alive_ms=500, slow_client_grace_ms=5_000)

    async def script(world: World) -> None:
        exchange = world.send(subject(max_output_tokens=4, habits=Habits(stuck_after=60)))
        await world.until(lambda: exchange.is_done)
        assert exchange.answer.record is not None

    run_script(script, Spec(gateway=gateway))


def test_an_idle_stream_is_kept_alive() -> None:
    """Protects streams behind proxies: while nothing comes, comments do."""
    gateway = replace(Spec().gateway, keep_alive_ms=500)

    async def script(world: World) -> None:
        exchange = world.send(subject(max_output_tokens=3))
        await world.until(lambda: exchange.is_done)
        assert exchange.answer.comments > 0

    run_script(script, Spec(gateway=gateway, slowness=1_000.0, engine_idle_ms=60_000))


@pytest.mark.parametrize("stream", [True, False])
def test_a_failure_is_answered_while_the_store_is_away(stream: bool) -> None:
    """Protects clients from outages: a failed request is answered within the store's bound, not when the store is back."""

    async def script(world: World) -> None:
        exchange = world.send(subject(stream=stream))
        await asyncio.sleep(1)
        world.weather.failing = True
        [name] = world.cell.supervisor.names
        world.cell.supervisor.lose(name)
        await asyncio.sleep(4)
        assert exchange.is_done
        world.weather.clear()

    assert end_of(run_script(script)).finish_reason == "replica_lost"


def test_a_deadline_does_not_move_while_the_id_is_looked_up() -> None:
    """Protects deadlines: they count from arrival, whatever the store takes to answer."""

    async def script(world: World) -> None:
        world.weather.extra_ms = 900
        world.send(subject(deadline_ms=2_000))
        await asyncio.sleep(2.3)

    end = end_of(run_script(script))
    assert end.finish_reason == "deadline" and end.timing.total_ms == pytest.approx(2_000, abs=5)


def test_a_deadline_that_passes_during_the_look_up_is_refused() -> None:
    """Protects the door: what can no longer be on time is not admitted."""

    async def script(world: World) -> None:
        world.weather.extra_ms = 900
        exchange = world.send(subject(deadline_ms=500))
        await world.until(lambda: exchange.is_done)
        assert isinstance(exchange.answer.refusal, errors.DeadlineUnmeetableNow)

    assert not run_script(script).ledger.records


def test_a_look_up_is_bounded() -> None:
    """Protects clients from a store that hangs: an acquire that needs it is refused after the store's bound."""

    async def script(world: World) -> None:
        world.weather.extra_ms = 60_000
        exchange = world.send(subject())
        await asyncio.sleep(2.5)
        assert isinstance(exchange.answer.refusal, errors.LedgerUnavailable)
        world.weather.clear()

    run_script(script)


def test_the_store_is_watched_while_rejections_cannot_be_counted() -> None:
    """Protects the watch over late records: flushing counters to a hanging store does not stop it."""

    async def script(world: World) -> None:
        async def hang(operation: Operation) -> None:
            await asyncio.sleep(30 if operation in ("count_rejections", "write") else 0.001)

        fair, world.ledger.delay = world.ledger.delay, hang
        world.send(subject("refused", prompt="nothing", deadline_ms=1))
        await asyncio.sleep(2)  # the flush hangs by now
        exchange = world.send(subject(stream=False))
        await asyncio.sleep(5)
        assert exchange.answer.record is not None
        assert exchange.answer.record.error_code == "ledger_unavailable"
        world.ledger.delay = fair

    run_script(script)


def test_a_restart_resolves_before_it_answers() -> None:
    """Protects look-ups and retries after a crash: nothing is ever shown as running that no process runs."""

    async def script(world: World) -> None:
        exchange = world.send(subject())
        await until_output(world, exchange)
        await world.crash(land=False)
        await world.start()
        found = await world.cell.inbox.cancel("tenant-0", "subject")
        assert found.record is not None and found.record.status is Status.FAILED

    run_script(script)


def test_a_cancel_of_an_answer_whose_settlement_is_unknown_is_not_a_lie() -> None:
    """Protects cancel by id: without a known terminal status it says that the ledger is unavailable."""

    async def script(world: World) -> None:
        exchange = world.send(subject(stream=False, max_output_tokens=30))
        await asyncio.sleep(0.3)
        world.weather.losing_answers = True
        await world.until(lambda: exchange.answer.record is not None)
        with pytest.raises(errors.LedgerUnavailable):
            await world.cell.inbox.cancel("tenant-0", "subject")
        world.weather.clear()

    run_script(script)


def test_output_waits_for_headers_and_is_not_charged_without_them() -> None:
    """Protects the delivered part: output that never left the gateway was not delivered."""

    async def script(world: World) -> None:
        world.weather.extra_ms = 1_500
        exchange = world.send(subject(deadline_ms=1_400))
        await world.until(lambda: exchange.is_done)
        assert exchange.answer.accepted is None
        world.weather.clear()

    records = run_script(script).ledger.records
    assert not any(isinstance(record, SettleRecord) and record.cost_microusd for record in records)


@pytest.mark.parametrize("headers_ms", [300, 1_000])
def test_an_end_while_the_headers_are_on_their_way(headers_ms: int) -> None:
    """Protects the delivered part: output that waited for the headers is dropped by the end, neither shown nor charged."""
    habits = Habits(headers_ms=headers_ms)
    order = subject(deadline_ms=600, habits=habits)

    async def script(world: World) -> None:
        world.send(order)

    world = run_script(script)
    end = end_of(world)
    assert end.finish_reason == "deadline" and isinstance(end, SettleRecord)
    assert (end.delivered_tokens > 0) == (headers_ms < 600) == bool(world.exchanges[0].answer.text)


def test_a_last_read_that_is_booked_in_part() -> None:
    """Protects streams: output held back after the engine's end is given up with the store, not with the deadline."""

    async def script(world: World) -> None:
        exchange = world.send(subject(max_output_tokens=40))
        await asyncio.sleep(0.5)
        world.weather.failing = True
        await asyncio.sleep(6)
        assert exchange.answer.record is not None
        world.weather.clear()

    assert end_of(run_script(script, Spec(engine_burst=400))).finish_reason == "ledger_unavailable"


def test_a_request_id_is_free_again_after_its_time() -> None:
    """Protects idempotency's bound: a day after its end an id may be used anew, and is refused before that."""

    async def script(world: World) -> None:
        first = world.send(subject(max_output_tokens=1))
        await world.until(lambda: first.is_done)
        again = world.send(subject(prompt=LONG_PROMPTS[1]))
        await world.until(lambda: again.is_done)
        assert isinstance(again.answer.refusal, errors.RequestIdReused)
        await asyncio.sleep(86_400)
        anew = world.send(subject(prompt=LONG_PROMPTS[1]))
        await world.until(lambda: anew.is_done)

    assert end_of(play(Spec(), 1, script, until_ms=200_000_000), execution=2).status is Status.COMPLETED


def test_a_closing_cell_does_not_wait_for_a_store_that_stays_away() -> None:
    """Protects shutdown: what cannot be written is left to recovery, and the process ends."""

    async def script(world: World) -> None:
        world.send(blocker())
        exchange = world.send(subject())
        await until_output(world, exchange)
        world.weather.failing = True
        await world.shut_down(100)
        world.weather.clear()
        await world.start()
        assert end_of(world).finish_reason == "coordinator_lost"

    run_script(script)
