"""Who administers: bearer admin keys and what each role may do.

A viewer reads; an operator also changes tenants, applications, keys, limits and pools; a releaser also registers, prices and
releases; an approver also approves, which is a right of its own that no other role but the owner's has. The actor of the audit
trail comes from the key and is never accepted from a request.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Request, Response
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer

from weir import errors
from weir.control.commands import Commands
from weir.core.tenancy import Role, digest_of_key
from weir.ports import Catalog

_RANK = {role: rank for rank, role in enumerate(Role)}
BEARER = HTTPBearer(auto_error=False, description="An admin key")


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated administrator, and the catalog that the key was checked against."""

    actor: str
    role: Role
    catalog: Catalog


async def authenticate(commands: Commands, presented: str | None) -> Caller:
    """The administrator behind a key. Raises Unauthenticated, Revoked, LedgerUnavailable."""
    digest = digest_of_key(presented) if presented else None
    if digest is None:  # no store is asked for what cannot be a key
        raise _unknown_key()
    catalog = await commands.catalog()
    key = next((known for known in catalog.admin_keys if known.secret_sha256 == digest), None)
    if key is None:
        raise _unknown_key()
    if key.revoked:
        raise errors.Revoked("This admin key was revoked.")
    return Caller(key.actor, key.role, catalog)


def _unknown_key() -> errors.Unauthenticated:
    return errors.Unauthenticated("The admin key is missing or unknown.")


class AuthenticatedRoute(APIRoute):
    """A route that knows its caller before it reads a body, and takes each query parameter once."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The framework's way to serve one request, behind authentication. Raises as `authenticate`, and InvalidRequest."""
        serve = super().get_route_handler()

        async def serve_known(request: Request) -> Response:
            credentials = await BEARER(request)
            commands: Commands = request.app.state.parts.commands
            request.state.caller = await authenticate(commands, credentials.credentials if credentials else None)
            _refuse_repeated(name for name, _ in request.query_params.multi_items())
            return await serve(request)

        return serve_known


def _refuse_repeated(names: Iterable[str]) -> None:
    """The framework would take the last of them and say nothing."""
    name, number = next(iter(Counter(names).most_common(1)), ("", 0))
    if number > 1:
        raise errors.InvalidRequest(f"{name} is given {number} times.", members={"field": name, "accepted": "one value"})


def at_least(role: Role) -> Callable[..., Awaitable[Caller]]:
    """A dependency of an AuthenticatedRoute that answers the caller. Raises Forbidden for a weaker role."""

    async def allowed(request: Request) -> Caller:
        caller: Caller = request.state.caller
        if _RANK[caller.role] < _RANK[role]:
            raise errors.Forbidden(f"This needs the role {role.value}; the key has {caller.role.value}.")
        return caller

    return allowed


Viewer = Annotated[Caller, Depends(at_least(Role.VIEWER))]
Operator = Annotated[Caller, Depends(at_least(Role.OPERATOR))]
Releaser = Annotated[Caller, Depends(at_least(Role.RELEASER))]
Approver = Annotated[Caller, Depends(at_least(Role.APPROVER))]
Owner = Annotated[Caller, Depends(at_least(Role.OWNER))]
