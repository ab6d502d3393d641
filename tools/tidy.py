"""The project's own style rules, checked on the syntax tree; run by `make check`, exits 1 with one line per finding.

    file        ≤ 500 lines                      function    ≤ 60 lines
    parameters  ≤ 6; self and cls do not count, keyword-only ones and * and ** do
    complexity  ≤ 10: 1 + if, for, while, except, comprehension, and each case except a last wildcard
    name        no forbidden word in a module, package or class name
    basename    module names are unique under src/weir
    docstring   src: modules, public classes, public functions; tools, benchmarks: modules; tests: test functions.
                Exempt: dunders, bodies of `...`, overrides, and classes with a `title`, which says it
    unfinished  no marker of unfinished work

Ceilings only go down. An exception is a row of EXEMPTIONS with its reason; a row that nothing needs is a finding too.
"""

import ast
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

FILE_LINES_MAX = 500
FUNCTION_LINES_MAX = 60
PARAMETERS_MAX = 6
COMPLEXITY_MAX = 10
FORBIDDEN_WORDS = frozenset(["util", "helper", "common", "manager", "handler", "processor", "base", "misc", "data", "info"])
FOLDERS = ("src", "tests", "tools", "benchmarks")
UNFINISHED = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X)\b")
# A name defined by one of these says nothing about its methods, so deriving from it makes no method an override.
PLAIN_PARENTS = frozenset(
    ["Protocol", "Exception", "StrEnum", "IntEnum", "Enum", "msgspec.Struct", "Generic", "ABC", "NamedTuple", "TypedDict"]
)

EXEMPTIONS: Mapping[tuple[str, str], str] = {
    ("parameters", "src/weir/cli/up.py::up"): "each is an option of the command line",
    ("parameters", "src/weir/cli/run_control.py::control"): "each is an option of the command line",
    ("parameters", "src/weir/cli/sim.py::run"): "each is an option of the command line",
    ("parameters", "src/weir/cli/revision.py::register"): "each is an option of the command line",
    ("parameters", "src/weir/cli/trusted_key.py::add"): "each is an option of the command line",
    ("parameters", "src/weir/cli/pool.py::create"): "each is an option of the command line",
    ("parameters", "src/weir/cli/limit.py::set_limits"): "each is an option of the command line",
    ("parameters", "src/weir/cli/limit.py::remove"): "each is an option of the command line",
    ("parameters", "src/weir/cli/limit.py::show"): "each is an option of the command line",
    ("parameters", "src/weir/cli/tenant.py::create"): "each is an option of the command line",
    ("parameters", "src/weir/cli/tenant.py::change"): "each is an option of the command line",
}
"""(rule, "path::qualified name" or "path") → the reason."""

FunctionNode: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Finding:
    """One broken rule. subject: "path" or "path::qualified name"."""

    rule: str
    subject: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.subject.partition('::')[0]}:{self.line}: {self.rule}: {self.message}"


@dataclass(frozen=True)
class Module:
    """A parsed file. path: relative to the project, with slashes."""

    path: str
    text: str
    tree: ast.Module


@dataclass(frozen=True)
class Definition:
    """A class or function with where it stands. owner: the class around it; public: reachable by public names only."""

    node: ast.ClassDef | FunctionNode
    name: str
    owner: ast.ClassDef | None
    public: bool


def definitions_of(tree: ast.Module) -> Iterator[Definition]:
    """Every class and function of a module, outermost first; what stands inside a function is not public."""
    waiting: list[tuple[ast.AST, str, ast.ClassDef | None, bool]] = [(tree, "", None, True)]
    while waiting:
        parent, prefix, owner, public = waiting.pop()
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                shown = public and not node.name.startswith("_")
                yield Definition(node, prefix + node.name, owner, shown)
                inner_owner = node if isinstance(node, ast.ClassDef) else None
                waiting.append((node, f"{prefix}{node.name}.", inner_owner, shown and inner_owner is not None))
            else:
                waiting.append((node, prefix, owner, public))


def parameters_of(function: FunctionNode, owner: ast.ClassDef | None) -> int:
    """Number of parameters; the first one of a method that is not static does not count."""
    arguments = function.args
    number = len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs)
    number += (arguments.vararg is not None) + (arguments.kwarg is not None)
    return number - (owner is not None and "staticmethod" not in decorators_of(function))


def decorators_of(node: ast.ClassDef | FunctionNode) -> set[str]:
    """Last words of the decorators: `typing.override` and `override` are both "override"."""
    return {word for decorator in node.decorator_list if (word := _last_word(decorator))}


def _last_word(node: ast.expr) -> str:
    match node:
        case ast.Call(func=called) | ast.Subscript(value=called):
            return _last_word(called)
        case ast.Attribute(attr=word) | ast.Name(id=word):
            return word
    return ""


def complexity_of(function: FunctionNode) -> int:
    """1 + the decisions of a function, without those of functions inside it."""
    decisions = 1
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            continue
        decisions += _decisions_at(node)
        waiting += ast.iter_child_nodes(node)
    return decisions


def _decisions_at(node: ast.AST) -> int:
    if isinstance(node, ast.If | ast.For | ast.AsyncFor | ast.While | ast.ExceptHandler | ast.comprehension):
        return 1
    if isinstance(node, ast.Match):
        last = node.cases[-1]
        wildcard = isinstance(last.pattern, ast.MatchAs) and last.pattern.pattern is None and last.guard is None
        return len(node.cases) - wildcard
    return 0


def words_of(name: str) -> list[str]:
    """The words of a snake_case or CamelCase name, in lower case."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


# ── the rules ────────────────────────────────────────────────────────────────────────────────────────────────────────


def check_file(module: Module) -> Iterator[Finding]:
    """Length, name and markers of unfinished work."""
    lines = module.text.splitlines()
    if len(lines) > FILE_LINES_MAX:
        yield Finding("file", module.path, 1, f"{len(lines)} lines, at most {FILE_LINES_MAX}")
    for part in Path(module.path).with_suffix("").parts:
        yield from _check_name(module.path, part, 1)
    for number, line in enumerate(lines, 1):
        if marker := UNFINISHED.search(line):
            yield Finding("unfinished", module.path, number, f"{marker[0]} left behind")


def _check_name(subject: str, name: str, line: int) -> Iterator[Finding]:
    for word in FORBIDDEN_WORDS.intersection(words_of(name)):
        yield Finding("name", subject, line, f"{name!r} says {word!r}: name what it is")


def check_definition(module: Module, definition: Definition) -> Iterator[Finding]:
    """Size, parameters, complexity and name of one class or function."""
    node, subject = definition.node, f"{module.path}::{definition.name}"
    if isinstance(node, ast.ClassDef):
        yield from _check_name(subject, node.name, node.lineno)
        return
    for rule, found, ceiling in (
        ("function", (node.end_lineno or node.lineno) - node.lineno + 1, FUNCTION_LINES_MAX),
        ("parameters", parameters_of(node, definition.owner), PARAMETERS_MAX),
        ("complexity", complexity_of(node), COMPLEXITY_MAX),
    ):
        if found > ceiling:
            yield Finding(rule, subject, node.lineno, f"{definition.name} has {found}, at most {ceiling}")


class Docstrings:
    """Who must have a docstring; knows every class of the source, to tell an override from a new method."""

    def __init__(self, modules: Sequence[Module]) -> None:
        classes = [node for module in modules for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)]
        self._parents: dict[str, list[str]] = {}
        self._methods: dict[str, set[str]] = {}
        for node in classes:
            functions = (child for child in node.body if isinstance(child, FunctionNode))
            self._parents.setdefault(node.name, []).extend(map(_dotted_name, node.bases))
            self._methods.setdefault(node.name, set()).update(function.name for function in functions)

    def check(self, module: Module) -> Iterator[Finding]:
        """The findings of one module."""
        folder = module.path.partition("/")[0]
        if folder != "tests" and ast.get_docstring(module.tree) is None:
            yield Finding("docstring", module.path, 1, "the module has none")
        if folder not in ("src", "tests"):
            return
        needed = self._needed_in_source if folder == "src" else _needed_in_tests
        for definition in definitions_of(module.tree):
            if needed(definition) and ast.get_docstring(definition.node) is None:
                subject = f"{module.path}::{definition.name}"
                yield Finding("docstring", subject, definition.node.lineno, f"{definition.name} has none")

    def _needed_in_source(self, definition: Definition) -> bool:
        node = definition.node
        if not definition.public:
            return False
        if isinstance(node, ast.ClassDef):
            return not any(_assigns_title(child) for child in node.body)
        if decorators_of(node) & {"overload", "override", "setter"} or _is_abstract(node):
            return False
        return definition.owner is None or not self._overrides(definition.owner, node.name)

    def _overrides(self, owner: ast.ClassDef, method: str) -> bool:
        """Whether a class above `owner` defines the method, or is from elsewhere, where we cannot look."""
        waiting, seen = [_dotted_name(parent) for parent in owner.bases], set(PLAIN_PARENTS)
        while waiting:
            dotted = waiting.pop()
            if dotted in seen:
                continue
            seen.add(dotted)
            name = dotted.rpartition(".")[2]
            if name not in self._methods or method in self._methods[name]:
                return True
            waiting += self._parents[name]
        return False


def _dotted_name(parent: ast.expr) -> str:
    return ast.unparse(parent).partition("[")[0]


def _needed_in_tests(definition: Definition) -> bool:
    return isinstance(definition.node, FunctionNode) and definition.node.name.startswith("test_")


def _is_abstract(function: FunctionNode) -> bool:
    match function.body:
        case [ast.Expr(value=ast.Constant(value=value))]:
            return value is Ellipsis
    return False


def _assigns_title(node: ast.stmt) -> bool:
    return any(isinstance(child, ast.Name) and child.id == "title" for child in ast.walk(node) if isinstance(node, ast.Assign))


def check_basenames(modules: Sequence[Module]) -> Iterator[Finding]:
    """Two modules of one name are told apart in no stack trace."""
    first: dict[str, str] = {}
    for module in modules:
        stem = Path(module.path).stem
        if not module.path.startswith("src/") or stem == "__init__":
            continue
        other = first.setdefault(stem, module.path)
        if other != module.path:
            yield Finding("basename", module.path, 1, f"{other} has the same name")


def findings_in(modules: Sequence[Module], exemptions: Mapping[tuple[str, str], str]) -> list[Finding]:
    """Every finding that no exemption covers, and a finding for each exemption that covers nothing."""
    docstrings = Docstrings(modules)
    found = list(check_basenames(modules))
    for module in modules:
        found += check_file(module)
        found += docstrings.check(module)
        for definition in definitions_of(module.tree):
            found += check_definition(module, definition)
    covered = {(finding.rule, finding.subject) for finding in found}
    kept = [finding for finding in found if (finding.rule, finding.subject) not in exemptions]
    for rule, subject in exemptions:
        if (rule, subject) not in covered:
            kept.append(Finding("exemption", subject, 1, f"nothing breaks {rule!r} here any more: remove the row"))
    return sorted(kept, key=lambda finding: (finding.subject.partition("::")[0], finding.line, finding.rule))


def read_modules(root: Path) -> list[Module]:
    """Every Python file of the checked folders below `root`."""
    paths = [path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py"))]
    texts = [(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")) for path in paths]
    return [Module(path, text, ast.parse(text, path)) for path, text in texts]


def main(arguments: Sequence[str]) -> int:
    """Check the project, or the one in the folder given; the exit status."""
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent
    modules = read_modules(root)
    findings = findings_in(modules, EXEMPTIONS if not arguments else {})
    print(*findings, sep="\n", end="\n" if findings else "")
    print(f"tidy: {len(modules)} files, {len(findings)} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
