"""From a parsed request to what is asked of the coordinator: revision pinned, input counted, output bounded, deadline set.

Refuses what can never work (400) before anything is asked. Counting goes to a ready replica of the revision and is bounded in
time; where none can say, the upper bound is held and the engine decides. Of a prompt, the coordinator gets keyed digests only.
"""

import asyncio
import hashlib
import hmac
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from weakref import WeakValueDictionary

import msgspec

from weir import errors
from weir.core.demands import LOGPROBS_MAX, Demands
from weir.core.metering import InputBasis, upper_bound_of_input
from weir.core.registry.abilities import lacking, makes_something_else
from weir.core.registry.model import Alias, EngineKind, Revision, WorkloadClass, workload_class_of
from weir.core.request import InferenceRequest, Message
from weir.core.routing.prefixes import MARKS_END_BYTES, marks_within
from weir.core.tenancy import Principal
from weir.gateway.inbox import Inbox
from weir.messages import Acquire, ReplicaAddress
from weir.ports import Engine
from weir.units import Bytes, Millis, Nanos, Tokens, ms_from_ns

EngineFor = Callable[[EngineKind], Engine]

MARK_DIGEST_BYTES: Bytes = 12
"""Keyed, so that nobody can aim at a collision; a false one among a million misplaces one request."""
COUNT_MS: Millis = 250
COUNTS_AT_ONCE = 2
"""Of counts that no request follows, per replica: half of what an engine is asked at once, so that requests' own find room."""
_SEPARATOR = b"\xff"  # in no UTF-8 text
_PIECE_CHARS = 16_384
_LEAST_OUTPUT: Tokens = 1
"""What a hold takes for output at least; of vectors none is counted, and it is given back."""
_OTHER_OF = {"embeddings": "text", "text": "embeddings"}


@dataclass(frozen=True, slots=True)
class Plan:
    """A request that may be asked for. request_id: the client's or a new one. deadline_ms: from arrival to the last token."""

    principal: Principal
    request: InferenceRequest
    request_id: str
    alias: Alias
    revision: Revision
    workload: WorkloadClass
    input_tokens: Tokens
    input_basis: InputBasis
    max_output_tokens: Tokens
    deadline_ms: Millis


class Planner:
    """digest_key and salt_key: the platform's secrets for body digests and for cache salts."""

    def __init__(self, inbox: Inbox, engine_for: EngineFor, digest_key: bytes, salt_key: bytes) -> None:
        self._inbox = inbox
        self._engine_for = engine_for
        # Copies of a keyed state: half the cost of a one-shot digest, which also gives the interpreter's lock away each time.
        self._digest_state = hmac.new(digest_key, digestmod=hashlib.sha256)
        self._salt_state = hmac.new(salt_key, digestmod=hashlib.sha256)
        self._gates: WeakValueDictionary[tuple[str, str], asyncio.Semaphore] = WeakValueDictionary()

    async def plan(self, principal: Principal, request: InferenceRequest, request_id: str) -> Plan:
        """Pin the revision, count and bound. Raises UnknownAlias, InvalidRequest, UnsupportedField or InputTooLong."""
        snapshot = self._inbox.snapshot
        alias, revision = self._checked(principal, request, request_id)
        counted = await self._count(self._inbox.counting_replica(revision.id, principal.tenant), revision, request)
        basis = InputBasis.UPPER_BOUND if counted is None else InputBasis.EXACT
        input_tokens = upper_bound_of_input(request.prompt_bytes, request.turns) if counted is None else counted
        workload = workload_class_of(snapshot.workload_classes, principal.service_class, input_tokens)
        max_output = _max_output(request, alias, revision, counted)
        _refuse_too_many_logprobs(request.demands, max_output)
        deadline_ms = request.deadline_ms or workload.default_deadline_ms
        return Plan(principal, request, request_id, alias, revision, workload, input_tokens, basis, max_output, deadline_ms)

    async def count(self, principal: Principal, request: InferenceRequest, request_id: str) -> tuple[Tokens, InputBasis]:
        """Input tokens of a request that nobody makes now, and how they were counted. Raises as `plan`, but for its size.

        Bounded in number and time apart from what `plan` asks; the upper bound where it cannot be counted within that.
        """
        _, revision = self._checked(principal, request, request_id)
        replica = self._inbox.counting_replica(revision.id, principal.tenant)
        counted = None
        if replica is not None:
            own, gate = self._gate(("tenant", principal.tenant), 1), self._gate(("replica", replica.name), COUNTS_AT_ONCE)
            try:
                async with asyncio.timeout(COUNT_MS / 1e3), own, gate:
                    counted = await self._count(replica, revision, request)
            except TimeoutError:
                pass
        if counted is None:
            return upper_bound_of_input(request.prompt_bytes, request.turns), InputBasis.UPPER_BOUND
        return counted, InputBasis.EXACT

    def _gate(self, name: tuple[str, str], places: int) -> asyncio.Semaphore:
        """A gate of so many places: one for each tenant, so that none holds all of a replica's."""
        gate = self._gates.get(name)
        if gate is None:
            gate = self._gates[name] = asyncio.Semaphore(places)
        return gate

    def _checked(self, principal: Principal, request: InferenceRequest, request_id: str) -> tuple[Alias, Revision]:
        """The caller's revision, if it serves what is asked for."""
        alias, revision = self._resolve(principal, request, request_id)
        _check_kind(request, revision)
        self._refuse_lacking(principal.tenant, revision, request)
        return alias, revision

    def _refuse_lacking(self, tenant: str, revision: Revision, request: InferenceRequest) -> None:
        """Raises UnsupportedField for what this revision's engine cannot do."""
        refused = lacking(request, revision.engine)
        if refused is None and request.demands.tools and self._inbox.refuses_tools(revision.id, tenant):
            refused = "tools", "absent: this model's chat template takes none"
        if refused is not None:
            field, accepted = refused
            raise errors.UnsupportedField(
                f"This model's engine does not serve '{field}' as asked.", members={"field": field, "accepted": accepted}
            )

    def _resolve(self, principal: Principal, request: InferenceRequest, request_id: str) -> tuple[Alias, Revision]:
        """The caller's revision; a canary that has no ready replica for this caller leaves it to the stable one."""
        snapshot = self._inbox.snapshot
        alias, revision = snapshot.resolve(principal, request.model_alias, request.session or request_id)
        if revision.id != alias.revision and not self._inbox.is_ready_for(revision.id, principal):
            return snapshot.resolve(principal, request.model_alias)
        return alias, revision

    async def _count(self, replica: ReplicaAddress | None, revision: Revision, request: InferenceRequest) -> Tokens | None:
        if replica is None:
            return None
        engine = self._engine_for(revision.engine)
        if (embedding := request.demands.embedding) is not None:  # of several, a count each would cost more than it tells
            [text, *more] = embedding.texts
            return None if more else await engine.count_input(replica, text, False)
        chat = revision.chat and not request.is_plain
        return await engine.count_input(replica, request.prompt, chat, request.demands)

    def cache_salt(self, plan: Plan) -> str:
        """What keeps this tenant's prefix cache apart from every other's on engines with salted caches."""
        scope = msgspec.json.encode((plan.principal.tenant, plan.revision.id))
        return _keyed(self._salt_state, scope).hex()

    def prefix(self, plan: Plan) -> tuple[bytes, ...]:
        """Digests of the prompt's beginnings at its marks, this tenant's and revision's own; empty where none is of use."""
        if not self._inbox.has_choice(plan.revision.id):
            return ()
        request = plan.request
        beginning = _beginning(request.prompt)
        marks = marks_within(len(beginning))
        if not marks:
            return ()
        owner = (plan.principal.tenant, plan.revision.id)
        scope = msgspec.json.encode(("prefix", *owner, request.demands.tools, request.is_plain))
        state = hashlib.blake2b(digest_size=MARK_DIGEST_BYTES, key=_keyed(self._salt_state, scope))
        digests = []
        with memoryview(beginning) as view:
            for start, end in pairwise((0, *marks)):
                state.update(view[start:end])
                digests.append(state.digest())
        return tuple(digests)

    def digest(self, plan: Plan) -> bytes:
        """Keyed digest of the request after defaults, without request id, stream and deadline."""
        request = plan.request
        asked = request.max_output_tokens or plan.alias.default_max_output_tokens  # not what the window left of it
        body = (
            request.model_alias,
            request.prompt,
            asked,
            request.sampling,
            request.session,
            request.demands,
            request.is_plain,
        )
        return _keyed(self._digest_state, msgspec.json.encode(body))


def _check_kind(request: InferenceRequest, revision: Revision) -> None:
    """Raises UnsupportedField or InvalidRequest for what a revision of this kind never does."""
    if (made := makes_something_else(request, revision)) is not None:
        raise errors.UnsupportedField(
            f"This model makes {made}, and nothing else.",
            members={"field": "model_alias", "accepted": f"an alias of a model that makes {_OTHER_OF[made]}"},
        )
    if not revision.chat and not isinstance(request.prompt, str):
        raise errors.InvalidRequest(
            "This model completes plain text and takes no conversation.",
            members={"field": "input", "accepted": "a string"},
        )


def _refuse_too_many_logprobs(demands: Demands, max_output: Tokens) -> None:
    """Raises InvalidRequest for more log probabilities than are kept."""
    reported = 0 if demands.top_logprobs is None else (1 + demands.top_logprobs) * max_output * demands.choices
    if reported > LOGPROBS_MAX:
        raise errors.InvalidRequest(
            "This output may report more log probabilities than are kept.",
            members={"field": "logprobs", "accepted": f"(1 + alternatives) × output tokens × choices up to {LOGPROBS_MAX}"},
        )


def _keyed(state: hmac.HMAC, message: bytes) -> bytes:
    copy = state.copy()
    copy.update(message)
    return copy.digest()


def _beginning(prompt: str | tuple[Message, ...]) -> bytearray:
    """The prompt as it is digested, to the last mark and little further; what is appended to a prompt changes nothing of it."""
    beginning = bytearray()
    for piece in _pieces((Message("user", prompt),) if isinstance(prompt, str) else prompt):
        beginning += piece
        if len(beginning) >= MARKS_END_BYTES:
            break
    return beginning


def _pieces(turns: tuple[Message, ...]) -> Iterator[bytes]:
    """Roles and texts, divided, in pieces of bounded size; nothing follows the last text, so that it may grow."""
    for number, turn in enumerate(turns):
        yield (_SEPARATOR if number else b"") + turn.role.encode() + _SEPARATOR
        for start in range(0, len(turn.content), _PIECE_CHARS):
            yield turn.content[start : start + _PIECE_CHARS].encode()
        for call in turn.tool_calls:
            yield call.name.encode() + _SEPARATOR + call.arguments.encode()


def _max_output(request: InferenceRequest, alias: Alias, revision: Revision, counted: Tokens | None) -> Tokens:
    """The output that is held: as asked, else the alias's default, cut to what the revision gives.

    Where the input is known exactly, also to what the window leaves.
    """
    if request.demands.embedding is not None:
        if counted is not None and counted > revision.context_tokens:
            raise errors.InputTooLong(
                f"{counted} input tokens do not fit the window of {revision.context_tokens}.",
                members={"input_tokens": counted, "limit": revision.context_tokens},
            )
        return _LEAST_OUTPUT
    asked = request.max_output_tokens
    if asked is not None and asked > revision.max_output_tokens:
        raise errors.InvalidRequest(
            f"This model gives at most {revision.max_output_tokens} output tokens.",
            members={"field": "max_output_tokens", "accepted": f"1 to {revision.max_output_tokens}"},
        )
    wanted = asked if asked is not None else min(alias.default_max_output_tokens, revision.max_output_tokens)
    if counted is None:
        return wanted
    room = revision.context_tokens - counted
    if room < (wanted if asked is not None else 1):
        raise errors.InputTooLong(
            f"{counted} input tokens and {wanted} output tokens do not fit the window of {revision.context_tokens}.",
            members={"input_tokens": counted, "limit": revision.context_tokens},
        )
    return min(wanted, room)


@dataclass(frozen=True, slots=True)
class Ids:
    """Names of a request: ref in this session, request id (the idempotency key), generation id."""

    ref: int
    request_id: str
    generation_id: str


def acquire_of(plan: Plan, ids: Ids, digest: bytes, prefix: tuple[bytes, ...], surface: str, waited_ns: Nanos) -> Acquire:
    """The message that asks for a grant. waited_ns: since the request was read, less than its deadline."""
    principal, request = plan.principal, plan.request
    return Acquire(
        ref=ids.ref,
        request_id=ids.request_id,
        request_id_given=request.request_id is not None,
        generation_id=ids.generation_id,
        body_digest=digest,
        tenant=principal.tenant,
        application=principal.application,
        key=principal.key,
        service_class=principal.service_class,
        workload_class=plan.workload.name,
        alias=plan.alias.name,
        revision=plan.revision.id,
        surface=surface,
        stream=request.stream,
        input_tokens=plan.input_tokens,
        input_basis=plan.input_basis,
        input_bytes=request.prompt_bytes,
        max_output_tokens=plan.max_output_tokens,
        choices=request.demands.choices,
        deadline_left_ms=plan.deadline_ms - ms_from_ns(waited_ns),
        waited_ns=waited_ns,
        session_key=request.session,
        prefix=prefix,
        yields=request.yields and not request.stream,
    )
