"""What the coordinator foresaw at the door, asked as its answer comes: the predicted wait, and the wait that was allowed.

It reads what the product keeps for its own explanations and adds nothing; whether it was right is judged in `verdicts`.
"""

from weir import errors
from weir.coordinator.execution_table import ExecutionTable
from weir.coordinator.explain import Timelines
from weir.messages import Rejected
from weir.units import Millis


class Foresight:
    """Of one coordinator. door_ms_max: the longest predicted wait that is let in."""

    def __init__(self, executions: ExecutionTable, timelines: Timelines, door_ms_max: Millis) -> None:
        self._executions = executions
        self._timelines = timelines
        self._door_ms_max = door_ms_max

    def wait_ms(self, tenant: str, request_id: str) -> Millis:
        """The predicted wait of a request that is admitted now."""
        execution = self._executions.get(tenant, request_id)
        assert execution is not None, "an admitted request is in memory"
        return execution.predicted_wait_ms

    def allowed_ms(self, tenant: str, request_id: str, rejected: Rejected) -> Millis | None:
        """The longest wait with which a request that is refused now would have been let in.

        None: it was refused for something else. Its deadline allows what is left of it after the time from its start that the
        door reckoned with.
        """
        if rejected.code == errors.QueueWaitExceeded.code:
            return self._door_ms_max
        if rejected.code != errors.DeadlineUnmeetableNow.code:
            return None
        events = self._timelines.of(request_id, tenant)[0]["events"]
        predicted_wait_ms: Millis = next(event["predicted_wait_ms"] for event in events if event["event"] == "rejected")
        late_ms: Millis = rejected.members["predicted_ms"] - rejected.members["deadline_ms"]
        return min(self._door_ms_max, max(0, predicted_wait_ms - late_ms))
