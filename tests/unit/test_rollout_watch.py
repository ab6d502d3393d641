"""Protects what people see of a rollout: the words and the frame for each state, one line per change, and the end."""

import io
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console
from tests.unit.rollout_documents import BAD, GOOD, NOON_MS, PLAN, document

from weir.cli import rollout_words as words
from weir.cli.http_api import CommandFailed
from weir.cli.rollout_frame import EVENTS_MAX, frame
from weir.cli.rollout_watch import FAULTS_MAX, LIVE, ROLLED_BACK, Lines, follow
from weir.cli.rollout_words import Document
from weir.core.registry.comparison import compare
from weir.core.registry.golden_set import Score
from weir.core.registry.rollout import (
    Live,
    OnCanary,
    Paused,
    Promoting,
    Proposed,
    RollbackReason,
    RolledBack,
    RollingBack,
    RolloutState,
    Verified,
)
from weir.core.registry.rollout_decision import Awaited, Breach, GiveUp, Hold, Proceed, Verdict, Wait

AT_STEP = OnCanary(1, NOON_MS)
WAITING = Hold((Wait(Awaited.SAMPLES, 312, 500), Wait(Awaited.TIME, 192_000, 600_000)))
BREACH = Breach(compare(PLAN, 1, BAD, None)[0])


def drawn(rollout: dict[str, Any], width: int = 80, height: int = 40, fault: str | None = None) -> str:
    console = Console(width=width, height=height, file=io.StringIO())
    console.print(frame(rollout, height, fault))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# ── words ────────────────────────────────────────────────────────────────────────────────────────────────────────────

SAID: tuple[tuple[RolloutState, Verdict | None, str, str], ...] = (
    (Proposed(NOON_MS), None, "proposed, 0 % of the traffic", "not looked at yet"),
    (
        Proposed(NOON_MS),
        Hold((Wait(Awaited.REPLICA, 12_000, 600_000),), "exit 1: \x1b[31mbad\nmagic"),
        "proposed, 0 % of the traffic",
        "waits for a ready replica (12 s, goes back after 10 min); the last start failed: exit 1:  [31mbad magic",
    ),
    (
        Proposed(NOON_MS),
        Hold((Wait(Awaited.EVALUATION, 3_661_000, 7_200_000),)),
        "proposed, 0 % of the traffic",
        "waits for its evaluation (1 h 1 min 1 s, goes back after 2 h)",
    ),
    (
        Verified(NOON_MS, None),
        Hold((Wait(Awaited.CAPACITY, 1_000, 1),)),
        "verified, 0 % of the traffic",
        "waits for replicas that carry 1 % (1,000 ready)",
    ),
    (
        AT_STEP,
        WAITING,
        "canary, step 2 of 3, 10 % of the traffic",
        "waits for samples (312 of 500), time (3 min 12 s of 10 min)",
    ),
    (AT_STEP, Hold(), "canary, step 2 of 3, 10 % of the traffic", "waits for nothing"),
    (AT_STEP, Proceed(100), "canary, step 2 of 3, 10 % of the traffic", "goes on to 100 %"),
    (AT_STEP, Proceed(10), "canary, step 2 of 3, 10 % of the traffic", "goes on"),
    (AT_STEP, BREACH, "canary, step 2 of 3, 10 % of the traffic", "goes back, worse beyond doubt: errors"),
    (
        AT_STEP,
        GiveUp(RollbackReason.NO_CAPACITY, "No replica was ready for 30000 ms."),
        "canary, step 2 of 3, 10 % of the traffic",
        "goes back: No replica was ready for 30000 ms.",
    ),
    (
        Paused(AT_STEP, NOON_MS),
        Hold((Wait(Awaited.OPERATOR, 5, 0),)),
        "paused (canary), step 2 of 3, 10 % of the traffic",
        "waits for somebody to resume it (5 ms)",
    ),
    (
        Promoting(NOON_MS),
        Hold((Wait(Awaited.WARMTH, 0, 60_000),)),
        "promoting, 100 % of the traffic",
        "waits for the end of the time that the former revision stays warm (0 s of 1 min)",
    ),
    (
        RollingBack(NOON_MS, RollbackReason.FIRST_TOKEN, "Slow.\x07"),
        Hold((Wait(Awaited.RUNNING, 3, 0),)),
        "rolling back, 0 % of the traffic",
        "went back (first token): Slow. ",
    ),
    (
        RolledBack(NOON_MS, RollbackReason.ERRORS, "Bad."),
        Hold(),
        "rolled back, 0 % of the traffic",
        "went back (errors): Bad.",
    ),
    (Live(NOON_MS), Hold(), "live, 100 % of the traffic", "everybody has the new revision"),
)


@pytest.mark.parametrize(("state", "verdict", "standing", "said"), SAID)
def test_each_state_and_verdict_is_said_in_words(
    state: RolloutState, verdict: Verdict | None, standing: str, said: str
) -> None:
    """Protects whoever looks: where it is, what it waits for with how much is there, and why it goes or went back."""
    shown = document(state, verdict)
    assert (words.standing(shown), words.verdict(shown)) == (standing, said)
    text = drawn(shown, width=200)
    assert standing in text and said.strip() in text and "\x1b" not in text


def test_everything_that_can_be_waited_for_has_words() -> None:
    """Protects the view from a wait that nobody thought of: the table has each, and one of another release is shown too."""
    waited = {wait.what for _, verdict, _, _ in SAID if isinstance(verdict, Hold) for wait in verdict.waits}
    assert waited | {Awaited.RUNNING, Awaited.RETURN} == set(Awaited)
    told = words.wait({"what": "return", "have": 3, "need": 0})
    assert told == "somebody to promote it: the stable revision serves nobody any more"
    assert words.wait({"what": "running", "have": 3, "need": 0}) == "what still runs on it (3)"
    assert words.wait({"what": "luck", "have": 1, "need": 2}) == "luck (1 of 2)"


def test_an_alias_of_a_tenant_is_named_as_its_own() -> None:
    """Protects whoever looks from another tenant's alias of the same name."""
    assert words.headline(document(AT_STEP)) == "assistant: small@1 → small@2"
    assert words.headline(document(AT_STEP, tenant="acme")) == "assistant of acme: small@1 → small@2"


# ── frames ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_frame_shows_progress_both_revisions_and_what_was_done() -> None:
    """Protects the live view: steps done, here and to come, rates and pairs with their bounds, and the newest acts last."""
    text = drawn(document(AT_STEP, WAITING, GOOD, acts=3, score=Score(48, 50, ("case-1",))))
    lines = {line.split()[0] if line.split() else "": line for line in text.splitlines()}
    assert lines["✓"].split()[1:4] == ["1", "%", "100"]
    assert "312 of 500" in lines["▸"] and "3 min 12 s of 10 min" in lines["▸"] and "━" in lines["▸"]
    assert lines["100"].split() == ["100", "%", "0", "0", "s"]
    assert lines["requests"].split() == ["requests", "2,811", "312"]
    assert lines["errors"].split()[:5] == ["errors", "3", "(0.1%)", "1", "(0.3%)"] and lines["errors"].endswith("within")
    assert "151 of 300 pairs worse" in lines["first"] and lines["first"].split()[-2:] == ["50.0%", "within"]
    assert "48 of 50 cases passed" in text and max(map(len, text.splitlines())) <= 80
    assert [line for line in text.splitlines() if "raise weight" in line] == [
        f"12:00:0{number}Z rollout: raise weight (weight {number})" for number in range(3)
    ]


def test_a_step_that_has_just_begun_has_no_samples_yet() -> None:
    """Protects whoever looks from the former step's samples: the look that began a step saw the one before."""
    text = drawn(document(OnCanary(1, NOON_MS + 192_000), Proceed(10), GOOD))
    [line] = [line for line in text.splitlines() if "▸" in line]
    assert "0 of 500" in line and "0 s of 10 min" in line


def test_a_breach_is_marked_and_what_was_not_measured_is_not_judged() -> None:
    """Protects people's eyes: what is worse says so, and nothing is called good without a sample."""
    text = drawn(document(AT_STEP, BREACH, BAD))
    [worse] = [line for line in text.splitlines() if line.startswith("errors ")]
    assert worse.split()[-1] == "worse" and "80 (25.6%)" in worse
    [unknown] = [line for line in text.splitlines() if line.startswith("per token")]
    assert unknown.split()[2:6] == ["0", "of", "0", "pairs"] and unknown.split()[-1] == "50.0%"


@pytest.mark.parametrize("height", [10, 24, 30, 80])
def test_a_frame_fits_its_terminal_as_far_as_that_is_possible(height: int) -> None:
    """Protects the live view from growing with its history: an act at least, and as many as there is room for."""
    text = drawn(document(AT_STEP, WAITING, GOOD, acts=40, score=Score(1, 1)), height=height, fault="No answer.")
    shown = text.count("raise weight")
    assert 1 <= shown <= EVENTS_MAX and (height < 24 or len(text.splitlines()) <= height)
    assert f"weight {39}" in text and "No answer. Asking again." in text
    assert height < 80 or shown == EVENTS_MAX


# ── lines ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_change_is_a_line_and_growing_figures_are_none() -> None:
    """Protects logs: headline, acts and standing once, then only what is new, and one line for an outage."""
    written: list[str] = []
    lines = Lines(written.append)
    lines.show(document(AT_STEP, WAITING, GOOD, acts=1))
    assert written == [
        "assistant: small@1 → small@2\n",
        "12:00:00Z rollout: raise weight (weight 0)\n",
        "canary, step 2 of 3, 10 % of the traffic: waits for samples (312 of 500), time (3 min 12 s of 10 min)\n",
    ]
    more = Hold((Wait(Awaited.SAMPLES, 400, 500), Wait(Awaited.TIME, 200_000, 600_000)))
    for _ in range(2):
        lines.show(document(AT_STEP, more, GOOD, acts=1))
    assert len(written) == 3
    lines.show(document(AT_STEP, Hold((Wait(Awaited.TIME, 200_000, 600_000),)), GOOD, acts=1))
    assert written[3:] == ["canary, step 2 of 3, 10 % of the traffic: waits for time (3 min 20 s of 10 min)\n"]
    for _ in range(3):
        lines.show(document(AT_STEP, more, GOOD, acts=1), "No usable answer.")
    assert written[4:] == ["No usable answer.\n"]
    lines.show(document(Live(NOON_MS), Hold(), acts=3))
    assert [line.partition("Z")[2] for line in written[5:7]] == [
        f" rollout: raise weight (weight {number})\n" for number in (1, 2)
    ]
    assert written[7:] == ["live, 100 % of the traffic: everybody has the new revision\n"]


# ── following ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Shown:
    """What was shown, and how often it rested."""

    def __init__(self) -> None:
        self.faults: list[str | None] = []
        self.rests = 0

    def show(self, rollout: Document, fault: str | None = None) -> None:
        self.faults.append(fault)

    def rest(self) -> None:
        self.rests += 1


def asked(*answers: dict[str, Any] | str) -> Any:
    """Answers one after the other; a text is a failure."""
    each: Iterator[dict[str, Any] | str] = iter(answers)

    def ask() -> dict[str, Any]:
        answer = next(each)
        if isinstance(answer, str):
            raise CommandFailed(answer)
        return answer

    return ask


GOING, OVER = document(AT_STEP, WAITING), document(Live(NOON_MS))
BACK = document(RolledBack(NOON_MS, RollbackReason.ERRORS, "Bad."))


def test_a_watch_ends_with_its_rollout_and_says_how() -> None:
    """Protects scripts that wait: 0 once it is live, 3 once it was rolled back, at once where it is over already."""
    for last, status in ((OVER, LIVE), (BACK, ROLLED_BACK)):
        shown = Shown()
        assert follow(asked(GOING, GOING, last), shown, shown.rest) == status
        assert (len(shown.faults), shown.rests) == (3, 2)
        assert follow(asked(last), shown, shown.rest) == status and shown.rests == 2


def test_a_watch_outlives_a_restart_and_not_more() -> None:
    """Protects a watch from a cell that is away for a while, and whoever waits from one that never comes back."""
    shown = Shown()
    assert follow(asked(GOING, *["away"] * FAULTS_MAX, GOING, *["away"] * FAULTS_MAX, OVER), shown, shown.rest) == LIVE
    assert shown.faults.count("away") == 2 * FAULTS_MAX
    with pytest.raises(CommandFailed):
        follow(asked(GOING, *["away"] * (FAULTS_MAX + 1)), Shown(), shown.rest)
    with pytest.raises(CommandFailed, match="no rollout"):
        follow(asked("There is no rollout."), Shown(), shown.rest)
