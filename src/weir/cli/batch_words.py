"""A batch as the tenant API answers it, and in words: how far it is, what it waits for, how it ended. Pure.

All text is made fit for a terminal here, where it comes in. An answer of another OpenAI-compatible server, which lacks Weir's
own fields, is a batch too.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from weir.cli.http_api import CommandFailed
from weir.cli.rollout_words import duration
from weir.cli.tables import plain, thousands
from weir.core.batches.batch_records import ENDED

FAULTS_SHOWN = 10
PACE_S = 10.0
"""Over which the rate is taken: long enough for slow lines, short enough to see a pause."""

_TIME_MAX_S = 253_402_300_799
_REASONS = {"budget_exhausted": "a budget is used up"}
_ENDS = ("completed_at", "failed_at", "expired_at", "cancelled_at")


@dataclass(frozen=True, slots=True)
class Batch:
    """How a batch is. Times: seconds since 1970, None where there is none; faults: why it failed, a line each."""

    id: str
    status: str
    endpoint: str
    input_file: str
    output_file: str | None
    error_file: str | None
    total: int
    completed: int
    failed: int
    created_s: int | None
    begun_s: int | None
    expires_s: int | None
    ended_s: int | None
    paused_reason: str | None
    resumes_s: int | None
    faults: tuple[str, ...]

    @property
    def done(self) -> int:
        """Lines that have ended, either way."""
        return self.completed + self.failed

    @property
    def is_over(self) -> bool:
        """Whether nothing of it will change."""
        return self.status in ENDED


def batch_of(document: Any) -> Batch:
    """A batch of an answer. Raises CommandFailed where it is none."""
    if not isinstance(document, Mapping) or not isinstance(document.get("id"), str):
        raise CommandFailed("The answer is no batch.")
    counts = document.get("request_counts")
    counts = counts if isinstance(counts, Mapping) else {}
    return Batch(
        id=plain(document["id"]),
        status=_text(document.get("status")) or "unknown",
        endpoint=_text(document.get("endpoint")) or "",
        input_file=_text(document.get("input_file_id")) or "",
        output_file=_text(document.get("output_file_id")),
        error_file=_text(document.get("error_file_id")),
        total=_whole(counts.get("total")) or 0,
        completed=_whole(counts.get("completed")) or 0,
        failed=_whole(counts.get("failed")) or 0,
        created_s=_whole(document.get("created_at")),
        begun_s=_whole(document.get("in_progress_at")),
        expires_s=_whole(document.get("expires_at")),
        ended_s=next((ended for name in _ENDS if (ended := _whole(document.get(name)))), None),
        paused_reason=_text(document.get("paused_reason")),
        resumes_s=_whole(document.get("resumes_at")),
        faults=tuple(_faults(document.get("errors"))),
    )


def _text(value: Any) -> str | None:
    return plain(value) if isinstance(value, str) and value else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and 0 <= value <= _TIME_MAX_S else None


def _faults(errors: Any) -> Iterator[str]:
    entries = errors.get("data") if isinstance(errors, Mapping) else None
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, Mapping):
            line = _whole(entry.get("line"))
            place = "" if line is None else f"line {line}: "
            yield f"{place}{_text(entry.get('message')) or 'it failed'} ({_text(entry.get('code')) or 'no code'})"


# ── words ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def state(batch: Batch) -> str:
    """Where it is."""
    paused = " (paused)" if batch.paused_reason and not batch.is_over else ""
    return batch.status.replace("_", " ") + paused


def counted(batch: Batch) -> str:
    """How many lines have ended, and how many of them with an error."""
    return f"{thousands(batch.done)} of {thousands(batch.total)} lines done, {thousands(batch.failed)} failed"


def waiting(batch: Batch) -> str | None:
    """What it waits for, and until when, where that is known."""
    if batch.paused_reason is None or batch.is_over:
        return None
    reason = _REASONS.get(batch.paused_reason)
    said = f"{reason} ({batch.paused_reason})" if reason else batch.paused_reason
    return f"{said}, goes on at {moment(batch.resumes_s)}" if batch.resumes_s is not None else said


def standing(batch: Batch, pace: "Pace | None" = None) -> str:
    """All of it on one line. pace: where it was looked at before."""
    parts = [f"{state(batch)}, {counted(batch)}"]
    if (waits := waiting(batch)) is not None:
        parts.append(f"waits: {waits}")
    elif pace is not None and not batch.is_over and (going := pace.words(batch)):
        parts.append(going)
    return ", ".join(parts)


def report(batch: Batch, now_s: int) -> list[tuple[str, str]]:
    """Everything about it, as labels and texts."""
    rows = [("state", state(batch)), ("lines", counted(batch))]
    if (waits := waiting(batch)) is not None:
        rows.append(("waits", waits))
    if batch.begun_s is not None and batch.done:
        seconds = max(1, (batch.ended_s or now_s) - batch.begun_s)
        rows.append(("rate", f"{batch.done / seconds:,.1f} lines per second since it began"))
    if batch.ended_s is not None:
        rows.append(("ended", moment(batch.ended_s)))
    elif batch.expires_s is not None:
        left = duration(max(0, batch.expires_s - now_s) * 1_000)
        rows.append(("expires", f"{moment(batch.expires_s)}, in {left}"))
    rows += [("created", moment(batch.created_s)), ("endpoint", batch.endpoint), ("input", batch.input_file)]
    rows += [(label, file) for label, file in (("output", batch.output_file), ("errors", batch.error_file)) if file]
    rows += [("why", fault) for fault in batch.faults[:FAULTS_SHOWN]]
    if len(batch.faults) > FAULTS_SHOWN:
        rows.append(("", f"and {thousands(len(batch.faults) - FAULTS_SHOWN)} more"))
    return rows


def change_key(batch: Batch) -> tuple[Any, ...]:
    """Equal as long as nothing changed."""
    return batch.status, batch.completed, batch.failed, batch.total, batch.paused_reason, batch.resumes_s


def moment(seconds: int | None) -> str:
    """A time in UTC, to the second."""
    return "unknown" if seconds is None else f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%SZ}"


class Pace:
    """How quickly lines end, of the last seconds alone."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def note(self, now_s: float, done: int) -> None:
        """What was seen. now_s: of a clock that never goes back."""
        self._seen.append((now_s, done))
        while len(self._seen) > 2 and now_s - self._seen[1][0] >= PACE_S:
            self._seen.popleft()

    def lines_per_s(self) -> float | None:
        """None until two looks."""
        (from_s, before), (to_s, after) = (self._seen[0], self._seen[-1]) if self._seen else ((0.0, 0), (0.0, 0))
        return max(0, after - before) / (to_s - from_s) if to_s > from_s else None

    def words(self, batch: Batch) -> str:
        """The rate and the time that the rest takes at it; empty where neither is known."""
        rate = self.lines_per_s()
        if rate is None:
            return ""
        said = f"{rate:,.1f} lines per second"
        return f"{said}, {duration(round((batch.total - batch.done) / rate) * 1_000)} left" if rate and batch.total else said
