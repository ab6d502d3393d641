"""One scope's account: what is counted for it, and the first of its limits that refuses a request.

An account knows nothing of other accounts. Its refusals name the scope, the limit and its own figures, never another tenant's,
and say how long to wait only where waiting helps.
"""

from dataclasses import dataclass, field

from weir import errors
from weir.core.ledger.bucket import Bucket
from weir.core.metering import Worst
from weir.core.tenancy import Limits, Scope
from weir.core.windows import Calendar, WindowKind
from weir.units import MicroDollars, Millis, Moment, Nanos, Tokens, ceil_ms_from_ns

CONCURRENCY_RETRY_MS = 1_000
"""No clock says when another request ends; a second is short against a generation and long against a network."""

REQUESTS_PER_MINUTE, TOKENS_PER_MINUTE = MINUTE_LIMITS = ("requests_per_minute", "tokens_per_minute")


@dataclass(frozen=True, slots=True)
class Budget:
    """A limit over a window. unit: what it counts, `micro-dollars` or `tokens`."""

    name: str
    kind: WindowKind
    unit: str

    def counted(self, balance: "Balance") -> tuple[int, int]:
        """(held, spent) in this unit."""
        if self.unit == "tokens":
            return balance.held_tokens, balance.spent_tokens
        return balance.held_microusd, balance.spent_microusd

    def needed(self, worst: Worst) -> int:
        """What a request takes of it."""
        return worst.tokens if self.unit == "tokens" else worst.cost_microusd


BUDGETS = (
    Budget("spend_microusd_per_day", WindowKind.DAY, "micro-dollars"),
    Budget("spend_microusd_per_month", WindowKind.MONTH, "micro-dollars"),
    Budget("spend_microusd_lifetime", WindowKind.LIFETIME, "micro-dollars"),
    Budget("tokens_per_day", WindowKind.DAY, "tokens"),
    Budget("tokens_per_month", WindowKind.MONTH, "tokens"),
    Budget("tokens_lifetime", WindowKind.LIFETIME, "tokens"),
)
_PERIOD = {WindowKind.DAY: "Today's", WindowKind.MONTH: "This month's", WindowKind.LIFETIME: "The lifetime"}


@dataclass(slots=True)
class Balance:
    """One budget window of one scope: open holds and posted amounts."""

    held_microusd: MicroDollars = 0
    spent_microusd: MicroDollars = 0
    held_tokens: Tokens = 0
    spent_tokens: Tokens = 0

    def add(self, other: "Balance") -> None:
        """Count another balance in."""
        self.held_microusd += other.held_microusd
        self.spent_microusd += other.spent_microusd
        self.held_tokens += other.held_tokens
        self.spent_tokens += other.spent_tokens


NO_BALANCE = Balance()


@dataclass(slots=True)
class Account:
    """Everything counted for one scope. budgets: those among its limits that are set, with their amounts."""

    scope: Scope
    limits: Limits = field(default_factory=Limits)
    is_limited: bool = False
    in_flight: int = 0
    windows: dict[str, Balance] = field(default_factory=dict)
    buckets: dict[str, Bucket] = field(default_factory=dict)
    budgets: tuple[tuple[Budget, int], ...] = ()

    def balance(self, window: str) -> Balance:
        """The balance of a window for reading; one that was never used is all zero."""
        return self.windows.get(window, NO_BALANCE)

    def add(self, other: "Account") -> None:
        """Count in what a narrower scope counted."""
        self.in_flight += other.in_flight
        for window, balance in other.windows.items():
            self.windows.setdefault(window, Balance()).add(balance)

    # ── limits ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def set_limits(self, limits: Limits, now_ns: Nanos) -> None:
        """Put limits in force; a bucket that stays keeps its level, clamped, and a new one starts full."""
        rates = ((name, getattr(limits, name)) for name in MINUTE_LIMITS)
        self.buckets = {name: self._bucket(name, rate, now_ns) for name, rate in rates if rate is not None}
        self.limits = limits
        self.is_limited = not limits.is_empty
        amounts = ((budget, getattr(limits, budget.name)) for budget in BUDGETS)
        self.budgets = tuple((budget, amount) for budget, amount in amounts if amount is not None)

    def _bucket(self, name: str, rate: int, now_ns: Nanos) -> Bucket:
        bucket = self.buckets.get(name)
        if bucket is None:
            return Bucket(rate, now_ns)
        if bucket.rate != rate:
            bucket.change_rate(rate, now_ns)
        return bucket

    # ── holds ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def hold(self, windows: tuple[str, ...], microusd: MicroDollars, tokens: Tokens) -> None:
        """One more request in flight, with its worst case held in each window."""
        self.in_flight += 1
        counted = self.windows
        for window in windows:
            balance = counted.get(window)
            if balance is None:
                self._forget_past(windows)
                balance = counted[window] = Balance()
            balance.held_microusd += microusd
            balance.held_tokens += tokens

    def _forget_past(self, present: tuple[str, ...]) -> None:
        """Drop windows that are over and hold nothing: nothing is admitted against them any more. Every hold has tokens."""
        for name in [name for name, balance in self.windows.items() if name not in present and not balance.held_tokens]:
            del self.windows[name]

    def end(self, windows: tuple[str, ...], worst: Worst, spent_microusd: MicroDollars, spent_tokens: Tokens) -> None:
        """A hold ended: give it back and count what was spent."""
        self.in_flight -= 1
        held_microusd, held_tokens = worst.cost_microusd, worst.tokens
        for window in windows:
            balance = self.windows[window]
            balance.held_microusd -= held_microusd
            balance.held_tokens -= held_tokens
            balance.spent_microusd += spent_microusd
            balance.spent_tokens += spent_tokens

    def spend(self, window: str, microusd: MicroDollars, tokens: Tokens) -> None:
        """Count spent amounts in, or out where they are negative."""
        balance = self.windows.setdefault(window, Balance())
        balance.spent_microusd += microusd
        balance.spent_tokens += tokens
        assert balance.spent_microusd >= 0 and balance.spent_tokens >= 0

    # ── refusals ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def refusal(self, worst: Worst, calendar: Calendar, now: Moment) -> errors.WeirError | None:
        """The first limit that refuses: requests, tokens, concurrency, budgets. Changes nothing."""
        if self.buckets and (refused := self._minute_refusal(worst, now.monotonic_ns)) is not None:
            return refused
        limit = self.limits.concurrency
        if limit is not None and self.in_flight >= limit:
            return self._concurrency_refusal(limit)
        for budget, amount in self.budgets:
            held, spent = budget.counted(self.balance(calendar.window(budget.kind, now.wall_ms)))
            if not amount or held + spent + budget.needed(worst) > amount:
                return self._budget_refusal(budget, amount, worst, calendar, now.wall_ms)
        return None

    def _minute_refusal(self, worst: Worst, now_ns: Nanos) -> errors.WeirError | None:
        for name, bucket in self.buckets.items():
            units = 1 if name == REQUESTS_PER_MINUTE else worst.tokens
            wait_ns = bucket.wait_ns(units, now_ns)
            if wait_ns == 0 and bucket.rate:
                continue
            if bucket.rate and wait_ns is None:
                return self._never_fits(name, units, bucket.rate)
            return self._bucket_refusal(name, bucket, units, wait_ns, now_ns)
        return None

    def _bucket_refusal(self, name: str, bucket: Bucket, units: int, wait_ns: Nanos | None, now_ns: Nanos) -> errors.WeirError:
        error = errors.RequestsLimited if name == REQUESTS_PER_MINUTE else errors.TokensLimited
        members = self._figures(name, bucket.rate, bucket.used(now_ns), 0)
        detail = f"The limit of {bucket.rate} {name.replace('_', ' ')} does not admit {units} more now."
        if not bucket.rate:
            return error(detail, members=members, should_retry=False)
        assert wait_ns is not None
        members["reset_ms"] = ceil_ms_from_ns(bucket.full_again_ns(now_ns))
        return error(detail, members=members, retry_after_ms=ceil_ms_from_ns(wait_ns))

    def _concurrency_refusal(self, limit: int) -> errors.WeirError:
        return errors.ConcurrencyLimited(
            f"The limit of {limit} requests in flight is reached.",
            members=self._figures("concurrency", limit, self.in_flight, self.in_flight),
            retry_after_ms=CONCURRENCY_RETRY_MS if limit else None,
            should_retry=None if limit else False,
        )

    def _budget_refusal(
        self, budget: Budget, amount: int, worst: Worst, calendar: Calendar, wall_ms: Millis
    ) -> errors.WeirError:
        needed = budget.needed(worst)
        if amount and needed > amount:
            return self._never_fits(budget.name, needed, amount)
        window, ends_ms = calendar.window(budget.kind, wall_ms), calendar.ends_ms(budget.kind, wall_ms)
        held, spent = budget.counted(self.balance(window))
        members = self._figures(budget.name, amount, spent, held)
        reset_ms: Millis | None = None
        if ends_ms is not None:
            members |= {"window": window, "reset_ms": (reset_ms := max(1, ends_ms - wall_ms))}
        return errors.BudgetExhausted(
            f"{_PERIOD[budget.kind]} budget of {amount} {budget.unit} does not cover {needed} more.",
            members=members,
            retry_after_ms=reset_ms if amount else None,
        )

    def _never_fits(self, name: str, needed: int, capacity: int) -> errors.WeirError:
        return errors.ExceedsLimitCapacity(
            f"This request needs {needed} of {name}, which allows {capacity} in all.",
            members={"limit": name, "scope": self.scope.public(), "needed": needed, "capacity": capacity},
        )

    def _figures(self, name: str, limit: int, used: int, held: int) -> dict[str, object]:
        return {"scope": self.scope.public(), "limit_name": name, "limit": limit, "used": used, "held": held}
