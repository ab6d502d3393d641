"""Who asks: an API key goes to the snapshot, a signed token is verified here. Every surface authenticates through it.

A token is verified once: signature, issuer, audience, times, and the first rule that its claims match. What it meant is
remembered by its digest, until it expires or its key is withdrawn, so that the next request with it costs two look-ups. The
snapshot is asked each time: an application that was revoked is refused at once. Nothing of a token, nor a claim's value, is in
an error or a log.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import structlog

from weir.core.bearer_token import TOKEN_CHARACTERS_MAX, has_form_of_token, parse_token
from weir.core.issuers import Issuer, SignInRule, TokenFlaw, refused
from weir.core.registry.snapshot import Snapshot
from weir.core.tenancy import Principal
from weir.errors import Unauthenticated
from weir.gateway.issuer_keys import FetchDocument, IssuerKeys
from weir.gateway.verification_keys import VerificationKey
from weir.ports import Clock
from weir.units import Millis

_log = structlog.get_logger("weir.sign_in")

REMEMBERED_MAX = 10_000
"""Verified tokens, about 500 bytes each; the one that was not used for longest is verified again."""


@dataclass(frozen=True, slots=True)
class _Verified:
    """What a token meant when it was verified."""

    keys: IssuerKeys
    key: VerificationKey
    key_id: str | None
    rule: SignInRule
    rule_key: str
    until_ms: Millis


class SignIn:
    """Authenticates callers. issuers: by the names of the configuration; none: API keys are the only credentials."""

    def __init__(
        self,
        clock: Clock,
        fetch: FetchDocument | None = None,
        issuers: Mapping[str, Issuer] = MappingProxyType({}),
        *,
        remembered_max: int = REMEMBERED_MAX,
    ) -> None:
        assert fetch is not None or not issuers
        self._clock = clock
        self._remembered_max = remembered_max
        self._keys: dict[str, IssuerKeys] = {}
        self._verified: OrderedDict[bytes, _Verified] = OrderedDict()
        self._missed: set[str] = set()
        for name, issuer in issuers.items():
            assert fetch is not None
            self._keys[issuer.url] = IssuerKeys(name, issuer, fetch, clock)
            for place, rule in enumerate(issuer.rules, 1):
                named = {"tenant": rule.tenant, "application": rule.application, "key": issuer.rule_key(rule)}
                _log.info("sign_in_rule", issuer=name, rule=place, **named)

    async def wait_for_keys(self, presented: str) -> None:
        """Returns once `principal_of` has what it needs to judge a token, or cannot get it. Costs nothing for an API key."""
        if not self._keys or not has_form_of_token(presented) or len(presented) > TOKEN_CHARACTERS_MAX:
            return
        verified = self._verified.get(_digest_of(presented))
        if verified is not None:
            await verified.keys.wait_for(verified.key_id)
            return
        try:
            token = parse_token(presented)
        except Unauthenticated:
            return  # said by who asks next
        keys = self._keys.get(token.issuer)
        if keys is not None and token.algorithm in keys.issuer.algorithms:
            await keys.wait_for(token.key_id)

    def principal_of(self, presented: str, snapshot: Snapshot) -> Principal:
        """The caller behind a credential. Raises Unauthenticated, Revoked, IssuerUnavailable, or Forbidden for its tenant."""
        if not self._keys or not has_form_of_token(presented):
            return snapshot.authenticate(presented)
        verified = self._verified_token(presented)
        rule = verified.rule
        principal = snapshot.principal_of(rule.tenant, rule.application, verified.rule_key)
        if principal is None:
            self._miss(verified)
            raise refused(TokenFlaw.NO_APPLICATION)
        return principal

    async def aclose(self) -> None:
        """Give up what is being fetched."""
        for keys in self._keys.values():
            await keys.aclose()

    def _verified_token(self, presented: str) -> _Verified:
        if len(presented) > TOKEN_CHARACTERS_MAX:
            raise refused(TokenFlaw.TOO_LONG)
        digest = _digest_of(presented)
        verified = self._verified.get(digest)
        if verified is None or not verified.keys.still_has(verified.key) or self._clock.wall_ms() >= verified.until_ms:
            self._verified.pop(digest, None)
            verified = self._verified[digest] = self._verify(presented)
            if len(self._verified) > self._remembered_max:
                self._verified.popitem(last=False)
        else:
            self._verified.move_to_end(digest)
        return verified

    def _verify(self, presented: str) -> _Verified:
        """About 100 µs. Raises Unauthenticated or IssuerUnavailable."""
        token = parse_token(presented)
        keys = self._keys.get(token.issuer)
        if keys is None:
            raise refused(TokenFlaw.UNKNOWN_ISSUER)
        issuer = keys.issuer
        if token.algorithm not in issuer.algorithms:
            raise refused(TokenFlaw.ALGORITHM)
        key = keys.find(token.key_id, token.algorithm)
        if not key.signed(token.algorithm, token.signed, token.signature):
            raise refused(TokenFlaw.SIGNATURE)
        until_ms = issuer.check_claims(token.claims, self._clock.wall_ms())
        rule = issuer.rule_of(token.claims)
        return _Verified(keys, key, token.key_id, rule, issuer.rule_key(rule), until_ms)

    def _miss(self, verified: _Verified) -> None:
        """Say once which rule leads nowhere."""
        if verified.rule_key not in self._missed:
            self._missed.add(verified.rule_key)
            named = {"tenant": verified.rule.tenant, "application": verified.rule.application}
            _log.warning("sign_in_rule_without_application", key=verified.rule_key, **named)


def _digest_of(presented: str) -> bytes:
    return hashlib.sha256(presented.encode()).digest()
