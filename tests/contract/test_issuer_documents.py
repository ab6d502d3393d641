"""The port of issuers' documents, on the real client and on the fake that other tests use."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from tests.e2e.running_cell import unused_ports
from tests.token_issuer import DISCOVERY, MemoryDocuments, TokenIssuer, served

from weir import errors
from weir.app.issuer_documents import IssuerDocuments
from weir.gateway.issuer_keys import FetchDocument

WAIT_MS, BYTES_MAX = 5_000, 64 * 1024


@asynccontextmanager
async def in_memory(issuer: TokenIssuer) -> AsyncIterator[FetchDocument]:
    yield MemoryDocuments(issuer)


@asynccontextmanager
async def over_http(issuer: TokenIssuer) -> AsyncIterator[FetchDocument]:
    documents = IssuerDocuments()
    with served(issuer):
        try:
            yield documents
        finally:
            await documents.aclose()


@pytest.mark.parametrize("implementation", [in_memory, over_http])
async def test_a_document_arrives_whole_or_not_at_all(implementation: object) -> None:
    """Protects the cache of keys from half an answer: a 200 within its bound, else one kind of error."""
    assert callable(implementation)
    issuer = TokenIssuer()
    async with AsyncExitStack() as stack:
        fetch: FetchDocument = await stack.enter_async_context(implementation(issuer))
        assert await fetch(f"{issuer.url}/keys", wait_ms=WAIT_MS, bytes_max=BYTES_MAX) == issuer.key_set()
        assert b'"issuer"' in await fetch(issuer.url + DISCOVERY, wait_ms=WAIT_MS, bytes_max=BYTES_MAX)
        issuer.others["/v1/keys?a=b"] = b"x" * BYTES_MAX
        assert len(await fetch(f"{issuer.url}/v1/keys?a=b", wait_ms=WAIT_MS, bytes_max=BYTES_MAX)) == BYTES_MAX
        for path, bytes_max in (("/v1/keys?a=b", BYTES_MAX - 1), ("/nothing", BYTES_MAX)):
            with pytest.raises(errors.IssuerUnavailable):
                await fetch(issuer.url + path, wait_ms=WAIT_MS, bytes_max=bytes_max)
        issuer.is_away = True
        with pytest.raises(errors.IssuerUnavailable):
            await fetch(f"{issuer.url}/keys", wait_ms=WAIT_MS, bytes_max=BYTES_MAX)


async def test_redirects_are_refused_and_waits_are_bounded() -> None:
    """Protects against being sent elsewhere, and against a server that never answers or is not there."""
    issuer, documents = TokenIssuer(), IssuerDocuments()
    try:
        with served(issuer, moved=["/moved"], hanging=["/hanging"]):
            with pytest.raises(errors.IssuerUnavailable, match="It answered 302"):
                await documents(f"{issuer.url}/moved", wait_ms=WAIT_MS, bytes_max=BYTES_MAX)
            assert not issuer.asked
            with pytest.raises(errors.IssuerUnavailable, match="in time"):
                await documents(f"{issuer.url}/hanging", wait_ms=50, bytes_max=BYTES_MAX)
        with pytest.raises(errors.IssuerUnavailable, match="cannot be reached"):
            await documents(f"http://127.0.0.1:{unused_ports(1)}/keys", wait_ms=WAIT_MS, bytes_max=BYTES_MAX)
    finally:
        await documents.aclose()
