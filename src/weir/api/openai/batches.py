"""The paths of OpenAI's batches: create, list, show, cancel."""

from typing import Any

from weir import errors
from weir.api.compatible_fields import check_labels, key_of
from weir.api.door import Call, Door, Methods
from weir.api.openai.files import ANCHOR, EXPIRY_FIELDS, EXPIRY_S_MAX, EXPIRY_S_MIN, SECONDS_ACCEPTED, page_object
from weir.api.openai.list_query import ListQuery
from weir.api.wire import Fields, Rendered, openai_error, refuse_field
from weir.batches.kept_orders import BatchOrder
from weir.core.batches.batch_records import BATCH_ID_PREFIX, ENDPOINTS, BatchFault, BatchStatus
from weir.core.batches.batch_view import BatchView
from weir.units import Millis

_PATH = "/v1/batches"
BATCHES_PAGE, BATCHES_PAGE_MAX = 20, 100
FIELDS = ("input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after")
QUERY = ("after", "limit")
ID_CHARS_MAX = 100
WINDOW_CHARS_MAX = 32


class BatchesSurface:
    """`/v1/batches` and what lies below it, in OpenAI's shapes, errors included."""

    generating: frozenset[str] = frozenset()

    def __init__(self, door: Door) -> None:
        self._door = door

    def owns(self, path: str) -> bool:
        """Its own paths."""
        return path == _PATH or path.startswith(f"{_PATH}/")

    def methods(self, call: Call) -> Methods | None:
        """All batches, or one by its id."""
        path = call.exchange.path
        if path == _PATH:
            return {"GET": self._list, "POST": self._create}
        call.argument, _, action = path.removeprefix(f"{_PATH}/").partition("/")
        routes: dict[str, Methods] = {
            "": {"GET": self._show},
            "cancel": {"POST": self._cancel},
        }
        return routes.get(action)

    def refusal(self, error: errors.WeirError, now_wall_ms: int, request_id: str) -> Rendered:
        """OpenAI's error shape."""
        return openai_error(error, now_wall_ms)

    async def _create(self, call: Call) -> None:
        principal, document = await self._door.keyed_document(call)
        desk = self._door.desk()
        order, key = parse_batch(document), key_of(call.exchange.headers)
        view = await desk.create(principal, self._door.gateway.inbox.snapshot, order, key)
        await self._door.send_json(call, batch_object(view))

    async def _list(self, call: Call) -> None:
        principal = self._door.authenticate(call)
        query = ListQuery(call.exchange.query, QUERY)
        limit = query.limit(BATCHES_PAGE, BATCHES_PAGE_MAX)
        views, has_more = await self._door.desk().batches(principal, query.after(BATCH_ID_PREFIX), limit)
        await self._door.send_json(call, page_object([batch_object(view) for view in views], has_more=has_more))

    async def _show(self, call: Call) -> None:
        principal = self._door.authenticate(call)
        await self._door.send_json(call, batch_object(await self._door.desk().batch(principal, call.argument)))

    async def _cancel(self, call: Call) -> None:
        principal = self._door.authenticate(call)
        await self._door.send_json(call, batch_object(await self._door.desk().cancel(principal, call.argument)))


# ── in ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def parse_batch(document: dict[str, Any]) -> BatchOrder:
    """A body. Raises InvalidRequest or UnsupportedField naming the field."""
    fields = Fields(document)
    fields.refuse_unknown(FIELDS)
    file_id = fields.string("input_file_id", longest=ID_CHARS_MAX)
    if file_id is None:
        refuse_field("input_file_id", "the id of a file")
    endpoint = fields.raw("endpoint")
    if endpoint not in ENDPOINTS:
        refuse_field("endpoint", " or ".join(ENDPOINTS))
    window = fields.string("completion_window", longest=WINDOW_CHARS_MAX)
    if window is None:
        refuse_field("completion_window", "a time, such as 24h")
    check_labels(fields)
    return BatchOrder(file_id, endpoint, window, fields.raw("metadata") or {}, _expiry_s(fields.raw("output_expires_after")))


def _expiry_s(value: Any) -> int | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        refuse_field("output_expires_after", "an object with anchor and seconds")
    fields = Fields(value, "output_expires_after.")
    fields.refuse_unknown(EXPIRY_FIELDS)
    if fields.raw("anchor") != ANCHOR:
        refuse_field("output_expires_after.anchor", ANCHOR)
    seconds = fields.integer("seconds", EXPIRY_S_MIN, EXPIRY_S_MAX)
    if seconds is None:
        refuse_field("output_expires_after.seconds", SECONDS_ACCEPTED)
    return seconds


# ── out ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def batch_object(view: BatchView) -> dict[str, Any]:
    """A batch as OpenAI's, with why it waits beside it."""
    record, progress, end, counts = view.record, view.progress, view.end, view.counts
    is_waiting = end is None and progress is not None
    told = end or progress
    ended_ms = {end.status: end.ended_ms} if end else {}
    return {
        "id": record.id,
        "object": "batch",
        "endpoint": record.endpoint,
        "errors": _faults(end.faults) if end and end.faults else None,
        "input_file_id": record.input_file_id,
        "completion_window": record.window,
        "status": view.status.value,
        "output_file_id": end.output if end else None,
        "error_file_id": end.error if end else None,
        "created_at": _seconds(record.created_ms),
        "in_progress_at": _seconds(told.in_progress_ms if told else None),
        "expires_at": _seconds(record.expires_ms),
        "finalizing_at": _seconds(told.finalizing_ms if told else None),
        "completed_at": _seconds(ended_ms.get(BatchStatus.COMPLETED)),
        "failed_at": _seconds(ended_ms.get(BatchStatus.FAILED)),
        "expired_at": _seconds(ended_ms.get(BatchStatus.EXPIRED)),
        "cancelling_at": _seconds(view.cancelling_ms),
        "cancelled_at": _seconds(ended_ms.get(BatchStatus.CANCELLED)),
        "request_counts": {"total": counts.total, "completed": counts.completed, "failed": counts.failed},
        "metadata": record.metadata,
        "paused_reason": progress.paused_reason if is_waiting and progress else None,
        "resumes_at": _seconds(progress.resumes_ms if is_waiting and progress else None),
    }


def _seconds(wall_ms: Millis | None) -> int | None:
    return None if wall_ms is None else wall_ms // 1000


def _faults(faults: tuple[BatchFault, ...]) -> dict[str, Any]:
    data = [{"code": each.code, "message": each.message, "line": each.line, "param": each.param} for each in faults]
    return {"object": "list", "data": data}
