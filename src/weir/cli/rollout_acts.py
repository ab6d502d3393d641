"""`weir rollout`: move an alias to another revision step by step through the management API, and watch it go.

A plan is a file with the fields of the API's `plan`, or steps on the command line; what neither names is the default.
"""

import json
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

from weir.cli.admin_client import JsonOption, admin_connection
from weir.cli.http_api import CommandFailed, Connection, connected, segment
from weir.cli.rollout_watch import watch
from weir.cli.tables import print_json, print_table

PLAN_BYTES_MAX = 64 * 1024
_STEP_FORM = "WEIGHT:SAMPLES:DURATION, like 10:500:10m"

commands = typer.Typer(no_args_is_help=True)
commands.command()(watch)
Rollout = Annotated[str, typer.Argument(help="The rollout's id.")]


@commands.command()
@connected(admin_connection)
def start(
    connection: Connection,
    alias: Annotated[str, typer.Argument(help="The alias that moves.")],
    revision: Annotated[str, typer.Argument(help="The id of the revision that it moves to.")],
    tenant: Annotated[str | None, typer.Option(help="Whose alias; else everybody's.")] = None,
    plan: Annotated[Path | None, typer.Option(help="A plan: a file of TOML (.toml) or JSON.")] = None,
    step: Annotated[list[str] | None, typer.Option(help="WEIGHT:SAMPLES:DURATION (repeatable, in order).")] = None,
) -> None:
    """Begin to move an alias: evaluation first, then a growing share of the traffic, back by itself if it is worse."""
    chosen = {} if plan is None else _read_plan(plan)
    if step:
        chosen["steps"] = [_step(text) for text in step]
    body = {"alias": alias, "revision": revision, "tenant": tenant, "plan": chosen or None}
    print_json(connection.call("POST", "/admin/v1/rollouts", body))


def _read_plan(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            text = file.read(PLAN_BYTES_MAX + 1).decode()
        document = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
        json.dumps(document)
    except OSError as fault:
        raise CommandFailed(f"The plan cannot be read: {fault.strerror}.") from None
    except (ValueError, TypeError, RecursionError) as fault:  # TOML has dates, which no plan has
        raise CommandFailed(f"The plan is no {'TOML' if path.suffix == '.toml' else 'JSON'} of a plan: {fault}.") from None
    if not isinstance(document, dict):
        raise CommandFailed("The plan is not an object with fields.")
    return document


def _step(text: str) -> dict[str, int]:
    """A step of the command line; what its numbers may be is checked by the cell."""
    from weir import errors
    from weir.sim.runs.terms import seconds

    weight, _, rest = text.partition(":")
    samples, _, duration = rest.partition(":")
    if not (weight.isdecimal() and samples.isdecimal() and duration):
        raise CommandFailed(f"--step takes {_STEP_FORM}, not {text!r}.")
    try:
        time_min_s = seconds("--step", duration)
    except errors.InvalidRequest as refused:
        raise CommandFailed(refused.detail) from None
    return {"weight": int(weight), "samples_min": int(samples), "time_min_ms": round(time_min_s * 1_000)}


@commands.command("list")
@connected(admin_connection)
def list_rollouts(
    connection: Connection,
    alias: Annotated[str | None, typer.Option(help="Only those of aliases of this name.")] = None,
    only_open: Annotated[bool, typer.Option("--open", help="Only those that are not over.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List rollouts, newest first."""
    query = {"alias": alias, "open": "true" if only_open else None}
    rollouts = connection.call("GET", "/admin/v1/rollouts", query=query)["rollouts"]
    if as_json:
        print_json(rollouts)
        return
    columns = ("rollout", "alias", "tenant", "from", "to", "state", "step", "weight", "proposed by", "at")
    print_table(columns, [_row(rollout) for rollout in rollouts], numeric=("step", "weight"))


def _row(rollout: dict[str, Any]) -> tuple[str, ...]:
    step = "" if rollout["step"] is None else f"{rollout['step'] + 1}/{len(rollout['plan']['steps'])}"
    named = (rollout["id"], rollout["alias"], rollout["tenant"] or "", rollout["stable"], rollout["canary"])
    state = rollout["state"].replace("_", " ")
    return *named, state, step, f"{rollout['weight']} %", rollout["proposed_by"], rollout["proposed_at"]


@commands.command()
@connected(admin_connection)
def show(connection: Connection, rollout: Rollout) -> None:
    """Show one rollout with its plan, its latest analysis and its history."""
    print_json(connection.call("GET", _path(rollout)))


@commands.command()
@connected(admin_connection)
def pause(connection: Connection, rollout: Rollout) -> None:
    """Hold a rollout where it is; a revision that is worse still goes back."""
    print_json(connection.call("POST", f"{_path(rollout)}/pause"))


@commands.command()
@connected(admin_connection)
def resume(connection: Connection, rollout: Rollout) -> None:
    """Let a paused rollout go on."""
    print_json(connection.call("POST", f"{_path(rollout)}/resume"))


@commands.command()
@connected(admin_connection)
def promote(connection: Connection, rollout: Rollout) -> None:
    """Skip what is left of its steps: everybody gets the new revision now."""
    print_json(connection.call("POST", f"{_path(rollout)}/promote"))


@commands.command("roll-back")
@connected(admin_connection)
def roll_back(
    connection: Connection,
    rollout: Rollout,
    detail: Annotated[str | None, typer.Option(help="Why, one line for people.")] = None,
) -> None:
    """Send everybody to the stable revision, at once; what runs keeps the revision that it began with."""
    print_json(connection.call("POST", f"{_path(rollout)}/roll-back", {"detail": detail}))


def _path(rollout: str) -> str:
    return f"/admin/v1/rollouts/{segment(rollout)}"
