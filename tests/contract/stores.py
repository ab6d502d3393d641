"""What the store suites share: records in one line, and every implementation behind one way to open it again."""

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TypeAlias

from tests.postgres_server import shared_server

from weir.core.endings import FinishReason, Status
from weir.core.ledger.records import (
    BucketTake,
    ExecutionId,
    HoldRecord,
    ReleaseRecord,
    SettleRecord,
    StepRecord,
    Timing,
)
from weir.core.metering import Basis, InputBasis
from weir.core.tenancy import ServiceClass
from weir.storage.database import open_sqlite
from weir.storage.memory import MemoryCatalog, MemoryLedger
from weir.storage.postgres_catalog import PostgresCatalog
from weir.storage.postgres_ledger import PostgresLedger
from weir.storage.sqlite_catalog import SqliteCatalog
from weir.storage.sqlite_ledger import SqliteLedger

AnyLedger: TypeAlias = MemoryLedger | SqliteLedger | PostgresLedger
AnyCatalog: TypeAlias = MemoryCatalog | SqliteCatalog | PostgresCatalog

KINDS = ("memory", "sqlite", "postgres")
T0_MS = 1_767_225_600_000  # 2026-01-01T00:00:00Z
WINDOWS = ("day/2026-01-01", "month/2026-01", "lifetime")
NEXT_DAY = ("day/2026-01-02", "month/2026-01", "lifetime")
TAKES = (
    BucketTake(None, None, None, "requests_per_minute", 1),
    BucketTake("app", "key", None, "tokens_per_minute", 300),
)


@cache
def _empty_database() -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "empty.sqlite3"
        open_sqlite(path)
        return path.read_bytes()


def migrated_database(directory: Path) -> Path:
    """A new database of this version in a directory, without running migrations again."""
    path = Path(tempfile.mkdtemp(dir=directory)) / "weir.sqlite3"
    path.write_bytes(_empty_database())
    return path


@dataclass
class Cell:
    """One cell's durable state; every `ledger` is a restart on it."""

    kind: str
    directory: Path
    lock_wait_ms: int = 1_000
    path: Path = field(init=False)
    url: str = field(init=False)

    def __post_init__(self) -> None:
        self._memory = MemoryLedger()
        self._memory_catalog = MemoryCatalog()
        if self.kind == "sqlite":
            self.path = migrated_database(self.directory)
        elif self.kind == "postgres":
            self.url = shared_server().migrated_database()

    @asynccontextmanager
    async def ledger(self) -> AsyncIterator[AnyLedger]:
        """The ledger, closed at the end."""
        ledger = self._ledger()
        try:
            yield ledger
        finally:
            await ledger.aclose()

    @asynccontextmanager
    async def catalog(self) -> AsyncIterator[AnyCatalog]:
        """The catalog, closed at the end."""
        catalog = self._catalog()
        try:
            yield catalog
        finally:
            await catalog.aclose()

    def _ledger(self) -> AnyLedger:
        if self.kind == "memory":
            return self._memory
        return SqliteLedger(self.path, self.lock_wait_ms) if self.kind == "sqlite" else PostgresLedger(self.url)

    def _catalog(self) -> AnyCatalog:
        if self.kind == "memory":
            return self._memory_catalog
        return SqliteCatalog(self.path) if self.kind == "sqlite" else PostgresCatalog(self.url)


def execution(request_id: str = "r", number: int = 1, tenant: str = "acme") -> ExecutionId:
    """An execution's name."""
    return ExecutionId(tenant, request_id, number)


def hold(
    seq: int,
    named: ExecutionId,
    *,
    at_ms: int = T0_MS,
    key: str = "key",
    windows: tuple[str, ...] = WINDOWS,
    service_class: ServiceClass = ServiceClass.INTERACTIVE,
) -> HoldRecord:
    """A hold of 100 input and 200 output tokens, worth 5,000 micro-dollars."""
    return HoldRecord(
        seq=seq,
        at_ms=at_ms,
        id=named,
        generation_id=f"gen-{named.request_id}-{named.execution}",
        body_digest=b"\x00digest\xff",
        application="app",
        key=key,
        alias="assistant",
        revision="rev-1",
        pool="pool-1",
        service_class=service_class,
        workload_class="short",
        surface="native",
        stream=True,
        input_tokens=100,
        input_basis=InputBasis.UPPER_BOUND,
        max_output_tokens=100,
        choices=2,
        price_version=7,
        held_microusd=5_000,
        windows=windows,
        takes=TAKES,
        deadline_at_ms=at_ms + 60_000,
        gateway_session="gateway-1",
    )


def step(seq: int, named: ExecutionId, attempt: int = 1, delivered_max: int = 64) -> StepRecord:
    """A delivery step on replica-<attempt>."""
    return StepRecord(seq, named, attempt, f"replica-{attempt}", delivered_max)


def settle(seq: int, named: ExecutionId, *, at_ms: int = T0_MS + 1_000, cost: int = 40, back: int = 0) -> SettleRecord:
    """A completed end: 90 input (10 cached) and 30 output tokens measured, of which the tenant pays 80, 9 and 20."""
    return SettleRecord(
        seq=seq,
        at_ms=at_ms,
        id=named,
        attempt=1,
        replica="replica-1",
        status=Status.COMPLETED,
        finish_reason=FinishReason.STOP,
        basis=Basis.ENGINE,
        input_tokens=90,
        cached_input_tokens=10,
        output_tokens=30,
        delivered_tokens=25,
        tenant_input_tokens=80,
        tenant_cached_input_tokens=9,
        tenant_output_tokens=20,
        cost_microusd=cost,
        platform_microusd=3,
        returns=(BucketTake("app", "key", None, "tokens_per_minute", back),) if back else (),
        timing=Timing(1.5, 20.25, 3.0, 99.0),
    )


def release(seq: int, named: ExecutionId, *, at_ms: int = T0_MS + 1_000, back: tuple[BucketTake, ...] = ()) -> ReleaseRecord:
    """An end in the queue."""
    return ReleaseRecord(
        seq=seq,
        at_ms=at_ms,
        id=named,
        status=Status.EXPIRED,
        finish_reason=FinishReason.QUEUE_WAIT,
        returns=back,
        timing=Timing(queue_ms=5_000.0, total_ms=5_000.0),
        error_code="queue_wait_exceeded",
        error_detail="The bound of waiting was reached.",
    )
