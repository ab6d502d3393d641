"""What operators and load balancers ask: health, readiness, and metrics whose labels stay few."""

import re
from typing import Any

import pytest
from tests.e2e.http_client import Account, exchange, metrics
from tests.e2e.running_cell import RunningCell

GAUGES = ("weir_requests_in_flight", "weir_queue_entries", "weir_open_holds")
COUNTERS = ("weir_requests_total", "weir_rejections_total")
HISTOGRAMS = (
    "weir_queue_wait_seconds",
    "weir_time_to_first_token_seconds",
    "weir_time_per_output_token_seconds",
    "weir_request_duration_seconds",
)
SAMPLE = re.compile(r'(\w+)(?:\{((?:\w+="[^"]*",?)*)\})?')


def labels_of(sample: str) -> tuple[str, dict[str, str]]:
    found = SAMPLE.fullmatch(sample)
    assert found is not None, sample
    return found[1], dict(re.findall(r'(\w+)="([^"]*)"', found[2] or ""))


@pytest.mark.parametrize(("path", "status"), [("/healthz", "ok"), ("/readyz", "ready")])
def test_a_running_cell_is_alive_and_ready(fast_cell: RunningCell, path: str, status: str) -> None:
    """Protects the probes: no key needed, 200, JSON, an id."""
    reply = exchange(fast_cell.api, "GET", path)
    assert reply.status == 200 and reply.json == {"status": status} and reply.headers["x-request-id"]


def test_every_promised_metric_is_there(account: Account) -> None:
    """Protects dashboards and alerts: names, and that endings, refusals and latencies are counted."""
    before = metrics(account.cell)
    account.generate(max_output_tokens=3)
    account.generate(model_alias="absent")
    account.limit(requests_per_minute=0)
    account.generate()
    after = metrics(account.cell)
    names = {labels_of(sample)[0] for sample in after}
    assert {*GAUGES, *COUNTERS} <= names
    assert {f"{name}_{part}" for name in HISTOGRAMS for part in ("bucket", "sum", "count")} <= names
    revision = account.cell.ready["aliases"][0]["model_revision"]
    grown = [labels_of(sample) for sample, value in after.items() if value > before.get(sample, 0)]
    by_class = {"revision": revision, "workload_class": "short"}
    assert ("weir_requests_total", {**by_class, "status": "completed", "finish_reason": "length"}) in grown
    assert ("weir_rejections_total", {"code": "requests_limited"}) in grown
    assert all((f"{name}_count", by_class) in grown for name in HISTOGRAMS)


def test_labels_come_from_closed_sets(account: Account) -> None:
    """Protects the scrape: no label has a tenant, a key, an id or anything else that a caller can make up."""
    made_up = "made-up-by-the-caller"
    account.generate(request_id=made_up, session=made_up)
    account.generate(model_alias=made_up)
    account.ask("GET", f"/{made_up}")
    account.ask("POST", "/v1/generations", {made_up: 1})
    allowed: dict[str, Any] = {
        "status": {"completed", "cancelled", "expired", "failed"},
        "workload_class": {"short", "long", "batch"},
        "kind": {"input", "cached_input", "output"},
        "payer": {"tenant", "platform"},
        "state": {"taken", "free", "withheld", "starting", "ready", "suspect", "half_open", "draining", "stopped", "failed"},
        "revision": {account.cell.ready["aliases"][0]["model_revision"]},
        "pool": {"assistant"},
    }
    for sample in metrics(account.cell):
        name, labels = labels_of(sample)
        assert made_up not in sample and account.tenant not in sample and account.key_id not in sample
        assert set(labels) <= {*allowed, "code", "finish_reason", "le"}, sample
        assert all(value in allowed.get(label, (value,)) for label, value in labels.items()), sample
        assert name.startswith("weir_")


def test_only_metrics_are_on_their_listener(fast_cell: RunningCell) -> None:
    """Protects that the scrape's port shows nothing else."""
    url = fast_cell.ready["metrics"]
    assert exchange(url, "GET", "/").status == 404
    assert exchange(url, "GET", "/metrics?x=1").headers["content-type"].startswith("text/plain; version=0.0.4")
    assert exchange(url, "POST", "/metrics").status == 501
