"""What is decided of a batch: what it may cost, how long it may take, how it is named and shown, what it writes."""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import msgspec
import pytest

from weir import errors
from weir.core.batches.batch_records import (
    AliasDemand,
    BatchCounts,
    BatchEnd,
    BatchProgress,
    BatchRecord,
    BatchStatus,
    CancelMark,
    FileRecord,
    Purpose,
    line_request_id,
    new_id,
)
from weir.core.batches.batch_view import BatchView, view_of
from weir.core.batches.completion_window import WINDOW_MS_MAX, window_ms
from weir.core.batches.demand_sum import ALIASES_MAX, DemandSum
from weir.core.batches.result_lines import answer_line, error_line
from weir.core.batches.worst_case import refuse_unaffordable, worst_by_scope
from weir.core.demands import Demands, Embedding
from weir.core.ledger.account import BUDGETS, Budget
from weir.core.ledger.book import Book
from weir.core.metering import Price, Worst, upper_bound_of_input, worst_case
from weir.core.registry.model import Alias, Canary, EngineKind, Revision
from weir.core.registry.snapshot import Snapshot
from weir.core.request import InferenceRequest, Message
from weir.core.tenancy import Application, Limits, Principal, Scope, ServiceClass, Tenant, scopes_of
from weir.core.windows import LIFETIME_WINDOW
from weir.units import Moment

# ── what a file asks for, and what that may cost ─────────────────────────────────────────────────────────────────────

NOW = Moment(0, 1_774_738_800_000)
CALLER = Principal("acme", "jobs", "k1", ServiceClass.BATCH)
WHOLE = Price(1, 2_000_000, 1_000_000, 3_000_000)
"""Micro-dollars a token: no cost is rounded."""
PARTS = Price(1, 333_333, 400_001, 777_777, batch_percent=37)
LARGE = Revision("large@1", EngineKind.SIMULATED, "demo", 8_192, 2_048, 256, WHOLE)
SMALL = Revision("small@1", EngineKind.SIMULATED, "demo", 8_192, 100, 256, PARTS)
VECTORS = Revision("vectors@1", EngineKind.SIMULATED, "demo", 8_192, 1, 1, PARTS)

SNAPSHOT = Snapshot(
    tenants={"acme": Tenant("acme")},
    applications={("acme", "jobs"): Application("acme", "jobs", ServiceClass.BATCH, frozenset({"large", "small", "vectors"}))},
    aliases={
        "large": Alias("large", LARGE.id, 64),
        "small": Alias("small", SMALL.id, 400),
        "vectors": Alias("vectors", VECTORS.id, 1),
        "other": Alias("other", LARGE.id, 64),
    },
    revisions={revision.id: revision for revision in (LARGE, SMALL, VECTORS)},
)

REQUESTS = (
    InferenceRequest("large", "Hello", max_output_tokens=50),
    InferenceRequest("small", "Grüße"),
    InferenceRequest("large", (Message("system", "Be brief."), Message("user", "Hi")), demands=Demands(choices=3)),
    InferenceRequest("small", "", max_output_tokens=7, demands=Demands(choices=2)),
    InferenceRequest("vectors", "", demands=Demands(embedding=Embedding(("one", "two")))),
    InferenceRequest("vectors", "", max_output_tokens=9, demands=Demands(embedding=Embedding(("three",)))),
)


def summed(requests: tuple[InferenceRequest, ...]) -> tuple[AliasDemand, ...]:
    demands = DemandSum()
    for request in requests:
        demands.add(request)
    return demands.result()


def file_of(demands: tuple[AliasDemand, ...]) -> FileRecord:
    return FileRecord("file-1", Purpose.BATCH, "in.jsonl", 1, 0, 1, "jobs", demands=demands)


def hold_of(request: InferenceRequest, snapshot: Snapshot = SNAPSHOT) -> Worst:
    """What admission holds for a request whose input no replica counted."""
    alias, revision = snapshot.resolve(CALLER, request.model_alias)
    if request.demands.embedding is not None:
        output = 1
    elif request.max_output_tokens is not None:
        output = request.max_output_tokens
    else:
        output = min(alias.default_max_output_tokens, revision.max_output_tokens)
    bound = upper_bound_of_input(request.prompt_bytes, request.turns)
    return worst_case(revision.price.of(CALLER.service_class), bound, output, request.demands.choices)


def held(requests: tuple[InferenceRequest, ...]) -> Iterator[tuple[Scope, int, int]]:
    """(scope, micro-dollars, tokens) that the ledger's own book holds of these requests, all at once."""
    book, numbers = Book(), count()
    every = {
        scope for request in requests for scope in scopes_of("acme", "jobs", "k1", request.model_alias, ServiceClass.BATCH)
    }
    for request in requests:
        scopes = scopes_of(CALLER.tenant, CALLER.application, CALLER.key, request.model_alias, ServiceClass.BATCH)
        book.take(next(numbers), scopes, hold_of(request), NOW)
    for scope in every:
        balance = book.balance_of(scope, LIFETIME_WINDOW)
        yield scope, balance.held_microusd, balance.held_tokens


def test_what_a_file_asks_for_is_summed_by_alias() -> None:
    """Protects a file's record: input and output of every choice, defaults apart, in the order of first use."""
    bound = upper_bound_of_input
    assert summed(REQUESTS) == (
        AliasDemand("large", 2, bound(5, 1) + 3 * bound(11, 2), 50, 3),
        AliasDemand("small", 2, bound(7, 1) + 2 * bound(0, 1), 14, 1),
        AliasDemand("vectors", 2, bound(6, 2) + bound(5, 1), 2, 0),
    )
    assert DemandSum().result() == ()


def test_a_file_asks_for_a_bounded_number_of_models() -> None:
    """Protects the record's size: one alias too many is refused by its line, a known one is not."""
    demands = DemandSum()
    for number in range(ALIASES_MAX):
        demands.add(InferenceRequest(f"alias-{number}", ""))
    demands.add(InferenceRequest("alias-0", ""))
    with pytest.raises(errors.InvalidRequest, match="Line 66 asks for one model too many") as caught:
        demands.add(InferenceRequest("one-more", ""))
    assert caught.value.members == {"field": "file", "line": ALIASES_MAX + 2, "accepted": "at most 64 models"}
    assert len(demands.result()) == ALIASES_MAX


def test_the_worst_case_of_a_file_is_what_its_lines_would_hold() -> None:
    """Protects budgets and batches alike: in every scope tokens are those of all holds, and money is, but for its rounding."""
    sums = worst_by_scope(summed(REQUESTS), CALLER, SNAPSHOT)
    lines = {scope: len([one for one in REQUESTS if scope.alias in (None, one.model_alias)]) for scope in sums}
    assert len(sums) == 2 * (3 + 3 * 3)
    for scope, microusd, tokens in held(REQUESTS):
        assert sums[scope].tokens == tokens
        assert microusd - lines[scope] < sums[scope].cost_microusd <= microusd
    assert [scope.alias is None for scope in sums] == ([True] * 3 + [False] * 9) * 2
    assert [scope.service_class for scope in sums] == [None] * 12 + [ServiceClass.BATCH] * 12


def test_where_nothing_is_rounded_the_worst_case_is_exact() -> None:
    """Protects the sum: with whole micro-dollars a token it is that of all holds."""
    requests = tuple(request for request in REQUESTS if request.model_alias == "large") * 5
    sums = worst_by_scope(summed(requests), CALLER, SNAPSHOT)
    for scope, microusd, tokens in held(requests):
        assert (sums[scope].cost_microusd, sums[scope].tokens) == (microusd, tokens)


def test_a_line_alone_is_what_its_hold_is() -> None:
    """Protects single lines: their worst case is the hold of admission, to the micro-dollar."""
    for request in REQUESTS:
        sums = worst_by_scope(summed((request,)), CALLER, SNAPSHOT)
        assert set(sums.values()) == {hold_of(request)}


@pytest.mark.parametrize("budget", BUDGETS, ids=lambda budget: budget.name)
@pytest.mark.parametrize(
    "scope",
    [
        *scopes_of("acme", "jobs", "k1", "large", ServiceClass.BATCH),
        *scopes_of("acme", "jobs", "k1", "small", ServiceClass.BATCH)[3:],
    ],
)
def test_a_file_above_a_window_is_refused_and_one_at_it_is_not(budget: Budget, scope: Scope) -> None:
    """Protects tenants from batches that cannot end: scope, limit and both numbers are named; what just fits is let in."""
    record = file_of(summed(REQUESTS))
    needed = budget.needed(worst_by_scope(record.demands, CALLER, SNAPSHOT)[scope])
    name = budget.name
    fitting = replace(SNAPSHOT, limits={scope: Limits(**{name: needed})})
    refuse_unaffordable(record, CALLER, fitting)
    short = replace(SNAPSHOT, limits={scope: Limits(**{name: needed - 1})})
    with pytest.raises(errors.ExceedsLimitCapacity) as caught:
        refuse_unaffordable(record, CALLER, short)
    expected = {"limit": name, "scope": scope.public(), "needed": needed, "capacity": needed - 1}
    assert caught.value.members == expected
    assert caught.value.detail == f"This file needs {needed} of {name}, which allows {needed - 1} in all."


def test_the_widest_scope_is_named_first() -> None:
    """Protects the answer: of several limits the same one as at admission is named."""
    record = file_of(summed(REQUESTS))
    narrow, wide = Scope("acme", alias="large"), Scope("acme", "jobs")
    limits = {narrow: Limits(spend_microusd_per_day=1), wide: Limits(tokens_lifetime=1, tokens_per_month=2)}
    with pytest.raises(errors.ExceedsLimitCapacity) as caught:
        refuse_unaffordable(record, CALLER, replace(SNAPSHOT, limits=limits))
    assert caught.value.members["scope"] == wide.public()
    assert caught.value.members["limit"] == "tokens_per_month"


def test_a_batch_is_of_its_own_class_whoever_sends_it() -> None:
    """Protects interactive budgets: a batch of an interactive application meets the budgets of batch, and only those."""
    record, caller = file_of(summed(REQUESTS)), msgspec.structs.replace(CALLER, service_class=ServiceClass.INTERACTIVE)
    jobs, others = (Scope("acme", "jobs", service_class=each) for each in (ServiceClass.BATCH, ServiceClass.INTERACTIVE))
    refuse_unaffordable(record, caller, replace(SNAPSHOT, limits={others: Limits(spend_microusd_per_day=1)}))
    with pytest.raises(errors.ExceedsLimitCapacity) as caught:
        refuse_unaffordable(record, caller, replace(SNAPSHOT, limits={jobs: Limits(spend_microusd_per_day=1)}))
    assert caught.value.members["scope"] == {"tenant": "acme", "application": "jobs", "service_class": "batch"}


def test_a_limit_of_nothing_refuses_what_costs_nothing() -> None:
    """Protects 0 as a limit: no line would be admitted, and so no batch is."""
    free = replace(SNAPSHOT, revisions={LARGE.id: replace(LARGE, price=Price(1, 0, 0, 0))})
    record = file_of(summed(REQUESTS[:1]))
    refuse_unaffordable(record, CALLER, replace(free, limits={Scope("acme"): Limits(spend_microusd_per_day=1)}))
    with pytest.raises(errors.ExceedsLimitCapacity):
        refuse_unaffordable(record, CALLER, replace(free, limits={Scope("acme"): Limits(spend_microusd_per_day=0)}))


@pytest.mark.parametrize(
    "limits",
    [
        {Scope("globex"): Limits(tokens_lifetime=0)},
        {Scope("acme", "web"): Limits(tokens_lifetime=0)},
        {Scope("acme", "jobs", "k2"): Limits(tokens_lifetime=0)},
        {Scope("acme", alias="other"): Limits(tokens_lifetime=0)},
        {Scope("acme", service_class=ServiceClass.INTERACTIVE): Limits(tokens_lifetime=0)},
        {Scope("acme"): Limits(requests_per_minute=1, tokens_per_minute=1, concurrency=1)},
    ],
)
def test_limits_of_others_and_rates_refuse_no_file(limits: dict[Scope, Limits]) -> None:
    """Protects batches: only budgets of the caller's own scopes count, and a rate is only waited for."""
    refuse_unaffordable(file_of(summed(REQUESTS)), CALLER, replace(SNAPSHOT, limits=limits))


@pytest.mark.parametrize("alias", ["nowhere", "other"])
def test_a_file_of_an_alias_that_is_none_of_the_callers_is_refused(alias: str) -> None:
    """Protects entitlement: an alias that is unknown and one that may not be used get the same answer."""
    with pytest.raises(errors.UnknownAlias):
        refuse_unaffordable(file_of(summed((InferenceRequest(alias, ""),))), CALLER, SNAPSHOT)


def with_canary(**changes: object) -> Snapshot:
    canary = replace(LARGE, id="large@2", **changes)  # type: ignore[arg-type]
    alias = Alias("large", LARGE.id, 64, Canary("r1", 1, canary.id, 1))
    return replace(SNAPSHOT, aliases={"large": alias}, revisions={LARGE.id: LARGE, canary.id: canary})


def test_the_dearer_of_both_revisions_of_a_rollout_counts() -> None:
    """Protects budgets while a model changes: any line may go to the canary, where that may be reached at all."""
    demands = summed((REQUESTS[2],))
    stable = worst_by_scope(demands, CALLER, SNAPSHOT)[Scope("acme")]
    dear = Price(2, 9_000_000, 9_000_000, 9_000_000)
    dearer = worst_by_scope(demands, CALLER, with_canary(price=dear, max_output_tokens=10))[Scope("acme")]
    assert dearer == Worst(stable.input_tokens, stable.output_tokens, 9 * (stable.input_tokens + 30))
    cheaper = worst_by_scope(demands, CALLER, with_canary(price=Price(2, 0, 0, 0)))[Scope("acme")]
    assert cheaper == stable
    unreached = worst_by_scope(demands, CALLER, with_canary(price=dear, tenant="globex"))[Scope("acme")]
    assert unreached == stable


# ── how long ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("24h", 86_400_000),
        ("90m", 5_400_000),
        ("30s", 30_000),
        ("1s", 1_000),
        ("168h", WINDOW_MS_MAX),
        ("604800s", WINDOW_MS_MAX),
        ("1h30m", 5_400_000),
        ("1h0m1s", 3_601_000),
        ("1m30s", 90_000),
    ],
)
def test_a_window_is_numbers_and_units(text: str, expected: int) -> None:
    """Protects OpenAI's one value and the others that are taken."""
    assert window_ms(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "h",
        "24",
        "0s",
        "169h",
        "604801s",
        "999999h",
        "1d",
        "-1h",
        "+1h",
        "1.5h",
        " 1h",
        "1h ",
        "1h\n",
        "30m1h",
        "1h1h",
        "168h1s",
        "٣h",
        "1H",
    ],
)
def test_another_window_is_refused_by_name(text: str) -> None:
    """Protects the batch's end: what is no window, or no accepted one, is refused with what is."""
    with pytest.raises(errors.InvalidRequest) as caught:
        window_ms(text)
    accepted = "whole numbers of h, m and s, as 24h or 1h30m; from 1s to 168h"
    assert caught.value.members == {"field": "completion_window", "accepted": accepted}


# ── how it is named and shown ──────────────────────────────────────────────────────────────────────────────────────────


def test_ids_rise_with_time() -> None:
    """Protects listings: a later file or batch has the higher key, and the beginning says what it is."""
    times = [0, 1, 15, 16, NOW.wall_ms, NOW.wall_ms + 1, 2**43]
    ids = [new_id("batch_", time, token) for time, token in zip(times, [b"\xff", b"\x00"] * 4, strict=False)]
    assert ids == sorted(ids) and ids[0] == "batch_00000000000ff"


def test_a_line_has_a_request_id_of_its_own() -> None:
    """Protects the ledger's one charge a line: batch and line name it."""
    assert line_request_id("batch_1", 7) == "batch_1:7"


RECORD = BatchRecord("batch_1", "acme", "jobs", "k1", "file-1", "/v1/generations", "24h", 0, 86_400_000, 9)
COUNTS = BatchCounts(9, 4, 1)
RUNNING = BatchProgress(COUNTS, BatchStatus.IN_PROGRESS, 5)
MARK = CancelMark(7)
DONE = BatchEnd(BatchStatus.COMPLETED, 20, BatchCounts(9, 8, 1), 5, 15)
GIVEN_UP = BatchEnd(BatchStatus.CANCELLED, 20, COUNTS, 5, cancelling_ms=7)


@pytest.mark.parametrize(
    ("progress", "cancel", "end", "expected"),
    [
        (None, None, None, (BatchStatus.VALIDATING, BatchCounts(9), None)),
        (RUNNING, None, None, (BatchStatus.IN_PROGRESS, COUNTS, None)),
        (None, MARK, None, (BatchStatus.CANCELLING, BatchCounts(9), 7)),
        (RUNNING, MARK, None, (BatchStatus.CANCELLING, COUNTS, 7)),
        (RUNNING, MARK, GIVEN_UP, (BatchStatus.CANCELLED, COUNTS, 7)),
        (RUNNING, MARK, DONE, (BatchStatus.COMPLETED, DONE.counts, None)),
        (None, None, DONE, (BatchStatus.COMPLETED, DONE.counts, None)),
    ],
)
def test_a_batch_is_where_its_notes_say(
    progress: BatchProgress | None,
    cancel: CancelMark | None,
    end: BatchEnd | None,
    expected: tuple[BatchStatus, BatchCounts, int | None],
) -> None:
    """Protects what a tenant sees: an end decides, then that it was given up, then how far the worker was."""
    status, counts, cancelling_ms = expected
    assert view_of(RECORD, progress, cancel, end) == BatchView(RECORD, status, counts, progress, end, cancelling_ms)


# ── what it writes ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_answered_line_has_openais_shape() -> None:
    """Protects clients that read output files: every member of OpenAI's example, in its order, and the answer as it was."""
    body = b'{"id":"chatcmpl-1","choices":[{"message":{"content":"a\\nb \xc3\xa9"}}], "n":12345678901234567890123}'
    line = answer_line("batch_abc123", 7, 'wörk "7"', 200, "batch_abc123:7", body)
    assert line.endswith(b"}\n") and line.count(b"\n") == 1 and body in line
    assert json.loads(line) == {
        "id": "batch_req_abc123_7",
        "custom_id": 'wörk "7"',
        "response": {"status_code": 200, "request_id": "batch_abc123:7", "body": json.loads(body)},
        "error": None,
    }
    assert list(json.loads(line)) == ["id", "custom_id", "response", "error"]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_an_answer_of_several_lines_becomes_one(end: str) -> None:
    """Protects the file: a line is a line, however an answer was laid out."""
    answer = {"id": "1", "text": "a\nb", "list": [1, {}]}
    line = answer_line("batch_1", 1, "a", 400, "r", json.dumps(answer, indent=2).replace("\n", end).encode())
    assert line.count(b"\n") == 1 and b"\r" not in line
    assert json.loads(line)["response"]["body"] == answer


def test_a_line_without_an_answer_has_openais_shape() -> None:
    """Protects clients that read error files: no response, and a code with its message."""
    line = error_line("batch_abc123", 3, "request-3", "batch_expired", "Not run\nin time.")
    assert line.endswith(b"}\n") and line.count(b"\n") == 1
    assert msgspec.json.decode(line) == {
        "id": "batch_req_abc123_3",
        "custom_id": "request-3",
        "response": None,
        "error": {"code": "batch_expired", "message": "Not run\nin time."},
    }
