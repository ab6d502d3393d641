"""An answer that is no stream: one place that sends it, whole, in whatever shape its surface gave it."""

from weir.api.wire import Headers, Rendered, id_headers, limit_headers
from weir.gateway.client import Client, WholeAnswer
from weir.messages import StandingView


async def show(client: Client, rendered: WholeAnswer, headers: Headers | None = None) -> None:
    """All of it; returns once the client took it. headers: more of them."""
    await client.start(rendered.status, rendered.head(headers or []))
    await client.finish(rendered.body)


async def show_refusal(client: Client, rendered: Rendered, request_id: str, standing: StandingView | None) -> None:
    """The same with what every refusal says: whose it is, and how the caller stands."""
    await show(client, rendered, [*id_headers(request_id), *limit_headers(standing)])
