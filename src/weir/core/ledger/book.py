"""The cell's accounts and how holds change them. The coordinator owns the one book of a cell; nothing else counts.

Invariants.
  1. After every step, for each scope and window: held ≥ 0, spent ≥ 0, and held + spent never rose above a limit in force when
     the hold was taken. A limit lowered later cuts nothing that runs; nothing more is admitted until the sum is below it.
  2. held is exactly the sum over open holds; concurrency is exactly their number. Both return to zero when the last one ends.
  3. A rejected request changes nothing: everything is checked, then everything is taken, with no await between.

Why one book. Counters kept per gateway and merged periodically admit N times the limit; a check followed by an add, with a wait
between, lets parallel requests overspend. Here a decision is one synchronous step of one owner.

Accounts exist for every scope that was ever used, limited or not, so that a limit set later meets the true figure. What is
stored durably is the *leaf* (tenant, application, key, alias): each wider scope is the sum of its leaves, so a settlement
touches one balance, not six. Buckets exist only where a per-minute limit is set; a new one starts full.
"""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from weir import errors
from weir.core.ledger.bucket import Bucket
from weir.core.ledger.records import LIFETIME_WINDOW, BucketTake, WindowTake
from weir.core.metering import Charge, Worst
from weir.core.tenancy import Limits, Scope, Scopes, scopes_of
from weir.units import MicroDollars, Millis, Nanos, Tokens, ceil_ms_from_ns

_CONCURRENCY_RETRY_MS = 1_000
"""No clock says when another request ends; a second is short against a generation and long against a network."""

_MINUTE_LIMITS = ("requests_per_minute", "tokens_per_minute")


@dataclass(slots=True)
class Balance:
    """One budget window of one scope: open holds and posted amounts."""

    held_microusd: MicroDollars = 0
    spent_microusd: MicroDollars = 0
    held_tokens: Tokens = 0
    spent_tokens: Tokens = 0


@dataclass(slots=True)
class Account:
    """Everything counted for one scope."""

    scope: Scope
    limits: Limits = field(default_factory=Limits)
    is_limited: bool = False
    in_flight: int = 0
    windows: dict[str, Balance] = field(default_factory=dict)
    buckets: dict[str, Bucket] = field(default_factory=dict)

    def balance(self, window: str) -> Balance:
        """The balance of a window, created at zero on first use."""
        found = self.windows.get(window)
        if found is None:
            found = self.windows[window] = Balance()
        return found


@dataclass(frozen=True, slots=True)
class Taken:
    """What one hold took, as its record names it."""

    windows: tuple[WindowTake, ...]
    takes: tuple[BucketTake, ...]


@dataclass(frozen=True, slots=True)
class _OpenHold:
    accounts: tuple[Account, ...]
    worst: Worst
    windows: tuple[WindowTake, ...]


@dataclass(frozen=True, slots=True)
class LimitStanding:
    """The tightest per-minute limit of one kind for a caller. None fields: unlimited."""

    limit: int | None = None
    remaining: int | None = None
    reset_ms: Millis | None = None


@dataclass(frozen=True, slots=True)
class Standing:
    """What `x-ratelimit-*` headers show."""

    requests: LimitStanding
    tokens: LimitStanding


class Book:
    """The accounts of a cell. Times are nanoseconds of the coordinator's monotonic clock."""

    def __init__(self) -> None:
        self._accounts: dict[Scope, Account] = {}
        self._accounts_by_leaf: dict[tuple[str | None, ...], tuple[Account, ...]] = {}
        self._holds: dict[Hashable, _OpenHold] = {}

    # ── configuration ────────────────────────────────────────────────────────────────────────────────────────────────

    def set_limits(self, limits: Mapping[Scope, Limits], now_ns: Nanos) -> None:
        """Put a whole set of limits in force; a scope that is absent becomes unlimited. Levels are kept, clamped."""
        for scope, account in self._accounts.items():
            if scope not in limits and not account.limits.is_empty:
                self._set_scope_limits(account, Limits(), now_ns)
        for scope, entry in limits.items():
            self._set_scope_limits(self._account(scope), entry, now_ns)

    def _set_scope_limits(self, account: Account, limits: Limits, now_ns: Nanos) -> None:
        if limits == account.limits:
            return
        for name in _MINUTE_LIMITS:
            rate = getattr(limits, name)
            if rate is None:
                account.buckets.pop(name, None)
            elif (bucket := account.buckets.get(name)) is None:
                account.buckets[name] = Bucket(rate, now_ns)
            elif bucket.rate != rate:
                bucket.change_rate(rate, now_ns)
        account.limits = limits
        account.is_limited = not limits.is_empty

    def _account(self, scope: Scope) -> Account:
        account = self._accounts.get(scope)
        if account is None:
            account = self._accounts[scope] = Account(scope)
        return account

    def _known_accounts(self, scopes: Scopes) -> Iterable[Account]:
        """The accounts of a request's scopes that exist; makes none, because a caller may name an alias that is none."""
        leaf = scopes[-1]
        known = self._accounts_by_leaf.get((leaf.tenant, leaf.application, leaf.key, leaf.alias))
        if known is not None:
            return known
        return [account for scope in scopes if (account := self._accounts.get(scope)) is not None]

    def _accounts_in(self, scopes: Scopes) -> tuple[Account, ...]:
        """The accounts of a request's scopes, remembered by the narrowest one: accounts are never removed."""
        leaf = scopes[-1]
        key = (leaf.tenant, leaf.application, leaf.key, leaf.alias)
        accounts = self._accounts_by_leaf.get(key)
        if accounts is None:
            accounts = self._accounts_by_leaf[key] = tuple(self._account(scope) for scope in scopes)
        return accounts

    # ── recovery ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def restore_balance(self, leaf: Scope, window: str, microusd: MicroDollars, tokens: Tokens) -> None:
        """Add a leaf's stored balance to each scope that contains it. leaf: a scope with all four fields set."""
        for scope in _scopes_of_leaf(leaf):
            balance = self._account(scope).balance(window)
            balance.spent_microusd += microusd
            balance.spent_tokens += tokens

    def restore_take(self, tenant: str, take: BucketTake, at_ns: Nanos) -> None:
        """Replay a recent take, net of what its settlement returned, in order of time; unlimited scopes are skipped."""
        account = self._accounts.get(Scope(tenant, take.application, take.key, take.alias))
        bucket = account.buckets.get(take.limit) if account else None
        if bucket is not None:
            bucket.take(object(), take.units, at_ns)
            bucket.change_rate(bucket.rate, at_ns)  # taken under a higher limit, it counts as under this one: clamped

    # ── the one step of admission ────────────────────────────────────────────────────────────────────────────────────

    def check(self, scopes: Scopes, worst: Worst, now_ns: Nanos) -> errors.WeirError | None:
        """The first limit that refuses this request, widest scope first, or None. Changes nothing."""
        for account in self._known_accounts(scopes):
            if account.is_limited and (refusal := _refusal_of(account, worst, now_ns)) is not None:
                return refusal
        return None

    def take(self, hold: Hashable, scopes: Scopes, worst: Worst, now_ns: Nanos) -> Taken:
        """Hold the worst case in every account. The caller asked `check` in the same step."""
        assert hold not in self._holds
        accounts = self._accounts_in(scopes)
        windows = (WindowTake(LIFETIME_WINDOW, worst.cost_microusd, worst.tokens),)
        takes: list[BucketTake] = []
        for account in accounts:
            account.in_flight += 1
            for window in windows:
                balance = account.balance(window.window)
                balance.held_microusd += window.microusd
                balance.held_tokens += window.tokens
            for name, bucket in account.buckets.items():
                units = 1 if name == "requests_per_minute" else worst.tokens
                bucket.take(hold, units, now_ns)
                takes.append(_bucket_take(account.scope, name, units))
        self._holds[hold] = _OpenHold(accounts, worst, windows)
        return Taken(windows, tuple(takes))

    def end(self, hold: Hashable, charge: Charge, now_ns: Nanos) -> tuple[BucketTake, ...]:
        """Post a charge and give the rest back; a release is a charge of nothing. Returns what buckets got back."""
        opened = self._holds.pop(hold)
        assert charge.cost_microusd <= opened.worst.cost_microusd and charge.tenant_tokens <= opened.worst.tokens
        returns: list[BucketTake] = []
        for account in opened.accounts:
            account.in_flight -= 1
            for window in opened.windows:
                balance = account.balance(window.window)
                balance.held_microusd -= window.microusd
                balance.held_tokens -= window.tokens
                balance.spent_microusd += charge.cost_microusd
                balance.spent_tokens += charge.tenant_tokens
            for name, bucket in account.buckets.items():
                used = 1 if name == "requests_per_minute" else charge.tenant_tokens
                if returned := bucket.settle(hold, used, now_ns):
                    returns.append(_bucket_take(account.scope, name, returned))
        return tuple(returns)

    def forgive(self, scopes: Scopes, microusd: MicroDollars, tokens: Tokens) -> None:
        """Take a posted charge back whose record never became durable. Buckets keep what they gave back."""
        for scope in scopes:
            balance = self._accounts[scope].balance(LIFETIME_WINDOW)
            balance.spent_microusd -= microusd
            balance.spent_tokens -= tokens
            assert balance.spent_microusd >= 0
            assert balance.spent_tokens >= 0

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def open_holds(self) -> int:
        """Number of holds that have not ended."""
        return len(self._holds)

    def open_holds_of(self, tenant: str) -> int:
        """Number of a tenant's holds that have not ended."""
        account = self._accounts.get(Scope(tenant))
        return account.in_flight if account else 0

    def standing(self, scopes: Scopes, now_ns: Nanos) -> Standing:
        """The tightest per-minute limits of these scopes: those with the least remaining."""
        accounts = [account for account in self._known_accounts(scopes) if account.buckets]
        return Standing(*(_tightest(accounts, name, now_ns) for name in _MINUTE_LIMITS))

    def accounts_of(self, tenant: str, now_ns: Nanos) -> list[dict[str, Any]]:
        """A tenant's limited accounts as the management API shows them: one row per scope and limit."""
        rows: list[dict[str, Any]] = []
        for scope, account in self._accounts.items():
            if scope.tenant == tenant:
                rows += _account_rows(scope, account, now_ns)
        return rows

    def balance_of(self, scope: Scope, window: str = LIFETIME_WINDOW) -> Balance:
        """A copy of one balance, zero if the scope was never used."""
        account = self._accounts.get(scope)
        found = account.windows.get(window) if account else None
        return replace(found) if found else Balance()


def _scopes_of_leaf(leaf: Scope) -> Iterable[Scope]:
    assert leaf.application is not None and leaf.key is not None and leaf.alias is not None
    return scopes_of(leaf.tenant, leaf.application, leaf.key, leaf.alias)


def _bucket_take(scope: Scope, limit: str, units: int) -> BucketTake:
    return BucketTake(scope.application, scope.key, scope.alias, limit, units)


def _tightest(accounts: Iterable[Account], name: str, now_ns: Nanos) -> LimitStanding:
    found = [(bucket.remaining(now_ns), bucket.rate, bucket) for account in accounts if (bucket := account.buckets.get(name))]
    if not found:
        return LimitStanding()
    remaining, rate, bucket = min(found, key=lambda entry: entry[:2])
    return LimitStanding(rate, remaining, ceil_ms_from_ns(bucket.full_again_ns(now_ns)))


def _refusal_of(account: Account, worst: Worst, now_ns: Nanos) -> errors.WeirError | None:
    """The first limit of one scope that refuses: requests, tokens, concurrency, spend."""
    scope = account.scope
    for name, error, units in (
        ("requests_per_minute", errors.RequestsLimited, 1),
        ("tokens_per_minute", errors.TokensLimited, worst.tokens),
    ):
        bucket = account.buckets.get(name)
        if bucket is not None and (refusal := _bucket_refusal(scope, name, bucket, error, units, now_ns)):
            return refusal
    return _concurrency_refusal(scope, account) or _spend_refusal(scope, account, worst)


def _bucket_refusal(
    scope: Scope, name: str, bucket: Bucket, error: type[errors.WeirError], units: int, now_ns: Nanos
) -> errors.WeirError | None:
    wait_ns = bucket.wait_ns(units, now_ns)
    if wait_ns == 0 and bucket.rate:
        return None
    if bucket.rate and wait_ns is None:
        return _never_fits(name, scope, units, bucket.rate)
    members = {
        "scope": scope.public(),
        "limit": bucket.rate,
        "used": bucket.used(now_ns),
        "held": 0,
        "reset_ms": ceil_ms_from_ns(bucket.full_again_ns(now_ns)),
    }
    detail = f"The limit of {bucket.rate} {name.replace('_', ' ')} does not admit {units} more now."
    if not bucket.rate:
        return error(detail, members=members, should_retry=False)
    assert wait_ns is not None
    return error(detail, members=members, retry_after_ms=ceil_ms_from_ns(wait_ns))


def _never_fits(name: str, scope: Scope, needed: int, capacity: int) -> errors.WeirError:
    return errors.ExceedsLimitCapacity(
        f"This request needs {needed} of {name}, which allows {capacity} in all.",
        members={"limit": name, "scope": scope.public(), "needed": needed, "capacity": capacity},
    )


def _concurrency_refusal(scope: Scope, account: Account) -> errors.WeirError | None:
    limit = account.limits.concurrency
    if limit is None or account.in_flight < limit:
        return None
    return errors.ConcurrencyLimited(
        f"The limit of {limit} requests in flight is reached.",
        members={
            "scope": scope.public(),
            "limit": limit,
            "used": account.in_flight,
            "held": account.in_flight,
        },
        retry_after_ms=_CONCURRENCY_RETRY_MS if limit else None,
        should_retry=None if limit else False,
    )


def _spend_refusal(scope: Scope, account: Account, worst: Worst) -> errors.WeirError | None:
    limit = account.limits.spend_microusd_lifetime
    if limit is None:
        return None
    balance = account.balance(LIFETIME_WINDOW)
    if limit and worst.cost_microusd > limit:
        return _never_fits("spend_microusd_lifetime", scope, worst.cost_microusd, limit)
    if limit and balance.held_microusd + balance.spent_microusd + worst.cost_microusd <= limit:
        return None
    return errors.BudgetExhausted(
        f"The lifetime budget of {limit} micro-dollars does not cover {worst.cost_microusd} more.",
        members={
            "scope": scope.public(),
            "limit": limit,
            "used": balance.spent_microusd,
            "held": balance.held_microusd,
        },
    )


def _account_rows(scope: Scope, account: Account, now_ns: Nanos) -> Iterable[dict[str, Any]]:
    """One row per limit in force: scope, limit, value, held, spent, resets_at."""
    for name in _MINUTE_LIMITS:
        if (bucket := account.buckets.get(name)) is not None:
            yield _row(scope, name, bucket.rate, 0, bucket.used(now_ns))
    if account.limits.concurrency is not None:
        yield _row(scope, "concurrency", account.limits.concurrency, account.in_flight, 0)
    if account.limits.spend_microusd_lifetime is not None:
        balance = account.balance(LIFETIME_WINDOW)
        name = "spend_microusd_lifetime"
        yield _row(scope, name, account.limits.spend_microusd_lifetime, balance.held_microusd, balance.spent_microusd)


def _row(scope: Scope, name: str, limit: int, held: int, spent: int) -> dict[str, Any]:
    return {
        "scope": scope.public(),
        "limit_name": name,
        "limit": limit,
        "held": held,
        "spent": spent,
        "resets_at": None,
    }
