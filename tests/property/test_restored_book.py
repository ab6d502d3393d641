"""A book that is rebuilt from what another one held, spent and took answers as that one does, whatever follows."""

from collections import defaultdict
from dataclasses import dataclass, replace

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.property.test_book import CALLER, CALLERS, LIMITS, MINUTE_LIMITS, SCOPES, T0_MS, TENANTS, WORSTS, ZERO

from weir import errors
from weir.core.ledger.book import Book, Taken
from weir.core.ledger.records import BucketTake
from weir.core.metering import NO_CHARGE, Charge, Worst
from weir.core.tenancy import Limits, Scope, Scopes
from weir.core.windows import LIFETIME_WINDOW, FormerZone, Zones
from weir.units import NANOS_PER_MINUTE, NANOS_PER_SECOND, Moment

RECENT_NS = 2 * NANOS_PER_MINUTE
"""Takes that are older have refilled."""
DAY_MS = 86_400_000
LIMIT_SETS = st.dictionaries(st.sampled_from(SCOPES), LIMITS, max_size=4)


@dataclass(frozen=True)
class Hold:
    """An open hold as its record has it."""

    scopes: Scopes
    worst: Worst
    taken: Taken
    at_ns: int


class Records:
    """What the ledger keeps of a book: open holds, balances by leaf and window, and takes net of what they gave back."""

    def __init__(self) -> None:
        self.open: dict[int, Hold] = {}
        self.balances: defaultdict[tuple[Scope, str], list[int]] = defaultdict(lambda: [0, 0])
        self.takes: list[tuple[int, Hold, BucketTake]] = []

    def held(self, number: int, hold: Hold) -> None:
        self.open[number] = hold
        self.takes += [(number, hold, take) for take in hold.taken.takes]

    def ended(self, number: int, charge: Charge, returns: tuple[BucketTake, ...]) -> None:
        hold = self.open.pop(number)
        for window in hold.taken.windows:
            balance = self.balances[hold.scopes[-1], window]
            balance[:] = balance[0] + charge.cost_microusd, balance[1] + charge.tenant_tokens
        back = {each.bucket: each.units for each in returns}
        self.takes = [(maker, made, _net(take, back) if maker == number else take) for maker, made, take in self.takes]

    def rebuilt(self, limits: dict[Scope, Limits], zones: dict[str, Zones], now: Moment) -> Book:
        """A book of a process that starts now."""
        book = Book()
        book.resume(now.wall_ms)
        book.configure(limits, zones, now.monotonic_ns - RECENT_NS)
        for (leaf, window), (microusd, tokens) in self.balances.items():
            book.restore_balance(leaf, window, microusd, tokens)
        for number, hold in self.open.items():
            book.restore_hold(number, hold.scopes, hold.worst, hold.taken.windows)
        for number, hold, take in self.takes:
            if now.monotonic_ns - hold.at_ns < RECENT_NS and take.units:
                maker = number if number in self.open else None
                book.restore_take(hold.scopes[0].tenant, take, hold.at_ns, maker)
        return book


def _net(take: BucketTake, back: dict[tuple[str | None, ...], int]) -> BucketTake:
    return msgspec.structs.replace(take, units=take.units - back.get(take.bucket, 0))


class Successors(RuleBasedStateMachine):
    """Protects tenants and the platform through a takeover: one book goes on, the other is rebuilt again and again.

    While it is rebuilt the per-minute limits stay; afterwards everything may change.
    """

    def __init__(self) -> None:
        super().__init__()
        self.unbroken, self.rebuilt, self.records = Book(), Book(), Records()
        self.now, self.number, self.is_over = ZERO, 0, False
        self.limits: dict[Scope, Limits] = {}
        self.zones = {tenant: Zones() for tenant in TENANTS}

    @property
    def books(self) -> tuple[Book, Book]:
        return self.unbroken, self.rebuilt

    @initialize(limits=LIMIT_SETS)
    def begin(self, limits: dict[Scope, Limits]) -> None:
        self.configure(limits)

    def configure(self, limits: dict[Scope, Limits]) -> None:
        self.limits = limits
        for book in self.books:
            book.configure(limits, self.zones, self.now.monotonic_ns)

    # ── what happens ─────────────────────────────────────────────────────────────────────────────────────────────────

    @precondition(lambda self: not self.is_over)
    @rule()
    def take_over(self) -> None:
        self.rebuilt = self.records.rebuilt(self.limits, self.zones, self.now)

    @precondition(lambda self: not self.is_over)
    @rule(limits=LIMIT_SETS)
    def change_what_is_no_rate(self, limits: dict[Scope, Limits]) -> None:
        """Concurrency and budgets change, come and go, before a takeover."""
        kept = {scope: self.limits.get(scope, Limits()) for scope in {*limits, *self.limits}}
        rates = {scope: {name: getattr(entry, name) for name in MINUTE_LIMITS} for scope, entry in kept.items()}
        self.configure({scope: replace(limits.get(scope, Limits()), **rates[scope]) for scope in sorted(kept, key=repr)})

    @precondition(lambda self: self.number > 6)
    @rule(limits=LIMIT_SETS)
    def change_limits(self, limits: dict[Scope, Limits]) -> None:
        """After the last takeover any limit may change."""
        self.is_over = True
        self.configure(limits)

    @rule(elapsed_ns=st.integers(0, 70 * NANOS_PER_SECOND))
    def wait(self, elapsed_ns: int) -> None:
        self.now = Moment(self.now.monotonic_ns + elapsed_ns, self.now.wall_ms + elapsed_ns // 1_000_000)

    @rule(hours=st.integers(1, 30))
    def set_the_wall_clock_forward(self, hours: int) -> None:
        """A window ends, while what was held in it stays held."""
        self.now = self.now._replace(wall_ms=self.now.wall_ms + hours * 3_600_000)

    @rule(tenant=st.sampled_from(TENANTS), zone=st.sampled_from(["UTC", "Asia/Tokyo", "Pacific/Pago_Pago"]))
    def move(self, tenant: str, zone: str) -> None:
        before = self.zones[tenant]
        self.zones[tenant] = Zones(zone, (*before.former, FormerZone(before.time_zone, self.now.wall_ms)))
        self.configure(self.limits)

    @rule(scopes=st.sampled_from(CALLERS), worst=WORSTS)
    def admit(self, scopes: Scopes, worst: Worst) -> None:
        one, other = (book.check(scopes, worst, self.now) for book in self.books)
        assert shown(one) == shown(other)
        if one is not None:
            return
        self.number += 1
        taken, again = (book.take(self.number, scopes, worst, self.now) for book in self.books)
        assert taken == again
        self.records.held(self.number, Hold(scopes, worst, taken, self.now.monotonic_ns))

    @precondition(lambda self: self.records.open)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.records.open)))
        worst = self.records.open[number].worst
        used = (st.integers(0, most) for most in (worst.input_tokens, worst.output_tokens, worst.cost_microusd))
        input_tokens, output_tokens, microusd = map(data.draw, used)
        self.post(number, Charge(input_tokens, 0, output_tokens, microusd, 0, False))

    def post(self, number: int, charge: Charge) -> None:
        returns, again = (book.end(number, charge, self.now.monotonic_ns) for book in self.books)
        assert returns == again
        self.records.ended(number, charge, returns)

    # ── what always holds ────────────────────────────────────────────────────────────────────────────────────────────

    @invariant()
    def both_show_the_same(self) -> None:
        one, other = self.books
        for scopes in CALLERS:
            assert one.standing(scopes, self.now.monotonic_ns) == other.standing(scopes, self.now.monotonic_ns)
        for tenant in TENANTS:
            windows = one.windows_of(tenant, self.now)
            assert windows == other.windows_of(tenant, self.now)
            rows, again = (sorted(book.accounts_of(tenant, self.now), key=repr) for book in self.books)
            assert rows == again
            assert one.open_holds_of(tenant) == other.open_holds_of(tenant)
            for scope in SCOPES:
                if scope.tenant == tenant:
                    assert [one.balance_of(scope, each) for each in windows] == [
                        other.balance_of(scope, each) for each in windows
                    ]
        assert one.open_holds == other.open_holds == len(self.records.open)

    def teardown(self) -> None:
        """Once quiet: the rebuilt one holds nothing, and has spent the same."""
        for number in list(self.records.open):
            self.post(number, NO_CHARGE)
        self.both_show_the_same()
        assert all(self.rebuilt.balance_of(scope).held_tokens == 0 for scope in SCOPES)


TestSuccessors = Successors.TestCase
TestSuccessors.settings = settings(deadline=None, max_examples=75, stateful_step_count=40)


def shown(refusal: errors.WeirError | None) -> object:
    """A refusal as its caller sees it."""
    if refusal is None:
        return None
    return type(refusal), refusal.detail, refusal.members, refusal.retry_after_ms, refusal.retry_advice


# ── one case each ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_hold_of_a_window_that_is_over_forgets_nothing_of_the_present_one() -> None:
    """Protects budgets at midnight: what was spent today counts, also where a request of yesterday is still held."""
    book, before = Book(), Book().windows_of("acme", ZERO)
    book.resume(T0_MS + DAY_MS)
    book.configure({Scope("acme"): Limits(spend_microusd_per_day=100)}, {}, 0)
    now = Moment(0, T0_MS + DAY_MS)
    for window in book.windows_of("acme", now):
        book.restore_balance(CALLER[-1], window, 70, 30)
    book.restore_hold("of yesterday", CALLER, Worst(10, 10, 60), before)
    assert isinstance(book.check(CALLER, Worst(1, 1, 31), now), errors.BudgetExhausted)
    assert book.balance_of(Scope("acme"), LIFETIME_WINDOW).held_microusd == 60
    book.end("of yesterday", Charge(10, 0, 5, 40, 0, False), 0)
    assert book.check(CALLER, Worst(1, 1, 30), now) is None
    assert book.balance_of(Scope("acme")).spent_microusd == 110
