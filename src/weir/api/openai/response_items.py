"""The output items of a response as they grow: a message, reasoning, calls of functions.

One place makes them of pieces, for streams and for whole answers, so that both show the same. Text and reasoning take turns:
where one of them begins, the other ends. Calls stay open to the end, because an engine may tell several side by side.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from io import StringIO
from typing import Any, TypeAlias

import msgspec

from weir.api.openai.shapes import logprob_entry
from weir.core.output import Delta, ShapedDelta, TokenLogprob, ToolCallPart, tool_call_id

Tell: TypeAlias = Callable[[str, dict[str, Any]], None]
"""Takes an event's name and its fields, without its number."""


@dataclass(slots=True)
class TextItem:
    """A message with its one part of text, or reasoning with its one. delta_head: its delta event up to the number."""

    id: str
    index: int
    is_reasoning: bool
    status: str = "in_progress"
    text: StringIO = field(default_factory=StringIO)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    delta_head: bytes = b""

    def __post_init__(self) -> None:
        """Write the head once: it is the same for every delta."""
        name = f"response.{self.kind}.delta"
        known = msgspec.json.encode({"type": name, **self.place} | ({} if self.is_reasoning else {"logprobs": []}))
        self.delta_head = b'event: %b\ndata: %b,"sequence_number":' % (name.encode(), known[:-1])

    @property
    def kind(self) -> str:
        """The type of its part, which names its events too."""
        return "reasoning_text" if self.is_reasoning else "output_text"

    @property
    def place(self) -> dict[str, Any]:
        """Where its part stands in the response."""
        return {"item_id": self.id, "output_index": self.index, "content_index": 0}

    def part(self) -> dict[str, Any]:
        """Its part of text, as far as it is known."""
        if self.is_reasoning:
            return {"type": self.kind, "text": self.text.getvalue()}
        return {"type": self.kind, "text": self.text.getvalue(), "annotations": [], "logprobs": self.logprobs}

    def shown(self, *, begun: bool = True) -> dict[str, Any]:
        """The item; before its part begun, without it."""
        content = [self.part()] if begun else []
        if self.is_reasoning:
            return {"id": self.id, "type": "reasoning", "status": self.status, "summary": [], "content": content}
        return {"id": self.id, "type": "message", "status": self.status, "role": "assistant", "content": content}


@dataclass(slots=True)
class CallItem:
    """A function call. arguments: JSON text as the model writes it."""

    id: str
    index: int
    call_id: str
    name: str
    status: str = "in_progress"
    arguments: StringIO = field(default_factory=StringIO)

    @property
    def place(self) -> dict[str, Any]:
        """Where it stands in the response."""
        return {"item_id": self.id, "output_index": self.index}

    def shown(self) -> dict[str, Any]:
        """The item, as far as it is known."""
        return {
            "id": self.id,
            "type": "function_call",
            "status": self.status,
            "call_id": self.call_id,
            "name": self.name,
            "arguments": self.arguments.getvalue(),
        }


class OutputItems:
    """The items of one response. tell: is told every event of theirs. has_logprobs: whether they were asked for."""

    def __init__(self, generation_id: str, tell: Tell, *, has_logprobs: bool) -> None:
        self._generation_id = generation_id
        self._tail = generation_id.rpartition("-")[2]
        self._tell = tell
        self._has_logprobs = has_logprobs
        self._items: list[TextItem | CallItem] = []
        self._calls: dict[int, CallItem] = {}
        self._current: TextItem | None = None
        self._is_closed = False

    # ── what grows ───────────────────────────────────────────────────────────────────────────────────────────────────

    def message(self) -> TextItem:
        """The message that text belongs to now; begun, if it is not."""
        current = self._current
        return current if current is not None and not current.is_reasoning else self._begin_text("msg", is_reasoning=False)

    def add(self, piece: Delta) -> None:
        """One piece of output."""
        if not isinstance(piece, ShapedDelta):
            self._add_text(piece.text, ())
            return
        if piece.reasoning:
            self._add_reasoning(piece.reasoning)
        self._add_text(piece.text, piece.logprobs if self._has_logprobs else ())
        for part in piece.tool_calls:
            self._add_call_part(part)

    def _add_text(self, text: str, logprobs: tuple[TokenLogprob, ...]) -> None:
        if not text and not logprobs:
            return
        item, entries = self.message(), [logprob_entry(entry) for entry in logprobs]
        item.text.write(text)
        item.logprobs += entries
        self._tell("response.output_text.delta", {**item.place, "delta": text, "logprobs": entries})

    def _add_reasoning(self, text: str) -> None:
        current = self._current
        item = current if current is not None and current.is_reasoning else self._begin_text("rs", is_reasoning=True)
        item.text.write(text)
        self._tell("response.reasoning_text.delta", {**item.place, "delta": text})

    def _add_call_part(self, part: ToolCallPart) -> None:
        item = self._calls.get(part.index) or self._begin_call(part)
        if part.arguments:
            item.arguments.write(part.arguments)
            self._tell("response.function_call_arguments.delta", {**item.place, "delta": part.arguments})

    # ── begin and end ────────────────────────────────────────────────────────────────────────────────────────────────

    def _begin_text(self, prefix: str, *, is_reasoning: bool) -> TextItem:
        self._end_text("completed")
        item = TextItem(f"{prefix}_{self._tail}_{len(self._items)}", len(self._items), is_reasoning)
        self._items.append(item)
        self._current = item
        self._tell("response.output_item.added", {"output_index": item.index, "item": item.shown(begun=False)})
        self._tell("response.content_part.added", {**item.place, "part": item.part()})
        return item

    def _begin_call(self, part: ToolCallPart) -> CallItem:
        """The first piece of a call names the function and has an id, whatever the engine sent."""
        self._end_text("completed")
        call_id = part.id or tool_call_id(self._generation_id, 0, part.index)
        item = CallItem(f"fc_{self._tail}_{len(self._items)}", len(self._items), call_id, part.name or "")
        self._items.append(item)
        self._calls[part.index] = item
        self._tell("response.output_item.added", {"output_index": item.index, "item": item.shown()})
        return item

    def close(self, status: str) -> None:
        """The model ended: tell what is still open as done, once. status: of the last item, completed or incomplete."""
        if self._is_closed:
            return
        self._is_closed = True
        if not self._items:
            self.message()
        last = self._items[-1]
        for call in self._calls.values():
            self._end_call(call, status if call is last else "completed")
        self._end_text(status)

    def _end_text(self, status: str) -> None:
        item, self._current = self._current, None
        if item is None:
            return
        item.status = status
        logprobs = {} if item.is_reasoning else {"logprobs": item.logprobs}
        self._tell(f"response.{item.kind}.done", {**item.place, "text": item.text.getvalue(), **logprobs})
        self._tell("response.content_part.done", {**item.place, "part": item.part()})
        self._tell("response.output_item.done", {"output_index": item.index, "item": item.shown()})

    def _end_call(self, item: CallItem, status: str) -> None:
        item.status = status
        told = {**item.place, "name": item.name, "arguments": item.arguments.getvalue()}
        self._tell("response.function_call_arguments.done", told)
        self._tell("response.output_item.done", {"output_index": item.index, "item": item.shown()})

    def shown(self) -> list[dict[str, Any]]:
        """All items as far as they came; what was cut off is incomplete."""
        shown = [item.shown() for item in self._items]
        return [{**item, "status": "incomplete"} if item["status"] == "in_progress" else item for item in shown]
