"""Aliases, revisions, pools and workload classes: what a name resolves to.

A customer sends an alias; it resolves to a revision, which is immutable: engine, artifact, arguments, context window, typical
output, evaluation set. Only its state changes, by `core/registry/approval.py`, and its price, a versioned schedule beside it. A
pool is the replicas serving one revision.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

from weir.core.metering import Price
from weir.core.registry.rollout_plan import Tolerances
from weir.core.tenancy import ServiceClass
from weir.units import Millis, Tokens


class EngineKind(StrEnum):
    """Which adapter runs a revision."""

    LLAMACPP = "llamacpp"
    OPENAI = "openai"
    SIMULATED = "simulated"
    VLLM = "vllm"


class RevisionState(StrEnum):
    """Where a revision is in its life; see `core/registry/approval.py`."""

    REGISTERED = "registered"
    APPROVED = "approved"
    LIVE = "live"
    RETIRED = "retired"
    REVOKED = "revoked"


SERVING = frozenset({RevisionState.APPROVED, RevisionState.LIVE})
"""States in which replicas may run it and new work may reach it."""

Argument: TypeAlias = bool | int | float | str

EMBEDDINGS = "embeddings"
"""The argument, of engines of every kind, by which a revision makes vectors and no text."""

FROM_ARTIFACTS = frozenset({EngineKind.LLAMACPP, EngineKind.VLLM})
"""Engines that the platform starts on a signed artifact, and that take adapters."""


@dataclass(frozen=True, slots=True)
class Revision:
    """An immutable thing to run, with the state of its approval.

    artifact: what the engine loads: a file's name in the signed artifact for llama.cpp, `.` (all of it) for vLLM, the served
    model's name for an OpenAI-compatible server, a calibration row for the simulated engine. artifact_digest: of the signed
    artifact, None where nothing was verified (behind a URL, or simulated). arguments: how the engine runs it, by name.
    evaluation: digest of its evaluation set, None without one. chat: takes conversations; a base model only plain prompts.
    context_tokens: window per request, input and output together. typical_output_tokens: declared by whoever registers.
    external: runs outside the platform; serves only tenants that allow it. tenant: whom it belongs to; None: to all.
    adapter_of: the revision whose model its adapter changes. registered_by, approved_by: actors.
    """

    id: str
    engine: EngineKind
    artifact: str
    context_tokens: Tokens
    max_output_tokens: Tokens
    typical_output_tokens: Tokens
    price: Price
    chat: bool = True
    external: bool = False
    state: RevisionState = RevisionState.LIVE
    artifact_digest: str | None = None
    arguments: tuple[tuple[str, Argument], ...] = ()
    evaluation: str | None = None
    tenant: str | None = None
    adapter_of: str | None = None
    registered_by: str | None = None
    approved_by: str | None = None

    @property
    def revoked(self) -> bool:
        """Whether running work of it must be cancelled."""
        return self.state is RevisionState.REVOKED

    @property
    def embeds(self) -> bool:
        """Whether it makes vectors, and no text."""
        return dict(self.arguments).get(EMBEDDINGS) is True

    @property
    def serves(self) -> bool:
        """Whether replicas may run it and new work may reach it."""
        return self.state in SERVING


@dataclass(frozen=True, slots=True)
class RevisionPrice:
    """One entry of the price schedule. It is never changed or removed: a new price is a new version."""

    revision: str
    price: Price


@dataclass(frozen=True, slots=True)
class Pool:
    """Replicas that serve one revision; a revision may have several pools.

    replicas: how many to keep. concurrency: requests a replica may run at once. urls: addresses of engines that run already
    (else the platform launches them). on_demand: start with the first request, stop after idle_stop_ms without one.
    tenant: it is dedicated to this one; None: shared. service_classes: whose requests it takes. input_tokens_max: of one
    request that it takes; None for no bound. declared: by the way a cell was started, which keeps it only as long as it is
    started so. retired: its replicas are drained and stopped.
    """

    name: str
    revision: str
    replicas: int
    concurrency: int
    urls: tuple[str, ...] = ()
    on_demand: bool = False
    idle_stop_ms: Millis = 600_000
    tenant: str | None = None
    service_classes: tuple[ServiceClass, ...] = tuple(ServiceClass)
    input_tokens_max: Tokens | None = None
    declared: bool = False
    retired: bool = False

    @property
    def replicas_wanted(self) -> int:
        """How many replicas it has when all is well: one per address, where it has any."""
        return len(self.urls) or self.replicas


def within_reach(pools: Iterable[Pool], tenant: str, leaves_its_pools: bool) -> list[Pool]:
    """Of a revision's pools those in which this tenant's prompts may ever be seen, its own first."""
    candidates = list(pools)
    own = [pool for pool in candidates if pool.tenant == tenant]
    if own and not leaves_its_pools:
        return own
    return own + [pool for pool in candidates if pool.tenant is None]


@dataclass(frozen=True, slots=True)
class Canary:
    """The share of an alias's requests that goes to another revision. weight: whole percent, 0 … 100; step: of the rollout.

    tolerances: how much worse it may be, by the rollout's plan.
    """

    rollout: str
    step: int
    revision: str
    weight: int
    tolerances: Tolerances = field(default_factory=Tolerances)


@dataclass(frozen=True, slots=True)
class Alias:
    """A name that applications use. default_max_output_tokens: the hold's output when a request names none.

    revision: the stable one. tenant: whom the name belongs to; None: to all. A tenant's own name goes before a shared one.
    """

    name: str
    revision: str
    default_max_output_tokens: Tokens
    canary: Canary | None = None
    tenant: str | None = None


@dataclass(frozen=True, slots=True)
class WorkloadClass:
    """A row of policy data: what a kind of request may expect. A request gets the first row it fits.

    input_tokens_max: None for no bound. ttft_target_ms and tpot_target_ms are p95 objectives over admitted requests.
    backlog_ms: how long a replica may have to read before one of these goes there, of_many_backlog_ms: while more of its tenant
    wait; None: no bound, and the same as without others.
    """

    name: str
    service_class: ServiceClass
    input_tokens_max: Tokens | None
    default_deadline_ms: Millis
    ttft_target_ms: Millis
    tpot_target_ms: Millis
    backlog_ms: Millis | None = None
    of_many_backlog_ms: Millis | None = None

    def fits(self, service_class: ServiceClass, input_tokens: Tokens) -> bool:
        """Whether a request belongs to this row."""
        if self.service_class is not service_class:
            return False
        return self.input_tokens_max is None or input_tokens <= self.input_tokens_max


DEFAULT_WORKLOAD_CLASSES = (
    WorkloadClass("short", ServiceClass.INTERACTIVE, 2_000, 60_000, 1_000, 50, 20, 3),
    WorkloadClass("long", ServiceClass.INTERACTIVE, None, 300_000, 10_000, 100, 2_000, 500),
    WorkloadClass("batch", ServiceClass.BATCH, None, 3_600_000, 600_000, 1_000, 2_000, 200),
)
"""Of short prompts so few are before one another that an engine's step stays short, and who is next is chosen late; a long one
finds its replica more often the more may be before it.
"""


def workload_class_of(classes: tuple[WorkloadClass, ...], service_class: ServiceClass, input_tokens: Tokens) -> WorkloadClass:
    """The first row that fits; the rows are checked at start to end with one that takes every length."""
    return next(row for row in classes if row.fits(service_class, input_tokens))


CATALOG_KEYS: Mapping[str, Callable[[Any], tuple[str, ...]]] = {
    "tenants": lambda tenant: (tenant.name,),
    "applications": lambda application: (application.tenant, application.name),
    "keys": lambda key: (key.id,),
    "admin_keys": lambda key: (key.id,),
    "aliases": lambda alias: (alias.tenant or "", alias.name),
    "revisions": lambda revision: (revision.id,),
    "pools": lambda pool: (pool.name,),
    "signing_keys": lambda key: (key.name,),
    "rollouts": lambda rollout: (rollout.id,),
}
"""The key of each kind of row that a catalog lists in its order, and a change replaces by it."""
