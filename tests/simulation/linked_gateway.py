"""A gateway as a process composes it, on a real link end, with clients that ask it; it can be killed, and leaves in order.

What it says and hears is overheard. Whether its clients got what they should is its world's to check.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from tests.simulation.cables import Cable
from tests.simulation.front_stand import now_s
from tests.simulation.session_stand import virtual_loop
from tests.simulation.stage import LONG_PROMPTS

from weir import errors
from weir.config import GatewayConfig
from weir.core.endings import Status
from weir.core.request import InferenceRequest
from weir.gateway.inbox import Inbox
from weir.gateway.pipeline import Gateway
from weir.gateway.planning import Planner
from weir.link.gateway_end import GatewayEnd
from weir.messages import Down, Up
from weir.ports import CoordinatorLink, GatewayInbox
from weir.sim.clients import PATIENT, Habits, SimAnswer, SimClient
from weir.sim.random_source import SeededEntropy
from weir.sim.world import ALIAS, principal_of, tenant_name

if TYPE_CHECKING:
    from tests.simulation.link_world import LinkWorld

Moment: TypeAlias = Literal["sent", "arrived"]


class Heard:
    """An inbox and a link that are overheard."""

    def __init__(self, hear: Callable[[Moment, Up | Down], None], inbox: GatewayInbox, moment: Moment) -> None:
        self._hear = hear
        self._inbox = inbox
        self._moment: Moment = moment

    def deliver(self, message: Down) -> None:
        """A message down."""
        self._inbox.deliver(message)
        self._hear(self._moment, message)


class HeardLink:
    """A link that is overheard where messages come out of it."""

    def __init__(self, hear: Callable[[Moment, Up | Down], None], link: CoordinatorLink) -> None:
        self._hear = hear
        self._link = link

    def send(self, message: Up) -> None:
        """A message up, that arrived."""
        self._link.send(message)
        self._hear("arrived", message)


@dataclass
class Asked:
    """One client's request at a gateway. was_cut: its gateway died before it was answered. done_s: when it was."""

    prompt: str
    stream: bool
    client: SimClient
    answer: SimAnswer
    was_cut: bool = False
    done_s: float | None = None

    @property
    def tokens(self) -> int:
        """Output that its client has; each token is one word with a space before it."""
        return self.answer.text.count(" ")

    @property
    def generation(self) -> str | None:
        """The generation id that the client knows."""
        told = self.answer.accepted or self.answer.record
        return told.generation_id if told is not None else None


class LinkedGateway:
    """A gateway as a process composes it, with its clients. is_open: since it had its first snapshot, until it dies.

    lost_s, renewed_s: when it lost sessions, or told another coordinator what they carried.
    """

    def __init__(self, world: "LinkWorld", name: str, cable: Cable) -> None:
        self._world = world
        self.name = name
        self.cable = cable
        self._grace_ms = GatewayConfig().slow_client_grace_ms
        self.inbox = Inbox(world.stand.clock)
        heard = Heard(self._hear, self.inbox, "arrived")
        self.end = GatewayEnd(world.stand.clock, [cable.connect], "", heard, name)
        self.end.on_lost, self.end.on_renewed = self._lose, self._renew
        self.lost_s: list[float] = []
        self.renewed_s: list[float] = []
        self.asked: list[Asked] = []
        self.is_open = self.is_dead = self.was_killed = False
        self.gateway: Gateway
        self._conversations: set[asyncio.Task[None]] = set()
        self._services = [world.tasks.create_task(self._serve())]
        world.watch(self.end._endpoint)

    @property
    def session(self) -> str:
        """The name of its session, should it have one."""
        return self.end.session

    def _hear(self, moment: Moment, message: Up | Down) -> None:
        self._world.hear(self, moment, message)

    def _lose(self) -> None:
        self.lost_s.append(now_s())
        self._world.watch(self.end._endpoint)
        self.inbox.lose()

    def _renew(self) -> None:
        self.renewed_s.append(now_s())
        self._world.watch(self.end._endpoint)
        self.inbox.renew()

    async def _serve(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            self._services.append(tasks.create_task(self.end.run()))
            await self.end.opened.wait()
            terms, world = self.end.terms, self._world
            assert terms is not None
            planner = Planner(self.inbox, lambda kind: world.engine, terms.digest_key, terms.salt_key)
            entropy = SeededEntropy(world.seed, self.name)
            self.gateway = Gateway(world.stand.clock, entropy, GatewayConfig(), self.inbox, planner, world.stand.telemetry)
            self.gateway.connect(
                self, lambda kind: world.engine, terms.step_tokens, terms.store_wait_ms, lambda: self.end.is_heard
            )
            self.is_open = True
            await self.gateway.run()

    def send(self, message: Up) -> None:
        """The gateway's link; a dead one says nothing."""
        if not self.is_dead:
            self.end.send(message)
            self._hear("sent", message)

    # ── clients ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def ask(self, *, habits: Habits = PATIENT, stream: bool = True, tenant: int = 0, **changes: Any) -> Asked:
        """A client asks now, for 40 tokens of a long answer. changes: of its request. Each prompt is its own."""
        world = self._world
        number = len(world.asked)
        client = SimClient(world.stand.clock, habits, self._grace_ms)
        parts: dict[str, Any] = {
            "model_alias": ALIAS.name,
            "prompt": LONG_PROMPTS[number],
            "max_output_tokens": 40,
            "stream": stream,
        } | changes
        asked = Asked(parts["prompt"], stream, client, SimAnswer(f"exchange-{number}", client, world))
        world.asked[asked.prompt] = asked
        self.asked.append(asked)
        self._converse(self._generate(asked, InferenceRequest(**parts), tenant))
        if habits.leaves_after_ms is not None:
            virtual_loop().call_later(habits.leaves_after_ms / 1e3, client.leave)
        return asked

    async def _generate(self, asked: Asked, request: InferenceRequest, tenant: int) -> None:
        await self.gateway.generate(principal_of(tenant), request, asked.answer, "sim")
        asked.done_s = now_s()

    def cancel(self, tenant: int, request_id: str) -> None:
        """Somebody cancels a request by its id through this gateway."""
        self._converse(self._cancel(tenant, request_id))

    async def _cancel(self, tenant: int, request_id: str) -> None:
        try:
            found = await self.inbox.cancel(tenant_name(tenant), request_id)
        except (errors.CoordinatorLost, errors.LedgerUnavailable):
            return
        record = found.record
        assert record is None or record.status not in (Status.QUEUED, Status.RUNNING), f"{request_id} did not end"

    def _converse(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._world.tasks.create_task(work)
        self._conversations.add(task)
        task.add_done_callback(self._conversations.discard)

    @property
    def is_quiet(self) -> bool:
        """Whether nobody waits for anything here."""
        return not (self._conversations or self.gateway.in_flight or self.inbox.open_requests)

    # ── its end ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def die(self, told_s: float | None = 0.0) -> None:
        """The process is killed, and its engine calls with it. told_s: after which the coordinator's side hears of that."""
        self.is_dead = self.was_killed = True
        self.is_open = False
        for asked in self.asked:
            if asked.done_s is None:
                asked.was_cut = True
                asked.client.vanish()
        if self.end.opened.is_set():
            self.gateway.close()
        self.cable.cut(None, told_s)
        for task in (*self._conversations, *self._services):
            task.cancel()

    async def leave(self) -> None:
        """The process stops in order."""
        assert self.is_quiet, f"{self.name} still has something to do"
        await self.end.leave()
        self.is_dead, self.is_open = True, False
        self.gateway.close()
        for service in self._services[1:]:
            service.cancel()
