"""The book of accounts under any order of admissions, endings and changed limits, against a plain re-count of every hold."""

from dataclasses import dataclass, fields
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from weir import errors
from weir.core.ledger.account import BUDGETS, Balance
from weir.core.ledger.book import Book, LimitStanding, Standing, Taken
from weir.core.ledger.records import BucketTake
from weir.core.metering import NO_CHARGE, Charge, Worst
from weir.core.tenancy import LIMIT_NAMES, Limits, Scope, Scopes, ServiceClass, scopes_of
from weir.core.windows import LIFETIME_WINDOW, Calendar, FormerZone, WindowKind, Zones
from weir.units import NANOS_PER_MINUTE, NANOS_PER_SECOND, Moment

TENANTS = ("acme", "globex")
CALLERS = [
    scopes_of("acme", "web", "k1", "large", ServiceClass.INTERACTIVE),
    scopes_of("acme", "web", "k1", "large", ServiceClass.BATCH),
    scopes_of("acme", "web", "k2", "small", ServiceClass.INTERACTIVE),
    scopes_of("acme", "jobs", "k3", "large", ServiceClass.BATCH),
    scopes_of("globex", "web", "k4", "large", ServiceClass.INTERACTIVE),
]
SCOPES = sorted({scope for scopes in CALLERS for scope in scopes}, key=repr)
MINUTE_LIMITS = ("requests_per_minute", "tokens_per_minute")
BUDGET_BY_NAME = {budget.name: budget for budget in BUDGETS}
T0_MS = 1_774_738_800_000  # 2026-03-28T23:00:00Z: an hour to midnight in UTC, and clocks change in Berlin that night
ZERO = Moment(0, T0_MS)

MOST = {"requests_per_minute": 6, "tokens_per_minute": 120, "concurrency": 4}
LIMITS = st.builds(Limits, **{name: st.none() | st.integers(0, MOST.get(name, 400)) for name in LIMIT_NAMES})
WORSTS = st.builds(Worst, st.integers(0, 40), st.integers(1, 40), st.integers(0, 100))
ERROR_OF_LIMIT: dict[str, type[errors.WeirError]] = {
    "requests_per_minute": errors.RequestsLimited,
    "tokens_per_minute": errors.TokensLimited,
    "concurrency": errors.ConcurrencyLimited,
    **dict.fromkeys(BUDGET_BY_NAME, errors.BudgetExhausted),
}


def needed_of(name: str, worst: Worst) -> int:
    """What a request takes of a limit."""
    if name in ("requests_per_minute", "concurrency"):
        return 1
    return worst.cost_microusd if name.startswith("spend") else worst.tokens


@dataclass(frozen=True)
class Hold:
    scopes: Scopes
    worst: Worst
    taken: Taken


class Recount(RuleBasedStateMachine):
    """Protects the ledger's invariants under any interleaving: from every hold and charge it re-counts what the book shows.

    Clocks step, time zones change and windows end meanwhile; which windows are present is asked of a calendar of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.book, self.now, self.number = Book(), ZERO, 0
        self.limits: dict[Scope, Limits] = {}
        self.zones = {tenant: Zones() for tenant in TENANTS}
        self.calendars = {tenant: Calendar(Zones()) for tenant in TENANTS}
        self.open: dict[int, Hold] = {}
        self.posted: list[tuple[Hold, Charge]] = []

    # ── what the book shows, and what it must show ───────────────────────────────────────────────────────────────────

    def rows(self) -> dict[tuple[str, str], dict[str, Any]]:
        shown = [row for tenant in TENANTS for row in self.book.accounts_of(tenant, self.now)]
        return {(repr(row["scope"]), row["limit_name"]): row for row in shown}

    def everything_shown(self) -> object:
        balances = [self.book.balance_of(scope, window) for scope in SCOPES for window in self.windows(scope)]
        standings = [self.book.standing(scopes, self.now.monotonic_ns) for scopes in CALLERS]
        return self.rows(), balances, standings, self.book.open_holds

    def windows(self, scope: Scope) -> tuple[str, ...]:
        """The windows that count now."""
        return self.calendars[scope.tenant].windows(self.now.wall_ms)

    def recounted(self, scope: Scope, window: str) -> Balance:
        held = [hold.worst for hold in self.open.values() if scope in hold.scopes and window in hold.taken.windows]
        spent = [charge for hold, charge in self.posted if scope in hold.scopes and window in hold.taken.windows]
        return Balance(
            held_microusd=sum(worst.cost_microusd for worst in held),
            spent_microusd=sum(charge.cost_microusd for charge in spent),
            held_tokens=sum(worst.tokens for worst in held),
            spent_tokens=sum(charge.tenant_tokens for charge in spent),
        )

    def in_flight(self, scope: Scope) -> int:
        return sum(scope in hold.scopes for hold in self.open.values())

    def expected_refusal(self, scopes: Scopes, worst: Worst) -> tuple[str, type[errors.WeirError], Scope] | None:
        """The first limit that refuses, by the policy's words alone: its name, the error, the scope."""
        rows = self.rows()
        for scope in scopes:
            for name, error in ERROR_OF_LIMIT.items():
                limit = getattr(self.limits.get(scope, Limits()), name)
                if limit is None:
                    continue
                row = rows[repr(scope.public()), name]
                needed = needed_of(name, worst)
                if limit == 0:
                    return name, error, scope
                if needed > limit:
                    return name, errors.ExceedsLimitCapacity, scope
                if row["held"] + row["spent"] + needed > limit:
                    return name, error, scope
        return None

    # ── what happens ─────────────────────────────────────────────────────────────────────────────────────────────────

    @initialize(limits=st.dictionaries(st.sampled_from(SCOPES), LIMITS, max_size=4))
    def begin(self, limits: dict[Scope, Limits]) -> None:
        self.change_limits(limits)

    @rule(limits=st.dictionaries(st.sampled_from(SCOPES), LIMITS, max_size=4))
    def change_limits(self, limits: dict[Scope, Limits]) -> None:
        """A whole new set: scopes that are absent become unlimited."""
        self.limits = limits
        self.book.configure(limits, self.zones, self.now.monotonic_ns)

    @rule(scope=st.sampled_from(SCOPES), entry=LIMITS)
    def change_one(self, scope: Scope, entry: Limits) -> None:
        before = {key: row["spent"] for key, row in self.rows().items() if key[1] in MINUTE_LIMITS}
        self.change_limits({**self.limits, scope: entry})
        for key, row in self.rows().items():
            if key in before:  # a limit that stays keeps its level, clamped
                assert row["spent"] == min(before[key], row["limit"])

    @rule(elapsed_ns=st.integers(0, 70 * NANOS_PER_SECOND))
    def wait(self, elapsed_ns: int) -> None:
        self.now = Moment(self.now.monotonic_ns + elapsed_ns, self.now.wall_ms + elapsed_ns // 1_000_000)

    @rule(step_hours=st.integers(-30, 60))
    def step_the_wall_clock(self, step_hours: int) -> None:
        """A clock is set: what is measured in durations does not notice."""
        self.now = self.now._replace(wall_ms=self.now.wall_ms + step_hours * 3_600_000)

    @rule(tenant=st.sampled_from(TENANTS), zone=st.sampled_from(["UTC", "Europe/Berlin", "Asia/Tokyo", "Pacific/Pago_Pago"]))
    def move(self, tenant: str, zone: str) -> None:
        before = self.zones[tenant]
        self.zones[tenant] = Zones(zone, (*before.former, FormerZone(before.time_zone, self.now.wall_ms)))
        self.calendars[tenant].set_zones(self.zones[tenant])
        self.change_limits(self.limits)

    @rule(scopes=st.sampled_from(CALLERS), worst=WORSTS)
    def admit(self, scopes: Scopes, worst: Worst) -> None:
        expected = self.expected_refusal(scopes, worst)
        before = self.everything_shown()
        refusal = self.book.check(scopes, worst, self.now)
        assert self.everything_shown() == before
        if expected is not None or refusal is not None:
            assert expected is not None
            assert refusal is not None
            self.check_refusal(refusal, *expected)
            return
        self.number += 1
        taken = self.book.take(self.number, scopes, worst, self.now)
        self.open[self.number] = Hold(scopes, worst, taken)
        assert taken.windows == self.windows(scopes[0])
        self.check_limits_in_force(scopes)

    def check_refusal(self, refusal: errors.WeirError, name: str, expected: type[errors.WeirError], scope: Scope) -> None:
        assert type(refusal) is expected
        assert refusal.members["scope"] == scope.public()
        if isinstance(refusal, errors.ExceedsLimitCapacity):
            assert refusal.members["needed"] > refusal.members["capacity"]
            assert refusal.retry_after_ms is None
            return
        row = self.rows()[repr(scope.public()), name]
        assert refusal.members["limit_name"] == name
        assert refusal.members["limit"] == row["limit"] == getattr(self.limits[scope], name)
        assert refusal.members["held"] == row["held"]
        if name != "concurrency":
            assert refusal.members["used"] == row["spent"]
        waiting_helps = not name.endswith("lifetime") and row["limit"] > 0
        assert (refusal.retry_after_ms is not None) == waiting_helps
        if name in BUDGET_BY_NAME:
            assert refusal.retry_advice is False
            self.check_reset(refusal, BUDGET_BY_NAME[name].kind, scope)
        else:
            assert refusal.retry_advice is (None if waiting_helps else False)

    def check_reset(self, refusal: errors.WeirError, kind: WindowKind, scope: Scope) -> None:
        """A budget that comes back names its window and waits exactly for the end of it."""
        ends_ms = self.calendars[scope.tenant].ends_ms(kind, self.now.wall_ms)
        assert ("reset_ms" in refusal.members) == (ends_ms is not None)
        if ends_ms is not None:
            assert refusal.members["window"] == self.calendars[scope.tenant].window(kind, self.now.wall_ms)
            assert refusal.members["reset_ms"] == ends_ms - self.now.wall_ms

    def check_limits_in_force(self, scopes: Scopes) -> None:
        rows = self.rows()
        for scope in scopes:
            for limit in fields(Limits):
                row = rows.get((repr(scope.public()), limit.name))
                assert row is None or row["held"] + row["spent"] <= row["limit"]

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.open)))
        hold = self.open.pop(number)
        charge = Charge(
            data.draw(st.integers(0, hold.worst.input_tokens)),
            0,
            data.draw(st.integers(0, hold.worst.output_tokens)),
            data.draw(st.integers(0, hold.worst.cost_microusd)),
            0,
            False,
        )
        self.post(number, hold, charge)

    def post(self, number: int, hold: Hold, charge: Charge) -> None:
        returns = self.book.end(number, charge, self.now.monotonic_ns)
        self.posted.append((hold, charge))
        unused_tokens = hold.worst.tokens - charge.tenant_tokens
        taken = {take.bucket for take in hold.taken.takes}
        for back in returns:
            assert back.bucket in taken
            assert back.limit == "tokens_per_minute"
            assert 0 < back.units <= unused_tokens

    @precondition(lambda self: self.posted)
    @rule(data=st.data())
    def forgive(self, data: st.DataObject) -> None:
        """A settlement that never became durable costs nothing after all."""
        hold, charge = self.posted.pop(data.draw(st.integers(0, len(self.posted) - 1)))
        self.book.forgive(hold.scopes, hold.taken.windows, charge.cost_microusd, charge.tenant_tokens)

    # ── what always holds ────────────────────────────────────────────────────────────────────────────────────────────

    @invariant()
    def both_see_the_same_windows(self) -> None:
        for tenant in TENANTS:
            assert self.book.windows_of(tenant, self.now) == self.calendars[tenant].windows(self.now.wall_ms)

    @invariant()
    def balances_are_the_sums_over_holds_and_charges(self) -> None:
        for scope in SCOPES:
            for window in self.windows(scope):
                assert self.book.balance_of(scope, window) == self.recounted(scope, window)
        for tenant in TENANTS:
            assert self.book.open_holds_of(tenant) == self.in_flight(Scope(tenant))
        assert self.book.open_holds == len(self.open)

    @invariant()
    def every_limit_is_shown_as_set(self) -> None:
        set_limits = {
            (repr(scope.public()), limit.name): getattr(entry, limit.name)
            for scope, entry in self.limits.items()
            for limit in fields(entry)
            if getattr(entry, limit.name) is not None
        }
        assert {key: row["limit"] for key, row in self.rows().items()} == set_limits

    @invariant()
    def each_row_shows_what_is_counted(self) -> None:
        rows = self.rows()
        for scope, entry in self.limits.items():
            if entry.concurrency is not None:
                row = rows[repr(scope.public()), "concurrency"]
                assert (row["held"], row["spent"]) == (self.in_flight(scope), 0)
            windows = dict(zip(WindowKind, self.windows(scope), strict=True))
            for budget in BUDGETS:
                if getattr(entry, budget.name) is not None:
                    row = rows[repr(scope.public()), budget.name]
                    assert (row["held"], row["spent"]) == budget.counted(self.recounted(scope, windows[budget.kind]))

    @invariant()
    def headers_show_the_tightest_bucket(self) -> None:
        rows = self.rows()
        for scopes in CALLERS:
            standing = self.book.standing(scopes, self.now.monotonic_ns)
            for name, shown in zip(MINUTE_LIMITS, (standing.requests, standing.tokens), strict=True):
                mine = [row for scope in scopes if (row := rows.get((repr(scope.public()), name)))]
                assert shown.remaining == min((row["limit"] - row["spent"] for row in mine), default=None)
                assert (shown.limit is None) == (shown.reset_ms is None) == (not mine)

    def teardown(self) -> None:
        """Once quiet: nothing is held, and nothing is in flight."""
        for number, hold in self.open.items():
            self.post(number, hold, NO_CHARGE)
        self.open.clear()
        self.balances_are_the_sums_over_holds_and_charges()
        assert self.book.open_holds == 0
        assert all(self.book.balance_of(scope).held_tokens == 0 for scope in SCOPES)
        assert all(row["held"] == 0 for row in self.rows().values())


TestRecount = Recount.TestCase
TestRecount.settings = settings(deadline=None, max_examples=30, stateful_step_count=40)


# ── one case each ────────────────────────────────────────────────────────────────────────────────────────────────────

CALLER = scopes_of("acme", "web", "k1", "large", ServiceClass.INTERACTIVE)
LEAF = Scope("acme", "web", "k1", "large", ServiceClass.INTERACTIVE)


def test_a_limit_set_later_meets_the_true_figures() -> None:
    """Protects accounts of unlimited scopes: what was spent and held before a limit existed counts against it."""
    book = Book()
    book.take("first", CALLER, Worst(10, 10, 60), ZERO)
    book.end("first", Charge(10, 0, 5, 40, 0, False), 0)
    book.take("second", CALLER, Worst(10, 10, 60), ZERO)
    book.configure({Scope("acme"): Limits(spend_microusd_lifetime=150, concurrency=1)}, {}, 0)
    refusal = book.check(CALLER, Worst(1, 1, 1), ZERO)
    assert isinstance(refusal, errors.ConcurrencyLimited)
    book.configure({Scope("acme"): Limits(spend_microusd_lifetime=150)}, {}, 0)
    refusal = book.check(CALLER, Worst(10, 10, 51), ZERO)
    assert isinstance(refusal, errors.BudgetExhausted)
    assert refusal.members == {
        "scope": {"tenant": "acme"},
        "limit_name": "spend_microusd_lifetime",
        "limit": 150,
        "used": 40,
        "held": 60,
    }
    assert book.check(CALLER, Worst(10, 10, 50), ZERO) is None


def test_a_refusal_names_the_exact_wait() -> None:
    """Protects Retry-After: 60 tokens a minute with all of them taken admit 10 more after ten seconds, rounded up."""
    book = Book()
    book.configure({Scope("acme"): Limits(tokens_per_minute=60)}, {}, 0)
    book.take("hold", CALLER, Worst(30, 30, 0), ZERO)
    refusal = book.check(CALLER, Worst(5, 5, 0), Moment(1, T0_MS))
    assert isinstance(refusal, errors.TokensLimited)
    assert refusal.retry_after_ms == 10_000
    assert refusal.members["reset_ms"] == 60_000
    assert book.check(CALLER, Worst(5, 5, 0), Moment(1 + 10_000 * 1_000_000, T0_MS)) is None


@pytest.mark.parametrize("name", ERROR_OF_LIMIT)
def test_zero_allows_nothing_and_waiting_does_not_help(name: str) -> None:
    """Protects a limit of 0: that limit's own 429 code, no Retry-After, and SDKs are told not to retry."""
    book = Book()
    book.configure({Scope("acme"): Limits(**{name: 0})}, {}, 0)
    refusal = book.check(CALLER, Worst(1, 1, 0), ZERO)
    assert type(refusal) is ERROR_OF_LIMIT[name]
    assert (refusal.retry_after_ms, refusal.retry_advice) == (None, False)
    assert (refusal.members["limit"], refusal.members["used"], refusal.members["held"]) == (0, 0, 0)


@pytest.mark.parametrize(
    ("limits", "name"),
    [
        (Limits(tokens_per_minute=19), "tokens_per_minute"),
        (Limits(spend_microusd_lifetime=19), "spend_microusd_lifetime"),
    ],
)
def test_what_can_never_fit_is_the_callers_fault(limits: Limits, name: str) -> None:
    """Protects callers from waiting in vain: larger than the whole limit is a 400 with both numbers, also when idle."""
    book = Book()
    book.configure({LEAF: limits}, {}, 0)
    refusal = book.check(CALLER, Worst(10, 10, 20), ZERO)
    assert isinstance(refusal, errors.ExceedsLimitCapacity)
    assert refusal.members == {"limit": name, "scope": LEAF.public(), "needed": 20, "capacity": 19}


def test_the_widest_scope_answers_first() -> None:
    """Protects the order of refusals: the tenant's limit is named before its application's and its key's."""
    book = Book()
    for scope in reversed(CALLER):
        book.configure({scope: Limits(concurrency=0) for scope in CALLER[CALLER.index(scope) :]}, {}, 0)
        refusal = book.check(CALLER, Worst(1, 1, 0), ZERO)
        assert refusal is not None
        assert refusal.members["scope"] == scope.public()


def test_a_removed_limit_forgets_and_a_new_one_starts_full() -> None:
    """Protects changes of limits while requests run: an ending after its bucket went away gives nothing to the new one."""
    book = Book()
    book.configure({LEAF: Limits(tokens_per_minute=100)}, {}, 0)
    taken = book.take("hold", CALLER, Worst(50, 50, 0), ZERO)
    assert taken.takes == (BucketTake("web", "k1", "large", "tokens_per_minute", 100, ServiceClass.INTERACTIVE),)
    book.configure({}, {}, 0)
    book.configure({LEAF: Limits(tokens_per_minute=100)}, {}, 0)
    assert book.end("hold", NO_CHARGE, 0) == ()
    assert book.standing(CALLER, 0).tokens == LimitStanding(100, 100, 0)


def test_changing_one_limit_leaves_the_others_alone() -> None:
    """Protects levels: a new number for concurrency gives no tokens back, and a repeated set changes nothing."""
    book = Book()
    for concurrency in (1, 2, 2):
        book.configure({LEAF: Limits(tokens_per_minute=100, concurrency=concurrency)}, {}, 0)
        if concurrency == 1:
            book.take("hold", CALLER, Worst(30, 30, 0), ZERO)
        assert book.standing(CALLER, 0).tokens.remaining == 40


def test_stored_balances_and_takes_are_rebuilt_for_every_scope() -> None:
    """Protects recovery: a leaf's balance counts in each scope around it, and a recent take is missing from its bucket."""
    book = Book()
    book.configure({Scope("acme"): Limits(tokens_per_minute=100, requests_per_minute=10)}, {}, 0)
    book.restore_balance(LEAF, LIFETIME_WINDOW, 70, 30)
    book.restore_balance(Scope("acme", "web", "k2", "large", ServiceClass.BATCH), LIFETIME_WINDOW, 5, 1)
    book.restore_take("acme", BucketTake(None, None, None, "tokens_per_minute", 40), 0)
    book.restore_take("acme", BucketTake("web", None, None, "tokens_per_minute", 60), 0)
    book.restore_take("acme", BucketTake(None, None, None, "tokens_per_hour", 60), 0)
    assert book.balance_of(Scope("acme")) == Balance(spent_microusd=75, spent_tokens=31)
    assert book.balance_of(Scope("acme", alias="large")) == Balance(spent_microusd=75, spent_tokens=31)
    assert book.balance_of(LEAF) == Balance(spent_microusd=70, spent_tokens=30)
    assert book.balance_of(Scope("acme", service_class=ServiceClass.BATCH)) == Balance(spent_microusd=5, spent_tokens=1)
    assert book.standing(CALLER, 0) == Standing(LimitStanding(10, 10, 0), LimitStanding(100, 60, 24_000))
    assert book.standing(CALLER, NANOS_PER_MINUTE).tokens.remaining == 100


def test_windows_that_were_over_at_a_restart_never_come_back() -> None:
    """Protects spent budgets from a clock that is set back after a restart: the balance of an old day was not even read."""
    book = Book()
    day_ms = 86_400_000
    book.resume(T0_MS)
    assert book.windows_of("acme", Moment(0, T0_MS - 5 * day_ms)) == book.windows_of("acme", ZERO)


def test_a_restored_take_is_clamped_to_the_present_rate() -> None:
    """Protects Retry-After after a restart: takes under a higher limit fill the present one and no more."""
    book = Book()
    book.configure({LEAF: Limits(tokens_per_minute=60)}, {}, 0)
    for _ in range(3):
        book.restore_take("acme", BucketTake("web", "k1", "large", "tokens_per_minute", 300, ServiceClass.INTERACTIVE), 0)
    assert book.standing(CALLER, 0).tokens == LimitStanding(60, 0, 60_000)
    assert book.standing(CALLER, NANOS_PER_MINUTE // 2).tokens.remaining == 30


def test_what_was_never_used_is_zero() -> None:
    """Protects reading: an unknown scope has empty balances, no rows, no holds and unlimited headers."""
    book = Book()
    assert book.balance_of(Scope("nobody")) == Balance()
    assert book.accounts_of("nobody", ZERO) == []
    assert book.open_holds_of("nobody") == 0
    assert book.standing(CALLER, 0) == Standing(LimitStanding(), LimitStanding())


@pytest.mark.parametrize("charge", [Charge(10, 0, 11, 0, 0, False), Charge(0, 0, 0, 61, 0, False)])
def test_posting_above_a_hold_is_a_bug(charge: Charge) -> None:
    """Protects budgets: a settlement above what was held ends the task group instead of overspending."""
    book = Book()
    book.take("hold", CALLER, Worst(10, 10, 60), ZERO)
    with pytest.raises(AssertionError):
        book.end("hold", charge, 0)


def test_a_window_that_is_over_is_forgotten() -> None:
    """Protects memory: a leaf keeps the present windows only, once nothing of an older one is held."""
    book, worst = Book(), Worst(10, 10, 5)
    scopes, leaf = CALLERS[0], CALLERS[0][-1]
    for day in range(4):
        taken = book.take(day, scopes, worst, Moment(day, T0_MS + day * 86_400_000))
        book.end(day, NO_CHARGE, day)
        assert set(vars(book)["_leaves"]["acme"][leaf].windows) == set(taken.windows)


def test_what_was_used_is_not_given_back() -> None:
    """Protects per-minute limits: a bucket returns what was taken and not used, and for a whole use nothing at all."""
    book, worst = Book(), Worst(10, 10, 5)
    book.configure({Scope("acme"): Limits(requests_per_minute=6, tokens_per_minute=120)}, {}, 0)
    book.take("whole", CALLERS[0], worst, ZERO)
    assert book.end("whole", Charge(10, 0, 10, 5, 0, False), 0) == ()
    book.take("half", CALLERS[0], worst, ZERO)
    assert book.end("half", Charge(10, 0, 0, 5, 0, False), 0) == (BucketTake(None, None, None, "tokens_per_minute", 10),)


def test_what_is_forgiven_after_its_window_is_over_changes_nothing() -> None:
    """Protects balances: a posted charge that is taken back when its day is gone leaves the present windows as they are."""
    book, worst = Book(), Worst(10, 10, 5)
    scopes = CALLERS[0]
    first = book.take("first", scopes, worst, ZERO)
    book.end("first", Charge(10, 0, 10, 5, 0, False), 0)
    second = book.take("second", scopes, worst, Moment(1, T0_MS + 86_400_000))
    book.end("second", Charge(10, 0, 10, 5, 0, False), 1)
    gone = tuple(window for window in first.windows if window not in second.windows)
    assert gone
    account = vars(book)["_leaves"]["acme"][scopes[-1]]
    before = {window: account.balance(window).spent_microusd for window in second.windows}
    book.forgive(scopes, gone, 5, 20)
    assert {window: account.balance(window).spent_microusd for window in second.windows} == before


def test_what_is_forgiven_is_there_again() -> None:
    """Protects budgets: a charge whose record never became durable counts in no window."""
    book, scopes = Book(), CALLERS[0]
    taken = book.take("hold", scopes, Worst(10, 10, 5), ZERO)
    book.end("hold", Charge(10, 0, 10, 5, 0, False), 0)
    book.forgive(scopes, taken.windows, 5, 20)
    assert book.balance_of(scopes[0]) == Balance()
