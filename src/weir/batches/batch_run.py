"""One batch from wherever it stands to its end: lines go through the pipeline, a bounded number at once, each until it is told.

    read what became of its lines ─▶ settle what was made and not told ─▶ run the rest ─▶ write the result files ─▶ end

What ends it before its lines are done: its time is over, its tenant gave it up, or the worker stops; then it is left as it is,
and goes on elsewhere. Lines that wait for a budget pause the whole batch, so that it is asked for once and not by every line.
No refusal that waiting cures becomes a line's error.
"""

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import TypeAlias

import msgspec
import structlog

from weir import errors
from weir.batches.batch_files import BatchFiles
from weir.batches.kept_pieces import pack_pieces, unpack_pieces
from weir.batches.line_answer import LineAnswer, LineClient, Outcome
from weir.batches.line_log import LineLog, Lines, Made, Told
from weir.core.batches.batch_records import (
    BatchCounts,
    BatchProgress,
    BatchRecord,
    BatchStatus,
    line_request_id,
)
from weir.core.batches.input_lines import InputLine
from weir.core.batches.pacing import After, GiveUp, Pause, Wait, after_failure, after_refusal, was_in_vain
from weir.core.batches.result_lines import answer_line, error_line
from weir.core.batches.worst_case import refuse_unaffordable
from weir.core.endings import Status
from weir.core.output import Delta
from weir.core.request import DEADLINE_MS_MAX, InferenceRequest
from weir.core.tenancy import Principal, ServiceClass
from weir.gateway.client import Answer
from weir.gateway.pipeline import Gateway
from weir.messages import GenerationRecord, StandingView
from weir.ports import Clock
from weir.units import Millis

_log = structlog.get_logger("weir.batches")
_WHY = {
    "batch_cancelled": "The batch was cancelled before this line was run.",
    "batch_expired": "The batch's time was over before this line was run.",
}
_NOT_RUN_AT_ONCE = 1_000
_LOOK_S = 1.0
_UNKNOWN_RESET_MS: Millis = 30_000
_STORE_WAITS_S = (0.1, 0.5, 1.0, 5.0)
_CANCEL_GRACE_S = 30.0
"""For which lines that run go on once their batch is given up: what they made is paid for, so it should be had."""

LineAnswerFor: TypeAlias = Callable[[str, bytes, LineClient, str], tuple[InferenceRequest, Answer, str]]
"""Request, answer and surface's name of a line, from its endpoint, body, client and request id. Raises WeirError."""
RefusedFor: TypeAlias = Callable[[str, errors.WeirError], tuple[int, bytes]]
"""Status and body of a refusal at an endpoint."""


class Closing(Enum):
    """Why no further line begins."""

    CANCELLED = "batch_cancelled"
    EXPIRED = "batch_expired"
    ENDED = "ended"  # by another worker
    STOPPING = "stopping"


@dataclass(frozen=True, slots=True)
class RunParts:
    """What every batch of a worker shares. worker: its name; lines_at_once: of one batch, now."""

    files: BatchFiles
    gateway: Gateway
    clock: Clock
    worker: str
    answer_for: LineAnswerFor
    refused_for: RefusedFor
    lines_at_once: Callable[[], int]
    on_told: Callable[[Told], None]
    on_end: Callable[[BatchStatus], None]


class BatchRun:
    """One batch on one worker."""

    def __init__(self, parts: RunParts, record: BatchRecord) -> None:
        self._parts = parts
        self._record = record
        self._log = LineLog(parts.files.store, record.tenant, record.id, parts.worker)
        self._lines = Lines()
        self._progress = BatchProgress(BatchCounts(record.lines))
        self._shown: BatchProgress | None = None
        self._running: dict[asyncio.Task[None], LineClient] = {}
        self._closing: Closing | None = None
        self._closed = asyncio.Event()
        self._going = asyncio.Event()  # not paused
        self._going.set()
        self._freed = asyncio.Event()
        self._fault: BaseException | None = None

    @property
    def is_paused(self) -> bool:
        """Whether it waits for a budget."""
        return not self._going.is_set()

    @property
    def is_left(self) -> bool:
        """Whether it was stopped before its end."""
        return self._closing is Closing.STOPPING

    def stop(self) -> None:
        """Begin no further line; `run` returns once those that run have ended, however that is."""
        self._close(Closing.STOPPING)

    def _close(self, why: Closing) -> None:
        if self._closing is None or why is Closing.STOPPING:  # which also what was given up goes on behind
            self._closing = why
        self._closed.set()
        self._going.set()
        self._freed.set()

    async def run(self) -> None:
        """To its end, or until it is stopped.

        Raises FileStoreUnavailable, or BatchDamaged for what somebody may restore; it may be run again then. Raises CallerFault
        where it can never be run.
        """
        files, record = self._parts.files, self._record
        if await files.has_ended(record):
            await files.clear(record)
            return
        before = await files.progress(record)
        await self._look_for_end()
        if before is None and self._closing is None:
            refuse_unaffordable(await files.input_record(record), self._principal(), self._parts.gateway.inbox.snapshot)
        begun_ms = before.in_progress_ms if before is not None else None
        self._lines = await self._log.read()
        begun_ms = begun_ms or self._parts.clock.wall_ms()
        self._progress = BatchProgress(self._counts(), BatchStatus.IN_PROGRESS, in_progress_ms=begun_ms)
        await self._look()
        looking = asyncio.get_running_loop().create_task(self._look_forever())
        try:
            await self._settle_made()
            await self._run_lines()
            await self._end_running()
            await self._settle_made()  # what was left may have been charged for all the same
        except errors.WeirError:
            self.stop()
            await self._end_running()
            raise
        finally:
            looking.cancel()
            for task in self._running:  # the process ends here and now
                task.cancel()
        if self._fault is not None:
            raise self._fault
        if self._closing is Closing.ENDED:
            await files.clear(record)
        elif self._closing is not Closing.STOPPING:
            await self._finish(self._closing)

    # ── its lines ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _run_lines(self) -> None:
        async with aclosing(self._parts.files.lines(self._record)) as lines:
            async for line in lines:
                if line.number in self._lines.told:
                    continue
                await self._room()
                if self._closing is not None:
                    return
                client = LineClient(self._parts.clock.monotonic_ns())
                task = asyncio.get_running_loop().create_task(self._run_line(line, client))
                self._running[task] = client
                task.add_done_callback(self._ended)
        while self._running and self._closing is None:
            self._freed.clear()
            await self._freed.wait()

    async def _room(self) -> None:
        while self._closing is None and (len(self._running) >= self._parts.lines_at_once() or not self._going.is_set()):
            self._freed.clear()
            await self._freed.wait()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.pop(task)
        self._freed.set()
        if not task.cancelled() and (fault := task.exception()) is not None:
            self._fault = self._fault or fault
            self.stop()

    async def _end_running(self) -> None:
        """Let what runs end: by itself for a while, or, where the worker stops, as its gateway drains."""
        if self._running:
            await asyncio.wait(self._running, timeout=None if self._closing is Closing.STOPPING else _CANCEL_GRACE_S)
        for client in self._running.values():
            client.leave()
        if self._running:
            await asyncio.wait(self._running)

    async def _run_line(self, line: InputLine, client: LineClient) -> None:
        """One line until it is told, or its batch closes."""
        refusals = executions = 0
        while self._closing is None:
            outcome = await self._try(line, client)
            if outcome is None:
                return
            if outcome.refusal is not None:
                refusals += 1
                after = _after(outcome.refusal, refusals, self._parts.clock.wall_ms())
            else:
                record = outcome.record
                assert record is not None and record.finish_reason is not None
                executions, refusals = executions + (not was_in_vain(record.finish_reason, record.output_tokens)), 0
                after = after_failure(record.finish_reason, max(1, executions))
            match after:
                case GiveUp():
                    await self._tell(line, client, is_error=True)
                    return
                case Pause():
                    self._pause(after)
                    await self._going.wait()
                case Wait():
                    await self._wait(after.ms)
            client.reset(self._parts.clock.monotonic_ns())

    async def _try(self, line: InputLine, client: LineClient) -> Outcome | None:
        """Run it once; None where it is told, or was left."""
        parts, record = self._parts, self._record
        request_id = line_request_id(record.id, line.number)
        left_ms = record.expires_ms - parts.clock.wall_ms()
        if left_ms < 1:
            self._close(Closing.EXPIRED)
            return None
        try:
            request, shown, surface = parts.answer_for(record.endpoint, line.body, client, request_id)
            principal = self._principal()
        except errors.WeirError as wrong:
            client.status, client.body = parts.refused_for(record.endpoint, wrong)
            return Outcome(wrong)
        deadline_ms = min(request.deadline_ms or DEADLINE_MS_MAX, left_ms)
        request = replace(request, request_id=request_id, deadline_ms=deadline_ms, yields=True)
        answer = LineAnswer(shown)
        await parts.gateway.generate(principal, request, answer, surface, secure=partial(self._secure, line.number))
        outcome = answer.outcome
        if outcome is None or outcome.record is None or outcome.record.status is not Status.COMPLETED:
            return outcome
        if outcome.refusal is None:
            await self._tell(line, client, is_error=False)
        elif not await self._tell_made(line, outcome.record):  # an earlier try was charged for, whose output is here
            return outcome
        return None

    async def _secure(self, line: int, generation_id: str, pieces: list[Delta]) -> None:
        made = Made(line, generation_id, pack_pieces(pieces))
        await self._log.add(made)
        self._lines.add(made)

    def _principal(self) -> Principal:
        """Whom its lines run as. Raises Revoked, Forbidden."""
        record = self._record
        known = self._parts.gateway.inbox.snapshot.principal_of(record.tenant, record.application, record.key)
        if known is None:
            raise errors.Revoked("The application of this batch is no more.")
        return msgspec.structs.replace(known, service_class=ServiceClass.BATCH)

    # ── what became of them ──────────────────────────────────────────────────────────────────────────────────────────

    async def _settle_made(self) -> None:
        """Tell what an earlier worker made and was charged for; what was not runs again."""
        if not self._lines.made:
            return
        async with aclosing(self._parts.files.lines(self._record)) as lines:
            async for line in lines:
                if line.number in self._lines.made and self._goes_on:
                    request_id = line_request_id(self._record.id, line.number)
                    found = await self._known(request_id)
                    if found is not None and found.status is Status.COMPLETED:
                        await self._tell_made(line, found)

    async def _known(self, request_id: str) -> GenerationRecord | None:
        """The ledger's word, however long that takes."""
        while self._goes_on:
            try:
                return (await self._parts.gateway.inbox.lookup(self._record.tenant, request_id)).record
            except (errors.LedgerUnavailable, errors.CoordinatorLost):
                await asyncio.sleep(_LOOK_S)  # also where the batch is closed
        return None

    @property
    def _goes_on(self) -> bool:
        """Whether there is something to be told, if only of what was made."""
        return self._closing not in (Closing.STOPPING, Closing.ENDED)

    async def _tell_made(self, line: InputLine, record: GenerationRecord) -> bool:
        """Make the answer of an execution that completed from its output; False where that is nowhere.

        Another worker may have made it, and may have told it since.
        """
        made = self._lines.output_of(line.number, record.generation_id)
        if made is None:
            await self._log.catch_up(self._lines)
            if line.number in self._lines.told:
                return True
            made = self._lines.output_of(line.number, record.generation_id)
        if made is None:
            return False
        client = LineClient(self._parts.clock.monotonic_ns())
        _, shown, _ = self._parts.answer_for(self._record.endpoint, line.body, client, record.request_id)
        await shown.end(record, unpack_pieces(made.pieces), StandingView())
        await self._tell(line, client, is_error=False)
        return True

    async def _tell(self, line: InputLine, client: LineClient, *, is_error: bool) -> None:
        record = self._record
        request_id = line_request_id(record.id, line.number)
        text = answer_line(record.id, line.number, line.custom_id, client.status, request_id, client.body)
        told = Told(line.number, is_error, text)
        for pause_s in (*_STORE_WAITS_S, None):
            try:
                await self._log.add(told)
                break
            except errors.FileStoreUnavailable:
                if pause_s is None:
                    self.stop()  # what was made is kept: it is told by who runs the batch next
                    return
                await asyncio.sleep(pause_s)
        if self._lines.add(told):
            self._parts.on_told(told)

    # ── time ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _wait(self, ms: Millis) -> None:
        try:
            await asyncio.wait_for(self._closed.wait(), ms / 1e3)
        except TimeoutError:
            return

    def _pause(self, pause: Pause) -> None:
        """Until a budget resets; where that is not known, until somebody may have raised it."""
        if not self._going.is_set() or self._closing is not None:
            return
        self._going.clear()
        now_ms = self._parts.clock.wall_ms()
        left_ms = max(1, pause.resumes_ms - now_ms) if pause.resumes_ms is not None else _UNKNOWN_RESET_MS
        asyncio.get_running_loop().call_later(min(left_ms, _UNKNOWN_RESET_MS) / 1e3, self._resume)
        self._progress = msgspec.structs.replace(self._progress, paused_reason=pause.reason, resumes_ms=pause.resumes_ms)

    def _resume(self) -> None:
        self._going.set()
        self._freed.set()

    async def _look_forever(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                await self._look()
            except errors.FileStoreUnavailable as fault:
                _log.warning("batch_not_looked_at", batch=self._record.id, detail=fault.detail)

    async def _look_for_end(self) -> None:
        """Whether it goes on."""
        if self._parts.clock.wall_ms() >= self._record.expires_ms:
            self._close(Closing.EXPIRED)
        elif await self._parts.files.is_cancelled(self._record):
            self._close(Closing.CANCELLED)
        elif await self._parts.files.has_ended(self._record):
            self._close(Closing.ENDED)

    async def _look(self) -> None:
        """The same, and say how far it is."""
        await self._look_for_end()
        waits = not self._going.is_set()
        progress = msgspec.structs.replace(
            self._progress,
            counts=self._counts(),
            paused_reason=self._progress.paused_reason if waits else None,
            resumes_ms=self._progress.resumes_ms if waits else None,
        )
        if progress != self._shown:
            await self._parts.files.show(self._record, progress)
            self._shown = progress

    def _counts(self) -> BatchCounts:
        return BatchCounts(self._record.lines, self._lines.completed, self._lines.failed)

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _finish(self, closing: Closing | None) -> None:
        parts, record = self._parts, self._record
        if closing is not None:
            await self._tell_rest(closing.value)
        now_ms = parts.clock.wall_ms()
        self._progress = msgspec.structs.replace(
            self._progress,
            counts=self._counts(),
            status=BatchStatus.FINALIZING,
            finalizing_ms=now_ms,
            paused_reason=None,
            resumes_ms=None,
        )
        await parts.files.show(record, self._progress)
        results = await parts.files.write_results(record, self._log)
        if results is None:
            await parts.files.clear(record)
        elif await parts.files.end(record, _END_OF[closing], self._progress, results):
            parts.on_end(_END_OF[closing])

    async def _tell_rest(self, why: str) -> None:
        """Lines that were not run, noted like the others before a result file is written: a later try then writes the same."""
        untold: list[Told] = []
        async with aclosing(self._parts.files.lines(self._record)) as lines:
            async for line in lines:
                if line.number not in self._lines.told:
                    text = error_line(self._record.id, line.number, line.custom_id, why, _WHY[why])
                    untold.append(Told(line.number, is_error=True, text=text))
                if len(untold) == _NOT_RUN_AT_ONCE:
                    await self._told_all(untold)
                    untold = []
        await self._told_all(untold)

    async def _told_all(self, untold: list[Told]) -> None:
        await self._log.add_all(untold)
        for told in untold:
            self._lines.add(told)


def _after(refusal: errors.WeirError, refusals: int, now_wall_ms: Millis) -> After:
    if isinstance(refusal, errors.Forbidden):  # its tenant is disabled, which an administrator may change
        return Pause(refusal.code, None)
    if isinstance(refusal, errors.BudgetExhausted) and (reset_ms := refusal.members.get("reset_ms")) is not None:
        return Pause(refusal.code, now_wall_ms + reset_ms)
    return after_refusal(refusal.code, refusal.retry_after_ms, refusal.members, refusals)


_END_OF = {None: BatchStatus.COMPLETED, Closing.CANCELLED: BatchStatus.CANCELLED, Closing.EXPIRED: BatchStatus.EXPIRED}
