"""What requests about revisions, signing keys, aliases and pools may hold.

Shapes are checked here, meaning by the commands. `null` is the same as an absent field.
"""

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from weir.api.admin_bodies import Body, Parameters, PriceBody
from weir.control.model_commands import NewPool
from weir.control.registration import NewRevision
from weir.core.registry.key_ring import KeyRole
from weir.core.registry.model import EngineKind
from weir.core.tenancy import ServiceClass

_ARGUMENTS = {"type": "object", "additionalProperties": {"type": ["boolean", "integer", "number", "string"]}}
"""The registration knows which there are, and what each accepts."""


class NewRevisionBody(Body):
    """A revision to register. folder, signature: absolute paths on the machine of control; see `NewRevision`.

    An adapter has its window from the revision that it changes; every other revision needs context_tokens.
    """

    name: str
    engine: Annotated[EngineKind, Field(strict=False)]
    price: PriceBody
    context_tokens: int | None = None
    folder: str | None = None
    signature: str | None = None
    artifact: str | None = None
    served: str | None = None
    max_output_tokens: int | None = None
    typical_output_tokens: int | None = None
    chat: bool | None = None
    external: bool | None = None
    arguments: Annotated[dict[str, Any] | None, WithJsonSchema(_ARGUMENTS)] = None
    evaluation: str | None = None
    tenant: str | None = None
    adapter_of: str | None = None

    def asked(self) -> NewRevision:
        """As the command takes it."""
        given: dict[str, Any] = self.model_dump(exclude_none=True)
        return NewRevision(**given.pop("price"), **given)


class NewSigningKey(Body):
    """A key to trust. public_key: PEM. not_before is now where it is absent; without not_after its validity has no end."""

    name: str
    public_key: str
    roles: list[Annotated[KeyRole, Field(strict=False)]]
    tenant: str | None = None
    not_before: str | None = None
    not_after: str | None = None


class AliasBody(Body):
    """What an alias means from now on. tenant: whose name it is; absent: everybody's."""

    revision: str
    default_max_output_tokens: int | None = None
    tenant: str | None = None


class AliasQuery(Parameters):
    """Whose alias; absent: the shared one."""

    tenant: str | None = None


class NewPoolBody(Body):
    """Replicas of a revision to start. Absent fields are as in `NewPool`."""

    name: str
    revision: str
    replicas: int | None = None
    concurrency: int | None = None
    urls: list[str] | None = None
    on_demand: bool | None = None
    idle_stop_ms: int | None = None
    tenant: str | None = None
    service_classes: list[Annotated[ServiceClass, Field(strict=False)]] | None = None
    input_tokens_max: int | None = None

    def asked(self) -> NewPool:
        """As the command takes it."""
        given = self.model_dump(exclude_none=True)
        asked: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
        return NewPool(**asked)


class PoolPatch(Body):
    """Fields of a pool to change; absent ones stay."""

    replicas: int | None = None
    concurrency: int | None = None
    service_classes: list[Annotated[ServiceClass, Field(strict=False)]] | None = None
