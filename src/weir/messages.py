"""The messages between a gateway and the coordinator: the same values in one process and over the wire.

They are small: no prompt, no token text. A gateway opens a session and numbers its requests with `ref`; every message about
a request carries it. Up: register · acquire · progress · finish · stopped · cancel · lookup · standing · reattach. Down:
admitted · rejected · granted · booked · ended · stop · reattached · not_held · found · snapshot · snapshot_fresh · fleet ·
draining.

A gateway that finds another coordinator than the one that its session was with tells it in the new session, before anything
else, what it carries: `reattach` for each request, then `reattached_all`. What is not among them is lost.

The tenant's concurrency returns at the terminal status; the replica's lane returns at `stopped`.
"""

from typing import Annotated, Any, TypeAlias

import msgspec

from weir.core.endings import FinishReason, Status
from weir.core.ledger.records import EndRecord, SettleRecord, Timing
from weir.core.metering import Basis, InputBasis
from weir.core.registry.model import EngineKind
from weir.core.registry.snapshot import Snapshot
from weir.core.request import ATTEMPTS_MAX, DEADLINE_MS_MAX
from weir.core.tenancy import ServiceClass
from weir.units import MicroDollars, Millis, Tokens, ns_from_ms

TOKENS_MAX: Tokens = 2**31 - 1
"""More than any context window has."""
CHOICES_MAX = 1_000
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
TokenCount: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=TOKENS_MAX)]


class ReplicaPace(msgspec.Struct, frozen=True):
    """How fast an idle replica is, measured as it became ready: first output after first_ms + input_ms per uncached token."""

    first_ms: float
    input_ms: float
    output_ms: float  # per output token after the first


class ReplicaAddress(msgspec.Struct, frozen=True):
    """Where a replica is reached and what it can do. capabilities were probed at readiness.

    kv_tokens: what its KV memory has room for, prompts and outputs of all that runs; None where it does not say.
    takes_tools: false where it says that its chat template has no place for them.
    """

    name: str
    pool: str
    revision: str
    engine: EngineKind
    url: str
    model: str  # the name that the engine wants in its `model` field
    context_tokens: Tokens
    counts_tokens: bool = False  # exact input counts through `Engine.count_input`
    continuous_usage: bool = False  # cumulative token counts on every chunk
    cache_salt: bool = False
    cache_forbidden: bool = False  # it keeps prompts apart for nobody, so every call forbids it to reuse any
    api_key: str | None = None
    kv_tokens: Tokens | None = None
    pace: ReplicaPace | None = None
    takes_tools: bool = True


# ── up: gateway → coordinator ────────────────────────────────────────────────────────────────────────────────────────


class Register(msgspec.Struct, frozen=True, tag="register"):
    """Opens a session. session: its unique name, whose part before the last point names this run of the gateway.

    former: the gateway's session before, if it had one. reattaches: what that one carried is told again.
    """

    session: str
    former: str = ""
    reattaches: bool = False

    @property
    def gateway(self) -> str:
        """The name of this run of the gateway."""
        return gateway_of(self.session)


def gateway_of(session: str) -> str:
    """The gateway whose session has this name."""
    return session.rpartition(".")[0] or session


class Acquire(msgspec.Struct, frozen=True, tag="acquire"):
    """Ask for a grant. deadline_left_ms: time from now to the last token, ≥ 1. waited_ns: time since the request was read.

    prefix: keyed digests of the prompt's beginnings, at the marks of `core/routing/prefixes.py`; empty where none are kept.
    yields: on a lane that nobody else waited for it may be ended as `preempted` while it runs.
    """

    ref: int
    request_id: str
    request_id_given: bool  # chosen by the client, so it may be bound already
    generation_id: str
    body_digest: bytes
    tenant: str
    application: str
    key: str
    service_class: ServiceClass
    workload_class: str
    alias: str
    revision: str
    surface: str
    stream: bool
    input_tokens: TokenCount
    input_basis: InputBasis
    input_bytes: Count
    max_output_tokens: Annotated[int, msgspec.Meta(ge=1, le=TOKENS_MAX)]
    choices: Annotated[int, msgspec.Meta(ge=1, le=CHOICES_MAX)]
    deadline_left_ms: Annotated[int, msgspec.Meta(le=DEADLINE_MS_MAX)]
    waited_ns: Count
    session_key: str | None = None
    prefix: tuple[bytes, ...] = ()
    yields: bool = False


def later(acquire: Acquire, elapsed_ms: Millis) -> Acquire:
    """The same question after it waited: its deadline doesn't move."""
    return msgspec.structs.replace(
        acquire,
        deadline_left_ms=acquire.deadline_left_ms - elapsed_ms,
        waited_ns=acquire.waited_ns + ns_from_ms(elapsed_ms),
    )


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """First output was handed to the client, or more delivery is wanted. delivered_max: the next step wanted, or None.

    has_output: the engine's first output came, and is not handed out yet: it waits for a durable step, or for the whole answer.
    """

    ref: int
    attempt: int
    first_output: bool = False
    delivered_max: Tokens | None = None
    has_output: bool = False


class AttemptUsage(msgspec.Struct, frozen=True):
    """What an attempt used as the gateway knows it, all choices together."""

    input_tokens: Tokens
    cached_input_tokens: Tokens
    output_tokens: Tokens
    basis: Basis


class Finish(msgspec.Struct, frozen=True, tag="finish"):
    """The gateway's account of an end. attempt: 0 while nothing is granted. usage: None where the engine never started.

    reached: False where the replica could not be connected to, so that nothing of the request can have run there.
    """

    ref: int
    attempt: int
    reason: FinishReason
    delivered_tokens: Tokens = 0
    usage: AttemptUsage | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    error_detail: str | None = None
    reached: bool = True


class Stopped(msgspec.Struct, frozen=True, tag="stopped"):
    """The engine confirmed that it runs nothing for this attempt. stop_ms: from cancel to there, None if it ended by itself."""

    ref: int
    attempt: int
    stop_ms: float | None = None
    confirmed: bool = True  # False: the engine did not confirm within its bound, so the replica is in doubt


class Run(msgspec.Struct, frozen=True):
    """An attempt that a gateway was granted, as it is there. since_ns: time since the grant.

    delivered_max: asked for so far. is_stopped: the engine runs nothing of it any more.
    """

    attempt: Annotated[int, msgspec.Meta(ge=1, le=ATTEMPTS_MAX)]
    replica: ReplicaAddress
    lane: Count
    since_ns: Count
    delivered_max: TokenCount
    has_output: bool = False
    first_output: bool = False
    is_stopped: bool = False


class Reattach(msgspec.Struct, frozen=True, tag="reattach"):
    """A request that another coordinator decided about, or was asked to. acquire: as it would be asked for now.

    run: its last attempt, None where nothing was granted; earlier: the one before, and lost: what that one used. finish: what
    was reported and is not answered; is_ended: the former coordinator ended it so, and it was told. Answered by `reattached`
    where its hold is open, by `end_booked` where it has ended, else by `not_held`; then `stopped` follows of what still runs.
    """

    acquire: Acquire
    run: Run | None = None
    earlier: Run | None = None
    lost: AttemptUsage | None = None
    finish: Finish | None = None
    is_ended: bool = False


class ReattachedAll(msgspec.Struct, frozen=True, tag="reattached_all"):
    """Everything that the gateway carries was told again."""


class CancelById(msgspec.Struct, frozen=True, tag="cancel_by_id"):
    """Cancel a tenant's request by its id; answered by `found` once it is terminal."""

    query: int
    tenant: str
    request_id: str


class Lookup(msgspec.Struct, frozen=True, tag="lookup"):
    """Ask for the latest execution of a request id; answered by `found`."""

    query: int
    tenant: str
    request_id: str


class AskStanding(msgspec.Struct, frozen=True, tag="ask_standing"):
    """Ask for the caller's per-minute limits; answered by `standing_found`. An older gateway names no class."""

    query: int
    tenant: str
    application: str
    key: str
    alias: str
    service_class: ServiceClass = ServiceClass.INTERACTIVE


Up: TypeAlias = Register | Acquire | Progress | Finish | Stopped | Reattach | ReattachedAll | CancelById | Lookup | AskStanding


# ── down: coordinator → gateway ──────────────────────────────────────────────────────────────────────────────────────


class LimitView(msgspec.Struct, frozen=True):
    """A per-minute limit as headers show it; None: unlimited."""

    limit: int | None = None
    remaining: int | None = None
    reset_ms: Millis | None = None


class StandingView(msgspec.Struct, frozen=True):
    """The caller's own tightest per-minute limits."""

    requests: LimitView = LimitView()
    tokens: LimitView = LimitView()


class GenerationRecord(msgspec.Struct, frozen=True):
    """An execution as its tenant may see it. posted: its settlement is durable. Amounts are the tenant's."""

    generation_id: str
    request_id: str
    execution: int
    alias: str
    revision: str
    status: Status
    finish_reason: FinishReason | None = None
    input_tokens: Tokens = 0
    cached_input_tokens: Tokens = 0
    output_tokens: Tokens = 0
    cost_microusd: MicroDollars = 0
    basis: Basis | None = None
    posted: bool = False
    timing: Timing = Timing()
    error_code: str | None = None
    error_detail: str | None = None


def ended_record(shown: GenerationRecord, end: EndRecord, *, posted: bool) -> GenerationRecord:
    """The public record of an execution with the ledger's record of its end in it."""
    settled = end if isinstance(end, SettleRecord) else None
    return msgspec.structs.replace(
        shown,
        status=end.status,
        finish_reason=end.finish_reason,
        input_tokens=settled.input_tokens if settled else 0,
        cached_input_tokens=settled.cached_input_tokens if settled else 0,
        output_tokens=settled.output_tokens if settled else 0,
        cost_microusd=settled.cost_microusd if settled else 0,
        basis=settled.basis if settled else None,
        posted=posted,
        timing=end.timing,
        error_code=end.error_code,
        error_detail=end.error_detail,
    )


class Granted(msgspec.Struct, frozen=True, tag="granted"):
    """Start now. lane: the replica's slot, 0 … concurrency − 1. delivered_max: booked so far, not durable before `booked`."""

    ref: int
    attempt: int
    replica: ReplicaAddress
    lane: int
    delivered_max: Tokens


class Admitted(msgspec.Struct, frozen=True, tag="admitted"):
    """Queued with everything taken; comes once per request, before granted."""

    ref: int
    execution: int
    standing: StandingView


class Rejected(msgspec.Struct, frozen=True, tag="rejected"):
    """Refused; nothing was taken. generation: the bound execution behind a conflict."""

    ref: int
    code: str
    detail: str
    members: dict[str, Any]
    standing: StandingView
    retry_after_ms: Millis | None = None
    should_retry: bool | None = None
    generation: GenerationRecord | None = None


class HoldBooked(msgspec.Struct, frozen=True, tag="hold_booked"):
    """The hold is durable."""

    ref: int


class DeliveryBooked(msgspec.Struct, frozen=True, tag="delivery_booked"):
    """Output up to delivered_max tokens may be handed to the client. delivered_max 0: the dispatch alone is durable."""

    ref: int
    attempt: int
    delivered_max: Tokens


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """Terminal: what the request ended as and costs. Comes in answer to `finish`, or by itself while queued."""

    ref: int
    record: GenerationRecord


class EndBooked(msgspec.Struct, frozen=True, tag="end_booked"):
    """The settlement or release is durable. record: as the store has it, should it differ from what `ended` said."""

    ref: int
    record: GenerationRecord


class EndUnbooked(msgspec.Struct, frozen=True, tag="end_unbooked"):
    """A settlement was not durable in time, and the answer was not streamed: answer ledger_unavailable and drop the output."""

    ref: int
    record: GenerationRecord


class StopRequest(msgspec.Struct, frozen=True, tag="stop"):
    """The coordinator wants a running request to end for this reason; the gateway stops the engine and answers `finish`."""

    ref: int
    reason: FinishReason


class Reattached(msgspec.Struct, frozen=True, tag="reattached"):
    """The request is held as it was, and goes on."""

    ref: int
    execution: int
    standing: StandingView


class NotHeld(msgspec.Struct, frozen=True, tag="not_held"):
    """Nothing of the request is known: nothing of it was delivered, and it may be asked for again under another ref.

    is_known: False where the store could not be asked, so that it may not.
    """

    ref: int
    is_known: bool = True


class Found(msgspec.Struct, frozen=True, tag="found"):
    """Answer to lookup and cancel_by_id; record None: unknown."""

    query: int
    record: GenerationRecord | None
    unavailable: bool = False  # the store could not be asked


class StandingFound(msgspec.Struct, frozen=True, tag="standing_found"):
    """Answer to ask_standing."""

    query: int
    standing: StandingView


class SnapshotFresh(msgspec.Struct, frozen=True, tag="snapshot_fresh"):
    """What is in force was checked against the store: it may be worked by for so long from now."""

    valid_ms: Millis


class Draining(msgspec.Struct, frozen=True, tag="draining"):
    """The coordinator admits nothing more: its gateways are not ready."""


class FleetView(msgspec.Struct, frozen=True, tag="fleet"):
    """The replicas that are ready now; gateways ask one of them to count input tokens."""

    ready: tuple[ReplicaAddress, ...]


Told: TypeAlias = (
    Admitted
    | Granted
    | Rejected
    | HoldBooked
    | DeliveryBooked
    | Ended
    | EndBooked
    | EndUnbooked
    | StopRequest
    | Reattached
    | NotHeld
    | Found
    | StandingFound
    | FleetView
    | Draining
    | SnapshotFresh
)
"""What a coordinator tells its gateways, apart from snapshots, which a wire carries in parts."""

Down: TypeAlias = Told | Snapshot
