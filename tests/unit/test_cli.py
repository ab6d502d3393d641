"""Protects the command line: quick help, each command on a served API, failures in one sentence, a cancel on Ctrl-C."""

import asyncio
import resource
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.cli_terminal import COMMAND_WAIT_S, USAGE, Terminal, terminal_of

from weir.app.ready_file import Ready
from weir.cli.tables import digits_of, dollars, thousands
from weir.cli.up import show_ready


@pytest.fixture
async def terminal(tmp_path: Path) -> AsyncIterator[Terminal]:
    async with terminal_of(tmp_path) as made:
        yield made


# ── the root ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_help_lists_every_command_within_four_tenths_of_a_second_of_cpu() -> None:
    """Protects quick start-up: help imports no command."""
    spent: list[float] = []
    for _ in range(3):  # the best of three: other work on the machine makes a run slower, never quicker
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        shown = subprocess.run([sys.executable, "-m", "weir.cli.main", "--help"], capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        for name in ("up", "generate", "tenant", "app", "key", "limit", "price", "usage", "explain", "ledger", "audit"):
            assert f" {name} " in shown.stdout
    assert min(spent) < 0.4


@pytest.mark.parametrize("words", [["nonsense"], ["tenant", "nonsense"], ["limit", "set"], ["generate"]])
def test_a_wrong_command_line_exits_with_2_and_no_traceback(words: list[str]) -> None:
    """Protects the exit status of a usage error."""
    shown = subprocess.run([sys.executable, "-m", "weir.cli.main", *words], capture_output=True, text=True, check=False)
    assert shown.returncode == 2 and "Traceback" not in shown.stderr


# ── administration ───────────────────────────────────────────────────────────────────────────────────────────────────


async def test_tenants_are_created_shown_disabled_enabled_and_revoked(terminal: Terminal) -> None:
    """Protects the tenant commands."""
    created = await terminal.good("tenant", "create", "initech", "--time-zone", "Europe/Berlin")
    assert created["time_zone"] == "Europe/Berlin" and created["external_allowed"] is False
    assert await terminal.good("tenant", "show", "initech") == created
    assert (await terminal.good("tenant", "disable", "initech"))["disabled"] is True
    listed = await terminal.run("tenant", "list")
    [line] = [line for line in listed.out.splitlines() if "initech" in line]
    assert line.split() == ["initech", "Europe/Berlin", "1", "disabled"]
    assert (await terminal.good("tenant", "enable", "initech"))["disabled"] is False
    assert (await terminal.good("tenant", "revoke", "initech"))["revoked"] is True
    assert [tenant["name"] for tenant in await terminal.good("tenant", "list", "--json")] == ["acme", "globex", "initech"]


async def test_applications_and_keys(terminal: Terminal) -> None:
    """Protects the application and key commands."""
    created = await terminal.good("app", "create", "acme", "reports", "--service-class", "batch", "--alias", "assistant")
    assert (created["service_class"], created["aliases"]) == ("batch", ["assistant"])
    assert "aliases" not in await terminal.good("app", "create", "acme", "plain")
    table = (await terminal.run("app", "list", "acme")).out
    assert "(all)" in table and "reports" in table
    assert len(await terminal.good("app", "list", "acme", "--json")) == 4
    key = await terminal.good("key", "create", "acme", "reports")
    assert key["secret"].startswith("weir-")
    assert key["id"] in (await terminal.run("key", "list", "acme", "reports")).out
    assert (await terminal.good("key", "revoke", "acme", "reports", key["id"]))["revoked"] is True
    assert await terminal.good("key", "list", "acme", "reports", "--json") == [
        {"id": key["id"], "tenant": "acme", "application": "reports", "revoked": True}
    ]


async def test_failures_are_one_sentence_with_the_code_and_status_1(terminal: Terminal, tmp_path: Path) -> None:
    """Protects a person from tracebacks."""
    refused = await terminal.run("tenant", "show", "nobody")
    assert (refused.status, refused.out) == (1, "")
    assert refused.err == "error: There is no tenant 'nobody'. (not_found)\n"
    absent = await terminal.run("tenant", "list", state=tmp_path / "elsewhere")
    assert absent.status == 1 and "weir up" in absent.err
    (tmp_path / "ready.json").write_text('{"admin": "http://127.0.0.1:1", "admin_key": "k"}')
    closed = await terminal.run("tenant", "list", state=tmp_path)
    assert closed.status == 1 and closed.err.count("\n") == 1 and "is the cell running?" in closed.err


async def test_address_and_key_come_from_options_or_environment_but_are_never_mixed(terminal: Terminal, tmp_path: Path) -> None:
    """Protects a key of one cell from being sent to another address."""
    key = terminal.drafted["admin"]
    named = await terminal.run("tenant", "list", "--admin", terminal.url, "--admin-key", key, state=tmp_path / "none")
    assert named.status == 0
    inherited = await terminal.run("tenant", "list", state=tmp_path / "none", WEIR_ADMIN_URL=terminal.url, WEIR_ADMIN_KEY=key)
    assert inherited.out == named.out
    mixed = await terminal.run("tenant", "list", "--admin", terminal.url)
    assert mixed.status == 1 and "--admin-key" in mixed.err
    wrong = await terminal.run("tenant", "list", "--admin-key", "weir-wrong")
    assert wrong.status == 1 and "unauthenticated" in wrong.err and "weir-wrong" not in wrong.err


@pytest.mark.parametrize(
    "address", ["http://a:b", "http://[", "ftp://x", "x", "weir-secret", "http://me:weir-secret@127.0.0.1:1"]
)
async def test_an_address_that_is_none_is_one_line_without_it(terminal: Terminal, address: str) -> None:
    """Protects secrets that land in the wrong option: a wrong address is named by its form, never repeated."""
    for words in (("tenant", "list", "--admin", address, "--admin-key", "weir-secret"), ("generate", "x")):
        result = await terminal.run(*words, WEIR_API_URL=address, WEIR_API_KEY="weir-secret")
        assert (result.status, result.out) == (1, "")
        assert result.err == "error: The address is not one: it is of the form http://HOST:PORT.\n"


@pytest.mark.parametrize("key", ["weir-secret\nx", "weir-sécret", "weir secret", " \n"])
async def test_a_key_that_is_none_is_one_line_without_it(terminal: Terminal, key: str) -> None:
    """Protects keys from showing in a traceback: what cannot stand in a header is refused before anything is sent."""
    for words in (("tenant", "list", "--admin", terminal.url, "--admin-key", key), ("generate", "x")):
        result = await terminal.run(*words, WEIR_API_URL=terminal.url, WEIR_API_KEY=key)
        assert (result.status, result.out) == (1, "")
        assert result.err == "error: The key is not one: a key is a word of printable ASCII characters.\n"


async def test_a_key_from_a_file_may_end_its_line(terminal: Terminal) -> None:
    """Protects keys that were read from a file with a line end."""
    words = ("tenant", "list", "--admin", terminal.url)
    assert (await terminal.run(*words, WEIR_ADMIN_KEY=terminal.drafted["admin"] + "\n")).status == 0


# ── up ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("keys", "shown"), [((None, "live"), "live"), (("first", "live"), "first"), ((None, None), None)])
def test_the_example_of_a_start_uses_a_key_that_lives(
    keys: tuple[str | None, str | None], shown: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Protects the first step of whoever copies it: a revoked key is in no example, and without a key there is none."""
    applications: list[Any] = [{"name": name, "key": key} for name, key in zip("ab", keys, strict=True)]
    secrets: Any = {"admin_key": None, "tenants": [{"name": "acme", "applications": applications}]}
    show_ready(Ready("http://a", "http://b", "http://c", secrets, []))
    out = capsys.readouterr().out
    assert ("curl" in out) == (shown is not None)
    assert shown is None or f"Bearer {shown}" in out
    assert "Bearer None" not in out and "Ctrl-C drains and stops." in out


# ── generate ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_an_answer_streams_to_output_and_its_cost_to_standard_error(terminal: Terminal) -> None:
    """Protects piping: the text alone is on standard output."""
    result = await terminal.run("generate", "Hello", "--max-output-tokens", "9", "--deadline-ms", "5000")
    assert (result.status, result.out) == (0, "Grüß Gott\n")
    for part in ("completed (stop)", "1,200 tokens in, 34 out", "$0.000261", "first token 120 ms", "total 900 ms"):
        assert part in result.err
    [body] = terminal.generations.bodies
    assert (body["input"], body["model_alias"], body["max_output_tokens"], body["deadline_ms"]) == (
        "Hello",
        "assistant",
        9,
        5_000,
    )
    assert body["authorization"] == f"Bearer {terminal.drafted['acme/assistant']}"


async def test_the_key_of_another_application_is_chosen_by_name(terminal: Terminal) -> None:
    """Protects the choice of a key in the ready file."""
    await terminal.run("generate", "Hello", "--tenant", "globex", "--application", "batch-jobs")
    assert terminal.generations.bodies[0]["authorization"] == f"Bearer {terminal.drafted['globex/batch-jobs']}"
    unknown = await terminal.run("generate", "Hello", "--tenant", "nobody")
    assert unknown.status == 1 and "--api-key" in unknown.err


async def test_json_prints_the_whole_answer(terminal: Terminal) -> None:
    """Protects scripts that want one document."""
    answer = await terminal.good("generate", "Hello", "--json")
    assert (answer["output"], answer["usage"]) == ("Hello.", USAGE)
    assert terminal.generations.bodies[0]["stream"] is False


@pytest.mark.parametrize(
    ("alias", "said"), [("broken", "The engine failed."), ("nothing", "unknown_alias"), ("cut", "without its terminal event")]
)
async def test_what_did_not_complete_exits_with_1_and_says_why(terminal: Terminal, alias: str, said: str) -> None:
    """Protects scripts that look at the exit status."""
    result = await terminal.run("generate", "Hello", "--alias", alias)
    assert result.status == 1 and said in result.err


async def test_an_interrupt_cancels_by_id_and_shows_the_cost(terminal: Terminal) -> None:
    """Protects an interrupted request from running on, and shows what it cost."""
    process = await terminal.start("generate", "Hello", "--alias", "endless")
    assert process.stdout is not None
    shown = await asyncio.wait_for(process.stdout.readexactly(len("Grüß Gott".encode())), COMMAND_WAIT_S)
    process.send_signal(signal.SIGINT)
    rest, err = await asyncio.wait_for(process.communicate(), COMMAND_WAIT_S)
    assert terminal.generations.cancelled.is_set()
    assert shown.decode() == "Grüß Gott" and not rest.strip()
    assert process.returncode == 1 and b"cancelled (client)" in err and b"$0.000261" in err and b"Traceback" not in err


# ── tables ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("amount", "shown"),
    [(0, "$0.00"), (1, "$0.000001"), (120_000, "$0.12"), (1_234_567_890, "$1,234.56789"), (10**12, "$1,000,000.00")],
)
def test_dollars_show_every_digit_and_at_least_cents(amount: int, shown: str) -> None:
    """Protects amounts from losing digits."""
    assert dollars(amount) == shown
    assert digits_of(amount) == len(shown.split(".")[1])
    assert dollars(amount, 6).startswith(shown) and thousands(1_234_567) == "1,234,567"
