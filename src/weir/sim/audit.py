"""The audit of a quiet world: every request against every place that tells its end, and every amount computed again.

It runs when nothing is in flight. Its table of payers is written out here a second time on purpose: it checks the platform's.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from weir.core.endings import FinishReason, Status
from weir.core.ledger.records import ExecutionId, ReleaseRecord, SettleRecord
from weir.core.metering import Basis, Price
from weir.core.tenancy import Scope
from weir.engines.simulated_text import count_prompt_tokens
from weir.messages import GenerationRecord
from weir.ports import Recovery, UsageRow
from weir.sim.checks import Checker, Seen
from weir.sim.clients import SimAnswer, SimClient
from weir.units import MILLION, NANOS_PER_MINUTE, Nanos, Tokens, ceil_div

_PAYS_GENERATED = {"stop", "length", "client", "disconnect", "slow_client", "revoked"}
_PAYS_DELIVERED = {"deadline"}
_PAYS_NOTHING = {
    "queue_wait",
    "engine_error",
    "replica_lost",
    "stalled",
    "ledger_unavailable",
    "coordinator_lost",
    "shutdown",
    "engine_rejected",
}
_UNANSWERED = {FinishReason.DISCONNECT, FinishReason.SLOW_CLIENT}


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

    takes_are_dated: False once the wall clock was set before a restart, which dates takes by it.
    """

    checker: Checker
    exchanges: Sequence[Exchange]
    lookups: Mapping[tuple[str, str], GenerationRecord | None]
    emitted: Mapping[str, Tokens]
    step: Tokens
    price: Price
    takes_are_dated: bool


def audit(evidence: Evidence) -> None:
    """Raises AssertionError naming what does not agree."""
    checker = evidence.checker
    checker.catch_up()
    durable = checker.durable
    assert set(durable.ends) == set(durable.holds), f"left open: {set(durable.holds) - set(durable.ends)}"
    assert checker.lanes_taken == 0, "lanes are taken and nothing runs"
    for exchange in evidence.exchanges:
        _check_exchange(evidence, exchange)
    for seen in checker.seen.values():
        _check_execution(evidence, seen)
    for name, end in durable.ends.items():
        if isinstance(end, SettleRecord):
            _check_amounts(evidence, name, end)
    _check_lookups(evidence)
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
    if durable.holds[seen.id].generation_id != seen.acquire.generation_id:
        assert seen.lost and not seen.handed  # its own hold was lost with its process, and the id was free again
        return
    if seen.lost and end.finish_reason is FinishReason.COORDINATOR_LOST:
        _check_uncertain(evidence, seen)
        return
    assert seen.lost or seen.booked, f"{seen.id}: its gateway never heard that its end is durable"
    assert seen.end is not None or seen.lost
    if isinstance(end, ReleaseRecord):
        assert not seen.handed and (seen.attempts == 0 or seen.lost)
        assert end.finish_reason in _PAYS_NOTHING | {"client", "disconnect", "slow_client", "deadline", "revoked"}
        return
    assert isinstance(end, SettleRecord) and seen.attempts >= 1
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
    price, hold, reason = evidence.price, evidence.checker.durable.holds[name], end.finish_reason.value
    assert reason in _PAYS_GENERATED | _PAYS_DELIVERED | _PAYS_NOTHING
    used = ceil_div(end.input_tokens * price.input_microusd + end.output_tokens * price.output_microusd, MILLION)
    output = end.output_tokens if reason in _PAYS_GENERATED else min(end.delivered_tokens, end.output_tokens)
    pays = reason not in _PAYS_NOTHING and (output > 0 or end.status is Status.COMPLETED)
    input_paid, output_paid = (end.input_tokens, output) if pays else (0, 0)
    cost = ceil_div(input_paid * price.input_microusd + output_paid * price.output_microusd, MILLION)
    assert (end.tenant_input_tokens, end.tenant_output_tokens, end.cost_microusd) == (input_paid, output_paid, cost), end
    assert end.cost_microusd + end.platform_microusd == used and end.cost_microusd <= hold.held_microusd
    assert end.delivered_tokens <= end.output_tokens <= hold.max_output_tokens * hold.choices


def _check_truth(evidence: Evidence, prompt: str, end: SettleRecord) -> None:
    """The engine's own count bounds what is booked as measured; what is complete matches it."""
    if end.basis is Basis.UNCERTAIN or end.finish_reason is FinishReason.ENGINE_REJECTED:
        return
    emitted = evidence.emitted.get(prompt, 0)
    assert end.output_tokens <= emitted
    if end.status is Status.COMPLETED:
        assert end.output_tokens == emitted and end.input_tokens == count_prompt_tokens(prompt, chat=True)


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
        if accepted is not None:
            end_or_none = durable.ends.get(evidence.checker.seen[accepted.generation_id].id)
            if isinstance(end_or_none, SettleRecord):
                _check_truth(evidence, evidence.checker.prompts[exchange.answer.name], end_or_none)


def _check_buckets(checker: Checker) -> None:
    """Over every window w: requests and settled tokens of what was admitted in it ≤ capacity + rate · w."""
    for scope, limits in checker.limits.items():
        if scope in checker.changed_limits:
            continue
        admitted = [seen for seen in checker.seen.values() if scope in seen.scopes and seen.id in checker.durable.ends]
        if limits.requests_per_minute is not None:
            _check_windows(limits.requests_per_minute, [(seen.admitted_ns, 1) for seen in admitted])
        if limits.tokens_per_minute is not None:
            _check_windows(limits.tokens_per_minute, [(seen.admitted_ns, _paid(checker, seen)) for seen in admitted])


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
    """Stored balances and usage rows are the sums of the settlements; nothing is open."""
    checker.catch_up()
    assert not recovery.open_executions
    spent: defaultdict[tuple[str, str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    rows: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for name, end in checker.durable.ends.items():
        hold, row = checker.durable.holds[name], rows[name.tenant]
        row[0] += 1
        if isinstance(end, SettleRecord):
            leaf = spent[name.tenant, hold.application, hold.key, hold.alias]
            leaf[0] += end.cost_microusd
            leaf[1] += end.tenant_input_tokens + end.tenant_output_tokens
            row[1] += end.cost_microusd
            row[2] += end.platform_microusd
    stored = {(leaf.tenant, leaf.application, leaf.key, leaf.alias): leaf for leaf in recovery.balances}
    for leaf_name, (microusd, tokens) in spent.items():
        leaf_or_none = stored.get(leaf_name)
        found = (leaf_or_none.spent_microusd, leaf_or_none.spent_tokens) if leaf_or_none else (0, 0)
        assert found == (microusd, tokens), f"the balance of {leaf_name} is not the sum of its settlements"
    assert {row.group["tenant"]: [row.requests, row.cost_microusd, row.platform_cost_microusd] for row in usage} == dict(rows)
    for tenant in rows:
        assert checker.spent(Scope(tenant)) == rows[tenant][1], f"{tenant}: the wire and the ledger disagree"
