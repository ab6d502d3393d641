"""What the focused scenarios share: a subject among other requests, and what the ledger says of its end."""

from collections.abc import Awaitable, Callable

from weir.core.ledger.records import EndRecord, ExecutionId, SettleRecord
from weir.engines.simulated_text import natural_output_tokens
from weir.sim.audit import Exchange
from weir.sim.world import Order, Spec, World, play, tenant_name

Script = Callable[[World], Awaitable[None]]

_PROMPTS = (f"question {number} with a long answer" for number in range(400))
LONG_PROMPTS = [prompt for prompt in _PROMPTS if natural_output_tokens(prompt) >= 230]
"""Their replies end by themselves after 230 to 256 tokens: about five seconds at the usual slowness."""


def subject(request_id: str = "subject", **changes: object) -> Order:
    """A long generation of tenant 0."""
    return Order(**{"prompt": LONG_PROMPTS[0], "request_id": request_id, "max_output_tokens": 400} | changes)  # type: ignore[arg-type]


def blocker(number: int = 0, **changes: object) -> Order:
    """A long generation of tenant 1 that occupies a lane."""
    order = {"prompt": LONG_PROMPTS[1 + number], "tenant": 1, "max_output_tokens": 400}
    return Order(**order | changes)  # type: ignore[arg-type]


def has_end(world: World, request_id: str = "subject", execution: int = 1) -> bool:
    """Whether the end of tenant 0's execution is durable."""
    world.checker.catch_up()
    return ExecutionId(tenant_name(0), request_id, execution) in world.checker.durable.ends


def end_of(world: World, request_id: str = "subject", execution: int = 1) -> EndRecord:
    """The durable end of tenant 0's execution."""
    return world.checker.durable.ends[ExecutionId(tenant_name(0), request_id, execution)]


def cost_of(end: EndRecord) -> int:
    """What the tenant paid."""
    return end.cost_microusd if isinstance(end, SettleRecord) else 0


async def until_output(world: World, exchange: Exchange, tokens: int = 1) -> None:
    """Wait until a client got this many tokens."""
    await world.until(lambda: exchange.answer.text.count(" ") >= tokens)


def run_script(script: Script, spec: Spec | None = None, seed: int = 1) -> World:
    """Play it to its end; the audit of the whole world is part of that."""
    return play(spec or Spec(), seed, script)
