"""What scenes of a takeover share: gateways that only listen, what they carry, and what they tell of it again."""

from tests.simulation.session_stand import INPUT_TOKENS, OUTPUT_TOKENS, Listening, Stand, run_of
from tests.simulation.test_lost_gateways import LOST, a_moment, fill

from weir.core.ledger.records import SettleRecord, StepRecord
from weir.messages import DeliveryBooked, Down, Found, Granted
from weir.sim.world import REVISION, SMALL_STEPS

WORST_TOKENS = INPUT_TOKENS + OUTPUT_TOKENS
LEASE_S = 15.0
QUEUE_WAIT_S = 5.0
STEP_TOKENS = SMALL_STEPS.delivery_step_tokens
PRICE = REVISION.price


async def some_run_and_some_wait(gateway: Listening) -> tuple[list[int], list[int]]:
    """Two requests of a tenant that run, and two that wait."""
    running = await fill(gateway, LOST)
    waiting = [gateway.ask(LOST) for _ in range(2)]
    await a_moment()
    return running, waiting


def tell_running(former: Listening, gateway: Listening, ref: int) -> None:
    """What ran for its former session runs."""
    [granted] = former.about(ref, Granted)
    gateway.tell(ref, run_of(granted))


def found(gateway: Listening, query: int) -> list[Found]:
    """Answers to one question."""
    return [message for message in gateway.heard if isinstance(message, Found) and message.query == query]


def settled(stand: Stand, ref: int) -> SettleRecord:
    """The one end of what was dispatched."""
    end = stand.end_of(ref)
    assert isinstance(end, SettleRecord)
    return end


def booked_before_it_is_heard(stand: Stand, gateway: Listening) -> None:
    """From now on this gateway hears of no step that the ledger does not have."""
    deliver = gateway.deliver

    def check(message: Down) -> None:
        if isinstance(message, DeliveryBooked):
            steps = [step for step in stand.records_of(message.ref, StepRecord) if step.attempt == message.attempt]
            assert steps and steps[-1].delivered_max >= message.delivered_max, f"{message} is not durable"
        deliver(message)

    gateway.deliver = check  # type: ignore[method-assign]
