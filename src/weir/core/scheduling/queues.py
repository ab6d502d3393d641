"""The bounded queue of one scheduling domain: a flow per tenant, and an order between the flows.

Bounds are entries per tenant, entries and bytes per domain; the bound of waiting time is the coordinator's timer. Within a flow
goes first what must start first, and of equals the oldest. Between flows the order is behind `orders.py::Order`. A request
that waits for its second attempt goes ahead of every flow: it had its turn already, and is not charged again. One whose turn it
is and that fits no replica lets the next ones pass, up to BYPASSES_MAX times; then a replica is kept for it.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from weir import errors
from weir.core.routing.capacity import NOTHING, Need
from weir.core.scheduling.fairness import FairOrder
from weir.core.scheduling.lazy_heap import LazyHeap
from weir.core.scheduling.orders import BYPASSES_MAX, Cost, Head, Order, Ticket, head_of, urgency
from weir.units import Bytes, Millis, Nanos

_LOOKS_MAX = 32
"""How many heads after it are looked at each time."""
_QUEUE_RETRY_MS = 1_000

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """Entries ≥ 1, bytes ≥ 1, waiting time in ms ≥ 1.

    The door refuses above half of the waiting time: a prediction is right on average, so that of those which are predicted to
    wait for all of it every second one would be admitted in vain.
    """

    entries_per_tenant_max: int = 256
    entries_max: int = 2_000
    bytes_max: Bytes = 64 * 1024 * 1024
    wait_ms_max: Millis = 5_000

    @property
    def door_ms_max(self) -> Millis:
        """The longest predicted wait with which a request is admitted."""
        return max(1, self.wait_ms_max // 2)


class Entry(msgspec.Struct, Generic[Key], frozen=True, gc=False):
    """What waits. cost: what its dispatch is expected to take of the domain; start_by_ns: when it must have started.

    need: what it takes of a replica.
    """

    tenant: str
    key: Key
    size: Bytes
    cost: Cost
    start_by_ns: Nanos
    need: Need = NOTHING


class Waiting(msgspec.Struct, Generic[Key], frozen=True, gc=False):
    """An entry that may go next. avoid: the replica that failed its first attempt, None before that.

    need: as it is now; that of one of many is another than the entry's own.
    """

    tenant: str
    key: Key
    need: Need = NOTHING
    avoid: str | None = None


class _Flow(Generic[Key]):
    """One tenant's entries, by when they must start and then by arrival."""

    __slots__ = ("_by_urgency", "entries", "first", "head", "work")

    def __init__(self) -> None:
        self.entries: dict[Key, Entry[Key]] = {}
        self.work: Cost = 0
        self.head: Head | None = None  # of its first entry, as orders see it
        self.first: Key | None = None
        self._by_urgency: LazyHeap[int, Key] = LazyHeap()

    def push(self, number: int, entry: Entry[Key]) -> None:
        self.entries[entry.key] = entry
        self.work += entry.cost
        self._by_urgency.put(entry.key, urgency(entry.start_by_ns, number))
        if self.head is None or entry.start_by_ns < self.head.start_by_ns:
            self.head, self.first = Head(number, entry.start_by_ns), entry.key

    def pop(self, key: Key) -> Entry[Key]:
        entry = self.entries.pop(key)
        self.work -= entry.cost
        self._by_urgency.discard(key)
        if key == self.first:
            self._find_head()
        return entry

    def _find_head(self) -> None:
        first = self._by_urgency.first()
        if first is None:
            self.head = self.first = None
        else:
            self.head, self.first = head_of(first[0]), first[1]


class DomainQueue(Generic[Key]):
    """Waiting requests of one scheduling domain, by key. order: between tenants, of its own for each queue."""

    def __init__(self, bounds: QueueBounds, order: Order | None = None) -> None:
        self.bounds = bounds
        self._order: Order = order or FairOrder()
        self._flows: dict[str, _Flow[Key]] = {}
        self._ahead: dict[str, OrderedDict[Key, Entry[Key]]] = {}  # by the replica to avoid
        self._arrivals = 0
        self._total = 0
        self._bytes = 0
        self._work: Cost = 0
        self._passed: dict[Key, int] = {}  # how often others went before a head that fits nowhere

    def __len__(self) -> int:
        return self._total

    @property
    def bytes(self) -> Bytes:
        """Bytes of all waiting inputs."""
        return self._bytes

    @property
    def ahead(self) -> int:
        """How many wait ahead of every flow."""
        return sum(map(len, self._ahead.values()))

    @property
    def work_ahead(self) -> Cost:
        """The cost of those that wait ahead of every flow."""
        return sum(entry.cost for again in self._ahead.values() for entry in again.values())

    def work_before(self, tenant: str) -> Cost:
        """The cost of what goes before one more request of this tenant, about."""
        own = self._own_work(tenant)
        ahead = self.work_ahead if self._ahead else 0
        return ahead + own + self._order.work_before(tenant, own, self._work - ahead - own, self.mean_cost)

    @property
    def mean_cost(self) -> Cost:
        """Of one that waits; 0 when nobody does."""
        return self._work // self._total if self._total else 0

    def lead(self, tenant: str) -> Cost:
        """By how much the order's floor must rise until one more request of this tenant has its turn."""
        return self._order.lead(tenant, self._own_work(tenant))

    @property
    def floor(self) -> Cost:
        """The order's floor."""
        return self._order.floor

    def _own_work(self, tenant: str) -> Cost:
        flow = self._flows.get(tenant)
        return flow.work if flow else 0

    def position(self, tenant: str, key: Key) -> int:
        """How many of its tenant go before an entry that waits in its flow: linear in them."""
        entries = self._flows[tenant].entries  # in the order in which they came
        start_by_ns, before, is_later = entries[key].start_by_ns, 0, False
        for other in entries.values():
            is_later = is_later or other.key == key
            before += other.start_by_ns < start_by_ns + (not is_later)
        return before

    def refusal(self, tenant: str, size: Bytes) -> errors.WeirError | None:
        """Why one more entry of `size` bytes may not wait, or None."""
        waiting = self._waiting(tenant)
        bounds = self.bounds
        if waiting >= bounds.entries_per_tenant_max:
            detail = f"{waiting} requests of this tenant wait already."
        elif self._total >= bounds.entries_max or self._bytes + size > bounds.bytes_max:
            detail = "Too many requests wait for this model."
        else:
            return None
        return errors.QueueFull(detail, retry_after_ms=_QUEUE_RETRY_MS)

    def _waiting(self, tenant: str) -> int:
        flow = self._flows.get(tenant)
        waiting = len(flow.entries) if flow else 0
        if self._ahead:
            waiting += sum(entry.tenant == tenant for again in self._ahead.values() for entry in again.values())
        return waiting

    def push(self, entry: Entry[Key]) -> None:
        """Wait in the tenant's flow. The caller asked `refusal` in the same step."""
        flow = self._flows.get(entry.tenant)
        if flow is None:
            flow = self._flows[entry.tenant] = _Flow()
        assert entry.key not in flow.entries
        before = flow.head
        self._arrivals += 1
        flow.push(self._arrivals, entry)
        self._count(entry, 1)
        head = flow.head
        assert head is not None
        if before is None:
            self._order.joined(entry.tenant, head)
        elif head is not before:
            self._order.changed(entry.tenant, head)

    def push_ahead(self, entry: Entry[Key], avoid: str) -> None:
        """Wait ahead of every flow for another replica than `avoid`. The caller asked `refusal` in the same step."""
        again = self._ahead.setdefault(avoid, OrderedDict())
        assert entry.key not in again
        again[entry.key] = entry
        self._count(entry, 1)

    def candidates(self) -> Iterator[Waiting[Key]]:
        """Who may go next, first choice first: of those ahead one per replica to avoid, then the head whose turn it is.

        Asked on, that one fits nowhere: then the next heads.
        """
        for avoid, again in self._ahead.items():
            entry = next(iter(again.values()))
            yield Waiting(entry.tenant, entry.key, entry.need, avoid)
        first = self._order.first()
        if first is None:
            return
        yield self._head_of(first)
        for tenant in self._order.next(1 + _LOOKS_MAX):
            if tenant != first:
                yield self._head_of(tenant)

    def _head_of(self, tenant: str) -> Waiting[Key]:
        flow = self._flows[tenant]
        assert flow.first is not None
        entry = flow.entries[flow.first]
        return Waiting(tenant, entry.key, entry.need.of_many() if self.is_one_of_many(tenant) else entry.need)

    def is_one_of_many(self, tenant: str, more: int = 0) -> bool:
        """Whether more than one request of this tenant wait in its flow, with so `more` to come, and the order minds that."""
        flow = self._flows.get(tenant)
        return flow is not None and len(flow.entries) + more > 1 and self._order.holds_back

    def keeps_room(self, key: Key) -> bool:
        """Whether an entry that fits nowhere was passed so often that a replica is kept for it."""
        return self._passed.get(key, 0) >= BYPASSES_MAX

    def passed(self, key: Key) -> None:
        """Something started although it was the turn of this entry, which fits nowhere."""
        self._passed[key] = self._passed.get(key, 0) + 1

    def serve(self, waiting: Waiting[Key], saved: Cost = 0) -> Ticket | None:
        """Take a candidate out, as dispatched, and charge its flow; None for one that waited ahead: it was charged before.

        saved: how much less it is expected to cost than it was when it came.
        """
        if waiting.avoid is not None:
            assert self.remove(waiting.tenant, waiting.key)
            return None
        flow = self._flows[waiting.tenant]
        ticket = self._order.charge(waiting.tenant, flow.entries[waiting.key].cost - saved)
        self._take(flow, waiting.key)
        return ticket

    def correct(self, ticket: Ticket, cost: Cost) -> Ticket:
        """What was dispatched costs this so far; the ticket that holds now."""
        return self._order.correct(ticket, cost)

    def close(self, ticket: Ticket, cost: Cost) -> None:
        """What was dispatched ended, and cost this."""
        self._order.close(ticket, cost)

    def remove(self, tenant: str, key: Key) -> bool:
        """Take an entry out wherever it waits; False if it does not."""
        flow = self._flows.get(tenant)
        if flow is None or key not in flow.entries:
            return self._remove_ahead(key)
        self._take(flow, key)
        return True

    def _take(self, flow: _Flow[Key], key: Key) -> None:
        """Out of its flow, which has it."""
        self._passed.pop(key, None)
        before = flow.head
        entry = flow.pop(key)
        self._count(entry, -1)
        after = flow.head
        if after is None:
            del self._flows[entry.tenant]
            self._order.left(entry.tenant)
        elif after is not before:
            self._order.changed(entry.tenant, after)

    def _remove_ahead(self, key: Key) -> bool:
        avoid = next((avoid for avoid, again in self._ahead.items() if key in again), None)
        if avoid is None:
            return False
        self._passed.pop(key, None)
        self._count(self._ahead[avoid].pop(key), -1)
        if not self._ahead[avoid]:
            del self._ahead[avoid]
        return True

    def _count(self, entry: Entry[Key], entries: int) -> None:
        self._total += entries
        self._bytes += entries * entry.size
        self._work += entries * entry.cost
