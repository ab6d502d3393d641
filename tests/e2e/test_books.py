"""Protects the books of a cell over its life: prices that change while it runs, restarts, retention, the check beside it."""

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

from tests.e2e.http_client import Account, Json, demo_account, metrics, wait_until
from tests.e2e.running_cell import RunningCell, running_cell

DAY_MS = 86_400_000
LONG = "river"
"""A prompt whose reply is long: it runs while a test does something else."""


def checked(cell: RunningCell) -> dict[str, int]:
    """What `weir ledger verify` counts, beside the running cell; it must be clean."""
    command = [sys.executable, "-m", "weir.cli.main", "ledger", "verify", "--state", str(cell.state)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stdout + ended.stderr
    *lines, last = ended.stdout.splitlines()
    assert last == "clean"
    return {line.rsplit(maxsplit=1)[0].strip(): int(line.rsplit(maxsplit=1)[1].replace(",", "")) for line in lines}


def cost_at(price: Json, usage: Json) -> int:
    """What a usage costs at a price, rounded up; the simulated engine caches nothing."""
    assert usage["cached_input_tokens"] == 0
    total = usage["input_tokens"] * price["input_microusd"] + usage["output_tokens"] * price["output_microusd"]
    return -(-int(total) // 1_000_000)


def revision_of(account: Account) -> Json:
    """The revision behind alias `assistant`."""
    wanted = account.cell.ready["aliases"][0]["model_revision"]
    found: list[Json] = account.admin.done("GET", "/revisions")["revisions"]
    return next(entry for entry in found if entry["id"] == wanted)


def set_price(account: Account, **amounts: int) -> Json:
    """A new version of the price behind alias `assistant`."""
    price: Json = account.admin.done("PUT", f"/revisions/{revision_of(account)['id']}/price", amounts)["price"]
    return price


def test_a_price_holds_from_its_change_on_through_restarts_and_the_books_stay_right(tmp_path: Path) -> None:
    """Protects what tenants pay: a hold keeps the price it was taken at, later ones the new one, also after a restart."""
    state = tmp_path / "state"
    with running_cell(state) as cell, demo_account(cell) as account:
        old = revision_of(account)["price"]
        usages = [(old, account.generate(request_id="first").json["usage"])]
        stream = account.stream(input=LONG, request_id="running")
        stream.read(2)
        new = set_price(account, input_microusd=1_234_567, cached_input_microusd=1, output_microusd=7_654_321)
        assert new["version"] == old["version"] + 1
        usages.append((new, account.generate().json["usage"]))
        account.cancel("running")
        usages.append((old, stream.finish()["usage"]))
        assert checked(cell)["open holds"] == 0
    with running_cell(state) as cell, demo_account(cell) as account:
        assert revision_of(account)["prices"] == [old, new] and revision_of(account)["price"] == new
        usages.append((new, account.generate().json["usage"]))
        assert [usage["cost_microusd"] for _, usage in usages] == [cost_at(price, usage) for price, usage in usages]
        [total] = account.usage()
        spent = sum(usage["cost_microusd"] for _, usage in usages)
        assert (total["requests"], total["cost_microusd"]) == (4, spent)
        assert account.account("spend_microusd_lifetime")["spent"] == spent
        assert checked(cell)["settlements"] == 4


def test_batch_pays_its_part_through_restarts_and_the_books_stay_right(tmp_path: Path) -> None:
    """Protects a discount: answers, budgets, reports and the check say the reduced cost, for the batch application alone."""
    state = tmp_path / "state"
    with running_cell(state) as cell, demo_account(cell) as account, demo_account(cell, application="batch-jobs") as batch:
        amounts = {"input_microusd": 1_234_567, "cached_input_microusd": 1, "output_microusd": 7_654_321}
        price = set_price(account, **amounts, batch_percent=33)
        reduced = {name: -(-amount * 33 // 100) for name, amount in price.items() if name.endswith("_microusd")}
        usages = [(price, account.generate().json["usage"]), (reduced, batch.generate().json["usage"])]
        stream = batch.stream(input=LONG, request_id="running")
        stream.read(2)
        set_price(account, **amounts, batch_percent=0)
        usages.append((dict.fromkeys(reduced, 0), batch.generate().json["usage"]))
        batch.cancel("running")
        usages.append((reduced, stream.finish()["usage"]))
        assert checked(cell)["open holds"] == 0
    with running_cell(state) as cell, demo_account(cell) as account:
        assert [usage["cost_microusd"] for _, usage in usages] == [cost_at(price, usage) for price, usage in usages]
        spent = {row["application"]: row["cost_microusd"] for row in account.usage("application")}
        assert spent == {
            "assistant": usages[0][1]["cost_microusd"],
            "batch-jobs": sum(usage["cost_microusd"] for _, usage in usages[1:]),
        }
        assert account.account("spend_microusd_lifetime")["spent"] == sum(spent.values())
        assert checked(cell)["settlements"] == 4


def grow_old(state: Path, days: int, *request_ids: str) -> None:
    """Move what ended into the past, in a stopped cell's database."""
    with closing(sqlite3.connect(state / "weir.sqlite3")) as database, database:
        for table in ("ledger_hold", "ledger_settlement"):
            moved = f"UPDATE {table} SET at_ms = at_ms - ? WHERE request_id = ?"
            database.executemany(moved, [(days * DAY_MS, request_id) for request_id in request_ids])


def test_what_is_past_the_retention_is_kept_as_sums(tmp_path: Path) -> None:
    """Protects the reports of years ago, and the disk: old executions go, what they cost stays, and the ledger is clean."""
    state, config = tmp_path / "state", "[ledger]\nretention_days = 30\n"
    groups = "application,key,alias,revision,day,status,workload_class"
    with running_cell(state, config=config) as cell, demo_account(cell) as account:
        for request_id in ("old-1", "old-2", "recent", "new"):
            assert account.generate(request_id=request_id).status == 200
        before, spent = account.usage(groups), account.account("spend_microusd_lifetime")["spent"]
    grow_old(state, 32, "old-1", "old-2")
    grow_old(state, 29, "recent")
    with running_cell(state, config=config) as cell, demo_account(cell) as account:
        wait_until(lambda: metrics(cell)["weir_rolled_up_executions_total"] == 2)
        assert account.usage(groups) == before
        assert account.account("spend_microusd_lifetime")["spent"] == spent
        statuses = [account.get(request_id).status for request_id in ("old-1", "old-2", "recent", "new")]
        assert statuses == [404, 404, 200, 200]
        found = checked(cell)
        assert (found["settlements"], found["rolled up"]) == (2, 2)
        assert account.generate().status == 200
        assert account.usage()[0]["requests"] == 5
