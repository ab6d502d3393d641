"""The cell's accounts and how holds change them. The coordinator owns the one book of a cell; nothing else counts.

Invariants.
  1. After every step, for each scope and window: held ≥ 0, spent ≥ 0, and held + spent never rose above a limit in force when
     the hold was taken. A limit lowered later cuts nothing that runs; nothing more is admitted until the sum is below it.
  2. held is exactly the sum over open holds; concurrency is exactly their number. Both return to zero when the last one ends.
  3. A rejected request changes nothing: everything is checked, then everything is taken, with no await between.

Why one book. Counters kept per gateway and merged periodically admit N times the limit; a check followed by an add, with a wait
between, lets parallel requests overspend. Here a decision is one synchronous step of one owner.

What is counted always is the *leaf* (tenant, application, key, alias, service class); a wider scope has an account only while
it has limits, and that one begins as the sum of its leaves, so that a limit set later meets the true figure. Buckets exist only
where a per-minute limit is set; a new one starts full.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, TypeAlias

import msgspec

from weir import errors
from weir.core.ledger.account import BUDGETS, MINUTE_LIMITS, REQUESTS_PER_MINUTE, TOKENS_PER_MINUTE, Account, Balance
from weir.core.ledger.bucket import Bucket
from weir.core.ledger.records import BucketTake
from weir.core.metering import Charge, Worst
from weir.core.tenancy import UNLIMITED, Limits, Scope, Scopes, scopes_of
from weir.core.windows import LIFETIME_WINDOW, Calendar, Zones
from weir.units import MicroDollars, Millis, Moment, Nanos, Tokens, ceil_ms_from_ns

_Leaf: TypeAlias = tuple[str | None, ...]


class Taken(msgspec.Struct, frozen=True, gc=False):
    """What one hold took, as its record names it. windows: those its worst case is held in."""

    windows: tuple[str, ...]
    takes: tuple[BucketTake, ...]


class _OpenHold(msgspec.Struct, frozen=True, gc=False):
    scopes: Scopes
    worst: Worst
    windows: tuple[str, ...]


class LimitStanding(msgspec.Struct, frozen=True, gc=False):
    """The tightest per-minute limit of one kind for a caller. None fields: unlimited."""

    limit: int | None = None
    remaining: int | None = None
    reset_ms: Millis | None = None


class Standing(msgspec.Struct, frozen=True, gc=False):
    """What `x-ratelimit-*` headers show."""

    requests: LimitStanding
    tokens: LimitStanding


class Book:
    """The accounts of a cell. Durations are nanoseconds of the coordinator's monotonic clock, windows follow its wall clock."""

    def __init__(self) -> None:
        self._leaves: dict[str, dict[Scope, Account]] = defaultdict(dict)
        self._limited: dict[Scope, Account] = {}
        self._paths: dict[_Leaf, tuple[Account, ...]] = {}
        self._calendars: dict[str, Calendar] = {}
        self._zones: Mapping[str, Zones] = {}
        self._resumed_ms: Millis | None = None
        self._holds: dict[Hashable, _OpenHold] = {}

    # ── configuration ────────────────────────────────────────────────────────────────────────────────────────────────

    def configure(self, limits: Mapping[Scope, Limits], zones: Mapping[str, Zones], now_ns: Nanos) -> None:
        """Put a whole set of limits and time zones (by tenant) in force; a scope that is absent becomes unlimited.

        Levels of buckets are kept, clamped. A time zone takes effect at its tenant's next windows.
        """
        self._zones = zones
        for tenant, calendar in self._calendars.items():
            calendar.set_zones(zones.get(tenant, Zones()))
        for scope, entry in _changes(self._limited, limits):
            account = self._limited.get(scope)
            if account is None and not entry.is_empty:
                account = self._limited[scope] = self._new_account(scope)
                self._paths.clear()
            if account is not None and account.limits != entry:
                account.set_limits(entry, now_ns)
            if account is not None and entry.is_empty:
                del self._limited[scope]
                self._paths.clear()

    def _new_account(self, scope: Scope) -> Account:
        """The account of a scope as if it had always been there."""
        if _is_leaf(scope):
            return self._leaf(scope)
        account = Account(scope)
        for leaf, counted in self._leaves[scope.tenant].items():
            if _contains(scope, leaf):
                account.add(counted)
        return account

    def _leaf(self, scope: Scope) -> Account:
        leaves = self._leaves[scope.tenant]
        account = leaves.get(scope)
        if account is None:
            account = leaves[scope] = Account(scope)
        return account

    def _limited_among(self, scopes: Scopes) -> Iterable[Account]:
        """The accounts that may refuse a request, widest first; makes none, because a caller may name an alias that is none."""
        leaf = scopes[-1]
        known = self._paths.get((leaf.tenant, leaf.application, leaf.key, leaf.alias, leaf.service_class))
        if known is not None:
            return known
        return [account for scope in scopes if (account := self._limited.get(scope)) is not None]

    def _path(self, scopes: Scopes) -> tuple[Account, ...]:
        """The accounts that a request counts in: those with limits, widest first, and its leaf."""
        leaf = scopes[-1]
        key = (leaf.tenant, leaf.application, leaf.key, leaf.alias, leaf.service_class)
        path = self._paths.get(key)
        if path is None:
            wider = [account for scope in scopes[:-1] if (account := self._limited.get(scope)) is not None]
            path = self._paths[key] = (*wider, self._leaf(leaf))
        return path

    def _calendar(self, tenant: str) -> Calendar:
        calendar = self._calendars.get(tenant)
        if calendar is None:
            calendar = self._calendars[tenant] = Calendar(self._zones.get(tenant, Zones()))
            if self._resumed_ms is not None:
                calendar.windows(self._resumed_ms)
        return calendar

    # ── recovery ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def resume(self, wall_ms: Millis) -> None:
        """The wall clock at a restart: windows that were over then were not read from the store, so none of them comes back."""
        self._resumed_ms = wall_ms

    def restore_balance(self, leaf: Scope, window: str, microusd: MicroDollars, tokens: Tokens) -> None:
        """Count a leaf's stored balance in. leaf: a scope with every field set."""
        self._calendar(leaf.tenant).remember(window)
        for account in self._path(_scopes_of_leaf(leaf)):
            account.spend(window, microusd, tokens)

    def restore_take(self, tenant: str, take: BucketTake, at_ns: Nanos, hold: Hashable | None = None) -> None:
        """Replay a recent take, net of what its settlement returned, in order of time; unlimited scopes are skipped.

        hold: the one that made it, if that is restored too.
        """
        account = self._limited.get(Scope(tenant, take.application, take.key, take.alias, take.service_class))
        bucket = account.buckets.get(take.limit) if account else None
        if bucket is not None:
            bucket.restore(take.units, at_ns, hold)

    def restore_hold(self, hold: Hashable, scopes: Scopes, worst: Worst, windows: tuple[str, ...]) -> None:
        """Hold again what an earlier process held, in the same windows; what it took of buckets is replayed apart."""
        assert hold not in self._holds
        calendar = self._calendar(scopes[-1].tenant)
        for window in windows:
            calendar.remember(window)
        for account in self._path(scopes):
            for window in windows:  # if they are over, what was restored of the present ones is not to be forgotten for them
                account.spend(window, 0, 0)
            account.hold(windows, worst.cost_microusd, worst.tokens)
        self._holds[hold] = _OpenHold(scopes, worst, windows)

    # ── the one step of admission ────────────────────────────────────────────────────────────────────────────────────

    def check(self, scopes: Scopes, worst: Worst, now: Moment) -> errors.WeirError | None:
        """The first limit that refuses this request, widest scope first, or None. Changes nothing."""
        for account in self._limited_among(scopes):
            if account.is_limited:
                refusal = account.refusal(worst, self._calendar(scopes[-1].tenant), now)
                if refusal is not None:
                    return refusal
        return None

    def take(self, hold: Hashable, scopes: Scopes, worst: Worst, now: Moment) -> Taken:
        """Hold the worst case in every account. The caller asked `check` in the same step."""
        assert hold not in self._holds
        windows = self.windows_of(scopes[-1].tenant, now)
        takes: list[BucketTake] = []
        tokens = worst.tokens
        for account in self._path(scopes):
            account.hold(windows, worst.cost_microusd, tokens)
            for name, bucket in account.buckets.items():
                units = 1 if name == REQUESTS_PER_MINUTE else tokens
                bucket.take(hold, units, now.monotonic_ns)
                takes.append(_bucket_take(account.scope, name, units))
        self._holds[hold] = _OpenHold(scopes, worst, windows)
        return Taken(windows, tuple(takes))

    def end(self, hold: Hashable, charge: Charge, now_ns: Nanos) -> tuple[BucketTake, ...]:
        """Post a charge and give the rest back; a release is a charge of nothing. Returns what buckets got back."""
        opened = self._holds.pop(hold)
        tokens = charge.tenant_tokens
        assert charge.cost_microusd <= opened.worst.cost_microusd and tokens <= opened.worst.tokens
        returns: list[BucketTake] = []
        for account in self._path(opened.scopes):
            account.end(opened.windows, opened.worst, charge.cost_microusd, tokens)
            for name, bucket in account.buckets.items():
                used = 1 if name == REQUESTS_PER_MINUTE else tokens
                if returned := bucket.settle(hold, used, now_ns):
                    returns.append(_bucket_take(account.scope, name, returned))
        return tuple(returns)

    def forgive(self, scopes: Scopes, windows: tuple[str, ...], microusd: MicroDollars, tokens: Tokens) -> None:
        """Take a posted charge back whose record never became durable. Buckets keep what they gave back."""
        for account in self._path(scopes):
            for window in windows:
                if window in account.windows:  # one that is over may be forgotten
                    account.spend(window, -microusd, -tokens)

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def open_holds(self) -> int:
        """Number of holds that have not ended."""
        return len(self._holds)

    def open_holds_of(self, tenant: str) -> int:
        """Number of a tenant's holds that have not ended."""
        return sum(leaf.in_flight for leaf in self._leaves_of(tenant))

    def _leaves_of(self, tenant: str) -> Iterable[Account]:
        return self._leaves[tenant].values() if tenant in self._leaves else ()

    def windows_of(self, tenant: str, now: Moment) -> tuple[str, ...]:
        """The budget windows that a tenant's holds count in now: day, month, lifetime."""
        return self._calendar(tenant).windows(now.wall_ms)

    def standing(self, scopes: Scopes, now_ns: Nanos) -> Standing:
        """The tightest per-minute limits of these scopes: those with the least remaining."""
        accounts = [account for account in self._limited_among(scopes) if account.buckets]
        return Standing(*(_tightest(accounts, name, now_ns) for name in (REQUESTS_PER_MINUTE, TOKENS_PER_MINUTE)))

    def accounts_of(self, tenant: str, now: Moment) -> list[dict[str, Any]]:
        """A tenant's limited accounts as the management API shows them: one row per scope and limit."""
        calendar = self._calendar(tenant)
        accounts = [account for scope, account in self._limited.items() if scope.tenant == tenant]
        return [row for account in accounts for row in _account_rows(account, calendar, now)]

    def balance_of(self, scope: Scope, window: str = LIFETIME_WINDOW) -> Balance:
        """One balance, summed over the leaves of a scope; zero if it was never used."""
        total = Balance()
        for leaf in self._leaves_of(scope.tenant):
            if _contains(scope, leaf.scope):
                total.add(leaf.balance(window))
        return total


def _changes(limited: Mapping[Scope, Account], limits: Mapping[Scope, Limits]) -> list[tuple[Scope, Limits]]:
    """What may differ from what is in force; what is absent as unlimited.

    Entries that are the objects in force, in their order, are passed by without a look-up: 100,000 take milliseconds.
    """
    changes: list[tuple[Scope, Limits]] = []
    entries = iter(limits.items())
    entry = next(entries, None)
    for scope, account in limited.items():
        if entry is not None and entry[0] is scope:
            if entry[1] is not account.limits:
                changes.append(entry)
            entry = next(entries, None)
        elif scope not in limits:
            changes.append((scope, UNLIMITED))
    return changes if entry is None else [*changes, entry, *entries]


def _is_leaf(scope: Scope) -> bool:
    return None not in (scope.application, scope.key, scope.alias, scope.service_class)


def _contains(scope: Scope, leaf: Scope) -> bool:
    """Whether a leaf of the same tenant lies in a scope."""
    return (
        scope.application in (None, leaf.application)
        and scope.key in (None, leaf.key)
        and scope.alias in (None, leaf.alias)
        and scope.service_class in (None, leaf.service_class)
    )


def _scopes_of_leaf(leaf: Scope) -> Scopes:
    assert leaf.application is not None and leaf.key is not None
    assert leaf.alias is not None and leaf.service_class is not None
    return scopes_of(leaf.tenant, leaf.application, leaf.key, leaf.alias, leaf.service_class)


def _bucket_take(scope: Scope, limit: str, units: int) -> BucketTake:
    return BucketTake(scope.application, scope.key, scope.alias, limit, units, scope.service_class)


def _tightest(accounts: Iterable[Account], name: str, now_ns: Nanos) -> LimitStanding:
    tightest: Bucket | None = None
    remaining = 0
    for account in accounts:
        if (bucket := account.buckets.get(name)) is not None:
            left = bucket.remaining(now_ns)
            if tightest is None or (left, bucket.rate) < (remaining, tightest.rate):
                tightest, remaining = bucket, left
    if tightest is None:
        return LimitStanding()
    return LimitStanding(tightest.rate, remaining, ceil_ms_from_ns(tightest.full_again_ns(now_ns)))


def _account_rows(account: Account, calendar: Calendar, now: Moment) -> Iterable[dict[str, Any]]:
    """One row per limit in force: scope, limit, value, held, spent, resets_at_ms (wall clock, None without one)."""
    scope = account.scope
    for name in MINUTE_LIMITS:
        if (bucket := account.buckets.get(name)) is not None:
            full_ms = now.wall_ms + ceil_ms_from_ns(bucket.full_again_ns(now.monotonic_ns))
            yield _row(scope, name, bucket.rate, (0, bucket.used(now.monotonic_ns)), full_ms)
    if account.limits.concurrency is not None:
        yield _row(scope, "concurrency", account.limits.concurrency, (account.in_flight, 0), None)
    for budget in BUDGETS:
        limit = getattr(account.limits, budget.name)
        if limit is not None:
            counted = budget.counted(account.balance(calendar.window(budget.kind, now.wall_ms)))
            yield _row(scope, budget.name, limit, counted, calendar.ends_ms(budget.kind, now.wall_ms))


def _row(scope: Scope, name: str, limit: int, counted: tuple[int, int], resets_at_ms: Millis | None) -> dict[str, Any]:
    held, spent = counted
    return {
        "scope": scope.public(),
        "limit_name": name,
        "limit": limit,
        "held": held,
        "spent": spent,
        "resets_at_ms": resets_at_ms,
    }
