"""Whether the door was right is told by what happened afterwards, and nothing is kept longer than it can matter."""

from weir.sim.runs.verdicts import Door, Verdict
from weir.units import Nanos, ns_from_ms


class Watched:
    """A door with a clock that tests set, in milliseconds."""

    def __init__(self) -> None:
        self.now_ms = 0
        self.door = Door(lambda: ns_from_ms(self.now_ms))
        self.verdict = Verdict()

    def refuse(self, at_ms: int, allowed_ms: int, tenant: str = "a") -> None:
        """A request comes and is refused."""
        self.now_ms = at_ms
        self.door.refused(tenant, ns_from_ms(at_ms), allowed_ms, self.verdict)

    def start(self, arrived_ms: int, at_ms: int, tenant: str = "a") -> None:
        """A request that came then starts now."""
        self.now_ms = at_ms
        arrived_ns: Nanos = ns_from_ms(arrived_ms)
        self.door.started(tenant, arrived_ns)


def test_a_refusal_is_wrong_if_somebody_later_of_its_tenant_started_in_its_time() -> None:
    """Protects "wrongly refused": the same tenant, no earlier arrival, a start within the allowed wait; each counted once."""
    watched = Watched()
    watched.refuse(100, 1_000)
    watched.start(99, 500)  # came before
    watched.start(200, 500, "b")  # another tenant's
    assert watched.verdict.refused == 0
    watched.start(100, 1_100)  # at the same moment, and at the last
    watched.start(150, 1_100)
    assert watched.verdict.refused == 1


def test_a_refusal_was_right_if_the_next_one_started_too_late() -> None:
    """Protects the bound: a start after the allowed wait shows that the refused one would have waited in vain."""
    watched = Watched()
    watched.refuse(100, 1_000)
    watched.refuse(200, 2_000)
    watched.start(300, 1_101)
    assert watched.verdict.refused == 1


def test_refusals_without_a_later_start_are_forgotten() -> None:
    """Protects memory: of a tenant that gets nothing at all, no more is kept than was refused within the allowed wait."""
    watched = Watched()
    for at_ms in range(0, 100_000, 10):
        watched.refuse(at_ms, 1_000)
    assert len(watched.door._refused["a"]) <= 102
    watched.start(100_000, 100_000)
    assert watched.verdict.refused == 100


def test_the_error_of_a_prediction_is_its_distance_from_the_wait() -> None:
    """Protects "wait error": too long and too short alike, and nothing of those who neither waited nor were to."""
    watched, admitted = Watched(), Verdict()
    for number, (predicted_ms, waited_ms) in enumerate([(300, 100), (0, 250), (0, 0), (40, 0)]):
        watched.now_ms = 1_000
        watched.door.admitted(number, predicted_ms)
        watched.now_ms += waited_ms
        watched.door.waited(number, admitted)
    assert list(admitted.wait_error_ms) == [200.0, 250.0, 40.0]
    both = Verdict()
    both.add(admitted)
    both.add(admitted)
    assert len(both.wait_error_ms) == 6
