"""Both directions between a gateway and its coordinator with a tap in each, and a cut for the moment a process dies.

Messages pass unchanged and in order; the tap hears of each before it takes effect.
"""

from collections.abc import Callable

from weir.coordinator.sessions import LocalLink
from weir.messages import Down, Up
from weir.ports import GatewayInbox


class Wire:
    """One session's wire. heard: called with every message that passes."""

    def __init__(self, inbox: GatewayInbox, heard: Callable[[Up | Down], None]) -> None:
        self._inbox = inbox
        self.heard = heard
        self._cut = False
        self.link: LocalLink | None = None

    def cut(self) -> None:
        """Nothing passes any more."""
        self._cut = True

    def send(self, message: Up) -> None:
        """Gateway to coordinator."""
        if not self._cut:
            assert self.link is not None
            self.heard(message)
            self.link.send(message)

    def deliver(self, message: Down) -> None:
        """Coordinator to gateway."""
        if not self._cut:
            self.heard(message)
            self._inbox.deliver(message)
