"""Executions by request id: all live ones, the ended ones of late, and older ones through the store.

Memory is bounded: the oldest ended execution is forgotten first, and then the store answers for it, within a bound of time.
Live ones are never forgotten.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Iterator

import msgspec

from weir import errors
from weir.coordinator.execution import Execution
from weir.core.admission import Bound
from weir.ports import LedgerStore, StoredExecution
from weir.units import Millis

Key = tuple[str, str]
"""(tenant, request id)."""


class ExecutionTable:
    """ended_max: ended executions kept in memory. request_id_ms: how long an ended request id stays bound.

    store_wait_ms: how long the store may take to answer.
    """

    def __init__(self, store: LedgerStore, ended_max: int, request_id_ms: Millis, store_wait_ms: Millis = 2_000) -> None:
        self._store = store
        self._store_wait_ms = store_wait_ms
        self._ended_max = ended_max
        self._request_id_ms = request_id_ms
        self._latest: dict[Key, Execution] = {}
        self._live: dict[int, Execution] = {}
        self._ended: OrderedDict[int, Execution] = OrderedDict()

    def add(self, execution: Execution) -> None:
        """A new live execution becomes the latest of its request id."""
        self._latest[execution.key] = execution
        self._live[id(execution)] = execution

    def end(self, execution: Execution) -> None:
        """Nothing of it is pending any more: keep it among the ended ones, and forget the oldest beyond the bound."""
        if self._live.pop(id(execution), None) is None:
            return
        self._ended[id(execution)] = execution
        while len(self._ended) > self._ended_max:
            _, oldest = self._ended.popitem(last=False)
            if self._latest.get(oldest.key) is oldest:
                del self._latest[oldest.key]

    def get(self, tenant: str, request_id: str) -> Execution | None:
        """The latest execution of a request id, if it is in memory."""
        return self._latest.get((tenant, request_id))

    @property
    def live(self) -> Iterator[Execution]:
        """Executions of which something is pending: not ended, not durable, or the engine not stopped. A copy's iterator."""
        return iter(list(self._live.values()))

    def carries(self, pool: str, replica: str | None = None) -> bool:
        """Whether anything of a pool's is live, or on one of its replicas; also what no gateway has told of so far."""
        live = (execution for execution in self.live if execution.pool == pool)
        return any(replica is None or execution.is_on(replica) for execution in live)

    @property
    def live_count(self) -> int:
        """How many are live."""
        return len(self._live)

    def live_of(self, revision: str) -> int:
        """How many of the live ones are pinned to a revision."""
        return sum(execution.acquire.revision == revision for execution in self._live.values())

    @property
    def in_flight(self) -> int:
        """How many have not reached their terminal status."""
        return sum(not execution.is_ended for execution in self.live)

    async def find_stored(self, tenant: str, request_id: str) -> StoredExecution | None:
        """The latest execution as the store has it. Raises LedgerUnavailable, also when it takes too long."""
        try:
            async with asyncio.timeout(self._store_wait_ms / 1e3):
                return await self._store.find_execution(tenant, request_id)
        except TimeoutError:
            raise errors.LedgerUnavailable("The ledger did not answer in time.") from None

    def bound_of(self, execution: Execution, now_wall_ms: Millis) -> Bound:
        """What a second request with this id meets, from memory."""
        end = execution.end_record
        ended_at = end.at_ms if end is not None and execution.end_durable else None
        return msgspec.structs.replace(execution.bound(), forgotten=self._is_forgotten(ended_at, now_wall_ms))

    def _is_forgotten(self, ended_at_ms: Millis | None, now_wall_ms: Millis) -> bool:
        return ended_at_ms is not None and now_wall_ms - ended_at_ms > self._request_id_ms

    def bound_of_stored(self, stored: StoredExecution, now_wall_ms: Millis) -> Bound:
        """What a second request with this id meets, from the store's record."""
        return Bound(
            execution=stored.id.execution,
            body_digest=stored.body_digest,
            status=stored.record.status,
            delivered_tokens=stored.delivered_tokens,
            tenant_tokens=stored.tenant_tokens,
            cost_microusd=stored.record.cost_microusd,
            forgotten=self._is_forgotten(stored.ended_at_ms, now_wall_ms),
        )
