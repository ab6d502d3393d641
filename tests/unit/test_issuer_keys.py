"""When an issuer's keys are fetched and for how long they serve: rotation, floods of made-up keys, an issuer that is away."""

import asyncio
import json
from typing import Any

import pytest
from structlog.testing import capture_logs
from tests.token_issuer import DISCOVERY, PRIVATE_KEYS
from tests.unit.token_stand import COOL_DOWN_MS, REFRESH_MS, VALID_MS, TokenStand

from weir import errors


def lasting(stand: TokenStand) -> str:
    """A token that outlives every bound of these tests."""
    return stand.issuer.token(exp=stand.issuer.now_ms // 1_000 + 100 * 3_600)


async def refusal_of(stand: TokenStand, token: str) -> errors.WeirError:
    """What a token is refused with."""
    with pytest.raises(errors.WeirError) as refusal:
        await stand.principal(token)
    return refusal.value


async def test_a_new_key_is_taken_by_the_first_token_that_names_it() -> None:
    """Protects a rotation: nobody is refused, and the old key serves beside the new one while it is published."""
    stand = TokenStand()
    old = lasting(stand)
    await stand.principal(old)
    stand.later(COOL_DOWN_MS)
    stand.issuer.sign_with("second", PRIVATE_KEYS["ES256"], "ES256")
    await stand.principal(lasting(stand))
    await stand.principal(old)
    assert stand.fetches == 2 and stand.issuer.asked[DISCOVERY] == 1


async def test_a_flood_of_made_up_keys_is_one_fetch_per_cool_down() -> None:
    """Protects the issuer: tokens that anybody can make up do not make us ask it more often."""
    stand = TokenStand()
    await stand.principal(lasting(stand))
    for _ in range(3):
        stand.later(COOL_DOWN_MS)
        made_up = [stand.issuer.token({"kid": f"made-up-{number}"}) for number in range(20)]
        refusals = await asyncio.gather(*(refusal_of(stand, token) for token in made_up))
        assert {refusal.members["reason"] for refusal in refusals} == {"unknown_key"}
    assert stand.fetches == 4


async def test_everybody_who_waits_shares_one_fetch() -> None:
    """Protects a start under load: the first tokens of many callers ask the issuer once."""
    stand = TokenStand()
    tokens = [stand.issuer.token(jti=str(number)) for number in range(20)]
    principals = await asyncio.gather(*map(stand.principal, tokens))
    assert len(set(principals)) == 1 and stand.fetches == 1


async def test_a_caller_who_leaves_takes_no_fetch_along() -> None:
    """Protects those who wait for the same fetch as a client that disconnects."""
    stand = TokenStand()
    token = lasting(stand)
    leaving, staying = (asyncio.ensure_future(stand.principal(token)) for _ in range(2))
    await asyncio.sleep(0)
    leaving.cancel()
    assert (await staying).tenant == "acme"
    assert stand.fetches == 1
    await asyncio.wait([leaving])


async def test_half_old_keys_are_fetched_behind_a_request_and_old_ones_in_front() -> None:
    """Protects latency under load, and after a quiet time the withdrawal of a key."""
    stand = TokenStand()
    token = lasting(stand)
    await stand.principal(token)
    stand.later(REFRESH_MS // 2)
    del stand.issuer.keys["first"]
    await stand.principal(token)  # the fetch runs behind it
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert stand.fetches == 2
    assert (await refusal_of(stand, token)).members["reason"] == "unknown_key"
    stand.issuer.sign_with("first", PRIVATE_KEYS["RS256"], "RS256")
    stand.later(REFRESH_MS)
    await stand.principal(token)
    assert stand.fetches == 3


async def test_the_last_good_keys_serve_while_the_issuer_is_away_and_not_for_ever() -> None:
    """Protects tenants from their provider's outage, and from keys that are too old: then 503, and when to come again."""
    stand = TokenStand()
    token = lasting(stand)
    await stand.principal(token)
    stand.issuer.is_away = True
    with capture_logs() as logs:
        for _ in range(5):
            stand.later(REFRESH_MS)
            assert (await stand.principal(token)).tenant == "acme"
            assert (await stand.principal(token)).tenant == "acme"
            await asyncio.sleep(0)  # what was begun behind the request
    assert [line["event"] for line in logs] == ["issuer_keys_not_fetched"] * 5
    refusal = await refusal_of(stand, stand.issuer.token({"kid": "perhaps-new"}))
    assert isinstance(refusal, errors.IssuerUnavailable)  # who can say whether there is such a key
    stand.later(VALID_MS - 5 * REFRESH_MS)
    refusal = await refusal_of(stand, token)
    assert isinstance(refusal, errors.IssuerUnavailable) and refusal.http_status == 503
    assert refusal.retry_after_ms is not None and 1 <= refusal.retry_after_ms <= COOL_DOWN_MS
    stand.issuer.is_away = False
    stand.later(COOL_DOWN_MS)
    assert (await stand.principal(token)).tenant == "acme"


async def test_an_issuer_that_was_never_there_is_asked_once_per_cool_down() -> None:
    """Protects a start without the issuer: 503 at once, without asking again for each request."""
    stand = TokenStand()
    stand.documents.late = True
    for _ in range(5):
        assert isinstance(await refusal_of(stand, lasting(stand)), errors.IssuerUnavailable)
    assert stand.issuer.asked[DISCOVERY] == 1
    stand.documents.late = False
    stand.later(COOL_DOWN_MS)
    assert await stand.principal(lasting(stand))


async def test_an_emptied_set_is_believed() -> None:
    """Protects an issuer that withdraws all of its keys in an emergency."""
    stand = TokenStand()
    token = lasting(stand)
    await stand.principal(token)
    stand.issuer.keys.clear()
    stand.later(REFRESH_MS)
    assert (await refusal_of(stand, token)).members["reason"] == "unknown_key"


DISCOVERED = {"issuer": "http://127.0.0.1:1/realm", "jwks_uri": "http://127.0.0.1:1/realm/keys"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (DISCOVERY, {**DISCOVERED, "issuer": "http://127.0.0.1:1/realm/"}),
        (DISCOVERY, {**DISCOVERED, "issuer": "https://elsewhere"}),
        (DISCOVERY, {**DISCOVERED, "jwks_uri": "http://elsewhere/keys"}),
        (DISCOVERY, {**DISCOVERED, "jwks_uri": "file:///keys"}),
        (DISCOVERY, {"issuer": DISCOVERED["issuer"]}),
        (DISCOVERY, []),
        ("/keys", []),
        ("/keys", {"keys": {}}),
        ("/keys", {"keys": [{}] * 101}),
        ("/keys", {"keys": [], "note": "x" * 300_000}),
        ("/keys", b'{"keys":[],"keys":[]}'),
        ("/keys", b"<html>"),
    ],
)
async def test_an_answer_that_is_none_is_no_answer(path: str, body: Any) -> None:
    """Protects against a provider's broken page, or another one's: nothing of it is believed."""
    stand = TokenStand()
    stand.issuer.others[path] = body if isinstance(body, bytes) else json.dumps(body).encode()
    assert isinstance(await refusal_of(stand, lasting(stand)), errors.IssuerUnavailable)


async def test_a_configured_address_of_keys_needs_no_discovery() -> None:
    """Protects issuers that publish keys alone."""
    stand = TokenStand(jwks_url="http://127.0.0.1:1/realm/keys")
    assert await stand.principal(lasting(stand))
    assert DISCOVERY not in stand.issuer.asked


async def test_closing_gives_up_a_fetch() -> None:
    """Protects the end of a gateway from an issuer that hangs."""
    stand = TokenStand()
    waiting = asyncio.ensure_future(stand.principal(lasting(stand)))
    await asyncio.sleep(0)
    await stand.sign_in.aclose()
    with pytest.raises(errors.IssuerUnavailable):
        await waiting


# ── which keys ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_without_a_key_id_the_only_fitting_key_is_meant() -> None:
    """Protects issuers with one key and no name for it; where two could be meant, none is."""
    stand = TokenStand()
    token = stand.issuer.token({"kid": None})
    assert await stand.principal(token)
    stand.issuer.sign_with("curve", PRIVATE_KEYS["ES256"], "ES256")
    stand.later(REFRESH_MS)
    assert await stand.principal(stand.issuer.token({"kid": None}))
    stand.issuer.keys["twin"] = {**stand.issuer.keys["curve"], "kid": "twin"}
    stand.later(REFRESH_MS)
    assert (await refusal_of(stand, stand.issuer.token({"kid": None}))).members["reason"] == "algorithm_not_allowed"


@pytest.mark.parametrize(
    "change",
    [
        {"use": "enc"},
        {"key_ops": ["sign"]},
        {"key_ops": "verify"},
        {"kty": "oct", "k": "c2VjcmV0"},
        {"kty": "EC"},
        {"kty": ["RSA"]},
        {"kid": 5},
        {"kid": "k" * 257},
        {"n": "AQAB"},
        {"n": "A" * 400},
        {"n": "!" * 400},
        {"n": None},
        {"n": "A" * 2_000},
        {"e": "A" * 100},
        {"e": "AA"},
        {"d": "AQAB"},
        {"alg": "RSA-OAEP"},
        {"alg": ["RS256"]},
    ],
)
async def test_a_key_that_cannot_check_signatures_is_passed_over(change: dict[str, Any]) -> None:
    """Protects sets that hold keys for other purposes, or broken ones: the rest serves, and the key itself never."""
    stand = TokenStand()
    unusable = {**stand.issuer.keys["first"], **change}
    stand.issuer.keys = {"bad": unusable}
    assert (await refusal_of(stand, lasting(stand))).members["reason"] == "unknown_key"
    stand.issuer.sign_with("good", PRIVATE_KEYS["ES256"], "ES256")
    stand.issuer.keys["none"] = []  # type: ignore[assignment]
    stand.later(COOL_DOWN_MS)
    assert await stand.principal(lasting(stand))


@pytest.mark.parametrize("crv", ["P-521", "Ed25519", "secp256k1", 5])
async def test_a_key_of_another_curve_than_it_says_is_passed_over(crv: Any) -> None:
    """Protects the fit of algorithm and curve from a set that is wrong about it."""
    stand = TokenStand()
    stand.issuer.sign_with("first", PRIVATE_KEYS["ES256"], "ES256")
    stand.issuer.keys["first"]["crv"] = crv
    assert (await refusal_of(stand, lasting(stand))).members["reason"] == "unknown_key"
