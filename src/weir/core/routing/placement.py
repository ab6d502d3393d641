"""Which replica takes a request: filter by capacity, then the least loaded, ties by name so that a decision repeats."""

from collections.abc import Iterable

from weir.core.routing.replica import Replica


def place(replicas: Iterable[Replica], avoid: str | None = None) -> Replica | None:
    """The ready replica with the smallest share of its lanes taken, or None when none has a free lane. avoid: not this one."""
    with_room = (replica for replica in replicas if replica.free > 0 and replica.name != avoid)
    return min(with_room, key=lambda replica: (replica.running / replica.limits.concurrency, replica.name), default=None)
