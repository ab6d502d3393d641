"""What one coroutine waits for, and callbacks of the loop set."""

import asyncio


class Signal:
    """Wakes the one coroutine that waits. An asyncio.Event asks for the loop at each wait: in Python 3.11 a system call."""

    __slots__ = ("_loop", "_waiter")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        """Wake the waiter, if there is one."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def wait(self) -> None:
        """Until the next `set`."""
        assert self._waiter is None
        waiter = self._waiter = self._loop.create_future()
        try:
            await waiter
        finally:
            if self._waiter is waiter:
                self._waiter = None
