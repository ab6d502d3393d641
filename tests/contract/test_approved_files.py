"""A replica of a registered artifact starts from what the key ring trusts at that moment, or says exactly why it does not."""

import asyncio
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import uvloop
from tests.contract.approved_stand import POOL, REVISION, Meddler, Stand, children
from tests.contract.artifact_folders import (
    CHANGES,
    DIGEST,
    HEX,
    MODEL,
    NOW_MS,
    descriptors,
    key_of,
    manifest_for,
)
from tests.e2e.processes import open_files

from weir.core.registry.key_ring import KeyRole, SigningKey
from weir.core.registry.model import EngineKind, Revision
from weir.engines.http_client import HttpClient
from weir.engines.http_exchange import HttpRequest
from weir.engines.launcher import LocalLauncher
from weir.engines.packaged_models import smollm2_path
from weir.errors import ArtifactRefused, EngineError

WAIT_S = 60


@pytest.fixture
def stand(tmp_path: Path) -> Stand:
    return Stand(tmp_path)


# ── what does not start ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("done", CHANGES)
async def test_tampering_stops_the_start(stand: Stand, done: str) -> None:
    """Protects what is served: each change of an approved artifact stops the next start, and the error says what it was."""
    change, _, words = CHANGES[done]
    await stand.keep()
    await stand.trust(key_of(1))
    change(stand.directory / HEX)
    with pytest.raises(EngineError, match=f"artifact of v cannot be loaded: The file {words}"):
        await stand.launcher.launch(REVISION, POOL)


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (key_of(1, revoked=True), "key-1 was revoked"),
        (key_of(1, not_after_ms=NOW_MS - 1), "key-1 has expired"),
        (key_of(1, not_before_ms=NOW_MS + 1), "key-1 is not valid yet"),
        (key_of(1, roles=frozenset([KeyRole.ADAPTER])), "not model"),
        (key_of(1, tenant="acme"), "only for artifacts of the tenant"),
        (key_of(2), "not in the key ring"),
    ],
)
async def test_a_key_that_is_good_no_more_stops_the_start(stand: Stand, key: SigningKey, words: str) -> None:
    """Protects what is served: the catalog's key ring is asked at each start."""
    await stand.keep()
    await stand.trust(key)
    with pytest.raises(EngineError, match=f"artifact of v cannot be loaded: .*{words}"):
        await stand.launcher.launch(REVISION, POOL)


async def test_an_artifact_that_nobody_can_load(stand: Stand) -> None:
    """Protects what is served: a digest is never passed over, neither without a store nor by an engine that loads nothing."""
    with pytest.raises(EngineError, match="Nothing here loads the artifact of v"):
        await LocalLauncher().launch(REVISION, POOL)
    simulated = replace(REVISION, engine=EngineKind.SIMULATED, artifact="demo")
    with pytest.raises(EngineError, match="which is for simulated"):
        await stand.launcher.launch(simulated, POOL)
    with pytest.raises(EngineError, match="which is for vllm"):
        await stand.launcher.launch(replace(REVISION, engine=EngineKind.VLLM, artifact_digest=None), POOL)
    with pytest.raises(EngineError, match="Nothing of the digest"):
        await stand.launcher.launch(REVISION, POOL)


# ── off the event loop ───────────────────────────────────────────────────────────────────────────────────────────────


async def test_single_files_off_the_loop(stand: Stand) -> None:
    """Protects evaluation sets on their way through threads."""
    digest = await stand.artifacts.keep_file(b"case")
    assert await stand.artifacts.read_file(digest) == b"case"


async def test_a_snapshot_waits_for_no_artifact(stand: Stand) -> None:
    """Protects revocations and ways back, which pass the loop's own threads: however many replicas read their models just then.

    Many more than those threads are.
    """
    await stand.keep()
    answer, opened = threading.Event(), list[str]()

    def judge(signed_manifest: object) -> SigningKey:
        answer.wait(WAIT_S)
        return key_of(1)

    async def open_it() -> None:
        async with stand.artifacts.opened(DIGEST, [MODEL], judge) as artifact:
            opened.append(artifact.folder)

    opening = [asyncio.create_task(open_it()) for _ in range(64)]
    await asyncio.sleep(0)
    try:
        async with asyncio.timeout(WAIT_S / 4):
            assert await asyncio.to_thread(lambda: len(opened)) == 0
    finally:
        answer.set()
        await asyncio.gather(*opening)
    assert len(opened) == 64


@pytest.mark.parametrize("outcome", ["opened", "refused"])
async def test_whoever_stops_waiting_leaves_nothing_open(stand: Stand, outcome: str) -> None:
    """Protects descriptors: what is opened after its caller was cancelled is closed again."""
    others = set(threading.enumerate())  # stores that other tests left open
    await stand.keep()
    before, asked, answer = descriptors(), threading.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    began = loop.create_future()

    def judge(signed_manifest: object) -> SigningKey:
        loop.call_soon_threadsafe(began.set_result, None)
        answer.wait(WAIT_S)
        if outcome == "refused":
            raise ArtifactRefused("no")
        return key_of(1)

    async def open_it() -> None:
        async with stand.artifacts.opened(DIGEST, [MODEL], judge):
            asked.set()

    opening = loop.create_task(open_it())
    await began
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    answer.set()
    stand.artifacts.close()
    for thread in [each for each in set(threading.enumerate()) - others if each.name.startswith("artifacts")]:
        await asyncio.to_thread(thread.join, WAIT_S)
        assert not thread.is_alive()
    await asyncio.sleep(0)
    assert descriptors() == before and not asked.is_set()


# ── a real model ─────────────────────────────────────────────────────────────────────────────────────────────────────


def maps_of(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")


def of_smollm2() -> tuple[dict[str, bytes], Revision]:
    """The small model as an artifact, with a revision of it."""
    files = {MODEL: smollm2_path().read_bytes(), "LICENSE": b"Apache-2.0"}
    return files, replace(REVISION, artifact_digest=manifest_for(files).digest)


@pytest.mark.model
@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_registered_model_is_served(tmp_path: Path, loop_factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """Protects what is loaded: the engine reads the verified descriptor, once and whole, and answers from it."""
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(asyncio.wait_for(serve_and_ask(Stand(tmp_path)), WAIT_S))


async def serve_and_ask(stand: Stand) -> None:
    files, revision = of_smollm2()
    kept = stand.directory / (await stand.keep(files)).removeprefix("sha256:") / MODEL
    await stand.trust(key_of(1))
    known = children()
    process = await stand.launcher.launch(revision, POOL)
    [pid] = children() - known
    assert str(kept) in open_files(pid) - open_files(os.getpid())
    assert MODEL not in maps_of(pid)
    os.truncate(kept, 100)  # what was loaded is in memory
    client = HttpClient()
    body = msgspec.json.encode({"prompt": "1, 2, 3, 4,", "max_tokens": 4, "temperature": 0})
    request = HttpRequest("POST", process.url, "/v1/completions", body, process.api_key)
    answer = await client.request(request, timeout_ms=WAIT_S * 1_000)
    await client.aclose()
    await process.stop(10_000)
    assert answer.status == 200 and "5" in msgspec.json.decode(answer.body)["choices"][0]["text"]
    with pytest.raises(EngineError, match=r"model\.gguf is not what was signed"):
        await stand.launcher.launch(revision, POOL)


@pytest.mark.model
async def test_a_change_while_it_loads_stops_the_start(stand: Stand) -> None:
    """Protects what is loaded: a model that was edited after it was verified is not served, and its process is gone."""
    files, revision = of_smollm2()
    hexadecimal = (await stand.keep(files)).removeprefix("sha256:")
    await stand.trust(key_of(1))
    path = stand.directory / hexadecimal / MODEL

    def edit_in_place() -> None:
        times = path.stat()
        with path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\xff")
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    known = children()
    launcher = LocalLauncher(threads=2, files=Meddler(stand.files, edit_in_place))
    with pytest.raises(EngineError, match=r"artifact of v cannot be loaded: The file model\.gguf changed while it was read"):
        await launcher.launch(revision, POOL)
    assert children() <= known
