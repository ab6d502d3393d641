"""Each ending of the table that can occur: settled once, its lane freed, one status everywhere, and the right one pays.

The audit at the end of each world checks lanes, holds, lookups, usage rows and amounts; here stands which ending, and who pays.
"""

import asyncio
from dataclasses import replace

import pytest
from tests.simulation.stage import LONG_PROMPTS, Script, blocker, cost_of, end_of, has_end, run_script, subject, until_output

from weir import errors
from weir.core.endings import Status
from weir.core.ledger.records import ReleaseRecord
from weir.core.registry.snapshot import Snapshot
from weir.sim.clients import Habits
from weir.sim.world import SMALL_STEPS, Spec, World

ONE_LANE = Spec(concurrency=1)


def _check(script: Script, ending: str, *, pays: bool, spec: Spec | None = None) -> World:
    """The subject ends so, and its tenant pays something or nothing."""
    world = run_script(script, spec)
    end = end_of(world)
    assert f"{end.status}/{end.finish_reason}" == ending
    assert (cost_of(end) > 0) == pays
    return world


def _alone(**changes: object) -> Script:
    async def script(world: World) -> None:
        world.send(subject(**changes))  # type: ignore[arg-type]

    return script


def _behind_blocker(**changes: object) -> Script:
    async def script(world: World) -> None:
        world.send(blocker())
        await asyncio.sleep(0.2)
        world.send(subject(**changes))  # type: ignore[arg-type]

    return script


def _revoked(snapshot: Snapshot) -> Snapshot:
    keys = {digest: replace(key, revoked=key.tenant == "tenant-0") for digest, key in snapshot.keys.items()}
    return replace(snapshot, version=snapshot.version + 1, keys=keys)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("most", "ending"), [(400, "completed/stop"), (5, "completed/length")])
def test_completed(stream: bool, most: int, ending: str) -> None:
    """Protects the ordinary endings: the tenant pays what the engine measured."""
    _check(_alone(stream=stream, max_output_tokens=most), ending, pays=True)


# ── cancelled ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("cancels_after_ms", [1_000, 2_500])
def test_cancelled_by_id_while_it_runs(stream: bool, cancels_after_ms: int) -> None:
    """Protects cancel by id: the tenant pays what was generated, and the caller of cancel sees the terminal body."""
    habits = Habits(cancels_after_ms=cancels_after_ms)
    world = _check(_alone(stream=stream, habits=habits), "cancelled/client", pays=True)
    [exchange] = world.exchanges
    assert exchange.cancelled is not None and exchange.cancelled.status is Status.CANCELLED
    assert exchange.answer.record is not None


@pytest.mark.parametrize("stream", [True, False])
def test_cancelled_by_id_in_the_queue(stream: bool) -> None:
    """Protects the queue: a cancelled entry leaves at once, is released, and costs nothing."""
    world = _check(
        _behind_blocker(stream=stream, habits=Habits(cancels_after_ms=500)), "cancelled/client", pays=False, spec=ONE_LANE
    )
    assert isinstance(end_of(world), ReleaseRecord)


@pytest.mark.parametrize("stream", [True, False])
def test_cancelled_by_id_before_the_first_token(stream: bool) -> None:
    """Protects the table: nothing generated, nothing charged."""
    slow = Spec(slowness=400.0)
    _check(_alone(stream=stream, habits=Habits(cancels_after_ms=300)), "cancelled/client", pays=False, spec=slow)


@pytest.mark.parametrize("after_ms", [0, 1, 3, 5, 8, 12])
def test_cancelled_by_id_as_it_arrives(after_ms: int) -> None:
    """Protects against the race of a cancel with its acquire: unknown, or terminal, never left running."""

    async def script(world: World) -> None:
        exchange = world.send(subject(habits=Habits(cancels_after_ms=after_ms)))
        await world.until(lambda: exchange.is_done)
        if exchange.cancelled is not None:
            assert exchange.cancelled.status is Status.CANCELLED

    run_script(script)


@pytest.mark.parametrize("stream", [True, False])
def test_disconnected_while_it_runs(stream: bool) -> None:
    """Protects against paying GPUs for nobody: the engine stops, and the tenant pays what was generated."""
    _check(_alone(stream=stream, habits=Habits(leaves_after_ms=1_000)), "cancelled/disconnect", pays=True)


def test_disconnected_after_some_bytes() -> None:
    """Protects streams: a client that leaves in the middle of its output ends its request."""
    _check(_alone(habits=Habits(leaves_after_bytes=500)), "cancelled/disconnect", pays=True)


@pytest.mark.parametrize("stream", [True, False])
def test_disconnected_in_the_queue(stream: bool) -> None:
    """Protects the queue: who left does not wait in it."""
    world = _check(
        _behind_blocker(stream=stream, habits=Habits(leaves_after_ms=300)), "cancelled/disconnect", pays=False, spec=ONE_LANE
    )
    assert isinstance(end_of(world), ReleaseRecord)


def test_disconnected_before_the_first_token() -> None:
    """Protects the table: nothing generated, nothing charged."""
    _check(_alone(habits=Habits(leaves_after_ms=300)), "cancelled/disconnect", pays=False, spec=Spec(slowness=400.0))


def test_disconnected_before_a_decision_leaves_no_row() -> None:
    """Protects the ledger: a client that leaves while its id is looked up was never admitted."""

    async def script(world: World) -> None:
        world.weather.extra_ms = 300
        world.send(subject(habits=Habits(leaves_after_ms=100)))
        await asyncio.sleep(1)
        world.weather.clear()

    assert not run_script(script).ledger.records


def test_a_stuck_reader_is_slow_client() -> None:
    """Protects lanes against readers that stop: cancelled after the grace, charged what was generated."""
    _check(_alone(habits=Habits(stuck_after=200)), "cancelled/slow_client", pays=True, spec=Spec(slowness=60.0))


def test_a_slow_reader_gets_everything() -> None:
    """Protects backpressure: a reader that is slow but steady is served to the end while the engine is paused for it."""
    gateway = replace(Spec().gateway, stream_buffer_bytes=2_000, slow_client_grace_ms=20_000)
    spec = Spec(gateway=gateway, slowness=1.0)
    world = _check(_alone(habits=Habits(bytes_per_s=1_500)), "completed/stop", pays=True, spec=spec)
    assert len(world.exchanges[0].answer.text) > 500


def test_revoked_while_it_runs() -> None:
    """Protects revocation: running work of a revoked key is cancelled and charged what was generated."""

    async def script(world: World) -> None:
        exchange = world.send(subject())
        await until_output(world, exchange, 20)
        world.publish(_revoked(world.snapshot))
        assert exchange.is_done or exchange.answer.record is None
        world.send(subject("second", prompt="too late"))

    world = _check(script, "cancelled/revoked", pays=True)
    assert isinstance(world.exchanges[1].answer.refusal, errors.Revoked)


def test_revoked_in_the_queue() -> None:
    """Protects revocation: what waits is refused its turn at once."""

    async def script(world: World) -> None:
        await _behind_blocker()(world)
        await asyncio.sleep(0.3)
        world.publish(_revoked(world.snapshot))

    _check(script, "cancelled/revoked", pays=False, spec=ONE_LANE)


# ── expired ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stream", [True, False])
def test_the_bound_of_waiting(stream: bool) -> None:
    """Protects the queue's bound: an entry that reaches it ends, whatever its deadline, and costs nothing."""
    spec = replace(ONE_LANE, slowness=30.0, coordinator=replace(SMALL_STEPS, queue_wait_ms=3_000))
    _check(_behind_blocker(stream=stream), "expired/queue_wait", pays=False, spec=spec)


def test_the_deadline_in_the_queue() -> None:
    """Protects deadlines: it ends in the queue as expired, and costs nothing."""
    _check(_behind_blocker(deadline_ms=3_000), "expired/deadline", pays=False, spec=replace(ONE_LANE, slowness=30.0))


@pytest.mark.parametrize(("stream", "pays"), [(True, True), (False, False)])
def test_the_deadline_while_it_runs(stream: bool, pays: bool) -> None:
    """Protects deadlines: the tenant pays the delivered part, which is nothing for an answer that is not streamed."""
    _check(_alone(stream=stream, deadline_ms=2_000), "expired/deadline", pays=pays)


# ── failed ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("tokens", [0, 1, 30])
def test_an_engine_error(stream: bool, tokens: int) -> None:
    """Protects tenants: what an engine failed is the platform's, whatever was delivered."""

    async def script(world: World) -> None:
        world.cell.engine.fault_plan = lambda call: (tokens, errors.EngineError())
        world.send(subject(stream=stream))

    _check(script, "failed/engine_error", pays=False)


def test_an_engine_that_refuses() -> None:
    """Protects the table: a refusal of what we let through is nobody's to pay, and speaks not against the replica."""

    async def script(world: World) -> None:
        world.cell.engine.fault_plan = lambda call: (0, errors.EngineRejected())
        exchange = world.send(subject())
        await world.until(lambda: exchange.is_done)
        assert len(world.cell.fleet.ready_addresses()) == 1

    _check(script, "failed/engine_rejected", pays=False)


@pytest.mark.parametrize("stream", [True, False])
def test_a_lost_replica(stream: bool) -> None:
    """Protects tenants and capacity: its work fails on the platform's account, its lanes go with it, another one comes."""

    async def script(world: World) -> None:
        world.send(subject(stream=stream))
        await asyncio.sleep(1)
        [name] = world.cell.supervisor.names
        world.cell.supervisor.lose(name)
        await asyncio.sleep(5)
        world.send(subject("next", prompt="and now?"))

    world = _check(script, "failed/replica_lost", pays=False)
    assert end_of(world, "next").status is Status.COMPLETED


def test_a_stalled_replica() -> None:
    """Protects against silence: the run ends as stalled, and a replica that confirms no stop is replaced with its lanes."""

    async def script(world: World) -> None:
        exchange = world.send(subject())
        await until_output(world, exchange, 20)
        [name] = world.cell.supervisor.names
        world.cell.engine.inner.stall(name)
        await world.until(lambda: exchange.is_done)
        await asyncio.sleep(8)
        assert world.cell.supervisor.names not in ([], [name])

    _check(script, "failed/stalled", pays=False)


@pytest.mark.parametrize("stream", [True, False])
def test_a_hold_that_is_late(stream: bool) -> None:
    """Protects the ledger: without a durable hold nothing goes out; it ends within the store's bound, not with the outage."""

    async def script(world: World) -> None:
        world.weather.extra_ms = 60  # the look-up of the id passes, the write of the hold meets the outage
        exchange = world.send(subject(stream=stream))
        await asyncio.sleep(0.08)
        world.weather.failing = True
        await asyncio.sleep(5)
        assert exchange.is_done and exchange.answer.accepted is None
        world.weather.clear()

    _check(script, "failed/ledger_unavailable", pays=False)


@pytest.mark.parametrize("burst", [1, 40])
def test_delivery_that_is_late(burst: int) -> None:
    """Protects the booked-ahead rule: a stream goes on within what is durably booked, then ends; the platform pays."""

    async def script(world: World) -> None:
        exchange = world.send(subject())
        await until_output(world, exchange, 40)
        world.weather.failing = True
        await asyncio.sleep(6)
        assert exchange.answer.record is not None
        world.weather.clear()

    _check(script, "failed/ledger_unavailable", pays=False, spec=Spec(engine_burst=burst))


def test_a_settlement_that_is_late() -> None:
    """Protects whole answers: not settled in time means dropped and unpaid; the queued settlement becomes zero."""

    async def script(world: World) -> None:
        world.send(blocker(stream=False, max_output_tokens=1))  # its settlement is stuck in the write under way
        exchange = world.send(subject(stream=False, max_output_tokens=30))
        await asyncio.sleep(0.3)
        world.weather.failing = True
        world.send(blocker(1, stream=False, request_id=None, max_output_tokens=1))
        await world.until(lambda: exchange.answer.record is not None)
        assert exchange.answer.record is not None
        assert exchange.answer.record.error_code == "ledger_unavailable"
        world.weather.clear()

    _check(script, "failed/ledger_unavailable", pays=False)


def test_a_settlement_that_the_store_refuses_is_dropped_even_from_the_group_in_hand() -> None:
    """Protects whole answers through any outage: what surely was not written is withdrawn, and the id may run again."""

    async def script(world: World) -> None:
        exchange = world.send(subject(stream=False, max_output_tokens=30))
        await asyncio.sleep(0.3)
        world.weather.failing = True
        await world.until(lambda: exchange.answer.record is not None)
        assert exchange.answer.record is not None
        assert exchange.answer.record.error_code == "ledger_unavailable"
        world.weather.clear()
        await world.until(lambda: has_end(world))
        counted = world.cell.telemetry.exposition().decode()
        assert 'finish_reason="ledger_unavailable"' in counted and 'status="completed"' not in counted
        again = world.send(subject(stream=False, max_output_tokens=30))
        await world.until(lambda: again.answer.record is not None)
        assert again.answer.record is not None
        assert again.answer.record.execution == 2

    _check(script, "failed/ledger_unavailable", pays=False)


def test_a_late_store_gives_each_answer_its_own_time() -> None:
    """Protects whole answers: one that was settled just now is not dropped with an older one, it has its own two seconds."""

    async def script(world: World) -> None:
        old = world.send(blocker(stream=False, max_output_tokens=20))
        young = world.send(subject(stream=False, max_output_tokens=60))
        await asyncio.sleep(0.2)
        world.weather.failing = True
        await world.until(lambda: old.answer.record is not None)
        assert young.answer.record is None
        world.weather.clear()
        await world.until(lambda: young.is_done)

    _check(script, "completed/length", pays=True)


def test_a_settlement_whose_write_is_lost_stands() -> None:
    """Protects truth over politeness: if the write's outcome is unknown, the store's record decides and look-ups show it."""

    async def script(world: World) -> None:
        exchange = world.send(subject(stream=False, max_output_tokens=30))
        await asyncio.sleep(0.3)
        world.weather.losing_answers = True
        await world.until(lambda: exchange.answer.record is not None)
        assert exchange.answer.record is not None
        assert exchange.answer.record.error_code == "ledger_unavailable"
        world.weather.clear()

    _check(script, "completed/length", pays=True)


def test_a_crash_while_it_streams() -> None:
    """Protects tenants through a crash: it ends as coordinator_lost at the platform's expense, booked as uncertain."""

    async def script(world: World) -> None:
        exchange = world.send(subject())
        await until_output(world, exchange, 40)
        await world.crash(land=False)
        await world.start()

    _check(script, "failed/coordinator_lost", pays=False)


def test_a_crash_while_it_waits() -> None:
    """Protects the queue through a crash: a durable hold that was never dispatched is released."""

    async def script(world: World) -> None:
        await _behind_blocker()(world)
        await asyncio.sleep(0.5)
        await world.crash(land=False)
        await world.start()
        world.send(subject(prompt=LONG_PROMPTS[0]))

    world = _check(script, "failed/coordinator_lost", pays=False, spec=ONE_LANE)
    assert isinstance(end_of(world), ReleaseRecord)
    assert end_of(world, execution=2).status is Status.COMPLETED


@pytest.mark.parametrize("stream", [True, False])
def test_shutdown_while_it_runs(stream: bool) -> None:
    """Protects clients of a drained cell: a terminal answer, never a raw cut, at the platform's expense."""

    async def script(world: World) -> None:
        exchange = world.send(subject(stream=stream))
        await asyncio.sleep(1)
        await world.shut_down(500)
        assert exchange.answer.record is not None
        await world.start()

    _check(script, "failed/shutdown", pays=False)


def test_shutdown_waits_for_what_can_finish() -> None:
    """Protects work in flight: within the grace a drain lets it end by itself, and refuses what is new."""

    async def script(world: World) -> None:
        world.send(subject())
        await asyncio.sleep(1)
        drain = asyncio.get_running_loop().create_task(world.shut_down(20_000))
        await asyncio.sleep(0.1)
        late = world.send(subject("late", prompt="too late"))
        await drain
        assert isinstance(late.answer.refusal, errors.Draining)
        await world.start()

    _check(script, "completed/stop", pays=True)


def test_shutdown_in_the_queue() -> None:
    """Protects clients of a drained cell: what still waits after the grace is told so."""

    async def script(world: World) -> None:
        await _behind_blocker()(world)
        await asyncio.sleep(0.3)
        await world.shut_down(100)
        await world.start()

    _check(script, "failed/shutdown", pays=False, spec=ONE_LANE)
