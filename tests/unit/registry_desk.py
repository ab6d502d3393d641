"""The registry's commands on a memory catalog with one alias, two revisions and a clock that stands."""

import random

from weir.control.commands import Commands
from weir.control.key_ring_commands import KeyRingCommands
from weir.control.model_commands import ModelCommands
from weir.control.rollout_commands import RolloutCommands
from weir.core.metering import Price
from weir.core.registry.model import Alias, EngineKind, Pool, Revision, RevisionState
from weir.core.registry.snapshot import Snapshot
from weir.core.tenancy import Application, Principal, ServiceClass, Tenant
from weir.ports import Acknowledgement, AuditEntry, CatalogChange
from weir.storage.memory import MemoryCatalog

T0_MS = 1_700_000_000_000
PRICE = Price(1, 200_000, 50_000, 600_000)
STABLE = Revision("small@1", EngineKind.LLAMACPP, "a.gguf", 4_096, 1_024, 200, PRICE, registered_by="ada", approved_by="bob")
CALLER = Principal("acme", "web", "k", ServiceClass.INTERACTIVE)


def registered(name: str, **changes: object) -> Revision:
    """A revision that ada registered and nobody approved."""
    fields: dict[str, object] = {"state": RevisionState.REGISTERED, "registered_by": "ada", **changes}
    return Revision(name, EngineKind.LLAMACPP, "b.gguf", 4_096, 1_024, 100, PRICE, **fields)  # type: ignore[arg-type]


class StandingClock:
    """Stands at a time until it is moved."""

    def __init__(self) -> None:
        self.now_ms = T0_MS

    def monotonic_ns(self) -> int:
        return self.now_ms * 1_000_000

    def wall_ms(self) -> int:
        return self.now_ms


class SeededEntropy:
    """Repeatable bytes."""

    def __init__(self) -> None:
        self._random = random.Random(1)

    def token(self, size: int) -> bytes:
        return self._random.randbytes(size)


class RegistryDesk:
    """Everything that an administrator of models works with, and the snapshot in force."""

    def __init__(self) -> None:
        self.store = MemoryCatalog()
        self.clock = StandingClock()
        self.snapshot = Snapshot()
        self.commands = Commands(self.store, self._publish, self.clock, SeededEntropy())
        self.models = ModelCommands(self.commands)
        self.rollouts = RolloutCommands(self.commands, self.clock, SeededEntropy())
        self.key_ring = KeyRingCommands(self.commands, self.clock)

    async def _publish(self, snapshot: Snapshot) -> Acknowledgement:
        self.snapshot = snapshot
        return Acknowledgement(snapshot.version)

    async def put(self, *revisions: Revision, pools: tuple[Pool, ...] = (), aliases: tuple[Alias, ...] = ()) -> None:
        """Store these without asking anybody."""
        entry = AuditEntry(T0_MS, "test", "put", "", "{}")
        change = CatalogChange(entry, revisions=revisions, pools=pools, aliases=aliases)
        await self.commands.commit(lambda catalog: (None, change))

    async def open(self) -> None:
        """A tenant with an application, and the alias `assistant` on a stable revision with a pool."""
        entry = AuditEntry(T0_MS, "test", "put", "", "{}")
        change = CatalogChange(
            entry,
            tenants=(Tenant("acme"), Tenant("globex")),
            applications=(Application("acme", "web"), Application("globex", "web")),
            revisions=(STABLE,),
            pools=(Pool("small", STABLE.id, 2, 4),),
            aliases=(Alias("assistant", STABLE.id, 600),),
        )
        await self.commands.commit(lambda catalog: (None, change))

    async def audited(self) -> list[tuple[str, str, str]]:
        """Actor, action and subject of every act, oldest first."""
        entries = await self.store.audit(1_000)
        return [(entry.actor, entry.action, entry.subject) for entry in reversed(entries) if entry.actor != "test"]
