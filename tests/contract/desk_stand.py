"""A tenant API that keeps files and batches, in memory, for two tenants: what the suites of both share."""

import json
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx2
from openai import AsyncOpenAI
from tests.contract.admin_stand import REVISION, ManualClock, SeededEntropy
from tests.contract.tenant_stand import KEY, TenantStand, demo_snapshot, tenant_standing

from weir.api.batch_lines import read_request
from weir.batches.desk import BatchDesk, DeskBounds
from weir.config import GatewayConfig
from weir.core.registry.model import Alias
from weir.core.registry.snapshot import Snapshot
from weir.core.tenancy import ApiKey, Application, Tenant, digest_of_key, format_key
from weir.kept_files import FileStore
from weir.storage.file_memory import FileMemory

SECOND_KEY = format_key("1" * 12, b"s" * 32)
"""Of another application of the same tenant."""
OTHER_KEY = format_key("2" * 12, b"o" * 32)
"""Of another tenant."""
CHAT = "/v1/chat/completions"
BODY = {"model": "assistant", "messages": [{"role": "user", "content": "x"}], "max_tokens": 8}
BOUNDARY = "the-boundary"
FORM = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}


def line(custom_id: str, body: Mapping[str, Any] = BODY, url: str = CHAT) -> bytes:
    """A line of an input file."""
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}).encode() + b"\n"


TWO_LINES = line("one") + line("two")


def part(name: str, content: bytes, file_name: str | None = None) -> bytes:
    """A part of a form."""
    shown = f'; filename="{file_name}"' if file_name is not None else ""
    return f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="{name}"{shown}\r\n\r\n'.encode() + content + b"\r\n"


def form(*parts: bytes) -> bytes:
    """A whole form."""
    return b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()


PURPOSE = part("purpose", b"batch")


def upload_form(content: bytes = TWO_LINES) -> bytes:
    """A form that is accepted, if its file is."""
    return form(PURPOSE, part("file", content, "in.jsonl"))


def _snapshot() -> Snapshot:
    keys = dict(demo_snapshot().keys)
    for key_id, key, tenant, application in (
        ("1" * 12, SECOND_KEY, "acme", "second"),
        ("2" * 12, OTHER_KEY, "globex", "app"),
    ):
        digest = digest_of_key(key)
        assert digest is not None
        keys[digest] = ApiKey(key_id, tenant, application, digest)
    owners = [("acme", "app"), ("acme", "second"), ("globex", "app")]
    return Snapshot(
        version=2,
        tenants={tenant: Tenant(tenant) for tenant, _ in owners},
        applications={owner: Application(*owner) for owner in owners},
        keys=keys,
        aliases={"assistant": Alias("assistant", REVISION.id, 64)},
        revisions={REVISION.id: REVISION},
    )


@dataclass
class DeskStand:
    """clock: the desk's own, so that a day is a step."""

    tenants: TenantStand
    store: FileStore
    clock: ManualClock
    desk: BatchDesk
    clients: list[AsyncOpenAI] = field(default_factory=list)

    def sdk(self, key: str = KEY) -> AsyncOpenAI:
        """The official client, which never tries again."""
        client = AsyncOpenAI(base_url=f"http://127.0.0.1:{self.tenants.port}/v1", api_key=key, max_retries=0)
        self.clients.append(client)
        return client

    async def ask(self, method: str, path: str, body: Any = None, key: str = KEY) -> httpx2.Response:
        """One request with a key. body: bytes are a form."""
        headers = {"authorization": f"Bearer {key}"}
        if isinstance(body, bytes):
            return await self.tenants.client.request(method, path, content=body, headers={**headers, **FORM})
        return await self.tenants.client.request(method, path, json=body, headers=headers)

    async def upload(self, content: bytes = TWO_LINES, key: str = KEY) -> str:
        """The id of a file that is accepted."""
        answer = await self.ask("POST", "/v1/files", upload_form(content), key)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])

    async def stored(self) -> Sequence[str]:
        """Every key of the store."""
        folders = [f"{top}/{kind}" for top in await self.store.folders() for kind in ("files", "batches")]
        return [each.key for folder in folders for each in await self.store.files(folder)]

    def revoke(self, key: str) -> None:
        """A snapshot in which this key is revoked."""
        now = self.tenants.inbox.snapshot
        digest = digest_of_key(key)
        assert digest is not None
        keys = {**now.keys, digest: replace(now.keys[digest], revoked=True)}
        self.tenants.inbox.deliver(replace(now, version=now.version + 1, keys=keys))


@asynccontextmanager
async def desk_standing(
    bounds: DeskBounds | None = None, config: GatewayConfig | None = None, store: FileStore | None = None
) -> AsyncIterator[DeskStand]:
    """A served stand with a desk."""
    clock = ManualClock()
    kept = store or FileMemory(clock.wall_ms)
    desk = BatchDesk(kept, clock, SeededEntropy(), bounds or DeskBounds(), read_request)
    async with tenant_standing(config) as tenants:
        tenants.inbox.deliver(_snapshot())
        tenants.app.door.batches = desk
        stand = DeskStand(tenants, kept, clock, desk)
        try:
            yield stand
        finally:
            for client in stand.clients:
                await client.close()


def chopped(content: bytes, seed: int = 1) -> list[bytes]:
    """The same in pieces of random sizes."""
    sizes = random.Random(seed)
    pieces = []
    while content:
        size = sizes.randint(1, 40)
        pieces.append(content[:size])
        content = content[size:]
    return pieces
