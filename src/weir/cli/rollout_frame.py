"""One frame of `weir rollout watch`: steps with their progress, what it waits for, both revisions' evidence, what was done.

It decides only how a rollout looks; the words are `rollout_words.py`'s. Rich is imported when a frame is made, not before.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from weir.cli import rollout_words as words
from weir.cli.rollout_words import Document
from weir.cli.tables import thousands

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

EVENTS_MAX = 8
_BAR_CELLS = 12
_OTHER_LINES = 18
"""Of a frame, beside its steps and its events."""
_STYLES = {"live": "green", "rolling_back": "red", "rolled_back": "red", "paused": "yellow"}


def frame(rollout: Document, height: int, fault: str | None = None) -> "RenderableType":
    """What a terminal of this height shows. fault: why the cell could not be asked just now."""
    from rich.console import Group
    from rich.text import Text

    style = _STYLES.get(rollout["state"], "cyan")
    parts: list[RenderableType] = [
        Text(words.headline(rollout), style="bold"),
        Text(f"{rollout['id']}, proposed by {rollout['proposed_by']} at {rollout['proposed_at']}", style="dim"),
        Text(words.standing(rollout), style=style),
        Text(words.verdict(rollout)),
        "",
        _steps(rollout),
    ]
    if rollout["look"] is not None and rollout["look"]["evidence"] is not None:
        parts += ["", _evidence(rollout["look"])]
    if rollout["score"] is not None:
        parts.append(Text(f"evaluation: {rollout['score']['passed']} of {rollout['score']['total']} cases passed"))
    room = max(1, min(EVENTS_MAX, height - _OTHER_LINES - len(rollout["plan"]["steps"])))
    parts += ["", *(Text(words.event(entry), style="dim") for entry in reversed(rollout["history"][:room]))]
    if fault is not None:
        parts.append(Text(f"{fault} Asking again.", style="yellow"))
    return Group(*parts)


def _steps(rollout: Document) -> "Table":
    table = _table(("", "left"), ("weight", "right"), ("samples", "right"), ("", "left"), ("time", "right"), ("", "left"))
    for number, step in enumerate(rollout["plan"]["steps"]):
        table.add_row(*_step(rollout, number, step))
    return table


def _step(rollout: Document, number: int, step: Document) -> "Iterator[RenderableType]":
    is_here = rollout["step"] == number
    is_done = rollout["weight"] >= step["weight"] and not is_here
    yield "✓" if is_done else "▸" if is_here else ""
    yield f"{step['weight']} %"
    samples, elapsed_ms = _samples(rollout), words.elapsed_ms(rollout)
    for have, need, written in (
        (samples, step["samples_min"], thousands),
        (elapsed_ms, step["time_min_ms"], words.duration),
    ):
        yield f"{written(have)} of {written(need)}" if is_here else written(need)
        yield _bar(have, need) if is_here else ""


def _bar(have: int, need: int) -> "RenderableType":
    """Full where nothing is needed."""
    from rich.progress_bar import ProgressBar

    total = max(need, 1)
    done = total if have >= need else have
    return ProgressBar(total, done, width=_BAR_CELLS, style="bright_black", complete_style="cyan", finished_style="green")


def _samples(rollout: Document) -> int:
    """What the latest look saw at this step: one that began it saw the step before."""
    look = rollout["look"]
    is_new = look is None or look["evidence"] is None or not words.elapsed_ms(rollout)
    return 0 if is_new else int(look["evidence"]["canary"]["requests"])


def _evidence(look: Document) -> "Table":
    columns = [
        ("", "left"),
        ("stable", "right"),
        ("canary", "right"),
        ("surely", "right"),
        ("tolerated", "right"),
        ("", "left"),
    ]
    table = _table(*columns)
    tallies = look["evidence"]
    table.add_row("requests", *(thousands(tallies[arm]["requests"]) for arm in ("stable", "canary")))
    for comparison in look["comparisons"]:
        table.add_row(*_comparison(comparison), style="red" if comparison["is_breach"] else "")
    return table


def _comparison(comparison: Document) -> tuple[str, ...]:
    """Both revisions' rates, or how many pairs are worse; what that share is at least, and what is tolerated."""
    name = words.measure_name(comparison)
    if comparison["is_paired"]:
        arms = "", f"{thousands(comparison['hits'])} of {thousands(comparison['samples'])} pairs worse"
    else:
        arms = _rate(comparison["stable_hits"], comparison["stable_samples"]), _rate(comparison["hits"], comparison["samples"])
    judged = "worse" if comparison["is_breach"] else "" if not comparison["samples"] else "within"
    return name, *arms, f"{comparison['at_least']:.1%}", f"{comparison['at_most']:.1%}", judged


def _rate(hits: int, samples: int) -> str:
    return f"{thousands(hits)} ({hits / samples:.1%})" if samples else thousands(hits)


def _table(*columns: tuple[str, str]) -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for name, justify in columns:
        table.add_column(name, justify="right" if justify == "right" else "left", no_wrap=True)
    return table
