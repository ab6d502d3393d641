"""What a decision costs: door, queue, order, placement and charge of one request, and its end. See `make bench-decisions`.

The state is steady: for every request that starts one ends and one arrives, with all lanes taken but one. It is measured at
growing numbers of tenants, waiting requests and replicas, so that the growth shows.
"""

import gc
import random
import sys
import time

from rich.console import Console
from rich.table import Table

from weir.core.routing.capacity import Need
from weir.core.routing.prefixes import PrefixIndex, marks_within
from weir.core.routing.replica import LaneSums, Replica, ReplicaEvent, ReplicaLimits
from weir.core.scheduling.fairness import FairOrder, TokenCosts
from weir.core.scheduling.feasibility import ServiceRate, TurnPace
from weir.core.scheduling.orders import ArrivalOrder, Order, Ticket
from weir.core.scheduling.output_lengths import OutputLengths
from weir.core.scheduling.queues import DomainQueue, Entry, QueueBounds
from weir.core.scheduling.schedule import next_start

SIZES = ((10, 100, 4), (100, 1_000, 16), (1_000, 10_000, 64), (1_000, 100_000, 64))
"""(tenants, waiting, replicas)."""
CONCURRENCY = 64
DECISIONS = 20_000
REPEATS = 3
WIDE = QueueBounds(10**6, 10**6, 10**12, 5_000)


class Stand:
    """A domain with a full fleet."""

    def __init__(self, order: Order, tenants: int, waiting: int, replicas: int) -> None:
        drawn = random.Random(1)
        self.draws = [drawn.getrandbits(30) for _ in range(DECISIONS)]  # before the clock runs
        self.queue: DomainQueue[int] = DomainQueue(WIDE, order)
        self.lengths, self.costs, self.rate = OutputLengths(), TokenCosts(), ServiceRate(10**9, 5_000)
        self.tenants = [f"tenant-{number}" for number in range(tenants)]
        self.lanes = LaneSums()
        self.replicas = [_ready(f"replica-{number}", self.lanes) for number in range(replicas)]
        self.turns, self.index = TurnPace(), PrefixIndex()
        self.prefixes = {tenant: _digests(tenant) for tenant in self.tenants}
        self.running: list[tuple[Ticket, Replica, int]] = []
        self.keys = 0
        for _ in range(waiting + replicas * CONCURRENCY):
            self.arrive()
        while self.start():
            pass

    def arrive(self) -> None:
        """The door and the queue."""
        self.keys += 1
        tenant = self.tenants[self.draws[self.keys % DECISIONS] % len(self.tenants)]
        assert self.queue.refusal(tenant, 500) is None
        self.queue.lead(tenant)
        self.turns.lane_ns(self.queue.work_before(tenant), self.now_ns)
        self.turns.waits(len(self.replicas) * CONCURRENCY, self.now_ns)
        cost = self.costs.cost(500, 0, self.lengths.expected((tenant, "app", "revision"), 300, 128))
        need = Need(600, 500, self.prefixes[tenant], 2_000, 20, 3)
        self.queue.push(Entry(tenant, self.keys, 500, cost, self.keys * 10**7, need))

    @property
    def now_ns(self) -> int:
        """A request comes every ten milliseconds."""
        return self.keys * 10**7

    def start(self) -> bool:
        """What starts now, where, and what it pays."""
        start = next_start([self.queue], self.lanes.open.values(), self.index)
        if start is None:
            return False
        ticket = self.queue.serve(start.waiting)
        assert ticket is not None
        replica, need = start.site.replica, start.waiting.need
        self.turns.turn(ticket.cost, len(self.replicas) * CONCURRENCY, self.now_ns)
        self.index.placed(replica.name, need.prefix, need.input_tokens)
        self.running.append((ticket, replica, replica.take_lane(need.kv_tokens, need.input_tokens - start.site.cached_tokens)))
        return True

    def end(self) -> None:
        """One that runs ends."""
        draw = self.draws[-self.keys % DECISIONS]
        number = draw % len(self.running)
        self.running[number], self.running[-1] = self.running[-1], self.running[number]
        ticket, replica, lane = self.running.pop()
        output = 1 + draw % 300
        replica.free_lane(lane)
        self.lengths.observe((ticket.tenant, "app", "revision"), output)
        cost = self.costs.cost(500, 0, output)
        self.rate.observe(cost, 10**9, self.now_ns)
        self.queue.close(ticket, cost)


def _digests(tenant: str) -> tuple[bytes, ...]:
    """Every tenant has its own system prompt."""
    return tuple(f"{tenant}-{mark}".encode() for mark in marks_within(2_000))


def _ready(name: str, lanes: LaneSums) -> Replica:
    replica = Replica(name, "pool", ReplicaLimits(CONCURRENCY), sums=lanes)
    replica.room.kv_tokens_max = 600 * CONCURRENCY
    replica.advance(ReplicaEvent.ANSWERED)
    return replica


def microseconds(order: Order, tenants: int, waiting: int, replicas: int) -> tuple[float, float]:
    """CPU of one request's decisions until it starts, and of those at its end."""
    stand = Stand(order, tenants, waiting, replicas)
    gc.collect()
    starts_ns = ends_ns = 0
    for _ in range(DECISIONS):
        at_ns = time.process_time_ns()
        stand.end()
        ended_ns = time.process_time_ns()
        stand.arrive()
        assert stand.start()
        starts_ns += time.process_time_ns() - ended_ns
        ends_ns += ended_ns - at_ns
    return starts_ns / DECISIONS / 1_000, ends_ns / DECISIONS / 1_000


def main() -> int:
    """Measure and print."""
    table = Table(title=f"One request's decisions, CPU µs (best of {REPEATS}): until it starts + at its end")
    for title in ("tenants", "waiting", "replicas", "fair", "first come, first served"):
        table.add_column(title, justify="right")
    for size in SIZES:
        fair = min(microseconds(FairOrder(slack=10_000), *size) for _ in range(REPEATS))
        plain = min(microseconds(ArrivalOrder(), *size) for _ in range(REPEATS))
        figures = (f"{until_start:.1f} + {at_end:.1f}" for until_start, at_end in (fair, plain))
        table.add_row(*(f"{number:,}" for number in size), *figures)
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
