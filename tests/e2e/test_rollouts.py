"""An alias moves to another revision under load: no admitted request fails, and what is worse goes back by itself."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.http_client import wait_until
from tests.e2e.processes import children_of
from tests.e2e.rollout_stage import Load, Rollouts, actions, rollouts_of
from tests.e2e.running_cell import running_cell, start_cell

EFFECT_S = 1.0
IMPOSSIBLE = '{"id": "one", "input": "Say hello.", "max_output_tokens": 8, "expect": {"equals": "nothing that it says"}}\n'


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Rollouts]:
    with running_cell(tmp_path / "state") as cell:
        yield rollouts_of(cell)


def test_a_good_revision_is_promoted_under_load(stage: Rollouts) -> None:
    """Protects upgrades: the canary gets its share, is promoted, the former replicas stop, and nobody notices."""
    before = stage.cell.ready["aliases"][0]["model_revision"]
    revision = stage.approved("next")
    with Load(stage.cell).running() as load:
        load.wait_more(5)
        rollout = stage.started(revision)
        shown = stage.wait(rollout, "live", "rolled_back")
        assert shown["state"] == "live", shown
        since_s = time.monotonic()
        load.wait_more(20)
    assert not load.failures
    assert load.revisions()[before] > 0 and set(load.revisions(since_s)) == {revision}
    steps = ["rollout.propose", "rollout.verify", "rollout.raise_weight", "rollout.raise_weight", "rollout.promote"]
    assert actions(shown) == [*steps, "rollout.finish"]
    wait_until(lambda: {pool["revision"] for pool in stage.admin.done("GET", "/pools")["pools"]} == {revision})
    usage = stage.admin.done("GET", "/usage?group_by=revision")["rows"]
    assert {row["revision"]: row["requests"] for row in usage} == dict(load.revisions())
    assert stage.admin.done("GET", f"/revisions/{revision}")["state"] == "live"


def test_a_slow_revision_goes_back_by_itself(stage: Rollouts) -> None:
    """Protects latency: a canary that is beyond doubt slower is rolled back while clients ask, and none of them fails."""
    before = stage.cell.ready["aliases"][0]["model_revision"]
    revision = stage.approved("slow", arguments={"slowdown": 8})
    with Load(stage.cell).running() as load:
        shown = stage.wait(stage.started(revision, steps=[_step(40, 400), _step(100, 400)]), "live", "rolled_back")
        since_s = time.monotonic()
        load.wait_more(20)
    assert not load.failures
    assert (shown["state"], shown["reason"] in ("first_token", "per_token")) == ("rolled_back", True), shown
    assert load.revisions()[revision] > 0 and set(load.revisions(since_s)) == {before}
    wait_until(lambda: {pool["revision"] for pool in stage.admin.done("GET", "/pools")["pools"]} == {before})


def test_a_revision_that_fails_its_evaluation_serves_nobody(stage: Rollouts) -> None:
    """Protects every caller: what answers its evaluation set wrongly goes back before its first request."""
    revision = stage.approved("wrong", evaluation=IMPOSSIBLE)
    with Load(stage.cell, clients=2).running() as load:
        shown = stage.wait(stage.started(revision), "live", "rolled_back")
    assert (shown["state"], shown["reason"]) == ("rolled_back", "evaluation"), shown
    assert "0 of 1" in shown["detail"] and not load.failures and load.revisions()[revision] == 0


def test_rolling_back_takes_effect_at_once(tmp_path: Path) -> None:
    """Protects whoever sees something wrong: within a second no gateway sends the canary anybody, and what runs ends well."""
    with running_cell(tmp_path / "state", "--gateways", "2") as cell:
        stage = rollouts_of(cell)
        before = cell.ready["aliases"][0]["model_revision"]
        revision = stage.approved("next")
        with Load(cell, clients=8).running() as load:
            rollout = stage.started(revision, steps=[_step(50, 100_000), _step(100, 1)])
            wait_until(lambda: load.revisions()[revision] > 20)
            began_s = time.monotonic()
            stage.admin.done("POST", f"/rollouts/{rollout}/roll-back", {"detail": "It looks wrong."})
            done_s = time.monotonic()
            load.wait_more(60)
        assert done_s - began_s < EFFECT_S
        assert not load.failures and set(load.revisions(done_s)) == {before}
        _check_rolled_back(stage, rollout)


def _check_rolled_back(stage: Rollouts, rollout: str) -> None:
    shown = stage.wait(rollout, "rolled_back")
    assert (shown["reason"], shown["detail"]) == ("operator", "It looks wrong.")


def test_a_lost_canary_replica_costs_only_what_it_ran(stage: Rollouts) -> None:
    """Protects callers of the canary: at most what ran there is lost, its share is served meanwhile, and it goes on."""
    revision = stage.approved("next")
    known = set(children_of(stage.cell.process.pid))
    with Load(stage.cell).running() as load:
        rollout = stage.started(revision, steps=[_step(50, 200), _step(100, 20)], lost_ms=60_000)
        wait_until(lambda: load.revisions()[revision] > 5)
        [replica] = set(children_of(stage.cell.process.pid)) - known
        os.kill(replica, signal.SIGKILL)
        shown = stage.wait(rollout, "live", "rolled_back")
    lost = sum(load.failures.values())
    assert lost <= load.clients and set(load.failures) <= {"replica_lost", "no_capacity"}, load.failures
    assert {"rollout.lose", "rollout.regain"} <= set(actions(shown)) or shown["state"] == "rolled_back", shown


def test_a_rollout_goes_on_after_a_restart(tmp_path: Path) -> None:
    """Protects a rollout from its cell's end: what is stored goes on where it was, and a promoted revision stays."""
    state = tmp_path / "state"
    cell = start_cell(state)
    try:
        stage = rollouts_of(cell)
        revision = stage.approved("next")
        with Load(cell).running() as load:
            rollout = stage.started(revision, steps=[_step(50, 30), _step(100, 10)])
            stage.wait(rollout, "canary")
            load.wait_more(5)
    finally:
        assert cell.stop() == 0
    with running_cell(state) as again:
        stage = Rollouts(again, *(type(stage.admin)(again.ready["admin"], key.key) for key in (stage.admin, stage.approver)))
        with Load(again).running() as load:
            assert stage.wait(rollout, "live", "rolled_back")["state"] == "live"
        assert not load.failures
    with running_cell(state) as last:
        assert last.ready["aliases"][0]["model_revision"] == revision
        with Load(last, clients=1).running() as load:
            load.wait_more(3)
        assert set(load.revisions()) == {revision}


def test_a_second_rollout_waits_for_the_first(stage: Rollouts) -> None:
    """Protects the split: the second one is refused with the first one's name, until that is over."""
    first, second = stage.approved("next"), stage.approved("other")
    rollout = stage.started(first)
    refused = stage.admin.ask("POST", "/rollouts", {"alias": "assistant", "revision": second})
    assert (refused.status, refused.json["code"], refused.json["rollout"]) == (409, "not_allowed_now", rollout)
    stage.admin.done("POST", f"/rollouts/{rollout}/roll-back")
    stage.wait(rollout, "rolled_back")
    stage.started(second)


def _step(weight: int, samples_min: int) -> dict[str, int]:
    return {"weight": weight, "samples_min": samples_min, "time_min_ms": 0}
