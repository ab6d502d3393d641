"""Keys, entitlements, scopes and limits as plain values."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.core.tenancy import (
    KEY_SECRET_BYTES,
    LIMIT_NAMES,
    Application,
    Limits,
    Retention,
    Scope,
    ServiceClass,
    Tenant,
    digest_of_key,
    format_key,
    scopes_of,
)

KEY_IDS = st.text("0123456789abcdef", min_size=12, max_size=12)
SECRETS = st.binary(min_size=KEY_SECRET_BYTES, max_size=KEY_SECRET_BYTES)


@given(KEY_IDS, SECRETS)
def test_a_key_that_was_issued_has_a_digest(key_id: str, secret: bytes) -> None:
    """Protects authentication: the digest is the SHA-256 of the whole key as presented."""
    key = format_key(key_id, secret)
    assert key.startswith(f"weir-{key_id}-")
    assert digest_of_key(key) == hashlib.sha256(key.encode()).digest()


@given(KEY_IDS, SECRETS, st.data())
def test_a_mistyped_key_is_refused_without_a_look_up(key_id: str, secret: bytes, data: st.DataObject) -> None:
    """Protects authentication: any one changed, missing or added character breaks the form or the checksum."""
    key = format_key(key_id, secret)
    place = data.draw(st.integers(0, len(key) - 1))
    other = data.draw(st.characters().filter(lambda character: character != key[place]))
    assert digest_of_key(key[:place] + other + key[place + 1 :]) is None
    assert digest_of_key(key[:place] + key[place + 1 :]) is None
    assert digest_of_key(key[:place] + other + key[place:]) is None


@given(st.text(max_size=120))
def test_arbitrary_text_is_no_key(presented: str) -> None:
    """Protects authentication: text that nobody issued never reaches the look-up, and never raises."""
    assert digest_of_key(presented) is None


@pytest.mark.parametrize(("key_id", "secret"), [("abc", bytes(KEY_SECRET_BYTES)), ("0" * 12, b"short")])
def test_a_key_of_another_length_is_not_issued(key_id: str, secret: bytes) -> None:
    """Protects key strength: ids and secrets have one length."""
    with pytest.raises(AssertionError):
        format_key(key_id, secret)


@pytest.mark.parametrize(
    ("aliases", "allowed"),
    [(None, True), (frozenset({"assistant"}), True), (frozenset({"other"}), False), (frozenset(), False)],
)
def test_entitlement_to_an_alias(aliases: frozenset[str] | None, allowed: bool) -> None:
    """Protects entitlement: absent means every alias, an empty set means none."""
    assert Application("acme", "web", aliases=aliases).may_use("assistant") is allowed


@pytest.mark.parametrize(
    ("changes", "is_kept"),
    [({}, True), ({"disabled": True}, True), ({"revoked": True}, False), ({"revoked": True, "deleted": True}, False)],
)
def test_what_is_kept_of_a_tenants_streams_ends_with_the_tenant(changes: dict[str, bool], is_kept: bool) -> None:
    """Protects what a tenant asked for while it drains, and everybody from what is kept for nobody."""
    policy = Retention(60, 2**20)
    assert Tenant("acme", retention=policy, **changes).keeps == (policy if is_kept else None)  # type: ignore[arg-type]
    assert Tenant("acme", **changes).keeps is None  # type: ignore[arg-type]


def test_the_scopes_of_a_request_are_listed_widest_first() -> None:
    """Protects admission: all six scopes apply, each with and without the alias, and the widest answers first."""
    assert scopes_of("t", "a", "k", "m", ServiceClass.BATCH) == (
        Scope("t"),
        Scope("t", "a"),
        Scope("t", "a", "k"),
        Scope("t", alias="m"),
        Scope("t", "a", alias="m"),
        Scope("t", "a", "k", "m"),
        Scope("t", service_class=ServiceClass.BATCH),
        Scope("t", "a", service_class=ServiceClass.BATCH),
        Scope("t", "a", "k", service_class=ServiceClass.BATCH),
        Scope("t", alias="m", service_class=ServiceClass.BATCH),
        Scope("t", "a", alias="m", service_class=ServiceClass.BATCH),
        Scope("t", "a", "k", "m", ServiceClass.BATCH),
    )


@pytest.mark.parametrize(
    ("scope", "public"),
    [
        (Scope("t"), {"tenant": "t"}),
        (Scope("t", alias="m"), {"tenant": "t", "alias": "m"}),
        (Scope("t", "a", "k", "m"), {"tenant": "t", "application": "a", "key": "k", "alias": "m"}),
        (Scope("t", "a", service_class=ServiceClass.BATCH), {"tenant": "t", "application": "a", "service_class": "batch"}),
    ],
)
def test_a_scope_shows_only_what_is_set(scope: Scope, public: dict[str, str]) -> None:
    """Protects the public shape of refusals and limits: absent fields are absent."""
    assert scope.public() == public


@pytest.mark.parametrize("name", LIMIT_NAMES)
@pytest.mark.parametrize("value", [0, 1])
def test_a_limit_of_zero_is_a_limit(name: str, value: int) -> None:
    """Protects zero: nothing allowed is not the same as unlimited, so the entry is kept."""
    assert not Limits(**{name: value}).is_empty
    assert Limits().is_empty


def test_the_names_of_limits_are_those_of_the_contract() -> None:
    """Protects the public contract: it names every limit that can be set."""
    assert sorted(LIMIT_NAMES) == [
        "concurrency",
        "requests_per_minute",
        "spend_microusd_lifetime",
        "spend_microusd_per_day",
        "spend_microusd_per_month",
        "tokens_lifetime",
        "tokens_per_day",
        "tokens_per_minute",
        "tokens_per_month",
    ]
