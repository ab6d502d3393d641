"""Weir with a ledger that forgets: the same command with stores in memory, so that a benchmark shows what durability costs."""

from pathlib import Path

from weir.app import stores
from weir.cli.main import main
from weir.ports import ControlStore, LedgerStore
from weir.storage.memory import MemoryCatalog, MemoryLedger


def in_memory(_: Path) -> tuple[LedgerStore, ControlStore]:
    """Stores that answer at once."""
    return MemoryLedger(), MemoryCatalog()


if __name__ == "__main__":
    vars(stores)["open_sqlite"] = in_memory
    main()
