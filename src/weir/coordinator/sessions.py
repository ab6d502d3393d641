"""Gateway sessions as the coordinator keeps them, and the link of a gateway in the same process."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from weir import errors
from weir.coordinator.execution import Execution
from weir.messages import Down, Up
from weir.ports import GatewayInbox


@dataclass(slots=True)
class Session:
    """A gateway's session. by_ref: its requests that have something pending; asking: acquires that wait for the store.

    is_open: until it is over; then its inbox is nobody's. may_tell: what its gateway carries since another coordinator led.
    """

    name: str
    inbox: GatewayInbox
    by_ref: dict[int, Execution] = field(default_factory=dict)
    asking: set[int] = field(default_factory=set)
    is_open: bool = True
    may_tell: bool = False

    def has(self, ref: int) -> bool:
        """Whether a request of this reference is pending, or waits to be decided about."""
        return ref in self.by_ref or ref in self.asking


class _Nobody:
    """The inbox of a session that is over: what is still on its way to it is dropped."""

    def deliver(self, message: Down) -> None:
        """Nobody hears it."""


NOBODY: GatewayInbox = _Nobody()


class Sessions:
    """Open sessions by name."""

    def __init__(self) -> None:
        self._by_name: dict[str, Session] = {}

    def open(self, name: str, inbox: GatewayInbox) -> Session:
        """A new session. Raises LinkFault for a name that another one has, or had when a former coordinator died."""
        if name in self._by_name:
            raise errors.LinkFault("A session of this name is another gateway's.")
        session = self._by_name[name] = Session(name, inbox)
        return session

    def find(self, name: str) -> Session | None:
        """An open session."""
        return self._by_name.get(name)

    def close(self, name: str) -> Session:
        """The session is over; what is told to it from now on is told to nobody."""
        session = self._by_name.pop(name)
        session.is_open, session.inbox = False, NOBODY
        return session

    def deliver(self, execution: Execution, message: Down) -> None:
        """Tell the gateway that carries an execution."""
        session = self._by_name.get(execution.session)
        if session is not None:
            session.inbox.deliver(message)

    def tell(self, name: str, message: Down) -> None:
        """Tell one gateway, if its session is open."""
        session = self._by_name.get(name)
        if session is not None:
            session.inbox.deliver(message)

    def tell_all(self, message: Down) -> None:
        """Tell every gateway."""
        for session in self._by_name.values():
            session.inbox.deliver(message)

    def forget(self, execution: Execution) -> None:
        """Nothing of this execution is pending any more."""
        session = self._by_name.get(execution.session)
        if session is not None:
            session.by_ref.pop(execution.acquire.ref, None)


class LocalLink:
    """The coordinator's port for a gateway in the same process: a message is a call."""

    def __init__(self, receive: Callable[[Session, Any], None], session: Session) -> None:
        self._receive = receive
        self._session = session

    def send(self, message: Up) -> None:
        """Hand the message over; answers may arrive before this returns."""
        self._receive(self._session, message)
