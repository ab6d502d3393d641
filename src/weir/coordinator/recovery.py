"""A coordinator starts: take the epoch, rebuild the book from balances, holds and takes.

What an earlier coordinator left open is kept where gateways outlive coordinators, and is ended by rule where they do not.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from weir.coordinator.journal import Journal
from weir.coordinator.ledger_entries import Stamp, recovery_record
from weir.coordinator.restoring import price_of_hold, scopes_of_hold, worst_of
from weir.core.ledger.book import Book
from weir.core.ledger.records import BucketTake, HoldRecord, LedgerRecord
from weir.core.registry.snapshot import Snapshot
from weir.core.tenancy import Scope
from weir.messages import gateway_of
from weir.ports import Clock, LedgerStore, OpenHold, Recovery
from weir.units import NANOS_PER_MINUTE, Millis, ms_from_ns, ns_from_ms

RECENT_TAKES_MS: Millis = 2 * ms_from_ns(NANOS_PER_MINUTE)
"""A per-minute bucket refills within a minute; two cover a take at a full bucket's end."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a coordinator starts with. kept: open holds, which the book holds; resolved: how many were ended by rule."""

    book: Book
    journal: Journal
    kept: Sequence[OpenHold]
    resolved: int


async def recover(
    store: LedgerStore, clock: Clock, snapshot: Snapshot, group_ms: Millis, *, keeps_open: bool = False
) -> Recovered:
    """Become the cell's writer. group_ms: see `Journal`. Raises StoreFault when the store cannot be opened.

    keeps_open: gateways may still carry what is open. What a gateway in the former one's own process carried is ended all the
    same, and so is what is of a pool that is served no more, or serves another revision.
    """
    recovery = await store.open_epoch(clock.wall_ms() - RECENT_TAKES_MS)
    book = Book()
    journal = Journal(store, clock, recovery.epoch, recovery.next_seq, group_ms)
    kept = [found for found in recovery.open_holds if keeps_open and _may_go_on(found.hold, snapshot)]
    _rebuild(book, recovery, kept, clock, snapshot)
    ends: list[LedgerRecord] = []
    kept_ids = {found.hold.id for found in kept}
    for found in recovery.open_holds:
        if found.hold.id not in kept_ids:
            price = price_of_hold(found.hold, snapshot)
            ends.append(recovery_record(found, price, Stamp(journal.next_seq(), clock.wall_ms())))
    if ends:  # durable before the first question, so that nobody is told of a request that runs no more
        await store.write(recovery.epoch, ends)
    return Recovered(book, journal, kept, len(ends))


def _may_go_on(hold: HoldRecord, snapshot: Snapshot) -> bool:
    pool = snapshot.pools.get(hold.pool)
    return pool is not None and pool.revision == hold.revision and gateway_of(hold.gateway_session) != hold.gateway_session


def _rebuild(book: Book, recovery: Recovery, kept: Iterable[OpenHold], clock: Clock, snapshot: Snapshot) -> None:
    now_ns, now_ms = clock.monotonic_ns(), clock.wall_ms()
    earliest_ns = now_ns - ns_from_ms(RECENT_TAKES_MS)
    book.resume(now_ms)
    book.configure(snapshot.limits, snapshot.zones(), earliest_ns)
    for leaf in recovery.balances:
        scope = Scope(leaf.tenant, leaf.application, leaf.key, leaf.alias, leaf.service_class)
        book.restore_balance(scope, leaf.window, leaf.spent_microusd, leaf.spent_tokens)
    held = set()
    for found in kept:
        held.add(found.hold.id)
        book.restore_hold(found.hold.id, scopes_of_hold(found.hold), worst_of(found.hold), found.hold.windows)
    for take in recovery.recent_takes:
        age_ms = min(max(0, now_ms - take.at_ms), RECENT_TAKES_MS)  # a wall clock that stepped back makes it new
        entry = BucketTake(take.application, take.key, take.alias, take.limit, take.net_units, take.service_class)
        maker = take.hold if take.hold in held else None
        book.restore_take(take.tenant, entry, now_ns - ns_from_ms(age_ms), maker)
