"""What the simulated engine says and how it counts: a pure function of prompt, seed and position.

One output token is one word with a leading space; some words are several bytes a character, so that tests of bytes mean
something. A prompt token is four UTF-8 bytes. Nothing here depends on time, order or other requests.
"""

import hashlib
from dataclasses import dataclass, field
from itertools import accumulate

from weir.core.demands import Tool
from weir.core.endings import FinishReason
from weir.core.request import Message
from weir.engines.simulated_blocks import BLOCK_TOKENS
from weir.units import Tokens, ceil_div

BYTES_PER_TOKEN = 4
TURN_TOKENS = 4
REPLY_TOKENS = 3
"""What the invented chat template adds: per turn, and once to open the reply. Stays below the platform's upper bound."""

VOCABULARY = 32_000
NATURAL_TOKENS_MIN = 8
NATURAL_TOKENS_MAX = 256

_PLAIN = "water river weir level gate flow bank stone bridge mill wheel reed heron trout rain the a of and, to from falls then."
_WORDS = (*_PLAIN.split(" "), "café", "naïve", "übrig", "señal", "Ωmega", "漢字", "水", "🌊", "🐟")
_MASK = (1 << 64) - 1


def written(turn: Message) -> str:
    """A turn's text as the invented chat template writes it: with the calls that it made."""
    if not turn.tool_calls:
        return turn.content
    return turn.content + "".join(call.name + call.arguments for call in turn.tool_calls)


def prompt_with_tools(prompt: str | tuple[Message, ...], tools: tuple[Tool, ...]) -> tuple[Message, ...]:
    """A conversation after the turn in which the invented chat template tells of tools."""
    turns = (Message("user", prompt),) if isinstance(prompt, str) else prompt
    told = "".join(text for tool in tools for text in (tool.name, tool.description, tool.parameters) if text)
    return (Message("tools", told), *turns)


def prompt_bytes(prompt: str | tuple[Message, ...]) -> bytes:
    """The prompt as bytes that differ whenever roles, borders or contents do."""
    if isinstance(prompt, str):
        return prompt.encode()
    return b"\x00".join(part.encode() for turn in prompt for part in (turn.role, written(turn)))


def prompt_digest(prompt: str | tuple[Message, ...]) -> int:
    """64 bits that stand for the prompt."""
    return int.from_bytes(hashlib.blake2b(prompt_bytes(prompt), digest_size=8).digest(), "big")


def count_prompt_tokens(prompt: str | tuple[Message, ...], chat: bool) -> Tokens:
    """Exact input tokens ≥ 1. With chat, a string is one user message."""
    if not chat and isinstance(prompt, str):
        return max(1, ceil_div(len(prompt.encode()), BYTES_PER_TOKEN))
    contents = (prompt,) if isinstance(prompt, str) else tuple(written(turn) for turn in prompt)
    return REPLY_TOKENS + sum(TURN_TOKENS + ceil_div(len(content.encode()), BYTES_PER_TOKEN) for content in contents)


def prompt_block_keys(prompt: str | tuple[Message, ...], chat: bool) -> tuple[bytes, ...]:
    """A digest of each full block of a prompt's tokens, in order: equal where, and only where, those tokens are.

    A conversation's tokens are those that `count_prompt_tokens` counts, so another turn changes nothing before it.
    """
    encoded = _template(prompt) if chat or not isinstance(prompt, str) else prompt.encode()
    size = BLOCK_TOKENS * BYTES_PER_TOKEN
    blocks = count_prompt_tokens(prompt, chat) // BLOCK_TOKENS
    pieces = (encoded[number * size : (number + 1) * size] for number in range(blocks))
    return tuple(hashlib.blake2b(piece, digest_size=16).digest() for piece in pieces)


def _template(prompt: str | tuple[Message, ...]) -> bytes:
    """A conversation as its tokens' bytes. The last token of a turn is filled with a byte that no text contains."""
    turns = (Message("user", prompt),) if isinstance(prompt, str) else prompt
    tokens = bytearray()
    for turn in turns:
        tokens += hashlib.blake2b(turn.role.encode(), digest_size=TURN_TOKENS * BYTES_PER_TOKEN).digest()
        content = written(turn).encode()
        tokens += content + b"\xff" * (-len(content) % BYTES_PER_TOKEN)
    return bytes(tokens) + b"\xff" * (REPLY_TOKENS * BYTES_PER_TOKEN)


def natural_output_tokens(prompt: str | tuple[Message, ...]) -> Tokens:
    """The length at which the reply ends by itself, 8 … 256."""
    return NATURAL_TOKENS_MIN + prompt_digest(prompt) % (NATURAL_TOKENS_MAX - NATURAL_TOKENS_MIN + 1)


def _word(state: int, position: int) -> str:
    mixed = ((state ^ (position * 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9) & _MASK
    return " " + _WORDS[(mixed >> 32) % len(_WORDS)]


@dataclass(frozen=True, slots=True)
class Script:
    """A whole reply, known beforehand. tokens: its length ≥ 1; reason: stop or length. cut: its pieces before a stop."""

    state: int
    tokens: Tokens
    reason: FinishReason
    cut: tuple[str, ...] | None = field(default=None, repr=False)

    def piece(self, position: int) -> str:
        """The text that token `position`, 0 … tokens − 1, adds; empty where it belongs to a stop string."""
        return _word(self.state, position) if self.cut is None else self.cut[position]


@dataclass(frozen=True, slots=True)
class ReplyBounds:
    """What ends a reply. natural_tokens: by itself; max_tokens: the caller's bound; stop: strings that end it before them."""

    natural_tokens: Tokens
    max_tokens: Tokens
    stop: tuple[str, ...] = ()


def script(prompt: str | tuple[Message, ...], seed: int, bounds: ReplyBounds) -> Script:
    """The reply to a prompt. The text depends on prompt and seed, its length on the bounds."""
    state = (prompt_digest(prompt) ^ (seed * 0xD6E8FEB86659FD93)) & _MASK
    tokens = max(1, min(bounds.natural_tokens, bounds.max_tokens))
    reason = FinishReason.STOP if bounds.natural_tokens <= bounds.max_tokens else FinishReason.LENGTH
    whole = Script(state, tokens, reason)
    stops = tuple(text for text in bounds.stop if text)
    return _stopped(whole, stops) if stops else whole


def _stopped(whole: Script, stops: tuple[str, ...]) -> Script:
    """The reply cut before the stop string that is complete first; the tokens of that string were still generated."""
    pieces = [whole.piece(position) for position in range(whole.tokens)]
    text = "".join(pieces)
    found = [(start + len(stop), start) for stop in stops if (start := text.find(stop)) >= 0]
    if not found:
        return whole
    end, visible = min(found)
    ends = list(accumulate(len(piece) for piece in pieces))
    tokens = next(index for index, reached in enumerate(ends) if reached >= end) + 1
    starts = [0, *ends]
    kept = tuple(pieces[index][: max(0, visible - starts[index])] for index in range(tokens))
    return Script(whole.state, tokens, FinishReason.STOP, kept)


def invented_token_ids(prompt: str | tuple[Message, ...], count: Tokens) -> list[int]:
    """count token ids that the prompt's bytes determine."""
    encoded = prompt_bytes(prompt)
    chunks = (encoded[start : start + BYTES_PER_TOKEN] for start in range(0, count * BYTES_PER_TOKEN, BYTES_PER_TOKEN))
    return [int.from_bytes(chunk, "big") % VOCABULARY for chunk in chunks]
