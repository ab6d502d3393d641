"""Protects the commands of money: limits, prices, usage in its forms, the ledger and its check, the audit trail."""

import asyncio
import csv
import io
import sqlite3
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.contract.admin_stand import book_usage
from tests.unit.cli_terminal import Terminal, terminal_of

from weir.core.tenancy import LIMIT_NAMES, Limits, Scope, ServiceClass
from weir.storage.database import open_sqlite


@pytest.fixture
async def terminal(tmp_path: Path) -> AsyncIterator[Terminal]:
    async with terminal_of(tmp_path) as made:
        yield made


def cells(table: str) -> list[list[str]]:
    """The words of each line of a table."""
    return [line.split() for line in table.splitlines() if line.strip() and "─" not in line]


# ── limits ───────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_limits_are_set_removed_and_shown(terminal: Terminal) -> None:
    """Protects the limit commands and their refusals."""
    scope = ("--tenant", "globex", "--application", "assistant")
    entry = await terminal.good("limit", "set", *scope, "requests_per_minute=1000", "concurrency=0")
    assert entry == {"scope": {"tenant": "globex", "application": "assistant"}, "requests_per_minute": 1_000, "concurrency": 0}
    await terminal.good("limit", "set", *scope, "concurrency=none")
    limits = dict((await terminal.store.load()).limits)
    assert limits[Scope("globex", "assistant")] == Limits(requests_per_minute=1_000)
    table = await terminal.run("limit", "show", *scope)
    [line] = [line for line in table.out.splitlines() if "globex" in line]
    assert line.split() == ["globex", "assistant", "requests_per_minute", "1,000"]
    assert len(await terminal.good("limit", "show", "--tenant", "globex", "--json")) == 2
    for change, said in (
        ("concurrency", "not of the form"),
        ("concurrency=x", "whole number"),
        ("colour=1", "invalid_request"),
    ):
        result = await terminal.run("limit", "set", *scope, change)
        assert result.status == 1 and result.err.startswith("error: ") and said in result.err


async def test_limits_of_a_class_are_its_own(terminal: Terminal) -> None:
    """Protects both scopes: a class's limits are set, shown, accounted for and removed beside those of every class."""
    scope, jobs = ("--tenant", "globex"), ("--tenant", "globex", "--service-class", "batch")
    before = (await terminal.good("limit", "show", *scope, "--json"))[0]
    entry = await terminal.good("limit", "set", *jobs, "concurrency=16", "spend_microusd_per_day=5000000")
    public = {"tenant": "globex", "service_class": "batch"}
    assert entry == {"scope": public, "concurrency": 16, "spend_microusd_per_day": 5_000_000}
    limits = dict((await terminal.store.load()).limits)
    assert limits[Scope("globex", service_class=ServiceClass.BATCH)].concurrency == 16
    assert await terminal.good("limit", "show", *jobs, "--json") == [entry]
    assert await terminal.good("limit", "show", *scope, "--json") == [before, entry]
    shown = cells((await terminal.run("limit", "show", *jobs)).out)
    assert shown[0] == ["tenant", "application", "key", "alias", "class", "limit", "value"]
    assert ["globex", "batch", "concurrency", "16"] in shown
    audited = (await terminal.run("audit", "--limit", "1")).out
    assert "tenant=globex/service_class=batch" in audited
    assert await terminal.good("limit", "remove", *jobs) == {"scope": public}
    assert await terminal.good("limit", "show", *scope, "--json") == [before]
    assert (await terminal.run("limit", "set", "--tenant", "globex", "--service-class", "x", "concurrency=1")).status == 2


async def test_every_limit_is_set_shown_and_removed_by_name_or_altogether(terminal: Terminal) -> None:
    """Protects all nine limits on the command line; removing one scope's leaves the others' alone."""
    amounts = {name: 10 + number for number, name in enumerate(LIMIT_NAMES)}
    before = dict((await terminal.store.load()).limits)
    words = [f"{name}={amount}" for name, amount in amounts.items()]
    scope = ("--tenant", "acme", "--alias", "assistant")
    assert await terminal.good("limit", "set", *scope, *words) == {
        "scope": {"tenant": "acme", "alias": "assistant"},
        **amounts,
    }
    shown = cells((await terminal.run("limit", "show", *scope)).out)[1:]
    assert shown == [["acme", "assistant", name, str(amount)] for name, amount in amounts.items()]
    left = await terminal.good("limit", "remove", *scope, "tokens_per_day", "concurrency")
    assert left.keys() - {"scope"} == amounts.keys() - {"tokens_per_day", "concurrency"}
    assert await terminal.good("limit", "remove", *scope) == {"scope": {"tenant": "acme", "alias": "assistant"}}
    assert dict((await terminal.store.load()).limits) == before
    refused = await terminal.run("limit", "remove", *scope, "colour")
    assert refused.status == 1 and "invalid_request" in refused.err


async def test_a_tenants_time_zone_is_set_and_shown(terminal: Terminal) -> None:
    """Protects budget windows: the zone is changed by itself, and a wrong one is refused."""
    changed = await terminal.good("tenant", "set", "acme", "--time-zone", "Asia/Tokyo")
    assert (changed["time_zone"], changed["external_allowed"]) == ("Asia/Tokyo", False)
    assert (await terminal.good("tenant", "set", "acme", "--external-allowed"))["time_zone"] == "Asia/Tokyo"
    assert ["acme", "Asia/Tokyo", "1", "active", "yes"] in cells((await terminal.run("tenant", "list")).out)
    refused = await terminal.run("tenant", "set", "acme", "--time-zone", "Mars/Base")
    assert refused.status == 1 and "time_zone" in refused.err


async def test_a_tenants_weight_is_set_shown_and_audited(terminal: Terminal) -> None:
    """Protects the order between tenants: a weight is set by itself, a wrong one is refused with the range."""
    created = await terminal.good("tenant", "create", "initech", "--weight", "1000")
    assert created["weight"] == 1_000 and (await terminal.good("tenant", "show", "acme"))["weight"] == 1
    changed = await terminal.good("tenant", "set", "acme", "--weight", "20")
    assert (changed["weight"], changed["time_zone"], changed["external_allowed"]) == (20, "UTC", False)
    await terminal.good("tenant", "set", "acme", "--external-allowed", "--time-zone", "Asia/Tokyo")
    listed = cells((await terminal.run("tenant", "list")).out)
    assert ["acme", "Asia/Tokyo", "20", "active", "yes"] in listed and ["initech", "UTC", "1,000", "active"] in listed
    lines = [line for line in (await terminal.run("audit", "--limit", "3")).out.splitlines() if " tenant." in line]
    assert [line.split(maxsplit=4)[4].strip() for line in lines] == [
        "external_allowed false → true, time_zone UTC → Asia/Tokyo",
        "weight 1 → 20",
        "external_allowed false, leaves_its_pools false, retention null, time_zone UTC, weight 1,000",
    ]
    for words in (("create", "x", "--weight", "0"), ("set", "acme", "--weight", "1001")):
        refused = await terminal.run("tenant", *words)
        assert refused.status == 1 and "weight must be a whole number from 1 to 1000" in refused.err
    assert (await terminal.run("tenant", "set", "acme", "--weight", "1.5")).status == 2


async def test_whether_a_tenants_work_may_leave_its_pools_is_set_and_shown(terminal: Terminal) -> None:
    """Protects dedicated pools: both ways by name, by itself, and a tenant that nothing is said of keeps to its pools."""
    assert (await terminal.good("tenant", "create", "initech", "--leaves-its-pools"))["leaves_its_pools"] is True
    assert (await terminal.good("tenant", "show", "acme"))["leaves_its_pools"] is False
    changed = await terminal.good("tenant", "set", "acme", "--leaves-its-pools")
    assert (changed["leaves_its_pools"], changed["weight"], changed["external_allowed"]) == (True, 1, False)
    assert (await terminal.good("tenant", "set", "acme", "--weight", "2"))["leaves_its_pools"] is True
    assert (await terminal.good("tenant", "set", "acme", "--keeps-its-pools"))["leaves_its_pools"] is False


# ── prices ───────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_prices_are_set_and_shown_with_their_schedule(terminal: Terminal) -> None:
    """Protects the price commands: newest first, every digit, which one is in force."""
    amounts = ("--input", "300000", "--cached-input", "1", "--output", "1000000000")
    answer = await terminal.good("price", "set", "small-1", *amounts)
    second = {"version": 2, "input_microusd": 300_000, "cached_input_microusd": 1, "output_microusd": 10**9}
    second["batch_percent"] = 100
    assert answer == {"revision": "small-1", "price": second}
    shown = cells((await terminal.run("price", "show")).out)
    assert shown[1:] == [
        ["small-1", "simulated", "2", "$0.30", "$0.000001", "$1,000.00", "100", "%", "now"],
        ["small-1", "simulated", "1", "$0.20", "$0.050000", "$0.60", "100", "%"],
    ]
    [entry] = await terminal.good("price", "show", "small-1", "--json")
    assert entry["price"] == second and len(entry["prices"]) == 2
    third = await terminal.good("price", "set", "small-1", *amounts, "--batch-percent", "50")
    assert third["price"] == second | {"version": 3, "batch_percent": 50}
    assert (await terminal.good("price", "set", "small-1", *amounts))["price"] == third["price"], "not given, it stays"
    assert cells((await terminal.run("price", "show")).out)[1][5:] == ["$1,000.00", "50", "%", "now"]
    for words, said in (
        (("price", "show", "nothing"), "no revision"),
        (("price", "set", "small-1", *amounts, "--batch-percent", "101"), "invalid_request"),
        (("price", "set", "nothing", *amounts), "not_found"),
        (("price", "set", "small-1", "--input", "-1", "--cached-input", "1", "--output", "1"), "invalid_request"),
    ):
        refused = await terminal.run(*words)
        assert refused.status == 1 and said in refused.err, words


# ── usage ────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_usage_is_a_table_with_totals_or_json(terminal: Terminal) -> None:
    """Protects the usage report for people and for scripts."""
    table = (await terminal.run("usage", "--group-by", "tenant,alias")).out
    rows = {line[0]: line[1:] for line in cells(table)}
    assert rows["tenant"] == ["alias", "requests", "input", "cached", "output", "cost", "platform", "cost"]
    assert rows["acme"] == ["assistant", "12,345", "1,234,567", "0", "99", "$1,234.56789", "$0.000007"]
    assert rows["globex"] == ["assistant", "5", "7", "0", "99", "$0.12000", "$0.000000"]
    assert rows["total"] == ["12,350", "1,234,574", "0", "198", "$1,234.68789", "$0.000007"]
    assert len({len(line) for line in table.splitlines()}) == 1
    [row] = await terminal.good("usage", "--tenant", "globex", "--group-by", "tenant", "--json")
    assert row["cost_microusd"] == 120_000
    refused = await terminal.run("usage", "--from", "yesterday")
    assert refused.status == 1 and "invalid_request" in refused.err and "from" in refused.err


async def test_usage_is_csv_on_the_terminal_or_in_a_file(terminal: Terminal, tmp_path: Path) -> None:
    """Protects spreadsheets: stable columns and whole micro-dollars, the same in a pipe and in a file."""
    printed = (await terminal.run("usage", "--csv", "--group-by", "tenant,day")).out
    parsed = list(csv.DictReader(io.StringIO(printed)))
    assert list(parsed[0]) == [
        *("tenant", "day", "requests", "input_tokens", "cached_input_tokens", "output_tokens"),
        *("cost_microusd", "platform_cost_microusd"),
    ]
    assert [entry["cost_microusd"] for entry in parsed] == ["1234567890", "120000"]
    file = tmp_path / "usage.csv"
    written = await terminal.run("usage", "--csv", str(file), "--group-by", "tenant,day")
    assert (written.status, written.out, file.read_text()) == (0, "", printed)
    refused = await terminal.run("usage", "--csv", str(tmp_path / "nowhere" / "usage.csv"))
    assert refused.status == 1 and "cannot be written" in refused.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--parquet",), "name of a file"),
        (("some.csv",), "--csv or --parquet"),
        (("--json", "some.csv"), "--csv or --parquet"),
        (("--json", "--csv"), "one of"),
    ],
)
async def test_forms_that_contradict_each_other_are_refused(terminal: Terminal, words: Sequence[str], said: str) -> None:
    """Protects a person from a report that went elsewhere than meant."""
    refused = await terminal.run("usage", *words)
    assert refused.status == 1 and said in refused.err


async def test_usage_as_a_parquet_file(terminal: Terminal, tmp_path: Path) -> None:
    """Protects warehouses: the file holds the columns of the CSV."""
    parquet: Any = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "usage.parquet"
    assert (await terminal.run("usage", "--parquet", str(file))).status == 0
    assert parquet.read_table(file).column("cost_microusd").to_pylist() == [1_234_567_890, 120_000]


# ── the ledger ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_what_is_held_and_spent_is_shown(terminal: Terminal) -> None:
    """Protects the view of an account: limit, held, spent, and when it resets."""
    shown = cells((await terminal.run("ledger", "show", "acme")).out)
    assert shown[1] == ["acme", "batch", "spend_microusd_per_day", "5,000,000", "1,500", "250,000", "2023-11-15T00:00:00.000Z"]
    assert shown[-1] == ["open", "holds:", "0"]
    [account] = (await terminal.good("ledger", "show", "acme", "--json"))["accounts"]
    assert (account["held"], account["spent"]) == (1_500, 250_000)


async def test_the_check_of_a_ledger_exits_by_what_it_found(terminal: Terminal) -> None:
    """Protects scripts and supervisors: 0 clean, 1 problems, 2 not checked; and the store is only read."""
    absent = await terminal.run("ledger", "verify")
    assert (absent.status, absent.out) == (2, "") and "There is no database" in absent.err
    path = terminal.state / "weir.sqlite3"
    ledger, catalog = open_sqlite(path)
    await book_usage(ledger)
    clean = await terminal.run("ledger", "verify")
    assert clean.status == 0 and clean.err == "", clean
    lines = cells(clean.out)
    assert ["settlements", "1"] in lines and ["open", "holds", "0"] in lines and lines[-1] == ["clean"]
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE ledger_balance SET spent_tokens = 1 WHERE budget_window = 'month/2023-11'")
    found = await terminal.run("ledger", "verify")
    assert found.status == 1 and "problem: The balance of acme/assistant/k/assistant/interactive for month/2023-11" in found.out
    assert found.out.splitlines()[-1] == "not clean: 1 problem(s)"
    await ledger.aclose()
    await catalog.aclose()
    for damage in ("UPDATE ledger_balance SET spent_tokens = 'many'", "DELETE FROM cell", "DROP TABLE cell"):
        with closing(sqlite3.connect(path)) as database, database:
            database.execute(damage)
        damaged = await terminal.run("ledger", "verify")
        assert (damaged.status, damaged.out) == (2, "") and "damaged" in damaged.err, damaged
    both = await terminal.run("ledger", "verify", "--database", "postgresql://x@127.0.0.1:1/x")
    assert both.status == 2 and "not both" in both.err


@pytest.mark.parametrize("command", [("ledger", "verify"), ("up", "--engine", "simulated", "--listen", "127.0.0.1:0")])
@pytest.mark.parametrize(
    "rest", ["hun@ter2@h:1/db", "hun/ter2@h:1/db", "hun#ter2@h:1/db", "hun?ter2@h:1/db", "hunter2@h:99999/db"]
)
async def test_an_address_that_is_none_is_one_sentence_without_it(
    terminal: Terminal, tmp_path: Path, command: Sequence[str], rest: str
) -> None:
    """Protects a password from the terminal: neither a part of it nor a traceback is printed, and the status is 2."""
    place = ("--database", f"postgresql://u:{rest}")
    words = (*command, *place)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "weir.cli.main", *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=tmp_path,
    )
    out, err = await asyncio.wait_for(process.communicate(), 30)
    said = (out + err).decode()
    assert process.returncode == 2 and "Traceback" not in said and "must be postgresql://" in said
    assert "ter2" not in said and "99999" not in said


# ── the audit trail ──────────────────────────────────────────────────────────────────────────────────────────────────


async def test_who_changed_what_is_listed_newest_first(terminal: Terminal) -> None:
    """Protects the audit trail on the terminal: each limit before and after, in the words of the trail for the rest."""
    scope = ("--tenant", "acme", "--application", "assistant")
    await terminal.good("limit", "set", *scope, "concurrency=3", "tokens_per_day=1000000")
    await terminal.good("limit", "set", *scope, "concurrency=none")
    await terminal.good("tenant", "create", "initech", "--time-zone", "Asia/Tokyo")
    shown = await terminal.run("audit", "--limit", "3")
    lines = [line.split(maxsplit=4) for line in shown.out.splitlines() if line.strip() and "─" not in line]
    at, subject = "2023-11-14T22:13:20.000Z", "tenant=acme/application=assistant"
    assert [[cell.strip() for cell in line] for line in lines[1:]] == [
        [
            at,
            "owner",
            "tenant.create",
            "initech",
            "external_allowed false, leaves_its_pools false, retention null, time_zone Asia/Tokyo, weight 1",
        ],
        [at, "owner", "limits.put", subject, "concurrency 3 → none"],
        [at, "owner", "limits.put", subject, "concurrency none → 3, tokens_per_day none → 1,000,000"],
    ]
    assert len(await terminal.good("audit", "--json", "--limit", "2")) == 2
    refused = await terminal.run("audit", "--limit", "0")
    assert refused.status == 1 and "limit" in refused.err
