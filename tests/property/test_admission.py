"""The one admission step: checks in their order, the first failure is the answer, and nothing changes."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from weir import errors
from weir.core.admission import Admit, Asked, Bound, Door, Times, decide, door_refusal, idempotency_refusal
from weir.core.endings import Status
from weir.core.ledger.book import Book
from weir.core.metering import Price, worst_case
from weir.core.registry.model import Alias, EngineKind, Pool, Revision, RevisionState
from weir.core.registry.snapshot import Snapshot
from weir.core.tenancy import ApiKey, Application, Limits, Principal, Scope, ServiceClass, Tenant, scopes_of
from weir.units import Moment

REVISION = Revision("rev@1", EngineKind.SIMULATED, "demo", 8_192, 2_048, 128, Price(1, 200_000, 50_000, 600_000))
OTHER = replace(REVISION, id="rev@2", state=RevisionState.REVOKED)
CALLER = Principal("acme", "web", "k1", ServiceClass.INTERACTIVE)
SNAPSHOT = Snapshot(
    tenants={"acme": Tenant("acme")},
    applications={("acme", "web"): Application("acme", "web")},
    keys={b"digest": ApiKey("k1", "acme", "web", b"digest")},
    aliases={"assistant": Alias("assistant", REVISION.id, 64)},
    revisions={REVISION.id: REVISION, OTHER.id: OTHER},
    pools={"pool": Pool("pool", REVISION.id, 1, 4)},
)
ASKED = Asked(CALLER, "assistant", REVISION.id, b"body", 100, 400, 50, 1, 10_000)
OPEN_DOOR = Door(lanes=4, queue_refusal=None, predicted_wait_ms=0, wait_ms_max=5_000, times=Times(), no_capacity_retry_ms=5_000)
RAN = Bound(execution=1, body_digest=b"body", status=Status.COMPLETED, delivered_tokens=5, tenant_tokens=7, cost_microusd=9)


def _limited(**limits: int) -> Book:
    book = Book()
    book.configure({Scope("acme"): Limits(**limits)}, {}, 0)
    return book


def test_admitted() -> None:
    """Protects what is taken: the revision's price, every scope, and the worst case."""
    admit = decide(ASKED, SNAPSHOT, None, Book(), OPEN_DOOR, Moment(0, 0))
    scopes = scopes_of("acme", "web", "k1", "assistant", ServiceClass.INTERACTIVE)
    assert admit == Admit(1, REVISION, REVISION.price, scopes, worst_case(REVISION.price, 100, 50, 1))


def test_a_batch_request_takes_what_it_can_cost_at_its_price() -> None:
    """Protects budgets: a discount counts from the hold on, where it is what lets a request in, and for batch alone."""
    revision = replace(REVISION, price=replace(REVISION.price, batch_percent=50))
    snapshot = replace(SNAPSHOT, revisions={revision.id: revision})
    worst = worst_case(Price(1, 100_000, 25_000, 300_000), 100, 50, 1)
    book = _limited(spend_microusd_lifetime=worst.cost_microusd)
    batch = structs.replace(ASKED, principal=structs.replace(CALLER, service_class=ServiceClass.BATCH))
    admit = decide(batch, snapshot, None, book, OPEN_DOOR, Moment(0, 0))
    assert isinstance(admit, Admit) and (admit.worst, admit.price.version) == (worst, 1)
    assert isinstance(decide(ASKED, snapshot, None, book, OPEN_DOOR, Moment(0, 0)), errors.ExceedsLimitCapacity)


# What is wrong, in the order in which it is found: each row's refusal wins over all rows below it.
WRONGS = ("key", "alias", "revision", "id", "body", "limit", "infeasible", "queue", "lanes", "wait", "deadline")
CODES = {
    "key": "revoked",
    "alias": "unknown_alias",
    "revision": "unknown_alias",
    "id": "request_id_reused",
    "body": "quarantined",
    "limit": "concurrency_limited",
    "infeasible": "deadline_infeasible",
    "queue": "queue_full",
    "lanes": "no_capacity",
    "wait": "queue_wait_exceeded",
    "deadline": "deadline_unmeetable_now",
}


@given(st.sets(st.sampled_from(WRONGS)))
def test_the_first_failure_is_the_answer(wrongs: set[str]) -> None:
    """Protects the order of checks: whatever else is wrong, the earliest check answers."""
    keys = {b"digest": replace(SNAPSHOT.keys[b"digest"], revoked="key" in wrongs)}
    snapshot = replace(SNAPSHOT, keys=keys, aliases={} if "alias" in wrongs else SNAPSHOT.aliases)
    asked = structs.replace(ASKED, revision=OTHER.id if "revision" in wrongs else REVISION.id, is_quarantined="body" in wrongs)
    bound = structs.replace(RAN, body_digest=b"other") if "id" in wrongs else None
    book = _limited(concurrency=0) if "limit" in wrongs else Book()
    door = Door(
        lanes=0 if "lanes" in wrongs else 4,
        queue_refusal=errors.QueueFull() if "queue" in wrongs else None,
        predicted_wait_ms=6_000 if "wait" in wrongs else 20_000 if "deadline" in wrongs else 0,
        times=Times(least_ms=10_000 if "infeasible" in wrongs else 9_999),
        wait_ms_max=5_000 if "wait" in wrongs else 30_000,
        no_capacity_retry_ms=5_000,
    )
    decision = decide(asked, snapshot, bound, book, door, Moment(0, 0))
    if not wrongs:
        assert isinstance(decision, Admit)
        return
    assert isinstance(decision, errors.WeirError)
    assert decision.code == CODES[min(wrongs, key=WRONGS.index)]
    assert book.open_holds == 0


@pytest.mark.parametrize(
    ("asked", "snapshot", "book", "code"),
    [
        (ASKED, replace(SNAPSHOT, aliases={}), Book(), "unknown_alias"),
        (structs.replace(ASKED, is_quarantined=True), SNAPSHOT, Book(), "quarantined"),
        (ASKED, SNAPSHOT, _limited(concurrency=0), "concurrency_limited"),
    ],
)
def test_a_door_that_is_open_is_not_enough(asked: Asked, snapshot: Snapshot, book: Book, code: str) -> None:
    """Protects entitlements, replicas and limits: each refuses though a replica would be free at once."""
    decision = decide(asked, snapshot, None, book, OPEN_DOOR, Moment(0, 0))
    assert isinstance(decision, errors.WeirError) and decision.code == code


def test_a_full_queue_refuses_before_anything_is_predicted() -> None:
    """Protects memory: the queue's own answer comes before that of missing replicas and of the wait."""
    refusal = door_refusal(structs.replace(OPEN_DOOR, queue_refusal=errors.QueueFull(), lanes=0, predicted_wait_ms=9_999), 1)
    assert refusal is not None and refusal.code == "queue_full"


@pytest.mark.parametrize("revision", ["rev@2", "never registered"])
def test_a_revision_that_is_not_live(revision: str) -> None:
    """Protects approval: a pinned revision that was revoked meanwhile, or is unknown, runs nothing."""
    decision = decide(structs.replace(ASKED, revision=revision), SNAPSHOT, None, Book(), OPEN_DOOR, Moment(0, 0))
    assert isinstance(decision, errors.UnknownAlias)


@pytest.mark.parametrize(
    ("bound", "code"),
    [
        (RAN, "output_not_retained"),
        (structs.replace(RAN, body_digest=b"other"), "request_id_reused"),
        (structs.replace(RAN, status=Status.QUEUED), "request_in_flight"),
        (structs.replace(RAN, status=Status.RUNNING), "request_in_flight"),
        (structs.replace(RAN, status=Status.RUNNING, body_digest=b"other"), "request_id_reused"),
        (structs.replace(RAN, status=Status.COMPLETED, delivered_tokens=0, cost_microusd=0), "output_not_retained"),
        (structs.replace(RAN, status=Status.FAILED), "output_not_retained"),
        (structs.replace(RAN, status=Status.FAILED, delivered_tokens=0), "output_not_retained"),
        (structs.replace(RAN, status=Status.CANCELLED, cost_microusd=0), "output_not_retained"),
        (
            structs.replace(RAN, status=Status.CANCELLED, delivered_tokens=0, cost_microusd=0),
            "output_not_retained",
        ),  # free, yet counted
        (structs.replace(RAN, status=Status.FAILED, delivered_tokens=0, tenant_tokens=0, cost_microusd=0), None),
        (structs.replace(RAN, status=Status.EXPIRED, delivered_tokens=0, tenant_tokens=0, cost_microusd=0), None),
        (structs.replace(RAN, forgotten=True), None),
        (structs.replace(RAN, forgotten=True, body_digest=b"other"), None),
    ],
)
def test_a_bound_request_id(bound: Bound, code: str | None) -> None:
    """Protects idempotency: only what delivered and cost nothing and did not complete runs again, as the next execution."""
    refusal = idempotency_refusal(b"body", bound)
    assert (refusal.code if refusal else None) == code
    decision = decide(ASKED, SNAPSHOT, bound, Book(), OPEN_DOOR, Moment(0, 0))
    if code is None:
        assert isinstance(decision, Admit) and decision.execution == 2
    else:
        assert isinstance(decision, errors.WeirError) and decision.code == code


def door(wait_ms: int = 0, **times: int) -> Door:
    """An open door with this wait and these times."""
    return structs.replace(OPEN_DOOR, predicted_wait_ms=wait_ms, times=Times(**times))


@pytest.mark.parametrize(
    ("door", "deadline_ms", "code", "retry_after_ms"),
    [
        (OPEN_DOOR, 1, None, None),
        (structs.replace(OPEN_DOOR, lanes=0), 10_000, "no_capacity", 5_000),
        (door(5_000), 10_000, None, None),
        (door(5_001), 10_000, "queue_wait_exceeded", 1),
        (door(2_000), 2_000, "deadline_unmeetable_now", 1),
        (door(1_999), 2_000, None, None),
        (OPEN_DOOR, 0, "deadline_unmeetable_now", 1),
        (OPEN_DOOR, -5, "deadline_unmeetable_now", 6),
        (door(least_ms=500), 500, "deadline_infeasible", None),
        (door(least_ms=500), 501, None, None),
        (door(least_ms=500), -5, "deadline_infeasible", None),
        (door(prefill_ms=600, least_ms=500, idle_ms=600, idle_prefill_ms=600), 600, "deadline_unmeetable_now", 1),
        (door(100, prefill_ms=200, decode_ms=300, idle_ms=599, least_ms=50), 600, "deadline_unmeetable_now", 1),
        (door(100, prefill_ms=200, decode_ms=300, idle_ms=600, least_ms=50), 600, None, None),
        (door(100, prefill_ms=200, decode_ms=300, idle_ms=600, idle_prefill_ms=200), 300, "deadline_unmeetable_now", 1),
        (door(100, prefill_ms=200, decode_ms=300, idle_ms=350, least_ms=50), 601, None, None),
        (door(100, prefill_ms=200, least_ms=50), 301, None, None),
    ],
)
def test_the_door(door: Door, deadline_ms: int, code: str | None, retry_after_ms: int | None) -> None:
    """Protects the queue's promises at their edges, and says when it is predicted to fit."""
    refusal = door_refusal(door, deadline_ms)
    assert (refusal.code if refusal else None) == code
    assert (refusal.retry_after_ms if refusal else None) == retry_after_ms
    if code in ("deadline_unmeetable_now", "deadline_infeasible"):
        assert refusal is not None and refusal.members["deadline_ms"] >= 0


millis = st.integers(0, 3_000)
all_times = st.builds(
    lambda least, queued, decode, idle: Times(least + queued, decode, least + min(idle, decode), least, least),
    millis,
    millis,
    millis,
    millis,
)


@given(all_times, millis, st.integers(-100, 9_000))
def test_a_refusal_for_good_is_one_that_no_wait_would_cure(times: Times, wait_ms: int, deadline_ms: int) -> None:
    """Protects callers from a 400 for what is only busy: it depends on the best case alone, and a longer deadline cures it."""
    refusal = door_refusal(structs.replace(OPEN_DOOR, predicted_wait_ms=wait_ms, times=times), deadline_ms)
    is_infeasible = refusal is not None and refusal.code == "deadline_infeasible"
    assert is_infeasible == (0 < times.least_ms >= deadline_ms)
    if is_infeasible:
        assert refusal is not None and refusal.retry_after_ms is None
        later = door_refusal(structs.replace(OPEN_DOOR, times=Times(least_ms=times.least_ms)), times.least_ms + 1)
        assert later is None


def later_ms(times: Times, wait_ms: int, deadline_ms: int, passed_ms: int) -> float:
    """What a request takes then, if nothing was observed since: the wait has passed, half of the excess is left after 10 s."""
    kept: float = 0.5 ** (passed_ms / 10_000)
    total_ms = times.idle_prefill_ms + (times.prefill_ms - times.idle_prefill_ms) * kept
    if times.idle_ms < deadline_ms:
        idle_decode_ms = times.idle_ms - times.idle_prefill_ms
        total_ms += idle_decode_ms + (times.decode_ms - idle_decode_ms) * kept
    return max(0, wait_ms - passed_ms) + total_ms


@given(all_times, millis, st.integers(1, 9_000))
def test_the_door_opens_when_it_says(times: Times, wait_ms: int, deadline_ms: int) -> None:
    """Protects Retry-After: once it has passed and nobody else came the request would be in time, and not much sooner."""
    now = structs.replace(OPEN_DOOR, predicted_wait_ms=wait_ms, times=times)
    refusal = door_refusal(now, deadline_ms)
    if refusal is None or refusal.code != "deadline_unmeetable_now":
        return
    late_ms = refusal.retry_after_ms
    assert late_ms is not None and late_ms >= 1
    assert refusal.members["predicted_ms"] == wait_ms + times.total_ms(deadline_ms)
    if (times.idle_ms if times.idle_ms < deadline_ms else times.idle_prefill_ms) >= deadline_ms:
        assert late_ms == refusal.members["predicted_ms"] - deadline_ms + 1
    else:
        longest_ms = wait_ms + 100_000
        assert late_ms == longest_ms or later_ms(times, wait_ms, deadline_ms, late_ms) < deadline_ms + 1e-6
        assert late_ms == 1 or later_ms(times, wait_ms, deadline_ms, late_ms - 1) >= deadline_ms - 2 - 1e-6


@pytest.mark.parametrize(
    ("door", "deadline_ms", "retry_after_ms"),
    [
        (door(prefill_ms=1_000, decode_ms=7_000, idle_ms=4_000, idle_prefill_ms=1_000), 6_000, 10_015),
        (door(3_000, prefill_ms=1_000, decode_ms=7_000, idle_ms=4_000, idle_prefill_ms=1_000), 6_000, 10_015),
        (door(3_000, prefill_ms=1_000, decode_ms=3_000, idle_ms=4_000, idle_prefill_ms=1_000), 6_000, 1_001),
        (door(prefill_ms=1_800, decode_ms=7_000, idle_ms=4_000, idle_prefill_ms=200), 1_000, 10_037),
        (door(prefill_ms=900, decode_ms=7_000, idle_ms=4_000, idle_prefill_ms=600), 500, 401),
        (door(prefill_ms=1_000, decode_ms=11_000, idle_ms=4_000, idle_prefill_ms=1_000), 4_003, 100_000),
    ],
)
def test_when_the_door_opens_again(door: Door, deadline_ms: int, retry_after_ms: int) -> None:
    """Protects callers from a Retry-After in vain: half of what is slower than idle is left after ten seconds."""
    refusal = door_refusal(door, deadline_ms)
    assert refusal is not None and refusal.retry_after_ms == retry_after_ms


@given(all_times, millis, st.integers(1, 9_000), st.integers(0, 9_000), millis)
def test_more_time_or_a_shorter_wait_never_turns_an_admission_into_a_refusal(
    times: Times, wait_ms: int, deadline_ms: int, more_ms: int, less_ms: int
) -> None:
    """Protects callers that are patient: whoever has more time, or comes when less waits, is admitted as well.

    Unless the expected answer would fit an idle replica with that time, and did not before: then all of it has to fit.
    """
    now = structs.replace(OPEN_DOOR, predicted_wait_ms=wait_ms, times=times)
    if door_refusal(now, deadline_ms) is None:
        if (times.idle_ms < deadline_ms) == (times.idle_ms < deadline_ms + more_ms):
            assert door_refusal(now, deadline_ms + more_ms) is None
        assert door_refusal(structs.replace(now, predicted_wait_ms=max(0, wait_ms - less_ms)), deadline_ms) is None
