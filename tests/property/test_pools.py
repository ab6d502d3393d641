"""Which pools may take a request: never another tenant's, never a shared one for work that stays, and refusals that say why."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir import errors
from weir.core.registry.model import Pool
from weir.core.routing.pools import accepting
from weir.core.tenancy import ServiceClass
from weir.units import Tokens

BOTH = tuple(ServiceClass)
INTERACTIVE, BATCH = ServiceClass.INTERACTIVE, ServiceClass.BATCH


def pool(
    name: str, tenant: str | None = None, classes: tuple[ServiceClass, ...] = BOTH, input_tokens_max: Tokens | None = None
) -> Pool:
    """A pool of the one revision of these tests."""
    return Pool(name, "rev", 1, 1, tenant=tenant, service_classes=classes, input_tokens_max=input_tokens_max)


def names(pools: list[Pool], tenant: str, *, leaves: bool = False, of: ServiceClass = INTERACTIVE, tokens: Tokens = 10) -> str:
    """The names of what accepts, one after another."""
    found = accepting(pools, tenant, leaves_its_pools=leaves, service_class=of, input_tokens=tokens)
    return "".join(each.name for each in found)


kept_pools = st.lists(
    st.builds(
        pool,
        st.sampled_from("abcdef"),
        st.sampled_from([None, None, "acme", "globex"]),
        st.sampled_from([BOTH, (INTERACTIVE,), (BATCH,)]),
        st.sampled_from([None, None, 5, 50]),
    ),
    max_size=6,
    unique_by=lambda made: made.name,
)


@given(kept_pools, st.sampled_from(["acme", "globex", "initech"]), st.booleans(), st.sampled_from(BOTH), st.integers(0, 60))
def test_work_reaches_only_pools_that_are_for_it(
    pools: list[Pool], tenant: str, leaves: bool, service_class: ServiceClass, tokens: Tokens
) -> None:
    """Protects dedicated pools from others' work, and their tenants' work from leaving them; order, classes, bounds."""
    own = [each for each in pools if each.tenant == tenant]
    reach = own if own and not leaves else own + [each for each in pools if each.tenant is None]
    takers = [each for each in reach if service_class in each.service_classes]
    fitting = [each for each in takers if each.input_tokens_max is None or tokens <= each.input_tokens_max]
    ask = partial(accepting, pools, tenant, leaves_its_pools=leaves, service_class=service_class, input_tokens=tokens)
    if not fitting:
        with pytest.raises(errors.InputTooLong if takers else errors.NoCapacity):
            ask()
        return
    found = ask()
    assert found == fitting == ask()
    assert {each.tenant for each in found} <= {tenant, None}
    assert not (own and not leaves) or {each.tenant for each in found} == {tenant}


def test_a_dedicated_tenant_stays_unless_it_may_leave() -> None:
    """Protects both sides of a dedicated pool: its own first, shared ones after it where that is allowed, others' never."""
    pools = [pool("s"), pool("g", "globex"), pool("a", "acme"), pool("t"), pool("b", "acme")]
    assert (names(pools, "acme"), names(pools, "acme", leaves=True)) == ("ab", "abst")
    assert (names(pools, "globex"), names(pools, "initech"), names(pools, "initech", leaves=True)) == ("g", "st", "st")


def test_a_service_class_that_no_pool_takes_is_refused() -> None:
    """Protects callers from waiting for a pool that never comes, and names nobody else's pools."""
    pools = [pool("s", classes=(BATCH,)), pool("a", "acme", (INTERACTIVE,)), pool("g", "globex")]
    assert (names(pools, "initech", of=BATCH), names(pools, "acme")) == ("s", "a")
    for tenant, service_class in (("initech", INTERACTIVE), ("acme", BATCH)):
        with pytest.raises(errors.NoCapacity) as refused:
            names(pools, tenant, of=service_class)
        assert refused.value.detail == f"No pool of this model takes {service_class} requests of this tenant."
        assert (refused.value.retry_after_ms, refused.value.retry_advice) == (None, False)
    with pytest.raises(errors.NoCapacity):
        names([], "acme")


def test_an_input_beyond_every_bound_is_refused_with_the_largest() -> None:
    """Protects long inputs: one goes to a pool that takes it, or is refused with the most that would have been taken."""
    pools = [pool("a", input_tokens_max=100), pool("b", input_tokens_max=200), pool("c", classes=(BATCH,))]
    assert [names(pools, "acme", tokens=tokens) for tokens in (100, 101, 200)] == ["ab", "b", "b"]
    with pytest.raises(errors.InputTooLong) as refused:
        names(pools, "acme", tokens=201)
    assert refused.value.members == {"input_tokens": 201, "limit": 200}
    assert names([*pools, pool("d")], "acme", tokens=201) == "d"
    assert names(pools, "acme", of=BATCH, tokens=201) == "c"


def test_an_input_that_nobody_counted_is_refused_by_no_bound() -> None:
    """Protects callers from an upper bound of their input's length: where the count is unknown, every pool may take it."""
    pools = [pool("a", input_tokens_max=100), pool("b"), pool("c", classes=(BATCH,))]
    assert accepting(pools, "acme", leaves_its_pools=False, service_class=INTERACTIVE, input_tokens=None) == pools[:2]
