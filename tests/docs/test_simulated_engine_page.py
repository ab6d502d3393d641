"""The page of the simulated engine names what its process takes, and what can be ordered from it."""

import msgspec
from tests.docs.pages import column, text_of

from weir.engines.simulated import ReplicaLoad
from weir.engines.simulated_api import ServerSpec
from weir.engines.simulated_faults import FaultOrder
from weir.engines.simulated_shapes import exposition

PAGE = "docs/reference/simulated-engine.md"


def test_every_field_fault_and_metric_is_documented() -> None:
    """Protects whoever starts the engine by hand from fields, faults and metrics that are not there, or not told."""
    assert column(PAGE, "field") == [field.name for field in msgspec.structs.fields(ServerSpec)]
    assert column(PAGE, "fault") == [field.name for field in msgspec.structs.fields(FaultOrder)]
    shown = exposition("m", ReplicaLoad(0, 0, 0, 0, 0.0, 0, 0, 0, 16))
    names = [line.split("{")[0] for line in shown.splitlines() if not line.startswith("#")]
    assert names and all(f"`{name}`" in text_of(PAGE) for name in names)
