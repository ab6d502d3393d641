"""What control asks the running cell: accounts, holds, replicas, pools, generations, explanations, evidence of canaries.

A port of control's own: the coordinator's side implements it, in process or over a link. It only reads; every change goes
through the commands. Nothing here carries prompt or output text, or an engine's credential.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from weir.core.registry.evidence import Evidence
from weir.core.tenancy import ServiceClass
from weir.messages import GenerationRecord
from weir.units import Millis, Tokens


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """A replica as an administrator sees it. Of its `concurrency` lanes: allowed, as it adapts, and running, requests now.

    state: starting, ready, suspect, half_open, draining, stopped or failed. capabilities: what the readiness probe found, by
    name. kv_tokens: what its KV memory has room for, if it says; kv_tokens_reserved: for what runs. prefill_tokens: of prompts
    that it has still to read. pace: its warm-up's milliseconds (first_ms, input_ms, output_ms), if it had one. detail: why it
    is not ready, if that is known.
    """

    name: str
    pool: str
    revision: str
    engine: str
    state: str
    url: str
    model: str
    context_tokens: Tokens
    concurrency: int
    allowed: int
    running: int
    capabilities: Mapping[str, bool]
    kv_tokens: Tokens | None = None
    kv_tokens_reserved: Tokens = 0
    prefill_tokens: Tokens = 0
    pace: Mapping[str, float] | None = None
    detail: str | None = None


@dataclass(frozen=True, slots=True)
class PoolReport:
    """A pool as an administrator sees it. replicas: wanted; ready: serving in full; queued: admitted requests that wait.

    tenant: None where it is shared. input_tokens_max: None for no bound. detail: why fewer are ready than wanted, if that is
    known.
    """

    name: str
    revision: str
    replicas: int
    ready: int
    concurrency: int
    queued: int
    running: int
    on_demand: bool = False
    tenant: str | None = None
    service_classes: Sequence[ServiceClass] = tuple(ServiceClass)
    input_tokens_max: Tokens | None = None
    detail: str | None = None


@dataclass(frozen=True, slots=True)
class Explanations:
    """Timelines of one request id, latest first, with the keys of `Timelines.of`.

    kept: requests whose timelines the cell keeps in all; since_ms: wall-clock time since which it has every one.
    """

    timelines: Sequence[Mapping[str, Any]]
    kept: int
    since_ms: Millis


@dataclass(frozen=True, slots=True)
class GatheredEvidence:
    """What the cell knows of a rollout's canary. running: requests that are pinned to its revision and not over.

    step: at which the evidence was gathered; None, and no evidence, where no alias in force there has the rollout's canary.
    """

    running: int
    step: int | None = None
    evidence: Evidence | None = None


class CellView(Protocol):
    """The running cell, read only. Every call may raise LedgerUnavailable or CoordinatorLost."""

    async def accounts(self, tenant: str) -> Sequence[Mapping[str, Any]]:
        """One row per scope and limit in force, with the keys of `Book.accounts_of`."""
        ...

    async def open_holds(self, tenant: str) -> int:
        """Number of the tenant's holds that have not ended."""
        ...

    async def replicas(self) -> Sequence[ReplicaReport]:
        """Every replica that is known, in the order of their names."""
        ...

    async def pools(self) -> Sequence[PoolReport]:
        """Every pool, in the order of their names."""
        ...

    async def generation(self, tenant: str, request_id: str) -> GenerationRecord | None:
        """The latest execution of a tenant's request id, or None."""
        ...

    async def explanations(self, request_id: str, tenant: str | None = None) -> Explanations:
        """What the cell remembers of a request id, of one tenant or of all."""
        ...

    async def evidence(self, rollout: str, revision: str) -> GatheredEvidence:
        """What is known of a rollout's canary, whose revision this is. It begins anew with a step, and with a coordinator."""
        ...
