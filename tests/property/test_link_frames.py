"""What travels on a link: frames come out as they went in however they are cut, and no bytes do more than end the link."""

import struct
from itertools import pairwise, product
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir import errors
from weir.core.endings import FinishReason, Status
from weir.core.ledger.records import Timing
from weir.core.metering import Basis, InputBasis, Price
from weir.core.registry.model import DEFAULT_WORKLOAD_CLASSES, Alias, Canary, EngineKind, Pool, Revision, RevisionState
from weir.core.registry.rollout_plan import Tolerances
from weir.core.registry.snapshot_parts import SnapshotPart
from weir.core.request import ATTEMPTS_MAX, DEADLINE_MS_MAX
from weir.core.tenancy import ApiKey, Application, ServiceClass, Tenant
from weir.core.windows import FormerZone
from weir.link import frames
from weir.link.frames import (
    FRAME_BYTES_MAX,
    Frame,
    FrameSplitter,
    Hello,
    Kind,
    Refused,
    Terms,
    Welcome,
    WireDown,
    agreed_version,
    decode_down,
    decode_hello,
    decode_up,
    decode_welcome,
    encode,
    frame,
)
from weir.messages import (
    CHOICES_MAX,
    TOKENS_MAX,
    Acquire,
    Admitted,
    AskStanding,
    AttemptUsage,
    CancelById,
    DeliveryBooked,
    Draining,
    EndBooked,
    Ended,
    EndUnbooked,
    Finish,
    FleetView,
    Found,
    GenerationRecord,
    Granted,
    HoldBooked,
    LimitView,
    Lookup,
    NotHeld,
    Progress,
    Reattach,
    Reattached,
    ReattachedAll,
    Register,
    Rejected,
    ReplicaAddress,
    ReplicaPace,
    Run,
    SnapshotFresh,
    StandingFound,
    StandingView,
    Stopped,
    StopRequest,
    Up,
)
from weir.units import INT64_MAX

_U64_MAX = 2**64 - 1
_HEADER_BYTES = 29

# ── frames ───────────────────────────────────────────────────────────────────────────────────────────────────────────

_NUMBERS = st.integers(0, _U64_MAX)
_FRAMES = st.builds(Frame, st.sampled_from(Kind), _NUMBERS, _NUMBERS, _NUMBERS, st.binary(max_size=40))


def _written(found: Frame) -> bytes:
    return frame(found.kind, found.body, epoch=found.epoch, number=found.number, received=found.received)


@given(st.lists(_FRAMES, max_size=6), st.lists(st.integers(0, 500), max_size=12))
def test_frames_come_out_as_they_went_in_however_they_are_cut(sent: list[Frame], cuts: list[int]) -> None:
    """Protects the link from the network: any cut of any bytes gives the same frames, each as soon as it is complete."""
    whole = b"".join(map(_written, sent))
    bounds = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    splitter, found = FrameSplitter(), list[Frame]()
    ends = [sum(len(_written(each)) for each in sent[: number + 1]) for number in range(len(sent))]
    for start, end in pairwise(bounds):
        found += splitter.feed(whole[start:end])
        assert len(found) == sum(complete <= end for complete in ends)
    assert found == sent


@given(st.lists(_FRAMES, max_size=3))
def test_frames_come_out_byte_by_byte(sent: list[Frame]) -> None:
    """Protects the link from the slowest network: one byte at a time is enough."""
    splitter = FrameSplitter()
    assert [found for each in sent for byte in _written(each) for found in splitter.feed(bytes([byte]))] == sent


def test_the_largest_body_passes_and_a_larger_one_ends_the_link() -> None:
    """Protects memory: what a header announces is bounded, and refused before any of it is kept."""
    largest = frame(Kind.BATCH, bytes(FRAME_BYTES_MAX))
    assert len(largest) == _HEADER_BYTES + FRAME_BYTES_MAX
    [found] = FrameSplitter().feed(largest)
    assert len(found.body) == FRAME_BYTES_MAX
    with pytest.raises(errors.LinkFault):
        FrameSplitter().feed(struct.pack(">IBQQQ", FRAME_BYTES_MAX + 1, Kind.BATCH, 1, 1, 1))


def test_a_kind_that_nobody_sends_ends_the_link() -> None:
    """Protects against another protocol on the port: its bytes are not taken for frames, also behind one of ours."""
    for kind in set(range(256)) - {kind.value for kind in Kind}:
        unknown = struct.pack(">IBQQQ", 0, kind, 1, 1, 1)
        for piece in (unknown, frame(Kind.BATCH) + unknown):
            with pytest.raises(errors.LinkFault):
                FrameSplitter().feed(piece)


@given(st.lists(st.binary(max_size=60), max_size=4))
def test_no_bytes_do_more_to_a_splitter_than_end_the_link(pieces: list[bytes]) -> None:
    """Protects the process from whatever connects: frames or a LinkFault, and nothing else."""
    splitter = FrameSplitter()
    try:
        for piece in pieces:
            assert all(isinstance(found.kind, Kind) for found in splitter.feed(piece))
    except errors.LinkFault:
        pass


# ── messages ─────────────────────────────────────────────────────────────────────────────────────────────────────────

_TEXT = 'é "\\\0\n\u2028😀'
_BYTES = b"\0\xff" * 16
_PACE = ReplicaPace(0.1, 1e-300, 1e300)
_REPLICA = ReplicaAddress(
    _TEXT, "p", "r", EngineKind.OPENAI, _TEXT, _TEXT, INT64_MAX, True, True, True, True, _TEXT, INT64_MAX, _PACE, False
)
_STANDING = StandingView(LimitView(INT64_MAX, 0, 1), LimitView(0, -1, INT64_MAX))
_RECORD = GenerationRecord(
    generation_id=_TEXT,
    request_id=_TEXT,
    execution=2,
    alias=_TEXT,
    revision=_TEXT,
    status=Status.FAILED,
    finish_reason=FinishReason.ENGINE_ERROR,
    input_tokens=INT64_MAX,
    cached_input_tokens=1,
    output_tokens=INT64_MAX,
    cost_microusd=INT64_MAX,
    basis=Basis.UNCERTAIN,
    posted=True,
    timing=Timing(0.1, 0.2, 1e-9, 1e12),
    error_code=_TEXT,
    error_detail=_TEXT,
)
_ACQUIRE = Acquire(
    ref=INT64_MAX,
    request_id=_TEXT,
    request_id_given=True,
    generation_id=_TEXT,
    body_digest=_BYTES,
    tenant=_TEXT,
    application=_TEXT,
    key=_TEXT,
    service_class=ServiceClass.BATCH,
    workload_class=_TEXT,
    alias=_TEXT,
    revision=_TEXT,
    surface=_TEXT,
    stream=True,
    input_tokens=TOKENS_MAX,
    input_basis=InputBasis.UPPER_BOUND,
    input_bytes=INT64_MAX,
    max_output_tokens=TOKENS_MAX,
    choices=CHOICES_MAX,
    deadline_left_ms=DEADLINE_MS_MAX,
    waited_ns=INT64_MAX,
    session_key=_TEXT,
    prefix=(_BYTES, b""),
    yields=True,
)
_FINISH = Finish(1, 2, FinishReason.STALLED, 3, AttemptUsage(1, 2, 3, Basis.ENGINE), 0.1, 1e-9, _TEXT, False)
_RUN = Run(1, _REPLICA, 2, INT64_MAX, 3, True, True, True)
_UP: list[Up] = [
    Register(_TEXT, _TEXT, True),
    _ACQUIRE,
    Progress(1, 2, True, INT64_MAX, True),
    _FINISH,
    Stopped(1, 2, 0.1, False),
    Reattach(_ACQUIRE, _RUN, _RUN, AttemptUsage(1, 2, 3, Basis.ENGINE), _FINISH, True),
    ReattachedAll(),
    CancelById(1, _TEXT, _TEXT),
    Lookup(1, _TEXT, _TEXT),
    AskStanding(1, _TEXT, _TEXT, _TEXT, _TEXT, ServiceClass.BATCH),
]
_PART = SnapshotPart(
    base=1,
    version=INT64_MAX,
    is_last=True,
    tenants=(Tenant(_TEXT, _TEXT, True, True, True, (FormerZone(_TEXT, INT64_MAX),), 1_000, True),),
    applications=(
        Application(_TEXT, _TEXT, ServiceClass.BATCH, frozenset([_TEXT, ""]), True),
        Application("t", "none", aliases=frozenset()),
        Application("t", "all"),
    ),
    keys=(ApiKey(_TEXT, _TEXT, _TEXT, _BYTES, True),),
    aliases=(Alias(_TEXT, _TEXT, INT64_MAX, Canary(_TEXT, 3, _TEXT, 100, Tolerances(2, 6, 26, 27, 51))),),
    tenant_aliases=(Alias(_TEXT, _TEXT, INT64_MAX, tenant=_TEXT),),
    revisions=(
        Revision(_TEXT, EngineKind.LLAMACPP, _TEXT, 1, 2, 3, Price(1, 2, 3, INT64_MAX, 50), False, True, RevisionState.REVOKED),
    ),
    pools=(Pool(_TEXT, _TEXT, 1, 2, (_TEXT, ""), True, 0, _TEXT, (ServiceClass.BATCH,), INT64_MAX),),
    gone_tenants=(_TEXT,),
    gone_applications=((_TEXT, ""),),
    gone_keys=(_BYTES,),
    gone_aliases=(_TEXT,),
    gone_tenant_aliases=((_TEXT, ""),),
    gone_revisions=(_TEXT,),
    gone_pools=(_TEXT,),
    workload_classes=DEFAULT_WORKLOAD_CLASSES,
)
_MEMBERS = {"field": _TEXT, "limit": INT64_MAX, "scope": {"tenant": _TEXT}, "list": [1, -1.5, None, True]}
_DOWN: list[WireDown] = [
    Admitted(1, 2, _STANDING),
    Granted(1, 2, _REPLICA, 3, INT64_MAX),
    Rejected(1, _TEXT, _TEXT, _MEMBERS, _STANDING, INT64_MAX, False, _RECORD),
    HoldBooked(INT64_MAX),
    DeliveryBooked(1, 2, INT64_MAX),
    Ended(1, _RECORD),
    EndBooked(1, _RECORD),
    EndUnbooked(1, _RECORD),
    StopRequest(1, FinishReason.REVOKED),
    Reattached(1, 2, _STANDING),
    NotHeld(1, False),
    Found(1, _RECORD, True),
    StandingFound(1, _STANDING),
    FleetView((_REPLICA, msgspec.structs.replace(_REPLICA, api_key=None, kv_tokens=None, pace=None))),
    Draining(),
    SnapshotFresh(INT64_MAX),
    _PART,
]
_MESSAGES = [(decode_up, message) for message in _UP] + [(decode_down, message) for message in _DOWN]


def test_every_message_is_tried_with_every_field_set() -> None:
    """Protects this file: a message or a field that is added is added here, with a value that is not its default."""
    assert [type(message) for message in _UP] == list(get_args(Up))
    assert [type(message) for message in _DOWN] == list(get_args(WireDown))
    for message in [*_UP, *_DOWN, _REPLICA, _RECORD, _STANDING]:
        for field in msgspec.structs.fields(type(message)):
            assert getattr(message, field.name) != field.default, f"{type(message).__name__}.{field.name}"


@pytest.mark.parametrize(("decode", "message"), _MESSAGES, ids=lambda value: type(value).__name__)
def test_every_message_arrives_as_it_was_sent(decode: Any, message: Any) -> None:
    """Protects the meaning of messages between processes: equal in every field, and of the same type."""
    [found] = decode(encode([message]))
    assert found == message and type(found) is type(message)


def test_messages_arrive_in_the_order_of_their_batch() -> None:
    """Protects the order of a session: many kinds in one frame stay as they were."""
    assert decode_up(encode([*_UP, *reversed(_UP)])) == [*_UP, *reversed(_UP)]
    assert decode_down(encode([*_DOWN, *reversed(_DOWN)])) == [*_DOWN, *reversed(_DOWN)]


@pytest.mark.parametrize(("decode", "message"), _MESSAGES, ids=lambda value: type(value).__name__)
def test_fields_of_a_newer_version_are_skipped(decode: Any, message: Any) -> None:
    """Protects upgrades: an older reader takes a message with more fields, in it and in what it holds, for the one it knows."""
    known = msgspec.to_builtins(message, builtin_types=(bytes,))
    assert decode(encode([_with_more(known, in_rows=not isinstance(message, Rejected))])) == [message]


def test_a_canary_of_an_older_control_has_the_usual_tolerances() -> None:
    """Protects upgrades: what did not say yet how much worse a canary may be is read as the default."""
    known = msgspec.to_builtins(_PART, builtin_types=(bytes,))
    del known["aliases"][0]["canary"]["tolerances"]
    [found] = decode_down(encode([known]))
    assert isinstance(found, SnapshotPart) and found.aliases[0].canary == Canary(_TEXT, 3, _TEXT, 100)


def _with_more(value: Any, *, in_rows: bool) -> Any:
    """The same with another field in each of its maps. in_rows: also in the maps that it holds."""
    if isinstance(value, dict):
        held = {name: _with_more(each, in_rows=True) if in_rows else each for name, each in value.items()}
        return held | {"added": {"deep": [1, None, {"deeper": b"\0"}]}}
    if isinstance(value, (list, tuple)):
        return [_with_more(each, in_rows=in_rows) for each in value]
    return value


# ── greetings ────────────────────────────────────────────────────────────────────────────────────────────────────────

_TERMS = Terms(_BYTES, b"\0", 1, 2, 3, 4, 5)


def _answer(kind: Kind, body: bytes) -> Frame:
    return Frame(kind, 1, 0, 0, body)


def test_greetings_arrive_as_they_were_sent() -> None:
    """Protects the beginning of a link: who asks, the versions, the terms; a refusal is raised with whether it is for good."""
    hello, welcome = Hello(_TEXT, _TEXT, 0, 7), Welcome(3, True, _TERMS)
    assert decode_hello(encode(hello)) == hello
    assert decode_welcome(_answer(Kind.WELCOME, encode(welcome))) == welcome
    for is_final in (True, False):
        with pytest.raises(errors.LinkFault) as fault:
            decode_welcome(_answer(Kind.REFUSED, encode(Refused(_TEXT, is_final))))
        assert fault.value.detail == _TEXT and fault.value.is_final is is_final


@pytest.mark.parametrize("kind", [Kind.HELLO, Kind.BATCH])
def test_what_is_no_answer_to_a_greeting_ends_the_link(kind: Kind) -> None:
    """Protects a gateway from a peer that is no coordinator; it may try again."""
    with pytest.raises(errors.LinkFault) as fault:
        decode_welcome(_answer(kind, encode(Welcome(1, True, _TERMS))))
    assert not fault.value.is_final


def test_greetings_of_a_newer_version_are_read() -> None:
    """Protects upgrades: versions can only be agreed on where what the newer side adds to a greeting is skipped."""
    more = {"added": [1]}
    assert decode_hello(encode({"session": "s", "token": "t"} | more)) == Hello("s", "t")
    terms = msgspec.to_builtins(_TERMS, builtin_types=(bytes,)) | more
    welcome = encode({"version": 1, "is_new": False, "terms": terms} | more)
    assert decode_welcome(_answer(Kind.WELCOME, welcome)) == Welcome(1, False, _TERMS)


def test_both_sides_speak_the_newest_version_that_both_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects upgrades one process at a time: the newest common version, and none where the ranges do not meet."""
    ranges = [(oldest, newest) for oldest, newest in product(range(1, 6), repeat=2) if oldest <= newest]
    for ours, theirs in product(ranges, repeat=2):
        monkeypatch.setattr(frames, "OLDEST_VERSION", ours[0])
        monkeypatch.setattr(frames, "NEWEST_VERSION", ours[1])
        common = set(range(ours[0], ours[1] + 1)) & set(range(theirs[0], theirs[1] + 1))
        assert agreed_version(Hello("s", "t", *theirs)) == max(common, default=None)


# ── what nobody sends ────────────────────────────────────────────────────────────────────────────────────────────────

_DECODERS = (
    decode_hello,
    decode_up,
    decode_down,
    lambda body: decode_welcome(_answer(Kind.WELCOME, body)),
    lambda body: decode_welcome(_answer(Kind.REFUSED, body)),
)


def _decode_with_every_reader(body: bytes) -> int:
    """How many refuse it. Fails where one raises anything but LinkFault."""
    refused = 0
    for decode in _DECODERS:
        try:
            decode(body)
        except errors.LinkFault:
            refused += 1
    return refused


@given(st.binary(max_size=200))
def test_no_bytes_do_more_to_a_reader_than_end_the_link(body: bytes) -> None:
    """Protects the process from whatever connects: every body is messages or a LinkFault."""
    _decode_with_every_reader(body)


@given(st.integers(0, len(_MESSAGES) - 1), st.integers(0), st.binary(max_size=6), st.integers(0, 6))
def test_a_message_with_other_bytes_in_it_is_read_or_ends_the_link(which: int, at: int, instead: bytes, left_out: int) -> None:
    """Protects the process from a peer with a fault: near a true message as well, nothing but LinkFault is raised."""
    body = encode([_MESSAGES[which][1]])
    at %= len(body)
    _decode_with_every_reader(body[:at] + instead + body[at + left_out :])


_VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), _U64_MAX) | st.floats() | st.text(max_size=4) | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4) | st.integers(0, 9), inner, max_size=3),
    max_leaves=8,
)


@given(st.integers(0, len(_MESSAGES) - 1), st.integers(0), _VALUES)
def test_a_field_with_any_value_is_read_or_ends_the_link(which: int, place: int, value: Any) -> None:
    """Protects what is behind the reader: a field has a value of its type, or the message is not taken."""
    known = msgspec.to_builtins(_MESSAGES[which][1], builtin_types=(bytes,))
    name = sorted(known)[place % len(known)]
    _decode_with_every_reader(encode([known | {name: value}]))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_output_tokens", 0),
        ("max_output_tokens", TOKENS_MAX + 1),
        ("choices", 0),
        ("choices", CHOICES_MAX + 1),
        ("input_tokens", -1),
        ("input_tokens", TOKENS_MAX + 1),
        ("input_bytes", -1),
        ("waited_ns", -1),
        ("deadline_left_ms", DEADLINE_MS_MAX + 1),
    ],
)
def test_a_question_with_a_number_that_nobody_asks_for_ends_the_link(name: str, value: int) -> None:
    """Protects the core, which asserts such bounds: they are checked as a question is read, also in one that is told again."""
    asked = msgspec.structs.replace(_ACQUIRE, **{name: value})
    for said in (asked, Reattach(asked)):
        with pytest.raises(errors.LinkFault):
            decode_up(encode([said]))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attempt", 0),
        ("attempt", ATTEMPTS_MAX + 1),
        ("lane", -1),
        ("since_ns", -1),
        ("delivered_max", -1),
        ("delivered_max", TOKENS_MAX + 1),
    ],
)
def test_a_run_with_a_number_that_there_cannot_be_ends_the_link(name: str, value: int) -> None:
    """Protects lanes and books: what a gateway tells of an attempt is one of the two that there may be, with counts."""
    run = msgspec.structs.replace(_RUN, **{name: value})
    for said in (Reattach(_ACQUIRE, run), Reattach(_ACQUIRE, _RUN, earlier=run)):
        with pytest.raises(errors.LinkFault):
            decode_up(encode([said]))


@pytest.mark.parametrize("depth", [10, 10_000, 1_000_000])
def test_a_body_may_be_nested_as_deep_as_it_likes(depth: int) -> None:
    """Protects the process: depth in a field that a reader keeps or skips ends at most the link."""
    deep = b"\x91" * depth + b"\xc0"
    for known in (Rejected(1, "c", "d", {}, StandingView()), HoldBooked(1)):
        fields = msgspec.to_builtins(known)
        fields.pop("members", None)
        body = encode([fields | {"members": {"x": None}}])[:-1] + deep
        assert _decode_with_every_reader(body) == len(_DECODERS) - (depth == 10)
    assert _decode_with_every_reader(deep) == len(_DECODERS)


@pytest.mark.parametrize(
    "head",
    [b"\xdc\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x05"],
)
def test_a_length_that_is_announced_costs_nothing(head: bytes) -> None:
    """Protects memory: a body that announces billions of elements or bytes is refused, at the top and in a field."""
    fields = encode("type") + encode("snapshot_part") + encode("base") + encode(0) + encode("version") + encode(1)
    for name in ("gone_keys", "applications", "is_last", "added"):
        assert _decode_with_every_reader(b"\x91\x84" + fields + encode(name) + head) == len(_DECODERS)
    assert _decode_with_every_reader(head) == len(_DECODERS)


def test_a_fault_says_nothing_of_what_was_in_the_frame() -> None:
    """Protects texts of tenants: what could not be read is not in the error, nor behind it."""
    with pytest.raises(errors.LinkFault) as fault:
        decode_up(encode([{"type": "lookup", "query": "secret text", "tenant": "secret text", "request_id": 1}]))
    assert "secret" not in str(fault.value) + fault.value.detail
    assert fault.value.__cause__ is None and fault.value.__suppress_context__
