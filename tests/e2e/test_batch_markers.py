"""What lines of batches say and what models answer is in the tenant's own files alone, and gone once these are deleted.

Every line carries a mark in each free text of its endpoint, through endings that an engine causes and refusals of every kind.
"""

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from tests.e2e.batch_stage import input_of, line_for, openai_of, results_of, submitted, until_done
from tests.e2e.ending_stage import Stage
from tests.e2e.money_stage import new_caller
from tests.e2e.running_cell import running_cell
from tests.e2e.scripted_engine import Script, ScriptedEngine
from tests.e2e.surfaces import SURFACES
from tests.e2e.test_privacy import CONFIG, MARK, OUTPUT, check_nothing_written, marked

SURFACES_OF_LINES = ("native", "chat", "completions", "responses")
SCRIPTS = [Script(), Script(status=400), Script(end="length"), Script(), Script(end="error"), Script()]
BROKEN = [
    f'{{"custom_id": "{MARK}id", {MARK}'.encode(),
    f'{{"custom_id": "{MARK}id", "url": "{MARK}url", "body": {{}}}}'.encode(),
    f'{{"custom_id": "{MARK}id", "{MARK} member": 1}}'.encode(),
    f'["{MARK}"]'.encode(),
    b'{"custom_id": "' + MARK.encode() + b'\xff"}',
    b'{"body": ' + b"[" * 200 + MARK.encode(),
]


def _lines(surface: str) -> bytes:
    """Lines that end in every way; the last one is refused by its endpoint."""
    bodies = [marked(surface, script) for script in SCRIPTS]
    bodies.append({**marked(surface, Script()), "temperature": f"{MARK}temperature"})
    lines = [line_for(SURFACES[surface].path, number, body) for number, body in enumerate(bodies)]
    return input_of([{**line, "custom_id": f"{MARK}-{line['custom_id']}"} for line in lines])


async def _refused(client: AsyncOpenAI) -> list[bytes]:
    """What is said of files that are none, and of orders that are none."""
    create: Any = client.batches.create
    order = {"input_file_id": f"{MARK}file", "endpoint": "/v1/completions", "completion_window": "24h"}
    asked: list[Any] = [client.files.create(file=(f"{MARK}.jsonl", content), purpose="batch") for content in BROKEN]
    asked += [create(**{**order, **change}) for change in ({}, {"completion_window": MARK}, {"endpoint": MARK})]
    asked += [client.files.retrieve(f"{MARK}file"), client.batches.retrieve(f"{MARK}batch")]
    said = []
    for each in asked:
        with pytest.raises(openai.APIStatusError) as refused:
            await each
        said.append(refused.value.response.content)
    return said


def _marked_in(folder: Path) -> set[Path]:
    """Files with the mark, relative to the folder."""
    paths = [path for path in folder.rglob("*") if path.is_file() and MARK.encode() in path.read_bytes()]
    return {path.relative_to(folder) for path in paths}


@pytest.mark.parametrize("arguments", [(), ("--gateways", "1")], ids=["one process", "gateway"])
async def test_lines_are_in_their_tenants_files_alone(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    """Protects tenants' texts: nothing of them outlives their files, and nothing else ever has them."""
    config = f"{CONFIG}[batches]\npoll_ms = 50\n"
    with ScriptedEngine() as engine:
        with running_cell(tmp_path / "state", *arguments, engine=(engine.url,), config=config) as cell:
            stage, files = Stage(cell), cell.state / "files"
            caller = await new_caller(stage)
            own = files / caller.tenant
            async with openai_of(cell, caller.secret) as client:
                told = await _refused(client)
                assert _marked_in(files) == set()
                kept = set()
                for surface in SURFACES_OF_LINES:
                    batch = await submitted(client, _lines(surface), endpoint=SURFACES[surface].path)
                    batch = await until_done(client, batch.id)
                    results = await results_of(client, batch)
                    assert batch.status == "completed" and len(results.output) == 4 and len(results.error) == 3
                    assert all(OUTPUT in json.dumps(line) for line in results.output)
                    kept |= {batch.input_file_id, batch.output_file_id, batch.error_file_id}
                await stage.check_quiet()
                assert {path.name.partition(".")[0] for path in _marked_in(own)} == kept
                assert {path.parts[0] for path in _marked_in(files)} == {caller.tenant}
                await check_nothing_written(stage, told, MARK, apart=own)
                async for file in client.files.list():
                    await client.files.delete(file.id)
            await check_nothing_written(stage, told, MARK)
        for path in [*cell.state.rglob("*"), cell.log]:
            assert not path.is_file() or MARK.encode() not in path.read_bytes(), path
