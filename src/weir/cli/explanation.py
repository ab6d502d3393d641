"""`weir explain`: what happened to one request, and why, as a timeline or as JSON.

The cell remembers its latest requests, admitted or rejected; older ones are refused with what it still has. Prompt and output
text is in none of them.
"""

import textwrap
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from weir.cli.admin_client import JsonOption, admin_connection
from weir.cli.http_api import Connection, connected, segment
from weir.cli.tables import dollars, print_json, print_table, thousands

_ANY_TENANT = "-"
_MONEY, _TIME = "_microusd", "_ms"
_DETAILS_CHARS = 90
"""With its time and name an event fits a usual terminal."""

_SCOPE = ("tenant", "application", "key", "alias", "service_class")


@connected(admin_connection)
def explain(
    connection: Connection,
    request_id: Annotated[str, typer.Argument(help="The id that every answer has as x-request-id.")],
    tenant: Annotated[str | None, typer.Option(help="Whose request; needed where several tenants used the id.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what happened to a request, and why."""
    path = f"/admin/v1/generations/{segment(tenant or _ANY_TENANT)}/{segment(request_id)}/explanation"
    explanation = connection.call("GET", path)
    if as_json:
        print_json(explanation)
        return
    for timeline in explanation["timelines"]:
        print(_heading(explanation, timeline))
        rows = [(f"{event['at_ms']:.1f}", _words(event["event"]), _wrapped(_details(event))) for event in timeline["events"]]
        print_table(("ms", "event", "details"), rows, numeric=("ms",))


def _heading(explanation: Mapping[str, Any], timeline: Mapping[str, Any]) -> str:
    """Which run this is, how it stands, and what the table under it does not show."""
    named = f"{explanation['tenant']} / {explanation['request_id']}"
    if "execution" in timeline:
        named += f", execution {timeline['execution']}"
    facts = [f"{timeline['status']}, arrived {timeline['arrived_at']}"]
    if timeline.get("rejections", 1) > 1:
        facts.append(f"rejected {thousands(timeline['rejections'])} times, at last so")
    if timeline["delivery_steps"]:
        facts.append(f"{thousands(timeline['delivery_steps'])} further delivery steps")
    if timeline["dropped_events"]:
        facts.append(f"{thousands(timeline['dropped_events'])} earlier events are not kept")
    return f"{named}: {'; '.join(facts)}"


def _words(name: str) -> str:
    return name.replace("_", " ")


def _wrapped(text: str) -> str:
    return textwrap.fill(text, _DETAILS_CHARS, break_long_words=False, break_on_hyphens=False)


def _details(event: Mapping[str, Any]) -> str:
    """The figures of an event, one after the other."""
    return ", ".join(_detail(name, value) for name, value in event.items() if name not in ("event", "at_ms"))


def _detail(name: str, value: Any) -> str:
    if name in _LISTED:
        return f"{_words(name)}: {'; '.join(_LISTED[name](one) for one in value)}"
    if isinstance(value, dict):
        return f"{_words(name)}: {_scope(value) if name == 'scope' else _details(value)}"
    if name.endswith(_MONEY):
        return f"{_words(name.removesuffix(_MONEY))} {dollars(value)}"
    if name.endswith(_TIME):
        return f"{_words(name.removesuffix(_TIME))} {_value(value)} ms"
    return f"{_words(name)} {_value(value)}"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.1f}"
    return thousands(value) if isinstance(value, int) else str(value)


def _scope(scope: Mapping[str, Any]) -> str:
    """A scope as its narrowing parts, or the tenant where there are none."""
    parts = [f"{_words(part)} {scope[part]}" for part in _SCOPE if scope.get(part) is not None]
    return " ".join(parts[1:] or parts)


def _take(take: Mapping[str, Any]) -> str:
    return f"{thousands(take['units'])} of {_words(take['limit'])} ({_scope(take) or 'tenant'})"


def _candidate(candidate: Mapping[str, Any]) -> str:
    judged = candidate.get("why_not") or f"score {thousands(candidate['score'])}"
    if "cached_tokens" in candidate:
        judged += f", {thousands(candidate['cached_tokens'])} cached"
    return f"{candidate['replica']} ({candidate['running']} running, {candidate['free']} free: {judged})"


_LISTED: Mapping[str, Callable[[Any], str]] = {"windows": str, "scopes": _scope, "takes": _take, "candidates": _candidate}
"""Figures that are lists, and how one of them reads."""
