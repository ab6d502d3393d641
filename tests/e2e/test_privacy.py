"""What tenants say and what models answer is written nowhere: not in state, logs, metrics, errors or what administrators see.

Every input field carries a mark through every kind of ending and refusal; then everything that the cell wrote is searched.
A mark may be in the answer to its own caller only where the contract says so: output, and the name of an unknown field.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.ending_stage import Caller, Stage, wait_until
from tests.e2e.processes import children_of
from tests.e2e.running_cell import running_cell
from tests.e2e.scripted_engine import Script, ScriptedEngine
from tests.e2e.sse_client import ask, bearer, calling
from tests.e2e.surfaces import ACTIVE, ANSWERS, SURFACES, Asked

MARK = "zqx"
OUTPUT = f" {MARK}output"
CONFIG = """
[pool]
concurrency = 2
[engine]
first_output_ms = 500
idle_ms = 500
probe_ms = 100
restart_backoff_ms = 1
[gateway]
slow_client_grace_ms = 500
body_bytes_max = 20000
[coordinator]
queue_wait_ms = 400
"""
ADMIN_PATHS = [
    "tenants", "tenants/acme/applications", "tenants/acme/applications/assistant/keys", "limits", "replicas", "pools", "audit",
    "usage?group_by=tenant,application,key,alias,revision,day,status,workload_class", "ledger?tenant=acme",
]  # fmt: skip


SCHEMA = {"type": "object", "title": f"{MARK}title", "properties": {f"{MARK}property": {"enum": [f"{MARK}enum"]}}}
TOOL = {"name": f"{MARK}tool", "description": f"{MARK}description"}
CALLED = json.dumps({f"{MARK}argument": f"{MARK}value"})


def native_fields(prompt: str) -> dict[str, Any]:
    """A native body with a mark in each free text."""
    turns = [{"role": "system", "content": f"{MARK}system"}, {"role": "user", "content": prompt}]
    return {"model_alias": "assistant", "input": turns, "stop": [f"{MARK}stop"], "session": f"{MARK}session"}


def chat_fields(prompt: str) -> dict[str, Any]:
    """A chat body with a mark in each free text: turns, names, tools, calls, schemas, labels."""
    call = {"id": f"{MARK}call", "type": "function", "function": {"name": f"{MARK}tool", "arguments": CALLED}}
    turns = [
        {"role": "system", "content": f"{MARK}system", "name": f"{MARK}name"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"{MARK}call", "content": f"{MARK}result"},
        {"role": "user", "content": prompt},
    ]
    return {
        "model": "assistant",
        "messages": turns,
        "tools": [{"type": "function", "function": {**TOOL, "parameters": SCHEMA}}],
        "response_format": {"type": "json_schema", "json_schema": {"name": f"{MARK}form", "schema": SCHEMA}},
        "user": f"{MARK}user",
        "metadata": {f"{MARK}metakey": f"{MARK}metavalue"},
        "stop": f"{MARK}stop",
    }


def completions_fields(prompt: str) -> dict[str, Any]:
    """The body of a legacy completion with a mark in each free text."""
    return {"model": "assistant", "prompt": prompt, "user": f"{MARK}user", "stop": f"{MARK}stop"}


def responses_fields(prompt: str) -> dict[str, Any]:
    """The body of a response with a mark in each free text."""
    turns = [
        {"type": "function_call", "call_id": f"{MARK}call", "name": f"{MARK}tool", "arguments": CALLED},
        {"type": "function_call_output", "call_id": f"{MARK}call", "output": f"{MARK}result"},
        {"role": "user", "content": prompt},
    ]
    return {
        "model": "assistant",
        "instructions": f"{MARK}system",
        "input": turns,
        "tools": [{"type": "function", **TOOL, "parameters": SCHEMA, "strict": False}],
        "text": {"format": {"type": "json_schema", "name": f"{MARK}form", "schema": SCHEMA}},
        "metadata": {f"{MARK}metakey": f"{MARK}metavalue"},
        "user": f"{MARK}user",
    }


def messages_fields(prompt: str) -> dict[str, Any]:
    """The body of a message with a mark in each free text."""
    used = {"type": "tool_use", "id": f"{MARK}call", "name": f"{MARK}tool", "input": json.loads(CALLED)}
    answered = {"type": "tool_result", "tool_use_id": f"{MARK}call", "content": f"{MARK}result"}
    turns = [
        {"role": "user", "content": f"{MARK}before"},
        {"role": "assistant", "content": [used]},
        {"role": "user", "content": [answered]},
        {"role": "assistant", "content": f"{MARK}between"},
        {"role": "user", "content": prompt},
    ]
    return {
        "model": "assistant",
        "max_tokens": 1_000,
        "system": f"{MARK}system",
        "messages": turns,
        "tools": [{**TOOL, "input_schema": SCHEMA}],
        "metadata": {"user_id": f"{MARK}user"},
        "stop_sequences": [f"{MARK}stop"],
    }


MARKED: Mapping[str, Callable[[str], dict[str, Any]]] = {
    "native": native_fields,
    "chat": chat_fields,
    "completions": completions_fields,
    "responses": responses_fields,
    "messages": messages_fields,
}


def marked(surface: str, script: Script, **fields: Any) -> dict[str, Any]:
    """A body of this surface that asks for the script, with a mark in each free text, in its output and in a tool call."""
    said: dict[str, Any] = {"arguments": json.dumps({"a": OUTPUT})} if SURFACES[surface].has_tools else {}
    prompt = Script(**{**_fields(script), **said, "word": OUTPUT, "note": f"{MARK}prompt"}).prompt()
    return {**MARKED[surface](prompt), **fields}


def native(script: Script, **fields: Any) -> dict[str, Any]:
    """The same of the native surface."""
    return marked("native", script, **fields)


def chat(script: Script, **fields: Any) -> dict[str, Any]:
    """The same of chat."""
    return marked("chat", script, **fields)


def _fields(script: Script) -> dict[str, Any]:
    return {name: getattr(script, name) for name in script.__struct_fields__}


ENDINGS = [
    Script(), Script(end="length"), Script(status=500), Script(status=400), Script(end="garbage"), Script(end="error"),
    Script(end="unfinished"), Script(end="cut"), Script(end="stall"), Script(end="reset"), Script(counts=False),
]  # fmt: skip
"""The last one works, so that the replica is trusted in full again."""

COMPLETED = ENDINGS[:2]
LONG = Script(tokens=200, gap_ms=20)

REFUSALS: Mapping[str, Any] = {
    "unknown alias": {"model_alias": f"{MARK}alias"},
    "unknown field": {f"{MARK}field": f"{MARK}value"},
    "unknown role": {"input": [{"role": f"{MARK}role", "content": f"{MARK}content"}]},
    "unknown part": {"input": [{"role": "user", "content": f"{MARK}content", f"{MARK}part": 1}]},
    "wrong types": {"temperature": f"{MARK}temperature"},
    "bad id": {"request_id": f"{MARK} id with blanks"},
    "lone surrogate": {"session": f"\ud800{MARK}"},
    "long session": {"session": MARK * 100},
    "too long": {"max_output_tokens": 999_999},
    "retained": {"retain": True},
    "stop": {"stop": [f"{MARK}stop"] * 9},
}

BAD_BODIES = [
    f'{{"model_alias": "{MARK}a", "input": {MARK}'.encode(),
    f'["{MARK}list"]'.encode(),
    f"{MARK}plain".encode(),
    b'{"input": "' + MARK.encode() + b'\xff\xfe"}',
    b'{"input": ' + b"[" * 5_000 + MARK.encode(),
    b'{"model_alias": "assistant", "input": "' + MARK.encode() * 10_000 + b'"}',
]


class Drive:
    """Sends marked requests of every kind and collects what error answers said."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.caller = stage.demo_caller()
        self.answers: list[bytes] = []

    async def send(self, path: str, body: Any, key: str | None = None, headers: Mapping[str, str] | None = None) -> bytes:
        """One request; the bytes of its answer, whatever it is."""
        shown = bearer(self.caller.secret if key is None else key, headers)
        async with calling(self.stage.cell.api, path, body=body, headers=shown) as call:
            try:
                pieces = [piece async for piece in call.pieces()]
            except (asyncio.IncompleteReadError, ConnectionError):
                return b""
        return json.dumps(call.headers).encode() + b"".join(pieces)

    async def endings(self) -> None:
        """Every ending that an engine causes, on each surface: what completes streamed and not, what fails in turn."""
        for number, script in enumerate(ENDINGS):
            for surface, stream in ANSWERS:
                if script not in COMPLETED and stream is bool((number + ACTIVE.index(surface)) % 2):
                    continue
                await self._ready()
                headers = SURFACES[surface].headers(Asked(""))
                seen = await self.send(SURFACES[surface].path, marked(surface, script, stream=stream), headers=headers)
                assert OUTPUT.encode() in seen or script not in COMPLETED, seen
                if b'"object":"response"' not in seen:  # which tells its caller the settings that it asked for
                    self.answers.append(seen.replace(OUTPUT.encode(), b""))
                await self._ready()
                await self.send("/v1/generations", native(Script()))  # ends well: two failures in a row would open the breaker

    async def _ready(self) -> None:
        async def ready() -> bool:
            return (await ask(self.stage.cell.api, "/readyz")).status == 200

        await wait_until(ready, "a replica is ready", 35)  # longer than a breaker leaves it alone

    async def interruptions(self) -> None:
        """Cancelled, expired, left, waited too long, unread, and reused ids."""
        await self._ready()
        async with self._running("a"), self._running("b"):
            self.answers.append(await self.send("/v1/generations", native(LONG)))  # reaches the bound of waiting
            again = native(LONG, request_id="a", stream=True)
            self.answers.append(await self.send("/v1/generations", again))  # in flight
            self.answers.append(await self.send("/v1/generations", native(Script(), request_id="a")))  # another body
            self.answers.append((await self.stage.get(self.caller, "a", "/cancel")).body)
        for deadline_ms in (1, 150):
            body = chat(LONG, stream=False)
            self.answers.append(await self.send("/v1/chat/completions", body, headers={"weir-deadline-ms": str(deadline_ms)}))
        unread = Script(tokens=2_000, word=OUTPUT * 200)
        body = native(unread, request_id="unread", stream=True, max_output_tokens=100_000)
        body["input"][1]["content"] = unread.prompt()
        async with calling(
            self.stage.cell.api, "/v1/generations", body=body, headers=bearer(self.caller.secret), receive_bytes=4_096
        ):
            await self.stage.wait_status(self.caller, "unread", "cancelled", "completed")

    @asynccontextmanager
    async def _running(self, request_id: str) -> AsyncIterator[None]:
        body = native(LONG, request_id=request_id, stream=True)
        async with calling(self.stage.cell.api, "/v1/generations", body=body, headers=bearer(self.caller.secret)):
            await self.stage.wait_status(self.caller, request_id, "running")
            yield

    async def refusals(self) -> None:
        """Every refusal of a body, a key, a path or a header."""
        for change in REFUSALS.values():
            for name in ACTIVE:
                body = json.dumps({**marked(name, Script()), **change}).encode()
                self.answers.append(await self.send(SURFACES[name].path, body))
        for content in BAD_BODIES:
            for name in ACTIVE:
                self.answers.append(await self.send(SURFACES[name].path, content))
        wrong_key = await self.send("/v1/generations", native(Script()), key=f"weir-{MARK}key")
        session = await self.send("/v1/chat/completions", chat(Script()), headers={"weir-session": f"{MARK}s" * 90})
        key = await self.send("/v1/chat/completions", chat(Script()), headers={"idempotency-key": f"{MARK} {MARK}"})
        paths = [await self.send(path, native(Script())) for path in (f"/v1/{MARK}path", f"/v1/generations/{MARK}id/cancel")]
        self.answers += [wrong_key, session, key, *paths]


async def check_nothing_written(stage: Stage, answers: list[bytes], mark: str, apart: Path | None = None) -> None:
    """The mark is in no file of the state directory, no log, no metric, no management answer and no error's body.

    apart: a folder in which it may be.
    """
    cell, needle = stage.cell, mark.encode()
    # A model's weights have every short text somewhere; that nothing was written to them, each load verifies by their digest.
    weights = set((cell.state / "artifacts").rglob("*.gguf"))
    files = [path for path in cell.state.rglob("*") if path.is_file() and path not in weights]
    files = [path for path in files if apart is None or not path.is_relative_to(apart)]
    assert any(path.name.endswith("-wal") for path in files), "the journal's newest bytes are searched too"
    files += [cell.log, cell.state.with_suffix(".ready.json")]
    pids = [cell.process.pid, *children_of(cell.process.pid)]
    files += [Path(f"/proc/{pid}/{name}") for pid in pids for name in ("cmdline", "environ")]
    for path in files:
        assert needle not in path.read_bytes(), path
    assert needle not in (await ask(cell.ready["metrics"], "/metrics")).body
    for path_of_admin in ADMIN_PATHS:
        answer = await ask(cell.ready["admin"], f"/admin/v1/{path_of_admin}", key=cell.ready["admin_key"])
        assert answer.status == 200 and needle not in answer.body, path_of_admin
    for number, body in enumerate(answers):
        told = re.sub(rf"(input\[0\]\.)?{mark}(field|part)".encode(), b"", body)  # the contract names an unknown field
        assert needle not in told, (number, told[:2_000])


@pytest.mark.parametrize("arguments", [(), ("--gateways", "1")], ids=["one process", "gateway"])
async def test_text_is_written_nowhere(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    """Marks in every field of each surface, through every ending and refusal, leave no trace anywhere; also after the stop."""
    with ScriptedEngine() as engine:
        with running_cell(tmp_path / "state", *arguments, engine=(engine.url,), config=CONFIG) as cell:
            drive = Drive(Stage(cell))
            await drive.endings()
            await drive.interruptions()
            await drive.refusals()
            await drive.stage.check_quiet()
            await check_nothing_written(drive.stage, drive.answers, MARK)
            assert len({row["status"] for row in await drive.stage.usage("acme")}) == 4
        for path in [*cell.state.rglob("*"), cell.log]:
            assert not path.is_file() or MARK.encode() not in path.read_bytes(), path
    assert engine.started >= len(ENDINGS) * len(ANSWERS) // 2


async def test_one_tenants_requests_are_not_another_tenants(tmp_path: Path) -> None:
    """Another tenant's id is unknown: to GET, to cancel, and as an idempotency key."""
    with ScriptedEngine() as engine, running_cell(tmp_path / "state", engine=(engine.url,), config=CONFIG) as cell:
        stage = Stage(cell)
        owner, other = stage.demo_caller("acme"), stage.demo_caller("globex")
        async with stage.call(owner, LONG, "it") as call:
            await call.output_begun()
            for action in ("", "/cancel", "/events"):
                assert (await _status(stage, other, f"it{action}", "POST" if action == "/cancel" else "GET")) == 404
            assert (await stage.get(owner, "it")).json["status"] == "running"
            assert (await stage.run(other, Script(), "it")).reason == "stop"
        await stage.wait_status(owner, "it", "cancelled")


async def _status(stage: Stage, caller: Caller, path: str, method: str) -> int:
    return (await ask(stage.cell.api, f"/v1/generations/{path}", method=method, key=caller.secret)).status


@pytest.mark.model
async def test_a_real_model_writes_no_text_either(tmp_path: Path) -> None:
    """Prompt and output of a real engine are in its answer and nowhere else, also for what it refuses itself."""
    with running_cell(tmp_path / "state", engine=("llamacpp",), config="[pool]\nsecond_model = false\n") as cell:
        drive = Drive(Stage(cell))
        words = f"{MARK}one {MARK}two {MARK}three "
        body = {"model_alias": "assistant", "input": f"Repeat: {words}", "max_output_tokens": 24, "stream": False}
        answer = json.loads((await drive.send("/v1/generations", body)).split(b"}", 1)[1])
        assert answer["status"] == "completed"
        drive.answers.append(await drive.send("/v1/generations", {**body, "input": words * 2_000}))
        drive.answers.append(await drive.send("/v1/chat/completions", chat(Script(), max_tokens=5_000)))
        async with drive.stage.call(drive.caller, f"Tell me all about {words}", "left"):
            await drive.stage.wait_status(drive.caller, "left", "running")
        await drive.stage.wait_status(drive.caller, "left", "cancelled")
        await drive.stage.check_quiet()
        await check_nothing_written(drive.stage, drive.answers, MARK)
        if len(answer["output"]) >= 20:
            await check_nothing_written(drive.stage, [], answer["output"][:20])
