"""An event loop of virtual time: deterministic, without sockets or threads, hours in a second.

`time()` is virtual and jumps to the next timer when nothing is ready. Timers that are due together run in the order in which
they were set, tasks and futures hash by their number, so that one seed gives one trace. What would leave this world (threads,
sockets, processes, signals) is refused; a world in which nothing can happen any more is a Deadlock, not a hang.
"""

import asyncio
import contextvars
import heapq
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from itertools import count
from typing import Any, NoReturn, TypeVar, TypeVarTuple

from weir.units import NANOS_PER_MILLI, NANOS_PER_SECOND, Millis, Nanos, ns_from_ms

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

TURNS_PER_INSTANT_MAX = 100_000
"""Turns of the loop at one instant before that counts as a livelock: far above any honest burst."""

WALL_START_MS = 1_767_225_600_000  # 2026-01-01T00:00:00Z: an ordinary day


class Deadlock(RuntimeError):
    """Nothing is ready, no timer is set, and the main coroutine still waits; or it spins without time going on."""


class VirtualTimeout(RuntimeError):
    """The main coroutine did not end within its bound of virtual time."""


class LeftTheWorld(RuntimeError):
    """Something asked the virtual loop for a thread or a socket."""


class CallbackFailed(RuntimeError):
    """A callback or an abandoned task raised; its exception is the cause."""


class SeedFailed(Exception):
    """A run failed; the seed is in the message, the failure is the cause."""

    def __init__(self, seed: int) -> None:
        super().__init__(f"seed {seed} failed")
        self.seed = seed


class _NumberedTask(asyncio.Task[T]):
    """A task that hashes by its number: sets of tasks then have the same order in every run."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], *, loop: "VirtualLoop", **options: Any) -> None:
        self.number = loop.next_number()
        super().__init__(coroutine, loop=loop, **{"name": f"task-{self.number}"} | options)

    def __hash__(self) -> int:
        return self.number


class _NumberedFuture(asyncio.Future[T]):
    def __init__(self, *, loop: "VirtualLoop") -> None:
        self.number = loop.next_number()
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self.number


class _OrderedTimer(asyncio.TimerHandle):
    """A timer that runs after those set before it for the same instant."""

    number = 0
    _scheduled: bool  # the parent's mark of what lies in its heap

    def __lt__(self, other: asyncio.TimerHandle) -> bool:
        assert isinstance(other, _OrderedTimer)
        return (self.when(), self.number) < (other.when(), other.number)


class VirtualLoop(asyncio.BaseEventLoop):
    """The loop. until_ms: virtual milliseconds after which waiting raises VirtualTimeout."""

    _scheduled: list[asyncio.TimerHandle]  # the parent's heap
    _ready: deque[asyncio.Handle]  # the parent's queue

    def __init__(self, until_ms: Millis) -> None:
        super().__init__()
        self._selector = self  # the parent's turn asks its selector to wait; here waiting is jumping
        self._clock_resolution = 0.5e-9  # timers are whole nanoseconds
        self._now_ns: Nanos = 0
        self._until_ns = ns_from_ms(until_ms)
        self._turns_at_instant = 0
        self._strikes: dict[int, Callable[[], None]] = {}
        self.turns = 0
        self._numbers = count(1)
        self._failure: CallbackFailed | None = None
        self.set_exception_handler(_keep_first_failure)
        self.set_task_factory(_number_task)

    @property
    def now_ns(self) -> Nanos:
        """Virtual nanoseconds since the loop was made, exact."""
        return self._now_ns

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now_ns / NANOS_PER_SECOND

    def next_number(self) -> int:
        """Numbers tasks, futures and timers in the order in which they are made."""
        return next(self._numbers)

    def create_future(self) -> asyncio.Future[Any]:
        """A future of this loop."""
        return _NumberedFuture(loop=self)

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        """Call back at a virtual time in seconds, rounded to the nanosecond."""
        when_s = round(when * NANOS_PER_SECOND) / NANOS_PER_SECOND
        timer = _OrderedTimer(when_s, callback, args, self, context)
        timer.number = self.next_number()
        heapq.heappush(self._scheduled, timer)
        timer._scheduled = True
        return timer

    def call_soon_threadsafe(self, *_: object, **__: object) -> NoReturn:
        """Refused: there are no threads here. Raises LeftTheWorld."""
        raise LeftTheWorld("the virtual loop has no other threads")

    def run_in_executor(self, *_: object, **__: object) -> NoReturn:
        """Refused: there are no threads here. Raises LeftTheWorld."""
        raise LeftTheWorld("the virtual loop runs nothing in threads")

    async def create_connection(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: there is no network here. Raises LeftTheWorld."""
        raise LeftTheWorld("the virtual loop has no sockets")

    async def create_server(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: there is no network here. Raises LeftTheWorld."""
        raise LeftTheWorld("the virtual loop has no sockets")

    def leap(self, to_ns: Nanos) -> bool:
        """Within a callback, let time go on to an instant; False, and it stands, unless nothing is ready or due until then."""
        is_next = not self._scheduled or round(self._scheduled[0].when() * NANOS_PER_SECOND) > to_ns
        if self._ready or not is_next or to_ns > self._until_ns:
            return False
        assert to_ns >= self._now_ns
        self._now_ns = to_ns
        self._turns_at_instant = 0
        return True

    def at_turn(self, turn: int, strike: Callable[[], None]) -> None:
        """Call back between two turns, before the one with this number (`turns` counts them): tasks await then, all of them."""
        self._strikes[turn] = strike

    def fail(self, failure: CallbackFailed) -> None:
        """Keep the first failure of a callback; the run ends with it."""
        self._failure = self._failure or failure

    def raise_failure(self) -> None:
        """Raise what a callback failed with, if one did."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    # ── what the parent's turn calls ─────────────────────────────────────────────────────────────────────────────────

    def select(self, timeout: float | None) -> list[object]:
        """Wait as the parent would: not at all, until the next timer by jumping there, or for ever, which is a Deadlock."""
        self.turns += 1
        if (strike := self._strikes.pop(self.turns, None)) is not None:
            strike()
            timeout = 0  # what it cancelled is ready now
        self.raise_failure()
        if timeout is None:
            raise Deadlock("nothing is ready and no timer is set, but the main coroutine still waits")
        if timeout <= 0:
            self._turns_at_instant += 1
            if self._turns_at_instant > TURNS_PER_INSTANT_MAX:
                raise Deadlock(f"more than {TURNS_PER_INSTANT_MAX} turns without time going on")
            return []
        due_ns = round(self._scheduled[0].when() * NANOS_PER_SECOND)
        if due_ns > self._until_ns:
            raise VirtualTimeout(f"not finished after {self._until_ns // NANOS_PER_MILLI} ms of virtual time")
        if due_ns > self._now_ns:
            self._now_ns = due_ns
            self._turns_at_instant = 0
        return []

    def _process_events(self, event_list: Iterable[object]) -> None:
        """There are no file descriptors."""

    def extend(self, by_ms: Millis) -> None:
        """Allow this much more virtual time from now on: for cleaning up after a time-out."""
        self._until_ns = max(self._until_ns, self._now_ns + ns_from_ms(by_ms))
        self._turns_at_instant = 0


def _number_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    assert isinstance(loop, VirtualLoop)
    return _NumberedTask(coroutine, loop=loop, **options)


def _keep_first_failure(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    assert isinstance(loop, VirtualLoop)
    failure = CallbackFailed(str(context.get("message", "a callback failed")))
    failure.__cause__ = context.get("exception")
    loop.fail(failure)


class VirtualClock:
    """The Clock port on a loop's virtual time. wall_start_ms: the Unix time at which the loop was made."""

    def __init__(self, loop: VirtualLoop, wall_start_ms: Millis = WALL_START_MS) -> None:
        self._loop = loop
        self._wall_start_ms = wall_start_ms

    def monotonic_ns(self) -> Nanos:
        """Virtual nanoseconds, exact."""
        return self._loop.now_ns

    def wall_ms(self) -> Millis:
        """The start plus whole virtual milliseconds."""
        return self._wall_start_ms + self._loop.now_ns // NANOS_PER_MILLI


CLEAN_UP_MS = 60_000
"""Virtual time that cancelled tasks get after the main coroutine ended."""


def run(main: Coroutine[Any, Any, T], *, until_ms: Millis) -> T:
    """Run a coroutine to its end in virtual time and return its result.

    Raises what it raises, Deadlock, VirtualTimeout (bound until_ms), or CallbackFailed for what failed unseen beside it.
    """
    loop = VirtualLoop(until_ms)
    try:
        result = loop.run_until_complete(main)
        _cancel_the_rest(loop)
        loop.raise_failure()
        return result
    except BaseException:
        _cancel_the_rest(loop)
        raise
    finally:
        loop.close()


def _cancel_the_rest(loop: VirtualLoop) -> None:
    """Cancel what still runs and wait for it; a task that outlives its cancelling is a Deadlock or a VirtualTimeout."""
    loop.extend(CLEAN_UP_MS)
    left = sorted(asyncio.all_tasks(loop), key=hash)
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.wait(left))
    loop.run_until_complete(loop.shutdown_asyncgens())


def run_seeds(seeds: Iterable[int], world: Callable[[int], Coroutine[Any, Any, T]], *, until_ms: Millis) -> list[T]:
    """Run one world per seed, each on a fresh loop, and return their results. Raises SeedFailed from the first failure."""
    results = []
    for seed in seeds:
        try:
            results.append(run(world(seed), until_ms=until_ms))
        except Exception as failure:
            raise SeedFailed(seed) from failure
    return results
