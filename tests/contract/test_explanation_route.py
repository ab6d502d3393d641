"""Protects the management API's explanations: found by tenant or by the id alone, and refused with what is kept."""

from collections.abc import AsyncIterator

import pytest
from tests.contract.admin_stand import Stand, standing


@pytest.fixture
async def stand() -> AsyncIterator[Stand]:
    async with standing() as made:
        yield made


@pytest.mark.parametrize("tenant", ["acme", "-"])
async def test_a_request_is_explained_by_its_tenant_or_by_its_id_alone(stand: Stand, tenant: str) -> None:
    """Protects the form of an explanation: the request, then its timelines with their wall-clock arrival."""
    events = [{"event": "received", "at_ms": 0.0}, {"event": "rejected", "at_ms": 0.4, "code": "budget_exhausted"}]
    arrived = {"arrived_at": "2023-11-15T12:00:00.001Z", "delivery_steps": 0, "dropped_events": 0}
    assert await stand.good("GET", f"/admin/v1/generations/{tenant}/r:1/explanation") == {
        "tenant": "acme",
        "request_id": "r:1",
        "timelines": [{"status": "rejected", "rejections": 2, **arrived, "events": events}],
    }


async def test_an_id_of_several_tenants_needs_one(stand: Stand) -> None:
    """Protects an operator from another tenant's request of the same id: the tenants are named, none is picked."""
    status, problem = await stand.bad("GET", "/admin/v1/generations/-/shared/explanation")
    assert (status, problem["code"], problem["field"]) == (400, "invalid_request", "tenant")
    assert problem["accepted"] == ["acme", "globex"]
    assert (await stand.good("GET", "/admin/v1/generations/globex/shared/explanation"))["tenant"] == "globex"


@pytest.mark.parametrize("path", ["acme/unknown", "globex/r:1", "-/unknown"])
async def test_what_is_not_kept_is_refused_with_what_is(stand: Stand, path: str) -> None:
    """Protects an operator from a bare 404: how many requests are kept, and since when."""
    status, problem = await stand.bad("GET", f"/admin/v1/generations/{path}/explanation")
    assert (status, problem["code"]) == (404, "not_found")
    assert (problem["kept"], problem["since"]) == (3, "2023-11-15T12:00:00.000Z")
    assert "3 requests" in problem["detail"] and problem["since"] in problem["detail"]


async def test_an_unknown_tenant_is_not_found(stand: Stand) -> None:
    """Protects the difference between a tenant that is none and a request that is not kept."""
    status, problem = await stand.bad("GET", "/admin/v1/generations/nobody/r:1/explanation")
    assert (status, problem["code"]) == (404, "not_found") and "kept" not in problem
