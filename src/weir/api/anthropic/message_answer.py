"""A generation in the shape of Anthropic's messages, streamed and not.

Endings that are failures take Anthropic's error shape: before the headers as a plain answer, after them as one `error` event,
which ends the stream.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from weir.api.anthropic.block_stream import BlockStream, event
from weir.api.anthropic.message_shapes import (
    blocks_of,
    ended_error,
    message_id,
    message_refusal,
    message_usage,
    stop_reason,
    usage_at_first,
)
from weir.api.generations import STREAM_HEADERS, ending_retry_headers, error_of_record, generation_body
from weir.api.plain_answer import show, show_refusal
from weir.api.wire import Headers, Rendered, anthropic_error_body, id_headers, limit_headers
from weir.core.endings import ending
from weir.core.output import Delta, replies
from weir.errors import WeirError
from weir.gateway.client import Accepted, Client
from weir.messages import GenerationRecord, StandingView
from weir.ports import Clock

SURFACE = "messages"
_PING = event(b"ping", b'{"type": "ping"}')


class MessageAnswer:
    """Answer of messages."""

    def __init__(self, client: Client, clock: Clock, request_id: str) -> None:
        self.client = client
        self._clock = clock
        self._request_id = request_id
        self._blocks: BlockStream | None = None

    # ── a stream ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def open(self, accepted: Accepted) -> None:
        """Headers and `message_start`."""
        self._blocks = BlockStream(accepted.generation_id)
        headers = [*STREAM_HEADERS, *id_headers(accepted.request_id), *limit_headers(accepted.standing)]
        await self.client.start(200, headers)
        message: dict[str, Any] = {
            "id": message_id(accepted.generation_id),
            "type": "message",
            "role": "assistant",
            "model": accepted.alias,
            "model_revision": accepted.revision,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_at_first(accepted.input_tokens),
        }
        self._write_event(b"message_start", {"type": "message_start", "message": message})

    def output(self, pieces: Sequence[Delta]) -> None:
        """The events of these pieces, in one write."""
        assert self._blocks is not None
        if told := self._blocks.events(pieces):
            self.client.write(told)

    def finish_reason(self, record: GenerationRecord) -> None:
        """The end of the open block; why the message stopped comes with its usage, after the settlement."""
        self._close_blocks()

    def keep_alive(self) -> None:
        """`ping`."""
        self.client.write(_PING)

    def _close_blocks(self) -> None:
        assert self._blocks is not None
        if told := self._blocks.close():
            self.client.write(told)

    def _write_event(self, name: bytes, data: dict[str, Any]) -> None:
        self.client.write(event(name, msgspec.json.encode(data)))

    # ── its end, and whole answers ───────────────────────────────────────────────────────────────────────────────────

    async def end(self, record: GenerationRecord, pieces: Sequence[Delta], standing: StandingView) -> None:
        """`message_delta` and `message_stop`, an `error` event, or the whole body."""
        if self._blocks is None:
            rendered = self._whole(record, pieces, standing)
            await show(self.client, rendered)
            return
        if record.error_code is not None:
            self._write_event(b"error", ended_error(record, self._clock.wall_ms()))
        else:
            self._close_blocks()
            reason = stop_reason(record.finish_reason, has_calls=self._blocks.has_calls)
            delta = {"stop_reason": reason, "stop_sequence": None}
            self._write_event(b"message_delta", {"type": "message_delta", "delta": delta, "usage": message_usage(record)})
            self._write_event(b"message_stop", {"type": "message_stop"})
        await self.client.finish()

    def _whole(self, record: GenerationRecord, pieces: Sequence[Delta], standing: StandingView) -> Rendered:
        assert record.finish_reason is not None
        headers: Headers = [*id_headers(record.request_id), *limit_headers(standing), *ending_retry_headers(record)]
        if record.error_code is None:
            return Rendered(200, b"application/json", msgspec.json.encode(_message(record, pieces)), headers)
        extra = {"generation": generation_body(record)}
        body = anthropic_error_body(error_of_record(record), self._clock.wall_ms(), record.request_id, extra)
        status = ending(record.finish_reason).compatible_http_status
        return Rendered(status, b"application/json", msgspec.json.encode(body), headers)

    async def refuse(self, error: WeirError, standing: StandingView | None, generation: GenerationRecord | None) -> None:
        """Anthropic's error shape, with the names that fields have here."""
        rendered = message_refusal(error, self._clock.wall_ms(), self._request_id, generation)
        await show_refusal(self.client, rendered, self._request_id, standing)


def _message(record: GenerationRecord, pieces: Sequence[Delta]) -> dict[str, Any]:
    [reply] = replies(pieces, 1, record.generation_id)
    return {
        "id": message_id(record.generation_id),
        "type": "message",
        "role": "assistant",
        "model": record.alias,
        "model_revision": record.revision,
        "content": blocks_of(reply),
        "stop_reason": stop_reason(record.finish_reason, has_calls=bool(reply.tool_calls)),
        "stop_sequence": None,
        "usage": message_usage(record),
    }
