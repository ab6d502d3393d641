"""What a refusal or a failure means for a batch's line: every code and every ending is waited for, or given up, on purpose."""

import pytest

from weir import errors
from weir.api.wire import members_of
from weir.core.batches.pacing import (
    EXECUTIONS_MAX,
    FIRST_WAIT_MS,
    LONGEST_WAIT_MS,
    After,
    GiveUp,
    Pause,
    Wait,
    after_failure,
    after_refusal,
    was_in_vain,
)
from weir.core.endings import ENDING_BY_REASON, FinishReason, Status

NOW_MS = 1_774_738_800_000

GIVES_UP_AT_ONCE = {
    "invalid_request",
    "unsupported_field",
    "conflicting_fields",
    "input_too_long",
    "deadline_infeasible",
    "exceeds_limit_capacity",
    "request_too_large",
    "unauthenticated",
    "forbidden",
    "revoked",
    "unknown_alias",
    "not_found",
    "method_not_allowed",
    "output_not_retained",
    "already_exists",
    "not_allowed_now",
    "stream_not_retained",
    "artifact_refused",
    "request_id_reused",
    "signature_refused",
    "quarantined",
    "engine_rejected",
    "request_cancelled",
}
GIVES_UP_IN_THE_END = {"engine_error", "stalled", "deadline_exceeded"}
WAITS = {
    "request_in_flight",
    "requests_limited",
    "tokens_limited",
    "concurrency_limited",
    "queue_full",
    "queue_wait_exceeded",
    "deadline_unmeetable_now",
    "no_capacity",
    "snapshot_expired",
    "issuer_unavailable",
    "draining",
    "replica_lost",
    "coordinator_lost",
    "link_fault",
    "shutdown",
    "preempted",
    "internal_error",
    "artifacts_unavailable",
    "batch_damaged",
    "file_store_unavailable",
    "ledger_unavailable",
    "stream_store_unavailable",
    "stale_epoch",
    "state_locked",
    "state_unreadable",
}
PAUSES = {"budget_exhausted"}


def test_every_code_has_its_meaning_for_a_line() -> None:
    """Protects batches from a new code: it is in one of these sets before it means anything."""
    assert len(GIVES_UP_AT_ONCE) + len(GIVES_UP_IN_THE_END) + len(WAITS) + len(PAUSES) == len(errors.ERROR_BY_CODE)
    assert errors.ERROR_BY_CODE.keys() == GIVES_UP_AT_ONCE | GIVES_UP_IN_THE_END | WAITS | PAUSES


@pytest.mark.parametrize("code", errors.ERROR_BY_CODE)
def test_a_refusal_waits_pauses_or_is_the_lines_error(code: str) -> None:
    """Protects lines: what waiting cures is never given up, what would fail again is given up at once."""
    expected: list[After] = [_growing(refusals) for refusals in range(1, 9)]
    if code in GIVES_UP_AT_ONCE:
        expected = [GiveUp()] * 8
    elif code in GIVES_UP_IN_THE_END:
        expected = expected[: EXECUTIONS_MAX - 1] + [GiveUp()] * (9 - EXECUTIONS_MAX)
    elif code in PAUSES:
        expected = [Pause(code, None)] * 8
    assert [after_refusal(code, None, {}, refusals) for refusals in range(1, 9)] == expected


def _growing(times: int) -> Wait:
    return Wait(min(FIRST_WAIT_MS * 2 ** (times - 1), LONGEST_WAIT_MS))


@pytest.mark.parametrize("code", errors.ERROR_BY_CODE)
@pytest.mark.parametrize("refusals", [1, 3, 1_000_000])
def test_a_refusal_with_a_retry_after_is_never_given_up(code: str, refusals: int) -> None:
    """Protects lines: where a refusal says that waiting helps it is waited for so long, however often."""
    for retry_after_ms in (0, 1, 700, 3_600_000):
        after = after_refusal(code, retry_after_ms, {}, refusals)
        assert after == (Pause(code, None) if code in PAUSES else Wait(max(1, retry_after_ms)))


@pytest.mark.parametrize("times", [0, 1, 50, 10**9])
def test_a_wait_is_bounded(times: int) -> None:
    """Protects the worker: it neither spins nor sleeps a batch away."""
    for after in (after_refusal("queue_full", None, {}, times), after_failure(FinishReason.SHUTDOWN, times)):
        assert isinstance(after, Wait) and FIRST_WAIT_MS <= after.ms <= LONGEST_WAIT_MS


def test_an_exhausted_budget_pauses_until_its_window_ends() -> None:
    """Protects the pause: the time is the one that the surface shows, to the millisecond; a lifetime has none."""
    refusal = errors.BudgetExhausted(members={"reset_ms": 12_345, "limit": 9}, retry_after_ms=12_345)
    shown = members_of(refusal, NOW_MS + 7)
    assert after_refusal(refusal.code, 12_345, shown, 1) == Pause("budget_exhausted", NOW_MS + 7 + 12_345)
    assert after_refusal(refusal.code, None, {"limit": 9}, 1) == Pause("budget_exhausted", None)


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        ("2026-03-29T00:00:00.001+01:00", 1_774_738_800_001),
        ("2026-03-28T23:00:00.0000001Z", 1_774_738_800_000),
        ("2026-03-28T23:00:00.000001Z", 1_774_738_800_001),
        ("2026-03-28T23:00:00", None),
        ("tomorrow", None),
        (1_774_738_800, None),
    ],
)
def test_a_reset_is_a_time_or_unknown(shown: object, expected: int | None) -> None:
    """Protects the pause from a text that is no time: it lasts until the worker asks again."""
    assert after_refusal("budget_exhausted", None, {"resets_at": shown}, 1) == Pause("budget_exhausted", expected)


ENDS_GIVEN_UP = {FinishReason.ENGINE_REJECTED, FinishReason.QUARANTINED, FinishReason.CLIENT, FinishReason.REVOKED}
ENDS_TRIED_AGAIN = {FinishReason.ENGINE_ERROR, FinishReason.STALLED, FinishReason.DEADLINE, FinishReason.SLOW_CLIENT}
ENDS_WAITED_FOR = {
    FinishReason.DISCONNECT,
    FinishReason.QUEUE_WAIT,
    FinishReason.REPLICA_LOST,
    FinishReason.NO_CAPACITY,
    FinishReason.LEDGER_UNAVAILABLE,
    FinishReason.COORDINATOR_LOST,
    FinishReason.SHUTDOWN,
    FinishReason.PREEMPTED,
}
COMPLETED = {reason for reason, rule in ENDING_BY_REASON.items() if rule.status is Status.COMPLETED}


def test_every_ending_has_its_meaning_for_a_line() -> None:
    """Protects batches from a new ending: it is in one of these sets before it means anything."""
    parts = (ENDS_GIVEN_UP, ENDS_TRIED_AGAIN, ENDS_WAITED_FOR, COMPLETED)
    assert sum(map(len, parts)) == len(FinishReason)
    assert set().union(*parts) == set(FinishReason)


@pytest.mark.parametrize("reason", sorted(set(FinishReason) - COMPLETED))
def test_an_execution_that_failed_is_repeated_or_the_lines_error(reason: FinishReason) -> None:
    """Protects lines from the platform's faults, and the platform from a line that fails again and again."""
    found = [after_failure(reason, executions) for executions in range(1, 6)]
    if reason in ENDS_GIVEN_UP:
        assert found == [GiveUp()] * 5
    elif reason in ENDS_TRIED_AGAIN:
        assert found == [_growing(1), _growing(2), GiveUp(), GiveUp(), GiveUp()]
    else:
        assert found == [_growing(executions) for executions in range(1, 6)]


@pytest.mark.parametrize("reason", sorted(COMPLETED))
def test_a_completed_line_is_no_failure(reason: FinishReason) -> None:
    """Protects results: what completed is never run again."""
    with pytest.raises(AssertionError):
        after_failure(reason, 1)


def test_time_that_was_over_in_a_queue_is_no_try() -> None:
    """Protects lines on full pools: only what ran until its deadline counts against the tries of a line."""
    assert was_in_vain(FinishReason.DEADLINE, 0)
    assert not was_in_vain(FinishReason.DEADLINE, 1) and not was_in_vain(FinishReason.ENGINE_ERROR, 0)


def test_what_made_room_for_somebody_else_is_no_try() -> None:
    """Protects lines on busy pools: they give way as often as they must, and each of their own tries is left to them."""
    assert was_in_vain(FinishReason.PREEMPTED, 0) and was_in_vain(FinishReason.PREEMPTED, 100)
