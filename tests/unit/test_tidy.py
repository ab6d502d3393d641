"""The style checker finds what it says it finds, and nothing in what is allowed."""

import runpy
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

TIDY: dict[str, Any] = runpy.run_path(str(Path(__file__).resolve().parents[2] / "tools" / "tidy.py"))


def findings(root: Path, files: dict[str, str], exemptions: dict[tuple[str, str], str] | None = None) -> list[tuple[str, str]]:
    """(rule, subject) of every finding in a small project of these files."""
    for path, text in files.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(dedent(text), encoding="utf-8")
    found = TIDY["findings_in"](TIDY["read_modules"](root), exemptions or {})
    return [(finding.rule, finding.subject) for finding in found]


def function_with(body: str, parameters: str = "") -> dict[str, str]:
    return {"tools/one.py": f'"""Doc."""\ndef call({parameters}):\n' + body}


def test_a_clean_project_has_no_findings(tmp_path: Path) -> None:
    """Protects the rules from crying wolf: everything that is explicitly allowed, in one module."""
    source = '''
        """Doc."""
        from typing import Protocol, overload, override
        import asyncio

        class Port(Protocol):
            """A port."""
            def ask(self) -> int: ...
            @property
            def name(self) -> str: ...

        class Engine(Port):
            """Implements it."""
            def __init__(self, a, b, c, d, e, f): self.a = a
            def ask(self) -> int: return 1
            def _hidden(self): return 2
            @staticmethod
            def build(a, b, c, d, e, f):
                """Six of its own."""

        class Faster(Engine):
            """Two levels below the port."""
            def ask(self) -> int: return 2

        class Wire(asyncio.Protocol):
            """Its parent is documented elsewhere."""
            def data_received(self, chunk): return None

        class Marked:
            """Says that it overrides."""
            @override
            def ask(self): return 1
            @overload
            def tell(self): return 1

        class NotFound(Exception):
            title = "Not found"

        class _Private:
            def method(self): return 1

        def outer():
            """Doc."""
            def inner(): return 1
            return inner

        def _private(): return 1
    '''
    assert findings(tmp_path, {"src/weir/one.py": source, "src/weir/__init__.py": '"""Doc."""'}) == []


def test_long_files_and_functions_are_found(tmp_path: Path) -> None:
    """Protects the ceilings: one line above each is one too many."""
    longest = '"""Doc."""\n' + "x = 1\n" * 499
    assert findings(tmp_path, {"tools/one.py": longest}) == []
    assert findings(tmp_path, {"tools/one.py": longest + "x = 1\n"}) == [("file", "tools/one.py")]
    assert findings(tmp_path, function_with("    x = 1\n" * 59)) == []
    assert findings(tmp_path, function_with("    x = 1\n" * 60)) == [("function", "tools/one.py::call")]


@pytest.mark.parametrize(
    ("parameters", "found"),
    [
        ("a, b, c, d, e, f", False),
        ("a, b, c, d, e, f, g", True),
        ("a, /, b, c, *, d, e, f=1, g=2", True),
        ("a, b, c, d, e, *rest, **more", True),
        ("a, b, c, d, *rest, **more", False),
    ],
)
def test_parameters_are_counted(tmp_path: Path, parameters: str, found: bool) -> None:
    """Protects signatures: every way to take an argument counts."""
    expected = [("parameters", "tools/one.py::call")] if found else []
    assert findings(tmp_path, function_with("    return 1\n", parameters)) == expected


def test_self_does_not_count_as_a_parameter(tmp_path: Path) -> None:
    """Protects methods: six besides self are allowed, seven are not; a nested function has no self."""
    source = '"""Doc."""\nclass A:\n    def six(self, a, b, c, d, e, f): pass\n    def seven(self, a, b, c, d, e, f, g): pass\n'
    assert findings(tmp_path, {"tools/one.py": source}) == [("parameters", "tools/one.py::A.seven")]


@pytest.mark.parametrize(
    "decision",
    [
        "if x: pass",
        "for y in x: pass",
        "while x: pass",
        "z = [y for y in x]",
        "try: pass\n    except E: pass",
        "match x:\n        case 1: pass\n        case _: pass",
        "async def f(): pass\n    if x: pass",
    ],
)
def test_every_decision_counts(tmp_path: Path, decision: str) -> None:
    """Protects the bound of complexity: nine decisions are allowed, ten are not, whatever their kind."""
    assert findings(tmp_path, function_with(f"    {decision}\n" * 9)) == []
    assert findings(tmp_path, function_with(f"    {decision}\n" * 10)) == [("complexity", "tools/one.py::call")]


def test_inner_functions_count_for_themselves(tmp_path: Path) -> None:
    """Protects closures: their decisions are not added to the function around them."""
    inner = "    def inner():\n" + "        if x: pass\n" * 9
    assert findings(tmp_path, function_with(inner + "    if x: pass\n" * 9)) == []


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("tools/key_helper.py", "Fine"),
        ("tools/common/one.py", "Fine"),
        ("tools/one.py", "KeyManager"),
        ("tools/one.py", "HTTPHandler"),
        ("tools/one.py", "BaseStore"),
        ("tools/one.py", "InfoPage"),
    ],
)
def test_empty_words_in_names_are_found(tmp_path: Path, path: str, name: str) -> None:
    """Protects names: words that say nothing are found as whole words of modules, packages and classes."""
    assert [rule for rule, _ in findings(tmp_path, {path: f'"""Doc."""\nclass {name}: pass\n'})] == ["name"]


def test_parts_of_words_are_no_words(tmp_path: Path) -> None:
    """Protects good names: database, baseline and utility only contain a forbidden word."""
    assert findings(tmp_path, {"tools/database.py": '"""Doc."""\nclass BaselineUtility: pass\n'}) == []


def test_module_names_are_unique_in_the_source(tmp_path: Path) -> None:
    """Protects stack traces: a basename occurs once, except in tests and for packages."""
    doc = '"""Doc."""'
    twice = {"src/weir/a/store.py": doc, "src/weir/b/store.py": doc, "tests/store.py": doc}
    packages = {"src/weir/a/__init__.py": doc, "src/weir/b/__init__.py": doc}
    assert findings(tmp_path, twice | packages) == [("basename", "src/weir/b/store.py")]


def test_missing_docstrings_are_found(tmp_path: Path) -> None:
    """Protects readers: modules, public classes and public functions of the source, modules of tools, and tests."""
    source = "class A:\n    def method(self): return 1\ndef function(): return 1\n"
    files = {"src/weir/one.py": source, "tools/two.py": source, "tests/test_one.py": "def test_it(): pass\ndef other(): pass\n"}
    assert findings(tmp_path, files) == [
        ("docstring", "src/weir/one.py"),
        ("docstring", "src/weir/one.py::A"),
        ("docstring", "src/weir/one.py::A.method"),
        ("docstring", "src/weir/one.py::function"),
        ("docstring", "tests/test_one.py::test_it"),
        ("docstring", "tools/two.py"),
    ]


def test_unfinished_work_is_found(tmp_path: Path) -> None:
    """Protects what is called done: a marker left in a comment is a finding, part of a word is not."""
    marker = "TO" + "DO"
    assert findings(tmp_path, {"tools/one.py": f'"""Doc."""\n# {marker}: later\n'}) == [("unfinished", "tools/one.py")]
    assert findings(tmp_path, {"tools/one.py": f'"""Doc."""\nMAS{marker}N = 1\n'}) == []


def test_an_exemption_covers_its_finding_and_must_be_needed(tmp_path: Path) -> None:
    """Protects the table of exceptions: it silences exactly what it names, and a stale row is a finding itself."""
    files = function_with("    x = 1\n" * 60)
    used, stale = ("function", "tools/one.py::call"), ("file", "tools/one.py")
    assert findings(tmp_path, files, {used: "reason"}) == []
    assert findings(tmp_path, files, {used: "reason", stale: "reason"}) == [("exemption", "tools/one.py")]


def test_every_exemption_has_a_reason() -> None:
    """Protects the table of exceptions: each row says why, in words."""
    assert all(len(reason.split()) >= 4 for reason in TIDY["EXEMPTIONS"].values())


def test_the_command_reports_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Protects `make check`: one line per finding with its place, and a status that stops the build."""
    findings(tmp_path, {"src/weir/one.py": "x = 1\n"})
    assert TIDY["main"]([str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "src/weir/one.py:1: docstring: the module has none",
        "tidy: 1 files, 1 findings",
    ]
    findings(tmp_path, {"src/weir/one.py": '"""Doc."""\n'})
    assert TIDY["main"]([str(tmp_path)]) == 0
