"""The messages between control and the coordinator that leads, on a link of their own.

A link begins as a gateway's does: `Hello` with the role of control, then `ControlWelcome` or `Refused`. Then control replays
all that it knows, snapshot first, and `Replayed` puts that in force in one step; from there on each side says what changes.
Nothing is repeated on another link: a link that broke is followed by a new session, which begins with a replay.

Up: whole_part · renewed · pool · withdrawn · added · answered · doubted · drained · gone · replayed · asked.
Down: counted · demanded · condemned · answer · failed.
"""

from typing import TypeAlias

import msgspec

from weir.core.registry.model import Pool
from weir.core.registry.snapshot_parts import WholePart
from weir.link.frames import EVIDENCE_VERSION, OLDEST_VERSION, Frame, decode_answer, decoded
from weir.messages import ReplicaAddress
from weir.units import Millis


class ControlWelcome(msgspec.Struct, frozen=True):
    """The session is open. version: of the messages. heartbeat_ms: each side sends something at least so often."""

    version: int
    heartbeat_ms: Millis


# ── up: control → coordinator ────────────────────────────────────────────────────────────────────────────────────────


class SnapshotRenewed(msgspec.Struct, frozen=True, tag="renewed"):
    """The snapshot of this version was checked against the store: it may be worked by for so long."""

    version: int
    valid_ms: Millis


class PoolKept(msgspec.Struct, frozen=True, tag="pool"):
    """A pool that control keeps replicas for."""

    pool: Pool


class PoolWithdrawn(msgspec.Struct, frozen=True, tag="withdrawn"):
    """Control keeps no replicas for this pool any more."""

    pool: str


class ReplicaAdded(msgspec.Struct, frozen=True, tag="added"):
    """A replica is starting. name: no life of control ever gave it before. url: where it is, of an engine that runs already."""

    name: str
    pool: str
    concurrency: int
    url: str = ""


class ReplicaAnswered(msgspec.Struct, frozen=True, tag="answered"):
    """Its warm-up or a probe succeeded."""

    address: ReplicaAddress


class ReplicaDoubted(msgspec.Struct, frozen=True, tag="doubted"):
    """A probe of it failed."""

    pool: str
    name: str


class ReplicaDrained(msgspec.Struct, frozen=True, tag="drained"):
    """It gets no new work."""

    pool: str
    name: str


class ReplicaGone(msgspec.Struct, frozen=True, tag="gone"):
    """Its process is confirmed gone, or its address was given up."""

    pool: str
    name: str


FleetReport: TypeAlias = (
    PoolKept | PoolWithdrawn | ReplicaAdded | ReplicaAnswered | ReplicaDoubted | ReplicaDrained | ReplicaGone
)
"""What control's supervisor says of the fleet."""


class Replayed(msgspec.Struct, frozen=True, tag="replayed"):
    """That was all that control knows: what it did not name is no more."""


class AskAccounts(msgspec.Struct, frozen=True, tag="accounts"):
    """A tenant's limited accounts."""

    tenant: str


class AskOpenHolds(msgspec.Struct, frozen=True, tag="open_holds"):
    """How many holds of a tenant have not ended."""

    tenant: str


class AskReplicas(msgspec.Struct, frozen=True, tag="replicas"):
    """Every replica that is known."""


class AskPools(msgspec.Struct, frozen=True, tag="pools"):
    """Every pool."""


class AskGeneration(msgspec.Struct, frozen=True, tag="generation"):
    """The latest execution of a tenant's request id."""

    tenant: str
    request_id: str


class AskExplanations(msgspec.Struct, frozen=True, tag="explanations"):
    """Timelines of a request id, of one tenant or of all."""

    request_id: str
    tenant: str | None = None


class AskBehind(msgspec.Struct, frozen=True, tag="behind"):
    """Which gateways do not work by this snapshot version, once all do or after the bound."""

    version: int
    bound_ms: Millis


class AskEvidence(msgspec.Struct, frozen=True, tag="evidence"):
    """What is known of a rollout's canary, whose revision this is."""

    rollout: str
    revision: str


ViewQuestion: TypeAlias = AskAccounts | AskOpenHolds | AskReplicas | AskPools | AskGeneration | AskExplanations | AskEvidence
"""What is asked of the running cell."""

Question: TypeAlias = ViewQuestion | AskBehind


def version_of(question: Question) -> int:
    """The oldest version of the messages that has this question."""
    return EVIDENCE_VERSION if isinstance(question, AskEvidence) else OLDEST_VERSION


class Asked(msgspec.Struct, frozen=True, tag="asked"):
    """A question; answered by `answer` or `failed` with its number."""

    query: int
    question: Question


ControlUp: TypeAlias = WholePart | SnapshotRenewed | FleetReport | Replayed | Asked

# ── down: coordinator → control ──────────────────────────────────────────────────────────────────────────────────────


class Counted(msgspec.Struct, frozen=True, tag="counted"):
    """In which pools anything runs or waits: above 0. The first one of a session says that the replay is in force.

    unused: replicas that take no new work and on which nothing runs any more; None: that is not said.
    """

    running: dict[str, int]
    unused: tuple[str, ...] | None = None


class Demanded(msgspec.Struct, frozen=True, tag="demanded"):
    """A request asked for a pool that is on demand."""

    pool: str


class Condemned(msgspec.Struct, frozen=True, tag="condemned"):
    """This replica did not confirm that it stopped: control is to replace it."""

    replica: str


class AnswerPart(msgspec.Struct, frozen=True, tag="answer"):
    """Part of an answer. piece: of its MessagePack; is_last: it is complete."""

    query: int
    piece: bytes
    is_last: bool


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A question that has no answer: the code, the sentence and the advice of an error of ours."""

    query: int
    code: str
    detail: str
    retry_after_ms: Millis | None = None


ControlDown: TypeAlias = Counted | Demanded | Condemned | AnswerPart | Failed

_WELCOME = msgspec.msgpack.Decoder(ControlWelcome)
_UP = msgspec.msgpack.Decoder(list[ControlUp])
_DOWN = msgspec.msgpack.Decoder(list[ControlDown])


def decode_control_welcome(found: Frame) -> ControlWelcome:
    """The answer to control's greeting. Raises LinkFault, also where it is a refusal."""
    return decode_answer(found, _WELCOME)


def decode_control_up(body: bytes) -> list[ControlUp]:
    """Control's messages. Raises LinkFault."""
    return decoded(_UP, body)


def decode_control_down(body: bytes) -> list[ControlDown]:
    """The coordinator's messages to control. Raises LinkFault."""
    return decoded(_DOWN, body)
