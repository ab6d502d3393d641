"""A served management API on memory stores with the demonstration catalog: what its suites share."""

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import msgspec
import uvicorn
from tests.contract.stores import hold, settle, step

from weir import errors
from weir.api.admin import AdminParts, create_admin_app
from weir.control.bootstrap import DEMO_PRICE, bootstrap, draft_keys
from weir.control.cell_view import Explanations, GatheredEvidence, PoolReport, ReplicaReport
from weir.control.commands import Commands
from weir.control.declared_models import DeclaredModels
from weir.core.endings import FinishReason, Status
from weir.core.ledger.records import ExecutionId, Timing
from weir.core.metering import Basis
from weir.core.registry.evidence import Evidence, Pairs, Tally
from weir.core.registry.model import Alias, EngineKind, Pool, Revision
from weir.core.registry.snapshot import Snapshot
from weir.core.tenancy import Role, ServiceClass
from weir.messages import GenerationRecord
from weir.ports import Acknowledgement, LedgerStore
from weir.storage.memory import MemoryCatalog, MemoryLedger

NOON_MS = 1_700_049_600_000  # 2023-11-15T12:00:00Z
REVISION = Revision("small-1", EngineKind.SIMULATED, "row", 4_096, 1_024, 200, DEMO_PRICE)
CAPABILITIES = {"cache_salt": True, "continuous_usage": False, "counts_tokens": True}
EVIDENCE = Evidence(Tally(900, 4, 30), Tally(100, 2, 3), Pairs(90, 40), Pairs(80, 30), Pairs(70, 20), Pairs(70, 10))
PACE = {"first_ms": 2.5, "input_ms": 0.25, "output_ms": 10.0}
MODELS = DeclaredModels((REVISION,), (Alias("assistant", "small-1", 256),), (Pool("small", "small-1", 1, 4),))


class ManualClock:
    """Stands at noon until it is moved."""

    now_ms = NOON_MS

    def monotonic_ns(self) -> int:
        return self.now_ms * 1_000_000

    def wall_ms(self) -> int:
        return self.now_ms


class SeededEntropy:
    """Repeatable bytes."""

    def __init__(self) -> None:
        self._random = random.Random(1)

    def token(self, size: int) -> bytes:
        return self._random.randbytes(size)


def timeline_of(tenant: str, request_id: str) -> dict[str, Any]:
    """A request that was rejected twice, in the form of `Timelines.of`."""
    named = {"tenant": tenant, "request_id": request_id, "execution": None, "status": "rejected", "rejections": 2}
    events = [{"event": "received", "at_ms": 0.0}, {"event": "rejected", "at_ms": 0.4, "code": "budget_exhausted"}]
    return {**named, "arrived_at_ms": NOON_MS + 1, "delivery_steps": 0, "dropped_events": 0, "events": events}


class StandingCell:
    """A cell that stands still: its answers are fixed."""

    fault: errors.WeirError | None = None

    async def accounts(self, tenant: str) -> Sequence[dict[str, Any]]:
        if self.fault:
            raise self.fault
        scope = {"scope": {"tenant": tenant}}
        flying = {"limit_name": "concurrency", "limit": 5, "held": 2, "spent": 0, "resets_at_ms": None}
        budget = {"limit_name": "tokens_per_day", "limit": 99, "held": 7, "spent": 9, "resets_at_ms": NOON_MS + 43_200_000}
        return [scope | flying, scope | budget]

    async def open_holds(self, tenant: str) -> int:
        return 2

    async def replicas(self) -> Sequence[ReplicaReport]:
        url = "http://127.0.0.1:9"
        return [
            ReplicaReport(
                "r-1", "small", "small-1", "simulated", "ready", url, "m", 4_096, 4, 3, 1, CAPABILITIES, 8_192, 900, 700, PACE
            )
        ]

    async def pools(self) -> Sequence[PoolReport]:
        return [PoolReport("small", "small-1", 1, 1, 4, 0, 1, tenant="acme", service_classes=(ServiceClass.BATCH,))]

    async def generation(self, tenant: str, request_id: str) -> GenerationRecord | None:
        if (tenant, request_id) != ("acme", "r:1"):
            return None
        ended = (Status.FAILED, FinishReason.ENGINE_ERROR, 10, 0, 3, 0, Basis.ENGINE, True)
        timing = Timing(1.5, 20.0, None, 30.0)
        return GenerationRecord("gen-1", "r:1", 1, "assistant", "small-1", *ended, timing, "engine_error", "It failed.")

    async def explanations(self, request_id: str, tenant: str | None = None) -> Explanations:
        users = {"r:1": ("acme",), "shared": ("globex", "acme")}.get(request_id, ())
        found = [timeline_of(name, request_id) for name in users if tenant in (None, name)]
        return Explanations(found, 3, NOON_MS)

    async def evidence(self, rollout: str, revision: str) -> GatheredEvidence:
        running = 3 if revision == "small-2" else 0
        return GatheredEvidence(running, 1, EVIDENCE) if rollout == "ro-1" else GatheredEvidence(running)


class Stand:
    """A served management API with the demonstration catalog. pending: parts that never acknowledge."""

    def __init__(self) -> None:
        self.pending: tuple[str, ...] = ()
        self.published: list[Snapshot] = []
        self.store = MemoryCatalog()
        self.ledger = MemoryLedger()
        self.cell = StandingCell()
        self.clock = ManualClock()
        self.commands = Commands(self.store, self.publish, self.clock, SeededEntropy())
        self.app = create_admin_app(AdminParts(self.commands, self.ledger, self.cell, SeededEntropy()))
        self.keys: dict[Role, str] = {}
        self.client: httpx2.AsyncClient

    async def publish(self, snapshot: Snapshot) -> Acknowledgement:
        self.published.append(snapshot)
        return Acknowledgement(snapshot.version, self.pending)

    async def prepare(self) -> None:
        drafted = draft_keys(SeededEntropy())
        await bootstrap(self.commands, MODELS, drafted)
        self.keys[Role.OWNER] = drafted["admin"]
        for role in (Role.VIEWER, Role.OPERATOR, Role.RELEASER, Role.APPROVER):
            (_, self.keys[role]), _ = await self.commands.create_admin_key("test", role.value, role)

    async def call(
        self, method: str, path: str, body: Any = None, role: Role | None = Role.OWNER, **options: Any
    ) -> httpx2.Response:
        """One request with the role's key."""
        headers = {"authorization": f"Bearer {self.keys[role]}"} if role else {}
        if body is not None:
            options["json"] = body
        return await self.client.request(method, path, headers=headers | options.pop("headers", {}), **options)

    async def good(self, method: str, path: str, body: Any = None, status: int = 200, **options: Any) -> Any:
        """A request that must succeed; its JSON."""
        answer = await self.call(method, path, body, **options)
        assert answer.status_code == status, answer.text
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["x-request-id"] == answer.headers["request-id"]
        return answer.json()

    async def bad(self, method: str, path: str, body: Any = None, **options: Any) -> tuple[int, dict[str, Any]]:
        """A request that must be refused as a problem; status and document."""
        answer = await self.call(method, path, body, **options)
        assert answer.headers["content-type"] == "application/problem+json", answer.text
        document = answer.json()
        assert document["status"] == answer.status_code and document["type"] and document["title"] and document["detail"]
        assert answer.headers["x-request-id"] == answer.headers["request-id"]
        return answer.status_code, document


@asynccontextmanager
async def served(app: Any) -> AsyncIterator[str]:
    """The app on a free loopback port; its base URL."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # named, or asyncio leaves Nagle on
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", ws="none", log_level="critical", timeout_graceful_shutdown=1))
    serving = asyncio.get_running_loop().create_task(server.serve(sockets=[listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving
        listener.close()


@asynccontextmanager
async def standing() -> AsyncIterator[Stand]:
    """A prepared stand, served, with a client of it."""
    made = Stand()
    await made.prepare()
    async with served(made.app) as url, httpx2.AsyncClient(base_url=url, timeout=10, verify=False) as made.client:
        yield made


async def book_usage(ledger: LedgerStore) -> None:
    """One settled request of acme at noon: 100 tokens in (40 cached), 50 out, 44 micro-dollars."""
    recovery = await ledger.open_epoch(0)
    execution = ExecutionId("acme", "r:1", 1)
    held = msgspec.structs.replace(
        hold(1, execution, at_ms=NOON_MS, key="k", windows=("day/2023-11-15", "month/2023-11", "lifetime")),
        application="assistant",
        revision="small-1",
        max_output_tokens=64,
        choices=1,
        price_version=1,
        held_microusd=60,
        takes=(),
    )
    settled = msgspec.structs.replace(
        settle(3, execution, at_ms=NOON_MS, cost=44),
        input_tokens=100,
        cached_input_tokens=40,
        output_tokens=50,
        delivered_tokens=50,
        tenant_input_tokens=100,
        tenant_cached_input_tokens=40,
        tenant_output_tokens=50,
        platform_microusd=0,
    )
    await ledger.write(recovery.epoch, [held, step(2, execution), settled])
