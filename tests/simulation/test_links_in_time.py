"""Requests over links that break: whatever is cut, stands still, dies or is slow, each ends once, for client and ledger."""

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import msgspec
import pytest
from tests.simulation.cables import Cable
from tests.simulation.front_stand import now_s
from tests.simulation.link_world import TERMS, Hearing, LinkWorld, Script, Setting, play_links, until
from tests.simulation.linked_gateway import Asked, LinkedGateway, Moment
from tests.simulation.session_stand import virtual_loop

from weir import errors
from weir.core.ledger.records import SettleRecord
from weir.messages import Acquire, Admitted, DeliveryBooked, EndBooked, Ended, Finish, Granted, HoldBooked, Progress, Stopped
from weir.sim.clients import Habits
from weir.sim.random_source import seeded_random
from weir.sim.virtual_loop import SeedFailed

pytestmark = pytest.mark.usefixtures("quick_collection_without_logs")
QUICK = msgspec.structs.replace(TERMS, heartbeat_ms=100, silence_ms=1_000, lease_ms=1_500)
"""A tenth of what a cell has, so that a second of trouble is long."""
DELAYS_S = ((0.000_1, 0.000_5), (0.001, 0.005), (0.002, 0.02))
FAULTS_S = 5.0
"""For how long things go wrong."""
FAILURES = 0.08
"""Of the calls of engines."""

SEEDS = int(os.environ.get("WEIR_SIM_SEEDS", "300"))
BLOCK = 50
COLLECTED_EVERY = 10
"""Seeds after which memory is looked at too."""


# ── at random ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Story:
    """What happens in a seed's world: requests and faults at their moments."""

    def __init__(self, world: LinkWorld, random: Random) -> None:
        self._world = world
        self._random = random
        self._loop = virtual_loop()

    def begin(self) -> None:
        """Set every moment."""
        random = self._random
        self._world.engine.fault_plan = lambda call: (0, errors.EngineError()) if random.random() < FAILURES else None
        for number in range(random.randint(6, 14)):
            self._loop.call_later(random.uniform(0, FAULTS_S), self._ask, number)
        faults = [
            self._cut,
            self._cut_late,
            self._stand,
            self._refuse,
            self._kill,
            self._slow_store,
            self._publish,
            self._break,
        ]
        for _ in range(random.randint(1, 5)):
            self._loop.call_later(random.uniform(0, FAULTS_S), random.choice(faults))

    def _gateway(self) -> LinkedGateway | None:
        return self._random.choice([each for each in self._world.gateways if each.is_open] or [None])

    def _cable(self) -> Cable:
        return self._random.choice(self._world.gateways).cable

    def _ask(self, number: int) -> None:
        random, gateway = self._random, self._gateway()
        if gateway is None:
            return
        changes: dict[str, Any] = {
            "prompt": f"question {number}",
            "max_output_tokens": random.choice((4, 20, 60)),
            "stream": random.random() < 0.7,
        }
        tenant, kind = random.randrange(3), random.choice(("plain", "named", "cancelled", "leaves", "late"))
        if kind in ("named", "cancelled"):
            changes["request_id"] = f"named-{number}"
        if kind == "late":
            changes["deadline_ms"] = random.choice((300, 1_000, 2_500))
        if kind == "leaves":
            changes["habits"] = Habits(leaves_after_ms=random.choice((0, 5, 300, 1_500)))
        gateway.ask(tenant=tenant, **changes)
        if kind == "cancelled":
            self._loop.call_later(random.choice((0, 0.01, 0.3, 1.5)), self._cancel, tenant, f"named-{number}")

    def _cancel(self, tenant: int, request_id: str) -> None:
        if (gateway := self._gateway()) is not None:
            gateway.cancel(tenant, request_id)

    def _cut(self) -> None:
        self._cable().cut()

    def _cut_late(self) -> None:
        late_s = self._random.choice((0.01, 0.2, 0.6, 2.0, None))
        told = (0.0, late_s) if self._random.random() < 0.5 else (late_s, 0.0)
        self._cable().cut(*told)

    def _stand(self) -> None:
        up, down = self._random.choice(((True, True), (True, False), (False, True)))
        cable = self._cable()
        cable.stand(up=up, down=down)
        self._loop.call_later(self._random.choice((0.05, 0.25, 0.7, 0.98, 1.2, 1.6, 2.5)), cable.go_on)

    def _refuse(self) -> None:
        cable = self._cable()
        cable.refuses = True
        cable.cut()
        self._loop.call_later(self._random.uniform(0.1, 2.0), self._take_again, cable)

    def _take_again(self, cable: Cable) -> None:
        cable.refuses = False

    def _kill(self) -> None:
        if (gateway := self._gateway()) is not None:
            gateway.die(self._random.choice((0.0, 0.5, None)))
            self._loop.call_later(self._random.uniform(0.01, 1), self._start, gateway.cable)

    def _start(self, cable: Cable) -> None:
        self._world.add(cable=cable)

    def _slow_store(self) -> None:
        store = self._world.stand.store_s
        store["write"] = store["find_execution"] = self._random.choice((0.05, 0.3, 1.0, 3.0))
        self._loop.call_later(self._random.uniform(0.2, 2.0), store.clear)

    def _break(self) -> None:
        """What came cannot be worked on at a gateway."""
        if living := self._world.living:
            self._random.choice(living).end._endpoint.on_broken("a story wants it")

    def _publish(self) -> None:
        self._world.publish()


def world_of_seed(seed: int, random: Random, script: Script, gateways: Sequence[int], *, collects: bool) -> LinkWorld:
    """The world after a script, of a size drawn at random. Raises SeedFailed."""
    drawn: dict[str, Any] = {
        "gateways": random.choice(gateways),
        "delay_s": random.choice(DELAYS_S),
        "lanes": random.choice((1, 2)),
    }
    try:
        return play_links(script, Setting(terms=QUICK, **drawn), seed=seed, collects=collects)
    except BaseException as failure:
        raise SeedFailed(seed) from failure


def run_seed(seed: int, *, collects: bool = False) -> LinkWorld:
    """The world of a seed, at its end. Raises SeedFailed."""
    random = seeded_random(seed, "links")

    async def script(world: LinkWorld) -> None:
        Story(world, random).begin()
        await asyncio.sleep(FAULTS_S + 3)

    return world_of_seed(seed, random, script, (2, 3), collects=collects)


@pytest.mark.parametrize("first", range(0, SEEDS, BLOCK))
def test_a_seed_keeps_every_promise(first: int) -> None:
    """Protects clients, money, lanes and memory under whatever happens to links, gateways and the store."""
    for seed in range(first, first + BLOCK):
        run_seed(seed, collects=seed % COLLECTED_EVERY == 0)


def test_seeds_meet_what_they_are_for() -> None:
    """Protects the meaning of the above: seeds lose sessions, cut clients off, complete, fail and refuse."""
    worlds = [run_seed(seed) for seed in range(40)]
    told = sum((world.told for world in worlds), Counter[str]())
    assert {"length", "client", "deadline", "coordinator_lost"} <= {reason for reason, times in told.items() if times}
    assert any(gateway.lost_s for world in worlds for gateway in world.gateways)
    assert any(gateway.was_killed for world in worlds for gateway in world.gateways)
    assert any(asked.was_cut for world in worlds for asked in world.asked.values())


# ── a grant that nobody waits for ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["acquire", "admitted", "granted"])
def test_a_client_that_leaves_while_its_grant_is_under_way_keeps_no_lane(kind: str) -> None:
    """Protects lanes: a grant that meets no request any more is answered, for an engine that runs nothing keeps no lane."""

    async def script(world: LinkWorld) -> None:
        world.hear = once(MESSAGES[kind], "sent", lambda: asked.client.leave())
        asked = world.gateways[0].ask()
        await asyncio.sleep(1)
        assert asked.client.is_lost and not asked.tokens
        assert world.stand.running == world.stand.executions.live_count == 0

    play_links(script, Setting(delay_s=(0.01, 0.02)))


# ── cuts at every step of a request ──────────────────────────────────────────────────────────────────────────────────


def _is(kind: type[Any], **parts: Any) -> Callable[[Any], bool]:
    return lambda message: isinstance(message, kind) and all(getattr(message, name) == part for name, part in parts.items())


MESSAGES: dict[str, Callable[[Any], bool]] = {
    "acquire": _is(Acquire),
    "admitted": _is(Admitted),
    "granted": _is(Granted),
    "hold booked": _is(HoldBooked),
    "first output": _is(Progress, first_output=True),
    "step wanted": lambda message: isinstance(message, Progress) and message.delivered_max is not None,
    "step booked": lambda message: isinstance(message, DeliveryBooked) and message.delivered_max > TERMS.step_tokens,
    "finish": _is(Finish),
    "stopped": _is(Stopped),
    "ended": _is(Ended),
    "end booked": _is(EndBooked),
}
OF_STREAMS = ("first output", "step wanted", "step booked")
TOLD: dict[str, tuple[float | None, float | None]] = {
    "both at once": (0.0, 0.0),
    "gateway late": (1.0, 0.0),
    "coordinator late": (0.0, 1.0),
    "gateway never": (None, 0.0),
    "coordinator never": (0.0, None),
    "both never": (None, None),
}
"""After which time the gateway's and the coordinator's side hear that a link is cut; None: they have to find out."""


def once(matches: Callable[[Any], bool], moment: Moment, act: Callable[[], None]) -> Hearing:
    """Acts in the turn after the first such message left, or within the one in which it arrived."""
    left = [True]

    def hear(gateway: LinkedGateway | None, heard: Moment, message: Any) -> None:
        if left and heard == moment and matches(message):
            left.clear()
            if moment == "sent":
                virtual_loop().call_soon(act)
            else:
                act()

    return hear


@pytest.mark.parametrize("moment", ["sent", "arrived"])
@pytest.mark.parametrize("told", TOLD)
@pytest.mark.parametrize("kind", MESSAGES)
def test_a_cut_at_a_step_changes_no_answer(kind: str, told: str, moment: Moment) -> None:
    """Protects a request from the network: cut as a message left or came, it goes on where it was, in the same session."""
    for stream in (True,) if kind in OF_STREAMS else (True, False):

        async def script(world: LinkWorld, stream: bool = stream) -> None:
            gateway, cuts = world.gateways[0], Counter[str]()

            def cut() -> None:
                cuts["cut"] += 1
                gateway.cable.cut(*TOLD[told])

            world.hear = once(MESSAGES[kind], moment, cut)
            asked = gateway.ask(stream=stream)
            await until(lambda: asked.done_s is not None, 12, "it ends")
            assert cuts["cut"] == 1 and len(world.engine.calls) == 1
            record = asked.answer.record
            assert record is not None and (record.status, record.finish_reason, asked.tokens) == ("completed", "length", 40)
            await until(lambda: world.is_quiet, 10, "the cut is found")
            assert not gateway.lost_s and not world.host.lost_s

        play_links(script, Setting(gateways=1))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("moment", ["sent", "arrived"])
def test_a_link_that_breaks_at_every_message_still_serves(stream: bool, moment: Moment) -> None:
    """Protects against losses that add up: a link that is cut at each message of a request delays it, and no more."""

    async def script(world: LinkWorld) -> None:
        gateway, cuts = world.gateways[0], Counter[str]()

        def hear(of: LinkedGateway | None, heard: Moment, message: Any) -> None:
            if heard == moment and any(matches(message) for matches in MESSAGES.values()):
                cuts["cut"] += 1
                virtual_loop().call_soon(gateway.cable.cut)

        world.hear = hear
        asked = gateway.ask(stream=stream)
        await until(lambda: asked.done_s is not None, 30, "it ends")
        assert cuts["cut"] >= 7
        assert asked.answer.record is not None and asked.answer.record.status == "completed" and asked.tokens == 40
        assert not gateway.lost_s and not world.host.lost_s

    play_links(script, Setting(gateways=1))


# ── silence and lease ────────────────────────────────────────────────────────────────────────────────────────────────

SILENCE_S, LEASE_S, BEAT_S = TERMS.silence_ms / 1e3, TERMS.lease_ms / 1e3, TERMS.heartbeat_ms / 1e3


def heard_s(world: LinkWorld) -> tuple[float, float]:
    """When the gateway heard the coordinator last, and the coordinator the gateway."""
    [session] = world.end._sessions.values()
    return now_s() - world.gateways[0].end._endpoint.silent_ns / 1e9, now_s() - session.endpoint.silent_ns / 1e9


async def asked_and_running(world: LinkWorld, *, stream: bool) -> Asked:
    """A long request that runs."""
    asked = world.gateways[0].ask(stream=stream, max_output_tokens=400)
    await until(lambda: asked.tokens if stream else world.engine_runs, 2, "it runs")
    return asked


async def stand_until(world: LinkWorld, at_s: float) -> None:
    """Nothing passes until then, and nothing connects."""
    cable = world.gateways[0].cable
    cable.stand()
    await asyncio.sleep(at_s - now_s())
    cable.go_on()


@pytest.mark.parametrize("stream", [True, False])
def test_a_link_that_stands_for_less_than_the_silence_loses_nothing(stream: bool) -> None:
    """Protects requests from a short outage: just below the bound the session goes on, and every answer is complete."""

    async def script(world: LinkWorld) -> None:
        asked, gateway = await asked_and_running(world, stream=stream), world.gateways[0]
        await stand_until(world, heard_s(world)[0] + SILENCE_S - 0.3)
        await until(lambda: world.is_quiet, 15, "it ends")
        assert not gateway.lost_s and not world.host.lost_s
        record = asked.answer.record
        assert record is not None and record.finish_reason == "stop"

    play_links(script, Setting(gateways=1))


@pytest.mark.parametrize("stream", [True, False])
def test_a_link_that_stands_for_the_silence_ends_requests_at_once(stream: bool) -> None:
    """Protects clients from a hang: at the bound each gets its answer; the coordinator ends the session when greeted."""

    async def script(world: LinkWorld) -> None:
        asked, gateway = await asked_and_running(world, stream=stream), world.gateways[0]
        session, until_s = gateway.session, heard_s(world)[0] + SILENCE_S
        await stand_until(world, until_s + 0.1)
        assert gateway.lost_s == [pytest.approx(until_s, abs=1e-3)]
        assert asked.done_s is not None and world.engine_runs == 0
        assert stream or asked.done_s == gateway.lost_s[0]
        await until(lambda: world.is_quiet, 1, "a new session")
        assert world.host.lost_s == {session: pytest.approx(now_s(), abs=0.2)}

    play_links(script, Setting(gateways=1))


@pytest.mark.parametrize("beyond_s", [-0.3, BEAT_S + 0.1])
@pytest.mark.parametrize("stream", [True, False])
def test_a_lease_is_over_only_after_its_gateway_gave_up(beyond_s: float, stream: bool) -> None:
    """Protects lanes and money: the coordinator takes back after the gateway stopped its engines, by lease or by greeting."""

    async def script(world: LinkWorld) -> None:
        asked, gateway = await asked_and_running(world, stream=stream), world.gateways[0]
        session, until_s = gateway.session, heard_s(world)[1] + LEASE_S
        world.gateways[0].cable.stand()
        await until(lambda: gateway.lost_s, SILENCE_S + 1, "the gateway gives up")
        await asyncio.sleep(0.1)
        assert world.engine_runs == 0 and world.stand.running == 1 and not world.host.lost_s
        await stand_until(world, until_s + beyond_s)
        if beyond_s > 0:
            assert until_s <= world.host.lost_s[session] <= until_s + BEAT_S + 1e-3
        else:
            assert not world.host.lost_s
        await until(lambda: world.is_quiet, 1, "a new session")
        assert list(world.host.lost_s) == [session] and asked.answer.is_over
        end = world.durable_end(asked)
        assert isinstance(end, SettleRecord | None)
        assert end is None or end.cost_microusd == 0 or end.finish_reason == "ledger_unavailable"

    play_links(script, Setting(gateways=1))


@pytest.mark.parametrize(("up", "down"), [(True, False), (False, True)])
def test_a_link_that_stands_one_way_is_given_up_in_order(up: bool, down: bool) -> None:
    """Protects lanes where one side still hears the other: also then engines have stopped before lanes are taken back."""

    async def script(world: LinkWorld) -> None:
        await asked_and_running(world, stream=False)
        gateway = world.gateways[0]
        session = gateway.session
        gateway.cable.stand(up=up, down=down)
        await until(lambda: gateway.lost_s, LEASE_S + 5, "the gateway gives up")
        assert not world.host.lost_s
        await until(lambda: world.host.lost_s, LEASE_S, "the coordinator gives up")
        assert world.engine_runs == 0 and world.stand.running == 0
        gateway.cable.go_on()
        await until(lambda: world.is_quiet, 2, "a new session")
        assert list(world.host.lost_s) == [session]

    play_links(script, Setting(gateways=1))


@pytest.mark.parametrize("told_s", [0.0, None])
def test_a_gateway_that_is_killed_frees_what_it_had_after_its_lease(told_s: float | None) -> None:
    """Protects lanes and money of the dead: whether its link breaks or falls silent, it ends with the lease, and only then."""

    async def script(world: LinkWorld) -> None:
        asked, gateway = await asked_and_running(world, stream=True), world.gateways[0]
        session, until_s = gateway.session, heard_s(world)[1] + LEASE_S
        gateway.die(told_s)
        world.add(cable=gateway.cable)
        await until(lambda: world.host.lost_s, LEASE_S + 2, "the lease ends")
        assert until_s <= world.host.lost_s[session] <= until_s + BEAT_S + 1e-3
        await asyncio.sleep(0.1)
        end = world.durable_end(asked)
        assert isinstance(end, SettleRecord) and end.finish_reason == "coordinator_lost" and end.cost_microusd == 0
        assert end.output_tokens >= asked.tokens > 0

    play_links(script, Setting(gateways=1))
