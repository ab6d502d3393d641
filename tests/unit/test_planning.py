"""Planning: what can never work is refused before anything is asked; salts and digests are each tenant's own."""

import asyncio
import tracemalloc
from dataclasses import replace

import msgspec
import pytest

from weir import errors
from weir.clock import SystemClock
from weir.core.demands import LOGPROBS_MAX, NO_DEMANDS, Demands, Embedding, FormKind, OutputForm, Tool, ToolCall
from weir.core.metering import TEMPLATE_TOKENS, TEMPLATE_TOKENS_PER_TURN, InputBasis, Price
from weir.core.registry.model import Alias, Canary, EngineKind, Pool, Revision
from weir.core.registry.snapshot import Snapshot
from weir.core.request import InferenceRequest, Message
from weir.core.routing.prefixes import MARKS_END_BYTES, MARKS_MAX
from weir.core.tenancy import Application, Principal, ServiceClass, Tenant
from weir.engines.simulated import SimulatedEngine
from weir.gateway.inbox import Inbox
from weir.gateway.planning import COUNTS_AT_ONCE, MARK_DIGEST_BYTES, Ids, Planner, acquire_of
from weir.messages import FleetView, ReplicaAddress

CHAT = Revision("chat@1", EngineKind.SIMULATED, "demo", 1_000, 500, 64, Price(1, 1, 1, 1))
BASE = replace(CHAT, id="base@1", chat=False)
VECTORS = replace(CHAT, id="vectors@1", arguments=(("embeddings", True),))
LLAMA = replace(VECTORS, id="llama@1", engine=EngineKind.LLAMACPP)
REPLICA = ReplicaAddress("r1", "chat", CHAT.id, EngineKind.SIMULATED, "", CHAT.id, 1_000, True, cache_salt=True)


def _principal(tenant: str) -> Principal:
    return Principal(tenant, "app", "key", ServiceClass.INTERACTIVE)


def _planner(*, ready: int = 1, salt_key: bytes = b"salt key", engine: SimulatedEngine | None = None) -> Planner:
    inbox = Inbox(SystemClock())
    tenants = {name: Tenant(name) for name in ("acme", "globex")}
    revisions = {"chat": CHAT, "base": BASE, "vectors": VECTORS, "llama": LLAMA}
    aliases = {name: Alias(name, revision.id, 100) for name, revision in revisions.items()}
    inbox.deliver(
        Snapshot(
            version=1,
            tenants=tenants,
            applications={(name, "app"): Application(name, "app") for name in tenants},
            aliases=aliases,
            revisions={revision.id: revision for revision in revisions.values()},
            pools={"chat": Pool("chat", CHAT.id, 1, 1), "vectors": Pool("vectors", VECTORS.id, 1, 1)},
        )
    )
    base = msgspec.structs.replace(REPLICA, revision=BASE.id)
    vectors = msgspec.structs.replace(REPLICA, revision=VECTORS.id, pool="vectors")
    inbox.deliver(FleetView((REPLICA, base, vectors) * ready))
    asked = engine or SimulatedEngine()
    return Planner(inbox, lambda kind: asked, b"digest key", salt_key)


async def _prefix(
    planner: Planner, prompt: str | tuple[Message, ...], tenant: str = "acme", revision: Revision = CHAT
) -> tuple[bytes, ...]:
    plan = await planner.plan(_principal(tenant), InferenceRequest("chat", "any"), "req-1")
    return planner.prefix(replace(plan, revision=revision, request=replace(plan.request, prompt=prompt)))


async def test_salts_differ_between_tenants_and_hold_for_one() -> None:
    """Two tenants with the same prompt never share a salted prefix cache; one tenant shares with itself."""
    planner = _planner()
    request = InferenceRequest("chat", "the same prompt")
    acme, globex = [await planner.plan(_principal(name), request, "req-1") for name in ("acme", "globex")]
    other = await planner.plan(_principal("acme"), InferenceRequest("chat", "another prompt"), "req-1")
    assert planner.cache_salt(acme) != planner.cache_salt(globex)
    assert planner.cache_salt(acme) == planner.cache_salt(other)
    assert len(planner.cache_salt(acme)) <= 128


async def test_the_digest_names_what_is_generated_and_nothing_else() -> None:
    """A retry with another deadline, id or way of delivery is the same body; another prompt is not."""
    planner = _planner()
    request = InferenceRequest("chat", "a prompt")
    same = replace(request, request_id="r", deadline_ms=5_000, stream=True, max_output_tokens=100)
    digest = planner.digest(await planner.plan(_principal("acme"), request, "req-1"))
    assert planner.digest(await planner.plan(_principal("acme"), same, "req-1")) == digest
    assert planner.digest(await planner.plan(_principal("acme"), replace(request, prompt="b"), "req-1")) != digest


async def test_the_digest_does_not_depend_on_who_could_count() -> None:
    """A retry while no replica can count is still the same body, also near the end of the window."""
    request = InferenceRequest("chat", "x" * 3_800)
    counted, uncounted = _planner(), _planner(ready=0)
    exact = await counted.plan(_principal("acme"), request, "req-1")
    bound = await uncounted.plan(_principal("acme"), request, "req-1")
    assert exact.max_output_tokens < bound.max_output_tokens
    assert counted.digest(exact) == uncounted.digest(bound)


async def test_an_exact_count_bounds_the_output() -> None:
    """A default output is cut to the window; what was asked for and cannot fit is refused with the numbers."""
    planner = _planner()
    long = InferenceRequest("chat", "x" * 3_800)
    plan = await planner.plan(_principal("acme"), long, "req-1")
    assert plan.input_basis is InputBasis.EXACT
    assert plan.max_output_tokens == 1_000 - plan.input_tokens < 100
    with pytest.raises(errors.InputTooLong) as refused:
        await planner.plan(_principal("acme"), replace(long, max_output_tokens=100), "req-1")
    assert refused.value.members == {"input_tokens": plan.input_tokens, "limit": 1_000}


async def test_without_a_counter_the_upper_bound_is_held() -> None:
    """Where nobody can count, nothing is refused as too long: the engine decides."""
    planner = _planner(ready=0)
    plan = await planner.plan(_principal("acme"), InferenceRequest("chat", "é" * 2_000), "req-1")
    assert plan.input_basis is InputBasis.UPPER_BOUND
    assert plan.input_tokens >= 4_000
    assert plan.max_output_tokens == 100


@pytest.mark.parametrize(
    ("request_", "refusal"),
    [
        (InferenceRequest("nothing", "a"), errors.UnknownAlias),
        (InferenceRequest("base", (Message("user", "a"),)), errors.InvalidRequest),
        (InferenceRequest("chat", "a", max_output_tokens=501), errors.InvalidRequest),
    ],
)
async def test_what_can_never_work_is_refused(request_: InferenceRequest, refusal: type[errors.WeirError]) -> None:
    """Unknown aliases, conversations with a base model and too much output end before anything is asked."""
    with pytest.raises(refusal):
        await _planner().plan(_principal("acme"), request_, "req-1")


async def test_appended_messages_keep_all_marks() -> None:
    """Protects affinity: a conversation's next turn is known to hold all that the last one held."""
    planner = _planner(ready=2)
    turns = tuple(Message(role, f"{number} " * 300) for number, role in enumerate(["system", *["user", "assistant"] * 4]))
    known: tuple[bytes, ...] = ()
    for end in range(1, len(turns) + 1):
        prefix = await _prefix(planner, turns[:end])
        assert len(prefix) > len(known) and prefix[: len(known)] == known
        known = prefix


async def test_a_text_that_grows_keeps_all_marks() -> None:
    """Protects affinity at a text's end, wherever a mark falls: nothing is digested there that longer texts do not have."""
    planner = _planner(ready=2)
    for size in range(500, 520):
        prefix = await _prefix(planner, "é" * size)
        longer = await _prefix(planner, "é" * size + "more" * 200)
        appended = await _prefix(planner, (Message("user", "é" * size), Message("assistant", "more" * 200)))
        assert len(prefix) in (1, 2) and longer[: len(prefix)] == appended[: len(prefix)] == prefix
        assert longer[2:] != appended[2:]


async def test_a_plain_prompt_is_known_as_one_message() -> None:
    """Protects affinity between surfaces: what the engine gets alike has the same marks."""
    planner = _planner(ready=2)
    prefix = await _prefix(planner, "x" * 1_200)
    assert len(prefix) == 2
    assert prefix == await _prefix(planner, (Message("user", "x" * 1_200),))
    assert prefix[0] != (await _prefix(planner, (Message("system", "x" * 1_200),)))[0]


async def test_what_is_divided_differently_has_other_marks() -> None:
    """Protects predictions: two messages are not one that contains what divides them."""
    planner = _planner(ready=2)
    two = (Message("user", "x" * 50), Message("user", "x" * 550))
    for divider in ("", "\x00user\x00", "user", "ÿuserÿ"):
        assert (await _prefix(planner, "x" * 50 + divider + "x" * 550))[0] != (await _prefix(planner, two))[0]


async def test_equal_prompts_share_no_mark_between_tenants_revisions_or_platforms() -> None:
    """Protects isolation: digests link no prompts across tenants, and nobody can guess a text without the secret."""
    planner, prompt = _planner(ready=2), "the same prompt " * 80
    prefixes = [
        await _prefix(planner, prompt),
        await _prefix(planner, prompt, "globex"),
        await _prefix(planner, prompt, revision=BASE),
        await _prefix(_planner(ready=2, salt_key=b"another key"), prompt),
    ]
    digests = {digest for prefix in prefixes for digest in prefix}
    assert len(digests) == 4 * len(prefixes[0]) == 8
    assert {len(digest) for digest in digests} == {MARK_DIGEST_BYTES}


@pytest.mark.parametrize(("ready", "size"), [(0, 1_000), (1, 1_000), (2, 500)])
async def test_no_marks_without_a_choice_or_a_beginning(ready: int, size: int) -> None:
    """Protects the gateway's time: one replica needs no choice, and a short prompt is not worth one."""
    assert await _prefix(_planner(ready=ready), "x" * size) == ()
    assert len(await _prefix(_planner(ready=2), "x" * 507)) == 1


@pytest.mark.parametrize("letter", ["x", "\U0001f600"])
async def test_only_the_marked_beginning_is_looked_at(letter: str) -> None:
    """Protects memory: of 8 MiB no more is copied than the marks reach, and what follows them changes nothing."""
    planner = _planner(ready=2)
    prompt = letter * ((8 << 20) // len(letter.encode()))
    plan = await planner.plan(_principal("acme"), InferenceRequest("chat", "any"), "req-1")
    whole, cut, other = (
        replace(plan, request=replace(plan.request, prompt=text)) for text in (prompt, prompt[:MARKS_END_BYTES], "y" + prompt)
    )
    tracemalloc.start()
    try:
        prefix = planner.prefix(whole)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MARKS_END_BYTES + (1 << 19)
    assert len(prefix) == MARKS_MAX
    assert planner.prefix(cut) == prefix
    assert not set(planner.prefix(other)) & set(prefix)


async def test_the_coordinator_gets_digests_and_no_text() -> None:
    """Protects privacy: what is asked of the coordinator carries the marks and nothing of the prompt."""
    planner = _planner(ready=2)
    plan = await planner.plan(_principal("acme"), InferenceRequest("chat", "a private word " * 80), "req-1")
    prefix = planner.prefix(plan)
    acquire = acquire_of(plan, Ids(1, "request", "generation"), planner.digest(plan), prefix, "native", 0)
    assert acquire.prefix == prefix and len(prefix) == 2
    assert b"private" not in msgspec.msgpack.encode(acquire)


@pytest.mark.parametrize(
    ("owner", "own_pool", "leaves", "counted"),
    [
        (None, False, False, InputBasis.EXACT),
        ("acme", False, False, InputBasis.EXACT),
        ("globex", False, False, InputBasis.UPPER_BOUND),
        (None, True, False, InputBasis.UPPER_BOUND),
        (None, True, True, InputBasis.EXACT),
    ],
)
async def test_only_engines_that_may_see_a_prompt_count_it(
    owner: str | None, own_pool: bool, leaves: bool, counted: InputBasis
) -> None:
    """Protects dedicated pools both ways: no prompt goes to another tenant's engines, nor out of its own, to be counted."""
    inbox = Inbox(SystemClock())
    pools = [replace(Pool("chat", CHAT.id, 1, 1), tenant=owner)]
    if own_pool:
        pools.append(Pool("own", CHAT.id, 1, 1, tenant="acme"))
    inbox.deliver(
        Snapshot(
            version=1,
            tenants={"acme": Tenant("acme", leaves_its_pools=leaves)},
            applications={("acme", "app"): Application("acme", "app")},
            aliases={"chat": Alias("chat", CHAT.id, 100)},
            revisions={CHAT.id: CHAT},
            pools={pool.name: pool for pool in pools},
        )
    )
    inbox.deliver(FleetView((REPLICA,)))
    planner = Planner(inbox, lambda kind: SimulatedEngine(), b"digest key", b"salt key")
    assert (await planner.plan(_principal("acme"), InferenceRequest("chat", "a question"), "req-1")).input_basis is counted


def _trying(tried: Revision, *pools: Pool, ready: tuple[str, ...], counts: bool = True) -> Planner:
    """All of the alias `chat` goes to a canary. ready: of its pools, those with a ready replica. counts: tokens."""
    inbox = Inbox(SystemClock())
    inbox.deliver(
        Snapshot(
            version=1,
            tenants={"acme": Tenant("acme")},
            applications={("acme", "app"): Application("acme", "app")},
            aliases={"chat": Alias("chat", CHAT.id, 400, Canary("ro-1", 0, tried.id, 100))},
            revisions={CHAT.id: CHAT, tried.id: tried},
            pools={pool.name: pool for pool in (Pool("chat", CHAT.id, 1, 1), *pools)},
        )
    )
    replica = msgspec.structs.replace(REPLICA, revision=tried.id, counts_tokens=counts)
    replicas = [msgspec.structs.replace(replica, name=f"{pool}-1", pool=pool) for pool in ready]
    inbox.deliver(FleetView((REPLICA, *replicas)))
    engine = SimulatedEngine()
    return Planner(inbox, lambda kind: engine, b"digest key", b"salt key")


@pytest.mark.parametrize("ready", [("shared",), ("own",), ("shared", "own"), ()])
async def test_a_canary_takes_only_whom_its_ready_replicas_may_serve(ready: tuple[str, ...]) -> None:
    """Protects tenants with pools of their own: a replica that is ready elsewhere is none for them."""
    tried = replace(CHAT, id="chat@2")
    planner = _trying(tried, Pool("shared", tried.id, 1, 1), Pool("own", tried.id, 1, 1, tenant="acme"), ready=ready)
    plan = await planner.plan(_principal("acme"), InferenceRequest("chat", "any"), "req-1")
    assert plan.revision == (tried if "own" in ready else CHAT)


async def test_a_canary_takes_only_the_classes_that_its_ready_replicas_serve() -> None:
    """Protects interactive callers while only a canary's pool for batches is ready."""
    tried = replace(CHAT, id="chat@2")
    pools = Pool("now", tried.id, 1, 1), Pool("later", tried.id, 1, 1, service_classes=(ServiceClass.BATCH,))
    plan = await _trying(tried, *pools, ready=("later",)).plan(_principal("acme"), InferenceRequest("chat", "any"), "req-1")
    assert plan.revision == CHAT


@pytest.mark.parametrize("counts", [True, False])
async def test_a_default_output_is_no_more_than_the_revision_gives(counts: bool) -> None:
    """Protects holds: an alias's default is for all that it leads to, and one of them may give less."""
    tried = replace(CHAT, id="chat@2", max_output_tokens=50)
    planner = _trying(tried, Pool("tried", tried.id, 1, 1), ready=("tried",), counts=counts)
    plan = await planner.plan(_principal("acme"), InferenceRequest("chat", "any"), "req-1")
    assert (plan.revision, plan.max_output_tokens) == (tried, 50)


class SlowCounter(SimulatedEngine):
    """Counts one after the other as it is let; most: how many it was asked for at once."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = self.most = 0
        self.let = asyncio.Event()

    async def count_input(
        self, replica: ReplicaAddress, prompt: str | tuple[Message, ...], chat: bool, demands: Demands = NO_DEMANDS
    ) -> int | None:
        self.asked += 1
        self.most = max(self.most, self.asked)
        try:
            await self.let.wait()
        finally:
            self.asked -= 1
        return await super().count_input(replica, prompt, chat, demands)


async def test_a_count_is_that_of_the_plan() -> None:
    """Who asks first what a request counts as is told what its hold will be; without a ready replica, the upper bound."""
    request = InferenceRequest("chat", (Message("user", "how long is this?"),))
    for ready in (1, 0):
        planner = _planner(ready=ready)
        plan = await planner.plan(_principal("acme"), request, "req-1")
        assert await planner.count(_principal("acme"), request, "req-1") == (plan.input_tokens, plan.input_basis)
        assert (plan.input_basis is InputBasis.EXACT) == bool(ready)


async def test_counts_are_refused_as_requests_are() -> None:
    """Nobody learns by a count of an alias that he may not use."""
    with pytest.raises(errors.UnknownAlias):
        await _planner().count(_principal("acme"), InferenceRequest("absent", "x"), "req-1")
    with pytest.raises(errors.InvalidRequest):
        await _planner().count(_principal("acme"), InferenceRequest("base", (Message("user", "x"),)), "req-1")


async def test_counts_leave_room_for_those_of_requests() -> None:
    """Many counts at once ask a replica for few at once; those that wait too long get the upper bound, and none is stuck."""
    engine = SlowCounter()
    planner = _planner(engine=engine)
    request = InferenceRequest("chat", "how long is this?")
    async with asyncio.TaskGroup() as tasks:
        callers = [_principal(tenant) for tenant in ("acme", "globex") for _ in range(10)]
        counts = [tasks.create_task(planner.count(caller, request, "req-1")) for caller in callers]
    assert {count.result()[1] for count in counts} == {InputBasis.UPPER_BOUND}
    assert engine.most == COUNTS_AT_ONCE
    engine.let.set()
    assert (await planner.count(_principal("acme"), request, "req-1"))[1] is InputBasis.EXACT


async def test_one_tenant_holds_one_place_of_those_that_count() -> None:
    """Protects the others: however much one tenant counts, a replica is asked once at a time for it."""
    engine = SlowCounter()
    planner = _planner(engine=engine)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(5):
            tasks.create_task(planner.count(_principal("acme"), InferenceRequest("chat", "x"), "req-1"))
    assert engine.most == 1


async def test_more_log_probabilities_than_are_kept_are_refused() -> None:
    """Protects everybody's time: what one answer may report is bounded before anything is held for it."""
    most = LOGPROBS_MAX // 21
    fine = InferenceRequest("chat", "x", 64, demands=Demands(top_logprobs=20, choices=most // 64))
    assert (await _planner().plan(_principal("acme"), fine, "req-1")).max_output_tokens == 64
    too_many = InferenceRequest("chat", "x", 64, demands=Demands(top_logprobs=20, choices=most // 64 + 1))
    with pytest.raises(errors.InvalidRequest) as refused:
        await _planner().plan(_principal("acme"), too_many, "req-1")
    assert refused.value.members["field"] == "logprobs"


def test_everything_that_an_engine_reads_is_input() -> None:
    """Protects holds where nobody counts: names, ids and calls have bytes, and templates write much around calls and tools."""
    call = ToolCall("id", "find", '{"é":1}')
    turns = (Message("assistant", "a", (call,)), Message("tool", "b", tool_call_id="id"), Message("user", "c", name="me"))
    form = OutputForm(FormKind.JSON_SCHEMA, "n", "{}", description="d")
    demands = Demands((Tool("t", "d", "{}"),), form=form)
    request = InferenceRequest("chat", turns, demands=demands)
    assert request.prompt_bytes == 3 + len('idfind{"é":1}'.encode()) + len("idme") + len("td{}") + len("n{}d")
    assert request.turns >= 3 + 2 + 4 > InferenceRequest("chat", turns[1:]).turns


# ── embeddings ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _texts(alias: str, *texts: str, dimensions: int | None = None) -> InferenceRequest:
    return InferenceRequest(alias, "", demands=Demands(embedding=Embedding(texts, dimensions)), is_plain=True)


@pytest.mark.parametrize(
    ("request_", "accepted"),
    [
        (InferenceRequest("vectors", "a prompt"), "an alias of a model that makes text"),
        (InferenceRequest("vectors", (Message("user", "a"),)), "an alias of a model that makes text"),
        (_texts("chat", "a"), "an alias of a model that makes embeddings"),
        (_texts("base", "a", "b"), "an alias of a model that makes embeddings"),
    ],
)
async def test_a_model_makes_text_or_embeddings(request_: InferenceRequest, accepted: str) -> None:
    """Protects callers with the wrong alias: refused before anything is held, by the name of what is wrong."""
    with pytest.raises(errors.UnsupportedField) as refused:
        await _planner().plan(_principal("acme"), request_, "req-1")
    assert refused.value.members == {"field": "model_alias", "accepted": accepted}


async def test_dimensions_where_the_engine_knows_none() -> None:
    """Protects callers: llama.cpp would answer with vectors of its own size."""
    with pytest.raises(errors.UnsupportedField) as refused:
        await _planner().plan(_principal("acme"), _texts("llama", "a", dimensions=8), "req-1")
    assert refused.value.members["field"] == "dimensions"
    assert (await _planner().plan(_principal("acme"), _texts("llama", "a"), "req-1")).max_output_tokens == 1
    assert (await _planner().plan(_principal("acme"), _texts("vectors", "a", dimensions=8), "req-1")).max_output_tokens == 1


async def test_one_text_is_counted_and_several_are_bounded() -> None:
    """Protects holds: exact where one count says it, else above all that a tokenizer may make of the texts."""
    planner = _planner()
    one = await planner.plan(_principal("acme"), _texts("vectors", "é" * 20), "req-1")
    many = await planner.plan(_principal("acme"), _texts("vectors", "é" * 20, "b"), "req-1")
    assert (one.input_tokens, one.input_basis, one.max_output_tokens) == (10, InputBasis.EXACT, 1)
    assert (many.input_basis, many.max_output_tokens) == (InputBasis.UPPER_BOUND, 1)
    assert many.request.prompt_bytes == 41 < many.input_tokens == 41 + TEMPLATE_TOKENS + 2 * TEMPLATE_TOKENS_PER_TURN


async def test_a_text_may_fill_the_window_and_no_more() -> None:
    """Protects callers: nothing is generated behind a text, so it has the whole window; beyond, it is refused."""
    planner = _planner()
    assert (await planner.plan(_principal("acme"), _texts("vectors", "a" * 4_000), "req-1")).input_tokens == 1_000
    with pytest.raises(errors.InputTooLong) as refused:
        await planner.plan(_principal("acme"), _texts("vectors", "a" * 4_001), "req-1")
    assert refused.value.members == {"input_tokens": 1_001, "limit": 1_000}
    assert (await planner.plan(_principal("acme"), _texts("vectors", "a" * 4_001, "b"), "req-1")).input_tokens > 1_000


async def test_texts_and_dimensions_are_in_the_digest() -> None:
    """Protects idempotency: other texts, another order or size under the same key are another body. No prefix is told."""
    planner = _planner(ready=2)
    same = _texts("vectors", "a", "b")
    requests = [same, _texts("vectors", "b", "a"), _texts("vectors", "ab"), _texts("vectors", "a", "b", dimensions=8)]
    plans = [await planner.plan(_principal("acme"), request, "req-1") for request in requests]
    assert len({planner.digest(plan) for plan in plans}) == 4
    assert {planner.prefix(plan) for plan in plans} == {()}
