"""Several pools of one revision, from a configuration file: kept, shown, and served behind one alias."""

from pathlib import Path

from tests.e2e.http_client import Json, admin_of, demo_account, metrics, wait_until
from tests.e2e.processes import children_of
from tests.e2e.rollout_stage import Load, rollouts_of
from tests.e2e.running_cell import running_cell
from tests.e2e.test_start_stop import refused_start

CONFIG = """
[pool]
service_classes = ["interactive"]
concurrency = 4

[pools.jobs]
service_classes = ["batch"]
input_tokens_max = 4000
concurrency = 8

[pools.globex-own]
tenant = "globex"
"""


def test_pools_are_kept_shown_and_gone_with_their_configuration(tmp_path: Path) -> None:
    """Protects a configuration of several pools: one alias and revision, each pool ready before the cell is, shown as set."""
    with running_cell(tmp_path / "state", config=CONFIG) as cell:
        admin = admin_of(cell)
        [alias] = cell.ready["aliases"]
        shown = admin.done("GET", "/pools")["pools"]
        assert [
            (pool["name"], pool["tenant"], pool["service_classes"], pool["input_tokens_max"], pool["concurrency"])
            for pool in shown
        ] == [
            ("assistant", None, ["interactive"], None, 4),
            ("globex-own", "globex", ["interactive", "batch"], None, 4),
            ("jobs", None, ["batch"], 4_000, 8),
        ]
        assert {(pool["revision"], pool["replicas"], pool["ready"]) for pool in shown} == {(alias["model_revision"], 1, 1)}
        replicas = admin.done("GET", "/replicas")["replicas"]
        assert sorted((each["pool"], each["state"]) for each in replicas) == [(pool["name"], "ready") for pool in shown]
        lanes = {name: value for name, value in metrics(cell).items() if name.startswith("weir_lanes{")}
        assert [free_lanes(lanes, pool["name"]) for pool in shown] == [pool["concurrency"] for pool in shown]
        assert demo_account(cell).generate(max_output_tokens=4).status == 200
    with running_cell(tmp_path / "state") as again:
        wait_until(lambda: [pool["ready"] for pool in admin_of(again).done("GET", "/pools")["pools"]] == [1])
        assert demo_account(again).generate(max_output_tokens=4).status == 200


def free_lanes(lanes: dict[str, float], pool: str) -> float:
    """A pool's free lanes: exactly one sample has them."""
    [value] = [value for name, value in lanes.items() if f'pool="{pool}"' in name and 'state="free"' in name]
    return value


def test_pools_come_change_and_go_while_tenants_ask(tmp_path: Path) -> None:
    """Protects operators who change pools of a running cell: each takes effect, a bad one says why, and nobody is failed."""
    with running_cell(tmp_path / "state") as cell, Load(cell).running() as load:
        stage = rollouts_of(cell)
        [alias] = cell.ready["aliases"]

        def pools() -> dict[str, Json]:
            return {pool["name"]: pool for pool in stage.admin.done("GET", "/pools")["pools"]}

        def pids() -> set[int]:
            return set(children_of(cell.process.pid))

        first = pids()
        stage.admin.done("POST", "/pools", {"name": "more", "revision": alias["model_revision"], "concurrency": 2})
        wait_until(lambda: pools()["more"]["ready"] == 1)
        [second] = pids() - first
        stage.admin.done("PATCH", "/pools/more", {"concurrency": 3})
        wait_until(lambda: second not in pids() and pools()["more"]["ready"] == 1)
        assert len(pids()) == 2 and pools()["more"]["concurrency"] == 3
        stage.admin.done("PATCH", "/pools/more", {"replicas": 2})
        wait_until(lambda: pools()["more"]["ready"] == 2)
        revision = stage.approved("elsewhere", engine="openai", artifact=None, served="model")
        stage.admin.done("POST", "/pools", {"name": "bad", "revision": revision, "urls": ["http://127.0.0.1:9"]})
        wait_until(lambda: pools()["bad"]["detail"] == "The replica cannot be reached.")
        assert pools()["more"]["detail"] is None
        for name in ("bad", "more"):
            stage.admin.done("POST", f"/pools/{name}/retire")
        wait_until(lambda: set(pools()) == {"assistant"} and pids() == first)
        load.wait_more(8)
    assert not load.failures and set(load.revisions()) == {alias["model_revision"]}


def test_a_pool_without_engines_of_its_own_refuses_the_start(tmp_path: Path) -> None:
    """Protects operators: addresses for an engine that is started here are refused before anything is, naming the key."""
    config = tmp_path / "weir.toml"
    config.write_text('[pools.jobs]\nurls = ["http://127.0.0.1:9"]\n')
    said = refused_start(tmp_path / "state", "--engine", "simulated", "--config", str(config))
    assert "'pools.jobs.urls'" in said and not (tmp_path / "state").exists()
