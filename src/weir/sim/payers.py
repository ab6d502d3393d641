"""Who pays for an ending, and for how much: the table of endings written out a second time, for the checkers.

It is meant to be another text than the platform's own table, so that a wrong row shows.
"""

from dataclasses import replace

from weir.core.metering import Price
from weir.core.tenancy import ServiceClass
from weir.units import MILLION, MicroDollars, Tokens, ceil_div

PAYS_GENERATED = {"stop", "length", "client", "disconnect", "slow_client", "revoked"}
PAYS_DELIVERED = {"deadline"}
PAYS_NOTHING = {
    "queue_wait",
    "engine_error",
    "replica_lost",
    "stalled",
    "ledger_unavailable",
    "coordinator_lost",
    "shutdown",
    "preempted",
    "engine_rejected",
    "quarantined",
}


def paid_tokens(
    reason: str, input_tokens: Tokens, output_tokens: Tokens, delivered_tokens: Tokens, *, was_waiting: bool
) -> tuple[Tokens, Tokens]:
    """Input and output that the tenant pays for.

    was_waiting: it ended between two attempts, so that all that was used is the platform's.
    """
    assert reason in PAYS_GENERATED | PAYS_DELIVERED | PAYS_NOTHING, reason
    output = output_tokens if reason in PAYS_GENERATED else min(delivered_tokens, output_tokens)
    pays = not was_waiting and reason not in PAYS_NOTHING and (output > 0 or reason in ("stop", "length"))
    return (input_tokens, output) if pays else (0, 0)


def price_for(price: Price, service_class: ServiceClass) -> Price:
    """A version of a price as a service class pays it: of batch's, the least whole amounts that are not below its part."""
    part = price.batch_percent if service_class == "batch" else 100
    return replace(
        price,
        input_microusd=-(-price.input_microusd * part // 100),
        cached_input_microusd=-(-price.cached_input_microusd * part // 100),
        output_microusd=-(-price.output_microusd * part // 100),
    )


def cost_of(price: Price, input_tokens: Tokens, cached_tokens: Tokens, output_tokens: Tokens) -> MicroDollars:
    """What tokens cost, rounded up once. cached_tokens: of the input, at their own price, as far as it is paid at all."""
    cached = min(cached_tokens, input_tokens)
    input_cost = (input_tokens - cached) * price.input_microusd + cached * price.cached_input_microusd
    return ceil_div(input_cost + output_tokens * price.output_microusd, MILLION)
