"""Protects the text of retained streams from who holds the store: nothing is read without a key, or shown in another place."""

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from weir import errors
from weir.gateway.sealing import (
    KEY_BYTES,
    KEYS_MAX,
    SEAL_BYTES,
    KeyRing,
    RingKey,
    StreamSeal,
    format_key_ring,
    open_head,
    parse_key_ring,
    seal_head,
)
from weir.kept_streams import StreamName
from weir.sim.random_source import SeededEntropy

ENTROPY = SeededEntropy(1)
RING = KeyRing.new(ENTROPY)
STREAM = StreamName("acme", "gen-1")
NAMES = st.builds(StreamName, st.sampled_from(["acme", "acme2", "a"]), st.sampled_from(["gen-1", "gen-2", "2gen-1"]))
TEXTS = st.lists(st.binary(max_size=200), max_size=8)


def sealed(name: StreamName, texts: list[bytes]) -> tuple[bytes, list[bytes], bytes]:
    """A whole stream: its head, its segments and its end."""
    head, seal = seal_head(RING, name, b"meta", ENTROPY)
    return head, [seal.seal(number, text) for number, text in enumerate(texts)], seal.seal_end(len(texts), b"end", ENTROPY)


def opened(ring: KeyRing, name: StreamName, head: bytes) -> tuple[bytes, StreamSeal]:
    """What a head opens. Raises StreamStoreUnavailable also where its key is not in the ring."""
    found = open_head(ring, name, head)
    if found is None:
        raise errors.StreamStoreUnavailable("Its key is not there.")
    return found


def opener(name: StreamName = STREAM) -> tuple[StreamSeal, StreamSeal]:
    """What seals a new stream, and what opens it elsewhere."""
    head, seal = seal_head(RING, name, b"meta", ENTROPY)
    return seal, opened(RING, name, head)[1]


def flipped(content: bytes, draw: int) -> bytes:
    """With another bit at one place."""
    place = draw % (8 * len(content))
    return (int.from_bytes(content, "big") ^ 1 << place).to_bytes(len(content), "big")


@given(NAMES, st.binary(max_size=100), TEXTS, st.binary(max_size=100), st.integers(0, 2**64 - 1))
def test_what_was_sealed_is_opened_elsewhere(
    name: StreamName, meta: bytes, texts: list[bytes], last: bytes, events: int
) -> None:
    """Protects replay: another gateway with the ring reads head, segments and end as they were, and can end the stream."""
    head, owner = seal_head(RING, name, meta, ENTROPY)
    told, other = opened(parse_key_ring(format_key_ring(RING)), name, head)
    assert told == meta
    for number, text in enumerate(texts):
        content = owner.seal(number, text)
        assert other.open(number, content) == text and len(content) == len(text) + SEAL_BYTES
    for one, two in ((owner, other), (other, owner)):
        assert two.open_end(one.seal_end(events, last, ENTROPY)) == (events, last)


def test_nothing_of_a_text_is_stored_in_clear() -> None:
    """Protects secrecy: neither text, meta nor a key is in what is stored, and equal texts do not look equal."""
    head, segments, last = sealed(STREAM, [b"the same text"] * 2)
    again, others, other_last = sealed(STREAM, [b"the same text"] * 2)
    stored = [head, *segments, last, again, *others, other_last]
    assert len(set(stored)) == len(stored)
    assert not any(word in content for content in stored for word in (b"same", b"meta", b"end", RING.newest.secret))


@settings(max_examples=300)
@given(st.integers(min_value=0))
def test_one_changed_bit_anywhere_is_refused(draw: int) -> None:
    """Protects what is shown: no bit of a head, segment or end can be changed unnoticed."""
    head, (segment,), last = sealed(STREAM, [b"text"])
    seal = opened(RING, STREAM, head)[1]
    with pytest.raises(errors.StreamStoreUnavailable):
        opened(RING, STREAM, flipped(head, draw))
    with pytest.raises(errors.StreamStoreUnavailable):
        seal.open(0, flipped(segment, draw))
    with pytest.raises(errors.StreamStoreUnavailable):
        seal.open_end(flipped(last, draw))


def test_what_is_cut_off_is_refused() -> None:
    """Protects what is shown from every loss at the back, down to nothing."""
    head, (segment,), last = sealed(STREAM, [b"text"])
    seal = opened(RING, STREAM, head)[1]
    for size in range(len(head)):
        with pytest.raises(errors.StreamStoreUnavailable):
            opened(RING, STREAM, head[:size])
    for size in range(len(segment)):
        with pytest.raises(errors.StreamStoreUnavailable):
            seal.open(0, segment[:size])
    for size in range(len(last)):
        with pytest.raises(errors.StreamStoreUnavailable):
            seal.open_end(last[:size])


@given(NAMES, NAMES)
def test_a_head_of_another_stream_or_tenant_is_refused(one: StreamName, two: StreamName) -> None:
    """Protects tenants: a stream that was moved to another name opens nowhere, also where names only run together alike."""
    assume(one != two)
    with pytest.raises(errors.StreamStoreUnavailable):
        opened(RING, two, sealed(one, [])[0])


@given(NAMES, NAMES)
def test_parts_of_another_stream_are_refused_even_under_the_same_key(one: StreamName, two: StreamName) -> None:
    """Protects tenants from a mistake with keys: a part is bound to its stream by more than the key."""
    assume(one != two)
    first, second = StreamSeal(one, bytes(KEY_BYTES), 0), StreamSeal(two, bytes(KEY_BYTES), None)
    with pytest.raises(errors.StreamStoreUnavailable):
        second.open(0, first.seal(0, b"text"))
    with pytest.raises(errors.StreamStoreUnavailable):
        second.open_end(first.seal_end(0, b"text", ENTROPY))


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_a_segment_opens_only_at_its_place(number: int, other: int) -> None:
    """Protects order: a segment that was moved, or stands where one was dropped, is refused; an end is no segment."""
    assume(number != other)
    owner, reader = opener()
    segment = owner.seal(number, b"text")
    assert reader.open(number, segment) == b"text"
    with pytest.raises(errors.StreamStoreUnavailable):
        reader.open(other, segment)
    with pytest.raises(errors.StreamStoreUnavailable):
        reader.open_end(segment)
    with pytest.raises(errors.StreamStoreUnavailable):
        reader.open(number, owner.seal_end(number, b"text", ENTROPY))


def test_no_number_seals_twice() -> None:
    """Protects secrecy: a number is a nonce, so it never seals again, and who did not make the head seals none."""
    owner, reader = opener()
    owner.seal(0, b"one")
    owner.seal(5, b"two")
    for seal, number in ((owner, 0), (owner, 5), (reader, 6)):
        with pytest.raises(AssertionError):
            seal.seal(number, b"three")


def test_two_gateways_may_end_a_stream_differently() -> None:
    """Protects secrecy where two gateways end one stream: their ends share no nonce, and each is whole."""
    owner, other = opener()
    ends = [seal.seal_end(3, b"%d" % number, ENTROPY) for number in range(50) for seal in (owner, other)]
    assert len({last[:12] for last in ends}) == len(ends)
    assert {other.open_end(last) for last in ends} == {(3, b"%d" % number) for number in range(50)}


def test_old_heads_open_until_their_key_is_dropped() -> None:
    """Protects rotation: a ring with a newer key opens what is there and seals with it; a dropped key opens nothing."""
    head, _, _ = sealed(STREAM, [])
    rotated = RING.added(ENTROPY)
    assert opened(rotated, STREAM, head)[0] == b"meta" and rotated.newest != RING.newest
    fresh, _ = seal_head(rotated, STREAM, b"new", ENTROPY)
    assert open_head(RING, STREAM, fresh) is None
    dropped = rotated.without(RING.newest.id)
    assert opened(dropped, STREAM, fresh)[0] == b"new" and open_head(dropped, STREAM, head) is None


def test_another_key_under_the_same_id_opens_nothing() -> None:
    """Protects gateways from two key files that differ: the head is refused, not misread."""
    head, _, _ = sealed(STREAM, [])
    with pytest.raises(errors.StreamStoreUnavailable):
        opened(KeyRing((replace(RING.newest, secret=bytes(KEY_BYTES)),)), STREAM, head)


def test_a_head_of_another_version_is_told_apart() -> None:
    """Protects an operator from looking for damage where a newer gateway wrote."""
    head, _, _ = sealed(STREAM, [])
    with pytest.raises(errors.StreamStoreUnavailable, match="version"):
        opened(RING, STREAM, b"\x02" + head[1:])


@given(st.integers(1, KEYS_MAX))
def test_a_ring_is_read_as_it_was_written(size: int) -> None:
    """Protects the key file: all keys come back in their order, with comments and blank lines between them."""
    ring = KeyRing.new(ENTROPY)
    for _ in range(size - 1):
        ring = ring.added(ENTROPY)
    lines = format_key_ring(ring).splitlines()
    assert (
        parse_key_ring("# newest first\n\n" + "\n".join(f"  {line}  # a key" for line in lines)) == ring and len(lines) == size
    )


def test_a_full_ring_takes_no_key_and_the_newest_stays() -> None:
    """Protects what is sealed: no key is pushed out, and the one in use is never removed."""
    ring = KeyRing.new(ENTROPY)
    with pytest.raises(errors.InvalidRequest):
        ring.without(ring.newest.id)
    with pytest.raises(errors.NotFound):
        ring.without("00000000")
    for _ in range(KEYS_MAX - 1):
        ring = ring.added(ENTROPY)
    with pytest.raises(errors.InvalidRequest):
        ring.added(ENTROPY)
    assert ring.without(ring.keys[-1].id).keys == ring.keys[:-1]


def test_a_key_is_never_shown() -> None:
    """Protects keys from logs and errors."""
    shown = repr(RING)
    assert RING.newest.id in shown and repr(RING.newest.secret) not in shown and "secret" not in shown


ONE, TWO = "0a0b0c0d " + "A" * 43 + "=", "0a0b0c0e " + "B" * 42 + "A="


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# nothing\n",
        "0a0b0c0d",
        f"{ONE} more",
        "0a0b0c0d " + "A" * 42 + "==",
        "0a0b0c0d " + "A" * 40,
        "0a0b0c0d " + "?" * 44,
        "0a0b0c0 " + "A" * 43 + "=",
        "0A0B0C0D " + "A" * 43 + "=",
        f"{ONE}\n{ONE}",
        f"{ONE}\n{TWO.replace('0a0b0c0e', '0a0b0c0d')}",
        f"{ONE}\n{ONE.replace('0a0b0c0d', '0a0b0c0e')}",
        f"{ONE}\nhunter2hunter2",
    ],
)
def test_a_file_that_is_no_ring_is_refused_without_a_word_of_it(text: str) -> None:
    """Protects gateways from a damaged key file, and a key in it from the message."""
    assert parse_key_ring(f"{ONE}\n{TWO}").keys[0] == RingKey("0a0b0c0d", bytes(KEY_BYTES))
    with pytest.raises(errors.InvalidRequest) as refused:
        parse_key_ring(text)
    assert (
        not any(word in refused.value.detail for word in ("AAAA", "BBBB", "????", "hunter2"))
        and refused.value.__cause__ is None
    )
