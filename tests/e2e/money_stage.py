"""Cells on either database for the tests of money, `weir ledger verify` beside them, limits and accounts as HTTP shows them.

The command runs in this process: the same code as a terminal's, without the second that a new interpreter takes. Nothing here
decides what is run.
"""

import asyncio
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

from tests.e2e.ending_stage import Caller, Stage, price
from tests.e2e.running_cell import RunningCell, running_cell, spawn_cell, start_cell
from tests.postgres_server import shared_server
from typer.testing import CliRunner

from weir.cli.main import command_line
from weir.core.metering import upper_bound_of_input

DATABASES = ("sqlite", "postgres")
CELLS = (*DATABASES, "gateways")
"""What the tests of money run on: one process on either database, and two gateways beside a coordinator on PostgreSQL."""
BUDGETS = tuple(f"{unit}_{window}" for unit in ("spend_microusd", "tokens") for window in ("per_day", "per_month", "lifetime"))
LIMITS = ("requests_per_minute", "tokens_per_minute", "concurrency", *BUDGETS)
CODES = {"requests_per_minute": "requests_limited", "tokens_per_minute": "tokens_limited", "concurrency": "concurrency_limited"}
CODES |= dict.fromkeys(BUDGETS, "budget_exhausted")
ALIAS = "assistant"
VERIFY_S = 60.0
SHORT_LINK = "\n[link]\nheartbeat_ms = 200\nsilence_ms = 1200\nlease_ms = 2000\n"
"""Gateways whose coordinator is killed end what they carry in a second instead of ten."""
_terminal = threading.Lock()  # a command has the process's standard output while it runs
_numbers = count(10_000)  # beside those of `Stage.caller`


@dataclass(frozen=True)
class Books:
    """Where a cell keeps its books. state: its directory; url: of the PostgreSQL database, None for SQLite.

    gateways: in processes of their own.
    """

    state: Path
    url: str | None
    gateways: int = 0

    @property
    def arguments(self) -> tuple[str, ...]:
        """What `weir up` is told of it."""
        database = () if self.url is None else ("--database", self.url)
        return (*database, "--gateways", str(self.gateways)) if self.gateways else database

    def _config(self, config: str) -> str:
        return config + SHORT_LINK if self.gateways else config

    def start(self, engine: str, config: str) -> RunningCell:
        """A started cell, which the caller ends."""
        return start_cell(self.state, *self.arguments, engine=(engine,), config=self._config(config))

    def spawn(self, engine: str, config: str) -> RunningCell:
        """A cell that is starting, which the caller ends."""
        return spawn_cell(self.state, *self.arguments, engine=(engine,), config=self._config(config))

    @contextmanager
    def running(self, engine: str, config: str) -> Iterator[RunningCell]:
        """A cell for the length of a block; it must exit cleanly, and leave clean books."""
        with running_cell(self.state, *self.arguments, engine=(engine,), config=self._config(config)) as cell:
            yield cell
            assert "Traceback" not in cell.tail()
        assert self.verify()["open holds"] == 0

    def verify(self) -> dict[str, int]:
        """What `weir ledger verify` counts; it must be clean. On a thread: a test's event loop may be running on this one."""
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(self._verify).result(VERIFY_S)

    def _verify(self) -> dict[str, int]:
        where = ["--state", str(self.state)] if self.url is None else ["--database", self.url]
        arguments = ["ledger", "verify", *where]
        with _terminal:
            done = CliRunner().invoke(command_line(arguments), arguments)
        assert done.exit_code == 0, (done.output, done.exception)
        *lines, last = done.output.splitlines()
        assert last == "clean"
        return {name.strip(): int(figure.replace(",", "")) for name, figure in (line.rsplit(maxsplit=1) for line in lines)}

    async def verified(self) -> dict[str, int]:
        """The same while the event loop goes on."""
        return await asyncio.to_thread(self._verify)


def new_books(kind: str, folder: Path) -> Books:
    """Empty books for one of CELLS: on SQLite in the folder, or in a PostgreSQL database of their own."""
    url = None if kind == "sqlite" else shared_server().migrated_database(keep=True)
    return Books(folder / "state", url, 2 if kind == "gateways" else 0)


def noon_zone() -> ZoneInfo:
    """A time zone in which no day or month ends within hours."""
    return ZoneInfo(f"Etc/GMT{datetime.now(UTC).hour - 12:+d}")  # named the other way round: east of Greenwich is minus


async def new_caller(stage: Stage, time_zone: str = "UTC") -> Caller:
    """A new tenant without limits, with one application and one key."""
    name = f"team-{next(_numbers)}"
    await stage.admin("POST", "tenants", {"name": name, "time_zone": time_zone})
    await stage.admin("POST", f"tenants/{name}/applications", {"name": "app"})
    key = await stage.admin("POST", f"tenants/{name}/applications/app/keys")
    return Caller(name, key["id"], key["secret"])


def scopes_of(caller: Caller) -> list[dict[str, str]]:
    """Everything that limits of this caller can attach to, widest first."""
    tenant = {"tenant": caller.tenant}
    application = {**tenant, "application": "app"}
    wide = [tenant, application, {**application, "key": caller.key_id}]
    wide += [{**scope, "alias": ALIAS} for scope in wide]
    return wide + [{**scope, "service_class": "interactive"} for scope in wide]


def worst_of(limit: str, prompt: str, most: int) -> int:
    """What a request takes of a limit where the engine counts no input: its bytes and the template's are the bound."""
    input_tokens = upper_bound_of_input(len(prompt.encode()), 1)
    if limit in ("requests_per_minute", "concurrency"):
        return 1
    return price(input_tokens, most) if limit.startswith("spend") else input_tokens + most


async def set_limits(stage: Stage, scope: Mapping[str, str], **limits: int | None) -> Any:
    """Set limits of a scope; the entry as it is in force."""
    return await stage.admin("PUT", "limits", {"scope": dict(scope), **limits})


async def accounts_of(stage: Stage, tenant: str) -> dict[tuple[str, ...], tuple[int, int, int]]:
    """(limit, held, spent) by the limit's name and the names in its scope; nothing else is held."""
    ledger = await stage.admin("GET", f"ledger?tenant={tenant}")
    return {(row["kind"], *row["scope"]): (row["limit"], row["held"], row["spent"]) for row in ledger["accounts"]}
