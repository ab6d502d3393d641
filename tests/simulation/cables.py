"""Connections of memory between the two ends of a link: bytes in order, each piece with its delay, in virtual time.

A cable may stand still, in one direction or both, so that connections stay and nothing passes; it may be cut, and each side
hears of that when it is told to, or never; it may refuse to connect. It never looks at what it carries.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

from weir.link.channel import Channel

_SPLIT_CHANCE = 0.2


class _Side(asyncio.Transport):
    """What one side writes to. towards: the pipe to the other side."""

    def __init__(self, connection: "_Connection", protocol: Channel, towards: "_Pipe") -> None:
        super().__init__()
        self._connection = connection
        self._protocol = protocol
        self._towards = towards
        self._closing = False
        self.is_gone = False

    def write(self, data: Any) -> None:
        """Carry it."""
        if not self._closing:
            self._towards.put(bytes(data))

    def close(self) -> None:
        """No more comes; what was written arrives before."""
        if not self._closing:
            self._closing = True
            self._towards.put(None)
            asyncio.get_running_loop().call_soon(self.tell_gone)

    def abort(self) -> None:
        """It is over; what was written may not arrive."""
        if not self._closing:
            self._towards.drop()
        self.close()

    def is_closing(self) -> bool:
        """Whether it was closed."""
        return self._closing

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """There is nothing to know of it."""
        return default

    def arrive(self, piece: bytes | None) -> None:
        """A piece of the other side's, or its end."""
        if self._closing:
            return
        if piece is None:
            self._closing = True
            self.tell_gone()
        else:
            self._protocol.data_received(piece)

    def tell_gone(self) -> None:
        """The connection is over for this side. Idempotent."""
        self._closing = True
        if not self.is_gone:
            self.is_gone = True
            self._connection.side_gone()
            self._protocol.connection_lost(None)


class _Pipe:
    """One direction of a connection."""

    def __init__(self, cable: "Cable") -> None:
        self._cable = cable
        self._pieces: deque[bytes | None] = deque()
        self._due: list[asyncio.TimerHandle] = []
        self._last_s = 0.0
        self._waiting = 0
        self.stands = self.is_cut = False
        self.reader: _Side

    def put(self, piece: bytes | None) -> None:
        """Carry a piece, in one or two parts; None: the end."""
        if self.is_cut:
            return
        if piece is not None and len(piece) > 1 and self._cable.random.random() < _SPLIT_CHANCE:
            at = self._cable.random.randrange(1, len(piece))
            self._carry(piece[:at])
            self._carry(piece[at:])
        else:
            self._carry(piece)

    def _carry(self, piece: bytes | None) -> None:
        loop = asyncio.get_running_loop()
        self._last_s = max(self._last_s, loop.time() + self._cable.delay())
        self._pieces.append(piece)
        self._due.append(loop.call_at(self._last_s, self._arrive))

    def _arrive(self) -> None:
        self._due.pop(0)
        if self.stands:
            self._waiting += 1
        else:
            self.reader.arrive(self._pieces.popleft())

    def go_on(self) -> None:
        """What waited arrives."""
        self.stands = False
        waiting, self._waiting = self._waiting, 0
        for _ in range(waiting):
            if self._pieces:
                self.reader.arrive(self._pieces.popleft())

    def drop(self) -> None:
        """What is under way is lost."""
        for timer in self._due:
            timer.cancel()
        self._due.clear()
        self._pieces.clear()
        self._waiting = 0

    def cut(self) -> None:
        """Nothing passes any more."""
        self.is_cut = True
        self.drop()


class _Connection:
    def __init__(self, cable: "Cable", gateway: Channel, coordinator: Channel) -> None:
        self._cable = cable
        self.up, self.down = _Pipe(cable), _Pipe(cable)
        self.gateway = self.down.reader = _Side(self, gateway, self.up)
        self.coordinator = self.up.reader = _Side(self, coordinator, self.down)

    def side_gone(self) -> None:
        """One side is over."""
        if self.gateway.is_gone and self.coordinator.is_gone:
            self._cable.connections.remove(self)

    def cut(self, gateway_s: float | None, coordinator_s: float | None) -> None:
        """Nothing passes any more; each side is told after its time, or never."""
        self.up.cut()
        self.down.cut()
        for side, told_s in ((self.gateway, gateway_s), (self.coordinator, coordinator_s)):
            if told_s is not None:
                asyncio.get_running_loop().call_later(told_s, side.tell_gone)


class Cable:
    """All connections between one gateway and the coordinator. delay_s: of a piece, between these.

    refuses: new connections fail. connections: those that at least one side still has.
    """

    def __init__(self, random: Random, accept: Callable[[], Channel], delay_s: tuple[float, float]) -> None:
        self.random = random
        self._accept = accept
        self._delay_s = delay_s
        self._passable = asyncio.Event()
        self._passable.set()
        self.refuses = False
        self.connections: list[_Connection] = []

    def delay(self) -> float:
        """Seconds that a piece takes."""
        return self.random.uniform(*self._delay_s)

    async def connect(self, make: Callable[[], Channel]) -> None:
        """A connection; while the cable stands, it waits. Raises ConnectionRefusedError."""
        await asyncio.sleep(2 * self.delay())
        await self._passable.wait()
        if self.refuses:
            raise ConnectionRefusedError
        gateway, coordinator = make(), self._accept()
        connection = _Connection(self, gateway, coordinator)
        self.connections.append(connection)
        coordinator.connection_made(connection.coordinator)
        gateway.connection_made(connection.gateway)

    def cut(self, gateway_s: float | None = 0.0, coordinator_s: float | None = 0.0) -> None:
        """Cut every connection; each side is told after its time, None: it has to find out."""
        for connection in list(self.connections):
            connection.cut(gateway_s, coordinator_s)

    def stand(self, *, up: bool = True, down: bool = True) -> None:
        """Nothing passes in these directions until `go_on`, and nothing connects."""
        self._passable.clear()
        for connection in self.connections:
            connection.up.stands, connection.down.stands = up, down

    def go_on(self) -> None:
        """What stood arrives."""
        self._passable.set()
        for connection in list(self.connections):
            connection.up.go_on()
            connection.down.go_on()

    def mend(self) -> None:
        """No fault any more."""
        self.refuses = False
        self.go_on()
