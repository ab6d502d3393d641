"""Planning: what can never work is refused before anything is asked; salts and digests are each tenant's own."""

from dataclasses import replace

import pytest

from weir import errors
from weir.core.metering import InputBasis, Price
from weir.core.registry.model import Alias, EngineKind, Pool, Revision
from weir.core.registry.snapshot import Snapshot
from weir.core.request import InferenceRequest, Message
from weir.core.tenancy import Application, Principal, ServiceClass, Tenant
from weir.engines.simulated import SimulatedEngine
from weir.gateway.inbox import Inbox
from weir.gateway.planning import Planner
from weir.messages import FleetView, ReplicaAddress

CHAT = Revision("chat@1", EngineKind.SIMULATED, "demo", 1_000, 500, 64, Price(1, 1, 1, 1))
BASE = replace(CHAT, id="base@1", chat=False)
REPLICA = ReplicaAddress("r1", "chat", CHAT.id, EngineKind.SIMULATED, "", CHAT.id, 1_000, counts_tokens=True)


def _principal(tenant: str) -> Principal:
    return Principal(tenant, "app", "key", ServiceClass.INTERACTIVE)


def _planner(*, ready: bool = True) -> Planner:
    inbox = Inbox()
    tenants = {name: Tenant(name) for name in ("acme", "globex")}
    aliases = {"chat": Alias("chat", CHAT.id, 100), "base": Alias("base", BASE.id, 100)}
    inbox.deliver(
        Snapshot(
            version=1,
            tenants=tenants,
            applications={(name, "app"): Application(name, "app") for name in tenants},
            aliases=aliases,
            revisions={CHAT.id: CHAT, BASE.id: BASE},
            pools={"chat": Pool("chat", CHAT.id, 1, 1)},
        )
    )
    inbox.deliver(FleetView((REPLICA,) if ready else ()))
    engine = SimulatedEngine()
    return Planner(inbox, lambda kind: engine, b"digest key", b"salt key")


async def test_salts_differ_between_tenants_and_hold_for_one() -> None:
    """Two tenants with the same prompt never share a salted prefix cache; one tenant shares with itself."""
    planner = _planner()
    request = InferenceRequest("chat", "the same prompt")
    acme, globex = [await planner.plan(_principal(name), request) for name in ("acme", "globex")]
    other = await planner.plan(_principal("acme"), InferenceRequest("chat", "another prompt"))
    assert planner.cache_salt(acme) != planner.cache_salt(globex)
    assert planner.cache_salt(acme) == planner.cache_salt(other)
    assert len(planner.cache_salt(acme)) <= 128


async def test_the_digest_names_what_is_generated_and_nothing_else() -> None:
    """A retry with another deadline, id or way of delivery is the same body; another prompt is not."""
    planner = _planner()
    request = InferenceRequest("chat", "a prompt")
    same = replace(request, request_id="r", deadline_ms=5_000, stream=True, max_output_tokens=100)
    digest = planner.digest(await planner.plan(_principal("acme"), request))
    assert planner.digest(await planner.plan(_principal("acme"), same)) == digest
    assert planner.digest(await planner.plan(_principal("acme"), replace(request, prompt="b"))) != digest


async def test_the_digest_does_not_depend_on_who_could_count() -> None:
    """A retry while no replica can count is still the same body, also near the end of the window."""
    request = InferenceRequest("chat", "x" * 3_800)
    counted, uncounted = _planner(), _planner(ready=False)
    exact = await counted.plan(_principal("acme"), request)
    bound = await uncounted.plan(_principal("acme"), request)
    assert exact.max_output_tokens < bound.max_output_tokens
    assert counted.digest(exact) == uncounted.digest(bound)


async def test_an_exact_count_bounds_the_output() -> None:
    """A default output is cut to the window; what was asked for and cannot fit is refused with the numbers."""
    planner = _planner()
    long = InferenceRequest("chat", "x" * 3_800)
    plan = await planner.plan(_principal("acme"), long)
    assert plan.input_basis is InputBasis.EXACT
    assert plan.max_output_tokens == 1_000 - plan.input_tokens < 100
    with pytest.raises(errors.InputTooLong) as refused:
        await planner.plan(_principal("acme"), replace(long, max_output_tokens=100))
    assert refused.value.members == {"input_tokens": plan.input_tokens, "limit": 1_000}


async def test_without_a_counter_the_upper_bound_is_held() -> None:
    """Where nobody can count, nothing is refused as too long: the engine decides."""
    planner = _planner(ready=False)
    plan = await planner.plan(_principal("acme"), InferenceRequest("chat", "é" * 2_000))
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
        await _planner().plan(_principal("acme"), request_)
