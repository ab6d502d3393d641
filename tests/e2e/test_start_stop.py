"""Starting, stopping, being killed, starting again: what operators see, what clients see, and what is left behind."""

import asyncio
import json
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.conftest import SLOW_ROW, engine_process
from tests.e2e.http_client import Account, Wire, demo_account, exchange, wait_until
from tests.e2e.running_cell import RunningCell, kill_if_running, running_cell, start_cell

from weir.core.metering import Price
from weir.core.registry.model import Alias, EngineKind, Pool, Revision
from weir.ports import AuditEntry, CatalogChange
from weir.storage.database import open_sqlite

LONG = "river"
"""A prompt whose reply has 213 tokens: half a second on the built-in engine, seven on the slow one."""

NO_ENGINE = "http://127.0.0.1:9"
"""The discard port, where nothing listens."""


def refused_start(state: Path, *arguments: str) -> str:
    """Start a cell that must refuse, with status 2; what it said."""
    command = [sys.executable, "-m", "weir.cli.main", "up", "--state", str(state), "--listen", "127.0.0.1:0", *arguments]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""
    return done.stderr


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def keys_of(ready: dict[str, Any]) -> list[str]:
    return [application["key"] for tenant in ready["tenants"] for application in tenant["applications"]]


def ready_files(cell: RunningCell) -> list[Path]:
    return [cell.state.with_suffix(".ready.json"), cell.state / "ready.json"]


def assert_stopped_within(cell: RunningCell, seconds: float) -> None:
    """Wait for the exit of a cell that was asked to stop."""
    assert cell.process.wait(seconds) == 0, cell.tail()
    assert not any(path.exists() for path in ready_files(cell))
    assert "Traceback" not in cell.tail()


@contextmanager
def doomed_cell(state: Path, *, engine: str = "simulated", config: str = "") -> Iterator[tuple[RunningCell, Account]]:
    """A cell whose end is the test's business, and a tenant of it."""
    cell = start_cell(state, engine=(engine,), config=config)
    try:
        with demo_account(cell) as account:
            yield cell, account
    finally:
        kill_if_running(cell.process)


# ── the ready file ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_ready_file_says_everything_and_goes_with_the_cell(tmp_path: Path) -> None:
    """Protects the contract's first step: URLs, keys and aliases, for the owner's eyes only, gone at exit."""
    with running_cell(tmp_path / "state") as cell:
        ready = cell.ready
        assert set(ready) == {"api", "admin", "metrics", "admin_key", "tenants", "aliases"}
        for name in ("api", "admin", "metrics"):
            assert re.fullmatch(r"http://127\.0\.0\.1:\d+", ready[name])
        assert [tenant["name"] for tenant in ready["tenants"]] == ["acme", "globex"]
        assert [application["name"] for application in ready["tenants"][0]["applications"]] == ["assistant", "batch-jobs"]
        assert [entry["alias"] for entry in ready["aliases"]] == ["assistant"]
        for path in ready_files(cell):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600 and json.loads(path.read_text()) == ready
        assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o700
        assert {exchange(ready["api"], "GET", "/v1/models", key=key).status for key in keys_of(ready)} == {200}
        engines = children_of(cell.process.pid)
        assert engines
    assert not any(path.exists() for path in ready_files(cell))
    assert not any(is_running(pid) for pid in engines)


def test_a_second_start_keeps_everything(tmp_path: Path) -> None:
    """Protects state: tenants, keys, limits, usage and spend survive; a revoked bootstrap key shows as null and stays dead."""
    with running_cell(tmp_path / "state") as cell:
        account = demo_account(cell, "globex")
        account.limit(concurrency=7, spend_microusd_lifetime=5_000)
        account.admin.done("POST", "/tenants", {"name": "third", "time_zone": "Europe/Berlin"})
        cost = account.generate(max_output_tokens=50).json["usage"]["cost_microusd"]
        keys = account.admin.done("GET", "/tenants/acme/applications/batch-jobs/keys")["keys"]
        revoked = cell.key("acme", "batch-jobs")
        account.admin.done("DELETE", f"/tenants/acme/applications/batch-jobs/keys/{keys[0]['id']}")
        before = cell.ready
        usage, limits = account.usage("key,alias"), account.admin.done("GET", "/limits")
    with running_cell(tmp_path / "state") as cell:
        account = demo_account(cell, "globex")
        expected: Any = json.loads(json.dumps(before["tenants"]))
        expected[0]["applications"][1]["key"] = None
        assert cell.ready["tenants"] == expected and cell.ready["admin_key"] == before["admin_key"]
        assert exchange(cell.api, "GET", "/v1/models", key=revoked).status == 403
        assert account.admin.done("GET", "/tenants/third")["time_zone"] == "Europe/Berlin"
        assert account.usage("key,alias") == usage and account.admin.done("GET", "/limits") == limits
        assert account.account("spend_microusd_lifetime")["spent"] == cost
        assert account.generate(max_output_tokens=50).status == 200
        assert account.account("spend_microusd_lifetime")["spent"] == 2 * cost


def test_aliases_of_an_earlier_start_are_not_offered(tmp_path: Path) -> None:
    """Protects callers from a model that nothing serves: not in the ready file nor the list, unknown, also after a change."""
    with running_cell(tmp_path / "state"):
        pass
    asyncio.run(register_earlier_model(tmp_path / "state" / "weir.sqlite3"))
    with running_cell(tmp_path / "state") as cell:
        account = demo_account(cell)
        assert [entry["alias"] for entry in cell.ready["aliases"]] == ["assistant"]
        for _ in range(2):
            models = account.ask("GET", "/v1/models").json["data"]
            assert [model["id"] for model in models] == ["assistant"]
            refused = account.generate(model_alias="completion")
            assert (refused.status, refused.json["code"]) == (404, "unknown_alias")
            account.limit(concurrency=9)


async def register_earlier_model(database: Path) -> None:
    """Leave what a start with another engine leaves: a revision, its alias and its pool."""
    ledger, catalog = open_sqlite(database)
    revision = Revision("old@1", EngineKind.LLAMACPP, "/gone.gguf", 512, 128, 64, Price(1, 1, 1, 1))
    change = CatalogChange(
        AuditEntry(0, "bootstrap", "models.register", "models", "{}"),
        aliases=[Alias("completion", "old@1", 64)],
        revisions=[revision],
        pools=[Pool("completion", "old@1", 1, 2, on_demand=True, declared=True)],
    )
    await catalog.apply((await catalog.load()).version, change)
    await catalog.aclose()
    await ledger.aclose()


# ── bounds of the listeners ──────────────────────────────────────────────────────────────────────────────────────────


def test_a_tenant_connection_too_many_is_closed_and_administrators_still_get_in(tmp_path: Path) -> None:
    """Protects the management side from a flood of tenants' connections, and tenants once others left."""
    with running_cell(tmp_path / "state", config="[gateway]\nconnections_max = 2\n") as cell:
        first, second = Wire(cell.api), Wire(cell.api)
        for wire in (first, second):
            wire.ask("GET", "/healthz")
            assert wire.reply().status == 200
        with Wire(cell.api) as third:
            assert third.is_closed()
        assert demo_account(cell).admin.done("GET", "/tenants")
        first.close()
        wait_until(lambda: not is_turned_away(cell.api))
        second.close()


def is_turned_away(url: str) -> bool:
    try:
        return exchange(url, "GET", "/healthz").status != 200
    except (ConnectionError, EOFError, AssertionError):
        return True


def test_an_administrators_headers_are_bounded(fast_cell: RunningCell) -> None:
    """Protects the process from its management side: many headers are refused as they arrive, late ones after a time."""
    with Wire(fast_cell.ready["admin"]) as wire:
        wire.send(b"GET /admin/v1/tenants HTTP/1.1\r\nhost: x\r\n" + b"x: %b\r\n" % (b"x" * 1_000) * 100)
        reply = wire.reply()
        assert (reply.status, reply.json["code"]) == (413, "request_too_large") and reply.headers["x-request-id"]
    with Wire(fast_cell.ready["admin"]) as wire:
        wire.send(b"GET /admin/v1/tenants HTTP/1.1\r\nhost: ")
        reply = wire.reply()
        assert (reply.status, reply.json["code"]) == (400, "invalid_request")


# ── refusals to start ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_second_process_on_the_same_state_is_refused(fast_cell: RunningCell) -> None:
    """Protects the ledger's single writer: the second says who owns the directory, and the first serves on."""
    ready_file = ready_files(fast_cell)[0]
    said = refused_start(fast_cell.state, "--engine", "simulated", "--ready-file", str(ready_file))
    assert str(fast_cell.state) in said and f"owned by process {fast_cell.process.pid}" in said
    assert all(path.exists() for path in ready_files(fast_cell))
    assert demo_account(fast_cell).generate().status == 200


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("[gateway]\nbody_wait = 5\n", "'gateway.body_wait' is unknown"),
        ("[gateway]\nbody_wait_ms = 0\n", "'gateway.body_wait_ms' is 0; accepted: a whole number from 1 to"),
        ("[engine]\nexternal = true\n", "'engine.external' is set, but no --engine is a URL"),
    ],
)
def test_a_wrong_configuration_is_refused_by_name(tmp_path: Path, config: str, said: str) -> None:
    """Protects operators from settings that are silently ignored."""
    path = tmp_path / "weir.toml"
    path.write_text(config)
    assert said in refused_start(tmp_path / "state", "--engine", "simulated", "--config", str(path))
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--engine", "simulated", "--engine", NO_ENGINE), "--engine takes"),
        (("--engine", "http://me:secret@127.0.0.1:9"), "a key belongs in the file of engine.api_key_file"),
        (("--engine", "simulated", "--listen", "nowhere"), "--listen takes HOST:PORT"),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    """Protects the command line: one clear sentence and status 2."""
    assert said in refused_start(tmp_path / "state", *arguments)


def test_an_address_in_use_is_refused(fast_cell: RunningCell, tmp_path: Path) -> None:
    """Protects a running cell's clients from a second listener."""
    address = fast_cell.api.removeprefix("http://")
    said = refused_start(tmp_path / "state", "--engine", "simulated", "--listen", address)
    assert f"Cannot listen on {address}" in said


def test_an_engine_that_is_down_is_named(tmp_path: Path) -> None:
    """Protects the first five minutes with one's own engine: after the bound it says which URL did not answer."""
    config = tmp_path / "weir.toml"
    config.write_text("[engine]\nstart_ms = 600\n")
    said = refused_start(tmp_path / "state", "--engine", NO_ENGINE, "--config", str(config))
    assert f"The engine at {NO_ENGINE} did not answer within 600 ms: The replica cannot be reached." in said


def test_a_start_can_be_interrupted(tmp_path: Path) -> None:
    """Protects operators who change their mind: SIGTERM before readiness ends the start at once, with status 0."""
    command = [sys.executable, "-m", "weir.cli.main", "up", "--state", str(tmp_path / "state"), "--listen", "127.0.0.1:0"]
    with subprocess.Popen([*command, "--engine", NO_ENGINE], stderr=subprocess.PIPE, stdin=subprocess.DEVNULL) as process:
        try:
            assert process.stderr is not None and b"asking" in process.stderr.readline()
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == 0
        finally:
            kill_if_running(process)


# ── engines behind URLs ──────────────────────────────────────────────────────────────────────────────────────────────


def test_two_urls_are_two_replicas_of_one_revision(tmp_path: Path) -> None:
    """Protects `--engine URL` given twice: both serve, and while one is down the other does."""
    flags = ("--model", "Org/Model One", "--context-tokens", "4096", "--row", SLOW_ROW)
    with (
        engine_process(*flags) as first,
        engine_process(*flags) as second,
        running_cell(tmp_path / "state", engine=(first, second)) as cell,
        demo_account(cell) as account,
    ):
        wait_until(lambda: len(account.admin.done("GET", "/replicas")["replicas"]) == 2)
        wait_until(lambda: account.admin.done("GET", "/pools")["pools"][0]["ready"] == 2)
        assert cell.ready["aliases"][0]["model_revision"].startswith("org-model-one@")
        streams = [account.stream(request_id=f"r{number}", input=LONG, max_output_tokens=100) for number in range(2)]
        replicas = account.admin.done("GET", "/replicas")["replicas"]
        assert [replica["running"] for replica in replicas] == [1, 1]
        assert {replica["url"] for replica in replicas} == {first, second}
        assert {replica["context_tokens"] for replica in replicas} == {4_096}
        for number, stream in enumerate(streams):
            account.cancel(f"r{number}")
            assert stream.finish()["finish_reason"] == "client"


def test_one_of_two_urls_may_be_down_at_the_start(tmp_path: Path) -> None:
    """Protects availability: a cell with one replica up is ready."""
    with engine_process() as url, running_cell(tmp_path / "state", engine=(url, NO_ENGINE)) as cell:
        assert demo_account(cell).generate().status == 200


# ── stopping ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_drain_lets_running_streams_finish_and_refuses_new_work(tmp_path: Path) -> None:
    """Protects SIGTERM: what runs completes, what comes is told to go elsewhere, and the exit is clean and quick."""
    chat = {"model": "assistant", "messages": [{"role": "user", "content": "x"}]}
    with engine_process("--row", SLOW_ROW) as url, doomed_cell(tmp_path / "state", engine=url) as (cell, account):
        stream = account.stream(input=LONG, max_output_tokens=100)
        stream.read(3)
        cell.process.send_signal(signal.SIGTERM)
        wait_until(lambda: exchange(cell.api, "GET", "/readyz").status == 503)
        assert exchange(cell.api, "GET", "/readyz").json == {"status": "not_ready"}
        assert exchange(cell.api, "GET", "/healthz").status == 200
        refused = account.generate()
        assert refused.status == 503 and refused.json["code"] == "draining" and int(refused.headers["retry-after"]) >= 1
        refused = account.ask("POST", "/v1/chat/completions", chat)
        assert refused.status == 503 and refused.json["error"]["code"] == "draining"
        done = stream.finish()
        assert (done["status"], done["usage"]["output_tokens"]) == ("completed", 100)
        assert done["usage"]["settlement"] == "posted"
        assert_stopped_within(cell, 10)


def test_a_stream_longer_than_the_grace_ends_as_shutdown(tmp_path: Path) -> None:
    """Protects clients of a stopping cell: a terminal event, never a raw cut, and nothing to pay; later the record says so."""
    state, config = tmp_path / "state", "[coordinator]\ndrain_grace_ms = 300\n"
    with engine_process("--row", SLOW_ROW) as url:
        with doomed_cell(state, engine=url, config=config) as (cell, account):
            stream = account.stream(request_id="cut", input=LONG)
            stream.read(3)
            whole = account.connect()
            whole.ask("POST", "/v1/generations", key=account.key, body={"model_alias": "assistant", "input": LONG})
            wait_until(lambda: account.admin.done("GET", "/pools")["pools"][0]["running"] == 2)
            cell.process.send_signal(signal.SIGTERM)
            done = stream.finish()
            assert (done["status"], done["finish_reason"], done["error"]["code"]) == ("failed", "shutdown", "shutdown")
            assert done["usage"]["cost_microusd"] == 0 and done["usage"]["output_tokens"] > 0
            reply = whole.reply()
            assert reply.status == 503 and reply.json["finish_reason"] == "shutdown"
            assert_stopped_within(cell, 10)
        with running_cell(state, engine=(url,)) as again:
            record = demo_account(again).get("cut").json
            assert {name: record[name] for name in ("status", "finish_reason", "usage")} == {
                name: done[name] for name in ("status", "finish_reason", "usage")
            }


def test_a_killed_cell_leaves_no_engine_and_starts_again(tmp_path: Path) -> None:
    """Protects a machine and a ledger from kill -9: children end by themselves, and the open hold costs its tenant nothing."""
    with doomed_cell(tmp_path / "state") as (cell, account):
        engines = children_of(cell.process.pid)
        assert engines and all(is_running(pid) for pid in engines)
        account.stream(request_id="crashed", input=LONG).read(3)
        cell.process.kill()
        cell.process.wait(10)
        wait_until(lambda: not any(is_running(pid) for pid in engines))
    with running_cell(tmp_path / "state") as again:
        after = demo_account(again)
        record = after.get("crashed").json
        assert (record["status"], record["finish_reason"]) == ("failed", "coordinator_lost")
        assert record["usage"]["cost_microusd"] == 0 and record["usage"]["basis"] == "uncertain"
        assert after.account("spend_microusd_lifetime")["held"] == after.account("spend_microusd_lifetime")["spent"] == 0
        assert after.generate(max_output_tokens=3).status == 200
