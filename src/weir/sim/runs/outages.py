"""What goes wrong in a run, and when: replicas that are killed or stall, and bursts of requests, read from short texts.

    kill@60[,replica=2][,start=5m]     a replica is lost; its replacement is ready after start (else --start)
    stall@60[,for=20][,replica=2]      a replica computes nothing for a while
    burst@60,factor=5[,for=20][,tenant=NAME]   requests come so many times as often, of all tenants or of one

Without replica= it is the one that runs most. Times are from the start of the run.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from weir.sim.runs.arrivals import Burst
from weir.sim.runs.terms import Terms, refused, seconds

_OPTION = "--fault"
_ACCEPTED = "kill@TIME, stall@TIME or burst@TIME, with replica=N, for=TIME, start=TIME, factor=N, tenant=NAME where they apply"


class OutageKind(StrEnum):
    """What happens to a replica."""

    KILL = "kill"
    STALL = "stall"


@dataclass(frozen=True, slots=True)
class Outage:
    """A replica fails. replica: its place among those alive, from 1; None: the one that runs most. start_s: None as usual."""

    kind: OutageKind
    at_s: float
    replica: int | None
    for_s: float
    start_s: float | None


def faults_of(texts: Iterable[str], replicas: int, tenants: tuple[str, ...]) -> tuple[tuple[Outage, ...], tuple[Burst, ...]]:
    """Outages and bursts, in the order given. Raises InvalidRequest."""
    outages: list[Outage] = []
    bursts: list[Burst] = []
    for text in texts:
        terms = Terms(_OPTION, text)
        kind, at, when = terms.name.partition("@")
        if not at or kind not in ("kill", "stall", "burst") or terms.value:
            raise refused(_OPTION, text, _ACCEPTED)
        at_s = seconds(f"{_OPTION} {kind}@", when)
        if kind == "burst":
            bursts.append(_burst(terms, at_s, tenants))
        else:
            outages.append(_outage(terms, OutageKind(kind), at_s, replicas))
    return tuple(outages), tuple(bursts)


def _outage(terms: Terms, kind: OutageKind, at_s: float, replicas: int) -> Outage:
    replica = terms.whole("replica", 0, 1, replicas) or None
    if kind is OutageKind.STALL:
        outage = Outage(kind, at_s, replica, terms.seconds("for", 10.0), None)
        terms.close("replica", "for")
        return outage
    start_s = terms.seconds("start", -1.0)
    terms.close("replica", "start")
    return Outage(kind, at_s, replica, 0.0, start_s if start_s >= 0 else None)


def _burst(terms: Terms, at_s: float, tenants: tuple[str, ...]) -> Burst:
    for_s, factor = terms.seconds("for", 10.0), terms.number("factor", 3.0, 0, 1_000)
    tenant = terms.take("tenant", "") or None
    if tenant is not None and tenant not in tenants:
        raise refused(f"{_OPTION} tenant=", tenant, f"one of {', '.join(tenants[:10])}{', …' if len(tenants) > 10 else ''}")
    terms.close("for", "factor", "tenant")
    return Burst(at_s, for_s, factor, tenant)
