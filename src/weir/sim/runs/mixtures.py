"""Workloads made of another one: some of its tenants, or all of it in less time. Nothing is drawn here."""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from weir.sim.runs.arrivals import Arrival, Workload


@dataclass(frozen=True, slots=True)
class Chosen:
    """What these tenants ask for, without the others. tenants: some of the workload's."""

    workload: Workload
    tenants: tuple[str, ...]

    @property
    def label(self) -> str:
        """The whole, and how many of it."""
        return f"{self.workload.label} ({len(self.tenants)} of {len(self.workload.tenants)} tenants)"

    @property
    def span_s(self) -> float | None:
        """As long as the whole at most."""
        return self.workload.span_s

    def arrivals(self, random: Random) -> Iterator[Arrival]:
        """Their requests, at the same times."""
        tenants = frozenset(self.tenants)
        return (arrival for arrival in self.workload.arrivals(random) if arrival.tenant in tenants)


@dataclass(frozen=True, slots=True)
class Faster:
    """The same requests in less time. factor > 0: so many times the rate, below 1 more slowly."""

    workload: Workload
    factor: float

    @property
    def label(self) -> str:
        """The workload, and how many times its rate."""
        return f"{self.workload.label} ({self.factor:g} times its rate)"

    @property
    def span_s(self) -> float | None:
        """Seconds until its last request."""
        span_s = self.workload.span_s
        return None if span_s is None else span_s / self.factor

    @property
    def tenants(self) -> tuple[str, ...]:
        """Everybody who asks."""
        return self.workload.tenants

    def arrivals(self, random: Random) -> Iterator[Arrival]:
        """The requests, earlier."""
        return (arrival._replace(at_s=arrival.at_s / self.factor) for arrival in self.workload.arrivals(random))
