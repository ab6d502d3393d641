"""What the management API asks the running cell: accounts, holds, replicas, pools and generations.

A port of control's own: the coordinator's side implements it, in process or over a link. It only reads; every change goes
through the commands. Nothing here carries prompt or output text, or an engine's credential.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from weir.messages import GenerationRecord
from weir.units import Tokens


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """A replica as an administrator sees it. running: requests on it now, of at most `concurrency`.

    state: starting, ready, suspect, draining, stopped or failed. capabilities: what the readiness probe found, by name.
    detail: why it is not ready, if that is known.
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
    """A pool as an administrator sees it. replicas: wanted; ready: serving now; queued: admitted requests that wait."""

    name: str
    revision: str
    replicas: int
    ready: int
    concurrency: int
    queued: int
    running: int
    on_demand: bool = False


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
