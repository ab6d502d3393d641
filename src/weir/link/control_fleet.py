"""The coordinator's fleet as control's reports change it: what one life of control replays replaces what another said.

A replica is known by the name that control gave it. An engine behind a URL that ran before control was started again is still
the same engine: where a replay names a replica at the URL, in the pool and with the concurrency of one that the fleet has, the
fleet keeps that one under its first name, with its lanes and what runs on them, and every report about the new name is about
it. Only one that was condemned or drained is not kept. All else that a replay does not name is gone.

A pool may change everything but the revision that it serves while anything of it runs or waits.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import msgspec

from weir import errors
from weir.core.registry.model import Pool
from weir.link.control_messages import (
    Condemned,
    Demanded,
    FleetReport,
    PoolKept,
    PoolWithdrawn,
    ReplicaAdded,
    ReplicaAnswered,
    ReplicaDoubted,
    ReplicaDrained,
    ReplicaGone,
)
from weir.messages import ReplicaAddress, ReplicaPace


class KeptFleet(Protocol):
    """The coordinator's fleet, as far as control changes it."""

    def add_pool(self, pool: Pool) -> None: ...

    def withdraw(self, pool: str) -> None: ...

    def add(self, name: str, pool: str, concurrency: int) -> None: ...

    def answered(self, address: ReplicaAddress) -> None: ...

    def doubted(self, pool: str, name: str) -> None: ...

    def drain(self, pool: str, name: str) -> None: ...

    def gone(self, pool: str, name: str) -> None: ...

    def is_unused(self, pool: str, name: str) -> bool: ...

    def at_once(self) -> AbstractContextManager[None]: ...


@dataclass(slots=True)
class _Kept:
    """A replica of the fleet. name: of control's present life; name_in_fleet: of the life that added it.

    pace: as it was measured first; later lives of control may have met it busy.
    """

    name: str
    name_in_fleet: str
    added: ReplicaAdded
    pace: ReplicaPace | None = None
    is_drained: bool = False
    is_condemned: bool = False

    @property
    def place(self) -> tuple[str, str]:
        """Its pool, and its name there."""
        return self.added.pool, self.name_in_fleet

    def is_where(self, added: ReplicaAdded) -> bool:
        """Whether that is the same engine, which nobody started for it."""
        mine = self.added
        same = (mine.pool, mine.url, mine.concurrency) == (added.pool, added.url, added.concurrency)
        return bool(added.url) and same and not (self.is_condemned or self.is_drained)


class ControlledFleet:
    """is_busy: whether anything waits or runs in a pool. tell: takes what control is to hear."""

    def __init__(self, fleet: KeptFleet, is_busy: Callable[[str], bool]) -> None:
        self._fleet = fleet
        self._is_busy = is_busy
        self._pools: dict[str, Pool] = {}
        self._replicas: dict[str, _Kept] = {}  # by control's name
        self.tell: Callable[[Condemned | Demanded], None] = lambda message: None

    def declare(self, pools: Iterable[Pool]) -> None:
        """Pools on record: until control says what it keeps, requests for them find no capacity."""
        for pool in pools:
            self._add_pool(pool)

    # ── a replay ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def check(self, reports: Sequence[FleetReport]) -> None:
        """Raises LinkFault where a replay cannot be put in force: final, unless it is one that no control of ours sends."""
        pools, replicas = set[str](), set[str]()
        for report in reports:
            match report:
                case PoolKept(pool=pool):
                    pools.add(pool.name)
                    if self._changes_revision(pool) and self._is_busy(pool.name):
                        detail = f"Pool {pool.name!r} still has requests for another revision than {pool.revision!r}."
                        raise errors.LinkFault(detail, is_final=True)
                case ReplicaAdded():
                    replicas.add(report.name)
                    _refuse_unless(report.pool in pools)
                case ReplicaAnswered():
                    _refuse_unless(report.address.name in replicas)
                case ReplicaDoubted() | ReplicaDrained() | ReplicaGone():
                    _refuse_unless(report.name in replicas)

    def replay(self, reports: Sequence[FleetReport]) -> None:
        """Put everything in force that control knows, at once; `check` came before."""
        with self._fleet.at_once():
            self._replay(reports)
        for kept in self._replicas.values():
            if kept.is_condemned:  # it was not heard
                self.tell(Condemned(kept.name))

    def _replay(self, reports: Sequence[FleetReport]) -> None:
        pools = [report.pool for report in reports if isinstance(report, PoolKept)]
        empty = {pool.name for pool in pools if self._changes_revision(pool)}
        self._keep([report for report in reports if isinstance(report, ReplicaAdded) and report.pool not in empty])
        for name in self._pools.keys() - {pool.name for pool in pools}:
            self._fleet.withdraw(name)
        for pool in pools:
            self._add_pool(pool)
        for report in reports:
            if not isinstance(report, PoolKept):
                self.apply(report)

    def _keep(self, named: Sequence[ReplicaAdded]) -> None:
        """Of the replicas that there are, those that are named: by their names, or by where they are."""
        former, self._replicas = self._replicas, {}
        for added in named:
            kept = former.pop(added.name, None)
            if kept is None:
                kept = next((each for each in former.values() if each.is_where(added)), None)
                if kept is None:
                    continue
                del former[kept.name]
            kept.name = added.name
            self._replicas[added.name] = kept
        for kept in former.values():
            self._fleet.gone(*kept.place)

    def _changes_revision(self, pool: Pool) -> bool:
        known = self._pools.get(pool.name)
        return known is not None and known.revision != pool.revision

    # ── reports ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def apply(self, report: FleetReport) -> None:
        """One report. Raises LinkFault for a pool or a replica that was never named, and for a pool's other revision."""
        match report:
            case PoolKept():
                _refuse_unless(not self._changes_revision(report.pool))
                self._add_pool(report.pool)
            case PoolWithdrawn():
                _refuse_unless(report.pool in self._pools)
                self._fleet.withdraw(report.pool)
            case ReplicaAdded():
                self._add(report)
            case ReplicaAnswered():
                self._answered(report.address)
            case ReplicaDoubted():
                self._fleet.doubted(*self._known(report.name).place)
            case ReplicaDrained():
                self._drain(self._known(report.name))
            case ReplicaGone():
                self._fleet.gone(*self._known(report.name).place)
                del self._replicas[report.name]

    def _add_pool(self, pool: Pool) -> None:
        self._pools[pool.name] = pool
        self._fleet.add_pool(pool)

    def _add(self, added: ReplicaAdded) -> None:
        _refuse_unless(added.pool in self._pools)
        if added.name not in self._replicas:
            self._replicas[added.name] = _Kept(added.name, added.name, added)
            self._fleet.add(added.name, added.pool, added.concurrency)

    def _answered(self, address: ReplicaAddress) -> None:
        kept = self._known(address.name)
        kept.pace = kept.pace or address.pace
        self._fleet.answered(msgspec.structs.replace(address, name=kept.name_in_fleet, pace=kept.pace))

    def _drain(self, kept: _Kept) -> None:
        kept.is_drained = True
        self._fleet.drain(*kept.place)

    def _known(self, name: str) -> _Kept:
        _refuse_unless(name in self._replicas)
        return self._replicas[name]

    # ── said to control ──────────────────────────────────────────────────────────────────────────────────────────────

    def unused(self) -> tuple[str, ...]:
        """Replicas that control drained and on which nothing runs any more, by its names for them."""
        drained = [kept for kept in self._replicas.values() if kept.is_drained]
        return tuple(kept.name for kept in drained if self._fleet.is_unused(*kept.place))

    def condemned(self, name_in_fleet: str) -> None:
        """The fleet condemned a replica: control hears it now, or with its next replay."""
        for kept in self._replicas.values():
            if kept.name_in_fleet == name_in_fleet:
                kept.is_condemned = True
                self.tell(Condemned(kept.name))

    def demanded(self, pool: str) -> None:
        """A request found nothing ready in a pool that is on demand."""
        self.tell(Demanded(pool))


def _refuse_unless(is_named: bool) -> None:
    if not is_named:
        raise errors.LinkFault("Control speaks of a pool or a replica as it did not name it.")
