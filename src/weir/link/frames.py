"""What travels on a link: a fixed header and a MessagePack body, many messages in one frame.

A link begins with `Hello` and `Welcome`, or `Refused`. They agree on a version of the messages: the newest that both sides
speak. A message may gain fields with a default in any version, which older readers skip; a new kind of message is sent only to
a peer of the version that brought it. The header never changes.

Every frame carries the epoch, its own number and the number of the last frame received, so that a link which broke is taken up
where it was (`delivery.py`). Number 0 is that of frames without messages.
"""

import struct
from enum import IntEnum, StrEnum
from typing import Any, TypeAlias, TypeVar

import msgspec

from weir import errors
from weir.core.registry.snapshot_parts import SnapshotPart
from weir.messages import Told, Up
from weir.units import Bytes, Millis, Tokens

Decoded = TypeVar("Decoded")

OLDEST_VERSION = 1
NEWEST_VERSION = 3
"""Of the messages that this build speaks."""
REATTACHING_VERSION = 2
"""Brought `Reattach` and its answers: before it, another coordinator meant that everything was lost."""
EVIDENCE_VERSION = 3
"""Brought control's question for the evidence of a canary."""
WITHDRAWING_VERSION = 3
"""Brought `PoolWithdrawn`: before it, only control's next replay said that a pool is no more."""

FRAME_BYTES_MAX: Bytes = 4 * 1024 * 1024
"""Of one body. The largest message is a part of a snapshot; a batch is cut before it gets here."""

_HEADER = struct.Struct(">IBQQQ")  # length of the body, kind, epoch, number, number received
_HEADER_BYTES = _HEADER.size


class Kind(IntEnum):
    """What a frame's body is."""

    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    BATCH = 4


class Frame(msgspec.Struct, frozen=True, gc=False):
    """A frame as received. number: of this one, 0 for one without messages; received: of the last one that the peer has."""

    kind: Kind
    epoch: int
    number: int
    received: int
    body: bytes


class Role(StrEnum):
    """Who greets."""

    GATEWAY = "gateway"
    CONTROL = "control"


class Hello(msgspec.Struct, frozen=True):
    """A gateway opens or takes up its session. session: unique name of this run of the gateway. token: what the link asks for.

    former: the one before. reattaches: what that one carried is told again in this one, else it ends with this greeting.
    role: control greets in the same way, with the name of its life, and is answered as `control_messages.py` says.
    """

    session: str
    token: str
    oldest_version: int = OLDEST_VERSION
    newest_version: int = NEWEST_VERSION
    former: str = ""
    reattaches: bool = False
    role: Role = Role.GATEWAY


class Terms(msgspec.Struct, frozen=True):
    """What every gateway of a cell must know, and gets from its coordinator.

    digest_key and salt_key: the cell's secrets for body digests and cache salts. step_tokens, store_wait_ms: the coordinator's.
    heartbeat_ms: each side sends something at least so often, and takes three without anything for a broken link.
    silence_ms: a gateway that heard no coordinator for so long ends its requests; lease_ms: the coordinator does, after this.
    """

    digest_key: bytes
    salt_key: bytes
    step_tokens: Tokens
    store_wait_ms: Millis
    heartbeat_ms: Millis = 1_000
    silence_ms: Millis = 10_000
    lease_ms: Millis = 15_000


class Welcome(msgspec.Struct, frozen=True):
    """The session is open. is_new: the coordinator did not know it, so whatever the gateway had in it is lost."""

    version: int
    is_new: bool
    terms: Terms


class Refused(msgspec.Struct, frozen=True):
    """There will be no session. is_final: trying again changes nothing."""

    detail: str
    is_final: bool


WireDown: TypeAlias = Told | SnapshotPart
"""What a coordinator sends: its messages, with snapshots in parts."""


class SnapshotHeld(msgspec.Struct, frozen=True, tag="snapshot_held"):
    """The gateway works by this version from now on."""

    version: int


class Leaving(msgspec.Struct, frozen=True, tag="leaving"):
    """The gateway has ended all that it carried and stops: the last message of its session."""


WireUp: TypeAlias = Up | SnapshotHeld | Leaving
"""What a gateway sends: its messages, and what it says of itself."""

_ENCODER = msgspec.msgpack.Encoder()
_HELLO = msgspec.msgpack.Decoder(Hello)
_WELCOME = msgspec.msgpack.Decoder(Welcome)
_REFUSED = msgspec.msgpack.Decoder(Refused)
_UP = msgspec.msgpack.Decoder(list[WireUp])
_DOWN = msgspec.msgpack.Decoder(list[WireDown])


def frame(kind: Kind, body: bytes = b"", *, epoch: int = 0, number: int = 0, received: int = 0) -> bytes:
    """One frame as bytes. body: at most FRAME_BYTES_MAX."""
    assert len(body) <= FRAME_BYTES_MAX
    return _HEADER.pack(len(body), kind, epoch, number, received) + body


def encode(value: Any) -> bytes:
    """The body for a greeting, or for a list of messages."""
    return _ENCODER.encode(value)


def decode_hello(body: bytes) -> Hello:
    """Raises LinkFault."""
    return decoded(_HELLO, body)


def decode_welcome(found: Frame) -> Welcome:
    """The answer to `Hello`. Raises LinkFault, also where it is a refusal."""
    return decode_answer(found, _WELCOME)


def decode_answer(found: Frame, decoder: msgspec.msgpack.Decoder[Decoded]) -> Decoded:
    """The answer to a greeting, by the decoder of what welcomes. Raises LinkFault, also where it is a refusal."""
    if found.kind is Kind.REFUSED:
        refused = decoded(_REFUSED, found.body)
        raise errors.LinkFault(refused.detail, is_final=refused.is_final)
    if found.kind is not Kind.WELCOME:
        raise errors.LinkFault("The peer did not answer as a coordinator does.")
    return decoded(decoder, found.body)


def decode_up(body: bytes) -> list[WireUp]:
    """A gateway's messages. Raises LinkFault."""
    return decoded(_UP, body)


def decode_down(body: bytes) -> list[WireDown]:
    """A coordinator's messages. Raises LinkFault."""
    return decoded(_DOWN, body)


def decoded(decoder: msgspec.msgpack.Decoder[Decoded], body: bytes) -> Decoded:
    """A body by its decoder. Raises LinkFault."""
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as fault:
        raise errors.LinkFault(f"A frame could not be read: {type(fault).__name__}.") from None


def agreed_version(hello: Hello) -> int | None:
    """The newest version of the messages that both speak; None: there is none."""
    version = min(hello.newest_version, NEWEST_VERSION)
    return version if version >= max(hello.oldest_version, OLDEST_VERSION) else None


class FrameSplitter:
    """Bytes in, frames out, however the network cuts them. What it keeps is less than one frame. body_bytes_max: of each."""

    __slots__ = ("_buffer", "body_bytes_max")

    def __init__(self, body_bytes_max: Bytes = FRAME_BYTES_MAX) -> None:
        self._buffer = bytearray()
        self.body_bytes_max = body_bytes_max

    def feed(self, piece: bytes) -> list[Frame]:
        """The frames that are complete. Raises LinkFault for what no peer of ours sends; then nothing more is to be fed."""
        kept = self._buffer
        if not kept:  # mostly a piece is whole frames, which are cut from it as it came
            frames, at = self._cut(piece)
            if at < len(piece):
                kept += piece[at:]
            return frames
        kept += piece
        frames, at = self._cut(kept)
        del kept[:at]
        return frames

    def _cut(self, data: bytes | bytearray) -> tuple[list[Frame], int]:
        """The frames that are complete, and where they end."""
        frames: list[Frame] = []
        at = 0
        while len(data) - at >= _HEADER_BYTES:
            length, kind, epoch, number, received = _HEADER.unpack_from(data, at)
            if length > self.body_bytes_max or kind not in _KINDS:
                raise errors.LinkFault("A frame has a header that no peer of this platform sends.")
            begin = at + _HEADER_BYTES
            end = begin + length
            if len(data) < end:
                break
            frames.append(Frame(_KINDS[kind], epoch, number, received, bytes(data[begin:end])))
            at = end
        return frames, at


_KINDS = {kind.value: kind for kind in Kind}
