"""Protects the commands of rollouts on a served API: plans as they are written, acts, tables, and a watch either way."""

import asyncio
import json
import os
import pty
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.cli_terminal import COMMAND_WAIT_S, REVISION, Terminal, terminal_of
from tests.unit.rollout_documents import GOOD, look_at

from weir.control.rollout_commands import ACTOR
from weir.core.registry.model import Pool, RevisionState
from weir.core.registry.rollout import Finish, Promote, RaiseWeight, RollBack, RollbackReason, RolloutEvent, Verify
from weir.core.registry.rollout_decision import Awaited, Hold, Wait
from weir.core.registry.rollout_plan import RolloutPlan
from weir.ports import AuditEntry, CatalogChange

NOW_MS = 1_700_000_000_000


@pytest.fixture
async def terminal(tmp_path: Path) -> AsyncIterator[Terminal]:
    async with terminal_of(tmp_path) as made:
        following = replace(REVISION, id="small-2", state=RevisionState.APPROVED)
        entry = AuditEntry(NOW_MS, "test", "put", "", "{}")
        await made.put(CatalogChange(entry, revisions=[following], pools=[Pool("next", "small-2", 1, 4)]))
        yield made


async def proposed(terminal: Terminal) -> str:
    """The id of a rollout that is under way."""
    rollout, _ = await terminal.rollouts.propose("ann", "assistant", "small-2", RolloutPlan())
    return rollout.id


async def move(terminal: Terminal, rollout: str, *events: RolloutEvent) -> None:
    for event in events:
        await terminal.rollouts.act(ACTOR, rollout, lambda stored, event=event: event)  # type: ignore[misc]


# ── plans and acts ───────────────────────────────────────────────────────────────────────────────────────────────────

TOML = """
interval_ms = 1000
[tolerances]
errors_points = 2
[[steps]]
weight = 20
samples_min = 5
time_min_ms = 0
[[steps]]
weight = 100
samples_min = 1
time_min_ms = 0
"""


async def test_a_rollout_is_started_by_a_plan_or_by_steps(terminal: Terminal, tmp_path: Path) -> None:
    """Protects plans: a file in either form, steps on the command line before it, and the default for the rest."""
    (tmp_path / "plan.toml").write_text(TOML)
    (tmp_path / "plan.json").write_text(json.dumps({"warm_ms": 9}))
    started: list[dict[str, Any]] = []
    for more in (
        (),
        ("--plan", str(tmp_path / "plan.toml")),
        ("--plan", str(tmp_path / "plan.json"), "--step", "5:10:1.5m", "--step", "100:0001:0"),
    ):
        started.append(await terminal.good_here("rollout", "start", "assistant", "small-2", *more))
        await terminal.rollouts.roll_back("ann", started[-1]["id"])
        await move(terminal, started[-1]["id"], Finish(NOW_MS))
    default, by_toml, by_steps = (each["plan"] for each in started)
    assert [step["weight"] for step in default["steps"]] == [step.weight for step in RolloutPlan().steps]
    assert (by_toml["interval_ms"], by_toml["tolerances"]["errors_points"], by_toml["steps"][0]["weight"]) == (1_000, 2, 20)
    assert by_steps["warm_ms"] == 9
    assert by_steps["steps"] == [
        {"weight": 5, "samples_min": 10, "time_min_ms": 90_000},
        {"weight": 100, "samples_min": 1, "time_min_ms": 0},
    ]


async def test_a_plan_that_is_none_is_one_sentence(terminal: Terminal, tmp_path: Path) -> None:
    """Protects whoever writes a plan: what cannot be read, what is no plan, and what the cell refuses, each by name."""
    for name, content in {
        "broken.toml": "steps = [",
        "dated.toml": "interval_ms = 2026-01-01",
        "broken.json": "{",
        "list.json": "[]",
        "colour.json": '{"colour": 1}',
    }.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "latin.json").write_bytes(b"\xff")
    for more, said in (
        (("--plan", str(tmp_path / "broken.toml")), "no TOML"),
        (("--plan", str(tmp_path / "dated.toml")), "no TOML"),
        (("--plan", str(tmp_path / "broken.json")), "no JSON"),
        (("--plan", str(tmp_path / "latin.json")), "no JSON"),
        (("--plan", str(tmp_path / "list.json")), "not an object"),
        (("--plan", str(tmp_path / "absent.json")), "No such file"),
        (("--plan", str(tmp_path / "colour.json")), "colour"),
        (("--step", "5:10"), "WEIGHT:SAMPLES:DURATION"),
        (("--step", "5:-1:5m"), "WEIGHT:SAMPLES:DURATION"),
        (("--step", "5:1:soon"), "--step takes a time"),
        (("--step", "5:1:5m"), "steps must be"),
    ):
        refused = await terminal.run_here("rollout", "start", "assistant", "small-2", *more)
        assert refused.status == 1 and said in refused.err and refused.err.count("\n") == 1, refused
    assert (await terminal.good_here("rollout", "list", "--json")) == []


async def test_people_act_on_a_rollout_and_see_it(terminal: Terminal) -> None:
    """Protects the acts, and the table: which alias moves where, how far it is, and what is over."""
    rollout = await proposed(terminal)
    assert (await terminal.good_here("rollout", "pause", rollout))["state"] == "paused"
    assert (await terminal.good_here("rollout", "resume", rollout))["state"] == "proposed"
    refused = await terminal.run_here("rollout", "promote", rollout)
    assert refused.status == 1 and "not_allowed_now" in refused.err
    await move(terminal, rollout, Verify(NOW_MS, None), RaiseWeight(NOW_MS))
    [line] = [line for line in (await terminal.run_here("rollout", "list", "--open")).out.splitlines() if rollout in line]
    assert line.split() == [
        rollout,
        "assistant",
        "small-1",
        "small-2",
        "canary",
        "1/4",
        "1",
        "%",
        "ann",
        "2023-11-14T22:13:20.000Z",
    ]
    canary = [line for line in (await terminal.run_here("alias", "list")).out.splitlines() if "assistant" in line]
    assert canary[0].split()[-4:] == ["1", "%", "small-2", f"({rollout})"]
    assert (await terminal.good_here("rollout", "promote", rollout))["state"] == "promoting"
    back = await terminal.good_here("rollout", "roll-back", rollout, "--detail", "Answers in French.")
    assert (back["state"], back["detail"]) == ("rolling_back", "Answers in French.")
    shown = await terminal.good_here("rollout", "show", rollout)
    assert [entry["action"] for entry in shown["history"]][:2] == ["rollout.roll_back", "rollout.promote"]
    await move(terminal, rollout, Finish(NOW_MS))
    assert await terminal.good_here("rollout", "list", "--open", "--json") == []
    assert [each["id"] for each in await terminal.good_here("rollout", "list", "--alias", "assistant", "--json")] == [rollout]
    assert await terminal.good_here("rollout", "list", "--alias", "nothing", "--json") == []


# ── watching ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def line_with(process: asyncio.subprocess.Process, text: str) -> str:
    assert process.stdout is not None
    while line := (await asyncio.wait_for(process.stdout.readline(), COMMAND_WAIT_S)).decode():
        if text in line:
            return line
    raise AssertionError(f"nothing said {text!r}")


async def test_a_watch_without_a_terminal_is_a_line_per_change_and_ends_live(terminal: Terminal) -> None:
    """Protects logs and scripts: each change as it comes, and status 0 once everybody has the new revision."""
    rollout = await proposed(terminal)
    process = await terminal.start("rollout", "watch", rollout)
    assert await line_with(process, "→") == "assistant: small-1 → small-2\n"
    assert "ann: propose" in await line_with(process, "propose")
    assert "not looked at yet" in await line_with(process, "proposed, 0 %")
    await move(terminal, rollout, Verify(NOW_MS, None), RaiseWeight(NOW_MS))
    assert "rollout: verify" in await line_with(process, "verify")
    assert "canary, step 1 of 4, 1 % of the traffic" in await line_with(process, "step 1")
    await move(terminal, rollout, Promote(NOW_MS), Finish(NOW_MS))
    assert await line_with(process, "live") and (await process.communicate())[1] == b""
    assert process.returncode == 0


async def test_a_watch_of_a_rollout_that_goes_back_ends_with_3_and_the_reason(terminal: Terminal) -> None:
    """Protects scripts: a rollback is told apart from an error and from success."""
    rollout = await proposed(terminal)
    process = await terminal.start("rollout", "watch", rollout)
    await line_with(process, "proposed, 0 %")
    await move(terminal, rollout, RollBack(NOW_MS, RollbackReason.NO_CAPACITY, "No replica was ready."), Finish(NOW_MS))
    assert "went back (no capacity): No replica was ready." in await line_with(process, "rolled back")
    await process.communicate()
    assert process.returncode == 3
    absent = await terminal.run_here("rollout", "watch", "ro-nothing")
    assert absent.status == 1 and "There is no rollout" in absent.err


async def test_an_interrupt_leaves_the_rollout_alone(terminal: Terminal) -> None:
    """Protects rollouts from whoever stops looking."""
    rollout = await proposed(terminal)
    process = await terminal.start("rollout", "watch", rollout)
    await line_with(process, "proposed, 0 %")
    process.send_signal(signal.SIGINT)
    _, err = await asyncio.wait_for(process.communicate(), COMMAND_WAIT_S)
    assert process.returncode == 130 and err.decode() == f"The rollout goes on; `weir rollout watch {rollout}` looks again.\n"
    assert (await terminal.good_here("rollout", "show", rollout))["state"] == "proposed"


async def test_a_watch_on_a_terminal_draws_itself_anew(terminal: Terminal) -> None:
    """Protects the live view: drawn in place, with what was seen at last, and its last frame stays."""
    rollout = await proposed(terminal)
    await move(terminal, rollout, Verify(NOW_MS, None), RaiseWeight(NOW_MS))
    stored = next(each for each in (await terminal.store.load()).rollouts if each.id == rollout)
    terminal.looks[rollout] = look_at(stored, Hold((Wait(Awaited.SAMPLES, 312, 500),)), GOOD)
    outer, inner = pty.openpty()
    process = await terminal.start("rollout", "watch", rollout, stdout=inner, TERM="xterm", COLUMNS="100", LINES="40")
    os.close(inner)
    seen = b""
    try:
        for text in ("waits for samples (312 of 500)", "151 of 300 pairs worse", "everybody has the new revision"):
            if text.startswith("everybody"):
                await move(terminal, rollout, Promote(NOW_MS), Finish(NOW_MS))
            while text.encode() not in seen:
                seen += await asyncio.wait_for(asyncio.to_thread(os.read, outer, 65_536), COMMAND_WAIT_S)
        assert await asyncio.wait_for(process.wait(), COMMAND_WAIT_S) == 0
    finally:
        os.close(outer)
    assert b"\x1b[1A" in seen, "drawn in the place of the frame before"
