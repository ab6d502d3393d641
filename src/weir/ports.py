"""The protocols that shells need and adapters implement. One contract suite per port runs on every implementation.

Clock and Entropy keep time and randomness out of everything else. Engine is the port between the relay and an inference
server; Launcher starts processes; LedgerStore and ControlStore keep state; CoordinatorLink is the coordinator as a gateway
sees it.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from weir.core.demands import NO_DEMANDS, Demands
from weir.core.endings import FinishReason
from weir.core.ledger.records import ExecutionId, HoldRecord, LedgerRecord
from weir.core.output import Delta as Delta
from weir.core.registry.key_ring import SigningKey
from weir.core.registry.manifest import Manifest
from weir.core.registry.model import Alias, Pool, Revision, RevisionPrice
from weir.core.registry.rollout_record import Rollout
from weir.core.registry.signed_manifest import SignedManifest
from weir.core.registry.snapshot import Snapshot
from weir.core.request import Message, Sampling
from weir.core.tenancy import AdminKey, ApiKey, Application, Limits, Scope, ServiceClass, Tenant
from weir.errors import WeirError
from weir.messages import Down, GenerationRecord, ReplicaAddress, Up
from weir.units import Bytes, MicroDollars, Millis, Nanos, Tokens

# ── time and randomness ──────────────────────────────────────────────────────────────────────────────────────────────


class Clock(Protocol):
    """monotonic_ns for durations and deadlines, wall_ms (Unix epoch) for records and budget windows."""

    def monotonic_ns(self) -> Nanos: ...

    def wall_ms(self) -> Millis: ...


class Entropy(Protocol):
    """Unpredictable bytes: ids, key secrets. Seeded in tests and in the simulator."""

    def token(self, size: int) -> bytes: ...


# ── engines ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class EngineCall:
    """One generation for one replica. lane: the replica's slot that the coordinator gave us, 0 … concurrency − 1.

    cache_salt: the isolation scope's salt for engines with salted prefix caches, else None.
    """

    replica: ReplicaAddress
    lane: int
    prompt: str | tuple[Message, ...]
    chat: bool
    max_output_tokens: Tokens
    sampling: Sampling
    cache_salt: str | None = None
    demands: Demands = NO_DEMANDS


@dataclass(frozen=True, slots=True)
class EngineUsage:
    """The engine's own figures at the end. output_tokens counts all choices."""

    input_tokens: Tokens
    cached_input_tokens: Tokens
    output_tokens: Tokens


@dataclass(frozen=True, slots=True)
class EngineEnd:
    """How a run ended by itself. Exactly one of reason (stop, length, …) and fault is set. usage: None where none arrived.

    fault: EngineError, ReplicaLost, Stalled or EngineRejected. output_tokens_seen: the last cumulative count of a chunk.
    """

    reason: FinishReason | None
    usage: EngineUsage | None
    fault: WeirError | None = None
    output_tokens_seen: Tokens | None = None


class EngineSink(Protocol):
    """Receives a run's output, on the event loop. Never called again after `on_end`, nor after `EngineRun.cancel`."""

    def on_deltas(self, deltas: Sequence[Delta]) -> None:
        """All output that arrived in one read. The sink must not raise."""
        ...

    def on_end(self, end: EngineEnd) -> None:
        """The run is over; called exactly once unless it was cancelled."""
        ...


class EngineRun(Protocol):
    """A running generation."""

    def pause(self) -> None:
        """Stop reading from the engine (backpressure); idempotent."""
        ...

    def resume(self) -> None:
        """Read again; idempotent."""
        ...

    def cancel(self) -> None:
        """Stop generating; idempotent, also after the end. No sink call follows."""
        ...

    async def stopped(self) -> None:
        """Returns once the engine runs nothing for this call: at once after a normal end, confirmed after a cancel.

        Raises ReplicaLost when that cannot be confirmed within the engine's own bound.
        """
        ...


class Engine(Protocol):
    """Client of the replicas of one engine kind. One object serves many replicas and calls."""

    def start(self, call: EngineCall, sink: EngineSink) -> EngineRun:
        """Begin a generation, always streamed from the engine. Never raises: faults arrive as `on_end`, on the loop, later."""
        ...

    async def count_input(
        self, replica: ReplicaAddress, prompt: str | tuple[Message, ...], chat: bool, demands: Demands = NO_DEMANDS
    ) -> Tokens | None:
        """Exact input tokens with the chat template and tools, or None when the replica cannot say in time."""
        ...

    async def probe(self, replica: ReplicaAddress) -> ReplicaAddress:
        """One health check: the address with what was found (capabilities, model name, context window). Raises EngineFault."""
        ...

    async def aclose(self) -> None:
        """Close every connection."""
        ...


class ReplicaProcess(Protocol):
    """An engine process that the platform started."""

    @property
    def url(self) -> str:
        """Base URL, known once the process listens."""
        ...

    @property
    def api_key(self) -> str | None: ...

    async def wait(self) -> int:
        """The exit status, once it exited for whatever reason."""
        ...

    async def stop(self, grace_ms: Millis) -> None:
        """Ask it to exit, then kill it after the grace; returns when it is gone. Idempotent."""
        ...


class Launcher(Protocol):
    """Starts engine processes that end with their parent, also when it is killed."""

    async def launch(self, revision: Revision, pool: Pool) -> ReplicaProcess:
        """Start one replica and wait until it listens. Raises EngineError with the reason when it does not."""
        ...


# ── state ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class LeafBalance:
    """Posted amounts of one (tenant, application, key, alias, service class) in one budget window."""

    tenant: str
    application: str
    key: str
    alias: str
    service_class: ServiceClass
    window: str
    spent_microusd: MicroDollars
    spent_tokens: Tokens


@dataclass(frozen=True, slots=True)
class RecentTake:
    """A bucket take of the last minutes, to rebuild buckets: units are net of what its settlement returned.

    hold: the one that made it, if that is open and may still give some of it back.
    """

    tenant: str
    application: str | None
    key: str | None
    alias: str | None
    limit: str
    net_units: int
    at_ms: Millis
    hold: ExecutionId | None = None
    service_class: ServiceClass | None = None


@dataclass(frozen=True, slots=True)
class StoredExecution:
    """An execution as stored. tenant_tokens: what counted against token limits. ended_at_ms: None while it is held."""

    id: ExecutionId
    body_digest: bytes
    record: GenerationRecord
    delivered_tokens: Tokens
    tenant_tokens: Tokens
    ended_at_ms: Millis | None

    @property
    def open(self) -> bool:
        """Whether its hold has no end."""
        return self.ended_at_ms is None


@dataclass(frozen=True, slots=True)
class OpenHold:
    """A hold without an end. attempt, replica, delivered_max: of its last step; 0, None and 0 if it was never dispatched.

    lost_delivered_max: what was booked for the attempt before that one, which delivered nothing.
    """

    hold: HoldRecord
    attempt: int = 0
    replica: str | None = None
    delivered_max: Tokens = 0
    lost_delivered_max: Tokens = 0


@dataclass(frozen=True, slots=True)
class Recovery:
    """What a coordinator needs to take over. next_seq: one above the last record's. open_holds: the oldest first.

    balances: of windows that may still be present, by `floors_of(recent_since_ms)`.
    """

    epoch: int
    next_seq: int
    balances: Sequence[LeafBalance] = ()
    open_holds: Sequence[OpenHold] = ()
    recent_takes: Sequence[RecentTake] = ()


@dataclass(frozen=True, slots=True)
class LedgerReport:
    """What a check of the whole ledger found. problems: each a sentence, at most a few of a kind; none when all is right."""

    epoch: int
    last_seq: int
    holds: int
    open_holds: int
    settlements: int
    rolled_up: int
    late: int
    balances: int
    problems: tuple[str, ...] = ()

    @property
    def is_clean(self) -> bool:
        """Whether every balance is the sum of its records, and every record keeps the ledger's rules."""
        return not self.problems


@dataclass(frozen=True, slots=True)
class UsageQuery:
    """Which usage rows to sum. Times are wall-clock milliseconds of the end, from inclusive, to exclusive. group_by: columns.

    Of executions that were rolled up only the UTC day of the end is known, as its first millisecond. More than
    groups_max groups are refused.
    """

    tenant: str | None = None
    from_ms: Millis | None = None
    to_ms: Millis | None = None
    group_by: tuple[str, ...] = ()
    groups_max: int = 100_000


@dataclass(frozen=True, slots=True)
class UsageRow:
    """Sums of one group. group: the values of the grouping columns, by name."""

    group: dict[str, str]
    requests: int
    input_tokens: Tokens
    cached_input_tokens: Tokens
    output_tokens: Tokens
    cost_microusd: MicroDollars
    platform_cost_microusd: MicroDollars


USAGE_GROUPS = ("tenant", "application", "key", "alias", "revision", "day", "status", "workload_class")
"""What usage can be grouped by. day: the budget day, in the tenant's time zone, that an execution's hold counts in."""


class LedgerStore(Protocol):
    """The ledger's durable records. One writer per cell: a write carries the epoch and is refused if the store's is higher."""

    async def open_epoch(self, recent_since_ms: Millis) -> Recovery:
        """Become the writer: epoch + 1, and everything needed to continue. recent_since_ms: how far back takes are read."""
        ...

    async def write(self, epoch: int, records: Sequence[LedgerRecord]) -> None:
        """Write a group in one transaction, in order; durable on return. Raises StaleEpoch, or LedgerUnavailable."""
        ...

    async def find_execution(self, tenant: str, request_id: str) -> StoredExecution | None:
        """The latest execution of a request id. Raises LedgerUnavailable."""
        ...

    async def usage(self, query: UsageQuery) -> list[UsageRow]:
        """Sums over usage rows. Raises InvalidRequest for columns that are none, or too many groups; LedgerUnavailable."""
        ...

    async def verify(self) -> LedgerReport:
        """Recount everything in one consistent read, also while another process writes. Raises LedgerUnavailable."""
        ...

    async def prune(self, epoch: int, before_ms: Millis, rows_max: int) -> int:
        """Replace up to rows_max executions that ended before a time by their sums; how many. Sums and balances stay.

        With the last of them late records and rejection counters of that age go too. Raises StaleEpoch, or LedgerUnavailable.
        """
        ...

    async def count_rejections(self, counts: Sequence[tuple[str, str, Millis, int]]) -> None:
        """Add (tenant, code, minute as wall-clock ms, number) to the rejection counters."""
        ...

    async def aclose(self) -> None: ...


class LeaderLease(Protocol):
    """Who may be a cell's coordinator: one holder at a time, for a time that the store's own clock measures.

    holder: a name that each life of a process has for itself alone.
    """

    async def take(self, holder: str, ttl_ms: Millis, *, by_force: bool = False) -> bool:
        """Take or renew it for ttl_ms, if nobody else has it or by force; whether it is the holder's now.

        The time begins after the call: a holder that counts from before it stops in time. Raises LedgerUnavailable.
        """
        ...

    async def give_back(self, holder: str) -> None:
        """Let another one have it at once, if it is still this one's; it is not taken again. Raises LedgerUnavailable."""
        ...

    async def is_awaited(self, holder: str) -> bool:
        """Whether another one, that still lives, asked for it in vain since it last had it. Raises LedgerUnavailable."""
        ...

    async def aclose(self) -> None: ...


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """Who changed what. summary: JSON text without secrets."""

    at_ms: Millis
    actor: str
    action: str
    subject: str
    summary: str


@dataclass(frozen=True, slots=True)
class Catalog:
    """Everything approved, as stored: what a snapshot is built from."""

    version: int
    tenants: Sequence[Tenant] = ()
    applications: Sequence[Application] = ()
    keys: Sequence[ApiKey] = ()
    admin_keys: Sequence[AdminKey] = ()
    aliases: Sequence[Alias] = ()
    revisions: Sequence[Revision] = ()
    pools: Sequence[Pool] = ()
    limits: Sequence[tuple[Scope, Limits]] = ()
    prices: Sequence[RevisionPrice] = ()
    signing_keys: Sequence[SigningKey] = ()
    rollouts: Sequence[Rollout] = ()


@dataclass(frozen=True, slots=True)
class CatalogChange:
    """Rows to insert or replace, in one transaction with their audit entry. limits: an empty entry removes the row.

    A revision's price is kept in the schedule under its version, beside those before it.
    """

    audit: AuditEntry
    tenants: Sequence[Tenant] = ()
    applications: Sequence[Application] = ()
    keys: Sequence[ApiKey] = ()
    admin_keys: Sequence[AdminKey] = ()
    aliases: Sequence[Alias] = ()
    revisions: Sequence[Revision] = ()
    pools: Sequence[Pool] = ()
    limits: Sequence[tuple[Scope, Limits]] = ()
    signing_keys: Sequence[SigningKey] = ()
    rollouts: Sequence[Rollout] = ()


class ControlStore(Protocol):
    """Tenants, applications, keys, limits, revisions, prices, rollouts and the audit trail."""

    async def load(self) -> Catalog:
        """The whole catalog in one consistent read."""
        ...

    async def version(self) -> int:
        """The catalog's version, which every change raises by one. Raises LedgerUnavailable."""
        ...

    async def apply(self, expected_version: int, change: CatalogChange) -> int:
        """Apply a change if the catalog is still at expected_version; the new version. Raises AlreadyExists when it is not."""
        ...

    async def audit(self, limit: int, before_ms: Millis | None = None, subject: str | None = None) -> list[AuditEntry]:
        """The newest audit entries, newest first; only those before a time, and of a subject, where these are given."""
        ...

    async def aclose(self) -> None: ...


# ── artifacts ────────────────────────────────────────────────────────────────────────────────────────────────────────

Verify = Callable[[SignedManifest], SigningKey]
"""The key that vouches now for what is signed. Raises SignatureRefused."""


@dataclass(frozen=True, slots=True)
class KeptArtifact:
    """What was kept, and the key that vouched for it. manifest.digest names it."""

    manifest: Manifest
    size_bytes: Bytes
    key: SigningKey


class Artifacts(Protocol):
    """Registered artifacts and evaluation sets. Each call raises ArtifactsUnavailable when the disk fails it."""

    async def keep(self, folder: Path, bundle: bytes, verify: Verify, signature_name: str | None = None) -> KeptArtifact:
        """Keep a copy of a signed folder; see `ArtifactStore.keep`. Raises SignatureRefused, ArtifactRefused."""
        ...

    async def keep_file(self, content: bytes) -> str:
        """Keep a single file; its digest, `sha256:` and hex. Raises ArtifactRefused when it is too large."""
        ...

    async def read_file(self, digest: str) -> bytes:
        """A kept file's content. Raises ArtifactRefused when it is not there, or is not what was kept."""
        ...


# ── gateway and coordinator ──────────────────────────────────────────────────────────────────────────────────────────


class CoordinatorLink(Protocol):
    """The coordinator as a gateway sees it: a session of messages. Answers arrive at the session's inbox, in order."""

    def send(self, message: Up) -> None:
        """Never blocks, never raises; a lost link ends the session's requests as `coordinator_lost`."""
        ...


class GatewayInbox(Protocol):
    """Where a session's down messages arrive, on the event loop."""

    def deliver(self, message: Down) -> None: ...


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """Which parts hold a snapshot version, and which had not answered in time."""

    version: int
    pending: tuple[str, ...] = field(default=())


PublishSnapshot = Callable[[Snapshot], Awaitable[Acknowledgement]]
"""Control's way to the data plane: returns once the parts acknowledged, or after the bound."""
