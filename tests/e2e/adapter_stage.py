"""A cell whose two demonstration tenants bring models and adapters of their own: signed, registered, approved and published."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.contract.artifact_folders import signed, write
from tests.e2e.http_client import Account, Admin, Json, admin_of, demo_account, wait_until
from tests.e2e.rollout_stage import PRICES
from tests.e2e.running_cell import RunningCell
from tests.signing_keys import private_key

from weir.core.registry.signatures import public_key_of

READY_S = 90.0
MODELS, ACMES, GLOBEX = 1, 2, 3
"""Numbers of the keys that are trusted: for everybody's models, and for the adapters of one tenant each."""


@dataclass
class AdapterStage:
    """admin: the owner, who registers; approver: another administrator. folder: for what is signed."""

    cell: RunningCell
    folder: Path
    admin: Admin
    approver: Admin
    _names: list[str] = field(default_factory=list)

    def account(self, tenant: str) -> Account:
        """A tenant's."""
        return demo_account(self.cell, tenant)

    def approved(self, name: str, files: Mapping[str, bytes], number: int, **fields: Any) -> str:
        """The id of a revision of these files on the numbered key's signature, that may serve."""
        self._names.append(name)
        place = self.folder / f"{name}-{len(self._names)}"
        write(place, files)
        signature = place.with_suffix(".sig")
        signature.write_bytes(signed(files, number))
        asked = {"name": name, "folder": str(place), "signature": str(signature), "price": PRICES, **fields}
        revision: str = self.admin.done("POST", "/revisions", asked)["id"]
        self.approver.done("POST", f"/revisions/{revision}/approve")
        return revision

    def served(self, alias: str, revision: str, tenant: str | None = None) -> str:
        """Serve a revision under an alias, from a pool of its own that is ready; the pool's name."""
        pool = f"{alias}-{tenant or 'all'}"
        self.admin.done("POST", "/pools", {"name": pool, "revision": revision, "tenant": tenant, "concurrency": 2})
        wait_until(lambda: self.pool(pool).get("ready") == 1, READY_S)
        self.admin.done("PUT", f"/aliases/{alias}", {"revision": revision, "tenant": tenant})
        return pool

    def pool(self, name: str) -> Json:
        """How a pool does; empty where there is none."""
        return next((pool for pool in self.admin.done("GET", "/pools")["pools"] if pool["name"] == name), {})


def adapter_stage(cell: RunningCell, folder: Path) -> AdapterStage:
    """A running cell's, with a second administrator and the keys trusted."""
    admin = admin_of(cell)
    secret = admin.done("POST", "/admin-keys", {"actor": "bob", "role": "approver"})["secret"]
    for number, role, tenant in ((MODELS, "model", None), (ACMES, "adapter", "acme"), (GLOBEX, "adapter", "globex")):
        key = {"name": f"key-{number}", "public_key": public_key_of(private_key(number)), "roles": [role], "tenant": tenant}
        admin.done("POST", "/signing-keys", key)
    return AdapterStage(cell, folder, admin, Admin(cell.ready["admin"], secret))
