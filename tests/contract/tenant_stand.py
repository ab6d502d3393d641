"""A served tenant API on a coordinator that is not there: what a test of the edge alone needs, and no engine.

The link answers questions about standing. What it does with a request for admission is the test's business.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import uvicorn
from tests.contract.admin_stand import REVISION, SeededEntropy

from weir.api.tenant_app import TenantApp
from weir.app.servers import tenant_server
from weir.clock import SystemClock
from weir.config import GatewayConfig
from weir.core.registry.model import Alias, EngineKind
from weir.core.registry.snapshot import Snapshot
from weir.core.tenancy import ApiKey, Application, Tenant, digest_of_key, format_key
from weir.gateway.inbox import Inbox
from weir.gateway.pipeline import Gateway
from weir.gateway.planning import Planner
from weir.messages import Acquire, AskStanding, StandingFound, StandingView, Up
from weir.ports import Engine
from weir.telemetry import Telemetry

KEY = format_key("0" * 12, b"k" * 32)
BODY = {"model_alias": "assistant", "input": "x"}
MESSAGE = {"model": "assistant", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
CHAT = {"model": "assistant", "messages": [{"role": "user", "content": "x"}]}
RESPONSE = {"model": "assistant", "input": "x"}


def demo_snapshot() -> Snapshot:
    digest = digest_of_key(KEY)
    assert digest is not None
    return Snapshot(
        version=1,
        tenants={"acme": Tenant("acme")},
        applications={("acme", "app"): Application("acme", "app")},
        keys={digest: ApiKey("0" * 12, "acme", "app", digest)},
        aliases={name: Alias(name, REVISION.id, 64) for name in ("assistant", "org/small", "50%")},
        revisions={REVISION.id: REVISION},
    )


def no_engine(kind: EngineKind) -> Engine:
    raise LookupError(kind)


class SilentLink:
    """A coordinator that knows no limits and never admits. on_acquire: what it does when it is asked to."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self.on_acquire: Callable[[Acquire], None] = self.acquired
        self.asked: list[Acquire] = []

    def acquired(self, message: Acquire) -> None:
        self.asked.append(message)

    def send(self, message: Up) -> None:
        if isinstance(message, AskStanding):
            self._inbox.deliver(StandingFound(message.query, StandingView()))
        elif isinstance(message, Acquire):
            self.on_acquire(message)


class TenantStand:
    """broken: what the application reported as a broken invariant."""

    def __init__(self, config: GatewayConfig) -> None:
        self.inbox = Inbox(SystemClock())
        self.inbox.deliver(demo_snapshot())
        self.link = SilentLink(self.inbox)
        clock, entropy, telemetry = SystemClock(), SeededEntropy(), Telemetry()
        planner = Planner(self.inbox, no_engine, b"d", b"s")
        self.gateway = Gateway(clock, entropy, config, self.inbox, planner, telemetry)
        self.gateway.connect(self.link, no_engine, 256, 2_000)
        self.broken: list[BaseException] = []
        self.app = TenantApp(self.gateway, clock, entropy, config, lambda: True, self.broken.append)
        self.server: uvicorn.Server = tenant_server(self.app, config)
        self.port = 0
        self._writers: list[asyncio.StreamWriter] = []
        self.client: httpx2.AsyncClient

    async def ask(self, method: str, path: str, body: Any = None, **headers: str) -> httpx2.Response:
        """One request with the key."""
        return await self.client.request(method, path, json=body, headers={"authorization": f"Bearer {KEY}", **headers})

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A plain connection, closed with the stand."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self._writers.append(writer)
        return reader, writer

    async def close(self) -> None:
        """Leave every connection."""
        for writer in self._writers:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


@asynccontextmanager
async def tenant_standing(config: GatewayConfig | None = None) -> AsyncIterator[TenantStand]:
    """A served stand with a client of it."""
    stand = TenantStand(config or GatewayConfig())
    listener = socket.create_server(("127.0.0.1", 0))
    stand.port = listener.getsockname()[1]
    serving = asyncio.get_running_loop().create_task(stand.server.serve(sockets=[listener]))
    try:
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{stand.port}", timeout=10, verify=False) as stand.client:
            yield stand
    finally:
        await stand.close()
        stand.server.should_exit = True
        await serving
        listener.close()
