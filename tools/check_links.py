"""Checks the project's Markdown: every relative link and anchor leads somewhere, and nothing is left unfinished.

Run by `make docs`; exits 1 with one line per finding. Addresses with a scheme are not opened: the check needs no network.
Anchors are made of headings as GitHub makes them. Code, fenced or inline, is not read.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

SKIPPED_FOLDERS = frozenset({".git", ".venv", "build", "dist", "node_modules", "state", "bench-results", ".pytest_cache"})
FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})")
INLINE_CODE = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)")
INLINE_LINK = re.compile(r"\[[^\]]*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
REFERENCE = re.compile(r"^ {0,3}\[[^\]]+\]:\s*<?([^\s>]+)>?")
HEADING = re.compile(r"^ {0,3}#{1,6}\s+(.*?)\s*#*\s*$")
EXPLICIT_ANCHOR = re.compile(r"<a\s+(?:id|name)=\"([^\"]+)\"")
SCHEME = re.compile(r"^[a-z][a-z0-9+.-]*:", re.IGNORECASE)
UNFINISHED = re.compile(r"\b(TO" r"DO|FIX" r"ME|TB" r"D|Lorem ip" r"sum)\b")


def markdown_files(root: Path) -> list[Path]:
    """Every Markdown file of the project, outside of folders that are built or installed."""
    found = (path for path in root.rglob("*.md") if not SKIPPED_FOLDERS.intersection(path.relative_to(root).parts))
    return sorted(found)


def prose_lines(text: str) -> Iterator[tuple[int, str]]:
    """(line number, line) outside of fenced code."""
    fence = ""
    for number, line in enumerate(text.splitlines(), 1):
        opened = FENCE.match(line)
        if fence:
            if opened and opened[1].startswith(fence) and line.strip() == opened[1]:
                fence = ""
        elif opened:
            fence = opened[1]
        else:
            yield number, line


def anchors_of(text: str) -> set[str]:
    """Anchors of a page: its headings as GitHub slugs, numbered where they repeat, and explicit ones."""
    anchors: set[str] = set()
    seen: dict[str, int] = {}
    for _, line in prose_lines(text):
        anchors.update(EXPLICIT_ANCHOR.findall(line))
        if heading := HEADING.match(line):
            slug = slug_of(heading[1])
            count = seen.get(slug, 0)
            seen[slug] = count + 1
            anchors.add(f"{slug}-{count}" if count else slug)
    return anchors


def slug_of(heading: str) -> str:
    """A heading as an anchor: lower case, links and marks gone, spaces as hyphens."""
    shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")


def targets_in(line: str) -> list[str]:
    """Link targets of one line."""
    bare = INLINE_CODE.sub("", line)
    reference = REFERENCE.match(bare)
    return INLINE_LINK.findall(bare) + ([reference[1]] if reference else [])


def findings_in(root: Path) -> Iterator[str]:
    """One sentence for each dead link and each marker of unfinished work."""
    for page in markdown_files(root):
        name = page.relative_to(root).as_posix()
        for number, line in prose_lines(page.read_text(encoding="utf-8")):
            for target in targets_in(line):
                if reason := fault_of(root, page, target):
                    yield f"{name}:{number}: {target}: {reason}"
            if marker := UNFINISHED.search(INLINE_CODE.sub("", line)):
                yield f"{name}:{number}: {marker[0]} left behind"


def fault_of(root: Path, page: Path, target: str) -> str | None:
    """Why a link leads nowhere, or None."""
    if SCHEME.match(target) or target.startswith("//"):
        return None
    path, _, anchor = target.partition("#")
    linked = page if not path else (root / path.lstrip("/") if path.startswith("/") else page.parent / path)
    if not linked.exists():
        return "no such file"
    if not linked.resolve().is_relative_to(root.resolve()):
        return "leads out of the project"
    if anchor and linked.suffix == ".md" and anchor not in anchors_of(linked.read_text(encoding="utf-8")):
        return "no such heading"
    return None


def main(arguments: Sequence[str]) -> int:
    """Check the project, or the folder given; the exit status."""
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent
    findings = list(findings_in(root))
    print(*findings, sep="\n", end="\n" if findings else "")
    print(f"links: {len(markdown_files(root))} pages, {len(findings)} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
