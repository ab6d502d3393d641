"""A file's upload as a form (multipart/form-data), read as it arrives: small fields whole, the file piece by piece.

The fields may come in any order, each once. Nothing of what was sent is in an error or a log.
"""

import logging
from dataclasses import dataclass
from typing import TypeAlias

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from weir import errors
from weir.api.wire import refuse_field
from weir.units import Bytes

FIELDS = ("file", "purpose", "expires_after[anchor]", "expires_after[seconds]")
FORM_BYTES_MAX: Bytes = 64 * 1024
"""What a form may add to its file."""
NAME_CHARS_MAX = 255
_FIELD_BYTES_MAX, _HEADERS_MAX, _HEADER_BYTES_MAX, _BOUNDARY_MAX = 256, 8, 4 * 1024, 70
_TYPE_ACCEPTED = "multipart/form-data with a boundary"

logging.getLogger("python_multipart").setLevel(logging.CRITICAL + 1)  # it would write down what does not fit


@dataclass(frozen=True, slots=True)
class FileBegun:
    """What follows is the file's content, as bytes."""

    name: str


@dataclass(frozen=True, slots=True)
class FormField:
    """Another field, whole."""

    name: str
    value: str


Told: TypeAlias = FileBegun | FormField | bytes


class UploadForm:
    """One form. content_type: the request's header. Raises InvalidRequest where that is of no form."""

    def __init__(self, content_type: bytes) -> None:
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not 1 <= len(boundary) <= _BOUNDARY_MAX:
            refuse_field("content-type", _TYPE_ACCEPTED)
        self._told: list[Told] = []
        self._seen: set[str] = set()
        self._name = ""
        self._header: tuple[bytearray, bytearray] = (bytearray(), bytearray())
        self._disposition = b""
        self._value = bytearray()
        self._is_whole = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._on_part_begin,
                "on_header_field": lambda data, start, end: self._header[0].extend(data[start:end]),
                "on_header_value": lambda data, start, end: self._header[1].extend(data[start:end]),
                "on_header_end": self._on_header_end,
                "on_headers_finished": self._on_headers_finished,
                "on_part_data": self._on_part_data,
                "on_part_end": self._on_part_end,
                "on_end": self._on_end,
            },
            max_header_count=_HEADERS_MAX,
            max_header_size=_HEADER_BYTES_MAX,
        )

    def feed(self, piece: bytes) -> list[Told]:
        """What a piece of the body tells. Raises InvalidRequest, or UnsupportedField for a field that is not known."""
        try:
            self._parser.write(piece)
        except FormParserError as fault:
            raise _broken() from fault
        told, self._told = self._told, []
        return told

    def finish(self) -> None:
        """The body ended. Raises InvalidRequest where the form did not."""
        if not self._is_whole:
            raise _broken()

    def _on_part_begin(self) -> None:
        self._header = (bytearray(), bytearray())
        self._disposition = b""
        self._value = bytearray()

    def _on_header_end(self) -> None:
        name, value = self._header
        if name.lower() == b"content-disposition":
            self._disposition = bytes(value)
        self._header = (bytearray(), bytearray())

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if name not in FIELDS:
            members = {"field": name[:100], "accepted": list(FIELDS)}
            raise errors.UnsupportedField("The form has a field that is not supported.", members=members)
        if name in self._seen:
            refuse_field(name, "one value")
        self._seen.add(name)
        self._name = name
        if name == "file":
            self._told.append(FileBegun(_file_name(options.get(b"filename"))))

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == "file":
            self._told.append(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > _FIELD_BYTES_MAX:
            refuse_field(self._name, f"at most {_FIELD_BYTES_MAX} bytes")

    def _on_part_end(self) -> None:
        if self._name != "file":
            self._told.append(FormField(self._name, self._value.decode("utf-8", "replace")))

    def _on_end(self) -> None:
        self._is_whole = True


def _file_name(given: bytes | None) -> str:
    accepted = f"a file with a name of 1 to {NAME_CHARS_MAX} characters in UTF-8"
    try:
        name = (given or b"").decode()
    except UnicodeDecodeError:
        refuse_field("file", accepted)
    if not 1 <= len(name) <= NAME_CHARS_MAX:
        refuse_field("file", accepted)
    return name


def _broken() -> errors.InvalidRequest:
    return errors.InvalidRequest(
        "The body is no whole form.", members={"field": "body", "accepted": "multipart/form-data, to its last boundary"}
    )
