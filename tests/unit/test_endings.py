"""The table of endings, row by row as the public contract prints it."""

import pytest

from weir.core.endings import ENDING_BY_REASON, Availability, FinishReason, Payer, Status, ending
from weir.errors import ERROR_BY_CODE

GENERATED, DELIVERED = Payer.TENANT_GENERATED, Payer.TENANT_DELIVERED
PLATFORM, NOBODY = Payer.PLATFORM, Payer.NOBODY
GOOD, BAD, NOT_COUNTED = Availability.GOOD, Availability.BAD, Availability.NOT_COUNTED

# status, finish reason, HTTP status on native and compatible paths, code, retry if nothing was generated, payer, availability
ROWS = [
    ("completed", "stop", 200, 200, None, False, GENERATED, GOOD),
    ("completed", "length", 200, 200, None, False, GENERATED, GOOD),
    ("completed", "tool_calls", 200, 200, None, False, GENERATED, GOOD),
    ("completed", "content_filter", 200, 200, None, False, GENERATED, GOOD),
    ("cancelled", "client", 200, 409, "request_cancelled", False, GENERATED, NOT_COUNTED),
    ("cancelled", "disconnect", 409, 409, "request_cancelled", False, GENERATED, NOT_COUNTED),
    ("cancelled", "slow_client", 409, 409, "request_cancelled", False, GENERATED, NOT_COUNTED),
    ("cancelled", "revoked", 403, 403, "revoked", False, GENERATED, NOT_COUNTED),
    ("expired", "queue_wait", 503, 503, "queue_wait_exceeded", True, NOBODY, BAD),
    ("expired", "deadline", 504, 504, "deadline_exceeded", False, DELIVERED, BAD),
    ("failed", "engine_error", 502, 502, "engine_error", True, PLATFORM, BAD),
    ("failed", "replica_lost", 502, 502, "replica_lost", True, PLATFORM, BAD),
    ("failed", "stalled", 502, 502, "stalled", True, PLATFORM, BAD),
    ("failed", "no_capacity", 503, 503, "no_capacity", True, PLATFORM, BAD),
    ("failed", "ledger_unavailable", 503, 503, "ledger_unavailable", True, PLATFORM, BAD),
    ("failed", "coordinator_lost", 503, 503, "coordinator_lost", True, PLATFORM, BAD),
    ("failed", "shutdown", 503, 503, "shutdown", True, PLATFORM, BAD),
    ("failed", "preempted", 503, 503, "preempted", True, PLATFORM, NOT_COUNTED),
    ("failed", "quarantined", 422, 422, "quarantined", False, PLATFORM, BAD),
    ("failed", "engine_rejected", 400, 400, "engine_rejected", False, NOBODY, NOT_COUNTED),
]


def test_the_table_equals_the_public_one() -> None:
    """Protects the public contract: status, HTTP, retry, payer and availability of every finish reason."""
    ours = [
        (
            rule.status.value,
            rule.reason.value,
            rule.http_status,
            rule.compatible_http_status,
            rule.error.code if rule.error else None,
            rule.retry_if_nothing_generated,
            rule.payer,
            rule.availability,
        )
        for rule in ENDING_BY_REASON.values()
    ]
    assert ours == ROWS


@pytest.mark.parametrize("reason", FinishReason)
def test_every_finish_reason_has_its_row(reason: FinishReason) -> None:
    """Protects the closed set: each reason names one row, and only terminal statuses have rows."""
    rule = ending(reason)
    assert rule.reason is reason
    assert rule.status not in (Status.QUEUED, Status.RUNNING)


@pytest.mark.parametrize("reason", FinishReason)
def test_a_row_and_its_error_agree(reason: FinishReason) -> None:
    """Protects SDK behaviour: what must not be retried has a status that SDKs leave alone, or an error that forbids it."""
    rule = ending(reason)
    if rule.error is None:
        assert rule.status is Status.COMPLETED
        return
    assert ERROR_BY_CODE[rule.error.code] is rule.error
    retried_by_status = rule.error.http_status in (408, 409, 429) or rule.error.http_status >= 500
    retried = retried_by_status if rule.error.should_retry is None else rule.error.should_retry
    assert retried == rule.retry_if_nothing_generated
