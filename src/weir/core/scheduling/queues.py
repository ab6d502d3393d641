"""The bounded queue of one scheduling domain: a flow per tenant, and an order between the flows.

Bounds are entries per tenant, entries and bytes per domain; the bound of waiting time is the coordinator's timer. Within a flow
entries leave first in, first out. Between flows the order is behind `Order`, so that a fairer one replaces plain rotation
without touching the queue. A request that waits for its second attempt goes ahead of every flow: it had its turn already.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from weir import errors
from weir.units import Bytes, Millis

_QUEUE_RETRY_MS = 1_000

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """Entries ≥ 1, bytes ≥ 1, waiting time in ms ≥ 1."""

    entries_per_tenant_max: int = 256
    entries_max: int = 2_000
    bytes_max: Bytes = 64 * 1024 * 1024
    wait_ms_max: Millis = 5_000


@dataclass(frozen=True, slots=True)
class Waiting(Generic[Key]):
    """An entry that may go next. avoid: the replica that failed its first attempt, None before that."""

    tenant: str
    key: Key
    avoid: str | None = None


class Order(Protocol):
    """Whose turn it is between backlogged flows."""

    def joined(self, tenant: str) -> None:
        """The flow became backlogged."""
        ...

    def left(self, tenant: str) -> None:
        """The flow has no entry any more."""
        ...

    def turn(self) -> str | None:
        """The flow whose head goes next; None when nothing waits. Changes nothing."""
        ...

    def served(self, tenant: str) -> None:
        """The head of this flow was dispatched."""
        ...


class Rotation:
    """Plain round robin: a served flow goes to the end."""

    def __init__(self) -> None:
        self._ring: deque[str] = deque()

    def joined(self, tenant: str) -> None:
        """Enter at the end."""
        self._ring.append(tenant)

    def left(self, tenant: str) -> None:
        """Leave the ring; linear in the number of backlogged tenants."""
        self._ring.remove(tenant)

    def turn(self) -> str | None:
        """The flow that waited longest for its turn."""
        return self._ring[0] if self._ring else None

    def served(self, tenant: str) -> None:
        """Go to the end if it is its turn."""
        if self._ring and self._ring[0] == tenant:
            self._ring.rotate(-1)


class DomainQueue(Generic[Key]):
    """Waiting requests of one scheduling domain, by key."""

    def __init__(self, bounds: QueueBounds, order: Order | None = None) -> None:
        self.bounds = bounds
        self._order: Order = order or Rotation()
        self._flows: dict[str, OrderedDict[Key, Bytes]] = {}
        self._ahead: dict[str, OrderedDict[Key, tuple[str, Bytes]]] = {}  # by the replica to avoid
        self._entries: Counter[str] = Counter()
        self._total = 0
        self._bytes = 0

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

    def refusal(self, tenant: str, size: Bytes) -> errors.WeirError | None:
        """Why one more entry of `size` bytes may not wait, or None."""
        waiting = self._entries[tenant]
        bounds = self.bounds
        if waiting >= bounds.entries_per_tenant_max:
            detail = f"{waiting} requests of this tenant wait already."
        elif self._total >= bounds.entries_max or self._bytes + size > bounds.bytes_max:
            detail = "Too many requests wait for this model."
        else:
            return None
        return errors.QueueFull(detail, retry_after_ms=_QUEUE_RETRY_MS)

    def push(self, tenant: str, key: Key, size: Bytes) -> None:
        """Wait at the end of the tenant's flow. The caller asked `refusal` in the same step."""
        flow = self._flows.get(tenant)
        if flow is None:
            flow = self._flows[tenant] = OrderedDict()
            self._order.joined(tenant)
        assert key not in flow
        flow[key] = size
        self._count(tenant, 1, size)

    def push_ahead(self, tenant: str, key: Key, size: Bytes, avoid: str) -> None:
        """Wait ahead of every flow for another replica than `avoid`. The caller asked `refusal` in the same step."""
        again = self._ahead.setdefault(avoid, OrderedDict())
        assert key not in again
        again[key] = (tenant, size)
        self._count(tenant, 1, size)

    def candidates(self) -> Iterator[Waiting[Key]]:
        """Who may go next, first choice first: of those ahead one per replica to avoid, then the head whose turn it is."""
        for avoid, again in self._ahead.items():
            key = next(iter(again))
            yield Waiting(again[key][0], key, avoid)
        tenant = self._order.turn()
        if tenant is not None:
            yield Waiting(tenant, next(iter(self._flows[tenant])))

    def serve(self, waiting: Waiting[Key]) -> None:
        """Take a candidate out, as dispatched. One that waited ahead uses no turn."""
        if waiting.avoid is None:
            self._order.served(waiting.tenant)
        removed = self.remove(waiting.tenant, waiting.key)
        assert removed

    def remove(self, tenant: str, key: Key) -> bool:
        """Take an entry out wherever it waits; False if it does not."""
        flow = self._flows.get(tenant)
        if flow is None or key not in flow:
            return self._remove_ahead(key)
        self._count(tenant, -1, -flow.pop(key))
        if not flow:
            del self._flows[tenant]
            self._order.left(tenant)
        return True

    def _remove_ahead(self, key: Key) -> bool:
        avoid = next((avoid for avoid, again in self._ahead.items() if key in again), None)
        if avoid is None:
            return False
        tenant, size = self._ahead[avoid].pop(key)
        self._count(tenant, -1, -size)
        if not self._ahead[avoid]:
            del self._ahead[avoid]
        return True

    def _count(self, tenant: str, entries: int, size: Bytes) -> None:
        self._total += entries
        self._bytes += size
        self._entries[tenant] += entries
        if not self._entries[tenant]:
            del self._entries[tenant]
