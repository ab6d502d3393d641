"""What starts now: the heads of the domains matched with replicas that can run them, as values.

Late binding: a request gets a replica only when that replica has a free lane. The coordinator dispatches each start before it
asks again, so a decision never rests on capacity that an earlier one used.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Generic

from weir.core.routing.placement import place
from weir.core.routing.replica import Replica
from weir.core.scheduling.queues import DomainQueue, Key, Waiting


@dataclass(frozen=True, slots=True)
class Start(Generic[Key]):
    """Dispatch this entry on this replica."""

    domain: str
    waiting: Waiting[Key]
    replica: Replica


def next_start(domains: Mapping[str, DomainQueue[Key]], replicas: Mapping[str, Collection[Replica]]) -> Start[Key] | None:
    """The next dispatch, or None when nothing waits that could start. domains and replicas are keyed by pool.

    An entry that must avoid the only replica with a free lane lets others pass: it could not have used that lane.
    """
    for domain, queue in domains.items():
        if not queue:
            continue
        for waiting in queue.candidates():
            if (replica := place(replicas.get(domain, ()), waiting.avoid)) is not None:
                return Start(domain, waiting, replica)
    return None
