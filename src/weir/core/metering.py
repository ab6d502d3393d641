"""Tokens and money: what a request may cost at most, what it did cost, and who pays.

All amounts are integers. A cost is rounded up once per hold and once per settlement; sums add rounded costs. Prices are
micro-dollars per million tokens.
"""

from dataclasses import dataclass
from enum import StrEnum

import msgspec

from weir.core.endings import EndingRule, Payer, Status
from weir.core.tenancy import ServiceClass
from weir.units import MILLION, MicroDollars, Tokens, ceil_div


class Basis(StrEnum):
    """Where a usage figure comes from: measured by the engine, counted by us, or bounded after a crash."""

    ENGINE = "engine"
    ESTIMATED = "estimated"
    UNCERTAIN = "uncertain"


class InputBasis(StrEnum):
    """How the input of a hold was counted: exactly, or by an upper bound (UTF-8 bytes + template allowance)."""

    EXACT = "exact"
    UPPER_BOUND = "upper_bound"


@dataclass(frozen=True, slots=True)
class Price:
    """One version of a revision's price schedule, micro-dollars per million tokens, each ≥ 0.

    batch_percent: what part of each a batch request pays, 0 … 100. A request holds and costs what `of` its class says.
    """

    version: int
    input_microusd: int
    cached_input_microusd: int
    output_microusd: int
    batch_percent: int = 100

    def of(self, service_class: ServiceClass) -> "Price":
        """What a request of this class pays by this version; each amount of batch's is rounded up. It has no discount left."""
        if service_class is ServiceClass.INTERACTIVE or self.batch_percent == 100:
            return self
        amounts = (self.input_microusd, self.cached_input_microusd, self.output_microusd)
        return Price(self.version, *(ceil_div(amount * self.batch_percent, 100) for amount in amounts))

    def cost(self, input_tokens: Tokens, cached_input_tokens: Tokens, output_tokens: Tokens) -> MicroDollars:
        """Cost rounded up once. cached_input_tokens: the part of input_tokens (0 … input_tokens) with its own price."""
        assert 0 <= cached_input_tokens <= input_tokens and output_tokens >= 0
        total = (
            (input_tokens - cached_input_tokens) * self.input_microusd
            + cached_input_tokens * self.cached_input_microusd
            + output_tokens * self.output_microusd
        )
        return ceil_div(total, MILLION)


class Usage(msgspec.Struct, frozen=True, gc=False):
    """What an attempt used, all choices together. basis: where the figures come from."""

    input_tokens: Tokens
    cached_input_tokens: Tokens
    output_tokens: Tokens
    basis: Basis


class Worst(msgspec.Struct, frozen=True, gc=False):
    """The most a request can use, which is what its hold takes: tokens for buckets, micro-dollars for budgets."""

    input_tokens: Tokens
    output_tokens: Tokens
    cost_microusd: MicroDollars

    @property
    def tokens(self) -> Tokens:
        """Input and output together."""
        return self.input_tokens + self.output_tokens


def worst_case(price: Price, input_tokens: Tokens, max_output_tokens: Tokens, choices: int) -> Worst:
    """Worst case of a request. input_tokens ≥ 0 and max_output_tokens ≥ 1 per choice; choices ≥ 1.

    Cached input is never dearer than uncached for a hold: the dearer of both prices is held.
    """
    assert input_tokens >= 0 and max_output_tokens >= 1 and choices >= 1
    dearest_input = max(price.input_microusd, price.cached_input_microusd)
    total = choices * (input_tokens * dearest_input + max_output_tokens * price.output_microusd)
    return Worst(input_tokens * choices, max_output_tokens * choices, ceil_div(total, MILLION))


class Charge(msgspec.Struct, frozen=True, gc=False):
    """A settlement's amounts. The tenant's part lies within its hold; platform_microusd is the price of the rest.

    tenant_tokens: what counts against token limits. clamped: the engine reported more than was held, which is alarmed.
    """

    tenant_input_tokens: Tokens
    tenant_cached_input_tokens: Tokens
    tenant_output_tokens: Tokens
    cost_microusd: MicroDollars
    platform_microusd: MicroDollars
    clamped: bool

    @property
    def tenant_tokens(self) -> Tokens:
        """Input and output that the tenant pays for."""
        return self.tenant_input_tokens + self.tenant_output_tokens


NO_CHARGE = Charge(0, 0, 0, 0, 0, False)


def charge(rule: EndingRule, usage: Usage, delivered_tokens: Tokens, held: Worst, price: Price) -> Charge:
    """Who pays what for an ending. usage: what was used in all; delivered_tokens: output handed to the socket.

    The payer pays input and the output that the table names; where that output is 0 and the status is not completed, the
    platform pays. Everything beyond the hold is the platform's.
    """
    total = price.cost(usage.input_tokens, usage.cached_input_tokens, usage.output_tokens)
    output = _tenant_output(rule, usage, delivered_tokens)
    if output is None:
        return Charge(0, 0, 0, 0, total, False)
    tenant_input = min(usage.input_tokens, held.input_tokens)
    tenant_cached = min(usage.cached_input_tokens, tenant_input)
    tenant_output = min(output, held.output_tokens)
    clamped = tenant_input < usage.input_tokens or tenant_output < output
    cost = min(price.cost(tenant_input, tenant_cached, tenant_output), held.cost_microusd)
    return Charge(tenant_input, tenant_cached, tenant_output, cost, max(0, total - cost), clamped)


def _tenant_output(rule: EndingRule, usage: Usage, delivered_tokens: Tokens) -> Tokens | None:
    """Output tokens that the tenant pays for; None where the tenant pays nothing at all."""
    if rule.payer is Payer.TENANT_GENERATED:
        output = usage.output_tokens
    elif rule.payer is Payer.TENANT_DELIVERED:
        output = min(delivered_tokens, usage.output_tokens)
    else:
        return None
    return output if output > 0 or rule.status is Status.COMPLETED else None


def upper_bound_of_input(prompt_bytes: int, turns: int) -> Tokens:
    """No tokenizer makes more tokens than UTF-8 bytes; a chat template adds a bounded number per turn and around it."""
    return prompt_bytes + TEMPLATE_TOKENS + turns * TEMPLATE_TOKENS_PER_TURN


TEMPLATE_TOKENS = 64
TEMPLATE_TOKENS_PER_TURN = 16
