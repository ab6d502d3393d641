"""A served cell and a terminal before it, whose commands run as processes: what the suites of the command line share."""

import asyncio
import json
import os
import random
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from typer.testing import CliRunner

from weir.api.admin import AdminParts, create_admin_app
from weir.cli.main import command_line
from weir.control.bootstrap import DEMO_PRICE, bootstrap, draft_keys, shown_secrets
from weir.control.cell_view import Explanations, GatheredEvidence, PoolReport, ReplicaReport
from weir.control.commands import Commands
from weir.control.declared_models import DeclaredModels
from weir.control.key_ring_commands import KeyRingCommands
from weir.control.model_commands import ModelCommands
from weir.control.registration import Registration
from weir.control.rollout_commands import RolloutCommands
from weir.control.rollout_loop import Look
from weir.core.registry.model import Alias, EngineKind, Pool, Revision
from weir.core.registry.snapshot import Snapshot
from weir.core.tenancy import ServiceClass
from weir.messages import GenerationRecord
from weir.ports import Acknowledgement, CatalogChange, UsageQuery, UsageRow
from weir.storage.artifact_store import ArtifactStore
from weir.storage.artifacts_off_loop import ArtifactsOffLoop
from weir.storage.memory import MemoryCatalog, MemoryLedger

COMMAND_WAIT_S = 30
REVISION = Revision("small-1", EngineKind.SIMULATED, "row", 4_096, 1_024, 200, DEMO_PRICE)
MODELS = DeclaredModels((REVISION,), (Alias("assistant", "small-1", 256),), (Pool("small", "small-1", 1, 4),))
USAGE = {"input_tokens": 1_200, "cached_input_tokens": 0, "output_tokens": 34, "cost_microusd": 261, "basis": "engine"}
TIMING = {"queue_ms": 1.0, "ttft_ms": 120.0, "tpot_ms": 15.0, "total_ms": 900.0}


class ManualClock:
    """Stands still."""

    def monotonic_ns(self) -> int:
        return 0

    def wall_ms(self) -> int:
        return 1_700_000_000_000


class SeededEntropy:
    """Repeatable bytes."""

    def __init__(self) -> None:
        self._random = random.Random(1)

    def token(self, size: int) -> bytes:
        return self._random.randbytes(size)


def explained(tenant: str, request_id: str) -> dict[str, Any]:
    """A timeline with every form that a figure has, as the coordinator renders it."""
    take = {"limit": "tokens_per_minute", "units": 1_100, "application": "assistant"}
    candidates = [
        {"replica": "r-1", "free": 0, "running": 4, "why_not": "full"},
        {"replica": "r-2", "free": 3, "running": 1, "cached_tokens": 900, "score": 1_300},
    ]
    events = [
        {"event": "received", "at_ms": 0.0, "alias": "assistant", "stream": True},
        {"event": "admitted", "at_ms": 0.5, "held_microusd": 1_500, "held_tokens": 1_100}
        | {
            "windows": ["day/2023-11-14", "lifetime"],
            "scopes": [{"tenant": tenant}, {"tenant": tenant, "alias": "assistant", "service_class": "batch"}],
        }
        | {
            "takes": [take, {"limit": "requests_per_minute", "units": 1}],
            "door": {"lanes": 8, "free": 3, "predicted_wait_ms": 0},
        },
        {"event": "dispatched", "at_ms": 12.0, "attempt": 1, "replica": "r-2", "candidates": candidates},
        {"event": "rejected", "at_ms": 13.0, "figures": {"scope": {"tenant": tenant}, "limit": 5_000_000}, "ttft_ms": 6.7077},
    ]
    named = {"tenant": tenant, "request_id": request_id, "execution": 2, "status": "running", "rejections": None}
    return {**named, "arrived_at_ms": 1_700_000_000_000, "delivery_steps": 3, "dropped_events": 1, "events": events}


class EmptyCell:
    """A cell without replicas, with one pool and one budget."""

    async def accounts(self, tenant: str) -> Sequence[dict[str, Any]]:
        figures = {"limit": 5_000_000, "held": 1_500, "spent": 250_000, "resets_at_ms": 1_700_006_400_000}
        scope = {"tenant": tenant, "service_class": "batch"}
        return [{"scope": scope, "limit_name": "spend_microusd_per_day", **figures}]

    async def open_holds(self, tenant: str) -> int:
        return 0

    async def replicas(self) -> Sequence[ReplicaReport]:
        return []

    async def pools(self) -> Sequence[PoolReport]:
        takes = {"tenant": "acme", "service_classes": [ServiceClass.BATCH], "input_tokens_max": 9_000}
        return [PoolReport("small", "small-1", 2, 1, 4, 5, 3, False, **takes)]  # type: ignore[arg-type]

    async def generation(self, tenant: str, request_id: str) -> GenerationRecord | None:
        return None

    async def explanations(self, request_id: str, tenant: str | None = None) -> Explanations:
        return Explanations(
            [explained(tenant or "acme", request_id)] if request_id == "explained" else [], 7, 1_700_000_000_000
        )

    async def evidence(self, rollout: str, revision: str) -> GatheredEvidence:
        return GatheredEvidence(0)


class BusyLedger(MemoryLedger):
    """A ledger in which two tenants used something."""

    async def usage(self, query: UsageQuery) -> list[UsageRow]:
        amounts = {"acme": (12_345, 1_234_567, 0, 99, 1_234_567_890, 7), "globex": (5, 7, 0, 99, 120_000, 0)}
        return [
            UsageRow({name: {"tenant": tenant}.get(name, "assistant") for name in query.group_by}, *sums)
            for tenant, sums in amounts.items()
            if query.tenant in (None, tenant)
        ]


class Generations:
    """The public API's answers to one alias each, as its contract writes them; `endless` streams until it is cancelled."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.cancelled = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        received = await receive()
        if scope["path"].endswith("/cancel"):
            self.cancelled.set()
            await answer_json(send, 200, self._ended("cancelled", "client"))
            return
        body = json.loads(received["body"])
        self.bodies.append(body | {"authorization": dict(scope["headers"])[b"authorization"].decode()})
        if body["model_alias"] == "nothing":
            problem = {"code": "unknown_alias", "detail": "This application has no such model alias."}
            await answer_json(send, 404, problem)
        elif not body["stream"]:
            await answer_json(send, 200, self._ended("completed", "stop") | {"output": "Hello."})
        else:
            await self._stream(send, body)

    async def _stream(self, send: Any, body: dict[str, Any]) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        status, reason = ("failed", "engine_error") if body["model_alias"] == "broken" else ("completed", "stop")
        await self._events(send, ("accepted", {"id": "gen-1"}), ("output", {"text": "Grüß "}), ("output", {"text": "Gott"}))
        if body["model_alias"] == "endless":
            await asyncio.wait_for(self.cancelled.wait(), COMMAND_WAIT_S)
            status, reason = "cancelled", "client"
        if body["model_alias"] != "cut":
            await self._events(send, ("done", self._ended(status, reason)))
        await send({"type": "http.response.body", "body": b""})

    async def _events(self, send: Any, *events: tuple[str, dict[str, Any]]) -> None:
        lines = [f"id: {number}\nevent: {name}\ndata: {json.dumps(body)}\n\n" for number, (name, body) in enumerate(events)]
        await send({"type": "http.response.body", "body": (": keep-alive\n\n" + "".join(lines)).encode(), "more_body": True})

    def _ended(self, status: str, reason: str) -> dict[str, Any]:
        error = {"code": reason, "detail": "The engine failed."} if status == "failed" else None
        return {"status": status, "finish_reason": reason, "usage": USAGE, "timing": TIMING, "error": error}


async def answer_json(send: Any, status: int, document: dict[str, Any]) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": json.dumps(document).encode()})


@dataclass
class Result:
    """What a finished command left behind."""

    status: int
    out: str
    err: str


class Terminal:
    """A served cell and a state directory that names it; runs commands as processes of their own."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.store = MemoryCatalog()
        self.generations = Generations()
        self.commands = Commands(self.store, self._publish, ManualClock(), SeededEntropy())
        self.rollouts = RolloutCommands(self.commands, ManualClock(), SeededEntropy())
        self.looks: dict[str, Look] = {}
        artifacts = ArtifactsOffLoop(ArtifactStore(state / "artifacts"))
        self._admin = create_admin_app(
            AdminParts(
                commands=self.commands,
                models=ModelCommands(self.commands),
                registration=Registration(self.commands, artifacts, ManualClock()),
                key_ring=KeyRingCommands(self.commands, ManualClock()),
                rollouts=self.rollouts,
                ledger=BusyLedger(),
                cell=EmptyCell(),
                entropy=SeededEntropy(),
                looks=self,
            )
        )
        self.drafted: dict[str, str] = {}
        self.url = ""

    def latest(self, rollout_id: str) -> Look | None:
        """What was seen of a rollout."""
        return self.looks.get(rollout_id)

    async def put(self, change: CatalogChange) -> None:
        """Store a change without asking anybody."""
        await self.commands.commit(lambda catalog: (None, change))

    async def _publish(self, snapshot: Snapshot) -> Acknowledgement:
        return Acknowledgement(snapshot.version)

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        """Both listeners in one: the path tells which."""
        await (self._admin if scope["path"].startswith("/admin") else self.generations)(scope, receive, send)

    async def prepare(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.drafted = draft_keys(SeededEntropy())
        await bootstrap(self.commands, MODELS, self.drafted)
        ready = {"api": self.url, "admin": self.url, **shown_secrets(await self.store.load(), self.drafted)}
        (self.state / "ready.json").write_text(json.dumps(ready))

    async def start(
        self, *words: str, state: Path | None = None, stdout: int = asyncio.subprocess.PIPE, **environment: str
    ) -> asyncio.subprocess.Process:
        place = ("--state", str(state or self.state))
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "weir.cli.main", *words, *place),
            stdout=stdout,
            stderr=asyncio.subprocess.PIPE,
            env={name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
            | {"PYTHONUTF8": "1"}
            | environment,
        )

    async def run(self, *words: str, state: Path | None = None, **environment: str) -> Result:
        """The command to its end."""
        process = await self.start(*words, state=state, stdout=asyncio.subprocess.PIPE, **environment)
        out, err = await asyncio.wait_for(process.communicate(), COMMAND_WAIT_S)
        assert process.returncode is not None and b"Traceback" not in err, err.decode()
        return Result(process.returncode, out.decode(), err.decode())

    async def good(self, *words: str) -> Any:
        """The JSON of a command that must succeed."""
        result = await self.run(*words)
        assert (result.status, result.err) == (0, ""), result
        return json.loads(result.out)

    async def run_here(self, *words: str, typed: str = "") -> Result:
        """The command on a thread of this process: as it answers, without the second that a process takes to start.

        typed: what is on its standard input.
        """
        given = [*words, "--state", str(self.state)]
        done = await asyncio.to_thread(CliRunner().invoke, command_line(words), given, input=typed)
        assert isinstance(done.exception, SystemExit | None), done.exception
        return Result(done.exit_code, done.stdout, done.stderr)

    async def good_here(self, *words: str) -> Any:
        """As `good`, in this process."""
        result = await self.run_here(*words)
        assert (result.status, result.err) == (0, ""), result
        return json.loads(result.out)


@asynccontextmanager
async def terminal_of(state: Path) -> AsyncIterator[Terminal]:
    """A terminal before a served cell whose ready file is in the directory."""
    made = Terminal(state)
    listener = socket.create_server(("127.0.0.1", 0))
    await made.prepare(listener.getsockname()[1])
    config = uvicorn.Config(
        made.app, interface="asgi3", lifespan="off", ws="none", log_level="error", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    serving = asyncio.get_running_loop().create_task(server.serve(sockets=[listener]))
    yield made
    server.should_exit = True
    await serving
    listener.close()
