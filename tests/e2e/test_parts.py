"""Coordinator, control and gateways as processes of their own: one platform, and each of them may die alone."""

import asyncio
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.ending_stage import Stage, read_shown, streaming, wait_until
from tests.e2e.parts_stage import Part, Parts, generated, parts, refusal, served_again, value_of
from tests.e2e.processes import children_of, wait_process_gone
from tests.e2e.running_cell import START_S
from tests.e2e.scripted_engine import Script, ScriptedEngine
from tests.e2e.sse_client import ask

LONG = Script(tokens=150, gap_ms=20)
"""Three seconds: longer than a start of control takes to be heard."""
VALID_MS = 2_000


@pytest.fixture(scope="module")
def whole(engine: ScriptedEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A coordinator, control and two gateways that all serve."""
    with parts(tmp_path_factory.mktemp("whole")) as made:
        coordinator = made.coordinator("a")
        coordinator.said()
        control = made.control(engine.url)
        gateways = [made.gateway("first"), made.gateway("second")]
        yield made.stage(control, coordinator, gateways)
        for part in reversed(made.parts):
            assert part.stop() == 0, part.tail()


# ── together ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_parts_serve_as_one_platform(whole: Stage) -> None:
    """Protects the whole: a tenant made through control is served by both gateways, exactly within its limits."""
    caller = await whole.caller()
    urls = whole.cell.ready["gateways"]
    for number, url in enumerate(urls):
        assert (await generated(url, caller, f"served-{number}")).status == 200
    await whole.admin("PUT", "limits", {"scope": {"tenant": caller.tenant}, "concurrency": 3})
    many = [generated(urls[number % 2], caller, f"many-{number}", Script(tokens=30, gap_ms=20)) for number in range(10)]
    assert sorted([answer.status for answer in await asyncio.gather(*many)]) == [200] * 3 + [429] * 7
    await whole.check_quiet()


async def test_a_revoked_key_is_refused_by_every_gateway_and_its_stream_ends(whole: Stage) -> None:
    """Protects revocation: once the change is answered no gateway takes the key; a stream ends as revoked within a second."""
    caller = await whole.caller()
    first, second = whole.cell.ready["gateways"]
    async with streaming(second, caller, "revoked", LONG) as call:
        began = time.monotonic()
        await whole.revoke(caller)
        for url in (first, second):
            assert (await ask(url, "/v1/models", key=caller.secret)).status == 403
        assert (await read_shown(call)).reason == "revoked"
        assert time.monotonic() - began < 1
    await whole.check_ended(caller, "revoked", "revoked", "tenant")


async def test_what_administrators_ask_is_answered_through_control(whole: Stage) -> None:
    """Protects operations: accounts, replicas, pools, records and explanations are the coordinator's, shown by control."""
    caller = await whole.caller()
    assert (await generated(whole.cell.api, caller, "asked")).status == 200
    ledger = await whole.admin("GET", f"ledger?tenant={caller.tenant}")
    assert ledger["open_holds"] == 0 and {row["kind"] for row in ledger["accounts"]} >= {"spend_microusd_lifetime"}
    [replica] = (await whole.admin("GET", "replicas"))["replicas"]
    assert (replica["state"], replica["pool"], replica["capabilities"]["counts_tokens"]) == ("ready", "assistant", True)
    [pool] = (await whole.admin("GET", "pools"))["pools"]
    assert (pool["name"], pool["ready"], pool["replicas"]) == ("assistant", 1, 1)
    record = await whole.admin("GET", f"generations/{caller.tenant}/asked")
    assert (record["status"], record["model_alias"]) == ("completed", "assistant")
    explained = await whole.admin("GET", f"generations/{caller.tenant}/asked/explanation")
    assert "dispatched" in {event["event"] for event in explained["timelines"][0]["events"]}
    unknown = await ask(
        whole.cell.ready["admin"], f"/admin/v1/generations/{caller.tenant}/never", key=whole.cell.ready["admin_key"]
    )
    assert (unknown.status, unknown.json["code"]) == (404, "not_found")
    assert (await whole.usage(caller.tenant))[0]["requests"] == 1
    assert await value_of(whole.cell.ready["control_metrics"], "weir_control_linked") == 1


# ── one of them is lost ──────────────────────────────────────────────────────────────────────────────────────────────


async def test_control_is_killed_and_started_again(engine: ScriptedEngine, tmp_path: Path) -> None:
    """Protects tenants from control's death: streams go on and requests are served until what is approved is too old."""
    with parts(tmp_path, VALID_MS) as made:
        coordinator = made.coordinator("a")
        coordinator.said()
        control = made.control(engine.url)
        url = made.gateway("first")
        stage = made.stage(control, coordinator, [url])
        caller = await stage.caller()
        metrics = coordinator.said()["metrics"]
        async with streaming(url, caller, "through", LONG) as call:
            control.kill()
            assert (await generated(url, caller, "without")).status == 200
            left_s = await value_of(metrics, "weir_snapshot_valid_seconds")
            assert 0 < left_s <= VALID_MS / 1e3

            async def expired() -> bool:
                return await value_of(metrics, "weir_snapshot_valid_seconds") == 0

            await wait_until(expired, "what is approved is too old")
            assert await refusal(url, caller, "late") == "snapshot_expired"
            assert (await read_shown(call)).reason == "stop"
        control = made.control(engine.url)
        await served_again(url, caller, "again", ["snapshot_expired"])
        stage = made.stage(control, coordinator, [url])
        assert (await stage.admin("GET", "replicas"))["replicas"][0]["state"] == "ready"
        await stage.check_quiet()


async def test_a_stream_outlives_controls_restart(engine: ScriptedEngine, tmp_path: Path) -> None:
    """Protects streams: for an engine behind a URL another life of control means nothing; its replica keeps lane and name."""
    with parts(tmp_path) as made:
        coordinator = made.coordinator("a")
        coordinator.said()
        control = made.control(engine.url)
        url = made.gateway("first")
        stage = made.stage(control, coordinator, [url])
        caller = await stage.caller()
        [before] = (await stage.admin("GET", "replicas"))["replicas"]
        async with streaming(url, caller, "through", Script(tokens=400, gap_ms=20)) as call:
            assert control.stop() == 0, control.tail()
            assert (await generated(url, caller, "between")).status == 200
            again = made.control(engine.url)
            stage = await asyncio.to_thread(made.stage, again, coordinator, [url])
            [after] = (await stage.admin("GET", "replicas"))["replicas"]
            assert (after["name"], after["state"], after["running"]) == (before["name"], "ready", 1)
            assert (await read_shown(call)).reason == "stop"
        await stage.check_quiet()
        assert (await stage.admin("GET", f"generations/{caller.tenant}/through"))["status"] == "completed"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
async def test_a_standby_coordinator_takes_over_and_engines_go_on(tmp_path: Path, number: signal.Signals) -> None:
    """Protects availability: control and gateways find the coordinator that leads now; no engine is started again.

    What is changed while none leads is answered as pending, and in force with the one that leads then.
    """
    with parts(tmp_path) as made:
        first = made.coordinator("a")
        first.said()
        control = made.control("simulated", "ab")
        url = made.gateway("first", "ab")
        stage = made.stage(control, first, [url])
        caller, revoked = await stage.caller(), await stage.caller()
        second = made.coordinator("b", "--standby")
        engines = children_of(control.process.pid)
        assert len(engines) == 1 and (await generated(url, caller, "before")).status == 200
        first.process.send_signal(number)
        path = f"/admin/v1/tenants/{revoked.tenant}/applications/app/keys/{revoked.key_id}"
        admin, key = stage.cell.ready["admin"], stage.cell.ready["admin_key"]
        changed = await ask(admin, path, method="DELETE", key=key)
        assert (changed.status, changed.json["pending"]) == (202, ["coordinator"])
        await served_again(url, caller, "after", ["coordinator_lost", "no_capacity"])
        assert (await ask(url, "/v1/models", key=revoked.secret)).status == 403
        stage = made.stage(control, second, [url])
        assert children_of(control.process.pid) == engines
        await stage.admin("PUT", "limits", {"scope": {"tenant": caller.tenant}, "concurrency": 0})
        assert (await generated(url, caller, "none")).status in (400, 429)
        assert (await ask(url, "/v1/generations/before", key=caller.secret)).json["status"] == "completed"
        if number is signal.SIGSTOP:
            first.process.send_signal(signal.SIGCONT)
            assert await asyncio.to_thread(first.process.wait, START_S) == 2
            assert "A newer coordinator" in first.tail() and (await generated(url, revoked, "revoked")).status == 403
        assert second.stop() == 0 and control.stop() == 0
        assert all(wait_process_gone(pid, 5) for pid in engines)


async def test_the_control_that_was_started_last_is_the_one(engine: ScriptedEngine, tmp_path: Path) -> None:
    """Protects a cell from two controls: the one before ends, saying why, and the other goes on without a flap."""
    with parts(tmp_path) as made:
        coordinator = made.coordinator("a")
        coordinator.said()
        former = made.control(engine.url)
        made.ready(former)
        present = made.control(engine.url, name="present")
        made.ready(present, "present")
        assert await asyncio.to_thread(former.process.wait, START_S) == 2
        assert "Another control was started" in former.tail()
        assert coordinator.log.read_text().count('"control_connected"') == 2 and present.process.poll() is None
        assert present.stop() == 0


# ── refused ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("command", ["coordinator", "control"])
def test_parts_need_a_shared_database(tmp_path: Path, command: str) -> None:
    """Protects operators: SQLite is one process's, and the start says so."""
    made = Parts(tmp_path, "")
    asked = ("--connect", f"unix:{tmp_path}/a") if command == "control" else ()
    part: Part = made.start(command, command, "--state", str(tmp_path / "state"), *asked)
    assert part.process.wait(START_S) == 2 and "needs a PostgreSQL database" in part.tail()
    assert "Traceback" not in part.tail()


def test_a_coordinator_needs_a_place_to_listen(tmp_path: Path) -> None:
    """Protects operators: a coordinator that nobody can connect to is refused before it leads."""
    made = Parts(tmp_path, "")
    part = made.start("a", "coordinator", "--database", "postgresql://127.0.0.1:1/none", "--state", str(tmp_path / "state"))
    assert part.process.wait(START_S) == 2 and "link.listen" in part.tail() and "Traceback" not in part.tail()
