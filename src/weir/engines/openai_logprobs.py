"""Log probabilities as engines report them, in both of OpenAI's shapes: a list of entries for chat, columns for completions."""

from typing import Annotated

import msgspec

from weir.core.output import TokenLogprob

_TOKEN_BYTES_MAX = 1_024
"""No vocabulary has longer tokens."""


class _Alternative(msgspec.Struct, gc=False):
    token: str
    logprob: float
    bytes: Annotated[list[Annotated[int, msgspec.Meta(ge=0, le=255)]], msgspec.Meta(max_length=_TOKEN_BYTES_MAX)] | None = None


class _Entry(_Alternative, gc=False):
    top_logprobs: list[_Alternative] = []


class ReportedLogprobs(msgspec.Struct, gc=False):
    """What a choice reports: `content`, or the columns `tokens`, `token_logprobs` and `top_logprobs`."""

    content: list[_Entry] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None


def logprobs_of(reported: ReportedLogprobs, most: int | None = None) -> tuple[TokenLogprob, ...]:
    """Its tokens with their log probabilities, in order. most: alternatives to each, None: all that are reported."""
    if reported.content is not None:
        return tuple(_entry(entry, most) for entry in reported.content)
    tokens, values = reported.tokens or [], reported.token_logprobs or []
    tops = reported.top_logprobs or [None] * len(tokens)
    return tuple(
        TokenLogprob(token, 0.0 if value is None else value, None, _columns(top or {}, most))
        for token, value, top in zip(tokens, values, tops, strict=False)
    )


def _columns(top: dict[str, float], most: int | None) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(*item) for item in list(top.items())[:most])


def _entry(entry: _Entry, most: int | None) -> TokenLogprob:
    top = tuple(TokenLogprob(other.token, other.logprob, _bytes(other)) for other in entry.top_logprobs[:most])
    return TokenLogprob(entry.token, entry.logprob, _bytes(entry), top)


def _bytes(entry: _Alternative) -> tuple[int, ...] | None:
    return None if entry.bytes is None else tuple(entry.bytes)
