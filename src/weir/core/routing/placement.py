"""Which replica takes a request: filter by capacity, then the least loaded, ties by name so that a decision repeats.

A half-open replica is idle and so goes first, which is how it is tried. A second attempt is the last one, and goes there last.
"""

from collections.abc import Iterable

from weir.core.routing.replica import Replica, ReplicaState


def place(replicas: Iterable[Replica], avoid: str | None = None) -> Replica | None:
    """The ready replica with the smallest share of its lanes taken, or None when none has a free lane. avoid: not this one."""
    chosen: Replica | None = None
    best = (False, 1.0, "")
    for replica in replicas:  # in a plain loop: most replicas of a busy pool are full, and this runs for every request
        if not replica.free or replica.name == avoid:
            continue
        is_trial = avoid is not None and replica.state is ReplicaState.HALF_OPEN
        score = (is_trial, replica.running / replica.limits.concurrency, replica.name)
        if chosen is None or score < best:
            chosen, best = replica, score
    return chosen
