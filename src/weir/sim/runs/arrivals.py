"""Requests as they arrive: drawn from a seed, one at a time, so that hours need no memory; and bursts laid over them.

A workload says who asks for how much, and when; never whether it is served. Traces are the other workload, in `traces`.
"""

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from typing import NamedTuple, Protocol

from weir.sim.runs.terms import Terms, number, refused, whole
from weir.units import Tokens

TOKENS_MAX: Tokens = 1_000_000
"""Inputs and outputs are at most so long: more than any window holds."""
_TENANTS_MAX = 10_000
_COPY_SPREAD_S = 1.0
"""A burst's further requests come within a second of the one that they repeat: more requests, not the same moment again."""


class Arrival(NamedTuple):
    """One request. at_s: seconds from the start of the run; output_tokens: what it will generate, unknown to the platform.

    blocks: of its prompt, see `prompt_blocks`; empty where nothing is known of what it shares with others.
    """

    at_s: float
    tenant: str
    input_tokens: Tokens
    output_tokens: Tokens
    blocks: tuple[int, ...] = ()


class Workload(Protocol):
    """Who asks for what, when."""

    @property
    def label(self) -> str:
        """What it is, in a word."""
        ...

    @property
    def span_s(self) -> float | None:
        """Seconds until its last request; None: it has no end."""
        ...

    @property
    def tenants(self) -> tuple[str, ...]:
        """Everybody who asks."""
        ...

    def arrivals(self, random: Random) -> Iterator[Arrival]:
        """The requests in the order of time, the same for the same random state."""
        ...


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long inputs or outputs are: low = high is fixed, between them uniform; sigma > 0: lognormal with median low."""

    low: Tokens
    high: Tokens
    sigma: float = 0.0

    def draw(self, random: Random) -> Tokens:
        """One length, 1 … TOKENS_MAX."""
        if self.sigma:
            return min(TOKENS_MAX, max(1, round(random.lognormvariate(0.0, self.sigma) * self.low)))
        return self.low if self.low == self.high else random.randint(self.low, self.high)


def lengths_of(option: str, text: str) -> Lengths:
    """Lengths from N, LOW..HIGH or MEDIAN~SIGMA. Raises InvalidRequest."""
    median, tilde, sigma = text.partition("~")
    if tilde:
        low = whole(option, median, 1, TOKENS_MAX)
        return Lengths(low, low, number(option, sigma, 0.01, 3))
    low_text, dots, high_text = text.partition("..")
    low = whole(option, low_text, 1, TOKENS_MAX)
    high = whole(option, high_text, 1, TOKENS_MAX) if dots else low
    if low > high:
        raise refused(option, text, "a length, LOW..HIGH or MEDIAN~SIGMA")
    return Lengths(low, high)


@dataclass(frozen=True, slots=True)
class DrawnWorkload:
    """A renewal process of one rate. cv: coefficient of variation of the gaps, 1 for Poisson. shares: of each tenant, ≥ 0."""

    label: str
    rate_per_s: float
    cv: float
    input_lengths: Lengths
    output_lengths: Lengths
    shares: tuple[tuple[str, float], ...]

    @property
    def span_s(self) -> None:
        """It has no end."""

    @property
    def tenants(self) -> tuple[str, ...]:
        """Everybody who asks."""
        return tuple(name for name, _ in self.shares)

    def arrivals(self, random: Random) -> Iterator[Arrival]:
        """Requests without end."""
        names, sums = self.tenants, list(accumulate(share for _, share in self.shares))
        shape = self.cv**-2
        at_s = 0.0
        while True:
            gap = random.expovariate(1.0) if self.cv == 1 else random.gammavariate(shape, 1 / shape)
            at_s += gap / self.rate_per_s
            tenant = names[0] if len(names) == 1 else random.choices(names, cum_weights=sums)[0]
            yield Arrival(at_s, tenant, self.input_lengths.draw(random), self.output_lengths.draw(random))


def drawn_workload(text: str) -> DrawnWorkload:
    """A workload from `poisson:RATE,in=…,out=…,tenants=…,cv=…`. Raises InvalidRequest."""
    option = "--workload"
    terms = Terms(option, text)
    if terms.name != "poisson":
        raise refused(option, text, "poisson:RATE,in=LENGTH,out=LENGTH,tenants=N or NAME:SHARE/NAME:SHARE,cv=N")
    workload = DrawnWorkload(
        label=text,
        rate_per_s=number(f"{option} RATE", terms.value, 0.001, 10_000),
        cv=terms.number("cv", 1.0, 0.1, 20),
        input_lengths=lengths_of(f"{option} in=", terms.take("in", "2000")),
        output_lengths=lengths_of(f"{option} out=", terms.take("out", "300")),
        shares=_shares(terms.take("tenants", "4")),
    )
    terms.close("in", "out", "tenants", "cv")
    return workload


def _shares(text: str) -> tuple[tuple[str, float], ...]:
    option = "--workload tenants="
    if ":" not in text:
        return tuple((f"tenant-{index + 1}", 1.0) for index in range(whole(option, text, 1, _TENANTS_MAX)))
    parts = [part.partition(":") for part in text.split("/")]
    shares = tuple((name, number(option, share, 0.000_001, 1_000_000)) for name, _, share in parts)
    if len({name for name, _ in shares}) < len(shares) or not all(name for name, _ in shares):
        raise refused(option, text, f"a number of tenants up to {_TENANTS_MAX:,}, or NAME:SHARE/NAME:SHARE with each name once")
    return shares


@dataclass(frozen=True, slots=True)
class Burst:
    """Between two times requests come this many times as often; of one tenant, or of all."""

    at_s: float
    for_s: float
    factor: float
    tenant: str | None = None

    def covers(self, arrival: Arrival) -> bool:
        """Whether it repeats this request."""
        return self.at_s <= arrival.at_s < self.at_s + self.for_s and self.tenant in (None, arrival.tenant)


def with_burst(arrivals: Iterable[Arrival], burst: Burst, random: Random) -> Iterator[Arrival]:
    """The same requests, those that the burst covers factor times on average; still in the order of time."""
    copies: list[tuple[float, int, Arrival]] = []
    numbers = 0
    for arrival in arrivals:
        while copies and copies[0][0] <= arrival.at_s:
            yield heapq.heappop(copies)[2]
        if not burst.covers(arrival):
            yield arrival
            continue
        for copy in range(int(burst.factor) + (random.random() < burst.factor % 1)):
            if copy == 0:
                yield arrival
            else:
                numbers += 1
                later = arrival._replace(at_s=arrival.at_s + random.uniform(0, _COPY_SPREAD_S))
                heapq.heappush(copies, (later.at_s, numbers, later))
    while copies:
        yield heapq.heappop(copies)[2]
