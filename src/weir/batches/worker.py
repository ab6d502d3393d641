"""Runs the batches of a cell: a bounded number at once, of each tenant not too many, and a bounded number of lines in flight.

There is one worker per cell. Should two run for a while, as where one was taken for dead, the ledger lets each line be charged
once and the store lets each batch end once; engines then repeat some lines.
"""

import asyncio
import traceback
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from weir import errors
from weir.batches.batch_files import BatchFiles
from weir.batches.batch_run import BatchRun, LineAnswerFor, RefusedFor, RunParts
from weir.batches.upkeep import Upkeep
from weir.core.batches.batch_records import BatchFault, BatchRecord, BatchStatus
from weir.gateway.pipeline import Gateway
from weir.ports import Clock
from weir.telemetry import Telemetry
from weir.units import Millis

_log = structlog.get_logger("weir.batches")
_AGAIN_S = 5.0
_BROKEN_S = 60.0
_ASIDE_S = 30.0
_SWEEP_S = 60.0


@dataclass(frozen=True, slots=True)
class WorkerBounds:
    """lines_in_flight: of all batches; batches_at_once: of all tenants, a quarter of them of each."""

    lines_in_flight: int
    batches_at_once: int
    poll_ms: Millis


@dataclass(frozen=True, slots=True)
class LineSurfaces:
    """How lines are read and answered, by endpoint."""

    answer_for: LineAnswerFor
    refused_for: RefusedFor


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """name: that no other life of a worker has. gateway: of its own, connected and running."""

    files: BatchFiles
    gateway: Gateway
    clock: Clock
    name: str
    surfaces: LineSurfaces
    telemetry: Telemetry


class BatchWorker:
    """One cell's."""

    def __init__(self, parts: WorkerParts, bounds: WorkerBounds) -> None:
        self._files = parts.files
        self._gateway = parts.gateway
        self._telemetry = parts.telemetry
        self._bounds = bounds
        self._parts = RunParts(
            files=parts.files,
            gateway=parts.gateway,
            clock=parts.clock,
            worker=parts.name,
            answer_for=parts.surfaces.answer_for,
            refused_for=parts.surfaces.refused_for,
            lines_at_once=self._lines_at_once,
            on_told=lambda told: parts.telemetry.batch_lines.labels("failed" if told.is_error else "completed").inc(),
            on_end=self._count_end,
        )
        self._upkeep = Upkeep(parts.files.store, parts.clock, parts.gateway.inbox)
        self._runs: dict[str, tuple[BatchRecord, BatchRun]] = {}
        self._again: dict[str, tuple[BatchRecord, float]] = {}  # what was interrupted, and the loop time at which it goes on
        self._stopping = asyncio.Event()

    def _count_end(self, status: BatchStatus) -> None:
        self._telemetry.batches_ended.labels(status.value).inc()

    def _lines_at_once(self) -> int:
        going = sum(not run.is_paused for _, run in self._runs.values())
        return max(1, self._bounds.lines_in_flight // max(1, going))

    async def run(self) -> None:
        """Run what is open until `stop`, and return once no line runs any more."""
        async with asyncio.TaskGroup() as tasks:
            sweeping = tasks.create_task(self._sweep_forever())
            while not self._stopping.is_set():
                try:
                    await self._begin_more(tasks)
                except errors.FileStoreUnavailable as fault:
                    _log.warning("batches_not_listed", detail=fault.detail)
                await self._pause(self._bounds.poll_ms / 1e3)
            sweeping.cancel()

    def stop(self) -> None:
        """Begin nothing more. What runs ends by itself, or as its gateway drains."""
        self._stopping.set()
        for _, run in self._runs.values():
            run.stop()

    async def _pause(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._stopping.wait(), seconds)
        except TimeoutError:
            return

    async def _begin_more(self, tasks: asyncio.TaskGroup) -> None:
        if not self._gateway.inbox.snapshot.version:
            return  # nobody is known yet
        now_s = asyncio.get_running_loop().time()
        opened = {record.id: record for record in await self._files.open_batches()}
        interrupted = {name: record for name, (record, _) in self._again.items()}  # also if another worker ended it meanwhile
        waiting = [record for record in (opened | interrupted).values() if self._may_begin(record, now_s)]
        running = Counter(record.tenant for record, _ in self._runs.values())
        while waiting and not self._stopping.is_set():  # of the tenants with fewest that run, the oldest first
            record = min(waiting, key=lambda record: running[record.tenant])
            if running[record.tenant] >= max(1, self._bounds.batches_at_once // 4):
                return
            if len(self._runs) >= self._bounds.batches_at_once:
                if not running[record.tenant]:
                    self._make_room(running)
                return
            waiting.remove(record)
            running[record.tenant] += 1
            run = BatchRun(self._parts, record)
            self._runs[record.id] = record, run
            tasks.create_task(self._run(record, run))

    def _may_begin(self, record: BatchRecord, now_s: float) -> bool:
        """Whether it waits here, and not for a time of its own; another cell's never does."""
        is_ours = record.tenant in self._gateway.inbox.snapshot.tenants
        return is_ours and record.id not in self._runs and self._again.get(record.id, (record, 0.0))[1] <= now_s

    def _make_room(self, running: Counter[str]) -> None:
        """A tenant of whom nothing runs gets a turn: one batch goes on later, that is paused, or of who has most of them."""
        if any(run.is_left for _, run in self._runs.values()):
            return  # one is about to
        runs = sorted(self._runs.values(), key=lambda each: (not each[1].is_paused, -running[each[0].tenant]))
        record, run = runs[0]
        if run.is_paused or running[record.tenant] > 1:
            self._try_again(record, _ASIDE_S)
            run.stop()

    async def _run(self, record: BatchRecord, run: BatchRun) -> None:
        try:
            await run.run()
            if not run.is_left:
                self._again.pop(record.id, None)
        except errors.Forbidden:  # its tenant is disabled, which an administrator may change
            self._try_again(record)
        except errors.CallerFault as wrong:
            await self._fail(record, BatchFault(wrong.code, wrong.detail, param=wrong.members.get("field")))
        except errors.BatchDamaged as fault:
            await self._set_aside(record, fault)
        except errors.FileStoreUnavailable as fault:
            _log.warning("batch_interrupted", batch=record.id, tenant=record.tenant, detail=fault.detail)
            self._try_again(record)
        except Exception as fault:  # whatever it is: the other batches go on, and what it says may quote a line
            _log.error("batch_broken", batch=record.id, tenant=record.tenant, fault=_fault_place(fault))
            self._try_again(record, _BROKEN_S)
        finally:
            self._runs.pop(record.id)

    async def _set_aside(self, record: BatchRecord, fault: errors.BatchDamaged) -> None:
        """Somebody may restore what is damaged while the batch has time; behind that nothing else could ever end it."""
        self._try_again(record, _BROKEN_S)
        with suppress(errors.FileStoreUnavailable):
            if await self._files.has_ended(record):  # by another worker, which deleted what was read here
                self._try_again(record)
                return
            _log.error("batch_damaged", batch=record.id, tenant=record.tenant, detail=fault.detail)
            if await self._files.is_over(record):
                await self._fail(record, BatchFault(fault.code, fault.detail))

    async def _fail(self, record: BatchRecord, fault: BatchFault) -> None:
        try:
            if await self._files.fail(record, fault):
                self._count_end(BatchStatus.FAILED)
            self._again.pop(record.id, None)
        except errors.FileStoreUnavailable:
            self._try_again(record)

    def _try_again(self, record: BatchRecord, after_s: float = _AGAIN_S) -> None:
        self._again[record.id] = record, asyncio.get_running_loop().time() + after_s

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            try:
                await self._upkeep.sweep()
            except errors.FileStoreUnavailable as fault:
                _log.warning("files_not_swept", detail=fault.detail)
            except Exception as fault:
                _log.error("files_not_swept", detail=_fault_place(fault))


def _fault_place(fault: BaseException) -> str:
    """Kind and place of a fault, without what it says."""
    frames = traceback.extract_tb(fault.__traceback__)
    place = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{type(fault).__name__}{place}"
