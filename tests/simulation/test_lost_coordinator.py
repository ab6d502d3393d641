"""A gateway loses its coordinator: every client gets one answer at once, engines run nothing, and the next session serves."""

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from tests.simulation.front_stand import LANES, REPLICAS, Asked, Front, fails, lose_and_wait, now_s, occupied, play_front
from tests.simulation.session_stand import Stand

from weir import errors
from weir.core.ledger.records import ReleaseRecord, SettleRecord
from weir.gateway.inbox import Inbox
from weir.messages import Down, Ended, FleetView, Register, SnapshotFresh
from weir.sim.clients import Habits
from weir.sim.random_source import seeded_random
from weir.sim.virtual_loop import SeedFailed
from weir.sim.world import ALIAS, principal_of, tenant_name

# ── before admission ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stream", [True, False])
def test_what_is_planned_as_the_coordinator_is_lost_is_refused(stream: bool) -> None:
    """Protects clients from a hang: a request whose input is counted meanwhile asks no coordinator that is lost."""

    async def script(stand: Stand, front: Front) -> None:
        for name in REPLICAS:
            front.engine.inner.stall(name)  # a count is given up after a while
        asked = front.ask(stream=stream)
        await asyncio.sleep(0.1)
        assert front.gateway.in_flight == 0 and asked.done_s is None
        await lose_and_wait(front)
        asked.check_refused()
        assert not stand.ledger.records

    play_front(script)


@pytest.mark.parametrize("stream", [True, False])
def test_what_is_not_decided_is_refused(stream: bool) -> None:
    """Protects clients before admission: no decision comes any more, so the refusal does, at once and with Retry-After."""

    async def script(stand: Stand, front: Front) -> None:
        stand.store_s["find_execution"] = 0.3
        asked = front.ask(stream=stream, request_id="named")
        await asyncio.sleep(0.1)
        assert front.gateway.in_flight == 1
        at_s = await lose_and_wait(front)
        asked.check_refused()
        assert asked.done_s == at_s

    play_front(script)


def test_a_decision_that_was_under_way_is_not_heard() -> None:
    """Protects against a half-known admission: it was admitted and its gateway did not hear, so it is refused and released."""

    async def script(stand: Stand, front: Front) -> None:
        asked = front.ask()
        await asyncio.sleep(0.03)
        assert stand.book.open_holds == 1 and front.gateway.in_flight == 1
        await lose_and_wait(front)
        asked.check_refused()

    play_front(script, delay_s=0.02)


@pytest.mark.parametrize("left", ["before", "within"])
def test_who_left_before_a_decision_is_shown_nothing(left: str) -> None:
    """Protects counts of refusals: a client that went away as the coordinator was lost is one that left, and gets nothing."""

    async def script(stand: Stand, front: Front) -> None:
        stand.store_s["find_execution"] = 0.3
        asked = front.ask(request_id="named")
        await asyncio.sleep(0.1)
        asked.client.leave()
        if left == "before":
            await asyncio.sleep(0.01)
        await lose_and_wait(front)
        assert asked.done_s is not None and not asked.answer.is_over

    play_front(script)


# ── after admission ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("waited_s", [0.5, 3.0])
def test_what_waits_for_a_lane_ends_at_once(stream: bool, waited_s: float) -> None:
    """Protects the queued client: its one answer is the terminal event where headers are out, else a plain 503."""

    async def script(stand: Stand, front: Front) -> None:
        other, refs = await occupied(stand)
        asked = front.ask(stream=stream)
        await asyncio.sleep(waited_s)
        assert stand.waiting == 1 and (asked.answer.accepted is not None) == (stream and waited_s > 2)
        at_s = await lose_and_wait(front)
        asked.check_lost()
        assert asked.done_s == at_s
        for ref in refs:
            other.end(ref)

    play_front(script)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("silent", [True, False])
@pytest.mark.parametrize("delay_s", [0.0, 0.02])
def test_what_runs_ends_at_once_and_its_engine_stops(stream: bool, silent: bool, delay_s: float) -> None:
    """Protects clients and replicas: a run ends for its client in that instant, as lost, and its engine is cancelled."""

    async def script(stand: Stand, front: Front) -> None:
        if silent:
            for name in REPLICAS:
                front.engine.inner.stall(name)
        asked = front.ask(stream=stream)
        await asyncio.sleep(1)
        assert front.engines_run == 1 and bool(asked.answer.text) == (stream and not silent)
        if silent:
            for name in REPLICAS:
                front.engine.inner.unstall(name)
        at_s = await lose_and_wait(front)
        asked.check_lost()
        assert asked.done_s == at_s and front.engines_run == 0
        await asyncio.sleep(1)
        [end] = [record for record in stand.ledger.records if isinstance(record, SettleRecord)]
        assert end.finish_reason == "coordinator_lost" and end.cost_microusd == 0
        assert end.delivered_tokens >= asked.answer.text.count(" ")

    play_front(script, delay_s)


def test_what_waits_for_its_second_attempt_ends_at_once() -> None:
    """Protects a client whose first attempt failed: nobody grants a second one any more, so it ends."""

    async def script(stand: Stand, front: Front) -> None:
        front.engine.fault_plan = lambda call: (0, errors.EngineError())
        other = stand.gateway("other")
        refs = [other.ask(1) for _ in range(2 * LANES - 1)]
        asked = front.ask()
        await asyncio.sleep(1)
        assert stand.waiting == 1 and not asked.answer.is_over
        at_s = await lose_and_wait(front)
        asked.check_lost()
        assert asked.done_s == at_s
        for ref in refs:
            other.end(ref)

    play_front(script)


@pytest.mark.parametrize("stream", [True, False])
def test_what_ended_unheard_ends_as_lost(stream: bool) -> None:
    """Protects against a success that nobody booked: the engine was done, the coordinator's word was not there yet."""

    async def script(stand: Stand, front: Front) -> None:
        asked = front.ask(stream=stream, max_output_tokens=8)
        heard = front.line.deliver

        def lose_at_the_end(message: Down) -> None:
            if isinstance(message, Ended):
                front.lose()
            heard(message)

        front.line.deliver = lose_at_the_end  # type: ignore[method-assign]
        await asyncio.sleep(2)
        asked.check_lost()
        assert asked.answer.text.count(" ") == (8 if stream else 0)

    play_front(script, delay_s=0.02)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("how", ["stop", "cancel", "deadline"])
def test_what_is_not_known_to_be_durable(stream: bool, how: str) -> None:
    """Protects the ledger's word: a stream tells the end that was decided as not posted, a whole answer is never shown."""

    async def script(stand: Stand, front: Front) -> None:
        changes: dict[str, Any] = (
            {"max_output_tokens": 8} if how == "stop" else {"deadline_ms": 1_000} if how == "deadline" else {}
        )
        asked = front.ask(stream=stream, request_id="named", **changes)
        await asyncio.sleep(0.1)
        stand.store_s["write"] = 1.5
        await asyncio.sleep(0.05)
        if how == "cancel":
            front.tasks.create_task(fails(front.inbox.cancel(tenant_name(0), "named")))
        await asyncio.sleep(0.9)
        assert not asked.answer.is_over and stand.book.open_holds == 0
        at_s = await lose_and_wait(front)
        assert asked.done_s == at_s
        if stream:
            record = asked.answer.record
            assert record is not None and not record.posted
            assert record.finish_reason == {"stop": "length", "cancel": "client", "deadline": "deadline"}[how]
        else:
            asked.check_lost()

    play_front(script)


@pytest.mark.parametrize("stream", [True, False])
def test_what_is_durable_is_shown_as_it_is(stream: bool) -> None:
    """Protects a finished answer: its settlement is known to be durable, and losing the coordinator changes nothing of it."""

    async def script(stand: Stand, front: Front) -> None:
        asked = front.ask(habits=Habits(bytes_per_s=40), stream=stream, max_output_tokens=8)
        await asyncio.sleep(1.5)
        assert asked.answer.is_over and asked.done_s is None
        await lose_and_wait(front)
        await asyncio.sleep(20)
        record = asked.answer.record
        assert record is not None and record.posted and record.status == "completed" and asked.answer.text.count(" ") == 8

    play_front(script)


@pytest.mark.parametrize("stream", [True, False])
def test_who_left_while_it_ran_is_shown_nothing(stream: bool) -> None:
    """Protects against answers to nobody: a client that went away in that instant is cut, and its engine stops all the same."""

    async def script(stand: Stand, front: Front) -> None:
        asked = front.ask(stream=stream)
        await asyncio.sleep(1)
        front.lose()
        asked.client.leave()
        await asyncio.sleep(0.3)
        assert asked.done_s is not None and not asked.answer.is_over and front.engines_run == 0

    play_front(script)


def test_a_slow_reader_gets_nothing_after_its_end() -> None:
    """Protects the one terminal event: a stream that was silent for long gets no keep-alive while its end is being read."""

    async def script(stand: Stand, front: Front) -> None:
        for name in REPLICAS:
            front.engine.inner.stall(name)
        asked = front.ask(habits=Habits(bytes_per_s=20))
        await asyncio.sleep(10)
        assert asked.answer.accepted is not None and not asked.answer.is_over and asked.client.unsent == 0
        for name in REPLICAS:
            front.engine.inner.unstall(name)
        at_s = await lose_and_wait(front)
        asked.check_lost()
        written = asked.client.written
        await asyncio.sleep(3)
        assert asked.done_s is not None and asked.done_s > at_s + 1 and asked.client.written == written

    play_front(script)


# ── questions, and the next session ──────────────────────────────────────────────────────────────────────────────────


def test_questions_that_wait_are_told_at_once() -> None:
    """Protects callers of the management routes: look-ups, cancels and limits that wait, or come, raise at once."""

    async def script(stand: Stand, front: Front) -> None:
        stand.store_s["find_execution"] = 1.0
        front.ask(request_id="running")
        await asyncio.sleep(1.5)
        inbox, name = front.inbox, tenant_name(0)

        def questions() -> list[Coroutine[Any, Any, Any]]:
            return [
                inbox.lookup(name, "unknown"),
                inbox.cancel(name, "unknown"),
                inbox.cancel(name, "running"),
                inbox.standing(principal_of(0), ALIAS.name),
            ]

        waiting = [front.tasks.create_task(fails(question)) for question in questions()]
        await asyncio.sleep(0.01)
        at_s = await lose_and_wait(front)
        assert [each.result() for each in waiting] == [at_s] * 4
        later = [await fails(question) for question in questions()]
        assert later == [now_s()] * 4

    play_front(script, delay_s=0.02)


def test_a_new_session_serves_again() -> None:
    """Protects availability: while there is no coordinator requests are refused at once, and served as soon as there is one."""

    async def script(stand: Stand, front: Front) -> None:
        before = front.ask()
        await asyncio.sleep(1)
        front.lose()
        refused = front.ask()
        await asyncio.sleep(0)
        assert refused.done_s == now_s()
        refused.check_refused()
        await asyncio.sleep(1)
        front.connect()
        served = front.ask(max_output_tokens=8)
        await asyncio.sleep(2)
        before.check_lost()
        record = served.answer.record
        assert record is not None and record.posted and record.status == "completed"

    play_front(script)


def test_a_snapshot_alone_is_no_session() -> None:
    """Protects against a half-open session: what begins one is its view of the fleet."""

    async def script(stand: Stand, front: Front) -> None:
        front.lose()
        for message, is_lost in ((stand.coordinator.snapshot, True), (FleetView(()), False)):
            front.inbox.deliver(message)
            assert front.inbox.is_lost == is_lost
        front.inbox.lose()

    play_front(script)


# ── many seeds ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _some_request(front: Front, random: Random) -> None:
    habits = Habits(
        bytes_per_s=random.choice([None, None, 100]),
        leaves_after_ms=random.choice([None, None, random.randint(1, 2_000)]),
        headers_ms=random.choice([0, 0, 300]),
    )
    front.ask(
        habits=habits,
        stream=random.random() < 0.6,
        request_id=random.choice([None, f"named-{random.randint(0, 9)}"]),
        deadline_ms=random.choice([None, None, random.randint(50, 3_000)]),
        max_output_tokens=random.choice([1, 8, 60, 400]),
    )


async def _losing_scene(stand: Stand, front: Front, random: Random) -> None:
    """Clients come and go, and the coordinator is lost between any two steps, and found again before or after it noticed."""
    for _ in range(random.randint(1, 3)):
        stand.store_s["write"] = random.choice([0.001, 0.05, 0.6])
        stand.store_s["find_execution"] = random.choice([0.001, 0.2])
        for _ in range(random.randint(1, 8)):
            _some_request(front, random)
            await asyncio.sleep(random.uniform(0, 0.6))
        front.lose()
        for _ in range(random.randint(0, 2)):
            _some_request(front, random)
            await asyncio.sleep(random.uniform(0, 0.4))
        front.connect()
    await asyncio.sleep(20)
    for asked in front.asked:
        _check_against_ledger(stand, asked)


def _check_against_ledger(stand: Stand, asked: Asked) -> None:
    """What a client was told is what is booked; it got no more than that, and paid for nothing that it was told was lost."""
    record = asked.answer.record
    if record is None:
        return
    [end] = [
        end
        for end in stand.ledger.records
        if isinstance(end, SettleRecord | ReleaseRecord)
        and (end.id.request_id, end.id.execution) == (record.request_id, record.execution)
    ]
    if record.posted:
        assert (end.status, end.finish_reason) == (record.status, record.finish_reason)
    if record.status == "completed":
        assert record.posted or asked.stream
    tokens = asked.answer.text.count(" ")
    assert tokens <= (end.delivered_tokens if isinstance(end, SettleRecord) else 0)


@pytest.mark.parametrize("delay_s", [0.0, 0.02])
def test_a_coordinator_may_be_lost_at_any_moment(delay_s: float) -> None:
    """Protects every client: whatever it does as its coordinator is lost, it gets one answer, and the ledger agrees with it."""
    for seed in range(40):

        async def script(stand: Stand, front: Front, seed: int = seed) -> None:
            await _losing_scene(stand, front, seeded_random(seed, "lost coordinator"))

        try:
            play_front(script, delay_s)
        except Exception as failure:
            raise SeedFailed(seed) from failure


@pytest.mark.parametrize("at_the_gateway", [True, False])
def test_a_snapshot_that_is_too_old_admits_nothing(at_the_gateway: bool) -> None:
    """Protects revocation when control is away: what was not checked for too long admits nothing, wherever it is noticed."""

    async def script(stand: Stand, front: Front) -> None:
        stand.coordinator.renew(1_000)
        if not at_the_gateway:
            front.inbox.deliver(SnapshotFresh(60_000))
        runs, left_ms = front.ask(), stand.coordinator.fresh_ms
        assert left_ms == 1_000 and front.inbox.fresh_ms == (1_000 if at_the_gateway else 60_000)
        await asyncio.sleep(1.5)
        assert stand.coordinator.fresh_ms == 0
        refused = front.ask()
        await asyncio.sleep(0.1)
        refusal = refused.answer.refusal
        assert isinstance(refusal, errors.SnapshotExpired) and refusal.http_status == 503 and refusal.retry_after_ms == 1_000
        stand.coordinator.renew(60_000)
        served = front.ask(max_output_tokens=8)
        await asyncio.sleep(30)
        for asked in (runs, served):
            assert asked.answer.record is not None and asked.answer.record.status == "completed"

    play_front(script)


@pytest.mark.parametrize("stream", [True, False])
def test_a_deadline_is_kept_while_nothing_is_heard(stream: bool) -> None:
    """Protects clients from a link that is away: at its deadline a request is refused, and nothing runs."""

    async def script(stand: Stand, front: Front) -> None:
        front.line.is_cut = True
        asked = front.ask(stream=stream, deadline_ms=1_000)
        await asyncio.sleep(0.9)
        assert asked.done_s is None
        await asyncio.sleep(0.2)
        assert isinstance(asked.answer.refusal, errors.DeadlineUnmeetableNow)
        assert front.engines_run == 0 and not stand.ledger.records

    play_front(script)


def test_a_grant_after_the_deadline_runs_nothing_and_costs_nothing() -> None:
    """Protects the tenant: the question was on its way for longer than its deadline, and the answer finds nobody."""

    async def script(stand: Stand, front: Front) -> None:
        await asyncio.sleep(2)  # the first snapshot is on its way
        asked = front.ask(deadline_ms=1_000)
        await asyncio.sleep(10)
        assert isinstance(asked.answer.refusal, errors.DeadlineUnmeetableNow)
        ends = [record for record in stand.ledger.records if isinstance(record, SettleRecord | ReleaseRecord)]
        assert len(ends) == 1 and ends[0].finish_reason == "deadline"
        assert not isinstance(ends[0], SettleRecord) or (ends[0].cost_microusd, ends[0].platform_microusd) == (0, 0)

    play_front(script, delay_s=1.5)


def test_who_connects_to_a_coordinator_that_drains_is_told() -> None:
    """Protects balancers: a gateway whose session began during the drain is not ready either."""

    async def script(stand: Stand, front: Front) -> None:
        running = front.ask()
        await asyncio.sleep(1)
        draining = front.tasks.create_task(stand.coordinator.drain(60_000))
        late = Inbox(stand.clock)
        await asyncio.sleep(0)
        stand.coordinator.connect(Register("late"), late)
        assert late.is_draining and front.inbox.is_draining
        await draining
        assert running.answer.record is not None

    play_front(script)


def test_another_coordinator_may_have_an_older_catalog() -> None:
    """Protects a database that was restored: what the new coordinator works by counts, not the highest version."""

    async def script(stand: Stand, front: Front) -> None:
        newer = replace(front.inbox.snapshot, version=front.inbox.snapshot.version + 7)
        front.inbox.deliver(newer)
        front.inbox.deliver(replace(newer, version=newer.version - 1))
        assert front.inbox.snapshot is newer
        front.lose()
        front.connect()
        assert front.inbox.snapshot.version == newer.version - 7

    play_front(script)


@pytest.mark.parametrize("leaves_after_ms", [1_600, 2_500, 3_100])
def test_who_leaves_while_its_grant_is_on_its_way_keeps_no_lane(leaves_after_ms: int) -> None:
    """Protects replicas from lanes that nobody gives back: the client left before a decision, and the grant finds nobody."""

    async def script(stand: Stand, front: Front) -> None:
        await asyncio.sleep(2)  # the first snapshot is on its way
        asked = front.ask(habits=Habits(leaves_after_ms=leaves_after_ms))
        await asyncio.sleep(15)
        assert asked.answer.record is None and stand.running == 0 and stand.executions.live_count == 0

    play_front(script, delay_s=1.5)
