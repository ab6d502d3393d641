"""Workload classes: which row of policy a request falls into."""

import pytest

from weir.core.registry.model import DEFAULT_WORKLOAD_CLASSES, WorkloadClass, workload_class_of
from weir.core.tenancy import ServiceClass

INTERACTIVE, BATCH = ServiceClass.INTERACTIVE, ServiceClass.BATCH


@pytest.mark.parametrize(
    ("service_class", "input_tokens", "name"),
    [
        (INTERACTIVE, 0, "short"),
        (INTERACTIVE, 2_000, "short"),
        (INTERACTIVE, 2_001, "long"),
        (INTERACTIVE, 10**9, "long"),
        (BATCH, 0, "batch"),
        (BATCH, 10**9, "batch"),
    ],
)
def test_a_request_gets_the_first_row_it_fits(service_class: ServiceClass, input_tokens: int, name: str) -> None:
    """Protects targets and deadlines: the class follows from the service class and the input's length alone."""
    assert workload_class_of(DEFAULT_WORKLOAD_CLASSES, service_class, input_tokens).name == name


@pytest.mark.parametrize("service_class", ServiceClass)
def test_every_length_has_a_default_row(service_class: ServiceClass) -> None:
    """Protects start-up: each service class ends with a row without a bound."""
    rows = [row for row in DEFAULT_WORKLOAD_CLASSES if row.service_class is service_class]
    assert rows[-1].input_tokens_max is None


def test_order_decides_between_rows_that_both_fit() -> None:
    """Protects policy data: an earlier row wins, whatever its bound."""
    wide = WorkloadClass("wide", INTERACTIVE, None, 1, 1, 1)
    narrow = WorkloadClass("narrow", INTERACTIVE, 10, 1, 1, 1)
    assert workload_class_of((wide, narrow), INTERACTIVE, 5) is wide
    assert workload_class_of((narrow, wide), INTERACTIVE, 5) is narrow
    assert workload_class_of((narrow, wide), INTERACTIVE, 11) is wide
