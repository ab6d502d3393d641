"""Evaluation sets: what a file may say, the exact refusals of what it may not, and which answers are right."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from weir import errors
from weir.core.registry.golden_set import (
    CASES_MAX,
    FAILED_IDS_MAX,
    SET_BYTES_MAX,
    Case,
    Expectation,
    Score,
    parse_golden_set,
    score,
)
from weir.core.request import Message

GOOD: dict[str, Any] = {"id": "a", "input": "What is 2 + 2?", "max_output_tokens": 8, "expect": {"contains": "4"}}
CANARY = "the-secret-of-the-set"


def _line(**changes: Any) -> bytes:
    return msgspec.json.encode({name: value for name, value in (GOOD | changes).items() if value is not ...})


def test_a_set_is_read() -> None:
    """Protects the format: both kinds of input, a text or a list of them, with or without a last line feed."""
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
    second = _line(id="b", input=turns, expect={"contains_any": ["4", "four"], "not_contains": "5", "is_json": False})
    cases = parse_golden_set(_line() + b"\r\n" + second)
    assert parse_golden_set(_line() + b"\n" + second + b"\n") == cases
    assert cases[0] == Case("a", "What is 2 + 2?", 8, Expectation(contains="4"))
    assert cases[0].prompt == "What is 2 + 2?"
    assert cases[1].prompt == (Message("system", "Be brief."), Message("user", "2 + 2?"))
    assert cases[1].expect == Expectation(contains_any=("4", "four"), not_contains="5")


@pytest.mark.parametrize(
    ("line", "field", "said"),
    [
        (b"", None, "is empty"),
        (b"  ", None, "is empty"),
        (b"{", None, "is not one JSON object"),
        (_line() + b" {}", None, "is not one JSON object"),
        (b'{"id": "\xff"}', None, "is not one JSON object"),
        (b"[" * 100_000, None, "Expected `object`, got `array`"),
        (_line(id=...), "id", "is missing"),
        (_line(id=""), "id", "matching regex"),
        (_line(id="two words"), "id", "matching regex"),
        (_line(id="line\n"), "id", "matching regex"),
        (_line(id=7), "id", "Expected `str`, got `int`"),
        (_line(input=""), "input", "Expected `str` of length >= 1"),
        (_line(input=[]), "input", "Expected `array` of length >= 1"),
        (_line(input=[{"role": CANARY, "content": "x"}]), "input[0].role", "(system|user|assistant)"),
        (_line(input=[{"role": "user"}]), "input[0].content", "is missing"),
        (_line(input=[{"role": "user", "content": "x", "name": "y"}]), "input[0].name", "is not known here"),
        (_line(max_output_tokens=...), "max_output_tokens", "is missing"),
        (_line(max_output_tokens=0), "max_output_tokens", "Expected `int` >= 1"),
        (_line(max_output_tokens=8_193), "max_output_tokens", "Expected `int` <= 8192"),
        (_line(max_output_tokens=True), "max_output_tokens", "Expected `int`, got `bool`"),
        (_line(expect=...), "expect", "is missing"),
        (_line(expect={}), "expect", "one or more of contains, contains_any, not_contains, equals, is_json"),
        (_line(expect={"is_json": False}), "expect", "one or more of"),
        (_line(expect={"regex": CANARY}), "expect.regex", "is not known here"),
        (_line(expect={"contains": ["x", ""]}), "expect.contains[1]", "Expected `str` of length >= 1"),
        (_line(expect={"contains_any": ["x"] * 33}), "expect.contains_any", "Expected `array` of length <= 32"),
        (_line(expect={"equals": ["x"]}), "expect.equals", "Expected `str | null`, got `array`"),
        (_line(**{CANARY: 1}), "a field", "is not known here"),
        (_line(id="first"), "id", "is that of line 1 already"),
    ],
)
def test_what_is_wrong_is_refused_with_its_line_and_field(line: bytes, field: str | None, said: str) -> None:
    """Protects whoever registers a set: the first wrong line, its field, and what is accepted; nobody's text in the error."""
    with pytest.raises(errors.InvalidRequest) as found:
        parse_golden_set(_line(id="first") + b"\n" + line + b"\n")
    assert found.value.members == {"line": 2, "field": field}
    assert found.value.detail.startswith("Line 2") and said in found.value.detail
    assert CANARY not in found.value.detail


def test_a_set_is_bounded() -> None:
    """Protects the store and the time that an evaluation takes."""
    lines = [_line(id=f"case-{number}") for number in range(CASES_MAX + 1)]
    assert len(parse_golden_set(b"\n".join(lines[:-1]))) == CASES_MAX
    with pytest.raises(errors.InvalidRequest, match=f"Line {CASES_MAX + 1} is one more than the {CASES_MAX} cases"):
        parse_golden_set(b"\n".join(lines))
    with pytest.raises(errors.InvalidRequest, match=f"at most {SET_BYTES_MAX} are accepted"):
        parse_golden_set(b" " * (SET_BYTES_MAX + 1))


@pytest.mark.parametrize(
    ("expect", "right", "wrong"),
    [
        (Expectation(contains="Paris"), ["It is Paris."], ["It is paris.", ""]),
        (Expectation(contains=("a", "b")), ["b a"], ["a", "b"]),
        (Expectation(contains_any=("four", "4")), ["4", "four"], ["five", ""]),
        (Expectation(contains_any="4"), ["42"], ["5"]),
        (Expectation(not_contains=("sorry", "cannot")), ["Yes.", ""], ["I cannot.", "so sorry"]),
        (Expectation(equals="4 "), [" 4\n", "4"], ["4.", "44", ""]),
        (Expectation(is_json=True), ['{"a": [1]}', " 3 "], ["{", "", "[" * 100_000, "```json\n{}\n```"]),
        (Expectation(contains="4", not_contains="5", is_json=True), ["[4]"], ["4, 5", "[4, 5]", "[6]"]),
    ],
)
def test_which_answers_are_right(expect: Expectation, right: list[str], wrong: list[str]) -> None:
    """Protects the score: everything that a case says must hold."""
    assert [text for text in right if not expect.is_met(text)] == []
    assert [text for text in wrong if expect.is_met(text)] == []


def test_a_score_names_the_first_that_failed_and_no_text() -> None:
    """Protects what is stored: counts and a bounded list of ids."""
    cases = parse_golden_set(b"\n".join(_line(id=f"case-{number}") for number in range(50)))
    answers = {case.id: "4" if number % 2 else f"5 {CANARY}" for number, case in enumerate(cases)}
    found = score(cases, {case.id for case in cases[2:] if case.expect.is_met(answers[case.id])})
    assert (found.passed, found.total, found.share) == (24, 50, 0.48)
    assert found.failed_ids[:3] == ("case-0", "case-1", "case-2") and len(found.failed_ids) == FAILED_IDS_MAX
    stored = msgspec.json.encode(found)
    assert msgspec.json.decode(stored, type=Score) == found and CANARY.encode() not in stored


def test_the_documented_example_is_a_set() -> None:
    """Protects the page: what people copy from it is accepted."""
    page = Path(__file__).resolve().parents[2] / "docs" / "explanation" / "rollouts.md"
    examples = re.findall(r"```json\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert [case.expect for example in examples for case in parse_golden_set(example.encode())] == [Expectation("Paris")]
