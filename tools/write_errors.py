"""Writes docs/reference/errors.md, every code with what to do about it, from the error tree and what is said of it.

Statuses and advice come from `weir.errors`, endings from `weir.core.endings`, meanings from `weir.api.openapi.error_guide`. Run
by `make docs`; a test fails when the page is out of date.
"""

from collections.abc import Iterator
from pathlib import Path

from weir.api.openapi.error_guide import ENDINGS, ENDINGS_ONLY, GUIDE, INTERNAL, MANAGEMENT_ONLY, Wait
from weir.errors import ERROR_BY_CODE, BudgetExhausted, WeirError

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "errors.md"
RETRIED = (408, 409, 429)
"""Statuses below 500 that SDKs send again by themselves."""

INTRODUCTION = """# Errors

Made from `weir.errors`, `weir.core.endings` and `weir.api.openapi.error_guide` by `make docs`; edit those, not this page.

Every failure has a code, which is the same on every surface: switch on it, and show `detail` or `message` to a person. Neither
ever contains what was sent. A *refusal* comes before anything was taken: it leaves no record and costs nothing. An *ending* is
that of an admitted request, with a record and perhaps a cost ([who pays](api.md#endings)).

"""
SHAPES = (
    (
        "[native](native.md)",
        "`application/problem+json`: `type`, `title`, `status`, `code`, `detail`, and the members",
        "the generation's body, with `error`: `code`, `detail`",
        "the event `done`, with the same `error`",
    ),
    (
        "OpenAI ([chat](openai-chat.md), [completions](openai-completions.md), [embeddings](embeddings.md),"
        " [files and batches](openai-batches.md), [models](models.md))",
        "`error`: `message`, `type`, `param`, `code`, and the members",
        "the same, with the record as the member `generation`",
        "one event with `error`, then `[DONE]`",
    ),
    (
        "OpenAI ([responses](openai-responses.md))",
        "the same",
        "the same",
        "the event `response.failed`, whose response has `error`: `code`, `message`",
    ),
    (
        "Anthropic ([messages](anthropic-messages.md), [models](models.md))",
        "`type`: `error`; `error`: `type`, `message`, `code`, `details`, and the members; `request_id`",
        "the same, with the record as the member `generation`",
        "the event `error`, with the same shape, without the record",
    ),
    ("[management](admin-api.md)", "as native", "", ""),
)
"""How each surface shows an error."""
RETRIES = """
What is no HTTP, or has headers above their bound, is refused as problem+json on every path.

## Retries

- `x-should-retry` decides where it is present: `true` or `false`. OpenAI's and Anthropic's SDKs obey it. Where it is absent the
  status does: they send 408, 409, 429 and 5xx again.
- Wait for `Retry-After` (whole seconds, rounded up) or `retry-after-ms`. *Exact*: the request fits then, if nothing else of
  that scope is admitted meanwhile. *Estimate*: lengthened at random by up to a quarter, so that those who were refused together
  do not come again together. An SDK without it backs off by itself.
- Give each request an [id](api.md#idempotency): sent again with the same id, it is never paid twice.

## Every code

*Retry*: whether the same request may succeed later. *Retry-After*: what it is where it is sent.

"""
AFTER_THE_TABLE = """
- A limit of 0 refuses with that limit's 429, without `Retry-After` and with `x-should-retry: false`. A lifetime budget has no
  `Retry-After`, nor `window` or `resets_at`; that of a day or month resets when its window ends, hours away, hence `no`.
- An ending adds `x-should-retry: false` once anything was generated: whether to generate again is yours to decide.
- `limit` is a limit's value, but its name in `exceeds_limit_capacity`, and tokens in `input_too_long`; see [what a refused
  limit says](api.md#what-a-refused-limit-says).
- `no_capacity` with `service_class` says that no pool takes the caller's service class: without `Retry-After`, and with
  `x-should-retry: false`.
- `ledger_unavailable` on an answer that is not streamed leaves the outcome open: the record decides, and `GET` shows it.
- The members of `not_found` and `not_allowed_now`, and `file` and `reason`, are the management API's.

## Families

The tree behind the codes: what kind of fault each is.

"""
UNANSWERED = """
## Codes that answer no request

They stand in logs and in what a command prints, and `batch_damaged` in the `errors` of a batch.

"""


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")
    print(f"errors: wrote {PAGE.name}")


def page() -> str:
    """The whole page."""
    shapes = table(("surface", "a refusal", "an ending before the headers", "an ending after them"), iter(SHAPES))
    shown = sorted((error for error in GUIDE if error not in INTERNAL), key=lambda error: error.http_status)
    codes = table(
        ("code", "status", "meaning", "what to do", "retry", "Retry-After", "x-should-retry", "members", "seen as"),
        (row(error) for error in shown),
    )
    families = table(("family", "codes", "what it is"), family_rows())
    internal = table(
        ("never sent", "meaning", "what to do"),
        ((f"`{error.code}`", GUIDE[error].meaning, GUIDE[error].remedy) for error in INTERNAL),
    )
    return INTRODUCTION + shapes + RETRIES + codes + AFTER_THE_TABLE + families + UNANSWERED + internal


def table(headings: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    """A Markdown table."""
    marks = "|" + "---|" * len(headings)
    return "".join(f"{line}\n" for line in (_line(headings), marks, *map(_line, rows)))


def _line(cells: tuple[str, ...]) -> str:
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells)


def row(error: type[WeirError]) -> tuple[str, ...]:
    """A code's row."""
    advice = GUIDE[error]
    members = ", ".join((*advice.members, "generation") if error in ENDINGS_ONLY else advice.members)
    name, status = f"`{error.code}`", str(error.http_status)
    return name, status, advice.meaning, advice.remedy, retry(error), wait(error), header(error), members, seen_as(error)


def retry(error: type[WeirError]) -> str:
    """Whether to send the same again."""
    if error.should_retry is False or not (error.http_status in RETRIED or error.http_status >= 500):
        return "no"
    if not is_retried_ending(error):
        return "yes"
    return "if nothing was generated" if error in ENDINGS_ONLY else "yes; an ending, if nothing was generated"


def is_retried_ending(error: type[WeirError]) -> bool:
    """Whether a request may end so, and is sent again where nothing was generated."""
    return any(rule.error is error and rule.retry_if_nothing_generated for rule in ENDINGS)


def wait(error: type[WeirError]) -> str:
    """What `Retry-After` is."""
    return "exact: its window's end" if error is BudgetExhausted else GUIDE[error].wait.value


def header(error: type[WeirError]) -> str:
    """What `x-should-retry` says."""
    if error.should_retry is not None:
        return str(error.should_retry).lower()
    return "false once anything was generated" if is_retried_ending(error) else Wait.NONE.value


def seen_as(error: type[WeirError]) -> str:
    """Where a client meets it."""
    if error in MANAGEMENT_ONLY:
        return "management API"
    if error in ENDINGS_ONLY:
        return "ending"
    return "refusal, ending" if any(rule.error is error for rule in ENDINGS) else "refusal"


def family_rows() -> Iterator[tuple[str, ...]]:
    """Each class that others derive from, in the order of the tree."""
    for family in WeirError.__subclasses__():
        below = [error.code for error in ERROR_BY_CODE.values() if issubclass(error, family)]
        yield f"`{family.__name__}`", ", ".join(f"`{code}`" for code in below), (family.__doc__ or "").strip()


if __name__ == "__main__":
    main()
