"""What the documentation tells people to type does what it says: the tutorial, the README, the worked examples."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tests.docs.pages import ROOT, Block, all_blocks, blocks_of, page_of, text_of
from tests.docs.test_reference import commands, options_of
from tests.e2e.running_cell import RunningCell, kill_if_running

from weir.api.openapi.document import SURFACES
from weir.config import load_config
from weir.control.bootstrap import DEMO_PRICE
from weir.core.ledger.bucket import Bucket
from weir.core.metering import worst_case
from weir.core.tenancy import ServiceClass
from weir.units import NANOS_PER_SECOND

TUTORIAL = "docs/tutorial/first-steps.md"
START_S, SESSION_S, STOP_S = 60, 240, 30
MARK = "@@ block"


def environment(**more: str) -> dict[str, str]:
    """A terminal in which `weir` is found."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WEIR_")}
    return {**kept, "PATH": path, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "200", **more}


def expected_after(blocks: Sequence[Block], language: str = "bash") -> list[tuple[Block, str | None]]:
    """Each block of commands, or of Python, with the output that the page shows right behind it, if it shows any."""
    followers = [*blocks[1:], None]
    pairs = zip(blocks, followers, strict=True)
    return [
        (block, after.text if after and after.language == "text" else None)
        for block, after in pairs
        if block.language == language
    ]


def matches(shown: str, printed: str) -> bool:
    """Whether a session printed what a page shows. `…` stands for anything; as a whole line, also for several lines or none."""
    pattern = ""
    for line in shown.strip("\n").splitlines():
        pattern += r"(?:.*\n)*?" if line == "…" else ".*".join(map(re.escape, line.split("…"))) + r"\n"
    return re.fullmatch(pattern, printed.lstrip("\n").rstrip() + "\n") is not None


def run_session(folder: Path, blocks: Sequence[Block], **variables: str) -> list[str]:
    """Type the blocks into one shell; what each printed. The shell stops at the first command that fails."""
    typed = "".join(f"echo '{MARK}'\n{block.text}" for block in blocks)
    command = ["bash", "-euo", "pipefail", "-c", typed]
    ended = subprocess.run(
        command,
        cwd=folder,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=SESSION_S,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout
    return ended.stdout.split(f"{MARK}\n")[1:]


@contextmanager
def started(folder: Path, block: Block) -> Iterator[subprocess.Popen[bytes]]:
    """The block that runs until Ctrl-C, once its cell is ready."""
    log = folder / "first-terminal.log"
    with log.open("wb") as output:
        command = ["bash", "-c", f"exec {block.text}"]
        process = subprocess.Popen(
            command, cwd=folder, env=environment(), stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    try:
        deadline = time.monotonic() + START_S
        while not (folder / "state" / "ready.json").exists():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text(errors="replace")
            time.sleep(0.05)
        yield process
    finally:
        kill_if_running(process)


def test_the_tutorial_runs_as_it_stands(tmp_path: Path) -> None:
    """Protects a newcomer's first five minutes: every block runs and prints what the page shows, and Ctrl-C stops the cell."""
    (up, _), *session = expected_after(blocks_of(TUTORIAL))
    with started(tmp_path, up) as process:
        printed = run_session(tmp_path, [block for block, _ in session])
        for (block, shown), output in zip(session, printed, strict=True):
            assert shown is None or matches(shown, output), f"{block.text}\nprinted\n{output}"
        process.send_signal(signal.SIGINT)
        assert process.wait(STOP_S) == 0
        assert not (tmp_path / "state" / "ready.json").exists()


UNSERVED = ("embeddings.md",)
RUNNABLE = ["README.md", *(page_of(surface) for surface in SURFACES if surface.page not in UNSERVED)]
"""Embeddings need a model that makes them, which the documented cell has not. Their own tests run the official SDK."""


@pytest.mark.parametrize("page", RUNNABLE)
def test_a_page_runs_as_it_stands(cell: RunningCell, tmp_path: Path, page: str) -> None:
    """Protects first impressions: curl, the command line and the official SDK, with address and key from the environment."""
    variables = {"WEIR_API_URL": cell.api, "WEIR_API_KEY": cell.key()}
    session = expected_after(blocks_of(page))
    assert session
    printed = run_session(tmp_path, [block for block, _ in session], **variables)
    for (block, shown), output in zip(session, printed, strict=True):
        assert shown is None or matches(shown, output), f"{block.text}\nprinted\n{output}"
    for block, shown in expected_after(blocks_of(page), "python"):
        command = [sys.executable, "-W", "error", "-c", block.text]
        ended = subprocess.run(command, env=environment(**variables), capture_output=True, timeout=SESSION_S, text=True)
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.strip()
        assert shown is None or matches(shown, ended.stdout), f"{block.text}\nprinted\n{ended.stdout}"


def test_every_python_snippet_compiles() -> None:
    """Protects readers from snippets that are no Python."""
    snippets = list(all_blocks("python"))
    assert snippets
    for block in snippets:
        compile(block.text, block.page, "exec")


def test_every_configuration_snippet_is_accepted(tmp_path: Path) -> None:
    """Protects operators from settings that the start refuses."""
    snippets = list(all_blocks("toml"))
    assert snippets
    for block in snippets:
        path = tmp_path / "weir.toml"
        path.write_text(block.text, encoding="utf-8")
        load_config(path)


def test_every_shown_command_exists() -> None:
    """Protects readers from commands, options and targets that are gone, also in blocks that no test runs."""
    known = dict(commands())
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", text_of("Makefile"), re.MULTILINE))
    for block in all_blocks("sh", "bash"):
        for line in block.text.replace("\\\n", " ").splitlines():
            words = line.partition("#")[0].split()
            if words[:1] == ["make"]:
                assert words[1] in targets, f"{block.page}: {line}"
            if words and words[0].endswith("weir"):
                name = next(
                    (" ".join(["weir", *words[1:size]]) for size in (3, 2) if " ".join(["weir", *words[1:size]]) in known), None
                )
                assert name, f"{block.page}: {line}"
                assert {word for word in words if word.startswith("--")} <= options_of(known[name]), f"{block.page}: {line}"


def test_the_worked_example_of_money() -> None:
    """Protects the page on money: its hold, its cost and its three returns are what the code computes."""
    page = text_of("docs/explanation/money.md")
    held = worst_case(DEMO_PRICE, 1_000, 500, 1)
    cost = DEMO_PRICE.cost(1_000, 0, 120)
    for sentence in (f"= {held.cost_microusd} micro-dollars, and {held.tokens} tokens", f"= {cost} micro-dollars,"):
        assert sentence in page
    assert f"gives {held.cost_microusd - cost} back" in page
    reduced = replace(DEMO_PRICE, batch_percent=50).of(ServiceClass.BATCH)
    assert f"at {reduced.input_microusd} for input and {reduced.output_microusd} for output" in page
    least = worst_case(reduced, 1_000, 500, 1)
    assert f"holds {least.cost_microusd} micro-dollars and\ncosts {reduced.cost(1_000, 0, 120)}." in page
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (\d+)", page, re.MULTILINE)
    assert len(rows) == 3
    for second, refilled, returned in (map(int, row) for row in rows):
        bucket = Bucket(3_000, 0)
        bucket.take("hold", held.tokens, 0)
        now_ns = second * NANOS_PER_SECOND
        assert held.tokens - bucket.used(now_ns) == refilled
        assert bucket.settle("hold", 1_120, now_ns) == returned


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("a…c", "abbc", True),
        ("…\nend", "one\ntwo\nend", True),
        ("…\nend", "end", True),
        ("start\nend", "start\nmore\nend", False),
        ("a.c", "abc", False),
    ],
)
def test_shown_output_is_compared(shown: str, printed: str, same: bool) -> None:
    """Protects the comparison itself: it forgives what `…` covers and nothing else."""
    assert matches(shown, printed) is same
