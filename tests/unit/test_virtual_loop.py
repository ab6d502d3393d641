"""The virtual-time loop is deterministic, exact, fast, and refuses what would leave its world."""

import asyncio
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from weir.sim.random_source import SeededEntropy, seeded_random, step_noise
from weir.sim.virtual_loop import (
    WALL_START_MS,
    CallbackFailed,
    Deadlock,
    LeftTheWorld,
    SeedFailed,
    VirtualClock,
    VirtualLoop,
    VirtualTimeout,
    run,
    run_seeds,
)

HOUR_MS = 3_600_000


def _loop() -> VirtualLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop


async def _busy_world(seed: int) -> str:
    """Tasks that sleep, wait for each other, time out and are cancelled in sets; the digest of everything they did."""
    random, loop, trace = seeded_random(seed, "world"), _loop(), hashlib.sha256()
    gate = asyncio.Condition()

    async def actor(name: int) -> None:
        try:
            for _ in range(random.randint(1, 5)):
                await asyncio.sleep(random.random())
                trace.update(f"{name} {loop.now_ns};".encode())
                async with gate:
                    gate.notify_all()
                    try:
                        async with asyncio.timeout(random.random()):
                            await gate.wait()
                    except TimeoutError:
                        trace.update(b"timeout;")
        except asyncio.CancelledError:
            trace.update(f"cancelled {name};".encode())
            raise

    async def breaker() -> None:
        await asyncio.sleep(2)
        raise ValueError("the group is to be cancelled")

    async def broken_group() -> None:
        async with asyncio.TaskGroup() as group:
            for name in range(30):
                group.create_task(actor(name))
            group.create_task(breaker())

    with pytest.raises(ExceptionGroup):
        await broken_group()
    futures = [loop.create_future() for _ in range(10)]
    for future in futures:
        loop.call_later(random.choice((0.1, 0.2)), future.set_result, None)
    done, _ = await asyncio.wait(futures, timeout=0.15)
    trace.update("".join(str(futures.index(future)) for future in done).encode())
    return trace.hexdigest()


def test_one_seed_gives_one_trace() -> None:
    """A failure found once is found again: also the order in which a set of tasks is cancelled repeats."""
    first, second = run_seeds((1, 2), _busy_world, until_ms=HOUR_MS), run_seeds((1, 2), _busy_world, until_ms=HOUR_MS)
    assert first == second
    assert first[0] != first[1]


def test_the_trace_is_the_same_in_another_process() -> None:
    """Memory addresses and string hashing don't leak into the order of events."""
    program = "from tests.unit.test_virtual_loop import _busy_world, run; print(run(_busy_world(7), until_ms=3600000))"
    here = run(_busy_world(7), until_ms=HOUR_MS)
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=root, env=environment, timeout=60, check=True
    )
    assert done.stdout.strip() == here


def test_time_jumps_and_is_exact() -> None:
    """Hours take no time, and the clock shows whole nanoseconds without drift."""

    async def main() -> tuple[int, int]:
        clock = VirtualClock(_loop())
        for _ in range(1_000):
            await asyncio.sleep(0.1)
        assert clock.monotonic_ns() == 100 * 10**9
        await asyncio.sleep(3_000)
        return clock.monotonic_ns(), clock.wall_ms()

    started = time.perf_counter()
    assert run(main(), until_ms=HOUR_MS) == (3_100 * 10**9, WALL_START_MS + 3_100_000)
    assert time.perf_counter() - started < 5


def test_timers_of_one_instant_run_in_the_order_set() -> None:
    """Ties are not left to a heap's whim, also when floating point would set them apart."""

    async def main() -> list[int]:
        loop, seen = _loop(), list[int]()
        for number in range(20):
            loop.call_at(0.3 if number % 2 else 0.1 + 0.2, seen.append, number)
        loop.call_at(0.3, seen.append, -1).cancel()
        await asyncio.sleep(1)
        return seen

    assert run(main(), until_ms=HOUR_MS) == list(range(20))


def test_a_world_that_cannot_go_on_is_a_deadlock() -> None:
    """A lost wake-up fails at once instead of hanging; what waited is cancelled and cleans up."""
    cleaned = []

    async def main() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append(True)

    with pytest.raises(Deadlock, match="nothing is ready"):
        run(main(), until_ms=HOUR_MS)
    assert cleaned == [True]


def test_spinning_without_time_is_a_deadlock() -> None:
    """A loop of callbacks at one instant is bounded."""

    async def main() -> None:
        loop = _loop()

        def again() -> None:
            loop.call_soon(again)

        again()
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match="without time"):
        run(main(), until_ms=HOUR_MS)


def test_the_bound_of_virtual_time_holds() -> None:
    """A world that ticks for ever ends at its bound."""

    async def main() -> None:
        for _ in range(10_000):
            await asyncio.sleep(60)

    with pytest.raises(VirtualTimeout):
        run(main(), until_ms=HOUR_MS)


def test_threads_and_sockets_are_refused() -> None:
    """Nothing of the real world's timing gets in."""

    async def main() -> None:
        loop = _loop()
        with pytest.raises(LeftTheWorld):
            await asyncio.to_thread(print)
        with pytest.raises(LeftTheWorld):
            loop.call_soon_threadsafe(print)
        with pytest.raises(LeftTheWorld):
            await asyncio.open_connection("127.0.0.1", 1)
        with pytest.raises(LeftTheWorld):
            await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        with pytest.raises(NotImplementedError):
            loop.add_reader(0, print)

    run(main(), until_ms=HOUR_MS)


def test_a_failing_callback_ends_the_run() -> None:
    """What fails beside the main coroutine is not a line in a log."""

    def fail() -> None:
        raise KeyError("lost")

    async def main() -> None:
        asyncio.get_running_loop().call_later(1, fail)
        await asyncio.sleep(5)

    with pytest.raises(CallbackFailed) as failure:
        run(main(), until_ms=HOUR_MS)
    assert isinstance(failure.value.__cause__, KeyError)


def test_what_main_leaves_behind_is_cancelled() -> None:
    """Tasks and generators of a finished world run their clean-up before the loop closes."""
    cleaned = []

    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
            yield 2
        finally:
            cleaned.append("generator")

    async def endless() -> None:
        try:
            await asyncio.sleep(10**6)
        finally:
            cleaned.append("task")

    async def main() -> tuple[asyncio.Task[None], AsyncIterator[int]]:
        task, generator = asyncio.get_running_loop().create_task(endless()), numbers()
        await anext(generator)
        return task, generator

    task, _ = run(main(), until_ms=HOUR_MS)
    assert task.cancelled() and cleaned == ["task", "generator"]


def test_a_failing_seed_is_named() -> None:
    """The failure of one run among hundreds says which seed repeats it."""

    async def world(seed: int) -> int:
        await asyncio.sleep(seed)
        assert seed != 170
        return seed

    assert run_seeds(range(100), world, until_ms=HOUR_MS) == list(range(100))
    with pytest.raises(SeedFailed, match="seed 170") as failure:
        run_seeds(range(100, 300), world, until_ms=HOUR_MS)
    assert isinstance(failure.value.__cause__, AssertionError)


def test_randomness_is_named_by_its_seed() -> None:
    """The same seed and name repeat their draws; another name or seed draws otherwise."""
    assert SeededEntropy(1).token(16) == SeededEntropy(1).token(16)
    assert len({SeededEntropy(1).token(16), SeededEntropy(2).token(16), SeededEntropy(1, "keys").token(16)}) == 3
    noise = step_noise(seeded_random(1, "noise"))
    drawn = sorted(noise(10.0) for _ in range(1_001))
    assert 9.8 < drawn[500] < 10.2 and drawn[0] < 9.5 and drawn[-1] > 10.5
