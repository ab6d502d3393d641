"""What pools offer at the door: whether a deadline can be met, by whose pace and for which length, and which takes it."""

import asyncio
from collections import Counter
from typing import Any

import pytest
from tests.simulation.test_reviewed_moments import Fittings, Stand, play, tries_until_let_in, whole_answers

from weir.config import CoordinatorConfig
from weir.core.metering import InputBasis
from weir.messages import Rejected, ReplicaPace
from weir.sim.world import POOL

OTHER = "other"

# ── deadlines ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_upper_bound_of_the_input_is_refused_for_now_only() -> None:
    """Protects callers whose input nobody counted: an upper bound proves nothing, so the refusal is not for good."""

    async def script(stand: Stand) -> None:
        asked: dict[str, Any] = {"input_tokens": 4_000, "workload_class": "long", "deadline_left_ms": 900}
        assert stand.ask(0, **asked).code == "deadline_infeasible"
        bounded = stand.ask(0, **asked, input_basis=InputBasis.UPPER_BOUND)
        refused = bounded.first(Rejected)
        assert refused is not None and refused.code == "deadline_unmeetable_now" and refused.retry_after_ms

    play(script, Fittings(paces=[ReplicaPace(20, 0.5, 20)]))


@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("is_slow_gone", [False, True])
def test_a_deadline_is_compared_with_the_quickest_replica(slow: int, is_slow_gone: bool) -> None:
    """Protects feasible deadlines: the slow replica's pace refuses nobody, whichever answered last, nor after it is gone."""

    async def script(stand: Stand) -> None:
        asked: dict[str, Any] = {"input_tokens": 1_000, "deadline_left_ms": 2_000, "max_output_tokens": 8}
        if is_slow_gone:
            stand.fleet.gone(POOL, f"{POOL}-{slow}")
        quick = stand.ask(0, **asked)
        assert quick.code is None and quick.waited_s == 0

    paces = [ReplicaPace(20, 0.5, 20), ReplicaPace(20, 5.0, 20)]
    play(script, Fittings(replicas=2, paces=paces if slow else paces[::-1]))


def test_a_deadline_that_only_a_lost_replica_could_meet_is_infeasible() -> None:
    """Protects callers from vain waits: the quickest replica is gone, and its pace with it."""

    async def script(stand: Stand) -> None:
        stand.fleet.gone(POOL, f"{POOL}-0")
        assert stand.ask(0, input_tokens=1_000, deadline_left_ms=2_000).code == "deadline_infeasible"

    play(script, Fittings(replicas=2, paces=[ReplicaPace(20, 0.5, 20), ReplicaPace(20, 5.0, 20)]))


@pytest.mark.parametrize("tpot_ms", [20.0, 40.0])
def test_an_answer_that_would_be_late_anyway_is_judged_by_its_beginning(tpot_ms: float) -> None:
    """Protects short answers from the expected length: late even on an idle replica, it is let in, whatever runs beside it."""

    async def script(stand: Stand) -> None:
        await whole_answers(stand, 4, 127 * tpot_ms / 1e3, tpot_ms)
        for _ in range(4):
            asked = stand.ask(0, deadline_left_ms=2_000)
            assert asked.code is None and asked.waited_s == 0
            await asyncio.sleep(0.05)
            stand.show(asked)

    play(script, Fittings(pools={POOL: 64}, paces=[ReplicaPace(20, 0.1, 20)]))


def test_an_answer_that_would_be_in_time_on_an_idle_replica_is_refused_for_now() -> None:
    """Protects a deadline that a wait would break: refused with the figures, and let in as its Retry-After is followed."""

    async def script(stand: Stand) -> None:
        await whole_answers(stand, 6, 2.5)
        running = stand.ask(5, seconds=(0.1, 2.6))
        asked: dict[str, Any] = {"deadline_left_ms": 4_000}
        refused = stand.ask(0, **asked).first(Rejected)
        assert running.waited_s == 0 and refused is not None and refused.code == "deadline_unmeetable_now"
        late_ms = refused.members["predicted_ms"] - 4_000
        assert refused.members["deadline_ms"] == 4_000 and refused.retry_after_ms is not None
        assert 0.99 * late_ms < refused.retry_after_ms <= late_ms + 1, "the wait passes, and what is measured fades"
        refusals, after_s = await tries_until_let_in(stand, 0, **asked)
        assert refusals >= 1 and after_s < 2.6 + refused.retry_after_ms / 1e3

    config = CoordinatorConfig(queue_wait_ms=10_000)
    play(script, Fittings(pools={POOL: 1}, paces=[ReplicaPace(20, 0.1, 20)], config=config))


def test_one_retry_is_enough_after_slow_answers() -> None:
    """Protects callers from a Retry-After in vain: replicas are idle, and the evidence of their slow answers fades."""

    async def script(stand: Stand) -> None:
        await whole_answers(stand, 6, 127 * 0.04, 40.0)
        refusals, _ = await tries_until_let_in(stand, 1, deadline_left_ms=4_000)
        assert refusals == 1

    play(script, Fittings(pools={POOL: 64}, paces=[ReplicaPace(20, 0.1, 20)]))


# ── one of many ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_who_waits_alone_goes_before_one_of_many() -> None:
    """Protects who asks for little beside a flood: 15 ms of prompts keep one of many waiting, and its next ones are told so."""

    async def script(stand: Stand) -> None:
        read = stand.ask(0, input_tokens=10)
        alone = [stand.ask(tenant, input_tokens=tokens) for tenant, tokens in ((1, 5), (2, 10))]
        many = [stand.ask(3, input_tokens=5) for _ in range(3)]
        await asyncio.sleep(0)
        stand.show(read)
        light = stand.ask(4, input_tokens=4)
        assert [each.waited_s for each in (*alone, light)] == [0, 0, 0]
        assert [each.waited_s for each in many] == [None] * 3 and all(stand.predicted_ms(each) > 0 for each in many)
        for each in (*alone, light):
            stand.show(each)
        assert [each.waited_s for each in many] == [0, None, None]
        stand.show(many[0])
        assert [each.waited_s for each in many] == [0, 0, 0], "the last one waits alone, beside five milliseconds"

    play(script, Fittings(pools={POOL: 16}, paces=[ReplicaPace(20, 1.0, 20)]))


# ── pools ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_pool_whose_queue_refuses_is_not_chosen() -> None:
    """Protects a tenant with two pools: the quicker one's queue is full for it, and it waits in the other's."""

    async def script(stand: Stand) -> None:
        runs = [stand.ask(1) for _ in range(5)]
        assert Counter(str(each.replica) for each in runs) == {f"{POOL}-0": 4, f"{OTHER}-0": 1}
        waiting = [stand.ask(2, input_tokens=50, max_output_tokens=16) for _ in range(5)]
        chosen = [stand.executions.get(each.tenant, each.request_id) for each in waiting]
        assert [each and each.pool for each in chosen] == [POOL, POOL, OTHER, OTHER, None]
        assert waiting[-1].code == "queue_full"

    play(script, Fittings(pools={POOL: 4, OTHER: 1}, config=CoordinatorConfig(queue_entries_per_tenant=2)))


def test_one_retry_is_enough_while_a_prompt_is_read() -> None:
    """Protects callers from a Retry-After in vain: what is left to read of a prompt falls as it is read."""

    async def script(stand: Stand) -> None:
        stand.ask(0, seconds=(4.0, 30.0), input_tokens=4_000, workload_class="long")
        refusals, after_s = await tries_until_let_in(stand, 1)
        assert (refusals, after_s) == (1, 1.501)

    play(script, Fittings(paces=[ReplicaPace(20, 1.0, 20)]))


def test_a_deadline_is_met_again_as_a_prompt_is_read() -> None:
    """Protects a feasible deadline: predicted 2.2 s for 2.0 s left, and 139 ms later it fits."""

    async def script(stand: Stand) -> None:
        stand.ask(0, seconds=(2.0, 30.0), input_tokens=2_000, input_bytes=8_000)
        refusals, _ = await tries_until_let_in(stand, 1, max_output_tokens=2, deadline_left_ms=2_000)
        assert refusals == 1

    play(script, Fittings(paces=[ReplicaPace(20, 1.0, 20)]))
