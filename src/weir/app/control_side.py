"""Control's side of a cell, beside the coordinator in one process or in one of its own: catalog, engines, management.

It decides what is approved and keeps the engines that serve it; who is told of both is its owner's: a coordinator in this
process or a link.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from weir.app.approved_files import CatalogTrustedFiles
from weir.app.engine_choice import DeclarationParts, declare_models
from weir.app.engine_clients import EngineClients
from weir.app.packaged_artifacts import PackagedArtifacts
from weir.app.process_parts import ProcessParts
from weir.config import environment_of_engine
from weir.control.bootstrap import BootstrapSecrets, bootstrap, draft_keys, shown_secrets
from weir.control.cell_view import CellView
from weir.control.commands import Commands
from weir.control.declared_models import DeclaredModels
from weir.control.evaluation import Evaluator
from weir.control.key_ring_commands import KeyRingCommands
from weir.control.model_commands import ModelCommands
from weir.control.refresh import PERIOD_S, Refresh
from weir.control.registration import Registration
from weir.control.replica_upkeep import FleetReports
from weir.control.rollout_commands import RolloutCommands
from weir.control.rollout_loop import RolloutLoop
from weir.control.served_snapshots import ServedSnapshots
from weir.control.supervisor import Supervisor
from weir.core.registry.model import EngineKind
from weir.core.registry.snapshot import Snapshot
from weir.engines.launcher import LocalLauncher
from weir.ports import Acknowledgement
from weir.storage.artifact_store import ArtifactStore
from weir.storage.artifacts_off_loop import ArtifactsOffLoop
from weir.storage.state_directory import DEVELOPMENT_KEY_SECRET

ACKNOWLEDGE_MS = 2_000
"""How long a change waits for all gateways before it is answered with those that are behind."""
_CHECKS_WHILE_VALID = 4
"""So often what is in force is checked within its time, should that be short."""


class ControlSide:
    """engines: what was asked for. fleet: what the supervisor tells. put_in_force: takes each snapshot, in order.

    life: see `Supervisor`.
    """

    def __init__(
        self,
        parts: ProcessParts,
        engines: Sequence[str],
        fleet: FleetReports,
        put_in_force: Callable[[Snapshot], Awaitable[None]],
        life: str = "",
    ) -> None:
        self._parts = parts
        self._asked = list(engines)
        config = parts.config
        self.engines = EngineClients(config.engine)
        self.commands = Commands(parts.stores.catalog, self._publish, parts.clock, parts.entropy)
        self.rollouts = RolloutCommands(self.commands, parts.clock, parts.entropy)
        self.rollout_loop: RolloutLoop | None = None  # once it is started
        self.artifacts = ArtifactsOffLoop(ArtifactStore(parts.stores.directory.path / "artifacts"))
        directory = parts.stores.directory
        secret = directory.secret(DEVELOPMENT_KEY_SECRET, parts.entropy)
        self._packaged = PackagedArtifacts(self.artifacts, secret, directory.path / "models")
        launcher = LocalLauncher(
            threads=config.pool.threads,
            start_ms=config.engine.start_ms,
            environment=environment_of_engine(),
            files=CatalogTrustedFiles(self.artifacts, parts.stores.catalog, parts.clock),
            vllm_python=config.engine.vllm_python,
        )
        self.supervisor = Supervisor(fleet, launcher, self.engines.of, config.engine, parts.clock, life=life)
        self.supervisor.announce = parts.announce
        self.supervisor.drain_grace_ms = config.coordinator.drain_grace_ms
        self._served = ServedSnapshots(self.supervisor, put_in_force)

    async def declared(self) -> DeclaredModels:
        """What the engines of this start serve. Raises EngineError."""
        models = self._parts.stores.directory.path / "models"
        engine = self.engines.of(EngineKind.OPENAI)
        parts = DeclarationParts(models, self._packaged.keep, engine, self._parts.announce)
        return await declare_models(self._asked, self._parts.config, parts)

    async def bootstrap(self, models: DeclaredModels) -> BootstrapSecrets:
        """Demo catalog on an empty database, and the models of this start in any case. What serves is kept from now on."""
        stores = self._parts.stores
        if not stores.directory.bootstrap_keys:
            stores.directory.keep_bootstrap_keys(draft_keys(self._parts.entropy))
        self._served.declared = {pool.name: pool.revision for pool in models.pools}
        await bootstrap(self.commands, models, stores.directory.bootstrap_keys, self._packaged.signing_key)
        return shown_secrets(await stores.catalog.load(), stores.directory.bootstrap_keys)

    @property
    def snapshot(self) -> Snapshot:
        """What is approved now, as far as it is served."""
        return self._served.narrowed(self.commands.published)

    async def _publish(self, snapshot: Snapshot) -> Acknowledgement:
        """It is in force everywhere once `confirm` says so."""
        await self._served.publish(snapshot)
        return Acknowledgement(snapshot.version)

    async def wait_ready(self) -> bool:
        """True, once what aliases mean now has a ready replica, unless its pools want none, or only on demand."""
        return await self._served.wait_ready(self.commands.published)

    def start(self, tasks: asyncio.TaskGroup, renew: Callable[[], None], view: CellView) -> list[asyncio.Task[Any]]:
        """Keep the engines, which stop as that is cancelled, what is in force, which `renew` hears was checked, and rollouts.

        view: of the cell, by which rollouts are decided.
        """
        valid_s = self._parts.config.link.snapshot_valid_ms / 1e3
        refresh = Refresh(self.commands, renew, min(PERIOD_S, valid_s / _CHECKS_WHILE_VALID))
        rollout_loop = self.rollout_loop = self._make_rollout_loop(view)
        return [tasks.create_task(loop.run()) for loop in (self.supervisor, refresh, rollout_loop)]

    def _make_rollout_loop(self, view: CellView) -> RolloutLoop:
        evaluator = Evaluator(self.artifacts, self.supervisor, self.engines.of, self.commands)
        loop = RolloutLoop(self.commands, self.rollouts, view, self.supervisor, evaluator, self._parts.clock)
        loop.on_decided = self._parts.telemetry.rollout_decided
        return loop

    async def admin_app(self, view: CellView) -> Any:
        """The management application; its framework takes a second to import, so this runs off the loop."""
        return await asyncio.to_thread(self._create_admin_app, view)

    def _create_admin_app(self, view: CellView) -> Any:
        from weir.api.admin import AdminParts, create_admin_app

        assert self.rollout_loop is not None, "it is started before anybody can ask"
        clock, entropy = self._parts.clock, self._parts.entropy
        parts = AdminParts(
            commands=self.commands,
            models=ModelCommands(self.commands),
            registration=Registration(self.commands, self.artifacts, clock),
            key_ring=KeyRingCommands(self.commands, clock),
            rollouts=self.rollouts,
            looks=self.rollout_loop,
            ledger=self._parts.stores.ledger,
            cell=view,
            entropy=entropy,
        )
        return create_admin_app(parts)

    async def aclose(self) -> None:
        """No engine is spoken to any more, and no artifact is read."""
        self.artifacts.close()
        await self.engines.aclose()


def aliases_of(snapshot: Snapshot) -> list[dict[str, str]]:
    """Aliases as the ready file shows them."""
    return [{"alias": alias.name, "model_revision": alias.revision} for alias in snapshot.aliases.values()]
