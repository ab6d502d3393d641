"""The order in which a change of what is approved takes effect: pools first, then everybody is told, then what is left goes.

An alias is told of only where the pools that it needs are kept, and a pool is let go only once nobody is told of it any more.
It decides nothing else: which pools those are is `kept_pools.py`'s, how they come and go the supervisor's.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from weir.control.kept_pools import Wanted, kept_pools, stable_revisions
from weir.control.supervisor import Supervisor
from weir.core.registry.snapshot import Snapshot


class ServedSnapshots:
    """put_in_force: tells everybody, in order. declared: by this start, the revision of each pool by its name."""

    def __init__(self, supervisor: Supervisor, put_in_force: Callable[[Snapshot], Awaitable[None]]) -> None:
        self._supervisor = supervisor
        self._put_in_force = put_in_force
        self.declared: Mapping[str, str] = {}

    def narrowed(self, snapshot: Snapshot) -> Snapshot:
        """What of it is served: a pool that is not kept stays on record, and no alias that would need it is offered."""
        return _narrowed(snapshot, kept_pools(snapshot, self.declared))

    async def publish(self, snapshot: Snapshot) -> None:
        """Put it in force, as far as it is served. One after another, in the order of versions."""
        wanted = kept_pools(snapshot, self.declared)
        self._supervisor.keep(wanted)
        await self._put_in_force(await asyncio.to_thread(_narrowed, snapshot, wanted))
        self._supervisor.follow(wanted, {revision.id for revision in snapshot.revisions.values() if revision.revoked})

    async def wait_ready(self, snapshot: Snapshot) -> bool:
        """True, once whatever aliases mean has a ready replica, unless its pools want none, or only on demand."""
        return await self._supervisor.wait_ready(stable_revisions(self.narrowed(snapshot)))


def _narrowed(snapshot: Snapshot, wanted: Sequence[Wanted]) -> Snapshot:
    return snapshot.serving({pool.name for pool, _ in wanted})
