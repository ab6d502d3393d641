"""Money and limits counted a second time, from what clients asked, what was decided about it, and what is durable.

It never asks the book. At each admission it asserts that no limit in force is exceeded, in the windows of its own calendar; at
each refusal that the named limit does refuse, with true figures and a true wait; at each end that the tenant pays what the
table of endings says, at the price that was in force when the hold was taken.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from weir.core.ledger.records import BucketTake, EndRecord, HoldRecord, SettleRecord
from weir.core.metering import Price
from weir.core.registry.snapshot import Snapshot
from weir.core.tenancy import Limits, Scope, Scopes, scopes_of
from weir.messages import Acquire, GenerationRecord, Rejected
from weir.ports import Clock
from weir.sim.naive_bucket import NaiveBucket
from weir.sim.naive_calendar import DAY, LIFETIME, MONTH, NaiveCalendar
from weir.sim.payers import cost_of, paid_tokens, price_for
from weir.units import MILLION, MicroDollars, Millis, Moment, Tokens, ceil_div, ceil_ms_from_ns, ns_from_ms

_BUDGETS = {
    "spend_microusd_per_day": DAY,
    "spend_microusd_per_month": MONTH,
    "spend_microusd_lifetime": LIFETIME,
    "tokens_per_day": DAY,
    "tokens_per_month": MONTH,
    "tokens_lifetime": LIFETIME,
}
_TAKES_READ_MS: Millis = 120_000
_MINUTE = {"requests_per_minute": "requests_limited", "tokens_per_minute": "tokens_limited"}


@dataclass(slots=True)
class Amounts:
    """What is held and spent in one scope and window: micro-dollars and tokens."""

    held_microusd: MicroDollars = 0
    spent_microusd: MicroDollars = 0
    held_tokens: Tokens = 0
    spent_tokens: Tokens = 0

    def of(self, limit: str) -> tuple[int, int]:
        """(held, spent) as this limit counts it."""
        if limit.startswith("tokens"):
            return self.held_tokens, self.spent_tokens
        return self.held_microusd, self.spent_microusd


@dataclass(slots=True)
class Counted:
    """One admitted execution. price: that in force at its hold, for its class; posted: what counts as spent for it now.

    returns: by scope and limit, what its end gave back to buckets that are followed exactly.
    """

    owner: Hashable
    scopes: Scopes
    price: Price
    windows: tuple[str, ...]
    held_microusd: MicroDollars
    held_tokens: Tokens
    posted: tuple[MicroDollars, Tokens] = (0, 0)
    is_open: bool = True
    returns: dict[tuple[Scope, str], int] = field(default_factory=dict)


class Tally:
    """The figures of one world. changed: (scope, limit) pairs that were changed at any time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._snapshot = Snapshot()
        self._amounts: defaultdict[tuple[Scope, str], Amounts] = defaultdict(Amounts)
        self._in_flight: defaultdict[Scope, int] = defaultdict(int)
        self._calendars: dict[str, NaiveCalendar] = {}
        self._buckets: dict[tuple[Scope, str], NaiveBucket] = {}
        self._doubtful: set[Hashable] = set()
        self._opened = Moment(0, 0)
        self.changed: set[tuple[Scope, str]] = set()

    # ── configuration and processes ──────────────────────────────────────────────────────────────────────────────────

    def publish(self, snapshot: Snapshot) -> None:
        """A configuration comes in force. A bucket that is new starts full; one whose rate changed is not followed exactly."""
        before, self._snapshot = self._snapshot.limits, snapshot
        for name, calendar in self._calendars.items():
            calendar.follow(snapshot.tenants[name])
        for scope in {*before, *snapshot.limits}:
            for limit in (*_BUDGETS, *_MINUTE, "concurrency"):
                old, new = (getattr(limits.get(scope, Limits()), limit) for limits in (before, snapshot.limits))
                if old != new:
                    self.changed.add((scope, limit))
                    self._change_bucket((scope, limit), old, new)

    def _change_bucket(self, key: tuple[Scope, str], old: int | None, new: int | None) -> None:
        self._buckets.pop(key, None)
        if key[1] in _MINUTE and old is None and new:
            self._buckets[key] = NaiveBucket(new)

    def first(self, snapshot: Snapshot) -> None:
        """The configuration that the world starts with, on an empty ledger."""
        self.publish(snapshot)
        self.changed.clear()

    def opened(self) -> None:
        """A process reads the ledger at this instant: what happens to clocks later does not concern what it read."""
        self._opened = Moment(self._clock.monotonic_ns(), self._clock.wall_ms())

    def begin(self, snapshot: Snapshot, ended: Iterable[tuple[HoldRecord, EndRecord]]) -> None:
        """A process starts on what is durable: nothing is held, and the ends say what is spent and what buckets took."""
        self.publish(snapshot)
        self._amounts.clear()
        self._in_flight.clear()
        self._doubtful.clear()
        self._calendars = {name: NaiveCalendar(tenant) for name, tenant in snapshot.tenants.items()}
        for calendar in self._calendars.values():
            calendar.windows(self._opened.wall_ms)
        self._buckets = {
            (scope, limit): NaiveBucket(rate)
            for scope, entry in snapshot.limits.items()
            for limit in _MINUTE
            if (rate := getattr(entry, limit))
        }
        for hold, end in ended:
            self._restore_takes(hold, end)
            if isinstance(end, SettleRecord):
                tokens = end.tenant_input_tokens + end.tenant_output_tokens
                if end.cost_microusd or tokens:
                    self._calendars[hold.id.tenant].remember(hold.windows)
                for scope in scopes_of(hold.id.tenant, hold.application, hold.key, hold.alias, hold.service_class):
                    self._spend(scope, hold.windows, end.cost_microusd, tokens)

    def _restore_takes(self, hold: HoldRecord, end: EndRecord) -> None:
        """What a hold of the last two minutes took, less what it gave back; of one from the future, as if it were new."""
        age_ms = max(0, self._opened.wall_ms - hold.at_ms)
        if age_ms > _TAKES_READ_MS:
            return
        returned = {_bucket_of(hold.id.tenant, back): back.units for back in end.returns}
        for take in hold.takes:
            bucket = self._buckets.get(_bucket_of(hold.id.tenant, take))
            units = take.units - returned.get(_bucket_of(hold.id.tenant, take), 0)
            if bucket is not None and units > 0:
                bucket.restore(hold.id, units, self._opened.monotonic_ns - ns_from_ms(age_ms))

    def look_at_clock(self) -> None:
        """The present windows of every tenant were seen."""
        for calendar in self._calendars.values():
            calendar.windows(self._clock.wall_ms())

    def _spend(self, scope: Scope, windows: Iterable[str], microusd: MicroDollars, tokens: Tokens) -> None:
        for window in windows:
            amounts = self._amounts[scope, window]
            amounts.spent_microusd += microusd
            amounts.spent_tokens += tokens

    # ── admissions ───────────────────────────────────────────────────────────────────────────────────────────────────

    def admit(self, owner: Hashable, acquire: Acquire) -> Counted:
        """An admission: within every limit in force at this moment. Returns what it took."""
        counted = self._asked(owner, acquire)
        for scope, limit, most in self._limits(counted.scopes):
            assert not self._refuses(counted, scope, limit, most), f"{owner}: {limit} of {scope} is exceeded"
        now_ns = self._clock.monotonic_ns()
        for scope in counted.scopes:
            self._in_flight[scope] += 1
            for window in counted.windows:
                amounts = self._amounts[scope, window]
                amounts.held_microusd += counted.held_microusd
                amounts.held_tokens += counted.held_tokens
        for (_, limit), bucket in self._buckets_of(counted.scopes):
            bucket.take(owner, _units(limit, counted.held_tokens), now_ns)
        return counted

    def _asked(self, owner: Hashable, acquire: Acquire) -> Counted:
        price = price_for(self._snapshot.revisions[acquire.revision].price, acquire.service_class)
        dearest = max(price.input_microusd, price.cached_input_microusd)
        worst = acquire.input_tokens * dearest + acquire.max_output_tokens * price.output_microusd
        return Counted(
            owner=owner,
            scopes=scopes_of(acquire.tenant, acquire.application, acquire.key, acquire.alias, acquire.service_class),
            price=price,
            windows=self._calendars[acquire.tenant].windows(self._clock.wall_ms()),
            held_microusd=ceil_div(acquire.choices * worst, MILLION),
            held_tokens=acquire.choices * (acquire.input_tokens + acquire.max_output_tokens),
        )

    def _limits(self, scopes: Scopes) -> Iterator[tuple[Scope, str, int]]:
        for scope in scopes:
            limits = self._snapshot.limits.get(scope, Limits())
            for limit in (*_MINUTE, "concurrency", *_BUDGETS):
                most: int | None = getattr(limits, limit)
                if most is not None:
                    yield scope, limit, most

    def _buckets_of(self, scopes: Scopes) -> Iterator[tuple[tuple[Scope, str], NaiveBucket]]:
        for key, bucket in self._buckets.items():
            if key[0] in scopes:
                yield key, bucket

    def _refuses(self, asked: Counted, scope: Scope, limit: str, most: int) -> bool:
        """Whether a limit refuses now. What cannot be said of a bucket is said to pass."""
        if most == 0:
            return True
        if limit == "concurrency":
            return self._in_flight[scope] >= most
        if limit in _MINUTE:
            bucket, units = self._buckets.get((scope, limit)), _units(limit, asked.held_tokens)
            return units > most or (bucket is not None and bucket.wait_ns(units, self._clock.monotonic_ns()) > 0)
        held, spent = self._amounts[scope, asked.windows[_BUDGETS[limit]]].of(limit)
        return held + spent + _needed(asked, limit) > most

    # ── refusals ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def refuse(self, acquire: Acquire, rejected: Rejected) -> None:
        """A refusal by a limit: one of the caller's own, which does refuse, with true figures and the exact wait."""
        name = rejected.members.get("limit_name" if rejected.code != "exceeds_limit_capacity" else "limit")
        if name is None:
            return
        asked, scope = self._asked(None, acquire), Scope(**rejected.members["scope"])
        most = next((most for where, limit, most in self._limits(asked.scopes) if (where, limit) == (scope, name)), None)
        assert most is not None, f"{name} of {scope} refuses and is no limit of the caller"
        if rejected.code == "exceeds_limit_capacity":
            needed = _units(name, asked.held_tokens) if name in _MINUTE else _needed(asked, name)
            assert needed > most > 0 and (rejected.members["needed"], rejected.members["capacity"]) == (needed, most)
            assert rejected.retry_after_ms is None
            return
        assert rejected.members["limit"] == most
        assert rejected.retry_after_ms is None if most == 0 else True, "waiting does not help against nothing"
        if not self._is_doubtful(acquire.tenant):
            self._check_figures(asked, scope, name, rejected)

    def _is_doubtful(self, tenant: str) -> bool:
        """Whether an answer of this tenant was dropped whose settlement's outcome is the store's to decide."""
        return any(isinstance(owner, tuple) and owner[0] == tenant for owner in self._doubtful)

    def _check_figures(self, asked: Counted, scope: Scope, name: str, rejected: Rejected) -> None:
        most, members = rejected.members["limit"], rejected.members
        if name in _MINUTE:
            assert rejected.code == _MINUTE[name]
            bucket, now_ns = self._buckets.get((scope, name)), self._clock.monotonic_ns()
            if bucket is not None:
                wait_ns = bucket.wait_ns(_units(name, asked.held_tokens), now_ns)
                assert wait_ns > 0 and members["used"] == bucket.used(now_ns), f"{name} of {scope}: {members}"
                assert rejected.retry_after_ms == ceil_ms_from_ns(wait_ns)
                assert members["reset_ms"] == ceil_ms_from_ns(bucket.full_again_ns(now_ns))
            return
        assert self._refuses(asked, scope, name, most), f"{name} of {scope} refuses and would not have to: {members}"
        if name == "concurrency":
            assert rejected.code == "concurrency_limited" and members["used"] == self._in_flight[scope]
            return
        kind, wall_ms = _BUDGETS[name], self._clock.wall_ms()
        held, spent = self._amounts[scope, asked.windows[kind]].of(name)
        assert rejected.code == "budget_exhausted" and (members["held"], members["used"]) == (held, spent)
        assert self._reset_of(rejected, kind) == self._wait_ms(asked.scopes[0].tenant, kind, wall_ms)
        assert kind == LIFETIME or members["window"] == asked.windows[kind]

    def _reset_of(self, rejected: Rejected, kind: int) -> Millis | None:
        reset_ms: Millis | None = rejected.members.get("reset_ms")
        assert rejected.retry_after_ms == (reset_ms if rejected.members["limit"] else None)
        return reset_ms

    def _wait_ms(self, tenant: str, kind: int, wall_ms: Millis) -> Millis | None:
        ends_ms = self._calendars[tenant].ends_ms(kind, wall_ms)
        return None if ends_ms is None else max(1, ends_ms - wall_ms)

    # ── ends ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def end(self, counted: Counted, record: GenerationRecord, delivered: Tokens, *, was_waiting: bool) -> None:
        """An end is decided: what was held returns in this step, and what the tenant pays is counted."""
        assert counted.is_open
        counted.is_open = False
        self.post(counted, record, delivered, was_waiting=was_waiting)
        now_ns, (_, tokens) = self._clock.monotonic_ns(), counted.posted
        for scope in counted.scopes:
            self._in_flight[scope] -= 1
            for window in counted.windows:
                amounts = self._amounts[scope, window]
                amounts.held_microusd -= counted.held_microusd
                amounts.held_tokens -= counted.held_tokens
                assert amounts.held_microusd >= 0 and amounts.held_tokens >= 0
        for key, bucket in self._buckets_of(counted.scopes):
            counted.returns[key] = bucket.settle(counted.owner, 1 if key[1] == "requests_per_minute" else tokens, now_ns)

    def post(self, counted: Counted, record: GenerationRecord, delivered: Tokens, *, was_waiting: bool) -> None:
        """This is what it ended as, now: check the price, and count it instead of what was counted before."""
        assert record.finish_reason is not None
        reason, used = record.finish_reason.value, (record.input_tokens, record.output_tokens)
        input_paid, output_paid = paid_tokens(reason, *used, delivered, was_waiting=was_waiting)
        cost = cost_of(counted.price, input_paid, record.cached_input_tokens, output_paid)
        assert record.cost_microusd == cost, f"{counted.owner} costs {record.cost_microusd}, by the table {cost}"
        assert cost <= counted.held_microusd and input_paid + output_paid <= counted.held_tokens
        before, counted.posted = counted.posted, (cost, input_paid + output_paid)
        for scope in counted.scopes:
            self._spend(scope, counted.windows, cost - before[0], input_paid + output_paid - before[1])

    def doubt(self, tenant: str, counted: Counted, *, ended: bool) -> None:
        """Whether the outcome of its settlement is open: its answer was dropped, and the record is not durable."""
        (self._doubtful.discard if ended else self._doubtful.add)((tenant, counted.owner))

    def check_hold(self, counted: Counted, hold: HoldRecord) -> None:
        """The durable hold says what was taken: amounts, windows, and the version of the price."""
        assert hold.held_microusd == counted.held_microusd and hold.price_version == counted.price.version
        assert hold.windows == counted.windows, f"{hold.id} is held in {hold.windows}, and it was {counted.windows}"

    def check_returns(self, counted: Counted, end: EndRecord) -> None:
        """The durable end says what buckets got back."""
        tenant = end.id.tenant
        booked = {_bucket_of(tenant, back): back.units for back in end.returns}
        for key, units in counted.returns.items():
            assert booked.get(key, 0) == units, f"{end.id} gave {key} {booked.get(key, 0)} back, and it was {units}"

    def spent(self, scope: Scope) -> MicroDollars:
        """What was posted in this scope over its lifetime."""
        return self._amounts[scope, "lifetime"].spent_microusd

    @property
    def limits(self) -> Mapping[Scope, Limits]:
        """The limits in force."""
        return self._snapshot.limits

    @property
    def holds_nothing(self) -> bool:
        """Whether nothing is held and nothing is in flight."""
        held = any(amounts.held_microusd or amounts.held_tokens for amounts in self._amounts.values())
        return not held and not any(self._in_flight.values())


def _bucket_of(tenant: str, take: BucketTake) -> tuple[Scope, str]:
    return Scope(tenant, take.application, take.key, take.alias, take.service_class), take.limit


def _units(limit: str, tokens: Tokens) -> int:
    return 1 if limit == "requests_per_minute" else tokens


def _needed(asked: Counted, limit: str) -> int:
    return asked.held_tokens if limit.startswith("tokens") else asked.held_microusd
