"""What the ledger costs: lifecycles a second, CPU of each, and what it adds to the first token. Run by `make bench-ledger`.

A lifecycle is what one request asks of the ledger: a checked hold in the book, its record and the dispatch step, and, once that
is durable, the settlement. Beside both stores stand the same calls without a ledger (the harness, which is subtracted) and the
naive way: each request writes transactions of its own. SQLite and PostgreSQL write to the disk for good (fsync on), below the
repository's build folder: a system's temporary folder may be in memory. The user `postgres` must be able to reach it.
"""

import argparse
import asyncio
import gc
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from tests.contract.stores import execution, hold, settle, step
from tests.postgres_server import PostgresServer

from benchmarks.measures import DELAYS, take
from benchmarks.programs import BUILD, ROOT, build, run_engine, run_weir
from weir.clock import SystemClock
from weir.config import CoordinatorConfig
from weir.coordinator.journal import Journal
from weir.core.ledger.book import Book, Taken
from weir.core.ledger.records import BucketTake, ExecutionId, HoldRecord, SettleRecord, StepRecord
from weir.core.metering import Charge, Price, Worst, worst_case
from weir.core.tenancy import Limits, Scope, ServiceClass, scopes_of
from weir.ports import LedgerStore
from weir.storage.database import open_sqlite
from weir.storage.memory import MemoryLedger
from weir.storage.postgres_ledger import PostgresLedger
from weir.units import Moment

REPEATS = 5
AT_ONCE, NAIVE_AT_ONCE = 500, 32
CLOSED_S, OPEN_S = 3.0, 3.0
OPEN_PER_S = 1_000
PRICE = Price(1, 200_000, 50_000, 600_000)
SCOPES = [scopes_of(f"tenant-{n % 10}", "app", f"key-{n}", "assistant", ServiceClass.INTERACTIVE) for n in range(50)]
LIMITS = {
    Scope(f"tenant-{n}"): Limits(10**9, 10**12, 10**6, spend_microusd_per_month=10**15, spend_microusd_lifetime=10**15)
    for n in range(10)
}
CHARGE = Charge(100, 0, 60, 56, 0, False)
Lifecycle = Callable[[int], Coroutine[Any, Any, None]]


@dataclass
class Ledgered:
    """A request's calls of the ledger, as the coordinator makes them."""

    store: LedgerStore
    clock: SystemClock = field(default_factory=SystemClock)
    book: Book = field(default_factory=Book)

    async def start(self) -> None:
        """Become the writer."""
        recovery = await self.store.open_epoch(0)
        self.epoch = recovery.epoch
        self.journal = Journal(self.store, self.clock, recovery.epoch, recovery.next_seq, CoordinatorConfig().group_ms)
        self.book.configure(LIMITS, {}, self.clock.monotonic_ns())
        self.loop = asyncio.get_running_loop()

    def hold(self, number: int) -> tuple[HoldRecord, StepRecord]:
        """Check, take, and the two records of an admitted and dispatched request."""
        scopes = SCOPES[number % len(SCOPES)]
        now = Moment(self.clock.monotonic_ns(), self.clock.wall_ms())
        worst = worst_case(PRICE, 100, 200, 1)
        assert self.book.check(scopes, worst, now) is None
        named = ExecutionId(scopes[0].tenant, f"{self.epoch}-{number}", 1)
        taken = self.book.take(named, scopes, worst, now)
        held = hold_record(self.journal.next_seq(), named, scopes[-1], worst, taken, now)
        return held, step(self.journal.next_seq(), named, delivered_max=200)

    def settle(self, named: ExecutionId) -> SettleRecord:
        """End the hold, and the record of it."""
        returns = self.book.end(named, CHARGE, self.clock.monotonic_ns())
        return settle_record(self.journal.next_seq(), named, returns, self.clock.wall_ms())

    async def grouped(self, number: int) -> None:
        """One lifecycle through the journal."""
        held, dispatched = self.hold(number)
        durable = self.loop.create_future()
        self.journal.append(held)
        self.journal.append(dispatched, lambda: durable.set_result(None))
        await durable
        ended = self.loop.create_future()
        self.journal.append(self.settle(held.id), lambda: ended.set_result(None))
        await ended

    async def naive(self, number: int) -> None:
        """One lifecycle with two transactions of its own."""
        held, dispatched = self.hold(number)
        await self.store.write(self.epoch, (held, dispatched))
        await self.store.write(self.epoch, (self.settle(held.id),))


async def harness(_: int) -> None:
    """What the benchmark itself does: two waits on a loop."""
    for _ in range(2):
        done = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(done.set_result, None)
        await done


HELD = msgspec.structs.replace(hold(1, execution()), max_output_tokens=200, choices=1, price_version=1)
ENDED = msgspec.structs.replace(
    settle(3, execution(), cost=CHARGE.cost_microusd),
    input_tokens=CHARGE.tenant_input_tokens,
    cached_input_tokens=0,
    output_tokens=CHARGE.tenant_output_tokens,
    delivered_tokens=CHARGE.tenant_output_tokens,
    tenant_input_tokens=CHARGE.tenant_input_tokens,
    tenant_cached_input_tokens=0,
    tenant_output_tokens=CHARGE.tenant_output_tokens,
    platform_microusd=0,
)
"""A short request's records; what differs between requests is filled in."""


def hold_record(seq: int, named: ExecutionId, leaf: Scope, worst: Worst, taken: Taken, now: Moment) -> HoldRecord:
    """A request's hold."""
    return msgspec.structs.replace(
        HELD,
        seq=seq,
        at_ms=now.wall_ms,
        id=named,
        application=leaf.application,
        key=leaf.key,
        held_microusd=worst.cost_microusd,
        windows=taken.windows,
        takes=taken.takes,
    )


def settle_record(seq: int, named: ExecutionId, returns: tuple[BucketTake, ...], at_ms: int) -> SettleRecord:
    """Its end."""
    return msgspec.structs.replace(ENDED, seq=seq, at_ms=at_ms, id=named, returns=returns)


# ── measures ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def closed(lifecycle: Lifecycle, at_once: int) -> float:
    """Lifecycles a second, so many at once."""
    numbers, end = iter(range(10**9)), time.monotonic() + CLOSED_S
    done = 0

    async def worker() -> None:
        nonlocal done
        while time.monotonic() < end:
            await lifecycle(next(numbers))
            done += 1

    began = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(at_once):
            tasks.create_task(worker())
    return done / (time.monotonic() - began)


@dataclass(frozen=True)
class Cpu:
    """CPU µs per lifecycle: of the event loop's thread, which is where Python runs, and of the whole process."""

    loop_us: float
    process_us: float


async def opened(lifecycle: Lifecycle) -> Cpu:
    """CPU per lifecycle at a steady rate."""
    began, loop_ns, process_ns = time.monotonic(), time.thread_time_ns(), time.process_time_ns()
    async with asyncio.TaskGroup() as tasks:
        for number in range(int(OPEN_S * OPEN_PER_S)):
            tasks.create_task(lifecycle(number))
            if (ahead_s := began + (number + 1) / OPEN_PER_S - time.monotonic()) > 0:
                await asyncio.sleep(ahead_s)
    lifecycles = OPEN_S * OPEN_PER_S
    return Cpu((time.thread_time_ns() - loop_ns) / 1e3 / lifecycles, (time.process_time_ns() - process_ns) / 1e3 / lifecycles)


@asynccontextmanager
async def running(store: LedgerStore) -> AsyncIterator[Ledgered]:
    """A ledger with its journal."""
    ledgered = Ledgered(store)
    await ledgered.start()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(ledgered.journal.run())
        yield ledgered
        ledgered.journal.close()
    assert ledgered.book.open_holds == 0
    assert (await store.verify()).is_clean
    await store.aclose()


Opening = Callable[[], AbstractAsyncContextManager[Ledgered]]


async def figures_of(opening: Opening, bare: Cpu) -> dict[str, float]:
    """One round of a store: grouped and naive."""
    async with opening() as ledgered:
        per_second = await closed(ledgered.grouped, AT_ONCE)
    async with opening() as ledgered:
        used = await opened(ledgered.grouped)
    async with opening() as ledgered:
        naive_per_second = await closed(ledgered.naive, NAIVE_AT_ONCE)
    return {
        "per_second": per_second,
        "loop_us": used.loop_us - bare.loop_us,
        "process_us": used.process_us - bare.process_us,
        "naive_per_second": naive_per_second,
    }


async def costs(server: PostgresServer, folder: Path) -> dict[str, list[dict[str, float]]]:
    """Every store's figures, a fresh database each time."""
    numbers = iter(range(10**9))

    def sqlite() -> AbstractAsyncContextManager[Ledgered]:
        return running(open_sqlite(folder / f"{next(numbers)}.sqlite3")[0])

    def postgres() -> AbstractAsyncContextManager[Ledgered]:
        return running(PostgresLedger(server.migrated_database()))

    def memory() -> AbstractAsyncContextManager[Ledgered]:
        return running(MemoryLedger())

    found: dict[str, list[dict[str, float]]] = {"SQLite": [], "PostgreSQL": [], "book and journal alone": []}
    for _ in range(REPEATS):
        bare = await opened(harness)
        for name, opening in (("SQLite", sqlite), ("PostgreSQL", postgres), ("book and journal alone", memory)):
            gc.collect()
            found[name].append(await figures_of(opening, bare))
    return found


def delays(server: PostgresServer) -> dict[str, dict[str, list[float]]]:
    """First-token p50 of the whole cell in ms: by measure, without a durable ledger and with each."""
    weir, off = [str(ROOT / ".venv" / "bin" / "weir")], [sys.executable, "-m", "benchmarks.unledgered"]
    in_postgres = ["--database", server.create_database(keep=True)]
    rows: dict[str, tuple[list[str], list[str]]] = {"off": (off, []), "SQLite": (weir, []), "PostgreSQL": (weir, in_postgres)}
    found: dict[str, dict[str, list[float]]] = {measure.name: {} for measure in DELAYS}
    with run_engine() as engine:
        for row, (command, arguments) in rows.items():
            with run_weir(command, engine.port, *arguments) as gateway:
                for measure in DELAYS:
                    figures = [take(measure, gateway, engine.port) for _ in range(REPEATS)]
                    found[measure.name][row] = [figure["first_p50_ms"] for figure in figures]
    return found


# ── the table ────────────────────────────────────────────────────────────────────────────────────────────────────────


def cost_table(found: dict[str, list[dict[str, float]]]) -> Table:
    """Median and best of the rounds."""
    table = Table(title=f"What the ledger costs: median (best of {REPEATS})")
    at = f"at {OPEN_PER_S:,}/s: CPU µs"
    columns: dict[str, tuple[str, Callable[[list[float]], float]]] = {
        "lifecycles/s": ("per_second", max),
        f"{at} of the loop": ("loop_us", min),
        f"{at} of the process": ("process_us", min),
        "naive: lifecycles/s": ("naive_per_second", max),
    }
    table.add_column("store")
    for title in columns:
        table.add_column(title, justify="right")
    for name, rounds in found.items():
        table.add_row(name, *(_shown([figures[key] for figures in rounds], best) for key, best in columns.values()))
    return table


def _shown(values: list[float], best: Callable[[list[float]], float]) -> str:
    return f"{median(values):,.0f} ({best(values):,.0f})"


def delay_table(found: dict[str, dict[str, list[float]]]) -> Table:
    """What a durable ledger adds to the first token's median."""
    table = Table(title="First token p50 of the whole cell, ms")
    for title in ("load", "ledger in memory", "SQLite", "PostgreSQL"):
        table.add_column(title)
    for measure in DELAYS:
        medians = {row: median(values) for row, values in found[measure.name].items()}
        added = [f"{medians[row]:.2f} ({medians[row] - medians['off']:+.2f})" for row in ("SQLite", "PostgreSQL")]
        table.add_row(measure.title, f"{medians['off']:.2f}", *added)
    return table


def main(arguments: Sequence[str]) -> int:
    """Measure, print, keep; the exit status."""
    parser = argparse.ArgumentParser(prog="bench-ledger", description="The cost of the ledger, side by side.")
    parser.add_argument("--only", choices=["costs", "delays"])
    only = parser.parse_args(arguments).only
    console = Console(width=128)
    kept: dict[str, Any] = {}
    BUILD.mkdir(parents=True, exist_ok=True)
    tempfile.tempdir = str(BUILD)  # also of the servers and cells that are started
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weir-bench-")))
        server = PostgresServer(fsync="on")
        stack.callback(server.remove)
        server.start()
        if only != "delays":
            kept["costs"] = asyncio.run(
                costs(server, folder)
            )  # not uvloop: its timers of whole milliseconds would spin between arrivals
            console.print(cost_table(kept["costs"]))
        if only != "costs":
            build()
            kept["delays"] = delays(server)
            console.print(delay_table(kept["delays"]))
    results = ROOT / "bench-results"
    results.mkdir(exist_ok=True)
    path = results / f"ledger-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.json"
    path.write_text(json.dumps(kept, indent=1), encoding="utf-8")
    console.print(f"kept in {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
