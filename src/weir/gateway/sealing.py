"""How what is stored of a stream is sealed: with AES-256-GCM, under a key of its own that the newest key of a ring wraps.

It decides the bytes of heads, segments and ends, and reads no clock, file or randomness. Who holds the store sees names, sizes
and times. What he changes, reorders, drops from the front or moves to another stream or tenant is refused as damaged; what he
cuts off at the back is missed, since the end holds the number of events before it. It must never show a key or a text.

    head      version 1 · id of the ring's key 4 · nonce 12 · wrapped data key 48 · sealed meta
    segment   sealed text; its nonce and associated data are its number, which is where it stands
    end       nonce 12 · sealed (number of events 8 · text)

Nonces of one data key never meet: their first byte is their kind. A ring's key wraps data keys under random nonces, so it
should be replaced long before 2³² streams.
"""

import binascii
from base64 import b64decode, b64encode
from dataclasses import dataclass, field
from typing import NoReturn

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from weir import errors
from weir.kept_streams import StreamName
from weir.ports import Entropy
from weir.units import Bytes

KEY_BYTES: Bytes = 32
KEYS_MAX = 16
SEAL_BYTES: Bytes = 16
"""By how much a sealed segment is longer than its text."""

_ID_BYTES, _NONCE_BYTES, _COUNT_BYTES = 4, 12, 8
_ID_DIGITS = frozenset("0123456789abcdef")
_VERSION = b"\x01"
_WRAPPED_AT = 1 + _ID_BYTES + _NONCE_BYTES
_META_AT = _WRAPPED_AT + KEY_BYTES + SEAL_BYTES
_META_NONCE = b"\x02" + bytes(_NONCE_BYTES - 1)
_END_NONCE = b"\x01"
# The nonce of a segment is its number, whose first of twelve bytes is 0.


@dataclass(frozen=True, slots=True)
class RingKey:
    """A key that wraps. id: 8 hex digits, no secret. secret: KEY_BYTES."""

    id: str
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class KeyRing:
    """Keys that wrap the keys of streams, newest first: it seals, all of them open.

    Raises InvalidRequest unless there are 1 … KEYS_MAX, each with another id.
    """

    keys: tuple[RingKey, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.keys) <= KEYS_MAX:
            raise errors.InvalidRequest(f"A ring has 1 to {KEYS_MAX} keys; drop an old one before another is added.")
        for key in self.keys:
            if len(key.id) != 2 * _ID_BYTES or not _ID_DIGITS.issuperset(key.id):
                raise errors.InvalidRequest(f"The id of a key has {2 * _ID_BYTES} digits, 0-9 a-f.")
            if len(key.secret) != KEY_BYTES:
                raise errors.InvalidRequest(f"The key {key.id} does not have {KEY_BYTES} bytes.")
        if len({key.id for key in self.keys}) < len(self.keys) or len({key.secret for key in self.keys}) < len(self.keys):
            raise errors.InvalidRequest("A key, or the id of one, is in the ring twice.")

    @classmethod
    def new(cls, entropy: Entropy) -> "KeyRing":
        """A ring with one fresh key."""
        return cls((_new_key(entropy),))

    @property
    def newest(self) -> RingKey:
        """The one that seals."""
        return self.keys[0]

    def find(self, key_id: str) -> RingKey | None:
        """The key of this id."""
        return next((key for key in self.keys if key.id == key_id), None)

    def added(self, entropy: Entropy) -> "KeyRing":
        """The ring with a fresh newest key. Raises InvalidRequest where it is full."""
        return KeyRing((_new_key(entropy), *self.keys))

    def without(self, key_id: str) -> "KeyRing":
        """The ring without an old key: what that sealed can't be opened any more.

        Raises NotFound where there is no such key, InvalidRequest for the newest one.
        """
        if self.find(key_id) is None:
            raise errors.NotFound("The ring has no key of this id.")
        if key_id == self.newest.id:
            raise errors.InvalidRequest("The newest key stays: what runs is sealed with it. Add another one first.")
        return KeyRing(tuple(key for key in self.keys if key.id != key_id))


def _new_key(entropy: Entropy) -> RingKey:
    return RingKey(entropy.token(_ID_BYTES).hex(), entropy.token(KEY_BYTES))


def parse_key_ring(text: str) -> KeyRing:
    """A ring from a file: a line `<id> <base64>` per key, newest first; # begins a comment.

    Raises InvalidRequest, naming the line and quoting nothing of it.
    """
    keys: list[RingKey] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            key_id, secret = words
            keys.append(RingKey(key_id, b64decode(secret, validate=True)))
        except (ValueError, binascii.Error):
            raise errors.InvalidRequest(f"Line {number} is no key: an id and 32 bytes in base64.") from None
    return KeyRing(tuple(keys))


def format_key_ring(ring: KeyRing) -> str:
    """A ring as a file, secrets included."""
    return "".join(f"{key.id} {b64encode(key.secret).decode()}\n" for key in ring.keys)


class StreamSeal:
    """The key of one stream. Every `open` raises StreamStoreUnavailable for what this stream's key did not seal as that."""

    __slots__ = ("_cipher", "_end", "_next", "_segment")

    def __init__(self, name: StreamName, data_key: bytes, next_number: int | None) -> None:
        self._cipher = AESGCM(data_key)
        self._segment = _bound_to(name, b"segment")
        self._end = _bound_to(name, b"end")
        self._next = next_number

    def seal(self, number: int, text: bytes) -> bytes:
        """Seal segment `number`, 0 … 2⁶⁴ − 1; each is sealed once, in order, by who made the head."""
        if self._next is None or number < self._next:
            # A number is a nonce: two texts sealed with one give each other away, so this holds also under `python -O`.
            raise AssertionError("a segment is sealed once, in order, by who made the head")
        self._next = number + 1
        bound = self._segment + number.to_bytes(_COUNT_BYTES, "big")
        return self._cipher.encrypt(number.to_bytes(_NONCE_BYTES, "big"), text, bound)

    def open(self, number: int, sealed: bytes) -> bytes:
        """The text of segment `number`."""
        bound = self._segment + number.to_bytes(_COUNT_BYTES, "big")
        return _opened(self._cipher, number.to_bytes(_NONCE_BYTES, "big"), sealed, bound)

    def seal_end(self, events: int, text: bytes, entropy: Entropy) -> bytes:
        """Seal an end. events: how many were before it, 0 … 2⁶⁴ − 1."""
        # Random: two gateways, of which one took the other for lost, may each seal an end of the stream, and they differ.
        nonce = _END_NONCE + entropy.token(_NONCE_BYTES - len(_END_NONCE))
        return nonce + self._cipher.encrypt(nonce, events.to_bytes(_COUNT_BYTES, "big") + text, self._end)

    def open_end(self, sealed: bytes) -> tuple[int, bytes]:
        """How many events were before the end, and its text."""
        if not sealed.startswith(_END_NONCE):
            _refuse_damaged()
        content = _opened(self._cipher, sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], self._end)
        if len(content) < _COUNT_BYTES:
            _refuse_damaged()
        return int.from_bytes(content[:_COUNT_BYTES], "big"), content[_COUNT_BYTES:]


def seal_head(ring: KeyRing, name: StreamName, meta: bytes, entropy: Entropy) -> tuple[bytes, StreamSeal]:
    """The head of a new stream, and what seals the rest of it; the stream's key is fresh, and only in the head."""
    data_key, nonce = entropy.token(KEY_BYTES), entropy.token(_NONCE_BYTES)
    begin = _VERSION + bytes.fromhex(ring.newest.id)
    wrapped = AESGCM(ring.newest.secret).encrypt(nonce, data_key, _bound_to(name, b"key") + begin)
    sealed_meta = AESGCM(data_key).encrypt(_META_NONCE, meta, _bound_to(name, b"meta"))
    return begin + nonce + wrapped + sealed_meta, StreamSeal(name, data_key, 0)


def open_head(ring: KeyRing, name: StreamName, head: bytes) -> tuple[bytes, StreamSeal] | None:
    """The meta of a stored stream, and what opens the rest of it; this can seal an end, and no segment.

    None where the ring does not have the key that sealed it: dropping a key deletes what it sealed. Raises
    StreamStoreUnavailable where the head is damaged or another's.
    """
    if len(head) < _META_AT + SEAL_BYTES:
        _refuse_damaged()
    if not head.startswith(_VERSION):
        raise errors.StreamStoreUnavailable("The stored stream is of another version.")
    key_id = head[1 : 1 + _ID_BYTES].hex()
    key = ring.find(key_id)
    if key is None:
        return None
    nonce, wrapped = head[1 + _ID_BYTES : _WRAPPED_AT], head[_WRAPPED_AT:_META_AT]
    data_key = _opened(AESGCM(key.secret), nonce, wrapped, _bound_to(name, b"key") + head[: 1 + _ID_BYTES])
    meta = _opened(AESGCM(data_key), _META_NONCE, head[_META_AT:], _bound_to(name, b"meta"))
    return meta, StreamSeal(name, data_key, None)


def _bound_to(name: StreamName, kind: bytes) -> bytes:
    """Associated data: whose it is and what. Parts lie behind their lengths, so that no two streams share it."""
    parts = (b"weir-stream", name.tenant.encode(), name.generation.encode(), kind)
    return b"".join(len(part).to_bytes(2, "big") + part for part in parts)


def _opened(cipher: AESGCM, nonce: bytes, sealed: bytes, bound: bytes) -> bytes:
    try:
        return cipher.decrypt(nonce, sealed, bound)
    except (InvalidTag, ValueError):
        _refuse_damaged()


def _refuse_damaged() -> NoReturn:
    raise errors.StreamStoreUnavailable("The stored stream is damaged.") from None
