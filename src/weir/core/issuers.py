"""Who may vouch for callers: issuers of signed tokens, and the rules by which a verified token's claims mean an application.

Pure: what is compared was verified by `gateway/sign_in.py`, and the time is an argument. A refusal says which check failed and
never a value, which may be a person's name. A rule is known by a public id that takes the place of an API key's: it is in
usage, limits and revocations.
"""

import hashlib
import ipaddress
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from weir import errors
from weir.units import Millis

Claims: TypeAlias = Mapping[str, Any]
ClaimValue: TypeAlias = str | int | bool

ISSUERS_MAX = 16
RULES_MAX = 256
RULE_CLAIMS_MAX = 8
ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA", "Ed25519")
"""What an issuer may be allowed: signatures by a private key alone, so that nobody who can check one can make one."""

USUAL_ALGORITHMS = ("RS256", "PS256", "ES256", "EdDSA", "Ed25519")
_URL_CHARACTERS_MAX = 2_048
_CLAIM_CHARACTERS_MAX = 256
_EXACT_MAX = 2**53
"""Above it, readers of JSON may round a number."""

_RULE_KEY = re.compile("oidc-[0-9a-f]{16}")


class TokenFlaw(StrEnum):
    """Why a token is refused: `reason` of its 401."""

    TOO_LONG = "too_long"
    MALFORMED = "malformed"
    UNKNOWN_ISSUER = "unknown_issuer"
    ALGORITHM = "algorithm_not_allowed"
    UNKNOWN_KEY = "unknown_key"
    SIGNATURE = "wrong_signature"
    AUDIENCE = "wrong_audience"
    EXPIRED = "expired"
    NOT_YET_VALID = "not_yet_valid"
    NO_RULE = "no_rule"
    NO_APPLICATION = "no_application"


_SAID = {
    TokenFlaw.TOO_LONG: "it is too long",
    TokenFlaw.MALFORMED: "it is not a signed token in the compact form, with claims of the registered types",
    TokenFlaw.UNKNOWN_ISSUER: "its issuer is not one of ours",
    TokenFlaw.ALGORITHM: "its algorithm is not allowed, or is not that of its key",
    TokenFlaw.UNKNOWN_KEY: "its issuer has no such key",
    TokenFlaw.SIGNATURE: "its signature is wrong",
    TokenFlaw.AUDIENCE: "it is for another audience",
    TokenFlaw.EXPIRED: "it has expired",
    TokenFlaw.NOT_YET_VALID: "it is not valid yet",
    TokenFlaw.NO_RULE: "no rule gives it an application",
    TokenFlaw.NO_APPLICATION: "the application that its rule names does not exist",
}


def refused(flaw: TokenFlaw) -> errors.Unauthenticated:
    """The refusal of a token; it holds nothing of it."""
    return errors.Unauthenticated(f"The token is not accepted: {_SAID[flaw]}.", members={"reason": flaw.value})


@dataclass(frozen=True, slots=True)
class SignInRule:
    """All of these claims with exactly these values mean this application. A claim that is a list matches by any element."""

    claims: Mapping[str, ClaimValue]
    tenant: str
    application: str

    def matches(self, claims: Claims) -> bool:
        """Whether a verified token's claims have all of ours."""
        return all(name in claims and _has(claims[name], wanted) for name, wanted in self.claims.items())


def _has(claim: Any, wanted: ClaimValue) -> bool:
    """Compared with its type: `true` is not 1, and 1 is not "1"."""
    candidates = claim if isinstance(claim, list) else [claim]
    return any(type(candidate) is type(wanted) and candidate == wanted for candidate in candidates)


def is_claim(name: str, wanted: object) -> bool:
    """Whether a rule may ask for this: a name, and a text, a whole number or a truth value that every reader reads alike."""
    if isinstance(wanted, int):  # a truth value is one too
        return 1 <= len(name) <= _CLAIM_CHARACTERS_MAX and abs(wanted) <= _EXACT_MAX
    return isinstance(wanted, str) and 1 <= len(name) <= _CLAIM_CHARACTERS_MAX and len(wanted) <= _CLAIM_CHARACTERS_MAX


@dataclass(frozen=True, slots=True)
class Issuer:
    """An identity provider. url: exactly its tokens' `iss`. jwks_url: None to ask its discovery document.

    keys_refresh_ms: age at which its keys are fetched again. keys_valid_ms: age up to which they serve while it is away.
    keys_cool_down_ms: between two fetches, whatever tokens come. fetch_ms: how long it may take to answer.
    """

    url: str
    audiences: tuple[str, ...]
    rules: tuple[SignInRule, ...]
    jwks_url: str | None = None
    algorithms: tuple[str, ...] = USUAL_ALGORITHMS
    leeway_ms: Millis = 60_000  # two clocks that are kept differ by less; a token lives a little longer
    keys_refresh_ms: Millis = 600_000  # how long a key that the issuer withdrew is still good
    keys_valid_ms: Millis = 3_600_000  # an outage of the issuer is no outage of ours, for an hour
    keys_cool_down_ms: Millis = 30_000  # a flood of made-up key ids is no flood of requests to the issuer
    fetch_ms: Millis = 5_000  # a first token waits for it, as long as a client waits for a first byte

    def rule_key(self, rule: SignInRule) -> str:
        """The public id of a rule. It stays as long as the issuer's URL and the rule do, wherever it stands.

        Its first half is the application's, so that nobody takes it for a rule of another one.
        """
        identity = [self.url, sorted(rule.claims.items())]
        return f"oidc-{_owner_part(rule.tenant, rule.application)}{_digest_part(identity)}"

    def rule_of(self, claims: Claims) -> SignInRule:
        """The first rule that matches. Raises Unauthenticated where none does."""
        for rule in self.rules:
            if rule.matches(claims):
                return rule
        raise refused(TokenFlaw.NO_RULE)

    def check_claims(self, claims: Claims, now_ms: Millis) -> Millis:
        """Until when (Unix epoch, leeway included) these claims hold. Raises Unauthenticated where they do not now."""
        if claims.get("iss") != self.url:
            raise refused(TokenFlaw.UNKNOWN_ISSUER)
        if not set(_texts_of(claims.get("aud"))) & set(self.audiences):
            raise refused(TokenFlaw.AUDIENCE)
        until_ms = _moment(claims, "exp") + self.leeway_ms
        if now_ms >= until_ms:
            raise refused(TokenFlaw.EXPIRED)
        for name in ("nbf", "iat"):
            if name in claims and _moment(claims, name) > now_ms + self.leeway_ms:
                raise refused(TokenFlaw.NOT_YET_VALID)
        return until_ms


def _texts_of(audience: Any) -> Sequence[str]:
    texts = audience if isinstance(audience, list) else [audience]
    if not all(isinstance(text, str) for text in texts):
        raise refused(TokenFlaw.AUDIENCE)
    return texts


def _moment(claims: Claims, name: str) -> Millis:
    """A time of the claims in ms. Raises Unauthenticated unless it is a number of seconds."""
    seconds = claims.get(name)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not abs(seconds) < _EXACT_MAX:
        raise refused(TokenFlaw.MALFORMED)
    return int(seconds * 1_000)


# ── the ids of rules ─────────────────────────────────────────────────────────────────────────────────────────────────


def is_rule_key(key_id: str) -> bool:
    """Whether it has the form of a rule's id; an API key's has none of it."""
    return _RULE_KEY.fullmatch(key_id) is not None


def may_be_rule_of(tenant: str, application: str, key_id: str) -> bool:
    """Whether it has the form of the id of a rule that means this application, and of no other one."""
    return is_rule_key(key_id) and key_id.startswith(f"oidc-{_owner_part(tenant, application)}")


def _owner_part(tenant: str, application: str) -> str:
    return _digest_part([tenant, application])


def _digest_part(identity: list[Any]) -> str:
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:8]


def digest_of_rule_key(key_id: str) -> bytes:
    """What a rule's id has in place of a secret's digest: nothing that can be presented has it."""
    return hashlib.sha256(key_id.encode()).digest()


# ── addresses ────────────────────────────────────────────────────────────────────────────────────────────────────────


def is_issuer_url(url: str) -> bool:
    """Whether an issuer may be called so: an address without a query."""
    return is_key_url(url) and "?" not in url


def is_key_url(url: str) -> bool:
    """Whether keys may be fetched there: https, or http on this host alone, with nothing that could be a password."""
    if len(url) > _URL_CHARACTERS_MAX or not re.fullmatch("[!-~]+", url) or set(url) & set('@#"<>\\'):
        return False
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return False
    return bool(host) and port != 0 and (parts.scheme == "https" or (parts.scheme == "http" and is_loopback(host or "")))


def is_loopback(host: str) -> bool:
    """Whether a host is this one by its very name."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
