"""A batch's input, whatever is sent and however it is cut: the same lines, or the first wrong line refused by its number."""

import json
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weir import errors
from weir.core.batches.batch_records import ENDPOINTS
from weir.core.batches.input_lines import (
    CUSTOM_ID_CHARS_MAX,
    InputBounds,
    InputLine,
    InputReader,
    LineSplitter,
    read_line,
)

BOUNDS = InputBounds(line_bytes_max=2_000, lines_max=12, depth_max=8)
BOM = b"\xef\xbb\xbf"
SECRET = "marie.curie@example.org"

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
VALUES = st.recursive(
    TEXTS | st.integers(-(10**20), 10**20) | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
CUSTOM_IDS = TEXTS.map(lambda text: "".join(char for char in text if char.isprintable()) or "x")


@st.composite
def files(draw: st.DrawFn) -> list[dict[str, Any]]:
    """The lines of a right file as objects, shallow enough for BOUNDS."""
    endpoint = draw(st.sampled_from(ENDPOINTS))
    lines = []
    for custom_id in draw(st.lists(CUSTOM_IDS, min_size=1, max_size=8, unique=True)):
        body = {"model": "assistant", "input": draw(TEXTS), "more": draw(VALUES.filter(lambda value: depth_of(value) <= 5))}
        line = {"custom_id": custom_id, "url": endpoint, "body": body}
        if draw(st.booleans()):
            line["method"] = "POST"
        lines.append({name: line[name] for name in draw(st.permutations(sorted(line)))})
    return lines


def depth_of(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (1 if isinstance(value, list | dict) else 0) + max(map(depth_of, inner), default=0)


def written(line: dict[str, Any], *, is_ascii: bool = True) -> bytes:
    return json.dumps(line, ensure_ascii=is_ascii).encode()


def pieces_of(content: bytes, cuts: Sequence[int]) -> Iterator[bytes]:
    begin = 0
    for cut in sorted({cut % (len(content) + 1) for cut in cuts}):
        yield content[begin:cut]
        begin = cut
    yield content[begin:]


CUTS = st.lists(st.integers(0, 10**6), max_size=12) | st.just(list(range(5_000)))


def read(content: bytes, cuts: Sequence[int] = (), bounds: InputBounds = BOUNDS) -> list[InputLine]:
    reader = InputReader(bounds)
    lines = [line for piece in pieces_of(content, cuts) for line in reader.feed(piece)]
    return lines + reader.finish()


def refused(content: bytes, cuts: Sequence[int] = (), bounds: InputBounds = BOUNDS) -> errors.InvalidRequest:
    """The refusal, which names the file, a line and what is accepted."""
    with pytest.raises(errors.InvalidRequest) as caught:
        read(content, cuts, bounds)
    members = caught.value.members
    assert members.keys() == {"field", "line", "accepted"} and members["field"] == "file" and members["accepted"]
    assert caught.value.detail.startswith(f"Line {members['line']} ")
    return caught.value


# ── right files ──────────────────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=200)
@given(files(), CUTS, st.booleans(), st.booleans(), st.sampled_from([b"\n", b"\r\n"]), st.sampled_from([b"", b"\n", b" \r"]))
def test_any_cut_gives_the_lines_that_were_written(
    lines: list[dict[str, Any]], cuts: list[int], is_ascii: bool, has_bom: bool, end: bytes, last: bytes
) -> None:
    """Protects every line: however the bytes arrive, each is there once, in order, with its body byte for byte."""
    raws = [written(line, is_ascii=is_ascii) for line in lines]
    content = (BOM if has_bom else b"") + end.join(raws) + (end if last == b"\n" else b"") + last * (last != b"\n")
    found = read(content, cuts)
    assert [(line.number, line.custom_id, line.url) for line in found] == [
        (number, line["custom_id"], line["url"]) for number, line in enumerate(lines, 1)
    ]
    for raw, line, given_line in zip(raws, found, lines, strict=True):
        assert line.body in raw and json.loads(line.body) == given_line["body"]
        assert read_line(raw, line.number) == line


@given(files(), CUTS)
def test_a_checked_file_is_walked_line_by_line(lines: list[dict[str, Any]], cuts: list[int]) -> None:
    """Protects the worker: it meets the lines that were checked, with their numbers."""
    content = BOM + b"\r\n".join(written(line) for line in lines)
    splitter = LineSplitter(BOUNDS.line_bytes_max)
    raws = [raw for piece in pieces_of(content, cuts) for raw in splitter.feed(piece)] + splitter.finish()
    assert [read_line(raw, number) for number, raw in enumerate(raws, 1)] == read(content)


def test_what_is_counted_of_a_file() -> None:
    """Protects a file's record: the endpoint of its lines, and how many there are."""
    reader = InputReader(BOUNDS)
    assert (reader.endpoint, reader.lines) == ("", 0)
    reader.feed(good(1) + b"\n" + good(2) + b"\n" + good(3))
    assert (reader.endpoint, reader.lines) == (ENDPOINTS[0], 2)
    reader.finish()
    assert reader.lines == 3


# ── wrong files ──────────────────────────────────────────────────────────────────────────────────────────────────────


def good(number: int) -> bytes:
    return written({"custom_id": f"{SECRET} {number}", "url": ENDPOINTS[0], "body": {"input": SECRET}})


def with_members(**changes: Any) -> bytes:
    line = {"custom_id": "other", "method": "POST", "url": ENDPOINTS[0], "body": {"input": SECRET}, **changes}
    return written({name: value for name, value in line.items() if value is not ...})


def deep(levels: int) -> bytes:
    """A line of exactly so many levels."""
    return b'{"custom_id":"deep","url":"/v1/generations","body":{"a":' + b"[" * (levels - 2) + b"]" * (levels - 2) + b"}}"


WRONG: dict[str, tuple[bytes, str]] = {
    "blank": (b"", "is blank"),
    "blanks": (b" \t ", "is blank"),
    "bad JSON": (good(0)[:-1], "is not valid JSON"),
    "two values": (good(0) + good(0), "is not valid JSON"),
    "carriage return within": (good(0) + b"\r" + good(0), "is not valid JSON"),
    "a value cut off": (b'{"custom_id":"a","url":"/v1/generations","body":{"a":[1,', "is not valid JSON"),
    "a number that is none": (b'{"custom_id":"a","url":"/v1/generations","body":{"a":01}}', "is not valid JSON"),
    "a mark in the middle": (BOM + good(0), "is not valid JSON"),
    "a list": (b"[" + good(0) + b"]", "is not a JSON object"),
    "a string": (f'"{SECRET}"'.encode(), "is not a JSON object"),
    "not UTF-8": (good(0).replace(b"marie", b"mari\xe9"), "is not UTF-8"),
    "UTF-16": (good(0).decode().encode("utf-16").replace(b"\n", b""), "is not UTF-8"),
    "too long": (good(0) + b" " * BOUNDS.line_bytes_max, "is too long"),
    "too deep": (deep(BOUNDS.depth_max + 1), "is nested too deeply"),
    "too deep and open": (b'{"body":' + b"[{" * 400, "is nested too deeply"),
    "unknown member": (with_members(metadata={}), "has 'metadata', which is not accepted"),
    "unknown member that is no name": (with_members(**{SECRET: 1}), "has a member that is not accepted"),
    "no custom_id": (with_members(custom_id=...), "has no 'custom_id'"),
    "no url": (with_members(url=...), "has no 'url'"),
    "no body": (with_members(body=...), "has no 'body'"),
    "empty custom_id": (with_members(custom_id=""), "has a 'custom_id' that is not accepted"),
    "long custom_id": (with_members(custom_id="x" * (CUSTOM_ID_CHARS_MAX + 1)), "has a 'custom_id' that is not accepted"),
    "custom_id is a number": (with_members(custom_id=7), "has a 'custom_id' that is not accepted"),
    "control character": (with_members(custom_id="a\x07"), "has a 'custom_id' that is not accepted"),
    "line separator": (with_members(custom_id="a\u2028"), "has a 'custom_id' that is not accepted"),
    "lone surrogate": (b'{"custom_id":"\\udc00","url":"/v1/generations","body":{}}', "is not valid JSON"),
    "another method": (with_members(method="GET"), "has a 'method' that is not accepted"),
    "no method": (with_members(method=None), "has a 'method' that is not accepted"),
    "unknown url": (with_members(url=f"/v1/{SECRET}"), "has a 'url' that is not accepted"),
    "url is a list": (with_members(url=[SECRET]), "has a 'url' that is not accepted"),
    "another url": (with_members(url=ENDPOINTS[1]), "has another 'url' than line 1"),
    "body is a list": (with_members(body=[SECRET]), "has a 'body' that is not accepted"),
    "body is a string": (with_members(body=SECRET), "has a 'body' that is not accepted"),
    "body is null": (with_members(body=None), "has a 'body' that is not accepted"),
}


@pytest.mark.parametrize("name", WRONG)
@given(before=st.integers(1, 5), after=st.integers(0, 3), cuts=CUTS)
@settings(max_examples=25)
def test_what_is_wrong_is_refused_by_its_line(name: str, before: int, after: int, cuts: list[int]) -> None:
    """Protects who wrote the file: the first wrong line is named with what is wrong, nothing of what it says is repeated."""
    raw, what = WRONG[name]
    lines = [*(good(number) for number in range(1, before + 1)), raw, *(raw for _ in range(after))]
    found = refused(b"\n".join(lines) + b"\n", cuts)
    assert found.members["line"] == before + 1
    assert found.detail.startswith(f"Line {before + 1} {what}; accepted: "), found.detail
    assert SECRET not in found.detail and SECRET not in str(found.members)


@pytest.mark.parametrize("name", WRONG.keys() - {"another url", "a mark in the middle"})
def test_the_first_line_may_be_wrong(name: str) -> None:
    """Protects the beginning of a file: its first line is checked as every other one is."""
    raw, what = WRONG[name]
    assert refused(raw + b"\n" + good(1)).detail.startswith(f"Line 1 {what}; ")


@given(files(), st.data(), CUTS)
def test_an_id_that_was_there_is_refused_with_both_lines(
    lines: list[dict[str, Any]], data: st.DataObject, cuts: list[int]
) -> None:
    """Protects results: a custom_id names one line."""
    first = data.draw(st.integers(0, len(lines) - 1))
    content = b"\n".join(written(line) for line in [*lines, {**lines[first], "body": {}}])
    found = refused(content, cuts)
    assert found.members["line"] == len(lines) + 1
    assert found.detail.startswith(f"Line {len(lines) + 1} has the 'custom_id' of line {first + 1}; ")


@given(files(), st.data())
def test_a_member_that_is_written_twice_is_refused(lines: list[dict[str, Any]], data: st.DataObject) -> None:
    """Protects what a line means: of two values of one name, however it is escaped, none is chosen."""
    line = data.draw(st.sampled_from(lines))
    name = data.draw(st.sampled_from(sorted(line)))
    spelled = data.draw(st.sampled_from([name, f"\\u{ord(name[0]):04x}{name[1:]}"]))
    again = data.draw(st.sampled_from([line[name], 7, {"a": '\\"'}, "POST"]))
    members = [(key, json.dumps(value)) for key, value in line.items()]
    members.insert(data.draw(st.integers(0, len(members) - 1 - list(line).index(name))), (spelled, json.dumps(again)))
    raw = "{" + ",".join(f'"{key}" : {value}' for key, value in members) + "}"
    found = refused(raw.encode())
    assert found.members["line"] == 1
    if list(line)[-1] == name:  # then the last one written is right, and so is the rest
        assert found.detail.startswith("Line 1 has a member twice; ")


@given(files(), st.integers(0, 10**6), st.binary(min_size=1, max_size=3), CUTS)
def test_where_it_is_cut_changes_no_verdict(lines: list[dict[str, Any]], position: int, noise: bytes, cuts: list[int]) -> None:
    """Protects callers: a damaged file is read or refused alike, however it arrives."""
    content = b"\n".join(written(line) for line in lines)
    position %= len(content)
    damaged = content[:position] + noise + content[position + len(noise) :]
    assert verdict(damaged, cuts) == verdict(damaged, ())


def verdict(content: bytes, cuts: Sequence[int]) -> object:
    try:
        return read(content, cuts)
    except errors.InvalidRequest as found:
        return found.detail


@pytest.mark.parametrize("content", [b"", BOM, b"  ", BOM + b" \r"])
def test_an_empty_file_is_refused(content: bytes) -> None:
    """Protects tenants from a batch of nothing."""
    for cuts in ((), range(10)):
        assert refused(content, cuts).detail.startswith("Line 1 is missing: the file is empty; accepted: 1 to 12 lines")


def test_an_empty_line_before_the_end_is_refused() -> None:
    """Protects line numbers: only behind the last newline may there be nothing."""
    assert refused(good(1) + b"\n\n").members["line"] == 2
    assert refused(b"\n").members["line"] == 1
    assert len(read(good(1) + b"\n")) == 1


def test_a_mark_counts_once_and_only_at_the_beginning() -> None:
    """Protects files of editors that begin with one; two are a mistake."""
    assert len(read(BOM + good(1))) == 1
    assert refused(BOM + BOM + good(1)).detail.startswith("Line 1 is not valid JSON; ")
    assert refused(BOM[:2]).detail.startswith("Line 1 is not UTF-8; ")


def test_one_line_too_many_is_refused() -> None:
    """Protects memory: a file has so many lines and no more."""
    full = b"\n".join(good(number) for number in range(BOUNDS.lines_max))
    assert len(read(full)) == BOUNDS.lines_max
    found = refused(full + b"\nanything")
    assert found.members == {"field": "file", "line": BOUNDS.lines_max + 1, "accepted": "at most 12 lines"}


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("begin", [b"", BOM])
@given(cuts=CUTS)
@settings(max_examples=20)
def test_a_line_may_be_as_long_as_its_bound(begin: bytes, end: bytes, cuts: list[int]) -> None:
    """Protects the bound: it counts a line's own bytes, neither a mark before it nor its end."""
    raw = good(1)
    fitting, short = InputBounds(line_bytes_max=len(raw)), InputBounds(line_bytes_max=len(raw) - 1)
    assert len(read(begin + raw + end, cuts, fitting)) == 1
    assert refused(begin + raw + end, cuts, short).detail == f"Line 1 is too long; accepted: at most {len(raw) - 1} bytes."


@given(st.integers(1, 40))
def test_a_line_may_be_nested_as_deep_as_its_bound(levels: int) -> None:
    """Protects every decoder behind: what is nested deeper is refused before anything walks it, and nothing else is."""
    bounds = InputBounds(depth_max=levels + 2)
    assert len(read(deep(levels + 2), bounds=bounds)) == 1
    assert refused(deep(levels + 3), bounds=bounds).detail.startswith("Line 1 is nested too deeply; ")


@pytest.mark.parametrize("text", ["[{" * 50, '\\"[{' * 50, "\\\\" + "}]" * 50, '"' + "[" * 50])
def test_brackets_in_strings_are_no_depth(text: str) -> None:
    """Protects prompts with code in them: only what is outside of strings nests."""
    line = {"custom_id": text, "url": ENDPOINTS[0], "body": {"input": text, "more": [{}] * 50}}
    assert json.loads(read(written(line))[0].body) == line["body"]
    assert len(read(b'{"custom_id":"[[[[[[[[[[[[[[","url":"/v1/generations","body":{}}')) == 1


def test_a_million_brackets_end_no_process() -> None:
    """Protects the process: what would exhaust a decoder's stack is refused, also in a file that was said to be checked."""
    bounds = InputBounds()
    for raw in (b"[" * 1_000_000, b"{" * 1_000_000 + b"}" * 40_000, deep(400_000)):
        assert refused(raw, bounds=bounds).detail.startswith("Line 1 is nested too deeply; ")
        with pytest.raises(errors.InvalidRequest, match="Line 9 is not "):
            read_line(raw, 9)
    assert refused(b"]" * 1_000_000, bounds=bounds).detail.startswith("Line 1 is not valid JSON; ")
    assert refused(b'"' + b"[" * 1_000_000, bounds=bounds).detail.startswith("Line 1 is not ")


# ── a call at a time ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_right_lines_before_a_wrong_one_are_given_first() -> None:
    """Protects the order of refusals: who checks more of each line has met all lines before the one that is refused."""
    reader = InputReader(BOUNDS)
    assert [line.number for line in reader.feed(good(1) + b"\n" + good(2) + b"\nwrong\n" + good(3))] == [1, 2]
    calls: tuple[Callable[[], object], ...] = (lambda: reader.feed(good(4)), reader.finish, lambda: reader.feed(b""))
    for call in calls:
        with pytest.raises(errors.InvalidRequest, match="Line 3 is not valid JSON"):
            call()
    assert reader.lines == 2


def test_a_line_that_is_too_long_is_refused_before_its_end() -> None:
    """Protects memory: nothing is collected of a line beyond its bound."""
    reader = InputReader(BOUNDS)
    reader.feed(b"x" * BOUNDS.line_bytes_max)
    reader.feed(b"\r")
    with pytest.raises(errors.InvalidRequest, match="Line 1 is too long"):
        reader.feed(b"x")


def test_memory_is_bounded_whatever_arrives() -> None:
    """Protects the process: of many lines a few bytes each are kept, of a line without an end no more than its bound."""
    bounds = InputBounds(line_bytes_max=100_000, lines_max=5_000)
    reader, endless = InputReader(bounds), LineSplitter(bounds.line_bytes_max)
    body = {"input": "x" * 2_000}
    tracemalloc.start()
    try:
        for number in range(bounds.lines_max):
            reader.feed(written({"custom_id": f"{number:0200d}", "url": ENDPOINTS[0], "body": body}) + b"\n")
        kept, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        for _ in range(bounds.line_bytes_max // 100):
            endless.feed(b"x" * 100)
        with pytest.raises(errors.InvalidRequest):
            endless.feed(b"x" * 100)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 250 * bounds.lines_max
    assert peak - kept < 3 * bounds.line_bytes_max
