"""Engine processes start with their spec, listen before they are handed out, and end with us, however we end."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from weir.core.metering import Price
from weir.core.registry.arguments import ACCEPTED
from weir.core.registry.model import EngineKind, Pool, Revision
from weir.engines.http_client import HttpClient
from weir.engines.http_exchange import HttpRequest
from weir.engines.launcher import LocalLauncher, LocalProcess
from weir.engines.llamacpp_child import ChildSpec
from weir.engines.packaged_models import smollm2_path
from weir.engines.simulated_api import ServerSpec
from weir.engines.simulated_faults import Faults
from weir.errors import EngineError

WAIT_S = 60
POOL = Pool("p", "v", 1, 2)


def _revision(engine: EngineKind, artifact: str) -> Revision:
    return Revision("v", engine, artifact, 512, 128, 64, Price(1, 1, 1, 1))


SIMULATED = _revision(EngineKind.SIMULATED, "demo")


def _llamacpp() -> Revision:
    return _revision(EngineKind.LLAMACPP, str(smollm2_path()))


async def _launch(revision: Revision = SIMULATED) -> LocalProcess:
    process = await LocalLauncher(threads=2).launch(revision, POOL)
    assert isinstance(process, LocalProcess)
    return process


def _process_gone(pid: int) -> bool:
    """Whether a process, of whatever parent, ends within the bound."""
    # A process that ended but isn't reaped by its parent is gone too, which a file descriptor of it shows.
    poller = subprocess.run(
        [sys.executable, "-c", f"import os, select; select.select([os.pidfd_open({pid})], [], [], {WAIT_S})[0] or exit(1)"],
        stderr=subprocess.PIPE,
        check=False,
    )
    return poller.returncode == 0 or b"ProcessLookupError" in poller.stderr


@pytest.mark.parametrize("kind", ["simulated", pytest.param("llamacpp", marks=pytest.mark.model)])
async def test_a_replica_starts_and_stops(kind: str) -> None:
    """A launched replica answers those who have its key, has a session and an environment of its own, and stops when told."""
    before = _children()
    process = await _launch(SIMULATED if kind == "simulated" else _llamacpp())
    [pid] = _children() - before
    client = HttpClient()
    for api_key, status in ((process.api_key, 200), ("wrong", 401)):
        request = HttpRequest("POST", process.url, "/v1/completions", b'{"prompt":"a","max_tokens":1}', api_key)
        assert (await client.request(request, timeout_ms=WAIT_S * 1_000)).status == status
    await client.aclose()
    assert os.getsid(pid) == pid
    assert b"GOMP_SPINCOUNT=2000" in _of(pid, "environ") and b"PYTEST_CURRENT_TEST" not in _of(pid, "environ")
    assert (process.api_key or "").encode() not in _of(pid, "cmdline")
    await asyncio.gather(process.stop(10_000), process.stop(10_000))
    assert await process.wait() in (0, -signal.SIGTERM, -signal.SIGIO)
    await process.stop(0)


@pytest.mark.parametrize(
    ("engine", "specs"), [(EngineKind.LLAMACPP, [ChildSpec]), (EngineKind.SIMULATED, [Faults, ServerSpec])]
)
def test_arguments_are_what_the_engines_are_told(engine: EngineKind, specs: list[type[msgspec.Struct]]) -> None:
    """Protects what was approved: each argument that a registration may give is a field of what the process is told."""
    assert ACCEPTED[engine].keys() <= {name for spec in specs for name in spec.__struct_fields__}


@pytest.mark.parametrize("embeds", [True, False])
async def test_a_simulated_engine_that_embeds(embeds: bool) -> None:
    """Protects what was approved: a replica of a revision that embeds makes vectors and no text, any other only text."""
    process = await _launch(replace(SIMULATED, arguments=(("embeddings", True), ("slowdown", 2)) if embeds else ()))
    client, statuses = HttpClient(), []
    for path, body in (("/v1/embeddings", b'{"input":"a"}'), ("/v1/completions", b'{"prompt":"a","max_tokens":1}')):
        request = HttpRequest("POST", process.url, path, body, process.api_key)
        statuses.append((await client.request(request, timeout_ms=WAIT_S * 1_000)).status)
    await client.aclose()
    await process.stop(10_000)
    assert statuses == ([200, 400] if embeds else [400, 200])


async def test_an_argument_of_a_simulated_engine() -> None:
    """Protects what was approved: a replica that was registered as slow takes its time."""
    process = await _launch(replace(SIMULATED, arguments=(("slowdown", 200),)))
    client, body = HttpClient(), b'{"prompt":"a","max_tokens":5}'
    began = time.monotonic()
    answer = await client.request(
        HttpRequest("POST", process.url, "/v1/completions", body, process.api_key), timeout_ms=WAIT_S * 1_000
    )
    assert answer.status == 200 and time.monotonic() - began > 1
    await client.aclose()
    await process.stop(10_000)


async def test_an_exit_is_seen() -> None:
    """Whoever waits for a replica learns that it was killed."""
    before = _children()
    process = await _launch()
    [pid] = _children() - before
    waiting = asyncio.gather(process.wait(), process.wait())
    os.kill(pid, signal.SIGKILL)
    assert list(await waiting) == [-signal.SIGKILL, -signal.SIGKILL]


async def test_what_does_not_heed_is_killed() -> None:
    """A replica that ignores its input's end and SIGTERM is killed after the grace."""
    before = _children()
    process = await _launch()
    [pid] = _children() - before
    os.kill(pid, signal.SIGSTOP)
    await process.stop(50)
    assert await process.wait() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("revision", "words"),
    [
        (_revision(EngineKind.SIMULATED, "no-such-row"), "no-such-row"),
        pytest.param(_revision(EngineKind.LLAMACPP, "/nowhere/model.gguf"), "model", marks=pytest.mark.model),
        (_revision(EngineKind.OPENAI, "m"), "not started by the platform"),
    ],
)
async def test_a_failed_start_says_why(revision: Revision, words: str) -> None:
    """A replica that cannot start is an engine error with what its process complained of."""
    with pytest.raises(EngineError) as raised:
        await _launch(revision)
    assert words in raised.value.detail


async def test_a_start_is_bounded() -> None:
    """A replica that doesn't listen in time is ended and reported."""
    with pytest.raises(EngineError, match="within 1 ms"):
        await LocalLauncher(start_ms=1).launch(SIMULATED, POOL)


async def test_a_cancelled_start_leaves_nothing() -> None:
    """Whoever stops waiting for a start leaves no process behind."""
    before = _children()
    launching = asyncio.get_running_loop().create_task(LocalLauncher().launch(SIMULATED, POOL))
    for _ in range(WAIT_S * 100):
        if _children() - before:
            break
        await asyncio.sleep(0.01)
    [started] = _children() - before
    launching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await launching
    assert _process_gone(started)


@pytest.mark.parametrize("kind", ["simulated", pytest.param("llamacpp", marks=pytest.mark.model)])
@pytest.mark.parametrize("phase", ["starting", "listening"])
def test_no_replica_outlives_its_parent(kind: str, phase: str) -> None:
    """A replica ends when its parent is killed, while it starts and while it serves."""
    artifact = "demo" if kind == "simulated" else str(smollm2_path())
    parent = subprocess.Popen([sys.executable, "-c", _PARENT, kind, artifact, phase], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    with parent.stdout:
        pid = int(parent.stdout.readline())
        parent.kill()
        parent.wait(WAIT_S)
    assert _process_gone(pid)


_PARENT = """
import asyncio, os, pathlib, sys
from weir.core.metering import Price
from weir.core.registry.model import EngineKind, Pool, Revision
from weir.engines.launcher import LocalLauncher

async def main(kind, artifact, phase):
    revision = Revision("v", EngineKind(kind), artifact, 512, 128, 64, Price(1, 1, 1, 1))
    launch = LocalLauncher(threads=2).launch(revision, Pool("p", "v", 1, 2))
    launching = asyncio.get_running_loop().create_task(launch)
    if phase == "listening":
        process = await launching
    children = ""
    while not children:
        children = pathlib.Path(f"/proc/self/task/{os.getpid()}/children").read_text()
        await asyncio.sleep(0)
    print(children, flush=True)
    await asyncio.sleep(60)

asyncio.run(main(*sys.argv[1:]))
"""


def _of(pid: int, name: str) -> bytes:
    return Path(f"/proc/{pid}/{name}").read_bytes()


def _children() -> set[int]:
    task = Path(f"/proc/self/task/{os.getpid()}/children")
    return {int(pid) for pid in task.read_text().split()}


@pytest.mark.model
@pytest.mark.parametrize("spec", [b"", b"{", b'{"model": 1}'])
def test_a_child_without_a_sensible_spec(spec: bytes) -> None:
    """What makes no sense is refused before anything is loaded."""
    child = subprocess.run([sys.executable, "-m", "weir.engines.llamacpp_child"], input=spec, capture_output=True, check=False)
    assert child.returncode == 2 and not child.stdout


def test_the_specs_fields_are_pinned() -> None:
    """A spec with a field that nobody knows is refused, so that a misspelt one is noticed."""
    assert ChildSpec.__struct_config__.forbid_unknown_fields
