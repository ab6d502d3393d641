"""Signed tokens at the tenant API's edge: in both headers, on every path, with the answers that clients of keys know."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.contract.tenant_stand import BODY, CHAT, KEY, TenantStand, tenant_standing
from tests.token_issuer import MemoryDocuments, TokenIssuer
from tests.unit.token_stand import issuer_at

from weir.clock import SystemClock
from weir.gateway.sign_in import SignIn
from weir.messages import Acquire

PATHS = [("GET", "/v1/models"), ("GET", "/v1/generations/x"), ("POST", "/v1/generations"), ("POST", "/v1/chat/completions")]
WAIT_S = 10


@pytest.fixture
def issuer() -> TokenIssuer:
    return TokenIssuer(now_ms=SystemClock().wall_ms())


@pytest.fixture
async def stand(issuer: TokenIssuer) -> AsyncIterator[TenantStand]:
    async with tenant_standing() as made:
        issuers = {"corporate": issuer_at(issuer.url)}
        made.app.door.sign_in = SignIn(SystemClock(), MemoryDocuments(issuer), issuers)
        yield made


async def test_a_token_is_taken_where_a_key_is(stand: TenantStand, issuer: TokenIssuer) -> None:
    """Protects clients of either kind of header; API keys go on as before."""
    for headers in ({"authorization": f"Bearer {issuer.token()}"}, {"x-api-key": issuer.token()}, {"x-api-key": KEY}):
        answer = await stand.client.get("/v1/models", headers=headers)
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(("method", "path"), PATHS)
async def test_every_path_refuses_a_bad_token_alike(stand: TenantStand, issuer: TokenIssuer, method: str, path: str) -> None:
    """Protects whoever reads the answer: 401 with a reason, the scheme to use, and nothing of the token."""
    token = issuer.token(sub="Ada Lovelace")
    answer = await stand.ask(method, path, BODY if method == "POST" else None, authorization=f"Bearer {token}")
    document = answer.json().get("error", answer.json())
    assert (answer.status_code, document["code"], document["reason"]) == (401, "unauthenticated", "no_rule")
    assert answer.headers["www-authenticate"] == "Bearer"
    assert not any(part in answer.text for part in (*token.split("."), "Ada"))


@pytest.mark.parametrize(("method", "path"), PATHS)
async def test_an_issuer_that_is_away_is_no_fault_of_the_caller(
    stand: TenantStand, issuer: TokenIssuer, method: str, path: str
) -> None:
    """Protects clients from taking an outage for a bad credential: 503, a code, and when to come again."""
    issuer.is_away = True
    token = f"Bearer {issuer.token()}"
    answer = await stand.ask(method, path, BODY if method == "POST" else None, authorization=token)
    document = answer.json().get("error", answer.json())
    assert (answer.status_code, document["code"]) == (503, "issuer_unavailable")
    assert int(answer.headers["retry-after"]) >= 1 and "www-authenticate" not in answer.headers


@pytest.mark.parametrize(("path", "body"), [("/v1/generations", BODY), ("/v1/chat/completions", CHAT)])
async def test_the_coordinator_is_asked_for_the_rules_key(
    stand: TenantStand, issuer: TokenIssuer, path: str, body: dict[str, object]
) -> None:
    """Protects limits and usage by key: what is asked for carries the rule's id, on every surface."""
    asked: asyncio.Future[Acquire] = asyncio.get_running_loop().create_future()
    stand.link.on_acquire = asked.set_result
    request = asyncio.ensure_future(stand.ask("POST", path, body, authorization=f"Bearer {issuer.token()}"))
    acquire = await asyncio.wait_for(asked, WAIT_S)
    configured = issuer_at(issuer.url)
    expected = ("acme", "app", configured.rule_key(configured.rules[0]))
    assert (acquire.tenant, acquire.application, acquire.key) == expected
    request.cancel()
    await asyncio.wait([request])
