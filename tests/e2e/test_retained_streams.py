"""Streams that are kept: cut at any event and read on from any gateway, shown again, bounded, sealed, and deleted."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from tests.e2e.ending_stage import Caller, Stage, wait_until
from tests.e2e.retained_stage import (
    KEPT,
    KeptSurface,
    Reader,
    again,
    following,
    keeper,
    record_of,
    rest_of,
    streaming,
)
from tests.e2e.running_cell import running_cell
from tests.e2e.scripted_engine import Script, ScriptedEngine
from tests.e2e.sse_client import ask, bearer, calling
from tests.e2e.test_gateways import owner_of

CONFIG = """
[pool]
concurrency = 32
[link]
heartbeat_ms = 200
silence_ms = 1200
lease_ms = 2000
[retention]
sweep_ms = 200
"""
SHORT = Script(tokens=6, gap_ms=15, word=" wört\n\n")
LONG = Script(tokens=2_000, gap_ms=20)
MARK = "Zanzibar-otter"


@pytest.fixture(scope="module")
def stage(engine: ScriptedEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A cell with two gateways on the scripted engine."""
    state = tmp_path_factory.mktemp("retained") / "state"
    with running_cell(state, "--gateways", "2", engine=(engine.url,), config=CONFIG) as cell:
        yield Stage(cell)
        assert "Traceback" not in cell.log.read_text()


def urls_of(stage: Stage) -> tuple[str, str]:
    """Both gateways."""
    first, second = stage.cell.ready["gateways"]
    return first, second


async def settled(stage: Stage, caller: Caller, request_id: str, status: str) -> None:
    """It has ended so."""

    async def has_ended() -> bool:
        return bool((await record_of(stage.cell.api, caller, request_id))["status"] == status)

    await wait_until(has_ended, f"{request_id} is {status}")


# ── resuming ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("surface", KEPT.values(), ids=KEPT)
@pytest.mark.parametrize("is_elsewhere", [False, True], ids=["same gateway", "other gateway"])
async def test_a_stream_that_is_cut_at_any_event_goes_on(stage: Stage, surface: KeptSurface, is_elsewhere: bool) -> None:
    """Protects clients whose connection is lost: what they had and what they get is the stream, cut at any event."""
    caller = await keeper(stage)
    first, second = urls_of(stage)
    async with streaming(first, caller, surface, SHORT, "whole") as call:
        whole = await Reader(call).take()
    for count in range(1, len(whole) + 1):
        request_id = f"cut-{count}"
        async with streaming(first, caller, surface, SHORT, request_id) as call:
            had = await Reader(call).take(count)
        rest = await rest_of(second if is_elsewhere else first, caller, surface, request_id, count - 1)
        stream = await rest_of(second, caller, surface, request_id, None)
        assert had + rest == stream and len(stream) == len(whole)
        assert await rest_of(first, caller, surface, request_id, len(stream) - 1) == []
        await settled(stage, caller, request_id, "completed")
    rows = {row["status"]: row["requests"] for row in await stage.usage(caller.tenant)}
    assert rows == {"completed": len(whole) + 1}


@pytest.mark.parametrize("surface", KEPT.values(), ids=KEPT)
async def test_readers_of_a_running_stream_see_the_same(stage: Stage, surface: KeptSurface) -> None:
    """Protects second readers: attached at both gateways while it runs, each gets every byte."""
    caller = await keeper(stage)
    first, second = urls_of(stage)
    async with streaming(first, caller, surface, Script(tokens=40, gap_ms=20), "shared") as call:
        reader = Reader(call)
        had = await reader.take(3)
        readers = [asyncio.create_task(rest_of(url, caller, surface, "shared", 1)) for url in (first, second, second)]
        stream = had + await reader.take()
        assert await asyncio.gather(*readers) == [stream[2:]] * 3


@pytest.mark.parametrize("surface", KEPT.values(), ids=KEPT)
@pytest.mark.parametrize("was_stream", [True, False], ids=["from a stream", "from a whole answer"])
async def test_a_request_id_is_answered_again(stage: Stage, surface: KeptSurface, was_stream: bool) -> None:
    """Protects retries: the same id and body are answered with what was kept, as this call wants it, and run once."""
    caller = await keeper(stage)
    first, second = urls_of(stage)
    made = await again(first, caller, surface, SHORT, "mine", stream=was_stream)
    assert made.status == 200 and "weir-replayed" not in made.headers
    streams = [await again(url, caller, surface, SHORT, "mine", stream=True) for url in (first, second)]
    wholes = [await again(url, caller, surface, SHORT, "mine", stream=False) for url in (first, second)]
    for answer in streams + wholes:
        assert (answer.status, answer.headers["weir-replayed"]) == (200, "true")
    assert made.body in (streams[0].body, wholes[0].body)
    assert streams[0].body == streams[1].body and wholes[0].json == wholes[1].json
    assert SHORT.text in (output_of(surface, wholes[0].json), output_of(surface, wholes[1].json))
    assert [row["requests"] for row in await stage.usage(caller.tenant)] == [1]
    other = Script(tokens=7)
    assert (await again(first, caller, surface, other, "mine", stream=False)).status == 422


def output_of(surface: KeptSurface, body: Any) -> str:
    """The text of a whole answer, or of a record."""
    return str(body["output"] if surface.name == "native" else body["output"][0]["content"][0]["text"])


@pytest.mark.parametrize("surface", KEPT.values(), ids=KEPT)
async def test_an_event_that_is_not_there_is_refused(stage: Stage, surface: KeptSurface) -> None:
    """Protects clients from silence: a number beyond the last event, or none at all, is a 400 that names it."""
    caller = await keeper(stage)
    await again(stage.cell.api, caller, surface, SHORT, "mine", stream=True)
    size = len(await rest_of(stage.cell.api, caller, surface, "mine", None))
    for wrong in (size, 10**17, "-1", "x", "1.5", ""):
        path, headers = surface.rest("mine", wrong)
        async with calling(stage.cell.api, path, method="GET", headers=bearer(caller.secret, headers)) as call:
            answer = await call.answer()
        assert answer.status == 400, (wrong, answer.body)
        assert b"Last-Event-ID" in answer.body or b"starting_after" in answer.body


# ── a lost client ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("surface", KEPT.values(), ids=KEPT)
async def test_nobody_reads_for_the_grace(stage: Stage, surface: KeptSurface) -> None:
    """Protects budgets: a generation that nobody reads goes on for the grace, then it is cancelled, and its stream says so."""
    caller = await keeper(stage, resume_grace_seconds=1)
    async with streaming(stage.cell.api, caller, surface, LONG, "left") as call:
        had = await Reader(call).take(4)
    await settled(stage, caller, "left", "cancelled")
    stream = await rest_of(stage.cell.api, caller, surface, "left", None)
    assert stream[:4] == had and 30 < len(stream) < 400
    assert (await record_of(stage.cell.api, caller, "left"))["finish_reason"] == "disconnect"


@pytest.mark.parametrize("is_elsewhere", [False, True], ids=["same gateway", "other gateway"])
async def test_a_reader_keeps_it_going(stage: Stage, is_elsewhere: bool) -> None:
    """Protects resumed streams: one that is read, wherever, outlives its grace; without its reader it ends after one more."""
    caller, surface = await keeper(stage, resume_grace_seconds=1), KEPT["native"]
    first, second = urls_of(stage)
    async with streaming(first, caller, surface, LONG, "read") as call:
        await Reader(call).take(2)
    async with following(second if is_elsewhere else first, caller, surface, "read", 1) as call:
        reader = Reader(call)
        for _ in range(30):  # at 20 ms each three graces
            await reader.take(5)
        assert (await record_of(first, caller, "read"))["status"] == "running"
    await settled(stage, caller, "read", "cancelled")


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "no stream"])
async def test_background_work_runs_to_its_end(stage: Stage, stream: bool) -> None:
    """Protects offline callers: what runs in the background needs no reader, and is shown whole once it has ended."""
    caller, surface = await keeper(stage, resume_grace_seconds=1), KEPT["responses"]
    script = Script(tokens=120, gap_ms=20)
    body = surface.body(script, "far", stream=stream, background=True)
    headers = bearer(caller.secret, surface.headers("far"))
    async with calling(stage.cell.api, surface.path, body=body, headers=headers) as call:
        if stream:
            await Reader(call).take(3)
        else:
            answer = await call.answer()
            assert (answer.status, answer.json["status"], answer.json["background"]) == (200, "in_progress", True)
    shown = await ask(stage.cell.api, surface.shown("far"), key=caller.secret)
    assert (shown.json["status"], shown.json["store"]) == ("in_progress", True)
    await settled(stage, caller, "far", "completed")
    shown = await ask(stage.cell.api, surface.shown("far"), key=caller.secret)
    assert (shown.json["status"], output_of(surface, shown.json)) == ("completed", script.text)


async def test_a_whole_answer_outlives_its_caller(stage: Stage) -> None:
    """Protects retries of answers that are not streamed: the caller leaves, and its retry gets the answer, once it is made."""
    caller, surface = await keeper(stage), KEPT["native"]
    script = Script(tokens=20, gap_ms=20)
    body = surface.body(script, "late", stream=False)
    async with calling(stage.cell.api, surface.path, body=body, headers=bearer(caller.secret)):
        await stage.wait_status(caller, "late", "running")
    await settled(stage, caller, "late", "completed")
    answer = await again(stage.cell.api, caller, surface, script, "late", stream=False)
    assert (answer.status, answer.headers["weir-replayed"], answer.json["output"]) == (200, "true", script.text)


async def test_a_slow_reader_is_dropped_and_not_the_generation(stage: Stage) -> None:
    """Protects generations from their readers: one that takes nothing is cut off; the stream is whole for the next."""
    caller, surface = await keeper(stage), KEPT["native"]
    script = Script(tokens=600, word=" " + "w" * 4_000)
    body = surface.body(script, "slow")
    headers = bearer(caller.secret)
    async with calling(stage.cell.api, surface.path, body=body, headers=headers, receive_bytes=4_096) as call:
        assert await call.head() == 200
        await settled(stage, caller, "slow", "completed")
        stream = await rest_of(stage.cell.api, caller, surface, "slow", None)
    assert len(stream) == script.tokens + 2


# ── what is left when a part dies ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("surface", KEPT.values(), ids=KEPT)
async def test_a_gateway_is_killed_in_mid_stream(stage: Stage, surface: KeptSurface) -> None:
    """Protects what was delivered: it is readable at the other gateway, its end says failed, and the platform pays, once."""
    caller = await keeper(stage)
    first, second = urls_of(stage)
    async with streaming(first, caller, surface, LONG, "killed") as call:
        had = await Reader(call).take(20)
        os.kill(owner_of(first, stage.cell), signal.SIGKILL)
        stream = await rest_of(second, caller, surface, "killed", None)
    assert stream[:20] == had
    assert await rest_of(second, caller, surface, "killed", 9) == stream[10:]
    record = await record_of(second, caller, "killed")
    assert record["status"] == "failed" and record["usage"]["cost_microusd"] == 0
    assert b"failed" in stream[-1] and stream[-1].startswith(
        (b"id: %d\nevent: done" % (len(stream) - 1), b"event: response.failed")
    )
    [row] = await stage.usage(caller.tenant)
    assert (row["requests"], row["status"]) == (1, "failed")

    async def serves() -> bool:
        try:
            return (await ask(first, "/readyz")).status == 200
        except OSError:
            return False

    await wait_until(serves, "the gateway is started again", 20.0)
    assert await rest_of(first, caller, surface, "killed", None) == stream


# ── bounds, deletion, secrecy ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("surface", KEPT.values(), ids=KEPT)
async def test_what_is_deleted_is_gone(stage: Stage, surface: KeptSurface) -> None:
    """Protects the right to forget: by request, by time, with the policy and with the tenant; the record stays readable."""
    caller = await keeper(stage)
    other = await keeper(stage)
    for request_id in ("by-request", "by-policy"):
        await again(stage.cell.api, caller, surface, SHORT, request_id, stream=True)
    assert (await ask(stage.cell.api, surface.kept("by-request"), method="DELETE", key=other.secret)).status == 404
    gone = await ask(stage.cell.api, surface.kept("by-request"), method="DELETE", key=caller.secret)
    assert gone.status == 200
    assert (await ask(stage.cell.api, surface.kept("by-request"), method="DELETE", key=caller.secret)).status == 410
    await check_gone(stage, caller, surface, "by-request")
    await rest_of(stage.cell.api, caller, surface, "by-policy", None)
    await stage.admin("PATCH", f"tenants/{caller.tenant}", {"retention": None})
    await check_gone(stage, caller, surface, "by-policy")
    await wait_until(lambda: has_files(stage, caller.tenant, False), "its files are deleted")


async def test_a_deleted_tenant_leaves_no_streams(stage: Stage) -> None:
    """Protects the right to forget: with a tenant all goes that was kept for it, and its key is refused."""
    caller, surface = await keeper(stage), KEPT["native"]
    await again(stage.cell.api, caller, surface, SHORT, "mine", stream=True)
    assert await has_files(stage, caller.tenant, True)
    await stage.admin("DELETE", f"tenants/{caller.tenant}")
    for url in urls_of(stage):
        async with following(url, caller, surface, "mine", None) as call:
            assert await call.head() == 403
    await wait_until(lambda: has_files(stage, caller.tenant, False), "its files are deleted")


async def test_a_revoked_reader_is_cut_off(stage: Stage) -> None:
    """Protects revocation: who follows a stream with a key that is revoked reads no further, at the other gateway too.

    It sees the end that the revocation makes, if that comes first, or is cut off.
    """
    caller, surface = await keeper(stage), KEPT["native"]
    first, second = urls_of(stage)
    async with streaming(first, caller, surface, LONG, "watched") as call:
        await Reader(call).take(2)
        async with following(second, caller, surface, "watched", None) as other:
            await Reader(other).take(2)
            await stage.revoke(caller)
            with suppress(ConnectionError, EOFError):
                assert b'"revoked"' in (await Reader(other).take())[-1]
    await settled_by_admin(stage, caller, "watched")


async def settled_by_admin(stage: Stage, caller: Caller, request_id: str) -> None:
    """It has ended, as the management API shows: its own key is no more."""

    async def has_ended() -> bool:
        record = await stage.admin("GET", f"generations/{caller.tenant}/{request_id}")
        return bool(record["finish_reason"] == "revoked")

    await wait_until(has_ended, f"{request_id} was revoked")


async def check_gone(stage: Stage, caller: Caller, surface: KeptSurface, request_id: str) -> None:
    """410 at both gateways, and the final status is readable."""
    for url in urls_of(stage):
        async with following(url, caller, surface, request_id, None) as call:
            answer = await call.answer()
        assert answer.status == 410 and b"stream_not_retained" in answer.body
        assert (await record_of(url, caller, request_id))["status"] == "completed"
    retried = await again(stage.cell.api, caller, surface, SHORT, request_id, stream=True)
    assert retried.status in (400, 409), retried.body


async def has_files(stage: Stage, tenant: str, wanted: bool) -> bool:
    """Whether anything of a tenant is stored, and that is as wanted."""
    folder = stage.cell.state / "streams" / tenant
    return bool(folder.exists() and any(folder.iterdir())) == wanted


async def test_time_and_bytes_are_bounded(stage: Stage) -> None:
    """Protects disks and tenants: streams go when their time is over, and the oldest go where there are too many bytes."""
    surface = KEPT["native"]
    brief = await keeper(stage, seconds=1)
    await again(stage.cell.api, brief, surface, SHORT, "brief", stream=True)
    await wait_until(lambda: has_files(stage, brief.tenant, False), "its time is over")
    await check_gone(stage, brief, surface, "brief")
    small = await keeper(stage, bytes=65_536)
    script = Script(tokens=10, word=" " + "w" * 1_000)
    for number in range(12):
        assert (await again(stage.cell.api, small, surface, script, f"it-{number}", stream=True)).status == 200
        stored = sum(path.stat().st_size for path in (stage.cell.state / "streams" / small.tenant).rglob("*") if path.is_file())
        assert stored < 65_536 + 16_384
    async with following(stage.cell.api, small, surface, "it-0", None) as call:
        assert await call.head() == 410
    assert len(await rest_of(stage.cell.api, small, surface, "it-11", None)) == 12


async def test_a_stream_above_its_tenants_bytes_is_cut_and_its_client_goes_on(stage: Stage) -> None:
    """Protects the bound and the client: a stream that is larger than everything it may take is answered and not kept."""
    caller, surface = await keeper(stage, bytes=65_536), KEPT["native"]
    script = Script(tokens=100, word=" " + "w" * 2_000)
    answer = await again(stage.cell.api, caller, surface, script, "large", stream=True)
    assert answer.status == 200 and answer.body.count(b"event: output") == 100 and b"event: done" in answer.body
    async with following(stage.cell.api, caller, surface, "large", None) as call:
        assert await call.head() == 410


async def test_a_tenant_that_keeps_nothing_is_refused(stage: Stage) -> None:
    """Protects tenants that did not ask for it: nothing is kept without a policy, and the refusal names the field."""
    caller = await stage.caller()
    for surface, fields in (("native", {}), ("responses", {}), ("responses", {"background": True})):
        shape = KEPT[surface]
        body = shape.body(SHORT, "none", **fields)
        answer = await ask(stage.cell.api, shape.path, method="POST", key=caller.secret, body=body)
        assert answer.status == 400 and b"unsupported_field" in answer.body, answer.body


async def test_text_lies_only_in_sealed_segments(stage: Stage) -> None:
    """Protects privacy: no prompt and no output of a stream that is kept is in any file or log in clear."""
    caller = await keeper(stage)
    script = Script(tokens=8, word=f" {MARK}", note=f"prompt-{MARK}")
    for surface in KEPT.values():
        await again(stage.cell.api, caller, surface, script, f"sealed-{surface.name}", stream=True)
        stream = b"".join(await rest_of(stage.cell.api, caller, surface, f"sealed-{surface.name}", None))
        assert stream.count(MARK.encode()) >= 8
    files = [path for path in stage.cell.state.rglob("*") if path.is_file()]
    assert any("streams" in path.parts for path in files)
    for path in [*files, stage.cell.log]:
        content = path.read_bytes()
        assert MARK.encode() not in content and b'"text"' not in content, path


async def test_keys_are_rotated(stage: Stage) -> None:
    """Protects rotation: with a new key old streams stay readable until their own key is dropped, and then they are not."""
    caller, surface = await keeper(stage), KEPT["native"]
    key_file = stage.cell.state / "retention-keys"
    await again(stage.cell.api, caller, surface, SHORT, "old", stream=True)
    [old] = (key["id"] for key in json.loads(run_weir("retention", "keys", "--state", str(stage.cell.state), "--json")))
    run_weir("retention", "rotate-key", "--state", str(stage.cell.state))
    await again(stage.cell.api, caller, surface, SHORT, "new", stream=True)
    assert len(await rest_of(stage.cell.api, caller, surface, "old", None)) == len(SHORT.text.split()) + 2
    run_weir("retention", "drop-key", old, "--state", str(stage.cell.state))
    assert len(await rest_of(stage.cell.api, caller, surface, "new", None)) == len(SHORT.text.split()) + 2
    async with following(stage.cell.api, caller, surface, "old", None) as call:
        answer = await call.answer()
    assert (answer.status, answer.json["code"]) == (410, "stream_not_retained")
    record = await record_of(stage.cell.api, caller, "old")
    assert record["status"] == "completed" and "output" not in record
    assert (await ask(stage.cell.api, surface.kept("old"), method="DELETE", key=caller.secret)).status == 200
    assert key_file.stat().st_mode & 0o777 == 0o600


def run_weir(*words: str) -> str:
    """Output of a command."""
    return subprocess.run([sys.executable, "-m", "weir.cli.main", *words], check=True, capture_output=True, text=True).stdout
