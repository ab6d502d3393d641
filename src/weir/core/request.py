"""One request's life as a state machine, and what a caller asked for.

    received ──▶ queued ──▶ dispatched ──▶ streaming ──▶ COMPLETED
       │           ▲            │
       ▼           └── retry ───┘     queued, dispatched, streaming ──▶ CANCELLED · EXPIRED · FAILED
    REJECTED

Why types instead of a status column. Each state is a frozen class that holds only what is true in it: `Streaming` knows the
time of its first output, `Queued` cannot. `advance` is the one function that changes state; a pair of state and event that it
does not name is an `IllegalTransition`, which is a bug of ours and ends the task group. Nobody asks "is it started, and not
complete, and not disconnected?"; they match on a type, and the checker proves the match complete.

`queued` means admitted: the hold exists and the request waits for a replica. `dispatched → queued` happens at most once, for
the one retry, and only when nothing was delivered (`Dispatched` has no first output by construction). COMPLETED may follow
`dispatched` directly: output that is not streamed, or empty. A terminal state absorbs nothing: a second ending is a bug, so
callers look before they leap (`is_terminal`), and an attempt settles exactly once.

What was rejected: a table of (state, event) pairs loses the fields; one class with optional fields is a machine in hiding.
"""

from dataclasses import dataclass, field
from typing import TypeAlias, assert_never

import msgspec

from weir.core.demands import NO_DEMANDS, Demands, ToolCall
from weir.core.endings import FinishReason, Status, ending
from weir.units import Millis, Tokens

ATTEMPTS_MAX = 2
_TURNS_OF_TOOLS, _TURNS_PER_TOOL, _TURNS_PER_CALL = 32, 4, 4
DEADLINE_MS_MAX: Millis = 3_600_000
"""The longest that a caller may ask for, from arrival to the last token."""


# ── what was asked for ───────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation. role: system, user, assistant or tool.

    tool_calls: what an assistant's turn called; tool_call_id: which call a tool's turn answers. name: of the participant.
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None

    @property
    def bytes(self) -> int:
        """UTF-8 bytes of all its text."""
        if not self.tool_calls and self.name is None and self.tool_call_id is None:
            return len(self.content.encode())
        texts = [self.content, self.tool_call_id or "", self.name or ""]
        texts += [text for call in self.tool_calls for text in (call.id, call.name, call.arguments)]
        return sum(len(text.encode()) for text in texts)


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters as OpenAI names them; None leaves the engine's default."""

    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    top_k: int | None = None


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """A parsed and checked request, the same for every surface.

    prompt: one string (a plain prompt for base models, one user message for chat models) or a conversation. is_plain: a string
    that a chat model completes too, without its chat template. Texts to embed are in the demands, beside an empty plain prompt.
    max_output_tokens: int ≥ 1 or None for the alias's default. deadline_ms: 1–3,600,000 or None for the class's default.
    request_id: the caller's idempotency key, or None. retain: its events are kept for later readers. yields: nobody waits for
    it, so that it may be preempted while it runs on capacity that was idle, and is sent again then; never of what is streamed.
    """

    model_alias: str
    prompt: str | tuple[Message, ...]
    max_output_tokens: Tokens | None = None
    deadline_ms: Millis | None = None
    stream: bool = False
    sampling: Sampling = field(default_factory=Sampling)
    session: str | None = None
    request_id: str | None = None
    demands: Demands = NO_DEMANDS
    is_plain: bool = False
    retain: bool = False
    yields: bool = False

    @property
    def prompt_bytes(self) -> int:
        """UTF-8 bytes of the input text: what it occupies in the queue's byte bound, and a bound of its tokens."""
        if isinstance(self.prompt, str):
            return len(self.prompt.encode()) + self.demands.bytes
        return sum(turn.bytes for turn in self.prompt) + self.demands.bytes

    @property
    def turns(self) -> int:
        """Number of messages; a plain prompt counts as one, tools and calls as some: a template writes much around them.

        Of what is embedded, the number of texts: a model puts a few tokens around each.
        """
        if self.demands.embedding is not None:
            return len(self.demands.embedding.texts)
        tools = len(self.demands.tools)
        written = _TURNS_OF_TOOLS + _TURNS_PER_TOOL * tools if tools else 0
        if isinstance(self.prompt, str):
            return written + 1
        return written + len(self.prompt) + _TURNS_PER_CALL * sum(len(turn.tool_calls) for turn in self.prompt)


# ── states ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Received(msgspec.Struct, frozen=True, gc=False):
    """Read completely, not yet decided."""

    arrived_ms: Millis


class Queued(msgspec.Struct, frozen=True, gc=False):
    """Admitted: its reservation is held and it waits for a replica. attempt: the number its next dispatch gets."""

    arrived_ms: Millis
    admitted_ms: Millis
    attempt: int = 1


class Dispatched(msgspec.Struct, frozen=True, gc=False):
    """Placed on a replica; nothing was handed to the client yet."""

    arrived_ms: Millis
    admitted_ms: Millis
    dispatched_ms: Millis
    attempt: int
    replica: str


class Streaming(msgspec.Struct, frozen=True, gc=False):
    """Output was handed to the client's socket; never dispatched again."""

    arrived_ms: Millis
    admitted_ms: Millis
    dispatched_ms: Millis
    attempt: int
    replica: str
    first_output_ms: Millis


class Rejected(msgspec.Struct, frozen=True, gc=False):
    """Refused before admission; leaves no row, only a counter. code: the refusal's reason code."""

    code: str


class Completed(msgspec.Struct, frozen=True, gc=False):
    """The engine ended by itself."""

    reason: FinishReason


class Cancelled(msgspec.Struct, frozen=True, gc=False):
    """Somebody who may asked to stop, or left."""

    reason: FinishReason


class Expired(msgspec.Struct, frozen=True, gc=False):
    """The deadline or the bound of waiting was reached."""

    reason: FinishReason


class Failed(msgspec.Struct, frozen=True, gc=False):
    """A part of the platform failed it."""

    reason: FinishReason


Admitted: TypeAlias = Queued | Dispatched | Streaming
Terminal: TypeAlias = Rejected | Completed | Cancelled | Expired | Failed
Ended: TypeAlias = Completed | Cancelled | Expired | Failed
RequestState: TypeAlias = Received | Admitted | Terminal


# ── events ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Admit(msgspec.Struct, frozen=True, gc=False):
    """Everything was taken and a place in the queue exists."""

    now_ms: Millis


class Reject(msgspec.Struct, frozen=True, gc=False):
    """Refused; nothing was taken. code: the refusal's reason code."""

    code: str


class Dispatch(msgspec.Struct, frozen=True, gc=False):
    """Placed on a replica that can start it now."""

    now_ms: Millis
    replica: str


class FirstOutput(msgspec.Struct, frozen=True, gc=False):
    """The first output byte was handed to the client's socket."""

    now_ms: Millis


class Requeue(msgspec.Struct, frozen=True, gc=False):
    """The attempt failed with nothing delivered and is retried."""


class End(msgspec.Struct, frozen=True, gc=False):
    """The request is over; the finish reason names the terminal status."""

    reason: FinishReason


RequestEvent: TypeAlias = Admit | Reject | Dispatch | FirstOutput | Requeue | End


class IllegalTransition(AssertionError):
    """A broken invariant: this event cannot happen in this state."""

    def __init__(self, state: RequestState, event: RequestEvent) -> None:
        super().__init__(f"{type(event).__name__} is illegal in {type(state).__name__}")


def advance(state: RequestState, event: RequestEvent) -> RequestState:
    """The state after `event`. Raises IllegalTransition for a pair the machine does not allow."""
    match state:
        case Received():
            return _advance_received(state, event)
        case Queued():
            return _advance_queued(state, event)
        case Dispatched():
            return _advance_dispatched(state, event)
        case Streaming():
            return _advance_streaming(state, event)
        case Rejected() | Completed() | Cancelled() | Expired() | Failed():
            raise IllegalTransition(state, event)
        case _:
            assert_never(state)


def _advance_received(state: Received, event: RequestEvent) -> RequestState:
    match event:
        case Admit(now_ms):
            return Queued(state.arrived_ms, now_ms)
        case Reject(code):
            return Rejected(code)
        case Dispatch() | FirstOutput() | Requeue() | End():
            raise IllegalTransition(state, event)
        case _:
            assert_never(event)


def _advance_queued(state: Queued, event: RequestEvent) -> RequestState:
    match event:
        case Dispatch(now_ms, replica):
            return Dispatched(state.arrived_ms, state.admitted_ms, now_ms, state.attempt, replica)
        case End(reason):
            ended = _ended(reason)
            if isinstance(ended, Completed):  # nothing completes without having run
                raise IllegalTransition(state, event)
            return ended
        case Admit() | Reject() | FirstOutput() | Requeue():
            raise IllegalTransition(state, event)
        case _:
            assert_never(event)


def _advance_dispatched(state: Dispatched, event: RequestEvent) -> RequestState:
    match event:
        case FirstOutput(now_ms):
            return Streaming(state.arrived_ms, state.admitted_ms, state.dispatched_ms, state.attempt, state.replica, now_ms)
        case Requeue():
            if state.attempt >= ATTEMPTS_MAX:
                raise IllegalTransition(state, event)
            return Queued(state.arrived_ms, state.admitted_ms, state.attempt + 1)
        case End(reason):
            return _ended(reason)
        case Admit() | Reject() | Dispatch():
            raise IllegalTransition(state, event)
        case _:
            assert_never(event)


def _advance_streaming(state: Streaming, event: RequestEvent) -> RequestState:
    match event:
        case End(reason):
            return _ended(reason)
        case Admit() | Reject() | Dispatch() | FirstOutput() | Requeue():
            raise IllegalTransition(state, event)
        case _:
            assert_never(event)


_ENDED_CLASS: dict[Status, type[Completed | Cancelled | Expired | Failed]] = {
    Status.COMPLETED: Completed,
    Status.CANCELLED: Cancelled,
    Status.EXPIRED: Expired,
    Status.FAILED: Failed,
}


def _ended(reason: FinishReason) -> Ended:
    return _ENDED_CLASS[ending(reason).status](reason)


def is_terminal(state: RequestState) -> bool:
    """True for the states written in capitals: nothing follows them."""
    return isinstance(state, Terminal)


def public_status(state: Queued | Dispatched | Streaming | Ended) -> Status:
    """The word a customer reads: `running` is dispatched or streaming."""
    match state:
        case Queued():
            return Status.QUEUED
        case Dispatched() | Streaming():
            return Status.RUNNING
        case Completed(reason) | Cancelled(reason) | Expired(reason) | Failed(reason):
            return ending(reason).status
        case _:
            assert_never(state)
