"""What control asks over its link: each question has its answer, a failure or an end, and none waits for ever."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from tests.contract.admin_stand import StandingCell
from tests.contract.control_stand import (
    ControlStand,
    StandingDesk,
    control_standing,
)
from tests.contract.link_stand import until

from weir import errors
from weir.app.cell_over_link import LinkedCell, answer_of
from weir.control.cell_view import GatheredEvidence
from weir.core.registry.evidence import Evidence, Tally
from weir.core.registry.model import Pool
from weir.core.routing.replica import ReplicaState
from weir.link import control_desk, frames
from weir.link.control_messages import (
    AskBehind,
    AskOpenHolds,
    Question,
)

READY = ReplicaState.READY


@pytest.fixture
async def stand() -> AsyncIterator[ControlStand]:
    async with control_standing() as standing:
        yield standing


async def test_questions_are_answered_beside_one_another(stand: ControlStand) -> None:
    """Each answer finds its question, also a failed one, with the error that the coordinator had."""
    desk, control = await stand.linked()
    desk.host.answers = 42
    assert await asyncio.gather(*(control.ask() for _ in range(10))) == [42] * 10
    desk.host.answers = errors.LedgerUnavailable("The ledger cannot be read now.", retry_after_ms=5)
    with pytest.raises(errors.LedgerUnavailable) as refused:
        await control.ask()
    assert (refused.value.detail, refused.value.retry_after_ms) == ("The ledger cannot be read now.", 5)


async def test_a_question_without_an_answer_is_bounded(stand: ControlStand) -> None:
    """An administrator does not wait for ever; what comes too late is dropped."""
    desk, control = await stand.linked()
    desk.host.answers = late = asyncio.Event()
    with pytest.raises(errors.CoordinatorLost):
        await control.end.ask(AskBehind(1, 10), int, bound_ms=20)
    late.set()
    desk.host.answers = 1
    assert await control.ask() == 1


async def test_questions_of_a_lost_session_fail_at_once(stand: ControlStand) -> None:
    """A coordinator that dies answers nothing: who asked hears it without waiting for the bound."""
    desk, control = await stand.linked()
    desk.host.answers = asyncio.Event()
    asking = asyncio.get_running_loop().create_task(control.ask())
    await until(lambda: desk.host.asked, "it is asked")
    began = time.monotonic()
    await desk.stop()
    with pytest.raises(errors.CoordinatorLost):
        await asking
    assert time.monotonic() - began < 1


async def test_too_many_questions_are_refused(stand: ControlStand) -> None:
    """A coordinator answers a bounded number at once, and the others hear so."""
    desk, control = await stand.linked()
    desk.host.answers = held = asyncio.Event()
    most = control_desk.ANSWERS_MAX
    asking = [asyncio.get_running_loop().create_task(control.ask()) for _ in range(most)]
    await until(lambda: len(desk.host.asked) == most, "all are asked")
    with pytest.raises(errors.CoordinatorLost):
        await control.ask()
    held.set()
    assert await asyncio.gather(*asking) == [0] * most


async def test_a_long_answer_arrives_whole_and_one_too_long_is_refused(
    stand: ControlStand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers longer than a frame come in pieces; one beyond the bound is refused instead of ending the coordinator."""
    desk, control = await stand.linked()
    desk.host.answers = long = "word " * 1_500_000
    assert await control.end.ask(AskOpenHolds("acme"), str) == long
    monkeypatch.setattr(control_desk, "ANSWER_BYTES_MAX", 1_000_000)
    with pytest.raises(errors.CoordinatorLost):
        await control.end.ask(AskOpenHolds("acme"), str)
    desk.host.answers = 3
    assert await control.ask() == 3


async def test_a_slow_answer_is_given_up_by_the_coordinator(stand: ControlStand, monkeypatch: pytest.MonkeyPatch) -> None:
    """A question cannot occupy the coordinator for ever."""
    monkeypatch.setattr(control_desk, "_ANSWER_S", 0.02)
    desk, control = await stand.linked()
    desk.host.answers = asyncio.Event()
    with pytest.raises(errors.CoordinatorLost, match="in time"):
        await control.ask()


async def test_demand_is_heard(stand: ControlStand) -> None:
    """A request for a pool on demand reaches control."""
    desk, control = await stand.linked()
    control.fleet.add_pool(Pool("asked", "rev", 1, 1, on_demand=True))
    await until(lambda: len(list(desk.fleet.pools)) == 2, "the pool is there")
    desk.fleet.demand(desk.fleet.pool("asked"))
    await until(lambda: control.demanded == ["asked"], "it is heard")


@pytest.mark.parametrize("version", range(frames.OLDEST_VERSION, frames.EVIDENCE_VERSION))
async def test_an_older_coordinator_is_not_asked_what_it_cannot_read(
    stand: ControlStand, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    """Protects the link during an upgrade: a new question to an older coordinator would end it, again and again."""
    monkeypatch.setattr(frames, "NEWEST_VERSION", version)
    desk, control = await stand.linked()
    with pytest.raises(errors.CoordinatorLost, match="older version"):
        await LinkedCell(control.end, lambda pool: None).evidence("ro-1", "small-2")
    assert desk.host.asked == [] and await control.ask() == 0 and control.end.is_linked


async def test_an_answer_of_another_version_is_read(stand: ControlStand) -> None:
    """Protects upgrades: what a newer coordinator tells beside the evidence is skipped, and what is not told is not known."""
    desk, control = await stand.linked()
    cell = LinkedCell(control.end, lambda pool: None)
    desk.host.answers = {"running": 2, "step": 1, "evidence": {"canary": {"requests": 5, "added": 1}, "added": {}}, "added": []}
    assert await cell.evidence("ro-1", "small-2") == GatheredEvidence(2, 1, Evidence(canary=Tally(5)))
    desk.host.answers = {"running": 2}
    assert await cell.evidence("ro-1", "small-2") == GatheredEvidence(2)


class ViewedHost:
    """Answers from a cell that stands still, as the coordinator's process does."""

    def __init__(self, desk: StandingDesk, cell: StandingCell) -> None:
        self._cell = cell
        desk.host.answer = self.answer  # type: ignore[method-assign]

    async def answer(self, question: Question) -> object:
        assert not isinstance(question, AskBehind)
        return await answer_of(self._cell, question)


async def test_what_administrators_ask_is_the_same_over_the_link(stand: ControlStand) -> None:
    """Every question to the running cell has the same answer as in one process; why nothing is ready is control's word."""
    desk, control = await stand.linked()
    here, there = StandingCell(), LinkedCell(control.end, lambda pool: f"{pool} does not start")
    ViewedHost(desk, here)
    assert await there.accounts("acme") == await here.accounts("acme")
    assert await there.open_holds("acme") == await here.open_holds("acme")
    assert await there.generation("acme", "r:1") == await here.generation("acme", "r:1")
    assert await there.generation("acme", "unknown") == await here.generation("acme", "unknown")
    for rollout, revision in (("ro-1", "small-2"), ("ro-1", "small-1"), ("over", "small-2"), ("over", "small-1")):
        assert await there.evidence(rollout, revision) == await here.evidence(rollout, revision)
    mine, theirs = await here.explanations("r:1"), await there.explanations("r:1")
    assert [*map(dict, theirs.timelines)] == [*map(dict, mine.timelines)] and theirs.kept == mine.kept
    assert [pool.name for pool in await there.pools()] == [pool.name for pool in await here.pools()]
    for shown, known in zip(await there.replicas(), await here.replicas(), strict=True):
        assert shown.name == known.name and shown.capabilities == known.capabilities
        assert shown.detail == (known.detail if known.state == READY else f"{shown.pool} does not start")
