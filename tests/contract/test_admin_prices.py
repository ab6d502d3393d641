"""Protects the management API's routes of prices over a real socket: set, shown with their schedule, in force, audited."""

from collections.abc import AsyncIterator

import pytest
from tests.contract.admin_stand import PRICE, Stand, standing

from weir.core.tenancy import Role


@pytest.fixture
async def stand() -> AsyncIterator[Stand]:
    async with standing() as made:
        yield made


async def test_a_price_is_set_shown_with_its_schedule_published_and_audited(stand: Stand) -> None:
    """Protects prices: a new version beside the old ones, in force in the snapshot, and nothing for an unchanged one."""
    first = {"version": 1, "input_microusd": 200_000, "cached_input_microusd": 50_000, "output_microusd": 600_000}
    first["batch_percent"] = 100
    revision = await stand.good("GET", "/admin/v1/revisions/small-1")
    assert (revision["price"], revision["prices"]) == (first, [first])
    second = {"version": 2, **PRICE, "batch_percent": 100}
    path = "/admin/v1/revisions/small-1/price"
    for _ in range(2):
        assert await stand.good("PUT", path, PRICE, role=Role.RELEASER) == {"revision": "small-1", "price": second}
    revision = await stand.good("GET", "/admin/v1/revisions/small-1")
    assert (revision["price"], revision["prices"]) == (second, [first, second])
    assert revision in (await stand.good("GET", "/admin/v1/revisions"))["revisions"]
    snapshot = stand.published[-1]
    assert snapshot.revisions["small-1"].price.version == 2 and snapshot.price_of("small-1", 1).output_microusd == 600_000
    entries = (await stand.good("GET", "/admin/v1/audit?limit=2"))["entries"]
    assert [entry["action"] for entry in entries].count("price.set") == 1
    assert entries[0]["subject"] == "small-1" and entries[0]["summary"] | second == entries[0]["summary"]
    stand.pending = ("gateway-2",)
    assert (await stand.good("PUT", path, PRICE | {"output_microusd": 1}, 202))["pending"] == ["gateway-2"]


async def test_what_batch_pays_is_a_version_of_its_own_and_stays_where_nothing_is_said(stand: Stand) -> None:
    """Protects discounts: set with a price, in force in the snapshot, kept by who knows only amounts, and gone at 100."""
    path = "/admin/v1/revisions/small-1/price"
    asked: list[dict[str, int | None]] = [{"batch_percent": 50}, {"batch_percent": 50}, {}, {"output_microusd": 1}]
    asked += [{"batch_percent": None}, {"batch_percent": 0}, {"batch_percent": 100}]
    answers = [(await stand.good("PUT", path, {**PRICE, **changes}))["price"] for changes in asked]
    assert [answer["version"] for answer in answers] == [2, 2, 2, 3, 4, 5, 6]
    assert [answer["batch_percent"] for answer in answers] == [50, 50, 50, 50, 50, 0, 100]
    snapshot = stand.published[-1]
    assert [snapshot.price_of("small-1", version).batch_percent for version in range(1, 7)] == [100, 50, 50, 50, 0, 100]
    [entry] = (await stand.good("GET", "/admin/v1/audit?limit=1"))["entries"]
    assert entry["summary"]["batch_percent"] == 100
