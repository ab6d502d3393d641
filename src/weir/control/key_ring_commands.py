"""Who may sign what is served: trusted keys are added, and revoked for good.

A key's public part, roles and validity never change: another key is another name. What a revoked key signed is refused wherever
its signature is checked from then on, so replicas that run go on, and none is started any more.
"""

from collections.abc import Sequence
from dataclasses import replace

from weir import errors
from weir.control.catalog_lookup import require_signing_key, require_tenant
from weir.control.commands import Commands, Outcome
from weir.control.validation import check_name
from weir.core.registry.key_ring import KeyRole, SigningKey
from weir.core.registry.signatures import read_public_key
from weir.ports import Catalog, CatalogChange, Clock
from weir.units import Millis

TIME_MS_MAX: Millis = 253_402_300_799_000
"""The last second of the year 9999: later ones have no RFC 3339 form."""
_ROLES = ", ".join(KeyRole)


class KeyRingCommands:
    """The changes of a cell's key ring. `actor` is the name that the audit trail shows."""

    def __init__(self, commands: Commands, clock: Clock) -> None:
        self._commands = commands
        self._clock = clock

    async def add(
        self,
        actor: str,
        name: str,
        public_key: str,
        roles: Sequence[KeyRole],
        tenant: str | None = None,
        validity: tuple[Millis | None, Millis | None] = (None, None),
    ) -> Outcome[SigningKey]:
        """Trust a key. validity: from when (None: now) until when (None: no end), wall-clock milliseconds.

        Raises InvalidRequest for what is no name, key, role or time, NotFound for the tenant, AlreadyExists.
        """
        check_name("name", name)
        if not roles:
            raise errors.InvalidRequest("A key needs a role.", members={"field": "roles", "accepted": _ROLES})
        not_before_ms = self._clock.wall_ms() if validity[0] is None else validity[0]
        _check_validity(not_before_ms, validity[1])
        key = SigningKey(name, read_public_key(public_key), frozenset(roles), tenant, not_before_ms, validity[1])
        summary = {"fingerprint": key.fingerprint, "roles": sorted(key.roles), "tenant": tenant}
        entry = self._commands.audit_entry(actor, "key_ring.add", name, summary)

        def plan(catalog: Catalog) -> tuple[SigningKey, CatalogChange]:
            if tenant is not None:
                require_tenant(catalog, tenant)
            for known in catalog.signing_keys:
                if known.name == name:
                    raise errors.AlreadyExists(f"There is a signing key {name!r} already.")
                if known.public_key == key.public_key:
                    raise errors.AlreadyExists(f"This key is in the key ring already, as {known.name!r}.")
            return key, CatalogChange(entry, signing_keys=(key,))

        return await self._commands.commit(plan)

    async def revoke(self, actor: str, name: str) -> Outcome[SigningKey]:
        """Trust a key no more, for good. Idempotent. Raises NotFound."""
        entry = self._commands.audit_entry(actor, "key_ring.revoke", name, {})

        def plan(catalog: Catalog) -> tuple[SigningKey, CatalogChange | None]:
            key = require_signing_key(catalog, name)
            revoked = replace(key, revoked=True)
            return revoked, None if key.revoked else CatalogChange(entry, signing_keys=(revoked,))

        return await self._commands.commit(plan)


def _check_validity(not_before_ms: Millis, not_after_ms: Millis | None) -> None:
    for field, time_ms in (("not_before", not_before_ms), ("not_after", not_after_ms)):
        if time_ms is not None and not 0 <= time_ms <= TIME_MS_MAX:
            raise errors.InvalidRequest(f"{field} is no year of a key.", members={"field": field, "accepted": "1970 … 9999"})
    if not_after_ms is not None and not_after_ms <= not_before_ms:
        members = {"field": "not_after", "accepted": "a time after not_before"}
        raise errors.InvalidRequest("A key's validity ends after it begins.", members=members)
