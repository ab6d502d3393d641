"""The quarantine: two crashes on two replicas within ten minutes, and nothing else, keep a request out."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from weir.core.routing.quarantine import REMEMBERED_NS, Fingerprint, Quarantine
from weir.units import NANOS_PER_MINUTE, Nanos

POISON: Fingerprint = ("acme", "rev", b"poison")
OTHERS: list[Fingerprint] = [("globex", "rev", b"poison"), ("acme", "rev@2", b"poison"), ("acme", "rev", b"other")]
Crash = tuple[Nanos, str]
steps = st.tuples(st.integers(0, 15 * NANOS_PER_MINUTE), st.sampled_from("abc"), st.sampled_from([POISON, *OTHERS]))


def _was_second(crashes: list[Crash], now_ns: Nanos) -> bool:
    """Read backwards from now while each step is within ten minutes: whether two neighbours were on different replicas."""
    later_ns = now_ns
    chain: list[Crash] = []
    for at_ns, replica in reversed(crashes):
        if later_ns - at_ns >= REMEMBERED_NS:
            break
        chain.append((at_ns, replica))
        later_ns = at_ns
    return any(later[1] != earlier[1] for later, earlier in pairwise(chain))


@given(st.lists(steps, max_size=40))
def test_only_two_replicas_within_ten_minutes_quarantine(played: list[tuple[Nanos, str, Fingerprint]]) -> None:
    """Protects the innocent and the fleet: exactly what crashed two replicas within ten minutes is kept out, for a while."""
    quarantine, now_ns = Quarantine(), 0
    crashes: dict[Fingerprint, list[Crash]] = {fingerprint: [] for fingerprint in (POISON, *OTHERS)}
    for gap_ns, replica, fingerprint in played:
        now_ns += gap_ns
        for each, seen in crashes.items():
            assert quarantine.holds(each, now_ns) == _was_second(seen, now_ns)
        crashes[fingerprint].append((now_ns, replica))
        assert quarantine.crashed(fingerprint, replica, now_ns) == _was_second(crashes[fingerprint], now_ns)


def test_it_lasts_ten_minutes_from_the_latest_crash() -> None:
    """Protects the stated figures, to the nanosecond."""
    quarantine, minute_ns = Quarantine(), NANOS_PER_MINUTE
    assert not quarantine.crashed(POISON, "a", 0)
    assert not quarantine.holds(POISON, 0)
    assert quarantine.crashed(POISON, "b", 10 * minute_ns - 1)
    assert quarantine.holds(POISON, 20 * minute_ns - 2) and not quarantine.holds(POISON, 20 * minute_ns - 1)
    assert not quarantine.crashed(POISON, "c", 20 * minute_ns)  # all of it is forgotten
    assert not any(quarantine.holds(other, 10 * minute_ns) for other in OTHERS)


def test_requests_that_ran_side_by_side_count_once() -> None:
    """Protects a client that sent the same twice: one replica that is lost is one crash."""
    quarantine = Quarantine()
    assert not any(quarantine.crashed(POISON, "a", now_ns) for now_ns in range(5))


@given(st.integers(1, 5), st.lists(st.integers(0, 9), max_size=40))
def test_the_table_is_bounded(entries_max: int, bodies: list[int]) -> None:
    """Protects memory: the oldest crash is forgotten first."""
    quarantine = Quarantine(entries_max)
    for number, body in enumerate(bodies):
        quarantine.crashed(("acme", "rev", bytes([body])), f"r{number}", number)
        assert len(quarantine) == min(entries_max, len(set(bodies[: number + 1])), entries_max)
    kept = list(dict.fromkeys(reversed(bodies)))[:entries_max]
    for body in kept:  # each is on another replica than before, so a second crash shows that the first is remembered
        assert quarantine.crashed(("acme", "rev", bytes([body])), "another", len(bodies))


def test_a_body_that_completes_was_not_what_crashed() -> None:
    """Protects monitors and jobs that repeat a body through a rolling restart; what is in quarantine stays there."""
    quarantine = Quarantine()
    quarantine.completed(POISON)
    assert not quarantine.crashed(POISON, "a", 0)
    quarantine.completed(POISON)
    assert not quarantine.crashed(POISON, "b", 1) and quarantine.crashed(POISON, "a", 2)
    quarantine.completed(POISON)
    assert quarantine.holds(POISON, 3)


def test_the_oldest_crash_is_forgotten_first() -> None:
    """Protects memory: beyond the bound a new fingerprint takes the place of the one that crashed longest ago."""
    quarantine = Quarantine(2)
    for number, fingerprint in enumerate([POISON, *OTHERS[:2]]):
        assert not quarantine.crashed(fingerprint, "a", number)
    assert len(quarantine) == 2
    assert not quarantine.crashed(POISON, "b", 3) and quarantine.crashed(OTHERS[1], "b", 4)
