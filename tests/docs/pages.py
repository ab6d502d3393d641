"""Reads the project's Markdown: tables, code blocks, names in backticks. It decides nothing about what they should say."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

from tools.check_links import markdown_files

from weir.api.openapi.surface_description import SurfaceDescription

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "reference"
_CODE = re.compile(r"`([^`\n]+)`")
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block of code. page: relative to the project."""

    page: str
    language: str
    text: str


def text_of(page: str) -> str:
    """A page by its path in the project."""
    return (ROOT / page).read_text(encoding="utf-8")


def prose_of(page: str) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^ *```.*?^ *```$", "", text_of(page), flags=re.MULTILINE | re.DOTALL)


def names_in(text: str) -> list[str]:
    """Everything in backticks, in order."""
    return _CODE.findall(text)


def name_in(cell: str) -> str:
    """The first name in backticks of a cell; what the cell says where it has none."""
    return next(iter(names_in(cell)), cell.strip())


def table(page: str, first_heading: str) -> list[list[str]]:
    """The rows of every table of a page whose first column has this heading, as their cells."""
    rows: list[list[str]] = []
    inside = False
    for line in text_of(page).splitlines():
        if not line.startswith("|"):
            inside = False
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] == first_heading:
            inside = True
        elif inside and set(cells[0]) != {"-"}:
            rows.append(cells)
    assert rows, f"{page} has no table of {first_heading}"
    return rows


def records(page: str, first_heading: str) -> list[dict[str, str]]:
    """The same rows by their headings, which all tables of that first heading share."""
    lines = [line.strip("|").split("|") for line in text_of(page).splitlines() if line.startswith(f"| {first_heading} |")]
    headings = [[cell.strip() for cell in line] for line in lines]
    assert headings and all(one == headings[0] for one in headings), f"{page} has tables of {first_heading} that differ"
    return [dict(zip(headings[0], row, strict=True)) for row in table(page, first_heading)]


def page_of(surface: SurfaceDescription) -> str:
    """The page of one surface of the tenant API."""
    return f"docs/reference/{surface.page}"


def column(page: str, first_heading: str) -> list[str]:
    """The names of a table's first column, in order."""
    return [name_in(row[0]) for row in table(page, first_heading)]


def blocks_of(page: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    return [Block(page, language, dedent(text)) for _, language, text in _FENCE.findall(text_of(page))]


def pages() -> list[str]:
    """Every page of the project."""
    return [path.relative_to(ROOT).as_posix() for path in markdown_files(ROOT)]


def all_blocks(*languages: str) -> Iterator[Block]:
    """The blocks of these languages of every page."""
    for page in pages():
        yield from (block for block in blocks_of(page) if block.language in languages)
