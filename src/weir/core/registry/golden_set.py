"""An evaluation set: questions with what a right answer shows, one JSON object per line, and how many answers were right.

    {"id": "capital-1", "input": "What is the capital of France?", "max_output_tokens": 16, "expect": {"contains": "Paris"}}

`input` is text or a list of {"role", "content"}. `expect` has one or more of `contains` (all of these), `contains_any`,
`not_contains` (none of these): a text or a list of them; `equals`, but for space around it; `is_json`: true. Letters count as
written. Outputs are looked at and dropped: a score names cases by their ids. There are no regular expressions: Python's can
take longer on a short text than anybody waits, and nothing short of another engine rules that out.
"""

from collections.abc import Container, Sequence
from typing import Annotated, TypeAlias

import msgspec

from weir import errors
from weir.core.request import Message
from weir.units import Bytes, Tokens

CASES_MAX = 1_000
SET_BYTES_MAX: Bytes = 1 << 20
OUTPUT_TOKENS_MAX: Tokens = 8_192
FAILED_IDS_MAX = 20
"""Ids that a score names: enough to see what the failures share, few enough for a row."""

Text: TypeAlias = Annotated[str, msgspec.Meta(min_length=1)]
Texts: TypeAlias = Text | Annotated[tuple[Text, ...], msgspec.Meta(min_length=1, max_length=32)] | None


class Turn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One message of a case's input."""

    role: Annotated[str, msgspec.Meta(pattern="^(system|user|assistant)\\Z")]
    content: Text


class Expectation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a right answer shows: everything that is given."""

    contains: Texts = None
    contains_any: Texts = None
    not_contains: Texts = None
    equals: Text | None = None
    is_json: bool = False

    def is_met(self, output: str) -> bool:
        """Whether an answer with this text is right."""
        if not all(text in output for text in _each(self.contains)):
            return False
        if self.contains_any is not None and not any(text in output for text in _each(self.contains_any)):
            return False
        if any(text in output for text in _each(self.not_contains)):
            return False
        if self.equals is not None and output.strip() != self.equals.strip():
            return False
        return not self.is_json or _is_json(output)


_NOTHING = Expectation()


class Case(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One question. id: unique in its set. input: a plain prompt, or a conversation."""

    id: Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}\\Z")]
    input: Text | Annotated[tuple[Turn, ...], msgspec.Meta(min_length=1, max_length=64)]
    max_output_tokens: Annotated[int, msgspec.Meta(ge=1, le=OUTPUT_TOKENS_MAX)]
    expect: Expectation

    @property
    def prompt(self) -> str | tuple[Message, ...]:
        """The input as a request has it."""
        if isinstance(self.input, str):
            return self.input
        return tuple(Message(turn.role, turn.content) for turn in self.input)


class Score(msgspec.Struct, frozen=True):
    """How an evaluation ended. failed_ids: of the first cases that did not pass, at most FAILED_IDS_MAX."""

    passed: int
    total: int
    failed_ids: tuple[str, ...] = ()

    @property
    def share(self) -> float:
        """Of the cases that passed, 0 … 1."""
        return self.passed / self.total


_DECODER = msgspec.json.Decoder(Case)


def parse_golden_set(content: bytes) -> tuple[Case, ...]:
    """The cases of a file. Raises InvalidRequest with the line, from 1, and the field that is wrong, and none of its text."""
    if len(content) > SET_BYTES_MAX:
        raise errors.InvalidRequest(
            f"The evaluation set has {len(content)} bytes; at most {SET_BYTES_MAX} are accepted.",
            members={"field": "evaluation", "accepted": f"at most {SET_BYTES_MAX} bytes"},
        )
    lines = content.removesuffix(b"\n").split(b"\n")
    if len(lines) > CASES_MAX:
        raise _refusal(CASES_MAX + 1, "", f"is one more than the {CASES_MAX} cases that are accepted")
    first: dict[str, int] = {}
    cases = tuple(_parse_line(number, line) for number, line in enumerate(lines, 1))
    for number, case in enumerate(cases, 1):
        if first.setdefault(case.id, number) != number:
            raise _refusal(number, "id", f"is that of line {first[case.id]} already; each case has its own")
        if case.expect == _NOTHING:
            raise _refusal(number, "expect", f"must say something: one or more of {', '.join(Expectation.__struct_fields__)}")
    return cases


def score(cases: Sequence[Case], passed: Container[str]) -> Score:
    """How many of the cases passed, which is said by id. cases: one or more."""
    failed = [case.id for case in cases if case.id not in passed]
    return Score(len(cases) - len(failed), len(cases), tuple(failed[:FAILED_IDS_MAX]))


def _parse_line(number: int, line: bytes) -> Case:
    if not line.strip():
        raise _refusal(number, "", "is empty; each line has one case")
    try:
        return _DECODER.decode(line)
    except msgspec.ValidationError as fault:
        raise _refusal(number, *_field_and_fault(str(fault))) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise _refusal(number, "", "is not one JSON object in UTF-8") from None


def _field_and_fault(message: str) -> tuple[str, str]:
    """What the decoder says. An unknown field is named only if that can be a name, because it may be somebody's text."""
    what, _, path = message.partition(" - at `$")
    parent = path.strip(".`")
    for said, why in (("missing required", "is missing"), ("contains unknown", "is not known here")):
        _, is_it, name = what.partition(f"{said} field ")
        if is_it:
            name = name.strip("`")
            shown = name if name.isidentifier() and len(name) <= 64 else "a field"
            return f"{parent}.{shown}".strip("."), why
    return parent, f"is wrong: {what}"


def _refusal(line: int, field: str, why: str) -> errors.InvalidRequest:
    subject = f"Line {line}: {field}" if field else f"Line {line}"
    return errors.InvalidRequest(f"{subject} {why}.", members={"line": line, "field": field or None})


def _each(texts: Texts) -> tuple[str, ...]:
    if texts is None:
        return ()
    return (texts,) if isinstance(texts, str) else texts


def _is_json(output: str) -> bool:
    try:
        msgspec.json.decode(output)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True
