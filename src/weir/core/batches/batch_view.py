"""A batch as its tenant sees it, from the notes that are stored of it: each of them may be there or not yet."""

from dataclasses import dataclass

from weir.core.batches.batch_records import BatchCounts, BatchEnd, BatchProgress, BatchRecord, BatchStatus, CancelMark
from weir.units import Millis


@dataclass(frozen=True, slots=True)
class BatchView:
    """Where a batch is. counts: of its end, else as its worker last wrote them.

    cancelling_ms: wall time at which it was given up.
    """

    record: BatchRecord
    status: BatchStatus
    counts: BatchCounts
    progress: BatchProgress | None
    end: BatchEnd | None
    cancelling_ms: Millis | None


def view_of(record: BatchRecord, progress: BatchProgress | None, cancel: CancelMark | None, end: BatchEnd | None) -> BatchView:
    """An end decides; without one a batch that was given up is cancelling, and one of which nothing was written validating.

    Of a batch that came to another end first its cancelling shows nothing.
    """
    if end is not None:
        return BatchView(record, end.status, end.counts, progress, end, end.cancelling_ms)
    counts = progress.counts if progress is not None else BatchCounts(total=record.lines)
    if cancel is not None:
        return BatchView(record, BatchStatus.CANCELLING, counts, progress, None, cancel.at_ms)
    status = progress.status if progress is not None else BatchStatus.VALIDATING
    return BatchView(record, status, counts, progress, None, None)
