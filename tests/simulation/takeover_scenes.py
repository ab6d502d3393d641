"""What scenes of a takeover share: gateways that only listen, what they carry, and what they tell of it again."""

from tests.simulation.session_stand import INPUT_TOKENS, OUTPUT_TOKENS, Listening, Stand, run_of
from tests.simulation.test_lost_gateways import LOST, a_moment, fill

from weir.messages import Found, Granted

WORST_TOKENS = INPUT_TOKENS + OUTPUT_TOKENS
LEASE_S = 15.0
QUEUE_WAIT_S = 5.0


async def some_run_and_some_wait(gateway: Listening) -> tuple[list[int], list[int]]:
    """Two requests of a tenant that run, and two that wait."""
    running = await fill(gateway, LOST)
    waiting = [gateway.ask(LOST) for _ in range(2)]
    await a_moment()
    return running, waiting


def tell_running(stand: Stand, former: Listening, gateway: Listening, ref: int) -> None:
    """What ran for its former session runs."""
    [granted] = former.about(ref, Granted)
    gateway.tell(ref, run_of(granted))


def found(gateway: Listening, query: int) -> list[Found]:
    """Answers to one question."""
    return [message for message in gateway.heard if isinstance(message, Found) and message.query == query]
