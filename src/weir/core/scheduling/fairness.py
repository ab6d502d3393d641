"""Fair order between tenants: a prepaid weighted virtual token counter, with deadlines inside a bounded slack.

Source: the Virtual Token Counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI '24), changed in four
ways. A request is charged at dispatch for what it is expected to cost, because many replicas produce output at once and a
counter that follows the output lets one flow start on all of them; the difference is charged or given back when it is known.
Among the flows whose counter is within a slack of the smallest, the one whose head must start first goes. Flows have weights.
And a flow that comes back may be behind by a burst, so that who asks for little is not halved by one who always waits.

Invariants, for flows that stay backlogged and whose heads fit (property-tested).
  1. Their counters differ by at most U + slack + burst + E, where U is the dearest single request ÷ weight and E the
     corrections, in either direction, since the last turn of the flow that is ahead. The service that two of them got over any
     time then differs by at most twice that, and by once that from a moment at which they were equal.
  2. Where heads fit nowhere and others pass, that much more: BYPASSES_MAX times U.
  3. No more than the burst is saved up: a flow that becomes backlogged is lifted to that much below the floor, which is the
     smallest counter among the backlogged, or that of the flow which was the last to leave, and never falls: who comes back
     behind it lowers it for nobody. What is given back for a dispatch before that takes the flow no lower.

A flow that only runs is not backlogged: the longest of its requests would otherwise hold its counter down, and lend its next
requests, and every newcomer, a lead over all who wait.
"""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from weir.core.scheduling.lazy_heap import LazyHeap
from weir.core.scheduling.orders import BYPASSES_MAX, Cost, Head, Ticket
from weir.units import Tokens

_SCALE = 1 << 16
"""Counter units of one unit of cost at weight 1: division by a weight loses next to nothing."""
_QUIET_MAX = 1_024
"""Flows that may be remembered without a sweep; more when a sweep had to keep more, so that it pays for itself."""


@dataclass(frozen=True, slots=True)
class TokenCosts:
    """What one token of each kind costs, as small integers: their ratio is that of a replica's measured times."""

    input: Cost = 10
    cached_input: Cost = 1
    output: Cost = 40

    def cost(self, input_tokens: Tokens, cached_input_tokens: Tokens, output_tokens: Tokens) -> Cost:
        """A request's cost, at least 1. cached_input_tokens: the part of input_tokens that is not computed again."""
        uncached = input_tokens - cached_input_tokens
        return max(1, uncached * self.input + cached_input_tokens * self.cached_input + output_tokens * self.output)


class _Flow(msgspec.Struct):
    counter: int = 0
    weight: int = 1  # as it was when the flow became backlogged, or was charged last
    floor: int = 0
    activation: int = 0  # how often it became backlogged
    head: Head | None = None
    is_near: bool = False  # within the slack when it was looked at last
    running: int = 0

    @property
    def is_quiet(self) -> bool:
        """Nothing of it waits or runs."""
        return self.head is None and not self.running


class FairOrder:
    """weight_of: a tenant's weight, an integer ≥ 1; slack: Δ in cost ÷ weight, the one knob between fairness and deadlines.

    burst: in cost ÷ weight, what a flow may be behind when it becomes backlogged.
    """

    holds_back = True

    def __init__(self, weight_of: Callable[[str], int] = lambda tenant: 1, slack: Cost = 0, burst: Cost = 0) -> None:
        self._weight_of = weight_of
        self._slack = slack * _SCALE
        self._burst = burst * _SCALE
        self._flows: dict[str, _Flow] = {}
        self._counters: LazyHeap[int, str] = LazyHeap()  # of every backlogged flow
        self._near: LazyHeap[int, str] = LazyHeap()  # those within the slack, by their heads
        self._far: LazyHeap[int, str] = LazyHeap()  # the others, by counter
        self._last_left = self._highest_floor = 0
        self._sweep_at = _QUIET_MAX
        self._weights = 0
        self._dearest = 0  # of one request, in counter units

    def joined(self, tenant: str, head: Head) -> None:
        """The flow is backlogged from now on: lifted, so that it lends itself nothing from the time it was not."""
        flow = self._flows.setdefault(tenant, _Flow())
        flow.floor = self._floor() - self._burst
        flow.counter = max(flow.counter, flow.floor)
        flow.activation += 1
        flow.head = head
        flow.weight = self._weight_of(tenant)
        self._weights += flow.weight
        self._counters.put(tenant, flow.counter)
        self._put_far(tenant, flow)

    def changed(self, tenant: str, head: Head) -> None:
        """Its head left, or a more urgent one came."""
        flow = self._flows[tenant]
        flow.head = head
        if flow.is_near:
            self._near.put(tenant, head.urgency)

    def left(self, tenant: str) -> None:
        """It is backlogged no more; its counter is kept while it lies ahead."""
        flow = self._flows[tenant]
        flow.head = None
        self._counters.discard(tenant)
        (self._near if flow.is_near else self._far).discard(tenant)
        if not self._counters:
            self._last_left = flow.counter
        self._weights -= flow.weight
        if len(self._flows) > self._sweep_at:
            self._forget_quiet()
            self._sweep_at = 2 * len(self._flows) + _QUIET_MAX

    def first(self) -> str | None:
        """Of the flows within the slack of the smallest counter, the one whose head must start first."""
        smallest = self._counters.first()
        if smallest is None:
            return None
        limit = smallest[0] + self._slack
        while (entry := self._far.first()) is not None and entry[0] <= limit:
            self._put_near(entry[1], self._flows[entry[1]])
        while True:  # bounded: the flow of the smallest counter is near
            urgent = self._near.first()
            assert urgent is not None
            tenant = urgent[1]
            flow = self._flows[tenant]
            if flow.counter <= limit:
                return tenant
            self._put_far(tenant, flow)

    def next(self, number: int) -> list[str]:
        """The first, the others within the slack by their heads, then those beyond it by counter.

        None that would be ahead of the floor by more than BYPASSES_MAX times the dearest request and the slack.
        """
        smallest = self._counters.first()
        if self.first() is None or smallest is None:
            return []
        limit = smallest[0] + self._slack
        while stale := [tenant for _, tenant in self._near.smallest(number) if self._flows[tenant].counter > limit]:
            for tenant in stale:
                self._put_far(tenant, self._flows[tenant])
        near = [tenant for _, tenant in self._near.smallest(number)]
        limit = self._floor() + self._slack + BYPASSES_MAX * self._dearest
        return near + [tenant for counter, tenant in self._far.smallest(number - len(near)) if counter <= limit]

    def charge(self, tenant: str, cost: Cost) -> Ticket:
        """Prepay a dispatch."""
        flow = self._flows[tenant]
        flow.running += 1
        weight = self._weight_of(tenant)
        self._weights += weight - flow.weight
        flow.weight = weight
        amount = cost * _SCALE // weight
        if amount > self._dearest:
            self._dearest = amount
        self._move(tenant, flow, amount)
        return Ticket(tenant, cost, flow.weight, flow.activation)

    def correct(self, ticket: Ticket, cost: Cost) -> Ticket:
        """Charge what it cost beyond the expected, or give the rest back to the activation that paid."""
        flow = self._flows[ticket.tenant]
        more = cost * _SCALE // ticket.weight - ticket.cost * _SCALE // ticket.weight
        if more < 0 and flow.activation != ticket.activation:
            more = min(0, max(more, flow.floor - flow.counter))
        if more:
            self._move(ticket.tenant, flow, more)
        return Ticket(ticket.tenant, cost, ticket.weight, ticket.activation)

    def close(self, ticket: Ticket, cost: Cost) -> None:
        """It ended, and cost this."""
        self.correct(ticket, cost)
        self._flows[ticket.tenant].running -= 1

    def work_before(self, tenant: str, own: Cost, others: Cost, mean: Cost) -> Cost:
        """What the other backlogged flows may get, by their weights, until this one has had its own waiting work.

        The heads of those within the slack came earlier, and go first, unless this flow is behind them by more than that.
        """
        flow, floor = self._flows.get(tenant), self._floor()
        if flow is None:
            weights, ahead = self._weights, -self._burst
        else:
            weights = self._weights - (flow.weight if flow.head else 0)
            ahead = max(flow.counter - floor, -self._burst) + own * _SCALE // flow.weight
        urgent = len(self._near) * mean if ahead >= -self._slack else 0
        return min(others, weights * max(0, ahead) // _SCALE + urgent)

    def lead(self, tenant: str, own: Cost) -> Cost:
        """How far its counter will be beyond the slack of the floor once its own waiting work is done."""
        flow = self._flows.get(tenant)
        if flow is None:
            return 0
        return max(0, flow.counter + own * _SCALE // flow.weight - self._floor() - self._slack) // _SCALE

    @property
    def floor(self) -> Cost:
        """The smallest counter among the backlogged, or that of the last one that was, or as high as that ever was."""
        return self._floor() // _SCALE

    def _floor(self) -> int:
        """It is read before a flow joins, so that those behind it by their burst are not among the smallest by then."""
        smallest = self._counters.first()
        floor = smallest[0] if smallest is not None else self._last_left
        if floor > self._highest_floor:
            self._highest_floor = floor
        return self._highest_floor

    def _move(self, tenant: str, flow: _Flow, amount: int) -> None:
        flow.counter += amount
        if flow.head is None:
            return
        self._counters.put(tenant, flow.counter)
        if not flow.is_near:
            self._far.put(tenant, flow.counter)
        elif amount > 0 and self._is_beyond_the_slack(flow):  # its next head need not be put among the near ones
            self._put_far(tenant, flow)

    def _is_beyond_the_slack(self, flow: _Flow) -> bool:
        smallest = self._counters.first()
        return smallest is not None and flow.counter > smallest[0] + self._slack

    def _put_near(self, tenant: str, flow: _Flow) -> None:
        assert flow.head is not None
        flow.is_near = True
        self._far.discard(tenant)
        self._near.put(tenant, flow.head.urgency)

    def _put_far(self, tenant: str, flow: _Flow) -> None:
        flow.is_near = False
        self._near.discard(tenant)
        self._far.put(tenant, flow.counter)

    def _forget_quiet(self) -> None:
        """Drop flows that a lift would set where a new one starts."""
        floor = self._floor() - self._burst
        for tenant in [name for name, flow in self._flows.items() if flow.is_quiet and flow.counter <= floor]:
            del self._flows[tenant]
