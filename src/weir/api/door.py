"""What all surfaces of the tenant listener share: a call on its way, authentication, answers, and what a surface is.

A surface owns paths and the shape of every answer at them, errors included. It turns bodies into an `InferenceRequest` and a
generation into bytes; what happens between is the gateway's and the same for all.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import msgspec

from weir import errors
from weir.api.exchange import HttpExchange
from weir.api.generations import is_request_id
from weir.api.plain_answer import show
from weir.api.wire import Headers, Rendered, id_headers, json_object, limit_headers
from weir.batches.desk import BatchDesk
from weir.core.tenancy import Principal
from weir.gateway.pipeline import Gateway
from weir.gateway.sign_in import SignIn
from weir.messages import GenerationRecord, StandingView
from weir.ports import Clock


@dataclass(slots=True)
class Call:
    """One request on its way through the application. request_id: ours, until the caller's own is known.

    principal: who asks, once authenticated. argument: what the path names.
    """

    exchange: HttpExchange
    request_id: str
    argument: str = ""
    principal: Principal | None = None

    @property
    def credential(self) -> str:
        """What the caller presents, in whichever of the two headers; empty without one."""
        headers = self.exchange.headers
        bearer = headers.get(b"authorization", b"")
        presented = bearer[7:] if bearer[:7].lower() == b"bearer " else headers.get(b"x-api-key", b"")
        return presented.decode("latin-1").strip()

    def take_id(self, given: Any) -> None:
        """Answer with the caller's own request id, whatever else of its request turns out to be wrong."""
        if is_request_id(given):
            self.request_id = given

    def take_key(self) -> None:
        """The same for surfaces whose request id is a header."""
        self.take_id(self.exchange.headers.get(b"idempotency-key", b"").decode("latin-1"))


Handler: TypeAlias = Callable[[Call], Awaitable[None]]
Methods: TypeAlias = Mapping[str, Handler]


class Surface(Protocol):
    """One surface. generating: paths whose refused POSTs count as refused generations."""

    generating: frozenset[str]

    def owns(self, path: str) -> bool:
        """Whether what is refused at this path is refused in this surface's shape."""
        ...

    def methods(self, call: Call) -> Methods | None:
        """What serves the call's path, by method; None where there is nothing. Puts what the path names into the call."""
        ...

    def refusal(self, error: errors.WeirError, now_wall_ms: int, request_id: str) -> Rendered:
        """A refusal in this surface's shape."""
        ...


class Door:
    """What handlers of every surface do with a call, on one gateway.

    sign_in: API keys alone, unless another is set. batches: nothing keeps files, unless it is set.
    """

    def __init__(self, gateway: Gateway, clock: Clock) -> None:
        self.gateway = gateway
        self.clock = clock
        self.sign_in = SignIn(clock)
        self.batches: BatchDesk | None = None

    def authenticate(self, call: Call) -> Principal:
        """Who asks. Raises Unauthenticated, Revoked, IssuerUnavailable or Forbidden."""
        principal = self.sign_in.principal_of(call.credential, self.gateway.inbox.snapshot)
        call.principal = principal
        return principal

    async def keyed_document(self, call: Call) -> tuple[Principal, dict[str, Any]]:
        """Who asks, and the body, of a surface whose request id is a header. Raises what `authenticate` and the body raise."""
        call.take_key()
        principal = self.authenticate(call)
        return principal, json_object(await call.exchange.body())

    def desk(self) -> BatchDesk:
        """Who keeps files and batches. Raises NotFound where nobody does."""
        if self.batches is None:
            raise errors.NotFound("No place for files is configured here, so that there are no files and no batches.")
        return self.batches

    async def standing(self, principal: Principal, alias: str = "") -> StandingView:
        """The caller's per-minute limits."""
        return await self.gateway.standing(principal, alias)

    async def find(self, call: Call, request_id: str) -> GenerationRecord:
        """The caller's latest execution of a request id. Raises NotFound, also for another tenant's."""
        principal = self.authenticate(call)
        found = await self.gateway.inbox.lookup(principal.tenant, _checked_id(request_id))
        return _known(found.record)

    async def cancel(self, call: Call, request_id: str) -> GenerationRecord:
        """The same once it is terminal, cancelled unless it was before. Raises NotFound."""
        principal = self.authenticate(call)
        found = await self.gateway.inbox.cancel(principal.tenant, _checked_id(request_id))
        return _known(found.record)

    async def send_json(self, call: Call, body: Any, request_id: str = "") -> None:
        """An answer of status 200 to an authenticated call. body: what is made into JSON, unless it is that already."""
        assert call.principal is not None
        content = body if isinstance(body, bytes) else msgspec.json.encode(body)
        rendered = Rendered(200, b"application/json", content, [])
        await self.send(call, rendered, await self.standing(call.principal), request_id)

    async def send(
        self,
        call: Call,
        rendered: Rendered,
        standing: StandingView | None,
        request_id: str = "",
        headers: Headers | None = None,
    ) -> None:
        """A plain answer, with the headers that every answer has."""
        extra = [*id_headers(request_id or call.request_id), *limit_headers(standing), *(headers or [])]
        await show(call.exchange, rendered, extra)


def _checked_id(argument: str) -> str:
    if not is_request_id(argument):
        raise errors.NotFound("No request has this id.")
    return argument


def _known(record: GenerationRecord | None) -> GenerationRecord:
    if record is None:
        raise errors.NotFound("No request has this id.")
    return record
