"""A sign-in on an issuer in memory and a clock that is moved by hand."""

from dataclasses import replace
from typing import Any

from tests.token_issuer import AUDIENCE, NOW_MS, MemoryDocuments, TokenIssuer

from weir.core.issuers import Issuer, SignInRule
from weir.core.registry.snapshot import Snapshot
from weir.core.tenancy import Application, Principal, Tenant
from weir.gateway.sign_in import SignIn

RULE = SignInRule({"sub": "robot"}, "acme", "app")
SNAPSHOT = Snapshot(
    version=1,
    tenants={"acme": Tenant("acme"), "other": Tenant("other")},
    applications={(tenant, "app"): Application(tenant, "app") for tenant in ("acme", "other")},
)
REFRESH_MS, VALID_MS, COOL_DOWN_MS = 600_000, 3_600_000, 30_000


class HandClock:
    """Stands until it is moved; both of its clocks move together."""

    def __init__(self) -> None:
        self.now_ms = NOW_MS

    def monotonic_ns(self) -> int:
        return self.now_ms * 1_000_000

    def wall_ms(self) -> int:
        return self.now_ms


def issuer_at(url: str, **changes: Any) -> Issuer:
    """A configured issuer with one rule."""
    return replace(Issuer(url, (AUDIENCE,), (RULE,)), **changes)


class TokenStand:
    """issuer: the identity provider. sign_in: what is tested."""

    def __init__(self, *more: TokenIssuer, remembered_max: int = 100, **changes: Any) -> None:
        self.clock = HandClock()
        self.issuer = TokenIssuer()
        self.documents = MemoryDocuments(self.issuer, *more)
        self.configured = issuer_at(self.issuer.url, **changes)
        rule = SignInRule({"sub": "robot"}, "other", "app")
        others = {f"other-{place}": issuer_at(other.url, rules=(rule,)) for place, other in enumerate(more)}
        issuers = {"corporate": self.configured, **others}
        self.sign_in = SignIn(self.clock, self.documents, issuers, remembered_max=remembered_max)

    async def principal(self, token: str, snapshot: Snapshot = SNAPSHOT) -> Principal:
        """As a gateway authenticates."""
        await self.sign_in.wait_for_keys(token)
        return self.sign_in.principal_of(token, snapshot)

    def later(self, millis: int) -> None:
        """Time passes."""
        self.clock.now_ms += millis
        self.issuer.now_ms += millis

    @property
    def fetches(self) -> int:
        """How often the keys were fetched, or it was tried."""
        return self.issuer.asked["/keys"]
