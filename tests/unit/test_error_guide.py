"""What is said of each code is complete, and is what the code says where it refuses: members and waits, call by call."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from weir import errors
from weir.api.openapi.error_guide import ENDINGS, ENDINGS_ONLY, GUIDE, INTERNAL, MANAGEMENT_ONLY, Wait
from weir.api.openapi.shared_parts import member_schemas
from weir.errors import ERROR_BY_CODE, WeirError

SOURCE = Path(__file__).resolve().parents[2] / "src" / "weir"
FOLDERS = ("api", "batches", "gateway", "coordinator", "control", "core")
RENAMED = {"reset_ms": "resets_at"}
"""What the edge makes of a member."""

MANAGEMENT_MEMBERS = {"kept", "since", "aliases", "rollouts", "rollout", "adapters", "pool", "missing"}
"""Of codes that tenants get too, what only the management API says with them."""


@dataclass(frozen=True)
class Raised:
    """One place where an error is made. waits: whether a wait may be given."""

    where: str
    error: type[WeirError]
    members: frozenset[str]
    waits: bool


def raised() -> Iterator[Raised]:
    """Every `errors.Name(…)` of the folders that answer tenants and administrators."""
    for path in sorted(path for folder in FOLDERS for path in (SOURCE / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            error = getattr(errors, node.func.attr, None) if ast.unparse(node.func.value) == "errors" else None
            if isinstance(error, type) and issubclass(error, WeirError):
                given = {keyword.arg: keyword.value for keyword in node.keywords}
                yield Raised(f"{path.name}:{node.lineno}", error, _keys(given.get("members")), "retry_after_ms" in given)


def _keys(members: ast.expr | None) -> frozenset[str]:
    """The names of members that are written out where the error is made."""
    keys = members.keys if isinstance(members, ast.Dict) else []
    return frozenset(key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str))


RAISED = list(raised())


def test_every_leaf_of_the_tree_has_its_advice_and_nothing_else_has() -> None:
    """Protects whoever gets a code from one that nobody explains."""
    assert set(GUIDE) == set(ERROR_BY_CODE.values())
    assert all(advice.meaning.endswith(".") and advice.remedy.endswith(".") for advice in GUIDE.values())


def test_the_places_are_found() -> None:
    """Protects the tests below from finding nothing to compare."""
    found = {place.error for place in RAISED if place.members}
    assert {errors.InvalidRequest, errors.InputTooLong, errors.DeadlineInfeasible, errors.RequestTooLarge} <= found


@pytest.mark.parametrize("place", RAISED, ids=lambda place: f"{place.where}-{place.error.code}")
def test_members_and_waits_are_those_of_the_guide(place: Raised) -> None:
    """Protects clients that read a member, or wait for as long as they are told, from one that is not documented."""
    advice = GUIDE[place.error]
    is_line_of_a_file = place.where.startswith("golden_set")  # which administrators read alone
    assert is_line_of_a_file or {RENAMED.get(name, name) for name in place.members} <= set(advice.members)
    assert not place.waits or advice.wait is not Wait.NONE


def test_a_wait_is_exact_where_the_tree_says_so() -> None:
    """Protects clients from a time that is called exact and is lengthened."""
    for error, advice in GUIDE.items():
        assert (advice.wait is Wait.EXACT) == error.waits_exactly


def test_endings_and_the_management_apis_own_codes_are_apart() -> None:
    """Protects the three groups: what only ends, what only administrators get, what answers no request."""
    ended = {rule.error for rule in ENDINGS}
    assert set(ENDINGS_ONLY) <= ended
    assert not (ended | set(ENDINGS_ONLY)) & {*INTERNAL, *MANAGEMENT_ONLY}


def test_every_member_of_the_tenant_api_has_its_schema() -> None:
    """Protects the document's error shapes: a member that a refusal may carry is described, and no other."""
    tenants = [error for error in GUIDE if error not in (*INTERNAL, *MANAGEMENT_ONLY)]
    said = {name for error in tenants for name in GUIDE[error].members} - MANAGEMENT_MEMBERS
    assert set(member_schemas()) == said
