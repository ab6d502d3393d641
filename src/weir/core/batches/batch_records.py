"""What is recorded of files and batches: written once, but for a batch's progress, which its worker writes again and again.

    validating ──▶ in_progress ──▶ finalizing ──▶ COMPLETED
        │              │ ╰────────────┴─────────▶ EXPIRED
        ▼              ▼
      FAILED       cancelling ──────────────────▶ CANCELLED

The words are OpenAI's. A batch that waits for a budget is `in_progress` with a `paused_reason`. Whoever stores the end first
decides it: one that is cancelling may complete or expire before that is seen. What was done by then is kept in every case. Ids
begin with what they name and rise with time, so that a listing by key is one by age.
"""

from enum import StrEnum

import msgspec

from weir.units import Bytes, Millis, Tokens

ENDPOINTS = ("/v1/generations", "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
"""What the lines of a batch may be asked of."""

BATCH_ID_PREFIX, FILE_ID_PREFIX = "batch_", "file-"
_TIME_DIGITS = 11


class Purpose(StrEnum):
    """What a file is for."""

    BATCH = "batch"
    BATCH_OUTPUT = "batch_output"


class BatchStatus(StrEnum):
    """Where a batch is. The last four are ends."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


ENDED = frozenset({BatchStatus.COMPLETED, BatchStatus.FAILED, BatchStatus.EXPIRED, BatchStatus.CANCELLED})


class AliasDemand(msgspec.Struct, frozen=True):
    """What the lines of a file ask of one alias, all together and at most.

    output_tokens: of lines with a limit of their own, times their choices; defaulted: choices of lines without one.
    """

    alias: str
    lines: int
    input_tokens: Tokens
    output_tokens: Tokens
    defaulted: int


class FileRecord(msgspec.Struct, frozen=True):
    """A file of a tenant. endpoint, lines and demands: of a batch's input. expires_ms: wall time at which it is deleted."""

    id: str
    purpose: Purpose
    name: str
    size: Bytes
    created_ms: Millis
    expires_ms: Millis
    application: str
    endpoint: str = ""
    lines: int = 0
    demands: tuple[AliasDemand, ...] = ()


class BatchRecord(msgspec.Struct, frozen=True):
    """A batch as it was asked for. key: the credential that its lines run as. window: as written.

    expires_ms: wall time at which what is not done is given up. output_expires_s: how long its result files are kept, None for
    the default. order: the name of the note of its idempotency key, empty without one.
    """

    id: str
    tenant: str
    application: str
    key: str
    input_file_id: str
    endpoint: str
    window: str
    created_ms: Millis
    expires_ms: Millis
    lines: int
    metadata: dict[str, str] = {}
    output_expires_s: int | None = None
    order: str = ""


class KeptOrder(msgspec.Struct, frozen=True):
    """Which batch an idempotency key stands for, and a digest of what was ordered under it."""

    batch: str
    digest: str


class OpenBatch(msgspec.Struct, frozen=True):
    """What a mark of an open batch says."""

    tenant: str


class BatchCounts(msgspec.Struct, frozen=True):
    """Lines. total of them, completed: with an answer; failed: with an error."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchProgress(msgspec.Struct, frozen=True):
    """How far a batch is, as its worker last wrote it. paused_reason: the code of the refusal that it waits for.

    resumes_ms: wall time at which that ends, where it is known.
    """

    counts: BatchCounts
    status: BatchStatus = BatchStatus.VALIDATING
    in_progress_ms: Millis | None = None
    finalizing_ms: Millis | None = None
    paused_reason: str | None = None
    resumes_ms: Millis | None = None


class BatchFault(msgspec.Struct, frozen=True):
    """Why a batch failed. line: 1-based."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchEnd(msgspec.Struct, frozen=True):
    """How a batch ended, written once. output and error: ids of their files, where they have a line."""

    status: BatchStatus
    ended_ms: Millis
    counts: BatchCounts
    in_progress_ms: Millis | None = None
    finalizing_ms: Millis | None = None
    cancelling_ms: Millis | None = None
    output: str | None = None
    error: str | None = None
    faults: tuple[BatchFault, ...] = ()


class CancelMark(msgspec.Struct, frozen=True):
    """That its tenant gave a batch up. at_ms: wall time."""

    at_ms: Millis


def new_id(prefix: str, now_wall_ms: Millis, token: bytes) -> str:
    """An id that is above every earlier one."""
    return f"{prefix}{now_wall_ms:0{_TIME_DIGITS}x}{token.hex()}"


def id_pattern(prefix: str) -> str:
    """What every id of this kind fits, as a regular expression for the whole of it."""
    return f"^{prefix}[0-9a-f]{{{_TIME_DIGITS},64}}$"


def line_request_id(batch_id: str, line: int) -> str:
    """The request id of a line: by it the ledger charges each line once. line: 1-based."""
    return f"{batch_id}:{line}"
