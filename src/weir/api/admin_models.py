"""The management API's routes of what is served: revisions, their prices and approval, signing keys, aliases, pools.

Every route checks a role and asks the commands, which also see to it that nobody approves what they registered. Ids may have
slashes, so a revision's and an alias's path ends with its id or with what is done to it.
"""

from typing import Annotated

from fastapi import Query
from fastapi.responses import JSONResponse

from weir.api.admin_auth import Approver, Caller, Operator, Owner, Releaser, Viewer
from weir.api.admin_bodies import PriceBody, parse_time
from weir.api.admin_model_bodies import AliasBody, AliasQuery, NewPoolBody, NewRevisionBody, NewSigningKey, PoolPatch
from weir.api.admin_model_views import (
    AliasList,
    AliasView,
    PoolView,
    RevisionList,
    RevisionPriceView,
    RevisionView,
    SigningKeyList,
    SigningKeyView,
)
from weir.api.admin_parts import PENDING, Parts, admin_router
from weir.api.admin_views import acknowledged, shown
from weir.control.catalog_lookup import require_alias, require_revision
from weir.control.commands import Outcome
from weir.core.registry.model import Revision

router = admin_router()


# ── revisions ────────────────────────────────────────────────────────────────────────────────────────────────────────


@router.get("/revisions", response_model=RevisionList)
async def list_revisions(caller: Viewer) -> JSONResponse:
    """All revisions by id, each with its state, its price now and its whole schedule, oldest version first."""
    catalog = caller.catalog
    return shown(RevisionList(revisions=[RevisionView.of(revision, catalog.prices) for revision in catalog.revisions]))


@router.post("/revisions", status_code=201, response_model=RevisionView, responses=PENDING)
async def register_revision(body: NewRevisionBody, caller: Releaser, parts: Parts) -> JSONResponse:
    """Verify an artifact, keep a copy of it and record a revision; nothing serves by it. Takes as long as reading it all."""
    return _changed(caller, await parts.registration.register(caller.actor, body.asked()), 201)


@router.put("/revisions/{revision:path}/price", response_model=RevisionPriceView, responses=PENDING)
async def put_price(revision: str, body: PriceBody, caller: Releaser, parts: Parts) -> JSONResponse:
    """A new version of a revision's price schedule, micro-dollars per million tokens; holds taken before keep theirs."""
    price, done = await parts.commands.set_price(caller.actor, revision, **body.model_dump())
    return acknowledged(RevisionPriceView.of(revision, price), done)


@router.post("/revisions/{revision:path}/approve", response_model=RevisionView, responses=PENDING)
async def approve_revision(revision: str, caller: Approver, parts: Parts) -> JSONResponse:
    """Let a registered revision serve; not by the administrator who registered it."""
    return _changed(caller, await parts.models.approve(caller.actor, revision))


@router.post("/revisions/{revision:path}/retire", response_model=RevisionView, responses=PENDING)
async def retire_revision(revision: str, caller: Releaser, parts: Parts) -> JSONResponse:
    """End a revision's service once no alias and no rollout needs it: its pools drain."""
    return _changed(caller, await parts.models.retire(caller.actor, revision))


@router.post("/revisions/{revision:path}/revoke", response_model=RevisionView, responses=PENDING)
async def revoke_revision(revision: str, caller: Releaser, parts: Parts) -> JSONResponse:
    """End a revision for good, in any state: its running work is cancelled, its replicas stop."""
    return _changed(caller, await parts.models.revoke(caller.actor, revision))


@router.get("/revisions/{revision:path}", response_model=RevisionView)
async def get_revision(revision: str, caller: Viewer) -> JSONResponse:
    """One revision."""
    return shown(RevisionView.of(require_revision(caller.catalog, revision), caller.catalog.prices))


def _changed(caller: Caller, outcome: Outcome[Revision], status: int = 200) -> JSONResponse:
    revision, done = outcome
    return acknowledged(RevisionView.of(revision, caller.catalog.prices), done, status)


# ── signing keys ─────────────────────────────────────────────────────────────────────────────────────────────────────


@router.get("/signing-keys", response_model=SigningKeyList)
async def list_signing_keys(caller: Viewer) -> JSONResponse:
    """The key ring by name, also expired and revoked keys."""
    return shown(SigningKeyList(signing_keys=[SigningKeyView.of(key) for key in caller.catalog.signing_keys]))


@router.post("/signing-keys", status_code=201, response_model=SigningKeyView, responses=PENDING)
async def add_signing_key(body: NewSigningKey, caller: Owner, parts: Parts) -> JSONResponse:
    """Trust a key for its roles, within its validity, for everybody's artifacts or a tenant's."""
    validity = parse_time("not_before", body.not_before), parse_time("not_after", body.not_after)
    key, done = await parts.key_ring.add(caller.actor, body.name, body.public_key, body.roles, body.tenant, validity)
    return acknowledged(SigningKeyView.of(key), done, 201)


@router.delete("/signing-keys/{name}", response_model=SigningKeyView, responses=PENDING)
async def revoke_signing_key(name: str, caller: Owner, parts: Parts) -> JSONResponse:
    """Trust a key no more: nothing that it signed is registered or loaded any more; what runs goes on."""
    key, done = await parts.key_ring.revoke(caller.actor, name)
    return acknowledged(SigningKeyView.of(key), done)


# ── aliases ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@router.get("/aliases", response_model=AliasList)
async def list_aliases(caller: Viewer) -> JSONResponse:
    """All aliases, the shared ones first, then each tenant's."""
    return shown(AliasList.model_validate({"aliases": caller.catalog.aliases}))


@router.get("/aliases/{name:path}", response_model=AliasView)
async def get_alias(name: str, query: Annotated[AliasQuery, Query()], caller: Viewer) -> JSONResponse:
    """The shared alias of a name, or a tenant's own."""
    return shown(AliasView.model_validate(require_alias(caller.catalog, query.tenant, name)))


@router.put("/aliases/{name:path}", response_model=AliasView, responses=PENDING)
async def put_alias(name: str, body: AliasBody, caller: Releaser, parts: Parts) -> JSONResponse:
    """Let an alias mean a revision from now on; requests in flight keep theirs."""
    default = body.default_max_output_tokens
    alias, done = await parts.models.publish(caller.actor, name, body.revision, default, body.tenant)
    return acknowledged(AliasView.model_validate(alias), done)


# ── pools ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@router.post("/pools", status_code=201, response_model=PoolView, responses=PENDING)
async def create_pool(body: NewPoolBody, caller: Operator, parts: Parts) -> JSONResponse:
    """Start replicas of a revision that serves."""
    pool, done = await parts.models.create_pool(caller.actor, body.asked())
    return acknowledged(PoolView.model_validate(pool), done, 201)


@router.patch("/pools/{name}", response_model=PoolView, responses=PENDING)
async def patch_pool(name: str, body: PoolPatch, caller: Operator, parts: Parts) -> JSONResponse:
    """Change the fields that are given; the rest stays."""
    pool, done = await parts.models.patch_pool(caller.actor, name, **body.model_dump())
    return acknowledged(PoolView.model_validate(pool), done)


@router.post("/pools/{name}/retire", response_model=PoolView, responses=PENDING)
async def retire_pool(name: str, caller: Operator, parts: Parts) -> JSONResponse:
    """Drain and stop a pool's replicas, unless an alias or a rollout has no other one."""
    pool, done = await parts.models.retire_pool(caller.actor, name)
    return acknowledged(PoolView.model_validate(pool), done)
