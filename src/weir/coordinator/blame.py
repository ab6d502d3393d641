"""What the end of an attempt says of its replica, and of its request.

It tells the fleet, which may leave the replica alone or trust it again, and remembers which request ran on a replica as that
was lost. It judges only what ran: not a request whose replica could not be connected to, nor one whose replica we are stopping.
It ends nothing and retries nothing.
"""

import msgspec

from weir.coordinator.execution import Execution
from weir.coordinator.fleet import Fleet
from weir.core.endings import FinishReason
from weir.core.routing.breaker import speaks_for
from weir.core.routing.quarantine import Fingerprint, Quarantine
from weir.core.routing.replica import ReplicaState
from weir.messages import Acquire, Finish
from weir.ports import Clock


class Blame:
    """Judges attempts as they end, and remembers quarantined requests."""

    def __init__(self, clock: Clock, fleet: Fleet) -> None:
        self._clock = clock
        self._fleet = fleet
        self._quarantine = Quarantine()

    def is_quarantined(self, asked: Acquire) -> bool:
        """Whether this body is refused now."""
        return self._quarantine.holds(fingerprint_of(asked), self._clock.monotonic_ns())

    def judge(self, execution: Execution, finish: Finish) -> Finish:
        """Report the end of the attempt that ran; the end as it counts, `quarantined` if its request crashed two replicas."""
        placement = execution.placement
        assert placement is not None
        if not finish.attempt:
            return finish  # its gateway heard of no grant: nothing of it ran there
        replica = placement.replica
        is_stopping = replica.state in (ReplicaState.DRAINING, ReplicaState.STOPPED)
        self._fleet.attempt_ended(replica, placement.lane, finish.reason, showed_output=finish.ttft_ms is not None)
        if speaks_for(finish.reason):
            self._quarantine.completed(fingerprint_of(execution.acquire))
        if finish.reason is not FinishReason.REPLICA_LOST or not finish.reached or is_stopping:
            return finish
        if self._quarantine.crashed(fingerprint_of(execution.acquire), replica.name, self._clock.monotonic_ns()):
            return msgspec.structs.replace(finish, reason=FinishReason.QUARANTINED, error_detail=None)
        return finish


def fingerprint_of(asked: Acquire) -> Fingerprint:
    """What names this body of this tenant for this revision, and nothing of what it says."""
    return asked.tenant, asked.revision, asked.body_digest
