"""The lines of a batch's output and error files, as OpenAI writes them."""

from typing import Final

import msgspec

from weir.core.batches.batch_records import BATCH_ID_PREFIX

_ID_PREFIX: Final = "batch_req_"


class _Response(msgspec.Struct, frozen=True, gc=False):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _LineError(msgspec.Struct, frozen=True, gc=False):
    code: str
    message: str


class _ResultLine(msgspec.Struct, frozen=True, gc=False):
    id: str
    custom_id: str
    response: _Response | None = None
    error: _LineError | None = None


_ENCODER = msgspec.json.Encoder()


def answer_line(batch_id: str, line: int, custom_id: str, status_code: int, request_id: str, body: bytes) -> bytes:
    """A line that was answered, newline included. line: 1-based; body: the answer's JSON, in any layout."""
    if b"\n" in body or b"\r" in body:  # between values only: no string has one
        body = msgspec.json.format(body, indent=-1)
    return _line(batch_id, line, custom_id, _Response(status_code, request_id, msgspec.Raw(body)), None)


def error_line(batch_id: str, line: int, custom_id: str, code: str, message: str) -> bytes:
    """A line that has no answer, newline included. line: 1-based."""
    return _line(batch_id, line, custom_id, None, _LineError(code, message))


def _line(batch_id: str, line: int, custom_id: str, response: _Response | None, error: _LineError | None) -> bytes:
    line_id = f"{_ID_PREFIX}{batch_id.removeprefix(BATCH_ID_PREFIX)}_{line}"
    return _ENCODER.encode(_ResultLine(line_id, custom_id, response, error)) + b"\n"
