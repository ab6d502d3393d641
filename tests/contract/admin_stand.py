"""A served management API on memory stores with the demonstration catalog: what its suites share."""

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx2
import msgspec
import uvicorn
from tests.contract.stores import hold, settle, step
from tests.signing_keys import private_key

from weir import errors
from weir.api.admin import AdminParts, create_admin_app
from weir.control.bootstrap import DEMO_PRICE, bootstrap, draft_keys
from weir.control.cell_view import Explanations, GatheredEvidence, PoolReport, ReplicaReport
from weir.control.commands import Commands
from weir.control.declared_models import DeclaredModels
from weir.control.key_ring_commands import KeyRingCommands
from weir.control.model_commands import ModelCommands
from weir.control.registration import Registration
from weir.control.rollout_commands import RolloutCommands
from weir.control.rollout_loop import Look
from weir.core.endings import FinishReason, Status
from weir.core.ledger.records import ExecutionId, Timing
from weir.core.metering import Basis
from weir.core.registry.evidence import Evidence, Pairs, Tally
from weir.core.registry.key_ring import KeyRole, SigningKey
from weir.core.registry.model import Alias, Canary, EngineKind, Pool, Revision, RevisionState
from weir.core.registry.rollout import OnCanary, Paused, Proposed, RollbackReason, RolledBack, RolloutState
from weir.core.registry.rollout_plan import RolloutPlan, Step
from weir.core.registry.rollout_record import Rollout
from weir.core.registry.signatures import public_key_of
from weir.core.registry.snapshot import Snapshot
from weir.core.tenancy import Role, ServiceClass
from weir.messages import GenerationRecord
from weir.ports import Acknowledgement, AuditEntry, CatalogChange, LedgerStore
from weir.storage.artifact_store import ArtifactStore
from weir.storage.artifacts_off_loop import ArtifactsOffLoop
from weir.storage.memory import MemoryCatalog, MemoryLedger

NOON_MS = 1_700_049_600_000  # 2023-11-15T12:00:00Z
REVISION = Revision("small-1", EngineKind.SIMULATED, "row", 4_096, 1_024, 200, DEMO_PRICE)
PRICE = {"input_microusd": 300_000, "cached_input_microusd": 30_000, "output_microusd": 900_000}
SIMULATED: dict[str, Any] = {
    "name": "more",
    "engine": "simulated",
    "artifact": "row",
    "context_tokens": 4_096,
    "price": PRICE,
}
"""What asks to register a revision of the simulated engine."""
CAPABILITIES = {"cache_salt": True, "continuous_usage": False, "counts_tokens": True}
EVIDENCE = Evidence(Tally(900, 4, 30), Tally(100, 2, 3), Pairs(90, 40), Pairs(80, 30), Pairs(70, 20), Pairs(70, 10))
PACE = {"first_ms": 2.5, "input_ms": 0.25, "output_ms": 10.0}
NEXT = replace(REVISION, id="next@1", state=RevisionState.APPROVED, registered_by="ann", approved_by="bob")
"""Approved, with a pool."""
FRESH = replace(NEXT, id="fresh@1", state=RevisionState.REGISTERED, approved_by=None)
"""Registered by ann."""
PLAN = RolloutPlan((Step(10, 5, 60_000), Step(100, 5, 0)))
ROLLOUT_STATES: Mapping[str, RolloutState] = {
    "proposed": Proposed(NOON_MS),
    "paused": Paused(OnCanary(0, NOON_MS), NOON_MS + 1_000),
    "canary": OnCanary(0, NOON_MS),
    "over": RolledBack(NOON_MS + 2_000, RollbackReason.ERRORS, "errors: 9 of 10 requests."),
}
"""Rollouts from REVISION to NEXT, of aliases that have their names."""


def _registry() -> CatalogChange:
    canary = Canary("canary", 0, NEXT.id, 10, PLAN.tolerances)
    rollouts = [
        Rollout(name, name, REVISION.id, NEXT.id, PLAN, state, "ann", NOON_MS + number)
        for number, (name, state) in enumerate(ROLLOUT_STATES.items())
    ]
    aliases = [
        Alias(name, REVISION.id, 256, replace(canary, rollout=name) if name in ("paused", "canary") else None)
        for name in ROLLOUT_STATES
    ]
    return CatalogChange(
        AuditEntry(NOON_MS, "test", "registry", "registry", "{}"),
        revisions=[NEXT, FRESH],
        pools=[Pool("next", NEXT.id, 1, 4), Pool("spare", NEXT.id, 1, 4)],
        aliases=aliases,
        rollouts=rollouts,
        signing_keys=[SigningKey("build", public_key_of(private_key(1)), frozenset({KeyRole.MODEL}), None, NOON_MS)],
    )


REGISTRY = _registry()
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


class StandingLooks:
    """What was seen of rollouts, fixed, by their ids."""

    def __init__(self) -> None:
        self.by_id: dict[str, Look] = {}

    def latest(self, rollout_id: str) -> Look | None:
        return self.by_id.get(rollout_id)


class Stand:
    """A served management API with the demonstration catalog and a registry. pending: parts that never acknowledge.

    artifacts: where registered ones are kept.
    """

    def __init__(self, artifacts: Path) -> None:
        self.pending: tuple[str, ...] = ()
        self.published: list[Snapshot] = []
        self.store = MemoryCatalog()
        self.ledger = MemoryLedger()
        self.cell = StandingCell()
        self.clock = ManualClock()
        self.commands = Commands(self.store, self.publish, self.clock, SeededEntropy())
        self.rollouts = RolloutCommands(self.commands, self.clock, SeededEntropy())
        self.looks = StandingLooks()
        self.app = create_admin_app(
            AdminParts(
                commands=self.commands,
                models=ModelCommands(self.commands),
                registration=Registration(self.commands, ArtifactsOffLoop(ArtifactStore(artifacts)), self.clock),
                key_ring=KeyRingCommands(self.commands, self.clock),
                rollouts=self.rollouts,
                ledger=self.ledger,
                cell=self.cell,
                entropy=SeededEntropy(),
                looks=self.looks,
            )
        )
        self.keys: dict[Role, str] = {}
        self.client: httpx2.AsyncClient

    async def publish(self, snapshot: Snapshot) -> Acknowledgement:
        self.published.append(snapshot)
        return Acknowledgement(snapshot.version, self.pending)

    async def prepare(self) -> None:
        drafted = draft_keys(SeededEntropy())
        await bootstrap(self.commands, MODELS, drafted)
        self.keys[Role.OWNER] = drafted["admin"]
        await self.commands.commit(lambda catalog: (None, REGISTRY))
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

    async def last_entry(self) -> tuple[str, str, str]:
        """Actor, action and subject of the newest change."""
        [entry] = (await self.good("GET", "/admin/v1/audit?limit=1"))["entries"]
        return entry["actor"], entry["action"], entry["subject"]

    async def version(self) -> int:
        """The catalog's version."""
        return await self.store.version()


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
    async with AsyncExitStack() as held:
        made = Stand(Path(held.enter_context(TemporaryDirectory())))
        await made.prepare()
        url = await held.enter_async_context(served(made.app))
        made.client = await held.enter_async_context(httpx2.AsyncClient(base_url=url, timeout=10, verify=False))
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
