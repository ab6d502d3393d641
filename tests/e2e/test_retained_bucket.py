"""Streams that are kept in an S3 bucket, between two gateways: the same as in a directory."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
from tests.e2e.ending_stage import Stage, wait_until
from tests.e2e.retained_stage import KEPT, KeptSurface, Reader, again, following, keeper, record_of, rest_of, streaming
from tests.e2e.running_cell import running_cell
from tests.e2e.scripted_engine import Script, ScriptedEngine
from tests.s3_server import OPTIONS, s3_endpoint, s3_url

CONFIG = """
[retention]
bucket = "{url}"
key_file = "{keys}"
sweep_ms = 500
"""
SCRIPT = Script(tokens=30, gap_ms=20, word=" wört")


@pytest.fixture(scope="module")
def stage(engine: ScriptedEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A cell with two gateways whose streams lie in a bucket."""
    folder = tmp_path_factory.mktemp("bucket")
    keys = folder / "keys"
    subprocess.run([sys.executable, "-m", "weir.cli.main", "retention", "rotate-key", "--key-file", str(keys)], check=True)
    config = CONFIG.format(url=s3_url(), keys=keys)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("AWS_ENDPOINT", s3_endpoint())
        for name in ("access_key_id", "secret_access_key", "region"):
            environment.setenv(f"AWS_{name.upper()}", OPTIONS[name])
        environment.setenv("AWS_ALLOW_HTTP", "true")
        with running_cell(folder / "state", "--gateways", "2", engine=(engine.url,), config=config) as cell:
            yield Stage(cell)
            assert "Traceback" not in cell.log.read_text()


@pytest.mark.parametrize("surface", KEPT.values(), ids=KEPT)
async def test_a_stream_in_a_bucket_is_read_on_and_deleted(stage: Stage, surface: KeptSurface) -> None:
    """Protects cells of several machines: cut, read on at the other gateway, replayed, and deleted, with a bucket between."""
    caller = await keeper(stage)
    first, second = stage.cell.ready["gateways"]
    async with streaming(first, caller, surface, SCRIPT, "cut") as call:
        had = await Reader(call).take(5)
    rest = await rest_of(second, caller, surface, "cut", 4)
    assert had + rest == await rest_of(first, caller, surface, "cut", None)
    whole = await again(second, caller, surface, SCRIPT, "cut", stream=True)
    assert (whole.headers["weir-replayed"], whole.body) == ("true", b"".join(had + rest))
    assert (await record_of(second, caller, "cut"))["status"] == "completed"
    await stage.admin("PATCH", f"tenants/{caller.tenant}", {"retention": None})

    async def is_gone() -> bool:
        async with following(second, caller, surface, "cut", None) as call:
            return await call.head() == 410

    await wait_until(is_gone, "nothing is shown any more")
