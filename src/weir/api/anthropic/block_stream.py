"""Pieces of output into the content blocks of one streamed message: one block is open at a time, numbered 0, 1, 2, …

Text and calls of tools are blocks. Engines may in principle mix the parts of several calls; a block cannot be opened again, so
what belongs elsewhere waits until the open call's arguments are whole, or the output ended. A model's reasoning is not shown:
Anthropic's block for it needs a signature, which only Anthropic can make.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from weir.core.output import Delta, ShapedDelta, ToolCallPart, tool_call_id

_TEXT = -1
"""The key of text, beside those of calls: their indices."""
_TEXT_BEGINS = b'{"type":"content_block_start","index":%d,"content_block":{"type":"text","text":""}}'
_DELTA_BEGINS = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":'
_BEFORE_TEXT = _DELTA_BEGINS + b'"text_delta","text":'
_BEFORE_INPUT = _DELTA_BEGINS + b'"input_json_delta","partial_json":'
_AFTER = b"}}\n\n"


def event(name: bytes, data: bytes) -> bytes:
    """One event as Anthropic's clients read it."""
    return b"event: %b\ndata: %b\n\n" % (name, data)


class BlockStream:
    """The blocks of one message. generation_id: names calls that the engine did not. has_calls: whether any began."""

    def __init__(self, generation_id: str) -> None:
        self._generation_id = generation_id
        self._number = -1
        self._open: int | None = None
        self._before = b""
        self._arguments: list[str] = []
        self._looked_at = 0
        self._waiting: dict[int, list[ToolCallPart]] = {}
        self._ended: set[int] = set()
        self.has_calls = False

    def events(self, pieces: Sequence[Delta]) -> bytes:
        """What these pieces add; empty where it must wait or is nothing that is shown."""
        if len(pieces) == 1 and self._open == _TEXT and type(pieces[0]) is Delta and pieces[0].text:
            return b"%b%b%b" % (self._before, msgspec.json.encode(pieces[0].text), _AFTER)
        return b"".join([self._events_of(piece) for piece in pieces])

    def close(self) -> bytes:
        """The end of the output: what waited, and the end of the open block."""
        told = self._close_open()
        while self._waiting:
            told += self._begin_waiting() + self._close_open()
        return told

    def _events_of(self, piece: Delta) -> bytes:
        told = self._take(_TEXT, ToolCallPart(_TEXT, arguments=piece.text)) if piece.text else b""
        if isinstance(piece, ShapedDelta):
            for part in piece.tool_calls:
                told += self._take(part.index, part)
        return told

    def _take(self, key: int, part: ToolCallPart) -> bytes:
        if key == self._open:
            return self._delta(part)
        if key in self._ended:  # its arguments were a whole object: nothing that could follow belongs to them
            return b""
        self._waiting.setdefault(key, []).append(part)
        told = b""
        while self._waiting and self._may_close():
            told += self._close_open() + self._begin_waiting()
        return told

    def _may_close(self) -> bool:
        """Whether nothing more can come for the open block; a call is looked at again only once it grew."""
        if self._open is None or self._open == _TEXT:
            return True
        if self._looked_at == len(self._arguments):
            return False
        self._looked_at = len(self._arguments)
        return _is_whole("".join(self._arguments))

    def _begin_waiting(self) -> bytes:
        """The first that waits becomes the open block, with everything of it that is here."""
        key = next(iter(self._waiting))
        parts = self._waiting.pop(key)
        self._open = key
        self._number += 1
        self._arguments, self._looked_at = [], 0
        self._before = (_BEFORE_TEXT if key == _TEXT else _BEFORE_INPUT) % self._number
        begun = _TEXT_BEGINS % self._number if key == _TEXT else self._call_begins(key, parts)
        return event(b"content_block_start", begun) + b"".join([self._delta(part) for part in parts])

    def _call_begins(self, key: int, parts: Sequence[ToolCallPart]) -> bytes:
        self.has_calls = True
        call_id = next((part.id for part in parts if part.id), None) or tool_call_id(self._generation_id, 0, key)
        name = next((part.name for part in parts if part.name), "")
        block: dict[str, Any] = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
        return msgspec.json.encode({"type": "content_block_start", "index": self._number, "content_block": block})

    def _delta(self, part: ToolCallPart) -> bytes:
        if not part.arguments:
            return b""
        if self._open != _TEXT:
            self._arguments.append(part.arguments)
        return b"%b%b%b" % (self._before, msgspec.json.encode(part.arguments), _AFTER)

    def _close_open(self) -> bytes:
        if self._open is None:
            return b""
        if self._open != _TEXT:
            self._ended.add(self._open)
        self._open = None
        return event(b"content_block_stop", b'{"type":"content_block_stop","index":%d}' % self._number)


def _is_whole(arguments: str) -> bool:
    """Whether a call's arguments are a whole JSON object."""
    if not arguments.rstrip().endswith("}"):
        return False
    try:
        msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True
