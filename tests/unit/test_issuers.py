"""Rules and addresses of issuers: what matches, what an id stands for, and where keys may be fetched."""

from typing import Any

import pytest

from weir import errors
from weir.core.bearer_token import has_form_of_token
from weir.core.issuers import Issuer, SignInRule, digest_of_rule_key, is_issuer_url, is_key_url, is_rule_key
from weir.core.tenancy import digest_of_key, format_key

URL = "https://login.example.com"


@pytest.mark.parametrize(
    ("wanted", "claims", "matches"),
    [
        ({"sub": "robot"}, {"sub": "robot", "more": 1}, True),
        ({"sub": "robot"}, {"sub": "Robot"}, False),
        ({"sub": "robot"}, {"sub": "robots"}, False),
        ({"sub": "robot"}, {}, False),
        ({"sub": "robot"}, {"sub": None}, False),
        ({"groups": "ml"}, {"groups": ["web", "ml"]}, True),
        ({"groups": "ml"}, {"groups": ["web"]}, False),
        ({"groups": "ml"}, {"groups": [["ml"]]}, False),
        ({"groups": "ml"}, {"groups": {"ml": True}}, False),
        ({"groups": "ml"}, {"groups": "web ml"}, False),
        ({"sub": "robot", "azp": "ci"}, {"sub": "robot", "azp": "ci"}, True),
        ({"sub": "robot", "azp": "ci"}, {"sub": "robot", "azp": "cd"}, False),
        ({"sub": "robot", "azp": "ci"}, {"sub": "robot"}, False),
        ({"level": 1}, {"level": 1}, True),
        ({"level": 1}, {"level": True}, False),
        ({"level": 1}, {"level": 1.0}, False),
        ({"level": 1}, {"level": "1"}, False),
        ({"admin": True}, {"admin": True}, True),
        ({"admin": True}, {"admin": 1}, False),
        ({"admin": True}, {"admin": "true"}, False),
        ({"admin": False}, {}, False),
    ],
)
def test_a_rule_matches_exactly(wanted: dict[str, Any], claims: dict[str, Any], matches: bool) -> None:
    """Protects applications from claims that only look alike: all of them, with their types, a list by one of its elements."""
    assert SignInRule(wanted, "acme", "app").matches(claims) is matches


def test_the_first_rule_that_matches_wins() -> None:
    """Protects the order that an operator wrote: a narrow rule before a wide one takes its callers away from it."""
    narrow, wide = SignInRule({"sub": "robot", "azp": "ci"}, "acme", "ci"), SignInRule({"sub": "robot"}, "acme", "app")
    claims = {"sub": "robot", "azp": "ci"}
    assert Issuer(URL, ("weir",), (narrow, wide)).rule_of(claims) is narrow
    assert Issuer(URL, ("weir",), (wide, narrow)).rule_of(claims) is wide
    with pytest.raises(errors.Unauthenticated, match="no rule gives it an application"):
        Issuer(URL, ("weir",), (narrow, wide)).rule_of({"sub": "another"})


def test_the_issuer_of_the_claims_is_the_one_that_signed() -> None:
    """Protects against claims of one issuer that are checked as another's."""
    issuer = Issuer(URL, ("weir",), ())
    with pytest.raises(errors.Unauthenticated, match="not one of ours"):
        issuer.check_claims({"iss": f"{URL}/", "aud": "weir", "exp": 1}, 0)


def test_a_rules_id_stays_until_the_rule_means_something_else() -> None:
    """Protects usage, limits and revocations: the id follows the rule wherever it stands, and no two rules share one."""
    rule = SignInRule({"sub": "robot", "azp": "ci"}, "acme", "app")
    issuer = Issuer(URL, ("weir",), (rule,))
    key = issuer.rule_key(rule)
    assert is_rule_key(key)
    assert key == Issuer(URL, ("other",), (), leeway_ms=0).rule_key(SignInRule({"azp": "ci", "sub": "robot"}, "acme", "app"))
    others = [
        SignInRule({"sub": "robot"}, "acme", "app"),
        SignInRule({"sub": "robot", "azp": "cd"}, "acme", "app"),
        SignInRule({"sub": "robot", "azp": "ci"}, "globex", "app"),
        SignInRule({"sub": "robot", "azp": "ci"}, "acme", "web"),
        SignInRule({"level": 1}, "acme", "app"),
        SignInRule({"level": True}, "acme", "app"),
        SignInRule({"level": "1"}, "acme", "app"),
    ]
    keys = [key, *map(issuer.rule_key, others), Issuer(f"{URL}/", ("weir",), ()).rule_key(rule)]
    assert len(set(keys)) == len(keys)


def test_a_rules_id_is_no_credential() -> None:
    """Protects against an id that is presented: it has neither a key's form nor a token's, and its digest is no key's."""
    api_key = format_key("0" * 12, b"k" * 32)
    key = Issuer(URL, ("weir",), ()).rule_key(SignInRule({"sub": "robot"}, "acme", "app"))
    assert digest_of_key(key) is None and not has_form_of_token(key)
    assert not is_rule_key("0" * 12) and not is_rule_key(f"{key}0") and not is_rule_key(key.upper())
    assert digest_of_rule_key(key) != digest_of_key(api_key) and len(digest_of_rule_key(key)) == 32


@pytest.mark.parametrize(
    ("url", "as_issuer", "as_keys"),
    [
        ("https://login.example.com", True, True),
        ("https://login.example.com:8443/realms/a/", True, True),
        ("https://login.example.com/keys?version=1", False, True),
        ("http://127.0.0.1:8080/realm", True, True),
        ("http://[::1]/realm", True, True),
        ("http://localhost/realm", True, True),
        ("http://login.example.com", False, False),
        ("http://127.0.0.1.example.com", False, False),
        ("http://localhost.example.com", False, False),
        ("http://10.0.0.1", False, False),
        ("https://user:password@login.example.com", False, False),
        ("https://login.example.com#part", False, False),
        ("https://login.example.com/a b", False, False),
        ("https://login.example.com/\n", False, False),
        ("https://login.exämple.com", False, False),
        ("https://", False, False),
        ("https://[::1", False, False),
        ("https://login.example.com:0", False, False),
        ("https://login.example.com:port", False, False),
        ("ftp://login.example.com", False, False),
        ("file:///etc/keys", False, False),
        ("https://login.example.com/" + "x" * 2_048, False, False),
        ("", False, False),
    ],
)
def test_keys_come_only_from_where_nobody_can_change_them(url: str, as_issuer: bool, as_keys: bool) -> None:
    """Protects the keys on their way: TLS, or this host alone, and no address that holds a secret."""
    assert (is_issuer_url(url), is_key_url(url)) == (as_issuer, as_keys)
