"""The results of runs as one HTML page that stands alone: figures in tables, and plots of the first seed over time."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import accumulate
from typing import Any

from weir.sim.runs.svg import SERIES_MAX, Series, line_chart

COLUMNS = (
    "offered",
    "rejected",
    "completed",
    "TTFT ms p50",
    "TTFT p95",
    "TTFT p99",
    "TPOT ms p50",
    "TPOT p95",
    "TPOT p99",
    "wait ms p95",
    "good/offered",
    "good/admitted",
    "tokens",
)
DOOR_COLUMNS = (
    "wrongly refused",
    "of offered",
    "wrongly admitted",
    "of admitted",
    "waits foreseen",
    "wait error ms p50",
    "error p95",
)
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto; }
th, td { padding: .2rem .6rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
svg { width: 100%; height: auto; font: 12px system-ui, sans-serif; }
"""


def figures_of(part: Mapping[str, Any]) -> list[str]:
    """One row of COLUMNS, as text, of a total, a workload class or a tenant."""
    goodput = part["goodput"]
    return [
        f"{part['offered']:,}",
        f"{sum(part['rejected'].values()):,}",
        f"{part['ended'].get('completed', 0):,}",
        *(_ms(part["ttft_ms"], name) for name in ("p50", "p95", "p99")),
        *(_ms(part["tpot_ms"], name) for name in ("p50", "p95", "p99")),
        _ms(part["queue_wait_ms"], "p95"),
        _percent(goodput["offered"]),
        _percent(goodput["admitted"]),
        f"{part['tokens']:,}",
    ]


def door_figures_of(part: Mapping[str, Any]) -> list[str]:
    """One row of DOOR_COLUMNS, as text, of a total, a workload class or a tenant."""
    door = part["door"]
    refused, admitted = door["wrongly_refused"], door["wrongly_admitted"]
    return [
        f"{refused['requests']:,}",
        _percent(refused["offered"]),
        f"{admitted['requests']:,}",
        _percent(admitted["admitted"]),
        f"{door['waits_foreseen']:,}",
        *(_ms(door["wait_error_ms"], name) for name in ("p50", "p95")),
    ]


def _ms(found: Mapping[str, float] | None, name: str) -> str:
    return f"{found[name]:,.1f}" if found else "–"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"


def page_of(result: Mapping[str, Any]) -> str:
    """The page of a result: the specification and one document per seed."""
    runs: Sequence[Mapping[str, Any]] = result["runs"]
    parts = [
        "<h1>Simulated run</h1>",
        _table(("setting", "value"), ([name, _shown(value)] for name, value in result["spec"].items())),
        "<h2>Each seed</h2>",
        _table(("seed", *COLUMNS, "tokens/s", "fairness gap"), (_seed_row(run) for run in runs)),
        "<h2>The door</h2>",
        _table(("seed", *DOOR_COLUMNS), ([str(run["seed"]), *door_figures_of(run["total"])] for run in runs)),
    ]
    for run in runs[:1]:
        parts += [
            f"<h2>Seed {run['seed']}: over time</h2>",
            *_charts(run["windows"]),
            f"<h2>Seed {run['seed']}: by workload class</h2>",
            _table(("class", *COLUMNS), ([name, *figures_of(part)] for name, part in run["classes"].items())),
            "<h2>By tenant</h2>",
            _table(("tenant", *COLUMNS), ([name, *figures_of(part)] for name, part in run["tenants"].items())),
            "<h2>The door, by tenant</h2>",
            _table(("tenant", *DOOR_COLUMNS), ([name, *door_figures_of(part)] for name, part in run["tenants"].items())),
            "<h2>Refusals and ends</h2>",
            _table(("what", "requests"), _ends(run["total"])),
        ]
    body = "\n".join(parts)
    head = f'<meta charset="utf-8"><title>Simulated run</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def _seed_row(run: Mapping[str, Any]) -> list[str]:
    rate, gap = run["tokens_per_s"], run["fairness_gap"]["tokens"]
    return [str(run["seed"]), *figures_of(run["total"]), "–" if rate is None else f"{rate:,.0f}", f"{gap:,.0f}"]


def _ends(total: Mapping[str, Any]) -> Iterable[list[str]]:
    for code, number in total["rejected"].items():
        yield [f"rejected: {code}", f"{number:,}"]
    for ending, number in total["ended"].items():
        yield [f"ended: {ending}", f"{number:,}"]


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}={each}" for name, each in value.items()) or "–"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "–"
    return "–" if value is None else str(value)


def _charts(windows: Mapping[str, Any]) -> list[str]:
    step_s = windows["seconds"]
    ttft = [Series(name, windows[f"ttft_ms_{name}"]) for name in ("p50", "p95")]
    tokens = [Series(kind, [each / step_s for each in windows[f"{kind}_tokens"]]) for kind in ("input", "output")]
    refusals = [Series(code, values) for code, values in _largest(windows["refusals"])]
    service = [Series(tenant, list(accumulate(values))) for tenant, values in _largest(windows["service"])]
    charts = (
        ("TTFT over time, by arrival", "ms", ttft),
        ("Refused at the door or expired while waiting, by reason", f"requests per {step_s} s", refusals),
        ("Service per tenant, accumulated", "tokens, output weighted", service),
        ("Tokens computed", "tokens per second", tokens),
    )
    return [f"<h3>{escape(title)}</h3>\n{line_chart(title, unit, step_s, lines)}" for title, unit, lines in charts]


def _largest(series: Mapping[str, Sequence[int]]) -> list[tuple[str, Sequence[int]]]:
    """Those with the greatest sums, and the rest as one."""
    ordered = sorted(series.items(), key=lambda each: (-sum(each[1]), each[0]))
    if len(ordered) <= SERIES_MAX:
        return ordered
    kept, rest = ordered[: SERIES_MAX - 1], ordered[SERIES_MAX - 1 :]
    return [*kept, (f"{len(rest)} others", [sum(values) for values in zip(*(values for _, values in rest), strict=True)])]


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    lines = ("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
