"""Both directions between a gateway and its coordinator with a tap in each, and a cut for the moment a process dies.

Messages pass unchanged and in order; the tap hears of each before it takes effect. A finish may be heard again by the
coordinator, at once or later, also with other figures: such an echo is to change nothing, so the tap is not told of it.
"""

import asyncio
from collections.abc import Callable, Iterator
from random import Random

import msgspec

from weir.coordinator.sessions import LocalLink
from weir.core.endings import FinishReason
from weir.core.metering import Basis
from weir.messages import AttemptUsage, Down, Finish, Up
from weir.ports import GatewayInbox

_DELAYS_S = (0.0, 0.0, 0.02, 1.0, 5.0)


class Echoes:
    """Which finishes are heard again. share: 0 … 1."""

    def __init__(self, random: Random, share: float) -> None:
        self._random = random
        self._share = share

    def of(self, finish: Finish) -> Iterator[tuple[float, Finish]]:
        """After how many seconds it is heard again, and as what."""
        if self._random.random() < self._share:
            delay_s = self._random.choice(_DELAYS_S)
            dearer = msgspec.structs.replace(
                finish, reason=FinishReason.STOP, delivered_tokens=900, usage=AttemptUsage(900, 0, 900, Basis.ENGINE)
            )
            yield delay_s, self._random.choice([finish, dearer])


class Wire:
    """One session's wire. heard: called with every message that passes."""

    def __init__(self, inbox: GatewayInbox, heard: Callable[[Up | Down], None], echoes: Echoes) -> None:
        self._inbox = inbox
        self._echoes = echoes
        self._cut = False
        self.heard = heard
        self.link: LocalLink | None = None

    def cut(self) -> None:
        """Nothing passes any more."""
        self._cut = True

    def send(self, message: Up) -> None:
        """Gateway to coordinator."""
        if not self._cut:
            self.heard(message)
            self._pass_up(message)
            if isinstance(message, Finish):
                for delay_s, echo in self._echoes.of(message):
                    asyncio.get_running_loop().call_later(delay_s, self._pass_up, echo)

    def _pass_up(self, message: Up) -> None:
        if not self._cut:
            assert self.link is not None
            self.link.send(message)

    def deliver(self, message: Down) -> None:
        """Coordinator to gateway."""
        if not self._cut:
            self.heard(message)
            self._inbox.deliver(message)
