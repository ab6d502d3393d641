"""What starts now in one pool: the heads of its queues matched with replicas that have room for them, as values.

Late binding: a request gets a replica only when that replica can start it. The coordinator dispatches each start before it asks
again, so a decision never rests on room that an earlier one used.
"""

from collections.abc import Callable, Collection, Iterable
from typing import Generic

import msgspec

from weir.core.routing.capacity import Need
from weir.core.routing.placement import Site, place
from weir.core.routing.prefixes import PrefixIndex
from weir.core.routing.replica import Replica
from weir.core.scheduling.queues import DomainQueue, Key, Waiting


class Start(msgspec.Struct, Generic[Key], frozen=True, gc=False):
    """Dispatch this entry of this queue there. passed: those whose turn it is and that fit nowhere, with their queues."""

    queue: DomainQueue[Key]
    waiting: Waiting[Key]
    site: Site
    passed: tuple[tuple[DomainQueue[Key], Key], ...] = ()


def next_start(
    queues: Iterable[DomainQueue[Key]],
    replicas: Collection[Replica],
    index: PrefixIndex | None = None,
    may_start: Callable[[Key], bool] | None = None,
) -> Start[Key] | None:
    """The next dispatch, or None when nothing waits that could start. queues: of the pool, the one whose turn it is first.

    may_start: others are passed over as if they did not wait; None: all may.

    What fits nowhere lets others pass only so often; from then on the replica that is likely to have room for it first is kept,
    and the others go on. An entry that must avoid the only replica with a free lane lets all pass: it could not have used it.
    """
    passed: tuple[tuple[DomainQueue[Key], Key], ...] = ()
    for queue in queues:
        is_its_turn = True
        too_much: list[Need] = []
        for waiting in _candidates(queue, may_start):
            if too_much and _fits_nowhere(waiting.need, too_much):
                continue
            site = place(replicas, waiting.need, index, waiting.avoid)
            if site is not None:
                return Start(queue, waiting, site, passed)
            able = [replica for replica in replicas if replica.free and replica.name != waiting.avoid]
            if is_its_turn and able:
                if queue.keeps_room(waiting.key):
                    kept = _to_keep(able, waiting.need)
                    replicas = [replica for replica in replicas if replica is not kept]
                else:
                    passed = (*passed, (queue, waiting.key))
            if waiting.avoid is None:
                is_its_turn = False  # of a flow's heads it is only the first one's turn
                too_much.append(waiting.need)
    return None


def _candidates(queue: DomainQueue[Key], may_start: Callable[[Key], bool] | None) -> Iterable[Waiting[Key]]:
    if may_start is None:
        return queue.candidates()
    return (waiting for waiting in queue.candidates() if may_start(waiting.key))


def _fits_nowhere(need: Need, too_much: Iterable[Need]) -> bool:
    """Whether one that asks for no more fits nowhere."""
    return any(need.kv_tokens >= other.kv_tokens and _is_as_bounded(need, other) for other in too_much)


def _is_as_bounded(need: Need, other: Need) -> bool:
    return other.backlog_ms is None or (need.backlog_ms is not None and need.backlog_ms <= other.backlog_ms)


def _to_keep(able: list[Replica], need: Need) -> Replica:
    """The one that is expected to have room for it first: with the memory, what has least to read; else the most memory."""
    holding = [replica for replica in able if replica.room.holds(need.kv_tokens)]
    if holding:
        return min(holding, key=lambda replica: (replica.room.prefill_tokens, replica.name))
    return max(able, key=lambda replica: (replica.room.left, replica.name))
