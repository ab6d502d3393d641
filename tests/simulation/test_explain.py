"""Timelines of a real coordinator: what an operator reads of a request that was retried, refused, cancelled or given up."""

import asyncio
from dataclasses import replace
from typing import Any

import msgspec
from tests.simulation.test_late_messages import ASKED, LOST, Desk, play

from weir import errors
from weir.core.endings import FinishReason
from weir.core.metering import Basis
from weir.core.tenancy import Limits, Scope
from weir.messages import AttemptUsage, CancelById, Finish, Progress, Stopped
from weir.sim.world import REVISION, Spec, first_snapshot
from weir.storage.memory import Operation

TENANT = Scope("tenant-0")


def limit(desk: Desk, **limits: int) -> None:
    """Put limits of the tenant in force."""
    snapshot = first_snapshot(Spec())
    desk.coordinator.publish(replace(snapshot, version=2, limits={TENANT: Limits(**limits)}))


def explained(desk: Desk, request_id: str = "it") -> dict[str, Any]:
    """The one timeline of a request."""
    [timeline] = desk.coordinator.timelines.of(request_id, "tenant-0")
    return timeline


def named(timeline: dict[str, Any], *names: str) -> list[dict[str, Any]]:
    """Events with these names, in order."""
    return [event for event in timeline["events"] if event["event"] in names]


def test_a_retried_request_shows_both_attempts_and_what_was_paid() -> None:
    """Protects the answer to "where did it run": holds, replicas in order, why the first failed, output, end, durability."""

    async def script(desk: Desk) -> None:
        limit(desk, spend_microusd_per_day=1_000_000, tokens_per_minute=900)
        await asyncio.sleep(1)
        desk.link.send(msgspec.structs.replace(ASKED, waited_ns=2_000_000))
        await asyncio.sleep(0.25)
        desk.link.send(LOST)
        desk.link.send(Stopped(1, 1))
        await asyncio.sleep(0.25)
        desk.link.send(Progress(1, 2, first_output=True))
        desk.link.send(Finish(1, 2, FinishReason.STOP, delivered_tokens=4, usage=AttemptUsage(5, 0, 4, Basis.ENGINE)))
        desk.link.send(Stopped(1, 2, 1.5))
        await asyncio.sleep(1)
        timeline = explained(desk)
        assert (timeline["execution"], timeline["status"], timeline["delivery_steps"]) == (1, "completed", 0)
        [received, admitted] = named(timeline, "received", "admitted")
        assert (received["at_ms"], admitted["at_ms"], received["deadline_ms"]) == (0.0, 2.0, 60_002)
        assert admitted["held_microusd"] == REVISION.price.cost(5, 0, 10) and admitted["held_tokens"] == 15
        assert admitted["takes"] == [{"limit": "tokens_per_minute", "units": 15}] and len(admitted["windows"]) == 3
        door = {"pool": "pool", "lanes": 2, "free": 2, "waiting": 0, "predicted_wait_ms": 0, "prefill_ms": 0}
        assert admitted["door"] == door
        dispatches = named(timeline, "dispatched")
        assert [(event["attempt"], event["replica"], event["at_ms"]) for event in dispatches] == [
            (1, "first", 2.0),
            (2, "second", 252.0),
        ]
        failed, finished = named(timeline, "finished")
        assert (failed["attempt"], failed["reason"], failed["output_tokens"]) == (1, "replica_lost", 3)
        assert (finished["attempt"], finished["reason"], finished["delivered_tokens"]) == (2, "stop", 4)
        [ended] = named(timeline, "ended")
        assert (ended["status"], ended["cost_microusd"]) == ("completed", REVISION.price.cost(5, 0, 4))
        assert ended["platform_cost_microusd"] == REVISION.price.cost(5, 0, 3)
        order = [event["event"] for event in named(timeline, "hold_durable", "first_output", "ended", "stopped", "end_durable")]
        assert order == ["hold_durable", "stopped", "first_output", "ended", "stopped", "end_durable"]
        times = [event["at_ms"] for event in timeline["events"]]
        assert times == sorted(times)

    play(script)


def test_a_request_beyond_its_budget_shows_the_limit_that_refused_it() -> None:
    """Protects the answer to "why was I refused": the code, the scope, the caller's own figures, and that nothing was held."""

    async def script(desk: Desk) -> None:
        limit(desk, spend_microusd_per_day=10)
        desk.link.send(ASKED)
        desk.link.send(msgspec.structs.replace(ASKED, ref=2, request_id="too-much", max_output_tokens=8))
        timeline = explained(desk, "too-much")
        assert (timeline["status"], timeline["execution"], timeline["rejections"]) == ("rejected", None, 1)
        [_, refused] = timeline["events"]
        figures = refused["figures"]
        assert (refused["code"], refused["predicted_wait_ms"]) == ("budget_exhausted", 0)
        assert (figures["limit_name"], figures["scope"]) == ("spend_microusd_per_day", {"tenant": "tenant-0"})
        assert (figures["limit"], figures["held"], figures["used"]) == (10, REVISION.price.cost(5, 0, 10), 0)
        desk.link.send(Finish(1, 1, FinishReason.DISCONNECT))
        desk.link.send(Stopped(1, 1))
        await asyncio.sleep(1)

    play(script)


def test_what_waits_and_is_cancelled_shows_the_queue_and_no_replica() -> None:
    """Protects the answer to "why did it not run": lanes taken at the door, the wait that was predicted, a free end."""

    async def script(desk: Desk) -> None:
        for ref in (1, 2, 3):
            desk.link.send(msgspec.structs.replace(ASKED, ref=ref, request_id=f"id-{ref}"))
        desk.link.send(CancelById(1, "tenant-0", "id-3"))
        desk.link.send(CancelById(2, "tenant-0", "id-1"))
        for ref in (1, 2):
            desk.link.send(Finish(ref, 1, FinishReason.CLIENT))
            desk.link.send(Stopped(ref, 1, confirmed=True))
        await asyncio.sleep(1)
        waited, ran = explained(desk, "id-3"), explained(desk, "id-1")
        door = named(waited, "admitted")[0]["door"]
        assert (door["lanes"], door["free"], door["waiting"]) == (2, 0, 0) and door["predicted_wait_ms"] > 0
        assert not named(waited, "dispatched", "stop_asked")
        [ended] = named(waited, "ended")
        assert (waited["status"], ended["finish_reason"]) == ("cancelled", "client") and "cost_microusd" not in ended
        assert [event["reason"] for event in named(ran, "stop_asked")] == ["client"]

    play(script)


def test_a_whole_answer_whose_settlement_is_late_shows_that_it_was_given_up() -> None:
    """Protects the answer to "it ran, where is it": the store was away, and what it says afterwards is the status."""

    async def script(desk: Desk) -> None:
        desk.link.send(msgspec.structs.replace(ASKED, stream=False))
        await asyncio.sleep(1)

        async def away(operation: Operation) -> None:
            raise errors.LedgerUnavailable(not_written=True)

        present, desk.ledger.delay = desk.ledger.delay, away
        desk.link.send(Finish(1, 1, FinishReason.STOP, usage=AttemptUsage(5, 0, 4, Basis.ENGINE)))
        desk.link.send(Stopped(1, 1))
        await asyncio.sleep(5)
        desk.ledger.delay = present
        await asyncio.sleep(5)
        timeline = explained(desk)
        assert [event["event"] for event in named(timeline, "ended", "given_up", "end_durable")] == [
            "ended",
            "given_up",
            "end_durable",
        ]
        assert (timeline["status"], named(timeline, "end_durable")[0]["finish_reason"]) == ("failed", "ledger_unavailable")

    play(script)
