"""Who administers: bearer admin keys and what each role may do.

A viewer reads; an operator also changes tenants, applications, keys and limits; an owner may do everything. The actor of the
audit trail comes from the key and is never accepted from a request.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from weir import errors
from weir.control.commands import Commands
from weir.core.tenancy import Role, digest_of_key
from weir.ports import Catalog

_RANK = {role: rank for rank, role in enumerate(Role)}
_BEARER = HTTPBearer(auto_error=False, description="An admin key")


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated administrator, and the catalog that the key was checked against."""

    actor: str
    role: Role
    catalog: Catalog


async def authenticate(commands: Commands, presented: str | None) -> Caller:
    """The administrator behind a key. Raises Unauthenticated, Revoked, LedgerUnavailable."""
    digest = digest_of_key(presented) if presented else None
    catalog = await commands.catalog()
    key = next((known for known in catalog.admin_keys if known.secret_sha256 == digest), None)
    if key is None:
        raise errors.Unauthenticated("The admin key is missing or unknown.")
    if key.revoked:
        raise errors.Revoked("This admin key was revoked.")
    return Caller(key.actor, key.role, catalog)


def at_least(role: Role) -> Callable[..., Awaitable[Caller]]:
    """A dependency that answers the caller. Raises Forbidden for a weaker role, and what `authenticate` raises."""

    async def allowed(
        request: Request, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_BEARER)]
    ) -> Caller:
        commands: Commands = request.app.state.parts.commands
        caller = await authenticate(commands, credentials.credentials if credentials else None)
        if _RANK[caller.role] < _RANK[role]:
            raise errors.Forbidden(f"This needs the role {role.value}; the key has {caller.role.value}.")
        return caller

    return allowed


Viewer = Annotated[Caller, Depends(at_least(Role.VIEWER))]
Operator = Annotated[Caller, Depends(at_least(Role.OPERATOR))]
Owner = Annotated[Caller, Depends(at_least(Role.OWNER))]
