"""Wakes the replicas of a run at the ends of their steps: one timer of the loop for all of them, and none where time may leap.

A run consists of steps above all, and a turn of the loop costs as much as a small step's work. Between two other events time
goes on right here, from step to step; whatever else is ready or due goes first, so that nothing happens out of its time.
"""

import asyncio
import heapq
from collections.abc import Callable

from weir.sim.virtual_loop import VirtualLoop
from weir.units import NANOS_PER_SECOND, Nanos


class StepClock:
    """Callbacks by time, those of one instant in the order in which they were set. They are never taken back."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._due: list[tuple[Nanos, int, Callable[[], None]]] = []
        self._number = 0
        self._timer: asyncio.TimerHandle | None = None
        self._armed_ns: Nanos = 0
        self._is_stepping = False

    @property
    def now_ns(self) -> Nanos:
        """Virtual nanoseconds."""
        return self._loop.now_ns

    def soon(self, callback: Callable[[], None]) -> None:
        """Call back after everything that happens at this instant."""
        self._loop.call_soon(callback)

    def after(self, wait_ns: Nanos, callback: Callable[[], None]) -> None:
        """Call back when so much time has passed."""
        self._number += 1
        heapq.heappush(self._due, (self._loop.now_ns + wait_ns, self._number, callback))
        if not self._is_stepping:
            self._arm()

    def _arm(self) -> None:
        due_ns = self._due[0][0]
        if self._timer is not None:
            if self._armed_ns <= due_ns:
                return
            self._timer.cancel()
        self._armed_ns = due_ns
        self._timer = self._loop.call_at(due_ns / NANOS_PER_SECOND, self._step)

    def _step(self) -> None:
        self._timer = None
        self._is_stepping = True
        due, loop = self._due, self._loop
        while due and (due[0][0] <= loop.now_ns or loop.leap(due[0][0])):
            heapq.heappop(due)[2]()
        self._is_stepping = False
        if due:
            self._arm()
