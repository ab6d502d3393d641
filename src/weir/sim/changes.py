"""What administrators and operators change while requests run: limits, weights, zones, prices, revocations, the wall clock.

Everything is drawn from a seed and put in force through the world; nothing here knows what the platform decides.
"""

import asyncio
from dataclasses import fields, replace
from datetime import UTC, datetime
from random import Random

from weir.core.tenancy import LIMIT_NAMES, Limits, Scope, ServiceClass
from weir.core.windows import FormerZone
from weir.sim.naive_calendar import DAY, MONTH, end_ms
from weir.sim.world import ALIAS, BRIEF, CALLERS, REVISION, World, key_of, tenant_name
from weir.units import Millis

ZONES = (
    "UTC",
    "Europe/Berlin",
    "America/New_York",
    "America/Havana",  # a midnight that does not exist, once a year
    "Asia/Kolkata",
    "Asia/Tokyo",
    "Australia/Lord_Howe",  # half an hour of summer time
    "Pacific/Kiritimati",
    "Pacific/Pago_Pago",
)
_EVES = ("2026-02-28", "2026-03-07", "2026-03-28", "2026-03-31", "2026-06-15", "2026-10-24", "2026-10-31", "2026-12-31")
"""Days before a month begins, before clocks change, or before nothing."""
_STEPS_MS = (-3 * 86_400_000, -86_400_000, -3_600_000, -300_000, -500, 700, 7_200_000, 86_400_000, 40 * 86_400_000)
_ZONE_CHANGES_MAX = 16
_WEIGHT_MAX = 8

_AMOUNTS: dict[str, tuple[int, ...]] = {
    "requests_per_minute": (4, 10, 40),
    "tokens_per_minute": (300, 1_000, 3_000),
    "concurrency": (1, 2, 6),
    "spend": (40, 150, 500, 1_500),
    "tokens": (150, 500, 2_000, 6_000),
}


# ── draws ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def wall_start_of(random: Random, zones: list[str]) -> Millis:
    """A moment close to a midnight of one of these zones, mostly one that matters."""
    noon = datetime.fromisoformat(f"{random.choice(_EVES)}T12:00").replace(tzinfo=UTC)
    return end_ms(DAY, round(noon.timestamp() * 1000), random.choice(zones)) - random.randint(-5_000, 40_000)


def weight_of(random: Random) -> int:
    """A tenant's weight, every other time that of a tenant for which none was set."""
    return random.choice([1, random.randint(1, _WEIGHT_MAX)])


def limits_of(random: Random, tenants: int) -> dict[Scope, Limits]:
    """Limits of every kind on some scopes of each tenant, small enough to be met."""
    limits: dict[Scope, Limits] = {}
    for number in range(tenants):
        for scope in random.sample(scopes_of_tenant(number), random.choice([0, 1, 2, 4])):
            names = random.sample(LIMIT_NAMES, random.choice([1, 1, 2, 4]))
            limits[scope] = Limits(**{name: _amount(random, name) for name in names})
    return limits


def scopes_of_tenant(number: int) -> list[Scope]:
    """Every scope of a tenant that a request can lie in."""
    tenant = tenant_name(number)
    callers = [(application, key_of(number, caller)) for caller, (application, _) in enumerate(CALLERS)]
    applications = sorted({application for application, _ in callers})
    wide = [Scope(tenant), *(Scope(tenant, name) for name in applications), *(Scope(tenant, *caller) for caller in callers)]
    wide += [replace(scope, alias=alias) for scope in wide for alias in (ALIAS.name, BRIEF.name)]
    return wide + [replace(scope, service_class=each) for scope in wide for each in ServiceClass]


def _amount(random: Random, name: str) -> int:
    if random.random() < 0.04:
        return 0
    return random.choice(_AMOUNTS.get(name) or _AMOUNTS[name.partition("_")[0]])


# ── changes ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def change_all_limits(world: World, random: Random) -> None:
    """Another set of limits."""
    world.change(limits=limits_of(random, world.spec.tenants))


async def change_one_limit(world: World, random: Random) -> None:
    """Raise a limit, lower it below what is spent, take it away, or set a new one; a removed one comes back later as it was."""
    limits = dict(world.snapshot.limits)
    known = [(scope, name) for scope, entry in limits.items() for name in _set_names(entry)]
    if known and random.random() < 0.7:
        scope, name = random.choice(known)
        amount: int = getattr(limits[scope], name)
        wanted = random.choice([amount * 3, amount // 4, 1, None])
    else:
        scope = random.choice(scopes_of_tenant(random.randrange(world.spec.tenants)))
        name = random.choice(LIMIT_NAMES)
        wanted = _amount(random, name)
    limits[scope] = replace(limits.get(scope, Limits()), **{name: wanted})
    world.change(limits={scope: entry for scope, entry in limits.items() if not entry.is_empty})


def _set_names(limits: Limits) -> list[str]:
    return [field.name for field in fields(limits) if getattr(limits, field.name) is not None]


async def change_time_zone(world: World, random: Random) -> None:
    """A tenant moves."""
    tenants = world.snapshot.tenants
    tenant, zone = random.choice(list(tenants.values())), random.choice(ZONES)
    if zone != tenant.time_zone and len(tenant.former_time_zones) < _ZONE_CHANGES_MAX:
        former = (*tenant.former_time_zones, FormerZone(tenant.time_zone, world.clock.wall_ms()))
        world.change(tenants={**tenants, tenant.name: replace(tenant, time_zone=zone, former_time_zones=former)})


async def change_weights(world: World, random: Random) -> None:
    """Every tenant gets another share of busy pools, again and again for some seconds, so that it happens while they wait."""
    for _ in range(random.randint(1, 40)):
        tenants = world.snapshot.tenants
        world.change(tenants={name: replace(tenant, weight=weight_of(random)) for name, tenant in tenants.items()})
        await asyncio.sleep(random.uniform(0, 0.4))


async def change_reach(world: World, random: Random) -> None:
    """Tenants may leave their pools, or not any more; what was admitted stays where it is."""
    for _ in range(random.randint(1, 6)):
        tenants = world.snapshot.tenants
        name = random.choice(list(tenants))
        moved = replace(tenants[name], leaves_its_pools=not tenants[name].leaves_its_pools)
        world.change(tenants={**tenants, name: moved})
        await asyncio.sleep(random.uniform(0, 2))


async def change_price(world: World, random: Random) -> None:
    """The next version of the price schedule: dearer, cheaper, or free, cached input at any price, and any part for batch."""
    revision = world.snapshot.revisions[REVISION.id]
    price = replace(
        revision.price,
        version=revision.price.version + 1,
        input_microusd=random.choice([0, 1, 200_000, 3_000_000]),
        cached_input_microusd=random.choice([0, 50_000, 200_000]),
        output_microusd=random.choice([0, 600_000, 5_000_000]),
        batch_percent=random.choice([0, 33, 50, 100]),
    )
    prices = {**world.snapshot.prices, (revision.id, price.version): price}
    world.change(revisions={revision.id: replace(revision, price=price)}, prices=prices)


async def revoke(world: World, random: Random) -> None:
    """A key goes, or an application with all its keys."""
    snapshot = world.snapshot
    if random.random() < 0.7:
        victim = random.choice(list(snapshot.keys))
        world.change(keys={**snapshot.keys, victim: replace(snapshot.keys[victim], revoked=True)})
    else:
        name = random.choice(list(snapshot.applications))
        world.change(applications={**snapshot.applications, name: replace(snapshot.applications[name], revoked=True)})


async def step_wall_clock(world: World, random: Random) -> None:
    """Set the wall clock: by some time, or close to where a tenant's day or month ends."""
    if random.random() < 0.5:
        world.step_wall(random.choice(_STEPS_MS))
        return
    zone = random.choice(list(world.snapshot.tenants.values())).time_zone
    now_ms = world.clock.wall_ms()
    world.step_wall(end_ms(random.choice([DAY, MONTH]), now_ms, zone) - now_ms + random.randint(-8_000, 2_000))
