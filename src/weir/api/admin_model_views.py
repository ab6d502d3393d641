"""What the management API answers about revisions, prices, signing keys, aliases and pools.

Everything is read from the core's values. A revision that was verified shows the digest of its artifact; whoever reads
`unverified` knows that nobody vouched for what runs.
"""

from collections.abc import Iterable
from typing import Self

from weir.api.admin_views import Changed, View
from weir.api.wire import rfc3339
from weir.core.metering import Price
from weir.core.registry.key_ring import KeyRole, SigningKey
from weir.core.registry.model import Argument, EngineKind, Revision, RevisionPrice, RevisionState
from weir.core.tenancy import ServiceClass

UNVERIFIED = "unverified"
"""In place of a digest: what runs is behind a URL, or simulated."""


class PriceView(View):
    """One version of a price schedule, in micro-dollars per million tokens. batch_percent: what part batch requests pay."""

    version: int
    input_microusd: int
    cached_input_microusd: int
    output_microusd: int
    batch_percent: int


class RevisionView(Changed):
    """A revision, its price now, and its whole schedule, oldest version first.

    artifact: what the engine loads. artifact_digest: of what was signed, or `unverified`. evaluation: digest of its set.
    """

    id: str
    engine: EngineKind
    state: RevisionState
    revoked: bool
    artifact: str
    artifact_digest: str
    arguments: dict[str, Argument]
    context_tokens: int
    max_output_tokens: int
    typical_output_tokens: int
    chat: bool
    external: bool
    evaluation: str | None
    tenant: str | None
    adapter_of: str | None
    registered_by: str | None
    approved_by: str | None
    price: PriceView
    prices: list[PriceView]

    @classmethod
    def of(cls, revision: Revision, schedule: Iterable[RevisionPrice]) -> Self:
        """A revision with its entries of the schedule, or with its price alone where that is too old to have any."""
        prices = [entry.price for entry in schedule if entry.revision == revision.id] or [revision.price]
        fields = {name: getattr(revision, name) for name in cls.model_fields.keys() - {"pending", "prices"}}
        fields |= {
            "artifact_digest": revision.artifact_digest or UNVERIFIED,
            "arguments": dict(revision.arguments),
            "prices": sorted(prices, key=lambda price: price.version),
        }
        return cls.model_validate(fields)


class RevisionPriceView(Changed):
    """A revision's price from now on."""

    revision: str
    price: PriceView

    @classmethod
    def of(cls, revision: str, price: Price) -> Self:
        """The price in force for a revision."""
        return cls(revision=revision, price=PriceView.model_validate(price))


class RevisionList(View):
    """All revisions."""

    revisions: list[RevisionView]


class SigningKeyView(Changed):
    """A trusted key. roles: what it may vouch for; tenant: whose artifacts, null for anybody's. Times are RFC 3339.

    fingerprint: what a signature calls it by; not_after: null where its validity has no end.
    """

    name: str
    fingerprint: str
    public_key: str
    roles: list[KeyRole]
    tenant: str | None
    not_before: str
    not_after: str | None
    revoked: bool

    @classmethod
    def of(cls, key: SigningKey) -> Self:
        """A key of the ring."""
        return cls(
            name=key.name,
            fingerprint=key.fingerprint,
            public_key=key.public_key,
            roles=sorted(key.roles),
            tenant=key.tenant,
            not_before=rfc3339(key.not_before_ms),
            not_after=None if key.not_after_ms is None else rfc3339(key.not_after_ms),
            revoked=key.revoked,
        )


class SigningKeyList(View):
    """The key ring."""

    signing_keys: list[SigningKeyView]


class CanaryView(View):
    """The share of an alias's requests, in percent, that a rollout sends to another revision. step: the first is 0."""

    rollout: str
    step: int
    revision: str
    weight: int


class AliasView(Changed):
    """What a name means. revision: the stable one. tenant: whose name it is, null for everybody's. canary: null without."""

    name: str
    tenant: str | None
    revision: str
    default_max_output_tokens: int
    canary: CanaryView | None


class AliasList(View):
    """All aliases."""

    aliases: list[AliasView]


class PoolView(Changed):
    """A pool as it was asked for; `GET /admin/v1/pools` says how it does. declared: by the way the cell was started."""

    name: str
    revision: str
    replicas: int
    concurrency: int
    urls: list[str]
    on_demand: bool
    idle_stop_ms: int
    tenant: str | None
    service_classes: list[ServiceClass]
    input_tokens_max: int | None
    declared: bool
    retired: bool
