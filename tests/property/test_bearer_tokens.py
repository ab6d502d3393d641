"""Tokens that were changed, cut or made up: whatever it is, it is refused as unauthenticated and nothing else happens."""

import asyncio
import json
import string
from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.token_issuer import PRIVATE_KEYS, put_together
from tests.unit.token_stand import SNAPSHOT, TokenStand

from weir import errors
from weir.core.bearer_token import parse_token, strict_json

ALPHABET = string.ascii_letters + string.digits + "-_.=+/ é"
KINDS = ("RS256", "ES256", "Ed25519")


def standing(kind: str) -> tuple[TokenStand, str]:
    """A sign-in that has the keys of its issuer, and a good token."""
    stand = TokenStand()
    stand.issuer.sign_with("first", PRIVATE_KEYS[kind], kind)
    token = stand.issuer.token()
    assert asyncio.run(stand.principal(token)).tenant == "acme"
    return stand, token


STANDS = {kind: standing(kind) for kind in KINDS}
LAST = 10**6


@given(kind=st.sampled_from(KINDS), place=st.integers(0, LAST), other=st.sampled_from(ALPHABET))
@example(kind="RS256", place=LAST, other="A")
@example(kind="ES256", place=LAST, other="B")
def test_any_changed_character_is_refused(kind: str, place: int, other: str) -> None:
    """Protects every bit of a token, also those that base64 has to spare at the end of a part."""
    stand, token = STANDS[kind]
    place = min(place, LAST) % len(token) if place < LAST else len(token) - 1
    changed = token[:place] + other + token[place + 1 :]
    if changed == token:
        return
    with pytest.raises((errors.Unauthenticated, errors.IssuerUnavailable)) as refusal:
        stand.sign_in.principal_of(changed, SNAPSHOT)
    assert isinstance(refusal.value, errors.Unauthenticated)


def test_the_last_character_has_one_spelling() -> None:
    """Protects against a token with several texts: of all last characters only the one that was signed is taken."""
    for stand, token in STANDS.values():
        taken = []
        for other in string.ascii_letters + string.digits + "-_":
            try:
                stand.sign_in.principal_of(token[:-1] + other, SNAPSHOT)
                taken.append(other)
            except errors.Unauthenticated:
                continue
        assert taken == [token[-1]]


@given(kind=st.sampled_from(KINDS), start=st.integers(0, 2_000), end=st.integers(0, 2_000))
def test_any_part_of_a_token_is_refused(kind: str, start: int, end: int) -> None:
    """Protects against a token that was cut."""
    stand, token = STANDS[kind]
    cut = token[start:end]
    if cut != token:
        with pytest.raises(errors.Unauthenticated):
            stand.sign_in.principal_of(cut, SNAPSHOT)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
MEMBERS = st.dictionaries(st.sampled_from(["alg", "kid", "typ", "crit", "iss", "aud", "exp", "nbf", "iat", "sub"]), JSON)


@given(header=MEMBERS, claims=MEMBERS, changes=st.booleans())
def test_whatever_is_signed_is_taken_or_refused(header: dict[str, object], claims: dict[str, object], changes: bool) -> None:
    """Protects the gateway from claims of any type, also signed ones: an answer, never a failure."""
    stand, _ = STANDS["ES256"]
    if changes:
        header = {"alg": "ES256", "kid": "first"}
        claims = {**stand.issuer.claims(), **claims, "iss": stand.issuer.url}
    with suppress(errors.Unauthenticated):
        stand.sign_in.principal_of(put_together(header, claims, PRIVATE_KEYS["ES256"], "ES256"), SNAPSHOT)


@given(st.text() | st.text(alphabet=ALPHABET) | st.lists(st.text(alphabet=ALPHABET), min_size=3, max_size=3).map(".".join))
def test_no_text_is_more_than_refused(text: str) -> None:
    """Protects the door from any header."""
    with pytest.raises(errors.Unauthenticated):
        parse_token(text)


@given(JSON)
def test_json_is_read_as_it_was_written(document: object) -> None:
    """Protects the reader of keys and claims: what JSON can say is read back, and what it cannot say is refused."""
    text = json.dumps(document)
    if "NaN" in text or "Infinity" in text:
        with suppress(ValueError):  # within a text it is no number
            assert strict_json(text.encode()) == document
    else:
        assert strict_json(text.encode()) == document
