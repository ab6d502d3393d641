"""What the chunks of an OpenAI-shaped stream say: pieces of output, counts, and how the reply, or each of its choices, ended.

Pure. An engine may send anything: what cannot be meant, or could not be passed on, is one EngineError without a word of it.
"""

from collections.abc import Callable, Iterable
from typing import Annotated, Any

import msgspec

from weir import errors
from weir.core.endings import FinishReason
from weir.core.output import Delta, ShapedDelta, ToolCallPart, end_of_all
from weir.engines.http_exchange import UNREADABLE
from weir.engines.openai_logprobs import ReportedLogprobs, logprobs_of
from weir.ports import EngineUsage
from weir.units import Tokens

_DONE = b"[DONE]"
_REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "tool_calls": FinishReason.TOOL_CALLS,
    "function_call": FinishReason.TOOL_CALLS,
    "content_filter": FinishReason.CONTENT_FILTER,
}
_NO_REASON = ("", "none", "null")  # what some servers write where OpenAI has null
_UNNAMED_CHARS_MAX = 65_536
"""Of a call's arguments that come before its name: no engine has a reason to send many."""
_Count = Annotated[int, msgspec.Meta(ge=0)]
_Index = Annotated[int, msgspec.Meta(ge=0, le=1_023)]


class _Function(msgspec.Struct, gc=False):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(msgspec.Struct, gc=False):
    index: _Index = 0
    id: str | None = None
    function: _Function | None = None


class _Text(msgspec.Struct, gc=False):
    """Reasoning comes under either name; a role alone is no output."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Choice(msgspec.Struct):
    index: _Count = 0
    delta: _Text | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: ReportedLogprobs | None = None


class _PromptDetails(msgspec.Struct, gc=False):
    cached_tokens: _Count | None = None


class _Usage(msgspec.Struct):
    """A count that is absent is unknown, not zero: without both it is no usage."""

    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Timings(msgspec.Struct, gc=False):
    predicted_n: _Count | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    timings: _Timings | None = None
    error: Any = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


def _parts_of(calls: Iterable[_ToolCall]) -> tuple[ToolCallPart, ...]:
    return tuple(
        ToolCallPart(
            call.index,
            call.id,
            call.function.name if call.function else None,
            (call.function.arguments if call.function else None) or "",
        )
        for call in calls
    )


class _Calls:
    """The tool calls of one stream. The first part of each that is let out has its name, and its id if that came by then.

    withheld: how many parts were not let out when they came.
    """

    __slots__ = ("_named", "_unnamed", "withheld")

    def __init__(self) -> None:
        self.withheld = 0
        self._named: set[tuple[int, int]] = set()
        self._unnamed: dict[tuple[int, int], ToolCallPart] = {}

    @property
    def has_unnamed(self) -> bool:
        """Whether something waits for a name."""
        return bool(self._unnamed)

    def parts(self, choice: int, parts: Iterable[ToolCallPart], *, is_last: bool) -> tuple[ToolCallPart, ...]:
        """What of a choice's calls may be told. is_last: the choice has ended. Raises EngineError for a call without a name."""
        told = [each for part in parts if (each := self._told(choice, part)) is not None]
        if is_last and self._unnamed:
            told += [self._unnamed.pop(key) for key in list(self._unnamed) if key[0] == choice]
        return tuple(told)

    def _told(self, choice: int, part: ToolCallPart) -> ToolCallPart | None:
        key = choice, part.index
        if key in self._named:
            if part.arguments:
                return ToolCallPart(part.index, arguments=part.arguments)
            self.withheld += 1
            return None
        held = self._unnamed.pop(key, None)
        if held is not None:
            part = ToolCallPart(part.index, held.id or part.id, part.name, held.arguments + part.arguments)
        if part.name:
            self._named.add(key)
            return part
        if len(part.arguments) > _UNNAMED_CHARS_MAX:
            raise errors.EngineError("The engine sent a tool call without a name.")
        self._unnamed[key] = part
        self.withheld += 1
        return None


class ChunkReader:
    """The chunks of one stream, in order. choices: how many were asked for; alternatives: to each token, None: all that come.

    fault_of: an error object in mid-stream as a fault. counts_each_choice: a chunk with one choice tells the count of that one,
    as vLLM's do, and not that of all. reason: of the last choice that told one; usage: the last whole one.
    tokens: the cumulative count of all choices so far, None where none came.
    """

    def __init__(
        self,
        choices: int,
        alternatives: int | None,
        fault_of: Callable[[Any], errors.EngineFault],
        *,
        counts_each_choice: bool = False,
    ) -> None:
        self._counts_each_choice = counts_each_choice and choices > 1
        self._choices = choices
        self._alternatives = alternatives
        self._fault_of = fault_of
        self._reason: FinishReason | None = None
        self._without_reason = False
        self._ended: dict[int, FinishReason] = {}
        self._tokens_of: dict[int, Tokens] = {}
        self._usage: _Usage | None = None
        self._calls = _Calls()
        self.tokens: Tokens | None = None

    @property
    def usage(self) -> EngineUsage | None:
        """What the engine says it used; None where it said less than both counts."""
        usage = self._usage
        if usage is None or usage.prompt_tokens is None or usage.completion_tokens is None:
            return None
        details = usage.prompt_tokens_details
        cached = (details.cached_tokens if details else None) or 0
        return EngineUsage(usage.prompt_tokens, min(cached, usage.prompt_tokens), usage.completion_tokens)

    def reason(self, *, at_mark: bool = False) -> FinishReason | None:
        """How the whole reply ended; None while a choice has not. at_mark: after the end mark a missing reason is a stop."""
        lacks_none = self._without_reason and at_mark
        if self._choices == 1:
            return self._reason or (FinishReason.STOP if lacks_none else None)
        if len(self._ended) < self._choices and not lacks_none:
            return None
        return end_of_all(self._ended.values())

    def read(self, payloads: Iterable[bytes], deltas: list[Delta]) -> bool:
        """Append what the chunks say; True at the end mark. Raises EngineFault where they are no chunks or say so."""
        seen = self.tokens
        for payload in payloads:
            if payload == _DONE:
                return True
            chunk = self._chunk_of(payload)
            withheld = self._calls.withheld
            pieces = [self._piece_of(choice) for choice in chunk.choices]
            if self._calls.withheld > withheld:
                deltas.append(Delta("", seen))  # an engine that works is not silent
            tokens = self._count_of(chunk)
            grew = tokens is not None and (seen is None or tokens > seen)
            if grew:
                self.tokens = seen = tokens
                if tokens and not pieces:
                    deltas.append(Delta("", tokens))
            for piece in pieces:
                piece.tokens = seen if tokens is not None else None
                if piece.text or piece.extra_bytes or (grew and tokens):
                    deltas.append(piece)
        return False

    def _chunk_of(self, payload: bytes) -> _Chunk:
        try:
            chunk = _decode_chunk(payload)
        except UNREADABLE:
            raise errors.EngineError("The engine sent a chunk that cannot be read.") from None
        if chunk.error is not None:
            raise self._fault_of(chunk.error)
        return chunk

    def _piece_of(self, choice: _Choice) -> Delta:
        """What a choice brings; its finish reason is noted. Raises EngineError for a reason or an index that is not known."""
        finish = self._finish_of(choice.finish_reason) if choice.finish_reason is not None else None
        if choice.index >= self._choices:
            raise errors.EngineError("The engine sent a choice that was not asked for.")
        delta = choice.delta
        text = (choice.text if delta is None else delta.content) or ""
        reported = choice.logprobs
        calls = (delta.tool_calls or ()) if delta is not None else ()
        is_shaped = calls or (delta is not None and (delta.reasoning_content or delta.reasoning)) or self._calls.has_unnamed
        if not is_shaped and reported is None and self._choices == 1:
            return Delta(text)
        ended = None
        if finish is not None and self._choices > 1 and choice.index not in self._ended:
            ended = self._ended[choice.index] = finish
        return ShapedDelta(
            text,
            choice=choice.index,
            reasoning=(delta.reasoning_content or delta.reasoning or "") if delta is not None else "",
            tool_calls=self._calls.parts(choice.index, _parts_of(calls), is_last=finish is not None),
            logprobs=logprobs_of(reported, self._alternatives) if reported is not None else (),
            finish=ended,
        )

    def _finish_of(self, word: str) -> FinishReason | None:
        reason = _REASONS.get(word)
        if reason is None:
            if word not in _NO_REASON:
                raise errors.EngineError("The engine ended the reply for an unknown finish reason.")
            self._without_reason = True
        else:
            self._reason = reason
        return reason

    def _count_of(self, chunk: _Chunk) -> Tokens | None:
        """The cumulative output count, of all choices, that a chunk tells; its usage is noted.

        Where each choice is counted by itself, the chunk without a choice tells the count of all.
        """
        usage = chunk.usage
        if usage is not None and usage.prompt_tokens is not None and usage.completion_tokens is not None:
            if self._counts_each_choice and len(chunk.choices) == 1:
                index = chunk.choices[0].index
                self._tokens_of[index] = max(self._tokens_of.get(index, 0), usage.completion_tokens)
                return sum(self._tokens_of.values())
            self._usage = usage
            return usage.completion_tokens
        return chunk.timings.predicted_n if chunk.timings is not None else None
