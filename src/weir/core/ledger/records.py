"""The append-only records of the ledger, as they are written: hold, step, settle, release. Never prompt or output text.

Records are written in groups, in decision order, a group in one transaction, so that a durable record implies all earlier
ones. Balances are sums over these records and can be rebuilt from them. Each record is one msgspec struct so that a store,
a frame and a test mean the same thing by it.
"""

from typing import TypeAlias

import msgspec

from weir.core.endings import FinishReason, Status
from weir.core.metering import Basis, InputBasis
from weir.core.tenancy import ServiceClass
from weir.units import MicroDollars, Millis, Tokens


class ExecutionId(msgspec.Struct, frozen=True, order=True):
    """Names one run of a request id. execution: int ≥ 1; a re-run after an ending that delivered and cost nothing is 2."""

    tenant: str
    request_id: str
    execution: int


class BucketTake(msgspec.Struct, frozen=True, omit_defaults=True):
    """Units taken from one per-minute bucket. limit: `requests_per_minute` or `tokens_per_minute`.

    service_class: of the bucket's scope; absent in what is stored of a scope of every class.
    """

    application: str | None
    key: str | None
    alias: str | None
    limit: str
    units: int
    service_class: ServiceClass | None = None

    @property
    def bucket(self) -> tuple[str | None, ...]:
        """Which bucket of its tenant."""
        return self.application, self.key, self.alias, self.service_class, self.limit


class HoldRecord(msgspec.Struct, frozen=True, tag="hold"):
    """An admitted request and everything that was taken for it. windows: the budget windows that its amounts are held in."""

    seq: int
    at_ms: Millis  # wall clock
    id: ExecutionId
    generation_id: str
    body_digest: bytes
    application: str
    key: str
    alias: str
    revision: str
    pool: str
    service_class: ServiceClass
    workload_class: str
    surface: str
    stream: bool
    input_tokens: Tokens
    input_basis: InputBasis
    max_output_tokens: Tokens
    choices: int
    price_version: int
    held_microusd: MicroDollars
    windows: tuple[str, ...]
    takes: tuple[BucketTake, ...]
    deadline_at_ms: Millis  # wall clock
    gateway_session: str


class StepRecord(msgspec.Struct, frozen=True, tag="step"):
    """Output up to delivered_max (0 for answers that are not streamed) may reach the client. The first step is the dispatch."""

    seq: int
    id: ExecutionId
    attempt: int
    replica: str
    delivered_max: Tokens


class Timing(msgspec.Struct, frozen=True):
    """Durations of a request in milliseconds; None where the phase was not reached."""

    queue_ms: float | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    total_ms: float | None = None


class SettleRecord(msgspec.Struct, frozen=True, tag="settle"):
    """The end of an execution that was dispatched, and its usage row: measured tokens, the tenant's part, the platform's."""

    seq: int
    at_ms: Millis  # wall clock
    id: ExecutionId
    attempt: int
    replica: str
    status: Status
    finish_reason: FinishReason
    basis: Basis
    input_tokens: Tokens
    cached_input_tokens: Tokens
    output_tokens: Tokens
    delivered_tokens: Tokens
    tenant_input_tokens: Tokens
    tenant_cached_input_tokens: Tokens
    tenant_output_tokens: Tokens
    cost_microusd: MicroDollars
    platform_microusd: MicroDollars
    returns: tuple[BucketTake, ...]
    timing: Timing
    error_code: str | None = None
    error_detail: str | None = None


class ReleaseRecord(msgspec.Struct, frozen=True, tag="release"):
    """The end of an execution that was never dispatched; it used nothing."""

    seq: int
    at_ms: Millis  # wall clock
    id: ExecutionId
    status: Status
    finish_reason: FinishReason
    returns: tuple[BucketTake, ...]
    timing: Timing
    error_code: str | None = None
    error_detail: str | None = None


LedgerRecord: TypeAlias = HoldRecord | StepRecord | SettleRecord | ReleaseRecord
EndRecord: TypeAlias = SettleRecord | ReleaseRecord
