"""The error tree: what its module prints is what it is, and an error is a value without secrets."""

import re

import pytest

from weir import errors
from weir.errors import ERROR_BY_CODE, WeirError

UNANSWERED = "(answers no request)"


def printed_leaves() -> dict[str, tuple[int | None, str | None]]:
    """Class name → HTTP status and code of each leaf in the module's docstring; both None where it answers no request."""
    leaves: dict[str, tuple[int | None, str | None]] = {}
    assert errors.__doc__ is not None
    for line in errors.__doc__.splitlines():
        if leaf := re.search(r"[├└]── (\w+) +(\d{3}) (\w+)", line):
            leaves[leaf[1]] = (int(leaf[2]), leaf[3])
        elif leaf := re.search(r"[├└]── (\w+) +" + re.escape(UNANSWERED), line):
            leaves[leaf[1]] = (None, None)
    return leaves


def printed_families() -> set[str]:
    assert errors.__doc__ is not None
    return set(re.findall(r"^    [├└]── (\w+)", errors.__doc__, re.MULTILINE))


def test_the_docstring_lists_every_leaf_with_its_code_and_status() -> None:
    """Protects the tree that people read: no leaf is missing, none is invented, codes and statuses are right."""
    printed = printed_leaves()
    assert printed.keys() == {leaf.__name__ for leaf in ERROR_BY_CODE.values()}
    for leaf in ERROR_BY_CODE.values():
        status, code = printed[leaf.__name__]
        assert (status, code) in [(leaf.http_status, leaf.code), (None, None)]


def test_the_docstring_lists_every_family() -> None:
    """Protects the tree that people read: its first level is the classes derived from the root."""
    assert printed_families() == {family.__name__ for family in WeirError.__subclasses__()}


def all_classes(root: type[WeirError]) -> list[type[WeirError]]:
    return [root, *(found for child in root.__subclasses__() for found in all_classes(child))]


def test_codes_are_unique() -> None:
    """Protects clients and metric labels: a code names one class."""
    leaves = [found for found in all_classes(WeirError) if not found.__subclasses__()]
    assert len({leaf.code for leaf in leaves}) == len(leaves) == len(ERROR_BY_CODE)


@pytest.mark.parametrize("code", ERROR_BY_CODE)
def test_a_leaf_fixes_code_status_and_title(code: str) -> None:
    """Protects the public shape: each code is a lower-case word with an error status and a sentence of its own."""
    leaf = ERROR_BY_CODE[code]
    assert re.fullmatch(r"[a-z]+(_[a-z]+)*", code)
    assert 400 <= leaf.http_status <= 504
    assert leaf.title != WeirError.title or leaf is errors.InternalError
    error = leaf()
    assert (str(error), error.detail) == (leaf.title, leaf.title)
    comes_back = (errors.FileStoreUnavailable, errors.LedgerUnavailable, errors.StreamStoreUnavailable)
    wait_ms = 1_000 if leaf in comes_back else None  # a store does so by itself
    assert (error.members, error.retry_after_ms, error.retry_advice) == ({}, wait_ms, leaf.should_retry)


def test_an_error_carries_its_own_members_and_advice() -> None:
    """Protects refusals: detail, members, wait and retry advice are those given; advice may overrule the class's."""
    error = errors.BudgetExhausted("Spent.", members={"limit": 5}, retry_after_ms=7, should_retry=True)
    assert (str(error), error.detail, error.members["limit"], error.retry_after_ms) == ("Spent.", "Spent.", 5, 7)
    assert error.retry_advice is True
    assert errors.BudgetExhausted.should_retry is False
