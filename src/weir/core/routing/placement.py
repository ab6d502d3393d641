"""Which replica takes a request: filter by capacity, then the least loaded, ties by name so that a decision repeats."""

from collections.abc import Iterable

from weir.core.routing.replica import Replica


def place(replicas: Iterable[Replica], avoid: str | None = None) -> Replica | None:
    """The ready replica with the smallest share of its lanes taken, or None when none has a free lane. avoid: not this one."""
    chosen: Replica | None = None
    least = 1.0
    for replica in replicas:  # in a plain loop: most replicas of a busy pool are full, and this runs for every request
        if not replica.free or replica.name == avoid:
            continue
        taken = replica.running / replica.limits.concurrency
        if chosen is None or (taken, replica.name) < (least, chosen.name):
            chosen, least = replica, taken
    return chosen
