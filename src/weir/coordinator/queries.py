"""Questions that gateways ask the coordinator: look-ups, cancels by id, and the caller's own limits."""

from collections.abc import Callable, Coroutine
from typing import Any

from weir import errors
from weir.coordinator.execution import Execution
from weir.coordinator.execution_table import ExecutionTable
from weir.coordinator.sessions import Session
from weir.core.endings import FinishReason
from weir.core.ledger.book import Book, LimitStanding
from weir.core.tenancy import Scopes, scopes_of
from weir.messages import AskStanding, CancelById, Found, LimitView, Lookup, StandingFound, StandingView
from weir.ports import Clock


class Queries:
    """Answers from memory at once, else from the store. ask_to_stop ends an execution; start runs a task of the coordinator."""

    def __init__(
        self,
        clock: Clock,
        book: Book,
        executions: ExecutionTable,
        ask_to_stop: Callable[[Execution, FinishReason], None],
        start: Callable[[Coroutine[Any, Any, None]], bool],
    ) -> None:
        self._clock = clock
        self._book = book
        self._executions = executions
        self._ask_to_stop = ask_to_stop
        self._start = start

    def on_cancel_by_id(self, session: Session, query: CancelById) -> None:
        """Cancel the latest execution of an id; the answer comes once it is terminal. An ended one answers unchanged."""
        execution = self._executions.get(query.tenant, query.request_id)
        if execution is None:
            self._ask_store(session, query)
        elif execution.end_durable:
            session.inbox.deliver(Found(query.query, execution.public()))
        else:
            execution.cancel_queries.append((session.name, query.query))
            self._ask_to_stop(execution, FinishReason.CLIENT)

    def on_lookup(self, session: Session, query: Lookup) -> None:
        """The latest execution of an id."""
        execution = self._executions.get(query.tenant, query.request_id)
        if execution is None:
            self._ask_store(session, query)
        else:
            session.inbox.deliver(Found(query.query, execution.public()))

    def _ask_store(self, session: Session, query: CancelById | Lookup) -> None:
        if not self._start(self._answer_from_store(session, query)):
            session.inbox.deliver(Found(query.query, None, unavailable=True))

    async def _answer_from_store(self, session: Session, query: CancelById | Lookup) -> None:
        try:
            stored = await self._executions.find_stored(query.tenant, query.request_id)
        except errors.LedgerUnavailable:
            session.inbox.deliver(Found(query.query, None, unavailable=True))
            return
        if self._executions.get(query.tenant, query.request_id) is None:
            session.inbox.deliver(Found(query.query, stored.record if stored else None))
        elif isinstance(query, CancelById):  # it was admitted while the store was asked
            self.on_cancel_by_id(session, query)
        else:
            self.on_lookup(session, query)

    def on_ask_standing(self, session: Session, query: AskStanding) -> None:
        """The caller's per-minute limits."""
        scopes = scopes_of(query.tenant, query.application, query.key, query.alias, query.service_class)
        session.inbox.deliver(StandingFound(query.query, self.standing(scopes)))

    def standing(self, scopes: Scopes) -> StandingView:
        """The tightest per-minute limits of these scopes."""
        standing = self._book.standing(scopes, self._clock.monotonic_ns())
        return StandingView(_view(standing.requests), _view(standing.tokens))


def _view(limit: LimitStanding) -> LimitView:
    return LimitView(limit.limit, limit.remaining, limit.reset_ms)
