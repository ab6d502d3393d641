"""Whom a signed token is taken for: what is refused with which reason, what is remembered, and nothing of it is ever shown."""

import json
from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs
from tests.token_issuer import AUDIENCE, PRIVATE_KEYS, TokenIssuer, put_together, signed_with_secret
from tests.unit.token_stand import REFRESH_MS, RULE, SNAPSHOT, TokenStand

from weir import errors
from weir.core.bearer_token import parse_token
from weir.core.issuers import SignInRule
from weir.core.tenancy import ApiKey, Principal, ServiceClass, digest_of_key, format_key

SECRET = "Ada.Lovelace@example.com"
MINUTE_S = 60


async def reason_of(stand: TokenStand, token: str) -> str:
    """Why a token is refused, after checking that the refusal holds nothing of it."""
    with pytest.raises(errors.Unauthenticated) as refusal:
        await stand.principal(token)
    said = refusal.value.detail + json.dumps(dict(refusal.value.members))
    assert not any(len(part) > 3 and part in said for part in (*token.split("."), SECRET))
    return str(refusal.value.members["reason"])


async def test_a_token_means_the_application_of_its_rule() -> None:
    """Protects who a caller is: tenant, application and key come from the rule, the service class from the application."""
    stand = TokenStand()
    principal = await stand.principal(stand.issuer.token())
    key = stand.configured.rule_key(RULE)
    assert principal == Principal("acme", "app", key, ServiceClass.INTERACTIVE)
    assert await stand.principal(stand.issuer.token(aud=["another", AUDIENCE])) == principal


@pytest.mark.parametrize(
    ("algorithm", "key"),
    [("RS256", "RS256"), ("PS256", "RS256"), ("ES256", "ES256"), ("Ed25519", "Ed25519")],
)
async def test_every_usual_algorithm_is_taken(algorithm: str, key: str) -> None:
    """Protects issuers of each kind of key; `EdDSA` is the older name of the same signature."""
    stand = TokenStand()
    stand.issuer.sign_with("second", PRIVATE_KEYS[key], algorithm)
    assert (await stand.principal(stand.issuer.token())).tenant == "acme"
    if algorithm == "Ed25519":
        header = {"alg": "EdDSA", "kid": "second", "typ": "at+jwt"}
        token = put_together(header, stand.issuer.claims(), PRIVATE_KEYS[key], "Ed25519")
        assert (await stand.principal(token)).tenant == "acme"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"iss": "http://127.0.0.1:1/realm/"}, "unknown_issuer"),
        ({"iss": None}, "malformed"),
        ({"iss": ["http://127.0.0.1:1/realm"]}, "malformed"),
        ({"aud": "another"}, "wrong_audience"),
        ({"aud": ["another", "third"]}, "wrong_audience"),
        ({"aud": [AUDIENCE, 5]}, "wrong_audience"),
        ({"aud": None}, "wrong_audience"),
        ({"aud": []}, "wrong_audience"),
        ({"aud": {AUDIENCE: True}}, "wrong_audience"),
        ({"exp": None}, "malformed"),
        ({"exp": "1900000000"}, "malformed"),
        ({"exp": True}, "malformed"),
        ({"exp": 10**30}, "malformed"),
        ({"nbf": "soon"}, "malformed"),
        ({"iat": [1]}, "malformed"),
        ({"sub": SECRET}, "no_rule"),
        ({"sub": None}, "no_rule"),
    ],
)
async def test_claims_that_do_not_fit_are_refused(changes: dict[str, Any], reason: str) -> None:
    """Protects tenants from tokens for others, without an end, or that no rule knows; the answer says why, and no value."""
    stand = TokenStand()
    assert await reason_of(stand, stand.issuer.token(**changes)) == reason


@pytest.mark.parametrize(("name", "bound"), [("exp", -MINUTE_S), ("nbf", MINUTE_S), ("iat", MINUTE_S)])
async def test_times_are_kept_to_the_leeway(name: str, bound: int) -> None:
    """Protects both sides of a clock that is off: just within a minute it is taken, beyond not."""
    stand = TokenStand()
    now_s = stand.issuer.now_ms // 1_000
    inside, outside = (1, 0) if name == "exp" else (0, 1)
    good, bad = ({name: now_s + bound + by} for by in (inside, outside))
    assert await stand.principal(stand.issuer.token(None, **good))
    reason = await reason_of(stand, stand.issuer.token(None, **bad))
    assert reason == ("expired" if name == "exp" else "not_yet_valid")


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ({"alg": "none"}, "algorithm_not_allowed"),
        ({"alg": "None"}, "algorithm_not_allowed"),
        ({"alg": "HS256"}, "algorithm_not_allowed"),
        ({"alg": "ES256"}, "algorithm_not_allowed"),
        ({"alg": "PS256"}, "algorithm_not_allowed"),
        ({"alg": "RS512"}, "algorithm_not_allowed"),
        ({"alg": None}, "malformed"),
        ({"alg": ["RS256"]}, "malformed"),
        ({"kid": "made-up"}, "unknown_key"),
        ({"kid": 5}, "malformed"),
        ({"kid": "k" * 257}, "malformed"),
        ({"typ": "secevent+jwt"}, "malformed"),
        ({"typ": 5}, "malformed"),
        ({"crit": ["exp"]}, "malformed"),
        ({"b64": False}, "malformed"),
    ],
)
async def test_a_header_that_asks_for_something_else_is_refused(header: dict[str, Any], reason: str) -> None:
    """Protects against a header that picks how it is checked; another algorithm of the same key is not the key's."""
    stand = TokenStand()
    assert await reason_of(stand, stand.issuer.token(header)) == reason


async def test_a_public_key_is_no_secret_and_no_signature_is_none() -> None:
    """Protects against the two old tricks: a signature made with the public key as a secret, and none at all."""
    stand = TokenStand()
    public_key = PRIVATE_KEYS["RS256"].as_pem(private=False)
    header, claims = {"kid": "first"}, stand.issuer.claims()
    for secret in (public_key, json.dumps(stand.issuer.keys["first"]).encode()):
        for algorithm, reason in (("HS256", "algorithm_not_allowed"), ("RS256", "wrong_signature")):
            forged = signed_with_secret({**header, "alg": algorithm}, claims, secret)
            assert await reason_of(stand, forged) == reason
    for algorithm in ("none", "RS256"):
        assert await reason_of(stand, put_together({"alg": algorithm, "kid": "first"}, claims, None, "")) == "malformed"


async def test_a_key_of_another_issuer_signs_nothing_of_this_one() -> None:
    """Protects one issuer's applications from another's tokens, also where the key ids are the same."""
    other = TokenIssuer("http://127.0.0.1:2/realm")
    other.sign_with("first", PRIVATE_KEYS["ES256"], "ES256")
    other.sign_with("only-there", PRIVATE_KEYS["ES256"], "ES256")
    stand = TokenStand(other)
    assert (await stand.principal(other.token())).tenant == "other"
    for key_id, reason in (("first", "algorithm_not_allowed"), ("only-there", "unknown_key")):
        assert await reason_of(stand, other.token({"kid": key_id}, iss=stand.issuer.url)) == reason
    stand.issuer.sign_with("third", PRIVATE_KEYS["ES384"], "ES384")
    forged = put_together({"alg": "ES256", "kid": "first"}, stand.issuer.claims(), PRIVATE_KEYS["ES256"], "ES256")
    assert await reason_of(stand, forged) == "algorithm_not_allowed"


@pytest.mark.parametrize(
    "token",
    [
        "a.b.c",
        "..",
        "e30.e30.e30",
        "é.é.é",
        put_together(b'{"alg":"RS256","alg":"RS256"}', b"{}", PRIVATE_KEYS["RS256"], "RS256"),
        put_together(b"[]", b"{}", PRIVATE_KEYS["RS256"], "RS256"),
        put_together(b"[" * 3_000, b"{}", PRIVATE_KEYS["RS256"], "RS256"),
        put_together(b'{"alg":NaN}', b"{}", PRIVATE_KEYS["RS256"], "RS256"),
        put_together(b"\xff", b"{}", PRIVATE_KEYS["RS256"], "RS256"),
        put_together({"alg": "RS256"}, b'{"iss":"a","iss":"a"}', PRIVATE_KEYS["RS256"], "RS256"),
        put_together({"alg": "RS256"}, b'{"iss":"a","x":{"y":1,"y":2}}', PRIVATE_KEYS["RS256"], "RS256"),
    ],
)
async def test_what_can_be_read_in_two_ways_is_not_read(token: str) -> None:
    """Protects against two readers of one text: names twice, at any depth, and what is no JSON."""
    assert await reason_of(TokenStand(), token) == "malformed"


async def test_a_long_token_is_refused_at_once() -> None:
    """Protects the loop: what is longer than 8 KiB is not even decoded, nor are its issuer's keys fetched."""
    stand = TokenStand()
    token = stand.issuer.token(note="x" * 8_192)
    assert await reason_of(stand, token) == "too_long"
    assert stand.fetches == 0
    with pytest.raises(errors.Unauthenticated, match="too long"):
        parse_token(token)


# ── beside API keys ──────────────────────────────────────────────────────────────────────────────────────────────────


async def test_api_keys_go_their_own_way() -> None:
    """Protects the usual credential: it needs no issuer and no fetch, and what is neither is refused as before."""
    key = format_key("0" * 12, b"k" * 32)
    digest = digest_of_key(key)
    assert digest is not None
    snapshot = replace(SNAPSHOT, keys={digest: ApiKey("0" * 12, "acme", "app", digest)})
    stand = TokenStand()
    assert (await stand.principal(key, snapshot)).key == "0" * 12
    for presented in ("", "a.b", "a.b.c.d.e", "weir-a.b.c"):
        with pytest.raises(errors.Unauthenticated, match="missing or unknown"):
            await stand.principal(presented, snapshot)
    assert not stand.issuer.asked


# ── standing ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_who_was_revoked_or_disabled_is_refused_as_with_a_key() -> None:
    """Protects revocations: a token that is remembered is refused by the next request."""
    stand = TokenStand()
    token = stand.issuer.token()
    acme, app = SNAPSHOT.tenants["acme"], SNAPSHOT.applications["acme", "app"]
    rule_key = (await stand.principal(token)).key
    digest = b"0" * 32
    for snapshot, refusal in (
        (replace(SNAPSHOT, tenants={"acme": replace(acme, revoked=True)}), errors.Revoked),
        (replace(SNAPSHOT, tenants={"acme": replace(acme, disabled=True)}), errors.Forbidden),
        (replace(SNAPSHOT, applications={("acme", "app"): replace(app, revoked=True)}), errors.Revoked),
        (replace(SNAPSHOT, keys={digest: ApiKey(rule_key, "acme", "app", digest, revoked=True)}), errors.Revoked),
    ):
        with pytest.raises(refusal):
            await stand.principal(token, snapshot)
    assert (await stand.principal(token)).key == rule_key


async def test_a_rule_that_leads_nowhere_is_said_once() -> None:
    """Protects operators from a misspelt name: the caller is refused, and the log names the rule a single time."""
    with capture_logs() as logs:
        stand = TokenStand(rules=(SignInRule({"sub": "robot"}, "acme", "absent"),))
        for _ in range(3):
            assert await reason_of(stand, stand.issuer.token()) == "no_application"
    said = [line for line in logs if line["event"] == "sign_in_rule_without_application"]
    assert [(line["tenant"], line["application"]) for line in said] == [("acme", "absent")]
    started = [line for line in logs if line["event"] == "sign_in_rule"]
    assert [(line["issuer"], line["rule"], line["key"]) for line in started] == [("corporate", 1, said[0]["key"])]


# ── what is remembered ───────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_remembered_token_ends_with_its_time() -> None:
    """Protects the end of a token: remembered or not, it is refused once `exp` and the leeway are over."""
    stand = TokenStand()
    token = stand.issuer.token()
    await stand.principal(token)
    stand.clock.now_ms += 300_000 + 59_999
    await stand.principal(token)
    stand.clock.now_ms += 1
    assert await reason_of(stand, token) == "expired"


async def test_a_remembered_token_ends_with_its_key() -> None:
    """Protects the withdrawal of a key: once the set was fetched again, what it signed is refused, also if remembered."""
    stand = TokenStand()
    token = stand.issuer.token(exp=stand.issuer.now_ms // 1_000 + 10 * 3_600)
    await stand.principal(token)
    del stand.issuer.keys["first"]
    await stand.principal(token)
    stand.later(REFRESH_MS)
    assert await reason_of(stand, token) == "unknown_key"
    assert stand.fetches == 2


async def test_so_many_tokens_are_remembered_and_no_more() -> None:
    """Protects memory: the token used least recently is forgotten, and verified again when it comes."""
    stand = TokenStand(remembered_max=2)
    first, second, third = (stand.issuer.token(jti=str(number)) for number in range(3))
    for token in (first, second, first, third):
        await stand.principal(token)
    remembered = stand.sign_in._verified
    assert len(remembered) == 2
    kept = [*remembered]
    await stand.principal(first)
    assert set(remembered) == set(kept)
    await stand.principal(second)
    assert set(remembered) != set(kept)
