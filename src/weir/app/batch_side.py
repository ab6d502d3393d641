"""A cell's batches: where their files are, and the worker that runs them beside the coordinator.

The worker has a gateway of its own, without a listener: its lines are admitted, queued, relayed and settled like every request.
A bucket's driver is an extra, imported only where it is asked for.
"""

import asyncio
from dataclasses import replace
from pathlib import Path

from weir import errors
from weir.api.batch_lines import read_request
from weir.api.line_surfaces import line_surfaces
from weir.app.engine_clients import EngineClients
from weir.app.process_parts import ProcessParts
from weir.batches.batch_files import BatchFiles
from weir.batches.desk import BatchDesk, DeskBounds
from weir.batches.worker import BatchWorker, WorkerBounds, WorkerParts
from weir.config import BatchConfig
from weir.coordinator.coordinator import Coordinator
from weir.core.batches.input_lines import InputBounds
from weir.gateway.inbox import Inbox
from weir.gateway.pipeline import Gateway
from weir.gateway.planning import Planner
from weir.kept_files import FileStore
from weir.link.frames import Terms
from weir.messages import Register, Up
from weir.ports import Clock, CoordinatorLink, Entropy
from weir.storage.file_directory import FileDirectory
from weir.units import Millis

FILES_FOLDER = "files"
_DAY_MS: Millis = 86_400_000
_LAST_WRITES_S = 5.0


def files_placed(config: BatchConfig, state: Path) -> BatchConfig:
    """Where a cell keeps files: as configured, else in its state directory."""
    if config.directory is not None or config.bucket is not None:
        return config
    return replace(config, directory=str(state / FILES_FOLDER))


def open_files(config: BatchConfig) -> FileStore | None:
    """Where files are kept; None where no place is configured. Raises InvalidRequest for a bucket that cannot be used."""
    if config.directory is not None:
        return FileDirectory(Path(config.directory))
    if config.bucket is None:
        return None
    try:
        from weir.storage.file_bucket import FileBucket
    except ImportError as missing:
        raise errors.InvalidRequest("A bucket needs its driver: install weir[objects].") from missing
    return FileBucket.from_url(config.bucket)


def open_desk(config: BatchConfig, clock: Clock, entropy: Entropy) -> BatchDesk | None:
    """What gateways keep files and batches by; None where no place is configured. Raises InvalidRequest."""
    store = open_files(config)
    if store is None:
        return None
    bounds = DeskBounds(
        file_bytes_max=config.file_bytes_max,
        tenant_bytes_max=config.tenant_bytes_max,
        files_max=config.files_max,
        open_batches_max=config.open_batches_max,
        file_days=config.file_days,
        lines=InputBounds(config.line_bytes_max, config.lines_max),
    )
    return BatchDesk(store, clock, entropy, bounds, read_request)


class _Line:
    """The coordinator, until it is no longer spoken to."""

    def __init__(self, link: CoordinatorLink) -> None:
        self._link = link
        self.is_cut = False

    def send(self, message: Up) -> None:
        """As the port says."""
        if not self.is_cut:
            self._link.send(message)


class BatchSide:
    """The worker of a cell, beside the coordinator that leads. terms: what gateways are told. engines: the cell's.

    The configuration must name a place for files.
    """

    def __init__(self, parts: ProcessParts, coordinator: Coordinator, engines: EngineClients, terms: Terms) -> None:
        config = parts.config.batches
        store = open_files(config)
        assert store is not None
        self._store = store
        inbox = self._inbox = Inbox(parts.clock)
        planner = Planner(inbox, engines.of, terms.digest_key, terms.salt_key)
        self._gateway = Gateway(parts.clock, parts.entropy, parts.config.gateway, inbox, planner, parts.telemetry)
        name = parts.new_name("batch")
        self._line = _Line(coordinator.connect(Register(name), inbox))
        self._gateway.connect(self._line, engines.of, terms.step_tokens, terms.store_wait_ms)
        files = BatchFiles(store, parts.clock, config.line_bytes_max, config.file_days * _DAY_MS)
        bounds = WorkerBounds(config.lines_in_flight, config.batches_at_once, config.poll_ms)
        surfaces = line_surfaces(parts.clock)
        self._worker = BatchWorker(WorkerParts(files, self._gateway, parts.clock, name, surfaces, parts.telemetry), bounds)
        self._working: asyncio.Task[None] | None = None

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Run what is open."""
        tasks.create_task(self._gateway.run())
        self._working = tasks.create_task(self._worker.run())

    def stop(self) -> None:
        """Begin no further line."""
        self._worker.stop()

    async def finish(self) -> None:
        """The coordinator has drained, or leaves what runs to the next one, which ends the lines of this worker by rule.

        What still runs here is dropped without a word: a word would be an end, and be charged for.
        """
        self._line.is_cut = True
        self._inbox.lose()
        if self._working is not None:
            await asyncio.wait([self._working], timeout=_LAST_WRITES_S)
            self._working.cancel()  # it survives a death at any moment, so also this one
            await asyncio.wait([self._working])
        self._gateway.close()
        await self._store.aclose()
