"""Evidence: which pairs are made against a plain model, that they are fair, and that memory stays bounded."""

from dataclasses import dataclass, field, replace
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.core.endings import FinishReason, Status, ending
from weir.core.registry.evidence import (
    UNUSED_MAX,
    Arm,
    Evidence,
    EvidenceWindow,
    Outcome,
    Pairs,
    Sample,
    Tally,
    outcome_of,
)
from weir.core.registry.rollout_plan import Tolerances

TOLERANCES = Tolerances()
GOOD = Sample("short", Outcome.GOOD, 100.0, 20.0, 50)

OUTCOMES = {
    Outcome.GOOD: {"stop", "length", "tool_calls", "content_filter"},
    Outcome.CANCELLED: {"client", "disconnect", "slow_client"},
    Outcome.ERROR: {
        "deadline",
        "engine_error",
        "replica_lost",
        "stalled",
        "no_capacity",
        "quarantined",
        "engine_rejected",
    },
    Outcome.NOT_COUNTED: {"revoked", "queue_wait", "ledger_unavailable", "coordinator_lost", "shutdown", "preempted"},
}


@pytest.mark.parametrize("reason", FinishReason)
def test_what_an_ending_says_about_the_revision(reason: FinishReason) -> None:
    """Protects both sides: a revision is blamed for what it did, and for nothing that others did or that never reached it."""
    expected = next(outcome for outcome, reasons in OUTCOMES.items() if reason.value in reasons)
    assert outcome_of(reason, was_dispatched=True) is expected
    waiting = Outcome.ERROR if reason is FinishReason.NO_CAPACITY else Outcome.NOT_COUNTED
    assert outcome_of(reason, was_dispatched=False) is waiting
    assert (expected is Outcome.GOOD) == (ending(reason).status is Status.COMPLETED)


def _window(*samples: tuple[Arm, Sample]) -> Evidence:
    window = EvidenceWindow(TOLERANCES)
    for arm, sample in samples:
        window.add(arm, sample)
    return window.evidence()


@pytest.mark.parametrize(
    ("canary", "worse"),
    [
        (GOOD, set()),
        (replace(GOOD, first_token_ms=125.0), set()),
        (replace(GOOD, first_token_ms=125.1), {"first_token"}),
        (replace(GOOD, tpot_ms=25.0), set()),
        (replace(GOOD, tpot_ms=25.1), {"per_token"}),
        (replace(GOOD, output_tokens=75), set()),
        (replace(GOOD, output_tokens=76), {"longer_output"}),
        (replace(GOOD, output_tokens=34), set()),
        (replace(GOOD, output_tokens=33), {"shorter_output"}),
        (replace(GOOD, first_token_ms=1.0, tpot_ms=1.0), set()),
    ],
)
def test_worse_is_beyond_the_tolerance(canary: Sample, worse: set[str]) -> None:
    """Protects the meaning of a tolerance: exactly at it is not worse, better is never worse."""
    found = msgspec.structs.asdict(_window((Arm.STABLE, GOOD), (Arm.CANARY, canary)))
    for name in ("first_token", "per_token", "longer_output", "shorter_output"):
        assert found[name] == Pairs(1, int(name in worse))


def test_what_was_not_measured_is_not_compared() -> None:
    """Protects against comparing nothing with something: errors have no length, and some answers have one token or none."""
    error = Sample("short", Outcome.ERROR, None, None, 3)
    assert _window((Arm.STABLE, error), (Arm.CANARY, GOOD)) == Evidence(Tally(1, 1, 0), Tally(1))
    assert _window((Arm.STABLE, GOOD), (Arm.CANARY, error)) == Evidence(Tally(1), Tally(1, 1, 0))
    left = Sample("short", Outcome.CANCELLED, 500.0, None, 3)
    assert _window((Arm.STABLE, GOOD), (Arm.CANARY, left)) == Evidence(Tally(1), Tally(1, 0, 1), first_token=Pairs(1, 1))
    ignored = replace(GOOD, outcome=Outcome.NOT_COUNTED)
    assert _window((Arm.STABLE, ignored), (Arm.CANARY, ignored)) == Evidence()


def test_a_partner_is_of_the_same_class_and_used_once() -> None:
    """Protects the comparison: a long prompt is no partner of a short one, and one stable request is no two partners."""
    long = replace(GOOD, workload_class="long", first_token_ms=900.0)
    assert _window((Arm.STABLE, GOOD), (Arm.CANARY, long)).first_token == Pairs()
    assert _window((Arm.STABLE, GOOD), (Arm.CANARY, GOOD), (Arm.CANARY, GOOD)).first_token == Pairs(1, 0)


def test_a_partner_is_the_newest() -> None:
    """Protects against another time's load: the stable revision got slow a moment ago, and so did the canary."""
    slow = replace(GOOD, first_token_ms=400.0)
    before = [(Arm.STABLE, GOOD)] * 50
    assert _window(*before, (Arm.STABLE, slow), (Arm.CANARY, slow)).first_token == Pairs(1, 0)
    after = [(Arm.CANARY, GOOD)] * 50
    assert _window(*before, *after).first_token == Pairs(UNUSED_MAX, 0)


@dataclass
class _Model:
    """Lists instead of bounded queues."""

    tallies: dict[Arm, list[int]] = field(default_factory=lambda: {arm: [0, 0, 0] for arm in Arm})
    waiting: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    pairs: dict[str, list[bool]] = field(default_factory=dict)

    def add(self, arm: Arm, sample: Sample) -> None:
        if sample.outcome is Outcome.NOT_COUNTED:
            return
        for place, counts in enumerate((True, sample.outcome is Outcome.ERROR, sample.outcome is Outcome.CANCELLED)):
            self.tallies[arm][place] += counts
        length = sample.output_tokens if sample.outcome is Outcome.GOOD else None
        measured = (
            ("first_token", sample.first_token_ms, 1.25, False),
            ("per_token", sample.tpot_ms, 1.25, False),
            ("longer_output", length, 1.5, False),
            ("shorter_output", length, 1.5, True),
        )
        for name, value, factor, is_swapped in measured:
            waiting = self.waiting.setdefault((sample.workload_class, name), [])
            if value is None:
                continue
            if arm is Arm.STABLE:
                waiting.append(value)
            elif waiting[-UNUSED_MAX:]:
                stable = waiting.pop()
                high, low = (stable, value) if is_swapped else (value, stable)
                self.pairs.setdefault(name, []).append(high > low * factor)
            del waiting[:-UNUSED_MAX]

    def evidence(self) -> Evidence:
        def pairs(name: str) -> Pairs:
            made = self.pairs.get(name, [])
            return Pairs(len(made), sum(made))

        return Evidence(
            Tally(*self.tallies[Arm.STABLE]),
            Tally(*self.tallies[Arm.CANARY]),
            pairs("first_token"),
            pairs("per_token"),
            pairs("longer_output"),
            pairs("shorter_output"),
        )


numbers = st.integers(0, 40).map(float)
samples = st.builds(
    Sample,
    st.sampled_from(["short", "long"]),
    st.sampled_from(Outcome),
    st.none() | numbers,
    st.none() | numbers,
    st.integers(0, 40),
)


@given(st.lists(st.tuples(st.sampled_from(Arm), samples), max_size=80))
def test_a_window_counts_what_plain_lists_count(added: list[tuple[Arm, Sample]]) -> None:
    """Protects the evidence: tallies and pairs as counted by hand, and the same after a link and a store."""
    model = _Model()
    for arm, sample in added:
        model.add(arm, sample)
    found = _window(*added)
    assert found == model.evidence()
    assert msgspec.json.decode(msgspec.json.encode(found), type=Evidence) == found
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=Evidence) == found


def test_equal_shares_find_their_partners() -> None:
    """Protects the last steps: where it is a draw who comes next, most of the canary's requests are compared."""
    random = Random(1)
    found = _window(*((random.choice(list(Arm)), GOOD) for _ in range(4_000)))
    assert found.first_token.pairs > 0.85 * found.canary.requests


def test_alike_revisions_are_worse_in_less_than_half_of_the_pairs() -> None:
    """Protects the argument that a half refutes: also with a tail without a mean, and with load that only time explains."""
    random, window = Random(2), EvidenceWindow(replace(TOLERANCES, first_token_percent=0))
    for number in range(20_000):
        load = 1.0 + 3.0 * (number // 2_000 % 2)
        arm = Arm.CANARY if random.random() < 0.1 else Arm.STABLE
        window.add(arm, replace(GOOD, first_token_ms=load * random.paretovariate(1.0)))
    pairs = window.evidence().first_token
    assert pairs.pairs > 1_500
    assert abs(pairs.worse / pairs.pairs - 0.5) < 0.04
