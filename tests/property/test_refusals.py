"""Protects what a refusal says: the caller's own limit and figures, a wait that is true, and nothing of any other tenant."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from weir import errors
from weir.api.wire import members_of, problem, retry_headers
from weir.core.ledger.book import Book
from weir.core.metering import NO_CHARGE, Charge, Worst
from weir.core.tenancy import LIMIT_NAMES, Limits, Scope, ServiceClass, scopes_of
from weir.core.windows import Zones
from weir.units import Moment

NOON_MS = 1_767_268_800_000  # 2026-01-01T12:00:00Z
TENANTS = ("acme", "globex")
ZONES = {"acme": Zones("Europe/Berlin"), "globex": Zones("Asia/Tokyo")}
MINUTE_CODES = ("requests_limited", "tokens_limited")
SMALL = st.integers(1, 40)
WORST = st.builds(Worst, st.integers(0, 20), st.integers(1, 20), st.integers(0, 30))
SCOPES = [scope for tenant in TENANTS for scope in scopes_of(tenant, "app", "key", "assistant", ServiceClass.INTERACTIVE)]


@dataclass(frozen=True)
class Ask:
    """A request of a tenant after a pause; it ends at once, having used nothing, when it `ends`."""

    tenant: str
    worst: Worst
    pause_ms: int
    ends: bool


asks = st.lists(st.builds(Ask, st.sampled_from(TENANTS), WORST, st.integers(0, 40_000), st.booleans()), max_size=25)
tables = st.dictionaries(
    st.sampled_from(SCOPES), st.builds(Limits, **{name: st.none() | SMALL for name in LIMIT_NAMES}), max_size=6
)


def moment(after_ms: int) -> Moment:
    return Moment(after_ms * 1_000_000, NOON_MS + after_ms)


def book_with(limits: dict[Scope, Limits]) -> Book:
    book = Book()
    book.configure(limits, ZONES, 0)
    return book


def shown(refused: errors.WeirError) -> tuple[Any, ...]:
    """Everything that a caller is told."""
    return refused.code, refused.detail, dict(refused.members), refused.retry_after_ms, refused.retry_advice


def refusals(limits: dict[Scope, Limits], asked: list[Ask], tenant: str, alone: bool) -> list[Any]:
    """What a tenant is answered, one by one; alone: the others ask nothing."""
    book, now_ms, answers = book_with(limits), 0, list[Any]()
    for number, ask in enumerate(asked):
        now_ms += ask.pause_ms
        if alone and ask.tenant != tenant:
            continue
        scopes, now = scopes_of(ask.tenant, "app", "key", "assistant", ServiceClass.INTERACTIVE), moment(now_ms)
        refused = book.check(scopes, ask.worst, now)
        if refused is None:
            book.take(number, scopes, ask.worst, now)
            if ask.ends:
                book.end(number, NO_CHARGE, now.monotonic_ns)
        if ask.tenant == tenant:
            answers.append(refused and shown(refused))
    return answers


@given(tables, asks, st.sampled_from(TENANTS))
def test_a_tenant_is_told_the_same_whatever_others_do(limits: dict[Scope, Limits], asked: list[Ask], tenant: str) -> None:
    """Protects tenants from each other's numbers: with and without the others' traffic every answer is the same."""
    assert refusals(limits, asked, tenant, alone=False) == refusals(limits, asked, tenant, alone=True)


@given(tables, asks, WORST)
def test_a_refusal_names_its_limit_with_the_figures_of_the_account(
    limits: dict[Scope, Limits], asked: list[Ask], worst: Worst
) -> None:
    """Protects support: scope, limit, used and held are exactly those that administrators see for that limit."""
    book, now_ms = book_with(limits), 0
    for number, ask in enumerate(asked):
        now_ms += ask.pause_ms
        scopes = scopes_of(ask.tenant, "app", "key", "assistant", ServiceClass.INTERACTIVE)
        if book.check(scopes, ask.worst, moment(now_ms)) is None:
            book.take(number, scopes, ask.worst, moment(now_ms))
            if ask.ends:
                used = Charge(ask.worst.input_tokens, 0, 0, ask.worst.cost_microusd, 0, False)
                book.end(number, used, moment(now_ms).monotonic_ns)
    refused = book.check(scopes_of("acme", "app", "key", "assistant", ServiceClass.INTERACTIVE), worst, moment(now_ms))
    assume(refused is not None)
    assert refused is not None
    members = dict(refused.members)
    assert members["scope"]["tenant"] == "acme"
    if isinstance(refused, errors.ExceedsLimitCapacity):
        assert members["needed"] > members["capacity"] == getattr(limits[Scope(**members["scope"])], members["limit"])
        return
    [row] = [
        row
        for row in book.accounts_of("acme", moment(now_ms))
        if row["scope"] == members["scope"] and row["limit_name"] == members["limit_name"]
    ]
    assert row["limit"] == members["limit"]
    if refused.code in MINUTE_CODES:
        assert (members["used"], members["held"]) == (row["spent"], row["held"])
    elif refused.code == "concurrency_limited":
        assert members["used"] == members["held"] == row["held"]
    else:
        assert (members["used"], members["held"]) == (row["spent"], row["held"])
        assert members.get("reset_ms", 0) == max(0, (row["resets_at_ms"] or 0) - moment(now_ms).wall_ms)


@given(st.sampled_from([name for name in LIMIT_NAMES if name != "concurrency"]), SMALL, WORST, st.integers(0, 10**8))
def test_the_time_to_come_back_is_true(name: str, amount: int, worst: Worst, after_ms: int) -> None:
    """Protects clients that wait: a millisecond before the announced time the same request is refused, then it is admitted."""
    book = book_with({Scope("acme"): replace(Limits(), **{name: amount})})
    scopes = scopes_of("acme", "app", "key", "assistant", ServiceClass.INTERACTIVE)
    number, refused = 0, book.check(scopes, worst, moment(after_ms))
    while refused is None and number < 100:
        book.take(number, scopes, worst, moment(after_ms))
        book.end(number, Charge(worst.input_tokens, 0, worst.output_tokens, worst.cost_microusd, 0, False), 0)
        number, refused = number + 1, book.check(scopes, worst, moment(after_ms))
    assume(refused is not None)
    assert refused is not None
    if refused.retry_after_ms is None:
        assert name.endswith("lifetime") or isinstance(refused, errors.ExceedsLimitCapacity)
        return
    assert refused.retry_after_ms >= 1
    assert book.check(scopes, worst, moment(after_ms + refused.retry_after_ms - 1)) is not None
    assert book.check(scopes, worst, moment(after_ms + refused.retry_after_ms)) is None


@pytest.mark.parametrize("name", [name for name in LIMIT_NAMES if "per_day" in name or "per_month" in name])
def test_a_budget_on_the_wire(name: str) -> None:
    """Protects the form: which limit, scope, figures, window, when it resets, and the headers that tell to wait until then."""
    book = book_with({Scope("acme", alias="assistant"): replace(Limits(), **{name: 50})})
    scopes, worst = scopes_of("acme", "app", "key", "assistant", ServiceClass.INTERACTIVE), Worst(10, 20, 30)
    book.take("first", scopes, worst, moment(0))
    refused = book.check(scopes, worst, moment(0))
    assert refused is not None
    resets_ms = (11 if "day" in name else 30 * 24 + 11) * 3_600_000  # midnight in Berlin is an hour before that in UTC
    window = "day/2026-01-01" if "day" in name else "month/2026-01"
    assert members_of(refused, NOON_MS) == {
        "scope": {"tenant": "acme", "alias": "assistant"},
        "limit_name": name,
        "limit": 50,
        "used": 0,
        "held": 30,
        "window": window,
        "resets_at": "2026-01-01T23:00:00.000Z" if "day" in name else "2026-01-31T23:00:00.000Z",
    }
    headers = dict(problem(refused, NOON_MS).headers)
    assert headers == {
        b"retry-after": str(resets_ms // 1000).encode(),
        b"retry-after-ms": str(resets_ms).encode(),
        b"x-should-retry": b"false",
    }


@given(st.sampled_from(sorted(errors.ERROR_BY_CODE)), st.integers(0, 10_000_000))
def test_a_wait_on_the_wire(code: str, wait_ms: int) -> None:
    """Protects Retry-After: what is exact is told as it is, an estimate never shorter, and both headers agree."""
    headers = dict(retry_headers(errors.ERROR_BY_CODE[code](retry_after_ms=wait_ms)))
    told_ms = int(headers[b"retry-after-ms"])
    is_exact = code in (*MINUTE_CODES, "budget_exhausted")
    assert wait_ms <= told_ms <= wait_ms + (0 if is_exact else wait_ms // 4)
    assert int(headers[b"retry-after"]) == -(-told_ms // 1000)


def test_those_who_are_refused_together_do_not_come_again_together() -> None:
    """Protects the door from waves: estimates differ from one refusal to the next."""
    refused = errors.QueueFull(retry_after_ms=1_000)
    told = {dict(retry_headers(refused))[b"retry-after-ms"] for _ in range(100)}
    assert len(told) > 10
