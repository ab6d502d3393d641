"""One simulated request's course: what its client asked, where it is now, and what became of it. Plain state, no decisions."""

from weir.core.registry.model import WorkloadClass
from weir.sim.runs.arrivals import Arrival
from weir.units import Nanos, Tokens


class Course:
    """Changed by the gateway's side alone.

    attempt: of the run under way, or the last one. asked, booked: output asked for and durably booked. first_ns, last_ns: its
    engine's first token, and its last once it ended; handed_ns: when its client got the first. is_over: its end was reported;
    is_ended: the coordinator said how.
    """

    __slots__ = (
        "arrival",
        "arrived_ns",
        "asked",
        "attempt",
        "booked",
        "deadline_ns",
        "first_ns",
        "granted_ns",
        "handed_ns",
        "hold_booked",
        "is_admitted",
        "is_ended",
        "is_over",
        "is_waiting",
        "last_ns",
        "max_output_tokens",
        "ref",
        "workload",
    )

    def __init__(self, ref: int, arrival: Arrival, workload: WorkloadClass, arrived_ns: Nanos) -> None:
        self.ref = ref
        self.arrival = arrival
        self.workload = workload
        self.arrived_ns = arrived_ns
        self.deadline_ns: Nanos = 0
        self.max_output_tokens: Tokens = arrival.output_tokens
        self.granted_ns: Nanos | None = None
        self.hold_booked = self.is_admitted = self.is_waiting = self.is_over = self.is_ended = False
        self.attempt = 0
        self.leave_attempt()

    def leave_attempt(self) -> None:
        """Nothing of an attempt passes over to the next."""
        self.asked: Tokens = 0
        self.booked: Tokens = 0
        self.first_ns: Nanos | None = None
        self.last_ns: Nanos | None = None
        self.handed_ns: Nanos | None = None

    @property
    def ttft_ms(self) -> float | None:
        """From arrival to the first output that its client got."""
        return None if self.handed_ns is None else (self.handed_ns - self.arrived_ns) / 1e6

    @property
    def tpot_ms(self) -> float | None:
        """Per output token after the first, once its engine ended; None for fewer than two."""
        later = self.arrival.output_tokens - 1
        if self.first_ns is None or self.last_ns is None or not later:
            return None
        return (self.last_ns - self.first_ns) / 1e6 / later
