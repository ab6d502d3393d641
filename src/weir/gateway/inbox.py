"""Where the coordinator's messages arrive: the snapshot, the fleet, answers to questions, and each request's own messages.

It routes and remembers; it decides nothing. References of requests and queries are numbers of this session, never reused.
"""

import asyncio
from collections.abc import Callable, Sequence
from itertools import count
from typing import NamedTuple, Protocol, TypeAlias

from weir import errors
from weir.core.registry.model import within_reach
from weir.core.registry.snapshot import Snapshot
from weir.core.tenancy import Principal
from weir.messages import (
    AskStanding,
    CancelById,
    Down,
    Draining,
    FleetView,
    Found,
    Granted,
    Lookup,
    ReattachedAll,
    ReplicaAddress,
    SnapshotFresh,
    StandingFound,
    StandingView,
    Stopped,
    Up,
)
from weir.ports import Clock, CoordinatorLink
from weir.units import Millis, Nanos, ms_from_ns, ns_from_ms

_Question: TypeAlias = CancelById | Lookup | AskStanding
_Answer: TypeAlias = Found | StandingFound
_OF_THE_SESSION = (Snapshot, SnapshotFresh, FleetView, Draining, Found, StandingFound)
"""Messages that are not about one request."""


_LOST = "No coordinator can be reached."
LOST_RETRY_MS: Millis = 1_000
"""A takeover takes seconds."""


class Listener(Protocol):
    """A request that waits for messages with its ref."""

    def deliver(self, message: Down) -> None: ...

    def coordinator_lost(self) -> None:
        """No more will come, and nothing that was asked is answered."""
        ...

    def reattach(self) -> Sequence[Up]:
        """What another coordinator must know of it."""
        ...

    @property
    def is_pending(self) -> bool:
        """Whether it has ended, and another coordinator might have to be told of it all the same."""
        ...


class _Asked(NamedTuple):
    """A question that waits for its answer."""

    question: _Question
    answer: asyncio.Future[_Answer]


class Inbox:
    """One session's incoming side. `link` is set once the session is open.

    is_lost: no coordinator knows of this session; until one does, nothing is asked. is_draining: it admits nothing more.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._fresh_until_ns: Nanos | None = None
        self.snapshot = Snapshot()
        self.link: CoordinatorLink | None = None
        self.is_lost = self.is_draining = False
        self._version_floor = 0
        self._listeners: dict[int, Listener] = {}
        self._leaving: set[int] = set()  # those of them of which nobody waits for anything
        self._queries: dict[int, _Asked] = {}
        self._ready: dict[str, list[ReplicaAddress]] = {}
        self._refs = count(1)

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def open(self, listener: Listener) -> int:
        """A new reference; its messages go to the listener."""
        ref = next(self._refs)
        self._listeners[ref] = listener
        return ref

    def reopen(self, ref: int) -> int:
        """Another reference for a request that is asked for again: what is said of the first one is late."""
        return self.open(self._listeners.pop(ref))

    def close(self, ref: int) -> None:
        """No more messages for this reference are of interest, but those that end what is pending."""
        self._leaving.add(ref)
        self.settled(ref)

    def settled(self, ref: int) -> None:
        """Less is pending of this reference: one that is left and has nothing pending is forgotten."""
        listener = self._listeners.get(ref)
        if ref in self._leaving and (listener is None or not listener.is_pending):
            self._forget(ref)

    def _forget(self, ref: int) -> None:
        self._listeners.pop(ref, None)
        self._leaving.discard(ref)

    @property
    def open_requests(self) -> int:
        """Requests with an open reference."""
        return len(self._listeners) - len(self._leaving)

    @property
    def fresh_ms(self) -> Millis | None:
        """For how long the snapshot may still be worked by, ≥ 0; None: no bound was told."""
        if self._fresh_until_ns is None:
            return None
        return max(0, ms_from_ns(self._fresh_until_ns - self._clock.monotonic_ns()))

    @property
    def has_replicas(self) -> bool:
        """Whether any replica is ready."""
        return bool(self._ready)

    def counting_replica(self, revision: str, tenant: str) -> ReplicaAddress | None:
        """A ready replica of a revision that counts tokens and may see this tenant's prompts; None when there is none."""
        return next((replica for replica in self._within_reach(revision, tenant) if replica.counts_tokens), None)

    def refuses_tools(self, revision: str, tenant: str) -> bool:
        """Whether the replicas of a revision that may see this tenant's prompts are known to take no tools."""
        ready = self._within_reach(revision, tenant)
        return bool(ready) and not any(replica.takes_tools for replica in ready)

    def is_ready_for(self, revision: str, principal: Principal) -> bool:
        """Whether a replica of this revision is ready that may take this caller's requests."""
        pools = self.snapshot.pools
        ready = self._within_reach(revision, principal.tenant)
        return any(principal.service_class in pools[replica.pool].service_classes for replica in ready)

    def _within_reach(self, revision: str, tenant: str) -> list[ReplicaAddress]:
        """The ready replicas of a revision that may see this tenant's prompts."""
        ready, owner = self._ready.get(revision, ()), self.snapshot.tenants.get(tenant)
        if not ready or owner is None:
            return []
        pools = within_reach(self.snapshot.pools_of.get(revision, ()), tenant, owner.leaves_its_pools)
        names = {pool.name for pool in pools}
        return [replica for replica in ready if replica.pool in names]

    def has_choice(self, revision: str) -> bool:
        """Whether several replicas of a revision are ready that keep what they have read, apart for each salt."""
        return sum([address.cache_salt for address in self._ready.get(revision, ())]) > 1

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def deliver(self, message: Down) -> None:
        """One message of the coordinator."""
        if not isinstance(message, _OF_THE_SESSION):
            if (listener := self._listeners.get(message.ref)) is not None:
                listener.deliver(message)
                self.settled(message.ref)
            elif isinstance(message, Granted) and self.link is not None:
                self.link.send(Stopped(message.ref, message.attempt))  # it left before a decision; the lane waits for a word
        elif isinstance(message, Found | StandingFound):
            asked = self._queries.pop(message.query, None)
            if asked is not None and not asked.answer.done():
                asked.answer.set_result(message)
        else:
            self._learn(message)

    def _learn(self, message: Snapshot | SnapshotFresh | FleetView | Draining) -> None:
        """What the whole session is to know."""
        if isinstance(message, Snapshot):
            if message.version >= self._version_floor:
                self.snapshot, self._version_floor = message, message.version
        elif isinstance(message, SnapshotFresh):
            self._fresh_until_ns = self._clock.monotonic_ns() + ns_from_ms(message.valid_ms)
        elif isinstance(message, Draining):
            self.is_draining = True
        else:  # the fleet, with which a session begins
            self.is_lost = False
            self._ready = {}
            for replica in message.ready:
                self._ready.setdefault(replica.revision, []).append(replica)

    def lose(self) -> None:
        """The session is lost: what waits for its coordinator waits in vain."""
        self.is_lost, self.is_draining = True, False
        self._version_floor = 0  # another coordinator's word counts, also if its database was restored
        for asked in self._queries.values():
            if not asked.answer.done():
                asked.answer.set_exception(errors.CoordinatorLost(_LOST, retry_after_ms=LOST_RETRY_MS))
        for listener in list(self._listeners.values()):
            listener.coordinator_lost()
        for ref in list(self._leaving):
            self._forget(ref)

    def renew(self) -> None:
        """Another coordinator leads: it is told what goes on, and asked what the former one did not answer."""
        self.is_draining = False
        self._version_floor = 0
        if self.link is None:
            return  # nothing was ever asked
        for listener in list(self._listeners.values()):
            for told in listener.reattach():
                self.link.send(told)
        self.link.send(ReattachedAll())
        for asked in list(self._queries.values()):
            self.link.send(asked.question)

    # ── questions ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def lookup(self, tenant: str, request_id: str) -> Found:
        """The latest execution of a request id. Raises LedgerUnavailable when the store cannot be asked, CoordinatorLost."""
        return self._checked(await self._ask(lambda query: Lookup(query, tenant, request_id)))

    async def cancel(self, tenant: str, request_id: str) -> Found:
        """Cancel and wait until terminal. Raises LedgerUnavailable when the store cannot be asked, CoordinatorLost."""
        return self._checked(await self._ask(lambda query: CancelById(query, tenant, request_id)))

    async def standing(self, caller: Principal, alias: str) -> StandingView:
        """The caller's per-minute limits. Raises CoordinatorLost."""
        who = (caller.tenant, caller.application, caller.key)
        answer = await self._ask(lambda query: AskStanding(query, *who, alias, caller.service_class))
        assert isinstance(answer, StandingFound)
        return answer.standing

    def _checked(self, answer: _Answer) -> Found:
        assert isinstance(answer, Found)
        if answer.unavailable:
            raise errors.LedgerUnavailable("The ledger cannot be read now.")
        return answer

    async def _ask(self, question: Callable[[int], _Question]) -> _Answer:
        assert self.link is not None
        if self.is_lost:
            raise errors.CoordinatorLost(_LOST, retry_after_ms=LOST_RETRY_MS)
        query = next(self._refs)
        answer: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()
        self._queries[query] = asked = _Asked(question(query), answer)
        try:
            self.link.send(asked.question)
            return await answer
        finally:
            self._queries.pop(query, None)
