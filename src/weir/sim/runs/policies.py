"""The order between tenants that a run is made with: the product's, and the baseline that it is compared with."""

from enum import StrEnum

from weir.coordinator.domain import MakeOrder
from weir.core.scheduling.orders import ArrivalOrder


class Policy(StrEnum):
    """fair: the product's own order between tenants. fcfs: first come, first served over all of them."""

    FAIR = "fair"
    FCFS = "fcfs"


ORDERS: dict[Policy, MakeOrder | None] = {Policy.FAIR: None, Policy.FCFS: lambda weight_of: ArrivalOrder()}
"""What the coordinator is given for each; None: what it takes by itself."""
