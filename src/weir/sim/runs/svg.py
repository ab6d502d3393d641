"""Line charts as plain SVG text: axes with round ticks, one path per series, a legend. No script, no dependency.

A gap in a series (None) is a gap in its line. Texts are escaped; colours are told apart without red and green alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 900, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 180, 20, 40
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#7f7f7f", "#000000")
SERIES_MAX = len(COLOURS)


@dataclass(frozen=True, slots=True)
class Series:
    """A line: one value per step of the chart, None where there is none."""

    name: str
    values: Sequence[float | None]


def line_chart(title: str, unit: str, step_s: float, lines: Sequence[Series]) -> str:
    """A chart over time. step_s: seconds between two values; at most SERIES_MAX lines."""
    assert len(lines) <= SERIES_MAX
    steps = max((len(line.values) for line in lines), default=0)
    top = _round_up(max((value for line in lines for value in line.values if value is not None), default=0.0))
    across, up = (WIDTH - _LEFT - _RIGHT) / max(1, steps - 1), (HEIGHT - _TOP - _BOTTOM) / top
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">',
        *_axes(unit, top, step_s * max(1, steps - 1)),
    ]
    for place, (line, colour) in enumerate(zip(lines, COLOURS, strict=False)):
        points = [
            None if value is None else (_LEFT + index * across, HEIGHT - _BOTTOM - value * up)
            for index, value in enumerate(line.values)
        ]
        parts.append(f'<path d="{_path(points)}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        y = _TOP + 8 + 18 * place
        x = WIDTH - _RIGHT + 12
        parts.append(f'<rect x="{x}" y="{y - 5}" width="14" height="4" fill="{colour}"/>')
        parts.append(f'<text x="{x + 20}" y="{y}">{escape(line.name[:22])}</text>')
    return "\n".join([*parts, "</svg>"])


def _axes(unit: str, top: float, span_s: float) -> list[str]:
    right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM
    parts = [f'<text x="{_LEFT}" y="{_TOP - 8}">{escape(unit)}</text>']
    for quarter in range(5):
        y = bottom - (bottom - _TOP) * quarter / 4
        x = _LEFT + (right - _LEFT) * quarter / 4
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{right}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_tick(top * quarter / 4)}</text>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{_tick(span_s * quarter / 4)} s</text>')
    return parts


def _tick(value: float) -> str:
    return f"{value / 1e6:,.4g} M" if value >= 1e6 else f"{value:,.6g}"


def _path(points: Sequence[tuple[float, float] | None]) -> str:
    parts: list[str] = []
    is_drawing = False
    for index, point in enumerate(points):
        if point is not None:
            alone = not is_drawing and (index + 1 == len(points) or points[index + 1] is None)
            parts.append(f"{'L' if is_drawing else 'M'}{point[0]:.1f} {point[1]:.1f}" + ("h1" if alone else ""))
        is_drawing = point is not None
    return "".join(parts)


def _round_up(value: float) -> float:
    """The next of 1, 2, 4, 10 times a power of ten, > 0."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1, 2, 4, 10) if factor * power >= value * 0.999_999)
