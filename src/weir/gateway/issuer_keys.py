"""The public keys of one issuer: fetched when a token needs them, kept for a while, and used while the issuer is away.

It decides when to fetch: once for everybody who waits, never twice within the cool-down whatever tokens come, in the
background when the keys are half as old as they may get, and in front of a token when they are that old. A set that was fetched
replaces the one before, so that a key which the issuer withdrew is gone. A fetch that fails changes nothing; the last good keys
serve until they are too old to be relied on, and then the answer is `issuer_unavailable` and not that a token is wrong.
"""

import asyncio
from typing import Any, Protocol

import structlog

from weir import errors
from weir.core.bearer_token import strict_json
from weir.core.issuers import Issuer, TokenFlaw, is_key_url, refused
from weir.gateway.verification_keys import KeySet, VerificationKey, key_set_of
from weir.ports import Clock
from weir.units import NANOS_PER_MILLI, Bytes, Millis, Nanos

_log = structlog.get_logger("weir.sign_in")

DOCUMENT_BYTES_MAX: Bytes = 256 * 1024
_DISCOVERY = "/.well-known/openid-configuration"
_NO_KEYS = "The keys of the token's issuer cannot be had now."


class FetchDocument(Protocol):
    """Reads a small public document over http or https."""

    async def __call__(self, url: str, *, wait_ms: Millis, bytes_max: Bytes) -> bytes:
        """The body of a 200. Raises IssuerUnavailable for another status, a redirect, one too large, or none in time."""
        ...


class IssuerKeys:
    """The keys of one issuer, for one event loop. name: what the configuration calls the issuer."""

    def __init__(self, name: str, issuer: Issuer, fetch: FetchDocument, clock: Clock) -> None:
        self.issuer = issuer
        self._name = name
        self._fetch = fetch
        self._clock = clock
        self._keys_url = issuer.jwks_url
        self._keys = KeySet(())
        self._fetched_ns: Nanos | None = None
        self._tried_ns: Nanos | None = None
        self._failed = False
        self._flight: asyncio.Task[None] | None = None

    def find(self, key_id: str | None, algorithm: str) -> VerificationKey:
        """The key that a token names. Raises Unauthenticated, or IssuerUnavailable where a fetch might have brought it."""
        if not self._are_valid:
            raise self._unavailable()
        found = self._keys.find(key_id, algorithm)
        if found is not None:
            return found
        if self._keys.has(key_id):
            raise refused(TokenFlaw.ALGORITHM)
        raise self._unavailable() if self._failed else refused(TokenFlaw.UNKNOWN_KEY)

    def still_has(self, key: VerificationKey) -> bool:
        """Whether a token that was verified with this key would be again."""
        return self._are_valid and key.identity in self._keys.identities

    async def wait_for(self, key_id: str | None) -> None:
        """Returns once a fetch cannot help a token with this key id, or has not helped. Never raises for the issuer."""
        known = self._are_valid and self._keys.has(key_id)
        age_ms = self._age_ms
        if known and age_ms < self.issuer.keys_refresh_ms / 2:
            return
        if self._flight is None and self._may_fetch:
            self._flight = asyncio.get_running_loop().create_task(self._refresh())
        is_old = age_ms >= self.issuer.keys_refresh_ms and not self._failed
        if self._flight is not None and (is_old or not known):
            await asyncio.wait([self._flight])

    async def aclose(self) -> None:
        """Give up a fetch that runs."""
        if self._flight is not None:
            self._flight.cancel()
            await asyncio.wait([self._flight])

    # ── ages ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _age_ms(self) -> float:
        return self._since_ms(self._fetched_ns)

    @property
    def _are_valid(self) -> bool:
        return self._age_ms < self.issuer.keys_valid_ms

    @property
    def _may_fetch(self) -> bool:
        return self._since_ms(self._tried_ns) >= self.issuer.keys_cool_down_ms

    def _since_ms(self, moment_ns: Nanos | None) -> float:
        return float("inf") if moment_ns is None else (self._clock.monotonic_ns() - moment_ns) / NANOS_PER_MILLI

    def _unavailable(self) -> errors.IssuerUnavailable:
        wait_ms = max(
            self.issuer.keys_cool_down_ms - int(min(self._since_ms(self._tried_ns), self.issuer.keys_cool_down_ms)), 1
        )
        return errors.IssuerUnavailable(_NO_KEYS, retry_after_ms=wait_ms)

    # ── fetching ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _refresh(self) -> None:
        began_ns = self._tried_ns = self._clock.monotonic_ns()
        try:
            keys = await self._fetched()
        except errors.IssuerUnavailable as fault:
            self._failed = True
            self._keys_url = self.issuer.jwks_url  # its keys may have moved: ask anew
            _log.warning("issuer_keys_not_fetched", issuer=self._name, reason=fault.detail, has_keys=self._are_valid)
        else:
            if keys.identities != self._keys.identities or self._failed or self._fetched_ns is None:
                _log.info("issuer_keys_fetched", issuer=self._name, keys=len(keys.identities))
            self._keys, self._fetched_ns, self._failed = keys, began_ns, False
        finally:
            self._flight = None

    async def _fetched(self) -> KeySet:
        if self._keys_url is None:
            self._keys_url = await self._discovered()
        members = (await self._document(self._keys_url)).get("keys")
        if not isinstance(members, list):
            raise errors.IssuerUnavailable("Its key set has no list of keys.")
        return key_set_of(members)

    async def _discovered(self) -> str:
        """Where the issuer says that its keys are. What calls itself by another name speaks for another issuer."""
        document = await self._document(self.issuer.url.rstrip("/") + _DISCOVERY)
        if document.get("issuer") != self.issuer.url:
            raise errors.IssuerUnavailable("Its discovery document is another issuer's.")
        url = document.get("jwks_uri")
        if not isinstance(url, str) or not is_key_url(url) or not self._is_as_safe(url):
            raise errors.IssuerUnavailable("Its discovery document has no address of keys that may be asked.")
        return url

    def _is_as_safe(self, url: str) -> bool:
        return url.startswith("https:") or self.issuer.url.startswith("http:")

    async def _document(self, url: str) -> dict[str, Any]:
        body = await self._fetch(url, wait_ms=self.issuer.fetch_ms, bytes_max=DOCUMENT_BYTES_MAX)
        try:
            document = strict_json(body)
        except ValueError:
            raise errors.IssuerUnavailable("Its answer is not JSON.") from None
        if not isinstance(document, dict):
            raise errors.IssuerUnavailable("Its answer is not a JSON object.")
        return document
