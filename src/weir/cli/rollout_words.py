"""A rollout in words: what it is at, what it waits for, what was done with it. Pure; `rollout_watch.py` shows them.

The document is the management API's answer. Text that came from an engine's fault is made fit for a terminal.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from weir.cli.tables import plain, thousands

Document = Mapping[str, Any]


def headline(rollout: Document) -> str:
    """What moves from where to where."""
    owner = f" of {rollout['tenant']}" if rollout["tenant"] else ""
    return f"{rollout['alias']}{owner}: {rollout['stable']} → {rollout['canary']}"


def standing(rollout: Document) -> str:
    """Its state, at which step, and the new revision's share."""
    state = rollout["state"].replace("_", " ")
    if "was" in rollout:
        state += f" ({rollout['was']})"
    step = "" if rollout["step"] is None else f", step {rollout['step'] + 1} of {len(rollout['plan']['steps'])}"
    return f"{state}{step}, {rollout['weight']} % of the traffic"


def verdict(rollout: Document) -> str:
    """What the latest look said, and why; of one that went back, why it did."""
    if "detail" in rollout:
        return plain(f"went back ({rollout['reason'].replace('_', ' ')}): {rollout['detail']}")
    if rollout["is_over"]:
        return "everybody has the new revision"
    look = rollout["look"]
    if look is None:
        return "not looked at yet"
    said = look["verdict"]
    if said["kind"] == "proceed":
        return f"goes on to {said['weight']} %" if said["weight"] > rollout["weight"] else "goes on"
    if said["kind"] == "breach":
        return f"goes back, worse beyond doubt: {measure_name(said['comparison'])}"
    if said["kind"] == "give_up":
        return plain(f"goes back: {said['detail']}")
    waits = ", ".join(wait(entry) for entry in said["waits"]) or "nothing"
    fault = f"; the last start failed: {said['fault']}" if "fault" in said else ""
    return plain(f"waits for {waits}{fault}")


def wait(entry: Document) -> str:
    """One thing that it waits for, with how much of it there is."""
    what, have, need = entry["what"], entry["have"], entry["need"]
    match what:
        case "replica":
            return f"a ready replica ({duration(have)}, goes back after {duration(need)})"
        case "evaluation":
            return f"its evaluation ({duration(have)}, goes back after {duration(need)})"
        case "capacity":
            return f"replicas that carry {need} % ({thousands(have)} ready)"
        case "samples":
            return f"samples ({thousands(have)} of {thousands(need)})"
        case "time":
            return f"time ({duration(have)} of {duration(need)})"
        case "operator":
            return f"somebody to resume it ({duration(have)})"
        case "return":
            return "somebody to promote it: the stable revision serves nobody any more"
        case "running":
            return f"what still runs on it ({thousands(have)})"
        case "warmth":
            return f"the end of the time that the former revision stays warm ({duration(have)} of {duration(need)})"
        case _:
            return f"{what} ({have} of {need})"


def event(entry: Document) -> str:
    """One act: when, who, what, and its figures."""
    act = entry["action"].removeprefix("rollout.").replace("_", " ")
    figures = ", ".join(f"{name} {value}" for name, value in entry["summary"].items() if value is not None)
    return plain(f"{clock_time(entry['at'])} {entry['actor']}: {act}" + (f" ({figures})" if figures else ""))


def change_key(rollout: Document) -> tuple[Any, ...]:
    """Equal as long as nothing happened that a person would call a change: growing figures are none."""
    look = rollout["look"]
    said = None if look is None else look["verdict"]
    waits = () if said is None else tuple(entry["what"] for entry in said.get("waits", ()))
    kind = None if said is None else (said["kind"], said.get("fault"))
    return rollout["state"], rollout["step"], rollout["weight"], kind, waits


def measure_name(comparison: Document) -> str:
    """What is compared, for people."""
    return str(comparison["measure"]).replace("_", " ")


def elapsed_ms(rollout: Document) -> int:
    """How long it was at its step when it was looked at last; 0 where it is at none."""
    if "step_since" not in rollout or rollout["look"] is None:
        return 0
    since, at = (datetime.fromisoformat(text) for text in (rollout["step_since"], rollout["look"]["at"]))
    return max(0, round((at - since).total_seconds() * 1_000))


def duration(milliseconds: int) -> str:
    """Hours, minutes and seconds, without those that are none."""
    seconds = milliseconds // 1_000
    if milliseconds < 1_000:
        return f"{milliseconds} ms" if milliseconds else "0 s"
    parts = ((seconds // 3_600, "h"), (seconds // 60 % 60, "min"), (seconds % 60, "s"))
    return " ".join(f"{amount} {unit}" for amount, unit in parts if amount)


def clock_time(rfc3339: str) -> str:
    """The time of day, in UTC as it came."""
    return f"{rfc3339[11:19]}Z"
