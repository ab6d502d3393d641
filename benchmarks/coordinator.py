"""What one coordinator costs per request with 1, 2 and 4 gateways. Run by `make bench-coordinator`.

The coordinator is whole (admission with limits in every scope, fair queue, placement on 64 replicas, ledger on the disk, links)
and alone in its process, whose CPU time is read from the system: with SQLite that executes the statements too, with PostgreSQL
the server does, which is not counted. The gateways are processes that speak the link's protocol and do nothing else: each asks
at a steady rate, shows a first output at once, finishes and says that its engine stopped. Whole answers, so that each request
waits for two durable records; between a request and its end lie two groups of the journal.
"""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import median

import msgspec
import uvloop
from rich.console import Console
from rich.table import Table
from tests.postgres_server import PostgresServer

from benchmarks.programs import BUILD, ROOT
from weir.app.link_sockets import address_of
from weir.app.runtime import settle_garbage_collector
from weir.clock import SystemClock, SystemEntropy
from weir.config import CoordinatorConfig, LinkConfig
from weir.coordinator.coordinator import Coordinator, CoordinatorParts
from weir.coordinator.execution_table import ExecutionTable
from weir.coordinator.fleet import Fleet
from weir.coordinator.recovery import recover
from weir.coordinator.rejections import RejectionCounter
from weir.core.endings import FinishReason
from weir.core.metering import Basis, InputBasis, Price
from weir.core.registry.model import Alias, EngineKind, Pool, Revision
from weir.core.registry.snapshot import Snapshot
from weir.core.tenancy import Application, Limits, Scope, ServiceClass, Tenant
from weir.link.coordinator_end import CoordinatorEnd
from weir.link.frames import Terms
from weir.link.gateway_end import GatewayEnd
from weir.messages import (
    Acquire,
    AttemptUsage,
    Down,
    EndBooked,
    Finish,
    Granted,
    Progress,
    Rejected,
    ReplicaAddress,
    Stopped,
)
from weir.ports import LedgerStore
from weir.storage.database import open_sqlite
from weir.storage.postgres_ledger import PostgresLedger
from weir.telemetry import Telemetry, configure_logs

GATEWAYS = (1, 2, 4)
RATES = (250, 1_000)
SECONDS, BOUND_S = 8.0, 60.0
REPLICAS, LANES, TENANTS = 64, 64, 100
REVISION = Revision("bench@1", EngineKind.OPENAI, "bench", 8_192, 4_096, 128, Price(1, 200_000, 50_000, 600_000))
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def _snapshot() -> Snapshot:
    tenants = [f"tenant-{number}" for number in range(TENANTS)]
    limits = Limits(10**9, 10**12, 10**6, spend_microusd_per_month=10**15, spend_microusd_lifetime=10**15)
    return Snapshot(
        version=1,
        tenants={name: Tenant(name) for name in tenants},
        applications={(name, "app"): Application(name, "app") for name in tenants},
        aliases={"assistant": Alias("assistant", REVISION.id, 256)},
        revisions={REVISION.id: REVISION},
        pools={"pool": Pool("pool", REVISION.id, REPLICAS, LANES)},
        limits={Scope(name): limits for name in tenants},
        prices={(REVISION.id, 1): REVISION.price},
    )


async def serve(folder: Path, database: str) -> None:
    """The coordinator, until its input closes. database: URL of a PostgreSQL one; empty for SQLite."""
    clock, config, snapshot = SystemClock(), CoordinatorConfig(), _snapshot()
    store: LedgerStore = PostgresLedger(database) if database else open_sqlite(folder / "weir.sqlite3")[0]
    recovered = await recover(store, clock, snapshot, config.group_ms)
    fleet, telemetry = Fleet(clock), Telemetry()
    executions = ExecutionTable(store, config.remembered_executions, config.request_id_ms, config.store_wait_ms)
    rejections = RejectionCounter(store, clock)
    parts = CoordinatorParts(clock, config, fleet, recovered.book, recovered.journal, executions, rejections, telemetry)
    coordinator = Coordinator(parts, snapshot)
    fleet.add_pool(snapshot.pools["pool"])
    for number in range(REPLICAS):
        fleet.add(f"replica-{number}", "pool", LANES)
        fleet.answered(ReplicaAddress(f"replica-{number}", "pool", REVISION.id, EngineKind.OPENAI, "", "bench", 8_192))
    end = CoordinatorEnd(clock, coordinator, recovered.journal.epoch, Terms(b"d", b"s", config.delivery_step_tokens, 2_000))
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), over.set)
    server = await loop.create_unix_server(end.accept, str(folder / "link"))
    async with asyncio.TaskGroup() as tasks:
        running, ends = tasks.create_task(coordinator.run()), tasks.create_task(end.run())
        settle_garbage_collector()
        print("ready", flush=True)
        await over.wait()
        server.close()
        coordinator.close()
        await running
        ends.cancel()
    await store.aclose()


@dataclass
class Player:
    """A gateway that speaks only the link's protocol, as the inbox of its own end."""

    seed: int
    asked_s: dict[int, float] = field(default_factory=dict)
    granted_ms: list[float] = field(default_factory=list)
    ended: int = 0
    total: int = 0
    all_ended: asyncio.Event = field(default_factory=asyncio.Event)
    end: GatewayEnd | None = None

    def deliver(self, message: Down) -> None:
        """Answers at once, as a gateway whose engine takes no time."""
        assert self.end is not None
        match message:
            case Granted(ref=ref, attempt=attempt):
                self.granted_ms.append((time.monotonic() - self.asked_s.pop(ref)) * 1e3)
                self.end.send(Progress(ref, attempt, has_output=True))
                usage = AttemptUsage(500, 0, 100, Basis.ENGINE)
                self.end.send(Finish(ref, attempt, FinishReason.STOP, 100, usage, 1.0, 1.0))
                self.end.send(Stopped(ref, attempt))
            case EndBooked():
                self.ended += 1
                if self.ended == self.total:
                    self.all_ended.set()
            case Rejected(code=code):
                sys.exit(f"bench: the coordinator refused a request: {code}")

    def ask(self, ref: int) -> None:
        """One request."""
        assert self.end is not None
        self.asked_s[ref] = time.monotonic()
        name = f"{self.seed}-{ref}"
        tenant = f"tenant-{ref % TENANTS}"
        asked = Acquire(
            ref=ref,
            request_id=name,
            request_id_given=False,
            generation_id=name,
            body_digest=b"0" * 32,
            tenant=tenant,
            application="app",
            key=f"key-{tenant}",
            service_class=ServiceClass.INTERACTIVE,
            workload_class="short",
            alias="assistant",
            revision=REVISION.id,
            surface="native",
            stream=False,
            input_tokens=500,
            input_basis=InputBasis.EXACT,
            input_bytes=2_000,
            max_output_tokens=256,
            choices=1,
            deadline_left_ms=60_000,
            waited_ns=1_000_000,
        )
        self.end.send(asked)


async def play(folder: Path, rate: float, seed: int) -> None:
    """One gateway at a steady rate; prints how many requests ended and the median time to a grant."""
    clock, entropy = SystemClock(), SystemEntropy()
    player = Player(seed)
    connect = address_of(f"unix:{folder / 'link'}", LinkConfig())
    player.end = GatewayEnd(clock, [connect], "", player, f"bench-{entropy.token(8).hex()}")
    async with asyncio.TaskGroup() as tasks:
        link = tasks.create_task(player.end.run())
        await player.end.opened.wait()
        began, total = time.monotonic(), int(rate * SECONDS)
        player.total = total
        for number in range(1, total + 1):
            player.ask(number)
            if (ahead_s := began + number / rate - time.monotonic()) > 0:
                await asyncio.sleep(ahead_s)
        async with asyncio.timeout(BOUND_S):
            await player.all_ended.wait()
        link.cancel()
    print(msgspec.json.encode([player.ended, median(player.granted_ms)]).decode(), flush=True)


# ── the measurement ──────────────────────────────────────────────────────────────────────────────────────────────────


def _cpu_s(pid: int) -> float:
    """CPU time of a process so far, all of its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def _start(role: str, folder: Path, *rest: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "benchmarks.coordinator", role, str(folder), *rest]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)


@dataclass(frozen=True)
class Measured:
    """One round. cpu_us: of the coordinator's process per request; granted_ms: median, from asking to a grant."""

    per_s: float
    cpu_us: float
    granted_ms: float


def measure(gateways: int, rate: int, database: str) -> Measured:
    """Some seconds at a rate in all. database: URL of a PostgreSQL one; empty for SQLite.

    CPU is divided by what ended, not by the rate: a busy machine may fall behind it.
    """
    BUILD.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILD, prefix="c") as name:
        folder = Path(name)
        with _start("serve", folder, database) as server:
            assert server.stdout is not None and server.stdin is not None
            assert server.stdout.readline() == "ready\n"
            used_s = _cpu_s(server.pid)
            players = [_start("play", folder, str(rate / gateways), str(seed)) for seed in range(gateways)]
            told = [msgspec.json.decode(player.communicate(timeout=BOUND_S)[0]) for player in players]
            spent_s = _cpu_s(server.pid) - used_s
            server.stdin.close()
            server.wait(BOUND_S)
    ended = sum(ended for ended, _ in told)
    assert ended == gateways * int(rate / gateways * SECONDS)
    return Measured(rate, 1e6 * spent_s / ended, median(granted_ms for _, granted_ms in told))


def main(arguments: Sequence[str]) -> int:
    """Measure and print; or be one of the processes."""
    if arguments:
        configure_logs()
        role, folder, *rest = arguments
        work: dict[str, Callable[[], object]] = {
            "serve": lambda: uvloop.run(serve(Path(folder), rest[0])),
            "play": lambda: uvloop.run(play(Path(folder), float(rest[0]), int(rest[1]))),
        }
        work[role]()
        return 0
    table = Table(title="One coordinator: CPU of its process per request, all in")
    for title in ("ledger", "gateways", "requests/s", "CPU µs a request", "grant after, ms p50"):
        table.add_column(title, justify="right")
    server = PostgresServer(fsync="on")
    server.start()
    try:
        for ledger, gateways, rate in product(("SQLite", "PostgreSQL"), GATEWAYS, RATES):
            found = measure(gateways, rate, server.migrated_database() if ledger == "PostgreSQL" else "")
            table.add_row(ledger, str(gateways), f"{found.per_s:,.0f}", f"{found.cpu_us:.0f}", f"{found.granted_ms:.2f}")
    finally:
        server.remove()
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
