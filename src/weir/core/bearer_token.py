"""The parts of a signed token in the compact form (RFC 7515, 7519), read strictly and without trusting any of it.

There is one way to write a token: base64url without padding or stray bits, JSON objects without a name twice, so that two
readers never see two tokens in one text and no byte can be changed unseen. What it says is believed by nobody before
`gateway/sign_in.py` has checked the signature; only which issuer and key to check it with is taken from here.
"""

import base64
import json
from dataclasses import dataclass
from typing import Any, NoReturn

from weir.core.issuers import Claims, TokenFlaw, refused

TOKEN_CHARACTERS_MAX = 8_192
_KEY_ID_CHARACTERS_MAX = 256
_TYPES = ("jwt", "at+jwt")
_API_KEY_PREFIX = "weir-"


@dataclass(frozen=True, slots=True)
class UnverifiedToken:
    """What a token says of itself. key_id: None where it names no key. signed: the bytes that the signature is over."""

    algorithm: str
    key_id: str | None
    issuer: str
    claims: Claims
    signed: bytes
    signature: bytes


def has_form_of_token(presented: str) -> bool:
    """Whether a credential is to be taken for a token: two dots, and not the beginning of an API key."""
    return presented.count(".") == 2 and not presented.startswith(_API_KEY_PREFIX)


def parse_token(presented: str) -> UnverifiedToken:
    """The parts of a token. Raises Unauthenticated for its length, its form, or a header that asks for more than we know."""
    if len(presented) > TOKEN_CHARACTERS_MAX:
        raise refused(TokenFlaw.TOO_LONG)
    if not presented.isascii():
        raise refused(TokenFlaw.MALFORMED)
    signed, _, signature = presented.encode().rpartition(b".")
    header_part, _, claims_part = signed.partition(b".")
    header, claims = _json_object(header_part), _json_object(claims_part)
    algorithm, key_id, kind, issuer = header.get("alg"), header.get("kid"), header.get("typ", "JWT"), claims.get("iss")
    if "crit" in header or "b64" in header:  # its issuer wants what we do not do
        raise refused(TokenFlaw.MALFORMED)
    if not isinstance(kind, str) or kind.lower().removeprefix("application/") not in _TYPES:
        raise refused(TokenFlaw.MALFORMED)
    if key_id is not None and (not isinstance(key_id, str) or len(key_id) > _KEY_ID_CHARACTERS_MAX):
        raise refused(TokenFlaw.MALFORMED)
    if not isinstance(algorithm, str) or not isinstance(issuer, str):
        raise refused(TokenFlaw.MALFORMED)
    return UnverifiedToken(algorithm, key_id, issuer, claims, signed, _decoded(signature))


def _json_object(part: bytes) -> dict[str, Any]:
    try:
        document = strict_json(_decoded(part))
    except ValueError:
        raise refused(TokenFlaw.MALFORMED) from None
    if not isinstance(document, dict):
        raise refused(TokenFlaw.MALFORMED)
    return document


def _decoded(part: bytes) -> bytes:
    """Bytes from base64url. Raises Unauthenticated where another text would mean the same."""
    try:
        content = base64.urlsafe_b64decode(part + b"=" * (-len(part) % 4))
    except ValueError:
        content = b""
    if not content or base64.urlsafe_b64encode(content).rstrip(b"=") != part:
        raise refused(TokenFlaw.MALFORMED)
    return content


def strict_json(text: bytes) -> Any:
    """What JSON says, if it says it once. Raises ValueError, without the text, for a name twice, NaN, or too deep a nesting."""
    try:
        return json.loads(text.decode(), object_pairs_hook=_object_of, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("This is nested too deeply.") from None
    except ValueError:
        raise ValueError("This is not JSON that says everything once.") from None


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("A name comes twice.")
    return members


def _no_number(text: str) -> NoReturn:
    raise ValueError("This is no number of JSON.")
