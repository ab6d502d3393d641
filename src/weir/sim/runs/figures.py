"""What a run is measured by, per tenant and workload class: counts, percentiles, goodput, and the course of it over time.

It keeps one number per request and measure, so that percentiles are exact, and sums per window. It reads no clock and counts
only what clients and replicas saw; `document` is the whole result as plain values, the same bytes for the same run.
"""

from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from weir.core.endings import Status
from weir.messages import GenerationRecord
from weir.sim.runs.backlog import OUTPUT_WEIGHT, Backlog
from weir.sim.runs.courses import Course
from weir.sim.runs.verdicts import Door, Verdict
from weir.units import NANOS_PER_SECOND, Millis, Nanos, Tokens, ceil_div

_SHARES = ((50, "p50"), (90, "p90"), (95, "p95"), (99, "p99"))
_WINDOWS_S = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1_800, 3_600)
_WINDOWS_WANTED = 240


class Slice:
    """Requests of one tenant and workload class, or a sum of such."""

    __slots__ = (
        "admitted",
        "cached",
        "ended",
        "met",
        "offered",
        "rejected",
        "tokens",
        "tpot_ms",
        "ttft_ms",
        "verdict",
        "wait_ms",
    )

    def __init__(self) -> None:
        self.offered = self.admitted = self.met = self.tokens = self.cached = 0
        self.rejected: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.ttft_ms, self.tpot_ms, self.wait_ms = array("d"), array("d"), array("d")
        self.verdict = Verdict()

    def add(self, other: "Slice") -> None:
        """Sum another one in."""
        for name in ("offered", "admitted", "met", "tokens", "cached"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.rejected += other.rejected
        self.ended += other.ended
        self.verdict.add(other.verdict)
        for name in ("ttft_ms", "tpot_ms", "wait_ms"):
            getattr(self, name).extend(getattr(other, name))

    def document(self) -> dict[str, Any]:
        """As plain values. Shares are of what was offered and of what was admitted."""
        return {
            "offered": self.offered,
            "admitted": self.admitted,
            "rejected": dict(sorted(self.rejected.items())),
            "ended": dict(sorted(self.ended.items())),
            "goodput": {
                "requests": self.met,
                "offered": _share(self.met, self.offered),
                "admitted": _share(self.met, self.admitted),
            },
            "tokens": self.tokens,
            "cached_input_tokens": self.cached,
            "ttft_ms": percentiles(self.ttft_ms),
            "tpot_ms": percentiles(self.tpot_ms),
            "queue_wait_ms": percentiles(self.wait_ms),
            "door": self._door(),
        }

    def _door(self) -> dict[str, Any]:
        verdict = self.verdict
        return {
            "wrongly_refused": {"requests": verdict.refused, "offered": _share(verdict.refused, self.offered)},
            "wrongly_admitted": {"requests": verdict.admitted, "admitted": _share(verdict.admitted, self.admitted)},
            "waits_foreseen": len(verdict.wait_error_ms),
            "wait_error_ms": percentiles(verdict.wait_error_ms),
        }


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Nearest-rank percentiles, rounded to microseconds of milliseconds; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return {name: round(ordered[ceil_div(share * len(ordered), 100) - 1], 3) for share, name in _SHARES}


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 6) if whole else None


def window_seconds(span_s: float) -> int:
    """The length of the windows of a run of this length: a round one, and about as many as a plot has room for."""
    return next((window for window in _WINDOWS_S if window * _WINDOWS_WANTED >= span_s), _WINDOWS_S[-1])


class Figures:
    """Collects while a run goes on. window_s: the length of the windows over time; now_ns: where the time comes from."""

    def __init__(self, window_s: int, weights: Mapping[str, int], now_ns: Callable[[], Nanos]) -> None:
        self._window_s = window_s
        self._window_ns: Nanos = window_s * NANOS_PER_SECOND
        self._slices: defaultdict[tuple[str, str], Slice] = defaultdict(Slice)
        self._dispatches: Counter[str] = Counter()
        self._backlog = Backlog(weights)
        self._door = Door(now_ns)
        self._retries = 0
        self._first_ns: Nanos | None = None
        self._last_ns: Nanos = 0
        self._now_ns = now_ns
        self._ttft: defaultdict[int, array[float]] = defaultdict(lambda: array("d"))
        self._refusals: defaultdict[str, Counter[int]] = defaultdict(Counter)
        self._service: defaultdict[str, Counter[int]] = defaultdict(Counter)
        self._input: Counter[int] = Counter()
        self._output: Counter[int] = Counter()

    def _slice(self, course: Course) -> Slice:
        return self._slices[course.arrival.tenant, course.workload.name]

    def offered(self, course: Course) -> None:
        """A request came."""
        self._slice(course).offered += 1
        self._first_ns = course.arrived_ns if self._first_ns is None else self._first_ns

    def admitted(self, course: Course, predicted_wait_ms: Millis) -> None:
        """It was admitted with this prediction."""
        self._slice(course).admitted += 1
        self._door.admitted(course.ref, predicted_wait_ms)

    def rejected(self, course: Course, code: str, allowed_ms: Millis | None = None) -> None:
        """It was refused at the door. allowed_ms: how long it might have waited; None where it was not refused for its wait."""
        found = self._slice(course)
        found.rejected[code] += 1
        self._refuse(code)
        if allowed_ms is not None:
            self._door.refused(course.arrival.tenant, course.arrived_ns, allowed_ms, found.verdict)

    def _refuse(self, code: str) -> None:
        self._last_ns = self._now_ns()
        self._refusals[code][self._last_ns // self._window_ns] += 1

    def waits(self, tenant: str, change: int) -> None:
        """One more of a tenant's requests waits for a replica, or one fewer."""
        self._backlog.waits(tenant, change)

    def granted(self, course: Course, replica: str, now_ns: Nanos) -> None:
        """It is dispatched, for the first or second time."""
        self._dispatches[replica] += 1
        if course.granted_ns is None:
            found = self._slice(course)
            found.wait_ms.append((now_ns - course.arrived_ns) / 1e6)
            self._door.waited(course.ref, found.verdict)
            self._door.started(course.arrival.tenant, course.arrived_ns)
        else:
            self._retries += 1

    def computed(self, course: Course, input_tokens: Tokens, output_tokens: Tokens) -> None:
        """A replica computed so much for it."""
        tenant, window = course.arrival.tenant, self._now_ns() // self._window_ns
        self._slice(course).tokens += input_tokens + output_tokens
        self._backlog.serve(tenant, input_tokens, output_tokens)
        self._service[tenant][window] += input_tokens + OUTPUT_WEIGHT * output_tokens
        if input_tokens:
            self._input[window] += input_tokens
        self._output[window] += output_tokens

    def cached(self, course: Course, input_tokens: Tokens) -> None:
        """So much of its input a replica found and did not compute, though `computed` counts it."""
        self._slice(course).cached += input_tokens

    def handed(self, course: Course) -> None:
        """Its client got the first output."""
        ttft_ms = course.ttft_ms
        assert ttft_ms is not None
        self._slice(course).ttft_ms.append(ttft_ms)
        self._ttft[course.arrived_ns // self._window_ns].append(ttft_ms)

    def ended(self, course: Course, record: GenerationRecord) -> None:
        """It ended."""
        found = self._slice(course)
        assert record.finish_reason is not None
        self._last_ns = self._now_ns()
        if record.status is not Status.COMPLETED:
            found.ended[f"{record.status.value}/{record.finish_reason.value}"] += 1
            if course.granted_ns is None:
                found.wait_ms.append((self._last_ns - course.arrived_ns) / 1e6)
                self._door.waited(course.ref, found.verdict)
                self._refuse(record.finish_reason.value)
            found.verdict.admitted += record.status is Status.EXPIRED and course.handed_ns is None
            return
        found.ended[Status.COMPLETED.value] += 1
        ttft_ms, tpot_ms = course.ttft_ms, course.tpot_ms
        assert ttft_ms is not None
        if tpot_ms is not None:
            found.tpot_ms.append(tpot_ms)
        found.met += ttft_ms <= course.workload.ttft_target_ms and (tpot_ms or 0.0) <= course.workload.tpot_target_ms

    # ── the result ───────────────────────────────────────────────────────────────────────────────────────────────────

    def document(self) -> dict[str, Any]:
        """Everything as plain values."""
        assert self._backlog.is_empty, "somebody waits at the end"
        total = self._sum(self._slices)
        makespan_s = (self._last_ns - (self._first_ns or 0)) / NANOS_PER_SECOND
        dispatches = sum(self._dispatches.values())
        return {
            "makespan_s": round(makespan_s, 6),
            "tokens_per_s": round(total.tokens / makespan_s, 3) if makespan_s else None,
            "total": total.document(),
            "classes": self._by(1),
            "tenants": self._by(0),
            "all_but_largest": self._all_but_largest(),
            "fairness_gap": {
                "tokens": round(self._backlog.gap, 3),
                "between": list(self._backlog.between or ()),
                "output_weight": OUTPUT_WEIGHT,
            },
            "retries": self._retries,
            "dispatches_per_admitted": _share(dispatches, total.admitted),
            "dispatches": dict(sorted(self._dispatches.items())),
            "windows": self._windows(),
        }

    def _sum(self, keys: Iterable[tuple[str, str]]) -> Slice:
        total = Slice()
        for key in sorted(keys):
            total.add(self._slices[key])
        return total

    def _by(self, part: int) -> dict[str, Any]:
        names = sorted({key[part] for key in self._slices})
        return {name: self._sum(key for key in self._slices if key[part] == name).document() for name in names}

    def _all_but_largest(self) -> dict[str, Any]:
        """What whoever asks most leaves to the others."""
        offered: Counter[str] = Counter()
        for (tenant, _), found in sorted(self._slices.items()):
            offered[tenant] += found.offered
        largest = max(offered, key=offered.__getitem__, default=None)
        return {"largest": largest, **self._sum(key for key in self._slices if key[0] != largest).document()}

    def _windows(self) -> dict[str, Any]:
        number = self._last_ns // self._window_ns + 1

        def series(sums: Counter[int]) -> list[int]:
            return [sums[window] for window in range(number)]

        quantiles = [percentiles(self._ttft.get(window, array("d"))) or {} for window in range(number)]
        return {
            "seconds": self._window_s,
            "input_tokens": series(self._input),
            "output_tokens": series(self._output),
            "ttft_ms_p50": [found.get("p50") for found in quantiles],
            "ttft_ms_p95": [found.get("p95") for found in quantiles],
            "refusals": {code: series(sums) for code, sums in sorted(self._refusals.items())},
            "service": {tenant: series(sums) for tenant, sums in sorted(self._service.items())},
        }
