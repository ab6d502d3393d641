"""A batch's input: JSON lines from bytes that arrive in chunks cut anywhere, each line checked as it is complete.

A line is an object of four members: `custom_id`, `method`, `url` and `body`; the body stays the bytes that it was written in.
What is kept is one unfinished line and 16 bytes of each `custom_id`, so memory is bounded whatever is sent. A refusal names
the file's first wrong line, wherever the chunks were cut, and quotes nothing that a line says: it could be personal data.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec

from weir import errors
from weir.core.batches.batch_records import ENDPOINTS
from weir.units import Bytes

CUSTOM_ID_CHARS_MAX: Final = 256

_BOM = b"\xef\xbb\xbf"
_BLANKS = b" \t\r"
_DIGEST_BYTES = 16
"""Nobody finds two ids of one digest, and 50,000 of them are a few megabytes."""
_IS_A_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
"""Such names of members are shown; anything else could be text that went astray."""
_ACCEPTED: Mapping[str, str] = {
    "custom_id": f"a string of 1 to {CUSTOM_ID_CHARS_MAX} printable characters, in no other line of the file",
    "url": f"one of {', '.join(ENDPOINTS)}, the same in every line",
    "body": "an object",
    "method": '"POST", or absent',
}
_MEMBERS_TEXT = f"an object with {', '.join(_ACCEPTED)}"


@dataclass(frozen=True, slots=True)
class InputBounds:
    """What a file may be. line_bytes_max: without its end. depth_max: of a line's objects and lists within one another."""

    line_bytes_max: Bytes = 1024 * 1024
    lines_max: int = 50_000
    depth_max: int = 64


class InputLine(msgspec.Struct, frozen=True, gc=False):
    """One line. number: 1-based. url: one of ENDPOINTS. body: the JSON object of the request, as written."""

    number: int
    custom_id: str
    url: str
    body: bytes


_CustomId: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=CUSTOM_ID_CHARS_MAX)]


class _Written(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A line as it is written. Of a member that is written twice only the last is here."""

    custom_id: _CustomId
    url: str
    body: msgspec.Raw
    method: Literal["POST"] | msgspec.UnsetType = msgspec.UNSET


_WRITTEN = msgspec.json.Decoder(_Written)
_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_MEMBER: Mapping[str, msgspec.json.Decoder[Any]] = {
    "custom_id": msgspec.json.Decoder(_CustomId),
    "url": msgspec.json.Decoder(str),
    "method": msgspec.json.Decoder(Literal["POST"]),
}
_STEPS = bytes.maketrans(b"{[}]", b"\x01\x01\xff\xff")  # 1 and -1
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"{}[]")
_NOT_DECODED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


# ── bytes to lines ───────────────────────────────────────────────────────────────────────────────────────────────────


class LineSplitter:
    """Cuts what arrives into lines, without a byte order mark at the beginning and without their ends, LF or CRLF.

    line_bytes_max: a longer line is refused as soon as that is known; so much of one is kept at most, and half of its end. What
    stands behind the last newline is a line too, unless it is blank.
    """

    def __init__(self, line_bytes_max: Bytes) -> None:
        self._line_bytes_max = line_bytes_max
        self._rest = bytearray()
        self._has_begun = False  # then no mark can follow
        self._lines = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        """The lines that a chunk completes. Raises InvalidRequest naming a line that is too long."""
        return list(self.lines_in(chunk))

    def lines_in(self, chunk: bytes) -> Iterator[bytes]:
        """The same one by one: those before one that is too long are given before it is refused. To be read to its end."""
        *pieces, last = chunk.split(b"\n")
        for piece in pieces:
            yield self._line(piece if self._has_begun and not self._rest else self._joined(piece))
        self._keep(last)

    def finish(self) -> list[bytes]:
        """The line that no newline ended, if there is one; nothing follows. Raises as `feed`."""
        line = self._line(self._joined(b""))
        return [line] if line.strip(_BLANKS) else []

    def _line(self, written: bytes) -> bytes:
        line = written.removesuffix(b"\r")
        if len(line) > self._line_bytes_max:
            raise self._too_long()
        self._lines += 1
        return line

    def _joined(self, piece: bytes) -> bytes:
        """The unfinished line with its last piece."""
        self._keep(piece)
        self._has_begun = True
        written = bytes(self._rest)
        self._rest.clear()
        return written

    def _keep(self, piece: bytes) -> None:
        """Add to the unfinished line; what would make it too long in any case is not added."""
        if len(self._rest) + len(piece) > self._line_bytes_max + len(b"\r") + (0 if self._has_begun else len(_BOM)):
            raise self._too_long()
        self._rest += piece
        if not self._has_begun and len(self._rest) >= len(_BOM):
            self._has_begun = True
            if self._rest.startswith(_BOM):
                del self._rest[: len(_BOM)]
        if self._has_begun and len(self._rest) > self._line_bytes_max and not self._rest.endswith(b"\r"):
            raise self._too_long()

    def _too_long(self) -> errors.InvalidRequest:
        return _refusal(self._lines + 1, "is too long", f"at most {self._line_bytes_max} bytes")


# ── one line ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def read_line(raw: bytes, number: int) -> InputLine:
    """A line of a file that was checked. Raises InvalidRequest where it is damaged."""
    try:
        written = _WRITTEN.decode(raw)
    except _NOT_DECODED as fault:
        raise _flaw(raw, number) from fault
    body = bytes(written.body)
    if not body.startswith(b"{"):
        raise _refused_member(number, "body")
    if written.url not in ENDPOINTS:
        raise _refused_member(number, "url")
    if not written.custom_id.isprintable():
        raise _refused_member(number, "custom_id")
    # Every member has two quotes around its name, and each but the body two around its value: more are a member written twice.
    members = 3 if written.method is msgspec.UNSET else 4
    if _quotes(raw) - _quotes(body) != 4 * members - 2:
        raise _twice(number)
    return InputLine(number, written.custom_id, written.url, body)


def _quotes(text: bytes) -> int:
    """How many quotes there are in JSON, less those within strings."""
    return _unescaped(text).count(b'"')


def _unescaped(text: bytes) -> bytes:
    """JSON without its escaped quotes: the next quote ends a string. A backslash escapes one only where none escapes it."""
    return text.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in text else text


def _is_nested_deeper(text: bytes, depth_max: int) -> bool:
    """Whether JSON is nested deeper than that, told without recursion."""
    if text.count(b"{") + text.count(b"[") <= depth_max:
        return False
    outside = b"".join(_unescaped(text).split(b'"')[::2])
    steps = memoryview(outside.translate(_STEPS, _NO_BRACKETS)).cast("b")
    return max(accumulate(steps), default=0) > depth_max


# ── the file ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class InputReader:
    """Reads a batch's input once. endpoint: what all lines are asked of, empty before the first; lines: how many there are.

    A call that meets a wrong line still returns those before it; the next call raises InvalidRequest, as every later one does.
    """

    def __init__(self, bounds: InputBounds) -> None:
        self.endpoint = ""
        self._bounds = bounds
        self._splitter = LineSplitter(bounds.line_bytes_max)
        self._digests: dict[bytes, None] = {}  # in the order of their lines
        self._digest_state = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        self._refused: errors.InvalidRequest | None = None

    @property
    def lines(self) -> int:
        """Lines that were right."""
        return len(self._digests)

    def feed(self, chunk: bytes) -> list[InputLine]:
        """The lines that a chunk completes, checked. Raises InvalidRequest naming the first wrong line."""
        return self._checked(self._splitter.lines_in(chunk))

    def finish(self) -> list[InputLine]:
        """The line that no newline ended, if there is one; nothing follows. Raises as `feed`, and for a file without lines."""
        checked = self._checked(self._last())
        if not self.lines:
            raise _refusal(1, "is missing: the file is empty", f"1 to {self._bounds.lines_max} lines")
        return checked

    def _last(self) -> Iterator[bytes]:
        yield from self._splitter.finish()

    def _checked(self, lines: Iterator[bytes]) -> list[InputLine]:
        if self._refused is not None:
            raise self._refused
        checked: list[InputLine] = []
        try:
            for raw in lines:
                checked.append(self._check(raw))
        except errors.InvalidRequest as refused:
            self._refused = refused
            if not checked:
                raise
        return checked

    def _check(self, raw: bytes) -> InputLine:
        number = self.lines + 1
        if number > self._bounds.lines_max:
            raise _refusal(number, "is one too many", f"at most {self._bounds.lines_max} lines")
        if not raw.strip(_BLANKS):
            raise _refusal(number, "is blank", _MEMBERS_TEXT)
        if not raw.isascii() and not _is_utf8(raw):
            raise _refusal(number, "is not UTF-8", "UTF-8")
        if _is_nested_deeper(raw, self._bounds.depth_max):
            raise _refusal(number, "is nested too deeply", f"JSON nested at most {self._bounds.depth_max} deep")
        line = read_line(raw, number)
        if line.url != self.endpoint:
            if self.endpoint:
                raise _refusal(number, "has another 'url' than line 1", _ACCEPTED["url"])
            self.endpoint = line.url
        self._note(line)
        return line

    def _note(self, line: InputLine) -> None:
        """Remember the line's id. Raises InvalidRequest where an earlier line has it."""
        state = self._digest_state.copy()
        state.update(line.custom_id.encode())
        digest = state.digest()
        if digest in self._digests:
            earlier = 1 + list(self._digests).index(digest)
            raise _refusal(line.number, f"has the 'custom_id' of line {earlier}", _ACCEPTED["custom_id"])
        self._digests[digest] = None


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def _flaw(raw: bytes, number: int) -> errors.InvalidRequest:
    """What is wrong with a line that cannot be decoded."""
    try:
        members = _MEMBERS.decode(raw)
    except msgspec.ValidationError:
        return _refusal(number, "is not a JSON object", _MEMBERS_TEXT)
    except _NOT_DECODED:
        return _refusal(number, "is not valid JSON", _MEMBERS_TEXT)
    for name in members:
        if name not in _ACCEPTED:
            shown = f"'{name}', which is" if _IS_A_NAME.fullmatch(name) else "a member that is"
            return _refusal(number, f"has {shown} not accepted", _MEMBERS_TEXT)
    for name in _ACCEPTED:
        if name not in members and name != "method":
            return _refusal(number, f"has no '{name}'", _MEMBERS_TEXT)
    for name in _MEMBER:
        if name in members and not _decodes(name, members[name]):
            return _refused_member(number, name)
    return _twice(number)  # and of those the last one was right


def _decodes(name: str, value: msgspec.Raw) -> bool:
    try:
        _MEMBER[name].decode(value)
    except _NOT_DECODED:
        return False
    return True


def _twice(number: int) -> errors.InvalidRequest:
    return _refusal(number, "has a member twice", "each member once")


def _refused_member(number: int, name: str) -> errors.InvalidRequest:
    return _refusal(number, f"has a '{name}' that is not accepted", _ACCEPTED[name])


def _refusal(number: int, what: str, accepted: str) -> errors.InvalidRequest:
    return errors.InvalidRequest(
        f"Line {number} {what}; accepted: {accepted}.", members={"field": "file", "line": number, "accepted": accepted}
    )
