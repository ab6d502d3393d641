"""A stream of server-sent events means the same, however the network cuts it."""

from hypothesis import given
from hypothesis import strategies as st

from weir.core.sse import SseDecoder

STREAMS = st.lists(
    st.sampled_from(
        [b"data: ", b"data:", b"data", b"\n", b"\r", b"\r\n", b"\n\n", b": x", b"id: 1", "ż".encode(), b"{}", b" "]
    ),
    max_size=40,
).map(b"".join)


def encode_event(data: bytes, *, name: str | None = None, event_id: int | None = None) -> bytes:
    """One event as bytes. data: any payload without CR; each of its lines becomes a data line. name: one line."""
    assert b"\r" not in data and (name is None or name.isprintable())
    head = (f"id: {event_id}\n" if event_id is not None else "") + (f"event: {name}\n" if name is not None else "")
    return b"%bdata: %b\n\n" % (head.encode(), data.replace(b"\n", b"\ndata: "))


def _decode(pieces: list[bytes]) -> list[bytes]:
    decoder = SseDecoder()
    return [payload for piece in pieces for payload in decoder.feed(piece)]


def _reference(stream: bytes) -> list[bytes]:
    """The standard's algorithm, line by line over the whole stream."""
    payloads: list[bytes] = []
    values: list[bytes] = []
    lines = stream.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    for line in lines[:-1]:
        name, _, value = line.partition(b":")
        if not line:
            payloads += [b"\n".join(values)] if values else []
            values = []
        elif name == b"data":
            values.append(value.removeprefix(b" "))
    return payloads


@st.composite
def _cut(draw: st.DrawFn, streams: st.SearchStrategy[bytes] = STREAMS) -> tuple[bytes, list[bytes]]:
    stream = draw(streams)
    cuts = sorted(draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    return stream, [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]


@given(_cut())
def test_any_chunking_gives_the_standards_events(case: tuple[bytes, list[bytes]]) -> None:
    """Any bytes in any pieces give what the standard's algorithm gives for the whole."""
    stream, pieces = case
    assert _decode(pieces) == _decode([stream]) == _reference(stream)


@given(st.lists(st.binary().map(lambda data: data.replace(b"\r", b"")), max_size=8), st.integers(1, 9))
def test_what_is_encoded_decodes_to_itself(payloads: list[bytes], piece_bytes: int) -> None:
    """Encoded payloads come back byte by byte, with and without names and ids."""
    stream = b"".join(
        encode_event(data, name="output" if n % 2 else None, event_id=n if n % 3 else None) for n, data in enumerate(payloads)
    )
    assert _decode([stream[at : at + piece_bytes] for at in range(0, len(stream), piece_bytes)]) == payloads
