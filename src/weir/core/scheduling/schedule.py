"""What starts now: the heads of the domains matched with replicas that can run them, as values.

Late binding: a request gets a replica only when that replica has a free lane. The coordinator dispatches each start before it
asks again, so a decision never rests on capacity that an earlier one used.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Generic

from weir.core.routing.placement import place
from weir.core.routing.replica import Replica
from weir.core.scheduling.queues import DomainQueue, Key


@dataclass(frozen=True, slots=True)
class Start(Generic[Key]):
    """Dispatch this entry on this replica."""

    domain: str
    tenant: str
    key: Key
    replica: Replica


def next_start(domains: Mapping[str, DomainQueue[Key]], replicas: Mapping[str, Iterable[Replica]]) -> Start[Key] | None:
    """The next dispatch, or None when nothing waits that could start. domains and replicas are keyed by pool."""
    for domain, queue in domains.items():
        head = queue.head()
        if head is not None and (replica := place(replicas.get(domain, ()))) is not None:
            return Start(domain, head[0], head[1], replica)
    return None
