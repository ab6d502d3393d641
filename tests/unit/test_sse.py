"""Server-sent events are decoded as the standard says, within a bound, and what we encode decodes to itself."""

import pytest

from weir.core.sse import SseDecoder
from weir.errors import EngineError


@pytest.mark.parametrize(
    ("stream", "payloads"),
    [
        (b"data: a\n\n", [b"a"]),
        (b"data:a\n\ndata:  b\n\n", [b"a", b" b"]),
        (b"data: a\r\n\r\ndata: b\r\n\r\n", [b"a", b"b"]),
        (b"data: a\r\rdata: b\r\r", [b"a", b"b"]),
        (b"data: a\ndata: b\n\n", [b"a\nb"]),
        (b"data\n\ndata:\n\n", [b"", b""]),
        (b": comment\n\ndata: a\n\n:\n\n", [b"a"]),
        (b"event: delta\nid: 7\ndata: a\nretry: 5\n\n", [b"a"]),
        (b"event: ping\n\ndatabase: x\n\n", []),
        (b"\n\n\ndata: a\n\n\n\n", [b"a"]),
        (b"data: unfinished\n", []),
        ("data: żółw\n\n".encode(), ["żółw".encode()]),
    ],
)
@pytest.mark.parametrize("piece_bytes", [1, 1_000])
def test_payloads(stream: bytes, payloads: list[bytes], piece_bytes: int) -> None:
    """Every line end, comment, field and empty line is read as the standard says, whole or byte by byte."""
    decoder = SseDecoder()
    pieces = [stream[at : at + piece_bytes] for at in range(0, len(stream), piece_bytes)]
    assert [payload for piece in pieces for payload in decoder.feed(piece)] == payloads


def test_nothing_is_nothing() -> None:
    """An empty piece changes nothing, also between the halves of a CRLF."""
    decoder = SseDecoder()
    assert [decoder.feed(piece) for piece in (b"data: a\r", b"", b"\n\r\n", b"")] == [[], [], [b"a"], []]


@pytest.mark.parametrize("piece_bytes", [1, 7, 1_000])
def test_the_largest_event(piece_bytes: int) -> None:
    """An event of exactly the bound passes and one byte more is refused, however it is cut."""

    def feed(stream: bytes) -> list[bytes]:
        decoder = SseDecoder(event_bytes_max=20)
        pieces = [stream[at : at + piece_bytes] for at in range(0, len(stream), piece_bytes)]
        return [payload for piece in pieces for payload in decoder.feed(piece)]

    assert feed(b"data: " + b"x" * 14 + b"\n\n") == [b"x" * 14]
    with pytest.raises(EngineError):
        feed(b"data: " + b"x" * 15 + b"\n\n")


def test_an_event_without_an_end_is_bounded() -> None:
    """A stream that never ends its event is refused instead of collected."""
    decoder = SseDecoder(event_bytes_max=20)
    decoder.feed(b"x" * 21)
    with pytest.raises(EngineError):
        decoder.feed(b"x")
