"""Log probabilities as engines report them, in both of OpenAI's shapes: a list of entries for chat, columns for completions."""

import msgspec

from weir.core.output import TokenLogprob


class _Alternative(msgspec.Struct, gc=False):
    token: str
    logprob: float
    bytes: list[int] | None = None


class _Entry(_Alternative, gc=False):
    top_logprobs: list[_Alternative] = []


class ReportedLogprobs(msgspec.Struct, gc=False):
    """What a choice reports: `content`, or the columns `tokens`, `token_logprobs` and `top_logprobs`."""

    content: list[_Entry] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None


def logprobs_of(reported: ReportedLogprobs) -> tuple[TokenLogprob, ...]:
    """Its tokens with their log probabilities, in order."""
    if reported.content is not None:
        return tuple(_entry(entry) for entry in reported.content)
    tokens, values = reported.tokens or [], reported.token_logprobs or []
    tops = reported.top_logprobs or [None] * len(tokens)
    return tuple(
        TokenLogprob(token, 0.0 if value is None else value, None, tuple(TokenLogprob(*item) for item in (top or {}).items()))
        for token, value, top in zip(tokens, values, tops, strict=False)
    )


def _entry(entry: _Entry) -> TokenLogprob:
    top = tuple(TokenLogprob(other.token, other.logprob, _bytes(other)) for other in entry.top_logprobs)
    return TokenLogprob(entry.token, entry.logprob, _bytes(entry), top)


def _bytes(entry: _Alternative) -> tuple[int, ...] | None:
    return None if entry.bytes is None else tuple(entry.bytes)
