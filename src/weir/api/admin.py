"""The management API: `/admin/v1/*` on its own listener. Every route checks a role, asks the commands or the cell, and answers.

It decides nothing by itself and is never on the path of a token. The composition root imports it when the listener starts,
because the framework is slow to import.
"""

from typing import Annotated

from fastapi import FastAPI, Query
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Send
from starlette.types import Scope as AsgiScope

import weir
from weir.api import admin_models, admin_reports, admin_rollouts
from weir.api.admin_auth import Operator, Owner, Viewer
from weir.api.admin_bodies import (
    ApplicationPatch,
    LimitsBody,
    LimitsQuery,
    NewAdminKey,
    NewApplication,
    NewKey,
    NewTenant,
    TenantPatch,
)
from weir.api.admin_parts import PENDING, AdminParts, Parts, admin_router
from weir.api.admin_problems import BODY_BYTES_MAX, PROBLEM_SCHEMA, body_too_large, install_problems, problem_response
from weir.api.admin_views import (
    AdminKeyList,
    AdminKeyView,
    ApplicationList,
    ApplicationView,
    KeyList,
    KeyView,
    LimitsList,
    LimitsView,
    NewAdminKeyView,
    NewKeyView,
    TenantList,
    TenantView,
    acknowledged,
    shown,
)
from weir.api.wire import id_headers
from weir.control.catalog_lookup import (
    applications_of,
    keys_of,
    limits_matching,
    require_application,
    require_tenant,
    tenants_of,
)
from weir.core.tenancy import ServiceClass

__all__ = ["AdminParts", "create_admin_app"]

REQUEST_ID_BYTES = 12

router = admin_router()


class AdminApp(FastAPI):
    """The application; every answer carries a request id, also an error's, and no body exceeds the bound."""

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Serve one ASGI call."""
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        ids = id_headers(self.state.parts.entropy.token(REQUEST_ID_BYTES).hex())

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *ids]
            await send(message)

        announced = Headers(scope=scope).get("content-length", "0")
        if announced.isdecimal() and int(announced) > BODY_BYTES_MAX:  # the framework's own refusal is plain text
            await problem_response(body_too_large())(scope, receive, send_with_id)
        else:
            await super().__call__(scope, receive, send_with_id)


def create_admin_app(parts: AdminParts) -> FastAPI:
    """The ASGI application of the admin listener. OpenAPI at /admin/openapi.json; no pages that load from elsewhere."""
    app = AdminApp(
        title="Weir management API",
        version=weir.__version__,
        openapi_url="/admin/openapi.json",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        max_body_size=BODY_BYTES_MAX,
        responses={
            "default": {"description": "A problem", "content": {"application/problem+json": {"schema": PROBLEM_SCHEMA}}}
        },
    )
    app.state.parts = parts
    routers = (router, admin_models.router, admin_rollouts.router, admin_reports.router)
    app.state.routes = [route for each in routers for route in each.routes]
    for each in routers:
        app.include_router(each)
    install_problems(app)
    return app


# ── tenants ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@router.post("/tenants", status_code=201, response_model=TenantView, responses=PENDING)
async def create_tenant(body: NewTenant, caller: Operator, parts: Parts) -> JSONResponse:
    """Create a tenant."""
    tenant, done = await parts.commands.create_tenant(
        caller.actor,
        body.name,
        body.time_zone or "UTC",
        external_allowed=body.external_allowed,
        weight=body.weight,
        leaves_its_pools=body.leaves_its_pools,
        retention=body.retention,
    )
    return acknowledged(TenantView.model_validate(tenant), done, 201)


@router.get("/tenants", response_model=TenantList)
async def list_tenants(caller: Viewer) -> JSONResponse:
    """All tenants by name, also disabled and revoked ones, but none that was deleted."""
    return shown(TenantList.model_validate({"tenants": tenants_of(caller.catalog)}))


@router.get("/tenants/{tenant}", response_model=TenantView)
async def get_tenant(tenant: str, caller: Viewer) -> JSONResponse:
    """One tenant."""
    return shown(TenantView.model_validate(require_tenant(caller.catalog, tenant)))


@router.patch("/tenants/{tenant}", response_model=TenantView, responses=PENDING)
async def patch_tenant(tenant: str, body: TenantPatch, caller: Operator, parts: Parts) -> JSONResponse:
    """Change the fields that are given; `disabled` drains the tenant and can be taken back, null ends a retention."""
    given = body.model_dump(exclude_unset=True)
    changed, done = await parts.commands.patch_tenant(caller.actor, tenant, **given)
    return acknowledged(TenantView.model_validate(changed), done)


@router.post("/tenants/{tenant}/revoke", response_model=TenantView, responses=PENDING)
async def revoke_tenant(tenant: str, caller: Owner, parts: Parts) -> JSONResponse:
    """End a tenant for good and cancel its running work."""
    revoked, done = await parts.commands.revoke_tenant(caller.actor, tenant)
    return acknowledged(TenantView.model_validate(revoked), done)


@router.delete("/tenants/{tenant}", response_model=TenantView, responses=PENDING)
async def delete_tenant(tenant: str, caller: Owner, parts: Parts) -> JSONResponse:
    """End a tenant for good, cancel its running work, and show it no more; its records stay, and so does its name."""
    deleted, done = await parts.commands.delete_tenant(caller.actor, tenant)
    return acknowledged(TenantView.model_validate(deleted), done)


# ── applications ─────────────────────────────────────────────────────────────────────────────────────────────────────


@router.post("/tenants/{tenant}/applications", status_code=201, response_model=ApplicationView, responses=PENDING)
async def create_application(tenant: str, body: NewApplication, caller: Operator, parts: Parts) -> JSONResponse:
    """Create an application; without `aliases` it may use every alias."""
    service_class = body.service_class or ServiceClass.INTERACTIVE
    created, done = await parts.commands.create_application(caller.actor, tenant, body.name, service_class, body.aliases)
    return acknowledged(ApplicationView.of(created), done, 201)


@router.get("/tenants/{tenant}/applications", response_model=ApplicationList)
async def list_applications(tenant: str, caller: Viewer) -> JSONResponse:
    """A tenant's applications by name."""
    return shown(ApplicationList(applications=[ApplicationView.of(entry) for entry in applications_of(caller.catalog, tenant)]))


@router.get("/tenants/{tenant}/applications/{application}", response_model=ApplicationView)
async def get_application(tenant: str, application: str, caller: Viewer) -> JSONResponse:
    """One application."""
    return shown(ApplicationView.of(require_application(caller.catalog, tenant, application)))


@router.patch("/tenants/{tenant}/applications/{application}", response_model=ApplicationView, responses=PENDING)
async def patch_application(
    tenant: str, application: str, body: ApplicationPatch, caller: Operator, parts: Parts
) -> JSONResponse:
    """Set `aliases`: a list, or null for every alias; absent changes nothing."""
    if "aliases" not in body.model_fields_set:
        unchanged = require_application(caller.catalog, tenant, application)
        return shown(ApplicationView.of(unchanged))
    changed, done = await parts.commands.patch_application(caller.actor, tenant, application, body.aliases)
    return acknowledged(ApplicationView.of(changed), done)


@router.post("/tenants/{tenant}/applications/{application}/revoke", response_model=ApplicationView, responses=PENDING)
async def revoke_application(tenant: str, application: str, caller: Operator, parts: Parts) -> JSONResponse:
    """End an application for good and cancel its running work."""
    revoked, done = await parts.commands.revoke_application(caller.actor, tenant, application)
    return acknowledged(ApplicationView.of(revoked), done)


# ── keys ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

_KEYS = "/tenants/{tenant}/applications/{application}/keys"


@router.post(_KEYS, status_code=201, response_model=NewKeyView, responses=PENDING)
async def create_key(tenant: str, application: str, caller: Operator, parts: Parts, body: NewKey | None = None) -> JSONResponse:
    """Create an API key; `secret` is shown in this answer only."""
    (key, secret), done = await parts.commands.create_key(caller.actor, tenant, application)
    view = NewKeyView(id=key.id, tenant=key.tenant, application=key.application, revoked=key.revoked, secret=secret)
    return acknowledged(view, done, 201)


@router.get(_KEYS, response_model=KeyList)
async def list_keys(tenant: str, application: str, caller: Viewer) -> JSONResponse:
    """An application's keys, without secrets."""
    return shown(KeyList.model_validate({"keys": keys_of(caller.catalog, tenant, application)}))


@router.delete(_KEYS + "/{key_id}", response_model=KeyView, responses=PENDING)
async def revoke_key(tenant: str, application: str, key_id: str, caller: Operator, parts: Parts) -> JSONResponse:
    """Revoke an API key and cancel its running work."""
    revoked, done = await parts.commands.revoke_key(caller.actor, tenant, application, key_id)
    return acknowledged(KeyView.model_validate(revoked), done)


@router.post("/admin-keys", status_code=201, response_model=NewAdminKeyView, responses=PENDING)
async def create_admin_key(body: NewAdminKey, caller: Owner, parts: Parts) -> JSONResponse:
    """Create an admin key; `secret` is shown in this answer only."""
    (key, secret), done = await parts.commands.create_admin_key(caller.actor, body.actor, body.role)
    view = NewAdminKeyView(id=key.id, actor=key.actor, role=key.role, revoked=key.revoked, secret=secret)
    return acknowledged(view, done, 201)


@router.get("/admin-keys", response_model=AdminKeyList)
async def list_admin_keys(caller: Owner) -> JSONResponse:
    """All admin keys, without secrets."""
    return shown(AdminKeyList.model_validate({"admin_keys": caller.catalog.admin_keys}))


@router.delete("/admin-keys/{key_id}", response_model=AdminKeyView, responses=PENDING)
async def revoke_admin_key(key_id: str, caller: Owner, parts: Parts) -> JSONResponse:
    """Revoke an admin key; the last owner's stays."""
    revoked, done = await parts.commands.revoke_admin_key(caller.actor, key_id)
    return acknowledged(AdminKeyView.model_validate(revoked), done)


# ── limits ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@router.put("/limits", response_model=LimitsView, responses=PENDING)
async def put_limits(body: LimitsBody, caller: Operator, parts: Parts) -> JSONResponse:
    """Merge limits into a scope: absent fields stay, null removes. Answers the entry once it is in force."""
    (scope, limits), done = await parts.commands.put_limits(caller.actor, body.scope.scope(), body.changes())
    return acknowledged(LimitsView.of(scope, limits), done)


@router.get("/limits", response_model=LimitsList)
async def get_limits(query: Annotated[LimitsQuery, Query()], caller: Viewer) -> JSONResponse:
    """Every entry whose scope has the parts that are asked for."""
    parts = query.model_dump(exclude_none=True)
    if query.tenant is not None:
        require_tenant(caller.catalog, query.tenant)
    entries = limits_matching(caller.catalog, parts)
    return shown(LimitsList(limits=[LimitsView.of(scope, limits) for scope, limits in entries]))
