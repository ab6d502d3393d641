"""A client that does not read is given up, one that reads slowly is served, and neither makes the platform hold its output."""

import pytest
from tests.e2e.ending_stage import Stage, Surface, read_shown, wait_until
from tests.e2e.scripted_engine import Script, ScriptedEngine
from tests.e2e.surfaces import ACTIVE

GRACE_MS = 700
BUFFER_BYTES = 16_384
CONFIG = f"""
[gateway]
stream_buffer_bytes = {BUFFER_BYTES}
socket_buffer_bytes = 4608
slow_client_grace_ms = {GRACE_MS}
[engine]
idle_ms = 20000
"""
WORD = " " + "w" * 2_000
FLOOD = Script(tokens=20_000, word=WORD, note="flood")
RECEIVE_BYTES = 4_096


@pytest.mark.parametrize("surface", ACTIVE)
async def test_a_client_that_does_not_read_is_given_up(stage: Stage, engine: ScriptedEngine, surface: Surface) -> None:
    """After the grace the stream ends `slow_client`, the engine is cut, and the tenant pays what was generated."""
    caller, left = await stage.caller(), engine.left
    options = {"surface": surface, "receive_bytes": RECEIVE_BYTES, "most": 30_000}
    async with stage.call(caller, FLOOD, "it", **options) as call:  # type: ignore[arg-type]
        await call.head()
        record = await stage.wait_status(caller, "it", "cancelled")
        assert record["finish_reason"] == "slow_client"
        assert record["timing"]["total_ms"] >= GRACE_MS
        with pytest.raises((ConnectionError, EOFError)):
            async for _ in call.events():
                pass

    async def is_idle() -> bool:
        return engine.running == 0

    await wait_until(is_idle, "the engine stopped", 2.0)
    assert engine.left == left + 1
    await stage.check_ended(caller, "it", "slow_client", "tenant")
    await stage.check_quiet()
    await stage.check_serves(caller)


@pytest.mark.parametrize("surface", ACTIVE)
async def test_the_engine_is_paused_while_a_client_does_not_read(stage: Stage, surface: Surface) -> None:
    """What waits for a client is bounded by buffers: the engine is paused instead of read ahead."""
    caller = await stage.caller()
    async with stage.call(caller, FLOOD, "it", receive_bytes=RECEIVE_BYTES, most=30_000, surface=surface) as call:
        await call.head()
        record = await stage.wait_status(caller, "it", "cancelled")
    assert record["usage"]["output_tokens"] * len(WORD) < 2_000_000  # kernel buffers included; it asked for 40 MB
    await stage.check_quiet()


@pytest.mark.parametrize("surface", ACTIVE)
async def test_a_client_that_reads_slowly_gets_everything(stage: Stage, surface: Surface) -> None:
    """Slow is not stuck: as long as bytes are taken within the grace the stream goes on, byte for byte."""
    caller, script = await stage.caller(), Script(tokens=60, word=" " + "é" * 700, gap_ms=30)
    async with stage.call(caller, script, "it", receive_bytes=RECEIVE_BYTES, surface=surface) as call:
        shown = await read_shown(call)
    assert (shown.text, shown.status) == (script.text, "completed")
