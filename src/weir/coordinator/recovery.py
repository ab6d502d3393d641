"""A coordinator starts: take the epoch, rebuild the book from balances and takes, end by rule what a crash left open."""

from dataclasses import dataclass

from weir.coordinator.journal import Journal
from weir.coordinator.ledger_entries import Stamp, recovery_record
from weir.core.ledger.book import Book
from weir.core.ledger.records import BucketTake, LedgerRecord
from weir.core.registry.snapshot import Snapshot
from weir.core.tenancy import Scope
from weir.ports import Clock, LedgerStore, Recovery
from weir.units import NANOS_PER_MINUTE, Millis, ms_from_ns, ns_from_ms

RECENT_TAKES_MS: Millis = 2 * ms_from_ns(NANOS_PER_MINUTE)
"""A per-minute bucket refills within a minute; two cover a take at a full bucket's end."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a coordinator starts with. resolved: holds that a crash left open."""

    book: Book
    journal: Journal
    resolved: int


async def recover(store: LedgerStore, clock: Clock, snapshot: Snapshot, group_ms: Millis) -> Recovered:
    """Become the cell's writer. group_ms: see `Journal`. Raises StoreFault when the store cannot be opened."""
    recovery = await store.open_epoch(clock.wall_ms() - RECENT_TAKES_MS)
    book = Book()
    journal = Journal(store, clock, recovery.epoch, recovery.next_seq, group_ms)
    _rebuild(book, recovery, clock, snapshot)
    ends: list[LedgerRecord] = []
    for stored in recovery.open_executions:
        price = snapshot.price_of(stored.record.revision, stored.price_version)
        ends.append(recovery_record(stored, price, Stamp(journal.next_seq(), clock.wall_ms())))
    if ends:  # durable before the first question, so that nobody is told of a request that runs no more
        await store.write(recovery.epoch, ends)
    return Recovered(book, journal, len(ends))


def _rebuild(book: Book, recovery: Recovery, clock: Clock, snapshot: Snapshot) -> None:
    now_ns, now_ms = clock.monotonic_ns(), clock.wall_ms()
    earliest_ns = now_ns - ns_from_ms(RECENT_TAKES_MS)
    book.resume(now_ms)
    book.configure(snapshot.limits, snapshot.zones(), earliest_ns)
    for leaf in recovery.balances:
        scope = Scope(leaf.tenant, leaf.application, leaf.key, leaf.alias)
        book.restore_balance(scope, leaf.window, leaf.spent_microusd, leaf.spent_tokens)
    for take in recovery.recent_takes:
        age_ms = min(max(0, now_ms - take.at_ms), RECENT_TAKES_MS)  # a wall clock that stepped back makes it new
        entry = BucketTake(take.application, take.key, take.alias, take.limit, take.net_units)
        book.restore_take(take.tenant, entry, now_ns - ns_from_ms(age_ms))
