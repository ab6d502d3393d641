"""A world whose cell runs batches: the real worker on the cell's gateway, over a store that outlives the cell.

What a cell that died had under way in the store happens or does not, and nothing later does.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from weir import errors
from weir.api.batch_lines import read_request
from weir.api.line_surfaces import line_surfaces
from weir.batches import file_keys
from weir.batches.batch_files import BatchFiles
from weir.batches.desk import BatchDesk, DeskBounds
from weir.batches.kept_orders import BatchOrder
from weir.batches.worker import BatchWorker, WorkerBounds, WorkerParts
from weir.core.batches.batch_records import ENDED, FILE_ID_PREFIX, BatchEnd, FileRecord, Purpose, new_id
from weir.core.batches.batch_view import BatchView
from weir.core.batches.demand_sum import DemandSum
from weir.core.batches.input_lines import InputBounds, InputReader
from weir.core.ledger.records import ExecutionId, SettleRecord
from weir.core.tenancy import Principal
from weir.kept_files import FileStore, FileWriter, StoredFile
from weir.ports import EngineCall
from weir.sim.random_source import SeededEntropy
from weir.sim.world import BATCH_CALLER, World, principal_of
from weir.storage.file_memory import FileMemory

ENDPOINT = "/v1/generations"
LINE_BYTES = 64 * 1024
KEPT_MS = 30 * 86_400_000


class Reach:
    """The store as one process reaches it, until it dies."""

    def __init__(self, store: FileStore) -> None:
        self._store = store
        self.is_cut = False

    def _there(self) -> FileStore:
        if self.is_cut:
            raise errors.FileStoreUnavailable("This process is dead.")
        return self._store

    async def begin(self, key: str) -> FileWriter:
        """As the port says."""
        return await self._there().begin(key)

    async def create(self, key: str, content: bytes) -> bool:
        """As the port says."""
        return await self._there().create(key, content)

    async def replace(self, key: str, content: bytes) -> None:
        """As the port says."""
        await self._there().replace(key, content)

    async def read(self, key: str, start: int = 0, size: int | None = None) -> bytes | None:
        """As the port says."""
        return await self._there().read(key, start, size)

    async def find(self, key: str) -> StoredFile | None:
        """As the port says."""
        return await self._there().find(key)

    async def files(self, folder: str, after: str = "", limit: int = 10_000) -> Sequence[StoredFile]:
        """As the port says."""
        return await self._there().files(folder, after, limit)

    async def folders(self) -> Sequence[str]:
        """As the port says."""
        return await self._there().folders()

    async def delete(self, key: str) -> None:
        """As the port says."""
        await self._there().delete(key)

    async def aclose(self) -> None:
        """As the port says."""


@dataclass
class Life:
    """One life of a worker."""

    reach: Reach
    worker: BatchWorker
    task: asyncio.Task[None]

    def die(self) -> None:
        """Nothing of it takes effect any more."""
        self.reach.is_cut = True
        self.task.cancel()


@dataclass
class Batches:
    """Batches in a world. lives: of the worker; started: how often an engine began each prompt."""

    world: World
    bounds: WorkerBounds = field(default_factory=lambda: WorkerBounds(8, 8, 500))
    lives: list[Life] = field(default_factory=list)
    started: Counter[object] = field(default_factory=Counter)
    ids: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store = FileMemory(self.world.clock.wall_ms)
        entropy = SeededEntropy(self.world.seed, "desk")
        self.desk = BatchDesk(self.store, self.world.clock, entropy, DeskBounds(), read_request)

    def live(self) -> Life:
        """A worker begins in the cell that runs."""
        world, reach = self.world, Reach(self.store)
        files = BatchFiles(reach, world.clock, LINE_BYTES, KEPT_MS)
        surfaces = line_surfaces(world.clock)
        parts = WorkerParts(files, world.cell.gateway, world.clock, f"worker-{len(self.lives)}", surfaces, world.cell.telemetry)
        worker = BatchWorker(parts, self.bounds)
        inner = world.cell.engine.on_start

        def count(call: EngineCall) -> None:
            self.started[call.prompt] += 1
            inner(call)

        world.cell.engine.on_start = count
        life = Life(reach, worker, asyncio.get_running_loop().create_task(worker.run()))
        self.lives.append(life)
        return life

    async def die(self, *, land: bool) -> None:
        """The cell and its worker die now, and others begin."""
        self.world.cell.wire.cut()
        self.lives[-1].die()
        await asyncio.wait([self.lives[-1].task])
        await self.world.crash(land=land)
        await self.world.start()
        self.live()

    async def submit(self, bodies: Sequence[dict[str, Any]], window: str = "24h", tenant: int = 0) -> BatchView:
        """A batch of native generations."""
        principal = self.principal(tenant)
        reader, demands = InputReader(InputBounds()), DemandSum()
        lines = [
            {"custom_id": f"line-{number}", "url": ENDPOINT, "body": {"model_alias": "assistant", **body}}
            for number, body in enumerate(bodies, 1)
        ]
        content = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        for line in (*reader.feed(content), *reader.finish()):
            with suppress(errors.WeirError):
                demands.add(read_request(ENDPOINT, line.body))
        now_ms = self.world.clock.wall_ms()
        record = FileRecord(
            id=new_id(FILE_ID_PREFIX, now_ms, bytes([len(self.ids)])),
            purpose=Purpose.BATCH,
            name="lines.jsonl",
            size=len(content),
            created_ms=now_ms,
            expires_ms=now_ms + KEPT_MS,
            application=principal.application,
            endpoint=ENDPOINT,
            lines=reader.lines,
            demands=demands.result(),
        )
        self.ids.append(record.id)
        await self.store.create(file_keys.file_content(principal.tenant, record.id), content)
        await self.store.create(file_keys.file_record(principal.tenant, record.id), msgspec.json.encode(record))
        view = await self.desk.create(principal, self.world.snapshot, BatchOrder(record.id, ENDPOINT, window))
        for number, body in enumerate(bodies, 1):
            self.world.checker.ids[body["input"]] = principal.tenant, f"{view.record.id}:{number}"
        return view

    def principal(self, tenant: int = 0) -> Principal:
        """Whose batches they are."""
        return principal_of(tenant, BATCH_CALLER)

    async def view(self, batch: BatchView) -> BatchView:
        """As its tenant sees it now."""
        return await self.desk.batch(self.principal(int(batch.record.tenant.removeprefix("tenant-"))), batch.record.id)

    async def until_done(self, batch: BatchView, lines: int = 0, bound_s: float = 4_000) -> BatchView:
        """Once it has ended, or, where lines are given, so many of them are done."""
        deadline = asyncio.get_running_loop().time() + bound_s
        while asyncio.get_running_loop().time() < deadline:
            view = await self.view(batch)
            if view.status in ENDED or 0 < lines <= view.counts.completed + view.counts.failed:
                return view
            await asyncio.sleep(0.05)
        raise AssertionError(f"the batch does not end: {view}")

    async def results(self, batch: BatchView) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The lines of its output and of its errors."""
        content = await self.store.read(file_keys.batch_end(batch.record.tenant, batch.record.id))
        assert content is not None
        end = msgspec.json.decode(content, type=BatchEnd)
        found = []
        for file_id in (end.output, end.error):
            text = await self.store.read(file_keys.file_content(batch.record.tenant, file_id)) if file_id else b""
            found.append([json.loads(line) for line in (text or b"").splitlines()])
        return found[0], found[1]

    def paid(self, batch: BatchView) -> dict[str, list[SettleRecord]]:
        """The settlements that cost the tenant something, by request id."""
        self.world.checker.catch_up()
        paid: dict[str, list[SettleRecord]] = {}
        for name, end in self.world.checker.durable.ends.items():
            if isinstance(end, SettleRecord) and end.cost_microusd and self._is_of(name, batch):
                paid.setdefault(name.request_id, []).append(end)
        return paid

    def _is_of(self, name: ExecutionId, batch: BatchView) -> bool:
        return name.request_id.startswith(f"{batch.record.id}:")

    async def left_over(self) -> list[str]:
        """Keys of what is no file and no batch: groups of lines, marks of open batches."""
        keys = [each.key for each in await self.store.files(file_keys.OPEN_FOLDER)]
        for tenant in await self.store.folders():
            if not tenant.startswith("_"):
                keys += [each for each in self.store_keys(tenant) if each.split("/")[1] not in ("files", "batches")]
        return keys

    def store_keys(self, tenant: str) -> list[str]:
        """Everything of a tenant."""
        return [key for key in self.store.keys if key.startswith(f"{tenant}/")]
