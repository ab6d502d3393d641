"""What gateways say that engines run, and no execution stands for: its hold was never durable, or has ended.

Each keeps its lane until its gateway says that the engine stopped, or is lost itself; nothing else is known of it.
"""

from dataclasses import dataclass

from weir import errors
from weir.coordinator.fleet import Fleet
from weir.coordinator.sessions import Session
from weir.core.routing.replica import Replica
from weir.messages import Reattach, Run, Stopped
from weir.ports import Clock

STRAYS_MAX = 10_000
"""Of one session: more than a gateway runs at once."""


@dataclass(slots=True)
class _Stray:
    """replica and lane: None while the replica is not known."""

    run: Run
    replica: Replica | None = None
    lane: int | None = None


class Strays:
    """By session, ref and attempt."""

    def __init__(self, clock: Clock, fleet: Fleet) -> None:
        self._clock = clock
        self._fleet = fleet
        self._running: dict[str, dict[tuple[int, int], _Stray]] = {}
        self._in_doubt: list[Run] = []

    def run(self, session: Session, told: Reattach) -> None:
        """What this gateway tells of a request runs, until it is stopped."""
        for run in (told.earlier, told.run):
            of_session = self._running.setdefault(session.name, {})
            if run is None or run.is_stopped or (told.acquire.ref, run.attempt) in of_session:
                continue
            if len(of_session) >= STRAYS_MAX:
                raise errors.LinkFault("A gateway tells of more than it can run.")
            stray = of_session[told.acquire.ref, run.attempt] = _Stray(run)
            self._place(stray)

    def look_for_replicas(self) -> None:
        """One more is known."""
        for of_session in self._running.values():
            for stray in of_session.values():
                self._place(stray)

    def _place(self, stray: _Stray) -> None:
        address = stray.run.replica
        if stray.replica is None and (replica := self._fleet.find(address.pool, address.name, address.url)) is not None:
            stray.replica = replica
            stray.lane = replica.retake_lane(stray.run.lane, 0, 0, self._clock.monotonic_ns())

    def stopped(self, session: str, stopped: Stopped) -> bool:
        """The engine runs nothing of it; whether it was one of these."""
        of_session = self._running.get(session, {})
        stray = of_session.pop((stopped.ref, stopped.attempt), None)
        if stray is None:
            return False
        self._free(stray, confirmed=stopped.confirmed)
        return True

    def lost(self, session: str) -> bool:
        """Its gateway is gone, and what ran for it; whether anything did."""
        of_session = self._running.pop(session, {})
        for stray in of_session.values():
            self._free(stray, confirmed=True)
        return bool(of_session)

    def _free(self, stray: _Stray, *, confirmed: bool) -> None:
        if stray.replica is not None and stray.lane is not None and confirmed:
            stray.replica.free_lane(stray.lane)
        elif not confirmed:  # the lane stays taken until the replica is confirmed gone
            self._in_doubt.append(stray.run)
            self.condemn_what_is_in_doubt()

    def condemn_what_is_in_doubt(self) -> None:
        """Replicas that are known by now and did not confirm that they stopped."""
        for run in list(self._in_doubt):
            replica = self._fleet.find(run.replica.pool, run.replica.name, run.replica.url)
            if replica is not None:
                self._in_doubt.remove(run)
                self._fleet.condemn(replica.pool, replica.name)
