"""What the platform tells its operators: metrics, and the set-up of structured logs. Never prompt or output text.

Labels come from closed sets only (codes, statuses, finish reasons, workload classes, revisions, pools, surfaces, aliases with a
canary); tenants are never a label of a histogram. Label children are bound once and kept. Gauges are read from their owners at
a scrape.

    weir_requests_total{workload_class, revision, status, finish_reason}      ended requests
    weir_rejections_total{code}                                               refused before admission
    weir_left_before_admission_total                                          clients gone before a decision
    weir_tokens_total{revision, kind}                                         input, cached_input, output as measured
    weir_cost_microusd_total{revision, payer}                                 tenant, platform
    weir_queue_wait_seconds, weir_time_to_first_token_seconds,
    weir_time_per_output_token_seconds, weir_request_duration_seconds         {workload_class, revision}
    weir_wait_prediction_error_seconds{revision}                              waited longer (> 0) or shorter than predicted
    weir_goodput_total{workload_class, revision}                              completed within both targets
    weir_cancel_to_stopped_seconds{revision}                                  cancel decided → engine runs nothing
    weir_clamped_settlements_total{revision}                                  engine reported more than was held
    weir_late_settlements_total                                               settlements that came after resolution
    weir_rolled_up_executions_total                                           past the retention, kept as sums only
    weir_unconfirmed_stops_total{revision}                                    engine did not confirm a stop within its bound
    weir_retries_total{revision}                                              failed attempts that were queued again
    weir_retained_streams_total                                               streams that were begun to be kept
    weir_retained_streams_cut_total{reason}                                   store, bytes, end: kept no further
    weir_batch_lines_total{outcome}                                           completed, failed: lines of batches that were told
    weir_batches_ended_total{status}                                          completed, failed, expired, cancelled
    weir_rollout_decisions_total{decision, reason}                            what control decided about rollouts by itself
    weir_snapshot_version, weir_snapshot_valid_seconds                        what is in force, and for how long at most
    weir_gateway_requests_in_flight, weir_gateway_linked                      of a gateway in a process of its own
    weir_requests_in_flight, weir_open_holds, weir_journal_backlog, weir_queue_entries{revision, pool},
    weir_replicas{revision, pool, state},
    weir_lanes{revision, pool, state}                                         taken, free, withheld by adaptation
    weir_canary_weight{alias, rollout},
    weir_canary_requests{alias, rollout, arm, outcome}                        of each alias with a canary, since its step began
"""

import logging
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TextIO

import structlog
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from weir.core.endings import Status
from weir.core.ledger.records import EndRecord, SettleRecord
from weir.core.registry.model import WorkloadClass
from weir.units import Millis

_LATENCY_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_TPOT_BUCKETS = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
_ERROR_BUCKETS = (-5.0, -2.0, -1.0, -0.5, -0.2, -0.05, 0.05, 0.2, 0.5, 1.0, 2.0, 5.0)

GaugeReading = tuple[str, str, dict[str, str], float]
"""(metric name, help text, labels, value)."""


class _Gauges:
    """Reads its owners' numbers at scrape time."""

    def __init__(self) -> None:
        self.sources: list[Callable[[], Iterable[GaugeReading]]] = []

    def collect(self) -> Iterable[Metric]:
        """Prometheus' collector protocol."""
        families: dict[str, GaugeMetricFamily] = {}
        for source in self.sources:
            for name, text, labels, value in source():
                family = families.setdefault(name, GaugeMetricFamily(name, text, labels=list(labels)))
                family.add_metric(list(labels.values()), value)
        return families.values()


class _Ended:
    """Bound label children of one (workload class, revision)."""

    def __init__(self, telemetry: "Telemetry", workload_class: str, revision: str) -> None:
        self._requests = partial(telemetry.requests.labels, workload_class, revision)
        self._by_ending: dict[tuple[str, str], Counter] = {}
        self.queue_wait = telemetry.queue_wait.labels(workload_class, revision)
        self.ttft = telemetry.ttft.labels(workload_class, revision)
        self.tpot = telemetry.tpot.labels(workload_class, revision)
        self.duration = telemetry.duration.labels(workload_class, revision)
        self.goodput = telemetry.goodput.labels(workload_class, revision)
        self.input = telemetry.tokens.labels(revision, "input")
        self.cached_input = telemetry.tokens.labels(revision, "cached_input")
        self.output = telemetry.tokens.labels(revision, "output")
        self.tenant_cost = telemetry.cost.labels(revision, "tenant")
        self.platform_cost = telemetry.cost.labels(revision, "platform")

    def requests(self, status: str, reason: str) -> Counter:
        """The counter of one ending."""
        found = self._by_ending.get((status, reason))
        if found is None:
            found = self._by_ending[status, reason] = self._requests(status, reason)
        return found


class Telemetry:
    """The metrics of one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        by_class = ("workload_class", "revision")
        self.requests = self._counter("weir_requests", "Ended requests.", (*by_class, "status", "finish_reason"))
        self.rejections = self._counter("weir_rejections", "Requests refused before admission.", ("code",))
        self.left_early = self._counter("weir_left_before_admission", "Clients that left before a decision.", ())
        self.tokens = self._counter("weir_tokens", "Tokens as measured.", ("revision", "kind"))
        self.cost = self._counter("weir_cost_microusd", "Micro-dollars by payer.", ("revision", "payer"))
        self.goodput = self._counter("weir_goodput", "Completed requests that met both targets.", by_class)
        self.clamped = self._counter("weir_clamped_settlements", "Settlements clamped to their hold.", ("revision",))
        self.late = self._counter("weir_late_settlements", "Settlements that came after resolution.", ())
        self.rolled_up = self._counter("weir_rolled_up_executions", "Executions past the retention, kept as sums.", ())
        self.unconfirmed = self._counter("weir_unconfirmed_stops", "Stops that the engine did not confirm.", ("revision",))
        self.retries = self._counter("weir_retries", "Failed attempts that were queued again.", ("revision",))
        self.streams_begun = self._counter("weir_retained_streams", "Streams that were begun to be kept.", ())
        self.streams_cut = self._counter("weir_retained_streams_cut", "Streams kept no further.", ("reason",))
        self.batch_lines = self._counter("weir_batch_lines", "Lines of batches that were told.", ("outcome",))
        self.batches_ended = self._counter("weir_batches_ended", "Batches that ended.", ("status",))
        self.rollout_decisions = self._counter(
            "weir_rollout_decisions", "Decisions of control about rollouts.", ("decision", "reason")
        )
        self.queue_wait = self._histogram("weir_queue_wait_seconds", "Read to dispatched.", by_class)
        self.ttft = self._histogram("weir_time_to_first_token_seconds", "Read to first output.", by_class)
        self.tpot = self._histogram("weir_time_per_output_token_seconds", "Per later token.", by_class, _TPOT_BUCKETS)
        self.duration = self._histogram("weir_request_duration_seconds", "Read to terminal.", by_class)
        self.prediction_error = self._histogram(
            "weir_wait_prediction_error_seconds", "Wait in the queue less what was predicted.", ("revision",), _ERROR_BUCKETS
        )
        self.stop_time = self._histogram("weir_cancel_to_stopped_seconds", "Cancel to engine stopped.", ("revision",))
        self._gauges = _Gauges()
        self.registry.register(self._gauges)
        self._ended: dict[tuple[str, str], _Ended] = {}
        self._prediction_errors: dict[str, Histogram] = {}

    def _counter(self, name: str, text: str, labels: tuple[str, ...]) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _histogram(
        self, name: str, text: str, labels: tuple[str, ...], buckets: tuple[float, ...] = _LATENCY_BUCKETS
    ) -> Histogram:
        return Histogram(name, text, labels, registry=self.registry, buckets=buckets)

    def read_gauges_from(self, source: Callable[[], Iterable[GaugeReading]]) -> None:
        """Ask `source` at every scrape; it must be cheap and safe to call from another thread."""
        self._gauges.sources.append(source)

    def rejected(self, code: str) -> None:
        """A request was refused before admission."""
        self.rejections.labels(code).inc()

    def ended(self, workload: WorkloadClass, revision: str, end: EndRecord) -> None:
        """An admitted request reached its terminal status."""
        bound = self._ended.get((workload.name, revision))
        if bound is None:
            bound = self._ended[workload.name, revision] = _Ended(self, workload.name, revision)
        bound.requests(end.status, end.finish_reason).inc()
        timing = end.timing
        if timing.queue_ms is not None:
            bound.queue_wait.observe(timing.queue_ms / 1e3)
        if timing.total_ms is not None:
            bound.duration.observe(timing.total_ms / 1e3)
        if timing.ttft_ms is not None:
            bound.ttft.observe(timing.ttft_ms / 1e3)
        if timing.tpot_ms is not None:
            bound.tpot.observe(timing.tpot_ms / 1e3)
        if met_targets(workload, end):
            bound.goodput.inc()
        if isinstance(end, SettleRecord):
            bound.input.inc(end.input_tokens)
            if end.cached_input_tokens:
                bound.cached_input.inc(end.cached_input_tokens)
            bound.output.inc(end.output_tokens)
            bound.tenant_cost.inc(end.cost_microusd)
            if end.platform_microusd:
                bound.platform_cost.inc(end.platform_microusd)

    def predicted(self, revision: str, error_ms: float) -> None:
        """A dispatched request waited this much longer than was predicted at the door, or shorter where negative."""
        bound = self._prediction_errors.get(revision)
        if bound is None:
            bound = self._prediction_errors[revision] = self.prediction_error.labels(revision)
        bound.observe(error_ms / 1e3)

    def rollout_decided(self, decision: str, reason: str) -> None:
        """Control moved a rollout by itself. reason: of a rollback, else `none`."""
        self.rollout_decisions.labels(decision, reason).inc()

    def exposition(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)


def met_targets(workload: WorkloadClass, end: EndRecord) -> bool:
    """Goodput: completed with TTFT and TPOT within the class's targets."""
    if end.status is not Status.COMPLETED or end.timing.ttft_ms is None:
        return False
    tpot_ms = end.timing.tpot_ms
    return end.timing.ttft_ms <= workload.ttft_target_ms and (tpot_ms is None or tpot_ms <= workload.tpot_target_ms)


class LibraryLog(logging.Handler):
    """What libraries warn of, the HTTP server for one, as lines of ours."""

    def emit(self, record: logging.LogRecord) -> None:
        """One record of the standard library's logging."""
        message = record.getMessage().strip()
        structlog.get_logger().log(
            record.levelno, "library_log", library=record.name, message=message, exc_info=record.exc_info
        )


def snapshot_gauges(version: int, fresh_ms: Millis | None) -> Iterable[GaugeReading]:
    """What a part says of the approved configuration that it works by."""
    yield "weir_snapshot_version", "Version of the approved configuration in force.", {}, version
    if fresh_ms is not None:
        yield "weir_snapshot_valid_seconds", "How long it may still be worked by.", {}, fresh_ms / 1e3


def configure_logs(stream: TextIO | None = None, *, json: bool = True) -> None:
    """Structured logs on stderr (or `stream`): one JSON object per line, or coloured text for a terminal.

    Replaces how this process shows what libraries log.
    """
    logging.basicConfig(handlers=[LibraryLog()], level=logging.WARNING, force=True)
    out = stream or sys.stderr
    renderer: Any = structlog.processors.JSONRenderer() if json else structlog.dev.ConsoleRenderer()
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(out),
        cache_logger_on_first_use=False,
    )
