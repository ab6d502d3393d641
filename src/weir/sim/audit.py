"""The audit of a quiet world: every request against every place that tells its end, and every amount computed again.

It runs when nothing is in flight, and reads what is durable, what clients saw and what engines did; never the book.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from weir.core.endings import FinishReason, Status
from weir.core.ledger.records import ExecutionId, ReleaseRecord, SettleRecord
from weir.core.metering import Basis, Price
from weir.core.tenancy import Limits, Scope, ServiceClass
from weir.engines.simulated_text import BYTES_PER_TOKEN, TURN_TOKENS, count_prompt_tokens
from weir.messages import GenerationRecord
from weir.ports import Recovery, UsageRow
from weir.sim.checks import Checker, Seen
from weir.sim.clients import SimAnswer, SimClient
from weir.sim.payers import PAYS_NOTHING, cost_of, paid_tokens, price_for
from weir.units import NANOS_PER_MINUTE, Nanos, Tokens, ceil_div, ns_from_ms

_UNANSWERED = {FinishReason.DISCONNECT, FinishReason.SLOW_CLIENT}
_TEMPLATE_BYTES = TURN_TOKENS * BYTES_PER_TOKEN
"""Before the text of a prompt."""


@dataclass(slots=True)
class Exchange:
    """One client's request and what became of it. cut: the process died under it."""

    client: SimClient
    answer: SimAnswer
    cancelled: GenerationRecord | None = None
    cut: bool = False
    is_done: bool = False


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is compared. lookups: by (tenant, request id). emitted: engine truth by prompt. step: the delivery step.
    prices: the schedule by version.

    takes_are_dated: False once the wall clock was set before a restart, which dates takes by it.
    """

    checker: Checker
    exchanges: Sequence[Exchange]
    lookups: Mapping[tuple[str, str], GenerationRecord | None]
    emitted: Mapping[str, Tokens]
    step: Tokens
    prices: Mapping[int, Price]
    takes_are_dated: bool


def audit(evidence: Evidence) -> None:
    """Raises AssertionError naming what does not agree."""
    checker = evidence.checker
    checker.catch_up()
    durable = checker.durable
    assert set(durable.ends) == set(durable.holds), f"left open: {set(durable.holds) - set(durable.ends)}"
    checker.places.check_rest()
    for exchange in evidence.exchanges:
        _check_exchange(evidence, exchange)
    for seen in checker.seen.values():
        _check_execution(evidence, seen)
    for name, end in durable.ends.items():
        if isinstance(end, SettleRecord):
            _check_amounts(evidence, name, end)
    _check_lookups(evidence)
    for queue in checker.queues:
        _check_queue(checker, queue)
    for retried, at_ns in checker.retries:
        _check_retry_budget(checker, retried, at_ns)
    if evidence.takes_are_dated:
        _check_buckets(checker)


def _check_exchange(evidence: Evidence, exchange: Exchange) -> None:
    answer = exchange.answer
    assert exchange.is_done, f"{answer.name} was left hanging"
    if exchange.cut:
        return
    assert answer.is_over or exchange.client.is_lost, f"{answer.name} got no answer"
    if answer.record is not None:
        seen = evidence.checker.seen[answer.record.generation_id]
        end = evidence.checker.durable.ends.get(seen.id)
        shown = (answer.record.status, answer.record.finish_reason)
        excused = seen.unbooked or (seen.lost and not answer.record.posted)
        assert excused or (end is not None and shown == (end.status, end.finish_reason)), f"{answer.name} was shown {shown}"
        if answer.record.posted and isinstance(end, SettleRecord):
            assert (answer.record.output_tokens, answer.record.cost_microusd) == (end.output_tokens, end.cost_microusd)
    if exchange.cancelled is not None:
        assert exchange.cancelled.status not in (Status.QUEUED, Status.RUNNING), f"{answer.name}: cancelled and not ended"


def _check_execution(evidence: Evidence, seen: Seen) -> None:
    """One admitted execution against the ledger."""
    durable = evidence.checker.durable
    end = durable.ends.get(seen.id)
    if end is None:
        assert seen.lost and not seen.handed, f"{seen.id} was admitted and has no end"
        return
    if not durable.is_of(seen.id, seen.acquire.generation_id):
        assert seen.lost and not seen.handed  # its own hold was lost with its process, and the id was free again
        return
    if seen.lost and end.finish_reason is FinishReason.COORDINATOR_LOST:
        _check_uncertain(evidence, seen)
        return
    assert seen.lost or seen.booked, f"{seen.id}: its gateway never heard that its end is durable"
    assert seen.end is not None or seen.lost
    assert end.finish_reason is not FinishReason.PREEMPTED or (seen.acquire.yields and not seen.handed)
    if isinstance(end, ReleaseRecord):
        assert not seen.handed and (seen.attempts == 0 or seen.lost)
        assert end.finish_reason in PAYS_NOTHING | {"client", "disconnect", "slow_client", "deadline", "revoked"}
        return
    assert isinstance(end, SettleRecord) and seen.attempts >= 1
    assert seen.lost or end.attempt == seen.attempts, f"{seen.id}: settled as attempt {end.attempt} of {seen.attempts}"
    if seen.acquire.stream:
        assert end.delivered_tokens == seen.handed, f"{seen.id}: {seen.handed} handed out, {end.delivered_tokens} recorded"
    else:
        whole = end.output_tokens if end.status is Status.COMPLETED else 0
        assert end.delivered_tokens == whole


def _check_uncertain(evidence: Evidence, seen: Seen) -> None:
    """After a crash: never below what was delivered, at most two steps above, and nothing for the tenant."""
    end = evidence.checker.durable.ends[seen.id]
    if isinstance(end, ReleaseRecord):
        assert not seen.handed
        return
    assert end.basis is Basis.UNCERTAIN and end.cost_microusd == 0
    over = end.output_tokens - seen.handed
    assert 0 <= over <= 2 * evidence.step, f"{seen.id}: booked {end.output_tokens}, delivered {seen.handed}"


def _check_amounts(evidence: Evidence, name: ExecutionId, end: SettleRecord) -> None:
    """The table of endings, computed again."""
    hold = evidence.checker.durable.holds[name]
    price, reason = price_for(evidence.prices[hold.price_version], hold.service_class), end.finish_reason.value
    used = cost_of(price, end.input_tokens, end.cached_input_tokens, end.output_tokens)
    failed = evidence.checker.seen[hold.generation_id].failed
    if failed is not None and end.attempt == 2 and end.basis is not Basis.UNCERTAIN:
        assert failed.usage is not None
        lost = failed.usage
        used += cost_of(price, lost.input_tokens, lost.cached_input_tokens, lost.output_tokens)
    elif end.attempt == 2:  # of the attempt that was lost only what was booked for it is known
        booked = [step.delivered_max for step in evidence.checker.durable.steps[name] if step.attempt == 1]
        used += cost_of(price, end.input_tokens, 0, max(booked))
    # What ended while it waited for its second attempt is charged nothing: all that was used is the platform's.
    was_waiting = failed is not None and end.attempt == 1
    input_paid, output_paid = paid_tokens(
        reason, end.input_tokens, end.output_tokens, end.delivered_tokens, was_waiting=was_waiting
    )
    cached_paid = min(end.cached_input_tokens, input_paid)
    cost = cost_of(price, input_paid, cached_paid, output_paid)
    paid = end.tenant_input_tokens, end.tenant_cached_input_tokens, end.tenant_output_tokens, end.cost_microusd
    assert paid == (input_paid, cached_paid, output_paid, cost), end
    assert end.cost_microusd + end.platform_microusd == used and end.cost_microusd <= hold.held_microusd
    assert end.delivered_tokens <= end.output_tokens <= hold.max_output_tokens * hold.choices


def _check_truth(evidence: Evidence, prompt: str, end: SettleRecord) -> None:
    """The engine's own count bounds what is booked as measured; what is complete matches it."""
    if end.basis is Basis.UNCERTAIN or end.finish_reason is FinishReason.ENGINE_REJECTED:
        return
    emitted = evidence.emitted.get(prompt, 0)
    assert end.output_tokens <= emitted
    _check_cached(evidence.checker, prompt, end)
    if end.status is Status.COMPLETED:
        assert end.output_tokens == emitted and end.input_tokens == count_prompt_tokens(prompt, chat=True)


def _check_cached(checker: Checker, prompt: str, end: SettleRecord) -> None:
    """What was found in a cache began another prompt of the same tenant, or this one was sent twice."""
    beginning = prompt[: end.cached_input_tokens * BYTES_PER_TOKEN - _TEMPLATE_BYTES]
    if not end.cached_input_tokens:
        return
    own = [sent for sent in checker.prompts.values() if checker.ids[sent][0] == end.id.tenant]
    assert sum(sent.startswith(beginning) for sent in own) > 1, f"{end.id} found what its tenant never sent before"


def _check_lookups(evidence: Evidence) -> None:
    """The latest execution of each id, looked up, is what the ledger says; and the engine's truth."""
    durable = evidence.checker.durable
    latest: dict[tuple[str, str], ExecutionId] = {}
    for name in sorted(durable.holds):
        latest[name.tenant, name.request_id] = name
    for (tenant, request_id), found in evidence.lookups.items():
        name_or_none = latest.get((tenant, request_id))
        assert (found is None) == (name_or_none is None), f"{request_id} is looked up as {found}"
        if found is None or name_or_none is None:
            continue
        end = durable.ends[name_or_none]
        assert found.posted and (found.status, found.finish_reason) == (end.status, end.finish_reason)
        cost = end.cost_microusd if isinstance(end, SettleRecord) else 0
        assert found.cost_microusd == cost and found.execution == name_or_none.execution
    for exchange in evidence.exchanges:
        accepted = exchange.answer.accepted or exchange.answer.record
        seen = evidence.checker.seen.get(accepted.generation_id) if accepted is not None else None
        assert seen is not None or accepted is None or exchange.cut
        if seen is not None and durable.is_of(seen.id, seen.acquire.generation_id):
            end_or_none = durable.ends.get(seen.id)
            if isinstance(end_or_none, SettleRecord):
                _check_truth(evidence, evidence.checker.prompts[exchange.answer.name], end_or_none)


def _domain_of(checker: Checker, seen: Seen) -> tuple[str, ServiceClass] | None:
    """Where it waited: its pool and class; None if its hold was lost with its process."""
    name = seen.id
    if not checker.durable.is_of(name, seen.acquire.generation_id):
        return None
    hold = checker.durable.holds[name]
    assert hold.pool in seen.reach.pools and hold.service_class is seen.acquire.service_class
    return hold.pool, hold.service_class


def _check_queue(checker: Checker, queue: Sequence[Seen]) -> None:
    """At an admission: the queue that it joined is within its bounds."""
    domain, config = _domain_of(checker, queue[-1]), checker.config
    beside = [seen.acquire for seen in queue if domain is not None and _domain_of(checker, seen) == domain]
    tenant = queue[-1].acquire.tenant
    entries, size = len(beside), sum(asked.input_bytes for asked in beside)
    assert entries <= config.queue_entries and size <= config.queue_bytes, f"{entries} wait in {domain}, {size} bytes"
    assert sum(asked.tenant == tenant for asked in beside) <= config.queue_entries_per_tenant, f"too many of {tenant} wait"


def _check_retry_budget(checker: Checker, retried: Seen, at_ns: Nanos) -> None:
    """Within the window before a retry, its domain had no more of them than its budget. What was lost may have been its own."""
    domain, config = _domain_of(checker, retried), checker.config
    if domain is None:
        return
    since_ns = at_ns - ns_from_ms(config.retry_window_ms)
    beside = [seen for seen in checker.seen.values() if seen.process == retried.process]
    recent = [seen for seen in beside if since_ns <= seen.admitted_ns <= at_ns]
    admitted = sum(_domain_of(checker, seen) in (domain, None) for seen in recent)
    again = [seen for seen, other_ns in checker.retries if since_ns < other_ns <= at_ns and seen.process == retried.process]
    retries = sum(_domain_of(checker, seen) == domain for seen in again)
    assert retries <= max(config.retries_min, admitted * config.retry_percent // 100), "the retry budget is overspent"


def _check_buckets(checker: Checker) -> None:
    """Over every window w: requests and settled tokens of what was admitted in it ≤ capacity + rate · w."""
    for scope, limits in checker.tally.limits.items():
        ended = [seen for seen in checker.seen.values() if scope in seen.counted.scopes and seen.id in checker.durable.ends]
        for limit, rate in _rates(limits):
            if (scope, limit) not in checker.tally.changed:
                units = [1 if limit == "requests_per_minute" else _paid(checker, seen) for seen in ended]
                _check_windows(rate, list(zip([seen.admitted_ns for seen in ended], units, strict=True)))


def _rates(limits: Limits) -> list[tuple[str, int]]:
    rates = {"requests_per_minute": limits.requests_per_minute, "tokens_per_minute": limits.tokens_per_minute}
    return [(limit, rate) for limit, rate in rates.items() if rate is not None]


def _paid(checker: Checker, seen: Seen) -> Tokens:
    end = checker.durable.ends[seen.id]
    return end.tenant_input_tokens + end.tenant_output_tokens if isinstance(end, SettleRecord) else 0


def _check_windows(rate: int, events: Sequence[tuple[Nanos, int]]) -> None:
    for index, (start_ns, _) in enumerate(events):
        units = 0
        for at_ns, more in events[index:]:
            units += more
            # One unit of room: after a restart takes are replayed in whole milliseconds.
            allowed = rate + ceil_div(rate * (at_ns - start_ns), NANOS_PER_MINUTE) + 1
            assert units <= allowed, f"{units} units within {(at_ns - start_ns) / 1e9} s at {rate} per minute"


def audit_balances(checker: Checker, recovery: Recovery, usage: Iterable[UsageRow]) -> None:
    """Stored balances and usage rows (by tenant and budget day) are the sums of the settlements; nothing is open or held."""
    checker.catch_up()
    assert not recovery.open_holds
    assert checker.tally.holds_nothing, "amounts are held and nothing runs"
    spent: defaultdict[tuple[str, ...], list[int]] = defaultdict(lambda: [0, 0])
    rows: defaultdict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    for name, end in checker.durable.ends.items():
        hold = checker.durable.holds[name]
        row = rows[name.tenant, hold.windows[0].removeprefix("day/")]
        row[0] += 1
        if isinstance(end, SettleRecord):
            for window in hold.windows:
                leaf = spent[name.tenant, hold.application, hold.key, hold.alias, hold.service_class, window]
                leaf[0] += end.cost_microusd
                leaf[1] += end.tenant_input_tokens + end.tenant_output_tokens
            row[1] += end.cost_microusd
            row[2] += end.platform_microusd
    stored = {
        (each.tenant, each.application, each.key, each.alias, each.service_class, each.window): [
            each.spent_microusd,
            each.spent_tokens,
        ]
        for each in recovery.balances
    }
    assert stored == {leaf: sums for leaf, sums in spent.items() if any(sums)}, "balances are not the sums of the settlements"
    assert {
        (row.group["tenant"], row.group["day"]): [row.requests, row.cost_microusd, row.platform_cost_microusd] for row in usage
    } == dict(rows)
    for tenant in {tenant for tenant, _ in rows}:
        posted = sum(row[1] for (name, _), row in rows.items() if name == tenant)
        assert checker.tally.spent(Scope(tenant)) == posted, f"{tenant}: the wire and the ledger disagree"
