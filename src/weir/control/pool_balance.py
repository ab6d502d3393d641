"""What has to change among a pool's replicas so that they are as the pool says: which start, which go, and in what order.

It decides and changes nothing. What is missing starts at once, what is too much goes at once, the newest first. A replica that
serves with lanes or at an address of before goes once its successor is ready, one after another, so that a pool never has more
than one replica beside those that it wants, and none fewer. A replica that is not ready has nothing to lose: it goes at once if
it is not wanted so.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from weir.core.registry.model import Pool
from weir.messages import ReplicaAddress
from weir.units import Nanos


class Kind(NamedTuple):
    """What replicas of a pool are alike in. url: where it runs already, empty where it is launched. concurrency: its lanes."""

    url: str
    concurrency: int


def kinds_of(pool: Pool) -> list[Kind]:
    """The replicas that a pool wants."""
    return [Kind(url, pool.concurrency) for url in pool.urls] or [Kind("", pool.concurrency)] * pool.replicas


@dataclass(slots=True, eq=False)
class KeptReplica:
    """One replica of a pool, started again and again until it is let go. is_ready: the one that runs now has answered.

    name: of that one in the fleet; address: where it answered its last probe, None if that failed. replaces: goes once this one
    is ready. leaves: set as it is let go; leave_by_ns: whatever runs on it then ends with it.
    """

    kind: Kind
    replaces: "KeptReplica | None" = None
    name: str = ""
    is_ready: bool = False
    address: ReplicaAddress | None = None
    leaves: asyncio.Event = field(default_factory=asyncio.Event)
    leave_by_ns: Nanos = 0
    task: asyncio.Task[None] | None = None

    @property
    def is_leaving(self) -> bool:
        """Whether it was let go."""
        return self.leaves.is_set()


class Start(NamedTuple):
    """A replica to start. replaces: the one that it is to follow."""

    kind: Kind
    replaces: KeptReplica | None = None


class Balance(NamedTuple):
    """What has to change now. Asked again whenever a replica gets ready, stops or has gone."""

    leave: Sequence[KeptReplica] = ()
    start: Sequence[Start] = ()


def balance(wanted: Sequence[Kind], replicas: Sequence[KeptReplica]) -> Balance:
    """The next changes. replicas: all that there are, the oldest first."""
    missing, right, former, leave = Counter(wanted), list[KeptReplica](), list[KeptReplica](), list[KeptReplica]()
    for replica in replicas:
        if replica.is_leaving:
            continue
        if missing[replica.kind] > 0:
            missing[replica.kind] -= 1
            right.append(replica)
        elif replica.is_ready and replica.kind not in missing:
            former.append(replica)
        else:
            leave.append(replica)
    leave += [each.replaces for each in right if each.is_ready and each.replaces in former and each.replaces is not None]
    followed = [each.replaces for each in right if each.replaces is not None]
    alone = [each for each in former if each not in followed]
    lacking = list(missing.elements())
    leave += alone[len(lacking) :]
    alone = alone[: len(lacking)]
    start = [Start(kind) for kind in lacking[len(alone) :]]
    if alone and not start and not leave and _is_settled(replicas, right):
        start = [Start(lacking[0], alone[0])]
    return Balance(leave, start)


def _is_settled(replicas: Sequence[KeptReplica], right: Sequence[KeptReplica]) -> bool:
    """Whether nobody is followed at the moment: every replica that is as wanted is ready, and none is going."""
    return all(each.is_ready for each in right) and not any(each.is_leaving for each in replicas)
