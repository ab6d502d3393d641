"""What control says of the fleet, kept so that any coordinator can be told all of it: control's side of the replay.

The supervisor reports here as it would to a fleet in its own process. It decides nothing. Reports are told as they come while a
coordinator has the rest of them, and are otherwise only kept.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from weir.core.registry.model import Pool
from weir.link.control_messages import (
    Counted,
    FleetReport,
    PoolKept,
    PoolWithdrawn,
    ReplicaAdded,
    ReplicaAnswered,
    ReplicaDoubted,
    ReplicaDrained,
    ReplicaGone,
)
from weir.messages import ReplicaAddress


@dataclass(slots=True)
class _Known:
    """A replica as it was reported last."""

    added: ReplicaAdded
    address: ReplicaAddress | None = None
    is_doubted: bool = False
    is_drained: bool = False

    def reports(self) -> Iterator[FleetReport]:
        """What brings a fleet that knows nothing of it to where it is."""
        yield self.added
        if self.address is not None:
            yield ReplicaAnswered(self.address)
        if self.is_doubted:
            yield ReplicaDoubted(self.added.pool, self.added.name)
        if self.is_drained:
            yield ReplicaDrained(self.added.pool, self.added.name)


class ReportedFleet:
    """The fleet as the supervisor knows it. tell: takes each report once a coordinator has all that came before."""

    def __init__(self) -> None:
        self._pools: dict[str, Pool] = {}
        self._replicas: dict[str, _Known] = {}
        self._located: dict[str, str] = {}
        self._counted: Counted | None = None
        self.tell: Callable[[FleetReport], None] = lambda report: None

    def replay(self) -> list[FleetReport]:
        """All that there is to know now."""
        pools = [PoolKept(pool) for pool in self._pools.values()]
        return [*pools, *(report for known in self._replicas.values() for report in known.reports())]

    def counted(self, counted: Counted | None) -> None:
        """The coordinator's word of where anything runs or waits; None: there is none to say so."""
        self._counted = counted

    # ── reported by the supervisor ───────────────────────────────────────────────────────────────────────────────────

    def add_pool(self, pool: Pool) -> None:
        """A pool that may get replicas."""
        self._pools[pool.name] = pool
        self.tell(PoolKept(pool))

    def withdraw(self, pool: str) -> None:
        """A pool that gets no more replicas, and has none."""
        del self._pools[pool]
        self.tell(PoolWithdrawn(pool))

    def locate(self, name: str, url: str) -> None:
        """Where the replica of this name, which is about to be added, runs already."""
        self._located[name] = url

    def add(self, name: str, pool: str, concurrency: int) -> None:
        """A replica is starting."""
        added = ReplicaAdded(name, pool, concurrency, self._located.pop(name, ""))
        self._replicas[name] = _Known(added)
        self.tell(added)

    def answered(self, address: ReplicaAddress) -> None:
        """Its warm-up or a probe succeeded."""
        known = self._replicas[address.name]
        known.address, known.is_doubted = address, False
        self.tell(ReplicaAnswered(address))

    def doubted(self, pool: str, name: str) -> None:
        """A probe of it failed."""
        self._replicas[name].is_doubted = True
        self.tell(ReplicaDoubted(pool, name))

    def drain(self, pool: str, name: str) -> None:
        """No new work for it. What it was given in the same moment, the coordinator's next count shows."""
        self._replicas[name].is_drained = True
        self._counted = None
        self.tell(ReplicaDrained(pool, name))

    def gone(self, pool: str, name: str) -> None:
        """Its process is gone, or its address was given up."""
        del self._replicas[name]
        self.tell(ReplicaGone(pool, name))

    def is_idle(self, pool: str) -> bool:
        """Whether nothing runs in a pool, and nothing waits there. Not while nobody can say: an engine may be busy."""
        return self._counted is not None and not self._counted.running.get(pool)

    def is_unused(self, pool: str, name: str) -> bool:
        """Whether nothing runs on a replica that was drained. Where only pools are counted, whether its pool is idle."""
        if self._counted is None or self._counted.unused is None:
            return self.is_idle(pool)
        return name in self._counted.unused

    @property
    def pools(self) -> set[str]:
        """Names of the pools that are kept."""
        return set(self._pools)
