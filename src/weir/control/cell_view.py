"""What the management API asks the running cell: accounts, holds, replicas, pools, generations and explanations.

A port of control's own: the coordinator's side implements it, in process or over a link. It only reads; every change goes
through the commands. Nothing here carries prompt or output text, or an engine's credential.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from weir.messages import GenerationRecord
from weir.units import Millis, Tokens


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """A replica as an administrator sees it. running: requests on it now, of at most `concurrency`.

    state: starting, ready, suspect, half_open, draining, stopped or failed. capabilities: what the readiness probe found, by
    name. detail: why it is not ready, if that is known.
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
    running: int
    capabilities: Mapping[str, bool]
    detail: str | None = None


@dataclass(frozen=True, slots=True)
class PoolReport:
    """A pool as an administrator sees it. replicas: wanted; ready: serving in full; queued: admitted requests that wait."""

    name: str
    revision: str
    replicas: int
    ready: int
    concurrency: int
    queued: int
    running: int
    on_demand: bool = False


@dataclass(frozen=True, slots=True)
class Explanations:
    """Timelines of one request id, latest first, with the keys of `Timelines.of`.

    kept: requests whose timelines the cell keeps in all; since_ms: wall-clock time since which it has every one.
    """

    timelines: Sequence[Mapping[str, Any]]
    kept: int
    since_ms: Millis


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
