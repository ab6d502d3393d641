"""Fetches what identity providers publish, on the engines' HTTP client: TLS with this machine's authorities, no redirects.

It has connections of its own, none of which ever carries a prompt, and sends nothing but a plain GET.
"""

from urllib.parse import urlsplit

from weir import errors
from weir.engines.http_client import HttpClient
from weir.engines.http_exchange import HttpRequest
from weir.units import Bytes, Millis

_IDLE_MS: Millis = 10_000


class IssuerDocuments:
    """A `FetchDocument`."""

    def __init__(self) -> None:
        self._http = HttpClient(idle_per_origin_max=1, idle_ms=_IDLE_MS)

    async def __call__(self, url: str, *, wait_ms: Millis, bytes_max: Bytes) -> bytes:
        """The body of a 200. Raises IssuerUnavailable for anything else, and when none is there in time."""
        parts = urlsplit(url)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        request = HttpRequest("GET", f"{parts.scheme}://{parts.netloc}", path)
        try:
            answer = await self._http.request(request, timeout_ms=wait_ms, body_bytes_max=bytes_max)
        except errors.ReplicaLost:
            raise errors.IssuerUnavailable("It cannot be reached.") from None
        except errors.Stalled:
            raise errors.IssuerUnavailable("It did not answer in time.") from None
        except errors.EngineFault:
            raise errors.IssuerUnavailable("Its answer is too large, or not HTTP.") from None
        if answer.status != 200:
            raise errors.IssuerUnavailable(f"It answered {answer.status}.")
        return answer.body

    async def aclose(self) -> None:
        """Close every connection."""
        await self._http.aclose()
