"""An answer that is made durable before it is reported: whatever happens meanwhile, it is charged for once, or not at all."""

import asyncio

from tests.unit.test_relay_attempts import STEP, Scene, play

from weir import errors
from weir.core.endings import FinishReason
from weir.core.output import Delta, text_of
from weir.messages import DeliveryBooked, Finish, HoldBooked, StopRequest


class Keeper:
    """Keeps one output when it is let. kept: its text, once it is durable."""

    def __init__(self, scene: Scene, fault: errors.StoreFault | None = None) -> None:
        self.given = asyncio.Event()
        self.let = asyncio.Event()
        self.calls = 0
        self._fault = fault
        scene.relay.secure = self

    async def __call__(self, pieces: list[Delta]) -> None:
        """Pieces of the whole answer."""
        self.calls += 1
        self.text = text_of(pieces)
        self.given.set()
        await self.let.wait()
        if self._fault is not None:
            raise self._fault


async def made(scene: Scene, keeper: Keeper) -> None:
    """The engine has ended, and its output is on its way to be kept."""
    scene.grant(1)
    scene.relay.deliver(HoldBooked(0))
    await keeper.given.wait()


def test_nothing_is_reported_before_it_is_kept() -> None:
    """Protects what was paid for: a settlement that is not followed by its output would be money for nothing."""

    async def script(scene: Scene) -> None:
        keeper = Keeper(scene)
        await made(scene, keeper)
        scene.relay.deliver(DeliveryBooked(0, 1, STEP))  # a durable step meanwhile changes nothing
        assert scene.of(Finish) == [] and keeper.text
        keeper.let.set()
        await asyncio.sleep(0.001)
        [report] = scene.of(Finish)
        assert report.reason in (FinishReason.STOP, FinishReason.LENGTH) and report.delivered_tokens > 0
        assert text_of(scene.relay.whole_output()) == keeper.text and keeper.calls == 1

    play(script, stream=False)


def test_what_cannot_be_kept_is_not_charged_for() -> None:
    """Protects the tenant: the request fails as a fault of the platform."""

    async def script(scene: Scene) -> None:
        keeper = Keeper(scene, errors.FileStoreUnavailable("The disk is full."))
        await made(scene, keeper)
        keeper.let.set()
        await asyncio.sleep(0.001)
        [report] = scene.of(Finish)
        assert (report.reason, report.delivered_tokens) == (FinishReason.LEDGER_UNAVAILABLE, 0)
        assert report.error_detail == "The disk is full."

    play(script, stream=False)


def test_it_may_end_otherwise_meanwhile() -> None:
    """Protects the one ending: a deadline or a cancel that comes before the output is kept is the end."""

    async def script(scene: Scene) -> None:
        keeper = Keeper(scene)
        await made(scene, keeper)
        scene.relay.stop(FinishReason.DEADLINE)
        keeper.let.set()
        await asyncio.sleep(0.001)
        assert [report.reason for report in scene.of(Finish)] == [FinishReason.DEADLINE]

    play(script, stream=False)


def test_what_is_made_is_not_thrown_away_for_a_lane_that_comes_free() -> None:
    """Protects the platform: a line that is asked to make room while its whole output is being kept completes."""

    async def script(scene: Scene) -> None:
        keeper = Keeper(scene)
        await made(scene, keeper)
        scene.relay.deliver(StopRequest(0, FinishReason.PREEMPTED))
        keeper.let.set()
        await asyncio.sleep(0.001)
        [report] = scene.of(Finish)
        assert report.reason in (FinishReason.STOP, FinishReason.LENGTH)

    play(script, stream=False)
