"""What the simulated engine answers to demands: tool calls, output in a form, reasoning, log probabilities, several choices.

Pure: a whole reply is known beforehand, token by token, from prompt, seed and demands. `simulated_choices` tells it. Requests
that demand nothing never come here.
"""

import hashlib
import re
from dataclasses import dataclass, replace

import msgspec

from weir.core.demands import Demands, FormKind, Tool, ToolMode
from weir.core.endings import FinishReason
from weir.core.output import ShapedDelta, TokenLogprob, ToolCallPart
from weir.core.request import Message
from weir.engines.simulated_schema import least_instance
from weir.engines.simulated_text import ReplyBounds, Script, script
from weir.ports import EngineCall
from weir.units import Tokens

CALL_MARK = "call:"
REASON_MARK = "reason:"
REASONING_TOKENS = 8
CHARS_PER_TOKEN = 4
"""Of JSON, which comes in pieces of so many characters, as words do not fit it."""

_CALLED = re.compile(CALL_MARK + r"([A-Za-z0-9_-]{1,64})")


@dataclass(frozen=True, slots=True)
class _Token:
    """What one token adds."""

    text: str = ""
    reasoning: str = ""
    part: ToolCallPart | None = None

    @property
    def shown(self) -> str:
        """Its text, wherever it goes."""
        return self.text or self.reasoning or (self.part.arguments or self.part.name or "" if self.part else "")


@dataclass(frozen=True, slots=True)
class ShapedReply:
    """One choice, whole. tokens: its length ≥ 1. before: what comes before its words, which `words` has."""

    choice: int
    tokens: Tokens
    reason: FinishReason
    top_logprobs: int | None
    before: tuple[_Token, ...]
    words: Script | None

    def piece(self, position: int) -> ShapedDelta:
        """What token `position`, 0 … tokens − 1, adds."""
        begun = len(self.before)
        if position < begun:
            token = self.before[position]
        else:
            assert self.words is not None
            token = _Token(self.words.piece(position - begun))
        delta = ShapedDelta(token.text, choice=self.choice, reasoning=token.reasoning)
        if token.part is not None:
            delta.tool_calls = (token.part,)
        if self.top_logprobs is not None:
            delta.logprobs = (_logprob(token.shown, position, self.top_logprobs),)
        return delta


def demands_shape(call: EngineCall) -> bool:
    """Whether a call is answered with more than the text of one choice."""
    demands = call.demands
    if demands.tools or demands.form is not None or demands.choices > 1 or demands.top_logprobs is not None:
        return True
    return call.chat and REASON_MARK in _last_words(call.prompt)


def shaped_replies(call: EngineCall, seed: int, natural_tokens: Tokens) -> list[ShapedReply]:
    """Each choice of a call, the first with this seed, the next with the seed after it."""
    return [_reply(call, seed + choice, choice, natural_tokens) for choice in range(call.demands.choices)]


def _reply(call: EngineCall, seed: int, choice: int, natural_tokens: Tokens) -> ShapedReply:
    demands, most = call.demands, call.max_output_tokens
    plain = script(call.prompt, seed, ReplyBounds(natural_tokens, most, call.sampling.stop))
    thoughts = _thoughts(plain) if call.chat and REASON_MARK in _last_words(call.prompt) else ()
    called = _called_tools(call.prompt, demands) if call.chat else ()
    if called:
        written, ending = _calls(called, plain.state), FinishReason.TOOL_CALLS
    elif demands.form is not None:
        made = least_instance(demands.form.schema) if demands.form.kind is FormKind.JSON_SCHEMA else _json_object(plain)
        written, ending = tuple(_Token(piece) for piece in _cut(made)), FinishReason.STOP
    else:
        room = most - len(thoughts)
        words = script(call.prompt, seed, ReplyBounds(natural_tokens, room, call.sampling.stop)) if room > 0 else None
        length = len(thoughts) + words.tokens if words is not None else most
        reason = words.reason if words is not None else FinishReason.LENGTH
        return ShapedReply(choice, length, reason, demands.top_logprobs, thoughts[:most], words)
    before = thoughts + written
    reason = ending if len(before) <= most else FinishReason.LENGTH
    return ShapedReply(choice, min(len(before), most), reason, demands.top_logprobs, before[:most], None)


def _last_words(prompt: str | tuple[Message, ...]) -> str:
    """The user's text, where it is the last of the conversation: what was answered already asks for nothing again."""
    if isinstance(prompt, str):
        return prompt
    return prompt[-1].content if prompt and prompt[-1].role == "user" else ""


def _called_tools(prompt: str | tuple[Message, ...], demands: Demands) -> tuple[Tool, ...]:
    """The tools that are called: those that the user's marks name, else the one that must be."""
    mode = demands.tool_choice.mode if demands.tool_choice is not None else ToolMode.AUTO
    if not demands.tools or mode is ToolMode.NONE:
        return ()
    named = {tool.name: tool for tool in demands.tools}
    if mode is ToolMode.NAMED:
        assert demands.tool_choice is not None
        return (named[demands.tool_choice.name or ""],)
    marked = tuple(named[name] for name in _CALLED.findall(_last_words(prompt)) if name in named)
    if not marked and mode is ToolMode.REQUIRED:
        return (demands.tools[0],)
    return marked[:1] if demands.parallel_tool_calls is False else marked


def _calls(tools: tuple[Tool, ...], state: int) -> tuple[_Token, ...]:
    """Calls one after another: a token with id and name, then their arguments."""
    tokens: list[_Token] = []
    for index, tool in enumerate(tools):
        digest = hashlib.blake2b(b"%d %d" % (state, index), digest_size=8).hexdigest()
        tokens.append(_Token(part=ToolCallPart(index, f"chatcmpl-tool-{digest}", tool.name)))
        pieces = _cut(least_instance(tool.parameters))
        tokens += (_Token(part=ToolCallPart(index, arguments=piece)) for piece in pieces)
    return tuple(tokens)


def _thoughts(plain: Script) -> tuple[_Token, ...]:
    words = replace(plain, state=plain.state ^ 1, tokens=REASONING_TOKENS, cut=None)
    return tuple(_Token(reasoning=words.piece(position)) for position in range(REASONING_TOKENS))


def _json_object(plain: Script) -> str:
    return msgspec.json.encode({"answer": replace(plain, cut=None).piece(0).strip()}).decode()


def _cut(text: str) -> list[str]:
    return [text[start : start + CHARS_PER_TOKEN] for start in range(0, len(text), CHARS_PER_TOKEN)]


def _logprob(text: str, position: int, top: int) -> TokenLogprob:
    """Invented, and the same each time: the token itself is the likeliest, each alternative half as likely as the last."""
    encoded = tuple(text.encode())
    value = -(1 + position % 7) / 8
    others = tuple(_alternative(position, rank, value) for rank in range(1, top))
    itself = TokenLogprob(text, value, encoded)
    return TokenLogprob(text, value, encoded, (itself, *others)[:top])


def _alternative(position: int, rank: int, value: float) -> TokenLogprob:
    text = f" {position}.{rank}"
    return TokenLogprob(text, value - rank * 0.6875, tuple(text.encode()))
