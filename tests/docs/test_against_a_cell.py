"""The reference pages and a running cell agree: routes of both listeners, metrics and their labels."""

import json
import re
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.docs.pages import ROOT, column, name_in, names_in, page_of, prose_of, table
from tests.e2e.running_cell import RunningCell

from weir.api.openapi.document import SURFACES
from weir.api.openapi.surface_description import SurfaceDescription

ADMIN, METRICS = (f"docs/reference/{page}.md" for page in ("admin-api", "metrics"))
WAIT_S = 20


def ask(
    url: str, method: str, path: str, headers: dict[str, str] | None = None, body: Any = None
) -> tuple[int, dict[str, str], str]:
    """One request: status, headers in lower case, body."""
    address = urlsplit(url)
    connection = HTTPConnection(address.hostname or "", address.port, timeout=WAIT_S)
    try:
        connection.request(method, path, None if body is None else json.dumps(body), headers or {})
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read().decode()
    finally:
        connection.close()


def documented_routes(page: str) -> dict[str, set[str]]:
    """Path → methods, as the page's table of routes has them."""
    routes: dict[str, set[str]] = {}
    for route in column(page, "route"):
        method, _, path = route.partition(" ")
        routes.setdefault(path, set()).add(method)
    return routes


TENANT_ROUTES = {path: methods for surface in SURFACES for path, methods in documented_routes(page_of(surface)).items()}


@pytest.mark.parametrize(("path", "methods"), TENANT_ROUTES.items())
def test_a_documented_path_takes_exactly_its_methods(cell: RunningCell, path: str, methods: set[str]) -> None:
    """Protects clients: another method is refused with those of the page."""
    status, headers, _ = ask(cell.api, "TRACE", re.sub(r"\{\w+\}", "x", path))
    assert status == 405
    assert set(headers["allow"].split(", ")) == methods


@pytest.mark.parametrize("surface", SURFACES, ids=lambda surface: surface.page)
def test_a_page_has_the_routes_of_its_part_of_the_openapi_document(surface: SurfaceDescription) -> None:
    """Protects clients: a surface's page and its part of the served document name the same paths and methods."""
    described = {path: {method.upper() for method in operations} for path, operations in surface.paths.items()}
    assert documented_routes(page_of(surface)) == described


def test_no_tenant_path_is_missing() -> None:
    """Protects the pages from a new route: every path and action in the surfaces' sources is in a table."""
    folder = ROOT / "src/weir/api"
    files = [path for path in folder.rglob("*.py") if not path.name.startswith("admin") and path.parent.name != "openapi"]
    source = "".join(path.read_text(encoding="utf-8") for path in files)
    routed = {path.rstrip("/") for path in re.findall(r'"(/v1/[\w/]+|/\w+z|/openapi\.json)"', source)}
    assert routed == {path.partition("{")[0].rstrip("/") for path in TENANT_ROUTES}
    actions = set(re.findall(r'"(\w*)": \{"(?:GET|POST|PUT|PATCH|DELETE)"', source))
    assert actions == {path.rpartition("}")[2].lstrip("/") for path in TENANT_ROUTES if "{" in path}


def test_the_management_routes_are_those_of_the_openapi_document(cell: RunningCell) -> None:
    """Protects administrators: routes, parameters and body fields of the page and of the document are the same."""
    _, _, text = ask(cell.ready["admin"], "GET", "/admin/openapi.json")
    document = json.loads(text)
    served = {path: {method.upper() for method in operations} for path, operations in document["paths"].items()}
    assert documented_routes(ADMIN) == served
    named = set(names_in(prose_of(ADMIN)))
    for operations in document["paths"].values():
        for operation in operations.values():
            asked = {parameter["name"] for parameter in operation.get("parameters", ()) if parameter["in"] == "query"}
            assert asked <= named
    schemas = re.findall(r"#/components/schemas/(\w+)", json.dumps([*request_bodies(document)]))
    assert len(schemas) > 5
    for schema in schemas:
        assert document["components"]["schemas"][schema].get("properties", {}).keys() <= named


def request_bodies(document: dict[str, Any]) -> Iterator[Any]:
    """The bodies that the operations of an OpenAPI document take."""
    for operations in document["paths"].values():
        yield from (operation["requestBody"] for operation in operations.values() if "requestBody" in operation)


def test_each_route_names_the_least_role_that_may_use_it(cell: RunningCell) -> None:
    """Protects administrators from a wrong column: one role below is forbidden, the role itself is not."""
    admin = cell.ready["admin"]
    owner = {"authorization": f"Bearer {cell.ready['admin_key']}", "content-type": "application/json"}
    order = ["viewer", "operator", "releaser", "approver", "owner"]
    keys: dict[str, str] = {}
    for role in order:
        _, _, made = ask(admin, "POST", "/admin/v1/admin-keys", owner, {"actor": f"docs-{role}", "role": role})
        keys[role] = json.loads(made)["secret"]
    for row in table(ADMIN, "route"):
        method, _, path = name_in(row[0]).partition(" ")
        path = re.sub(r"\{\w+\}", "nobody", path)
        for role in order:
            status, _, _ = ask(
                admin, method, path, owner | {"authorization": f"Bearer {keys[role]}"}, {} if method != "GET" else None
            )
            assert (status == 403) == (order.index(role) < order.index(row[1])), f"{row[0]} as {role}: {status}"


def test_metrics_and_their_labels_are_documented(cell: RunningCell) -> None:
    """Protects dashboards: each metric is in the table with its kind, and with the labels that it carries."""
    headers = {"authorization": f"Bearer {cell.key()}"}
    body = {"model_alias": "assistant", "input": "Hello", "max_output_tokens": 4}
    assert ask(cell.api, "POST", "/v1/generations", headers, body)[0] == 200
    _, _, text = ask(cell.ready["metrics"], "GET", "/metrics")
    kinds = dict(re.findall(r"^# TYPE (weir_\w+) (\w+)$", text, re.MULTILINE))
    documented = {name_in(row[0]): row for row in table(METRICS, "metric")}
    elsewhere = ("weir_gateway_", "weir_control_", "weir_canary_")  # of processes of their own, and of aliases with a canary
    documented = {name: row for name, row in documented.items() if not name.startswith(elsewhere)}
    assert documented.keys() == {name for name in kinds if not name.endswith("_created")}
    for name, row in documented.items():
        assert row[1] == kinds[name]
        labels = {label for label in row[2].split(", ") if label}
        for sample in re.findall(rf"^{name}(?:_bucket|_sum|_count)?\{{(.*)\}} ", text, re.MULTILINE):
            assert set(re.findall(r'(\w+)="', sample)) - {"le"} == labels
