"""Which pools of a revision may take a request: by whom they are for, what service classes they take, and how long an input.

Pure. A tenant with pools of its own is a dedicated one: its work stays in them unless it may leave, and nobody else's comes in.
Which of the pools takes the request is not decided here, nor whether one of them is ready.
"""

from collections.abc import Iterable

from weir import errors
from weir.core.registry.model import Pool, within_reach
from weir.core.tenancy import ServiceClass
from weir.units import Tokens


def accepting(
    pools: Iterable[Pool], tenant: str, *, leaves_its_pools: bool, service_class: ServiceClass, input_tokens: Tokens | None
) -> list[Pool]:
    """Pools that may take it, the tenant's own before shared ones, else in the order given. pools: all of one revision.

    input_tokens: None where nobody counted them exactly, so that no bound may refuse them.

    Raises NoCapacity where none of the tenant's reach takes the service class, InputTooLong where only their bounds are in
    the way (members input_tokens and limit, the largest of those bounds).
    """
    takers = [pool for pool in within_reach(list(pools), tenant, leaves_its_pools) if service_class in pool.service_classes]
    if not takers:
        raise errors.NoCapacity(
            f"No pool of this model takes {service_class} requests of this tenant.",
            members={"service_class": service_class.value},
            should_retry=False,
        )
    if input_tokens is None:
        return takers
    bounds = [pool.input_tokens_max for pool in takers if pool.input_tokens_max is not None]
    if len(bounds) == len(takers) and input_tokens > max(bounds):
        members = {"input_tokens": input_tokens, "limit": max(bounds)}
        raise errors.InputTooLong("No pool that may serve this request takes an input as long as this.", members=members)
    return [pool for pool in takers if pool.input_tokens_max is None or input_tokens <= pool.input_tokens_max]
