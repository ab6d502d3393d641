"""The bounded queue of one scheduling domain: a flow per tenant, and an order between the flows.

Bounds are entries per tenant, entries and bytes per domain; the bound of waiting time is the coordinator's timer. Within a flow
entries leave first in, first out. Between flows the order is behind `Order`, so that a fairer one replaces plain rotation
without touching the queue.
"""

from collections import OrderedDict, deque
from collections.abc import Hashable
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
        self._entries = 0
        self._bytes = 0

    def __len__(self) -> int:
        return self._entries

    @property
    def bytes(self) -> Bytes:
        """Bytes of all waiting inputs."""
        return self._bytes

    def refusal(self, tenant: str, size: Bytes) -> errors.WeirError | None:
        """Why one more entry of `size` bytes may not wait, or None."""
        waiting = len(self._flows.get(tenant, ()))
        bounds = self.bounds
        if waiting >= bounds.entries_per_tenant_max:
            detail = f"{waiting} requests of this tenant wait already."
        elif self._entries >= bounds.entries_max or self._bytes + size > bounds.bytes_max:
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
        self._entries += 1
        self._bytes += size

    def head(self) -> tuple[str, Key] | None:
        """(tenant, key) of whoever goes next; None when nothing waits."""
        tenant = self._order.turn()
        return None if tenant is None else (tenant, next(iter(self._flows[tenant])))

    def pop(self) -> tuple[str, Key]:
        """Take the head out, as dispatched."""
        head = self.head()
        assert head is not None
        tenant, key = head
        self._order.served(tenant)
        self.remove(tenant, key)
        return head

    def remove(self, tenant: str, key: Key) -> bool:
        """Take an entry out wherever it waits; False if it does not."""
        flow = self._flows.get(tenant)
        if flow is None or key not in flow:
            return False
        self._bytes -= flow.pop(key)
        self._entries -= 1
        if not flow:
            del self._flows[tenant]
            self._order.left(tenant)
        return True
