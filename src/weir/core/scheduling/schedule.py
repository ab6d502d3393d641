"""What starts now in one pool: the heads of its queues matched with replicas that have room for them, as values.

Late binding: a request gets a replica only when that replica can start it. The coordinator dispatches each start before it asks
again, so a decision never rests on room that an earlier one used.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Generic

from weir.core.routing.placement import Site, place
from weir.core.routing.prefixes import PrefixIndex
from weir.core.routing.replica import Replica
from weir.core.scheduling.queues import DomainQueue, Key, Waiting


@dataclass(frozen=True, slots=True)
class Start(Generic[Key]):
    """Dispatch this entry of this queue there. passed: those whose turn it is and that fit nowhere, with their queues."""

    queue: DomainQueue[Key]
    waiting: Waiting[Key]
    site: Site
    passed: tuple[tuple[DomainQueue[Key], Key], ...] = ()


def next_start(
    queues: Iterable[DomainQueue[Key]], replicas: Collection[Replica], index: PrefixIndex | None = None
) -> Start[Key] | None:
    """The next dispatch, or None when nothing waits that could start. queues: of the pool, the one whose turn it is first.

    What fits nowhere lets others pass only so often. An entry that must avoid the only replica with a free lane lets all pass:
    it could not have used that one.
    """
    passed: tuple[tuple[DomainQueue[Key], Key], ...] = ()
    for queue in queues:
        is_its_turn = True
        for waiting in queue.candidates():
            site = place(replicas, waiting.need, index, waiting.avoid)
            if site is not None:
                return Start(queue, waiting, site, passed)
            if is_its_turn and _has_lane(replicas, waiting.avoid):
                if queue.keeps_room(waiting.key):
                    return None
                passed = (*passed, (queue, waiting.key))
            is_its_turn = is_its_turn and waiting.avoid is not None  # of a flow's heads only the first one's
    return None


def _has_lane(replicas: Collection[Replica], avoid: str | None) -> bool:
    return any(replica.free and replica.name != avoid for replica in replicas)
