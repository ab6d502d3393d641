"""What goes wrong in a run, and when, read from short texts: replicas, bursts of requests, clients that read slowly.

    kill@60[,replica=2][,start=5m]     a replica is lost; its replacement is ready after start (else --start)
    slow-start@60[,speed=0.5][,for=1m][,replica=2][,start=5m]   the same, and its replacement is slow for a while
    stall@60[,for=20][,replica=2]      a replica computes nothing for a while
    burst@60,factor=5[,for=20][,tenant=NAME]   requests come so many times as often, of all tenants or of one
    noisy@60,tenant=NAME[,factor=5][,for=20]   the same, and a tenant must be named
    slow-clients@60[,share=0.1][,rate=500][,for=20]   a share of the clients who come then reads so many bytes a second

Without replica= it is the one that runs most. Times are from the start of the run.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from weir.sim.runs.arrivals import Arrival, Burst
from weir.sim.runs.terms import Terms, refused, seconds

_OPTION = "--fault"
_KINDS = ("kill", "slow-start", "stall", "burst", "noisy", "slow-clients")
_ACCEPTED = (
    f"{', '.join(f'{kind}@TIME' for kind in _KINDS)}, with replica=N, for=TIME, start=TIME, speed=N, factor=N, tenant=NAME, "
    "share=N, rate=N where they apply"
)


class OutageKind(StrEnum):
    """What happens to a replica."""

    KILL = "kill"
    SLOW_START = "slow-start"
    STALL = "stall"


@dataclass(frozen=True, slots=True)
class Outage:
    """A replica fails. replica: its place among those alive, from 1; None: the one that runs most. start_s: None as usual.

    for_s: how long a stall lasts, or a slow start once the replacement is ready; speed: its share of the usual meanwhile.
    """

    kind: OutageKind
    at_s: float
    replica: int | None
    for_s: float
    start_s: float | None
    speed: float = 1.0


@dataclass(frozen=True, slots=True)
class SlowClients:
    """Of the requests that arrive between two times, a share 0 … 1 has a client that reads so many bytes a second."""

    at_s: float
    for_s: float
    share: float
    bytes_per_s: int

    def covers(self, arrival: Arrival) -> bool:
        """Whether its client may be one of them."""
        return self.at_s <= arrival.at_s < self.at_s + self.for_s


def faults_of(texts: Iterable[str], replicas: int, tenants: tuple[str, ...]) -> tuple[tuple[Outage, ...], tuple[Burst, ...]]:
    """Outages and bursts, in the order given; slow clients are `slow_clients_of`. Raises InvalidRequest."""
    outages: list[Outage] = []
    bursts: list[Burst] = []
    for kind, at_s, terms in _read(texts):
        if kind in ("burst", "noisy"):
            bursts.append(_burst(terms, at_s, tenants, is_named=kind == "noisy"))
        elif kind != "slow-clients":
            outages.append(_outage(terms, OutageKind(kind), at_s, replicas))
    return tuple(outages), tuple(bursts)


def slow_clients_of(texts: Iterable[str]) -> tuple[SlowClients, ...]:
    """The slow clients among the faults, in the order given. Raises InvalidRequest."""
    found: list[SlowClients] = []
    for kind, at_s, terms in _read(texts):
        if kind == "slow-clients":
            for_s, share = terms.seconds("for", 10.0), terms.number("share", 0.1, 0, 1)
            found.append(SlowClients(at_s, for_s, share, terms.whole("rate", 500, 1, 1_000_000_000)))
            terms.close("for", "share", "rate")
    return tuple(found)


def _read(texts: Iterable[str]) -> Iterator[tuple[str, float, Terms]]:
    for text in texts:
        terms = Terms(_OPTION, text)
        kind, at, when = terms.name.partition("@")
        if not at or kind not in _KINDS or terms.value:
            raise refused(_OPTION, text, _ACCEPTED)
        yield kind, seconds(f"{_OPTION} {kind}@", when), terms


def _outage(terms: Terms, kind: OutageKind, at_s: float, replicas: int) -> Outage:
    replica = terms.whole("replica", 0, 1, replicas) or None
    if kind is OutageKind.STALL:
        outage = Outage(kind, at_s, replica, terms.seconds("for", 10.0), None)
        terms.close("replica", "for")
        return outage
    start_s = terms.seconds("start", -1.0)
    restart_s = start_s if start_s >= 0 else None
    if kind is OutageKind.SLOW_START:
        outage = Outage(kind, at_s, replica, terms.seconds("for", 60.0), restart_s, terms.number("speed", 0.5, 0.01, 1))
        terms.close("replica", "start", "for", "speed")
        return outage
    terms.close("replica", "start")
    return Outage(kind, at_s, replica, 0.0, restart_s)


def _burst(terms: Terms, at_s: float, tenants: tuple[str, ...], *, is_named: bool) -> Burst:
    for_s, factor = terms.seconds("for", 10.0), terms.number("factor", 3.0, 0, 1_000)
    tenant = terms.take("tenant", "") or None
    if tenant not in tenants and (tenant is not None or is_named):
        raise refused(
            f"{_OPTION} tenant=", tenant or terms.text, f"one of {', '.join(tenants[:10])}{', …' if len(tenants) > 10 else ''}"
        )
    terms.close("for", "factor", "tenant")
    return Burst(at_s, for_s, factor, tenant)
