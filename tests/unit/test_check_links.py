"""The link checker finds dead links and unfinished pages, and leaves code and addresses alone."""

import runpy
from pathlib import Path
from typing import Any

import pytest

CHECK: dict[str, Any] = runpy.run_path(str(Path(__file__).resolve().parents[2] / "tools" / "check_links.py"))

PAGE = """# One page

## What it's for: `make docs` & more
## Twice
## Twice
<a id="explicit"></a>
"""


def findings(root: Path, text: str) -> list[str]:
    (root / "docs").mkdir(exist_ok=True)
    (root / "docs" / "page.md").write_text(PAGE, encoding="utf-8")
    (root / "README.md").write_text(text, encoding="utf-8")
    return list(CHECK["findings_in"](root))


@pytest.mark.parametrize(
    "text",
    [
        '[a](docs/page.md) and [b](docs/page.md#twice-1) and ![c](<docs/page.md> "title")',
        "[a](docs/page.md#what-its-for-make-docs--more) [b](docs/page.md#explicit) [c](/docs/page.md)",
        "# Here\n[a](#here)\n[a]: docs/page.md",
        "[a](https://example.invalid/x) [b](mailto:a@example.invalid) [c](//example.invalid)",
        "`[a](missing.md)` and ``a ` [b](missing.md)``",
        "```\n[a](missing.md)\n```\n~~~~\n```\n[b](missing.md)\n~~~~",
        "[a](docs)",
    ],
)
def test_good_pages_have_no_findings(tmp_path: Path, text: str) -> None:
    """Protects the check from crying wolf: files, folders, anchors, addresses and code."""
    assert findings(tmp_path, text) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("x\n[a](missing.md)", "README.md:2: missing.md: no such file"),
        ("[a](docs/page.md#thrice)", "README.md:1: docs/page.md#thrice: no such heading"),
        ("[a](#nowhere)", "README.md:1: #nowhere: no such heading"),
        ("[a]: missing.md", "README.md:1: missing.md: no such file"),
        ("[a](..)", "README.md:1: ..: leads out of the project"),
        ("```\n```\n[a](missing.md)", "README.md:3: missing.md: no such file"),
        ("This is TBD.", "README.md:1: TBD left behind"),
    ],
)
def test_dead_links_and_unfinished_pages_are_found(tmp_path: Path, text: str, found: str) -> None:
    """Protects readers: each dead link is named with its line and the reason."""
    assert findings(tmp_path, text) == [found]


def test_the_command_reports_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Protects `make docs`: findings are printed and the status stops the build."""
    findings(tmp_path, "[a](missing.md)")
    assert CHECK["main"]([str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "README.md:1: missing.md: no such file",
        "links: 2 pages, 1 findings",
    ]
    findings(tmp_path, "fine")
    assert CHECK["main"]([str(tmp_path)]) == 0
