"""Answers as a person likes to read them: tables with right-aligned numbers, or JSON.

Rich is imported when a table is printed, not before.
"""

import json
from collections.abc import Sequence
from typing import Any

MICROS = 1_000_000

WIDTH_MAX = 10_000
"""A table is as wide as its cells: a narrow terminal wraps a line, which is better than an amount without its last digits."""


def print_json(document: Any) -> None:
    """A document as indented JSON; what a terminal would obey is escaped."""
    text = json.dumps(document, indent=2, ensure_ascii=False)
    print("".join(each if each.isprintable() or each == "\n" else json.dumps(each)[1:-1] for each in text))


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[str] = (), totals: Sequence[str] = ()
) -> None:
    """Rows of ready text under their headings; numeric columns are right-aligned. totals: the cells of a last, summing row."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE, show_footer=bool(totals), header_style="bold", footer_style="bold")
    for name, total in zip(columns, totals or [""] * len(columns), strict=True):
        table.add_column(name, Text(total), justify="right" if name in numeric else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console(width=WIDTH_MAX).print(table)


def plain(text: str) -> str:
    """On one line, and without what a terminal would obey."""
    return "".join(character if character.isprintable() else " " for character in text)


def thousands(amount: int) -> str:
    """An integer with separators."""
    return f"{amount:,}"


def dollars(microusd: int, digits: int | None = None) -> str:
    """Micro-dollars as dollars with so many decimal digits, or as many as the amount has, at least two."""
    whole, rest = divmod(microusd, MICROS)
    return f"${whole:,}.{f'{rest:06d}'[: digits or digits_of(microusd)]}"


def digits_of(microusd: int) -> int:
    """Decimal digits that show an amount of micro-dollars in full as dollars, at least two."""
    return max(2, len(f"{microusd % MICROS:06d}".rstrip("0")))


def yes_or_blank(flag: bool) -> str:
    """A mark for what is true."""
    return "yes" if flag else ""
