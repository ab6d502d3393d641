"""Callers with tokens of an identity provider, against real processes: a cell alone, and one with two gateways of their own.

The provider answers over HTTP from this process. Its keys are fetched again by the first request that is a millisecond later,
so that what it changes shows in the next one; and a second provider is not there at all.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.e2e.conftest import SLOW_ROW, engine_process
from tests.e2e.http_client import Account, Admin, Reply, admin_of, exchange, is_at_rest, wait_until
from tests.e2e.running_cell import RunningCell, running_cell, unused_ports
from tests.token_issuer import PRIVATE_KEYS, TokenIssuer, served

from weir.clock import SystemClock
from weir.core.issuers import Issuer, SignInRule

LONG = "river"
"""A prompt whose reply has 213 tokens: seven seconds."""

CALLERS = ("plain", "rotating", "withdrawn", "outage", "app-revoked", "rule-revoked", "limited", "disabled")
PERSON = "robot-7f3a@projects.example"
"""Whose name may be nowhere in a log."""

FILLERS = 200
"""With as many further rules, what a cell tells its gateways is more than a pipe holds at once."""


@dataclass
class TokenStage:
    """A running cell and its provider. away: the provider that is not there. sent: every token that was presented."""

    cell: RunningCell
    issuer: TokenIssuer
    away: str
    admin: Admin
    sent: list[str]

    def token(self, caller: str, **changes: object) -> str:
        """A token for one of the callers, that ends in an hour."""
        self.issuer.now_ms = SystemClock().wall_ms()
        claims = {"azp": caller, "sub": PERSON, "exp": self.issuer.now_ms // 1_000 + 3_600, **changes}
        self.sent.append(self.issuer.token(None, **claims))
        return self.sent[-1]

    def account(self, caller: str) -> Account:
        """Its tenant, made after the cell was started, and its token in the place of a key."""
        tenant = f"tenant-{caller}"
        self.admin.done("POST", "/tenants", {"name": tenant})
        self.admin.done("POST", f"/tenants/{tenant}/applications", {"name": "app"})
        rule = SignInRule({"azp": caller}, tenant, "app")
        rule_key = Issuer(self.issuer.url, ("weir",), (rule,)).rule_key(rule)
        return Account(self.cell, tenant, "app", self.token(caller), rule_key, self.admin)


def configuration(issuer: TokenIssuer, away: str) -> str:
    """Two providers: this one, and one that is not there."""
    table = """
[issuers.{name}]
url = "{url}"
audiences = ["weir"]
keys_refresh_ms = 1
keys_cool_down_ms = 1
"""
    rule = '[[issuers.test.rules]]\nclaims = {{ {claims} }}\ntenant = "tenant-{name}"\napplication = "app"\n'
    rules = [rule.format(claims=f'azp = "{name}"', name=name) for name in CALLERS]
    long = ", ".join(f"claim_{number} = '{'x' * 60}'" for number in range(8))
    fillers = [rule.format(claims=long, name=f"filler-{number}") for number in range(FILLERS)]
    absent = table.format(name="away", url=away) + rules[0].replace(".test.", ".away.")
    return table.format(name="test", url=issuer.url) + "".join(rules + fillers) + absent


@pytest.fixture(scope="module", params=[0, 2], ids=["one process", "two gateways"])
def stage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokenStage]:
    """A cell on a slow engine; its log is read at the end."""
    state: Path = tmp_path_factory.mktemp("tokens") / "state"
    away = f"http://127.0.0.1:{unused_ports(1)}"
    gateways = ("--gateways", str(request.param)) if request.param else ()
    with (
        served(TokenIssuer()) as issuer,
        engine_process("--row", SLOW_ROW, "--concurrency", "64") as engine,
        running_cell(state, *gateways, engine=(engine,), config=configuration(issuer, away)) as cell,
    ):
        made = TokenStage(cell, issuer, away, admin_of(cell), [])
        yield made
        wait_until(lambda: is_at_rest(cell))
        log = cell.log.read_text()
    assert "Traceback" not in log and "issuer_keys_fetched" in log and made.sent
    assert PERSON not in log
    for token in made.sent:
        header, claims, signature = token.split(".")
        assert claims not in log and signature not in log and header not in log


def chat(account: Account, key: str, name: str = "authorization") -> Reply:
    """A short chat completion. name: of the header that holds the credential."""
    body = {"model": "assistant", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    value = f"Bearer {key}" if name == "authorization" else key
    return exchange(account.cell.api, "POST", "/v1/chat/completions", body=body, headers={name: value})


def code_of(reply: Reply) -> tuple[int, str]:
    """Status and code of a refusal."""
    return reply.status, reply.json.get("error", reply.json)["code"]


def test_a_token_serves_on_every_surface_and_its_usage_is_its_rules(stage: TokenStage) -> None:
    """Protects callers with tokens: native, streamed and chat, in both headers, at each gateway; usage shows the rule's id."""
    account = stage.account("plain")
    for cell in stage.cell.doors():
        door = Account(cell, account.tenant, "app", account.key, account.key_id, account.admin)
        assert door.generate().status == 200
        assert chat(door, account.key).status == 200
        assert chat(door, account.key, "x-api-key").status == 200
        models = exchange(cell.api, "GET", "/v1/models", key=account.key)
        assert models.status == 200 and models.json["data"]
    with account:
        assert account.stream(max_output_tokens=4).finish()["status"] == "completed"
    generations = 3 * len(stage.cell.doors()) + 1
    rows = account.usage("key")
    assert [(row["key"], row["requests"]) for row in rows] == [(account.key_id, generations)]
    assert account.generate(request_id="mine").status == 200
    assert account.get("mine").json["status"] == "completed"
    assert account.key_id in str(account.admin.done("GET", f"/generations/{account.tenant}/mine/explanation"))


def test_keys_rotate_without_a_refusal_and_a_withdrawn_one_is_over(stage: TokenStage) -> None:
    """Protects a rotation: the first token of a new key is taken, the old one beside it until it is withdrawn."""
    account, old_id = stage.account("rotating"), stage.issuer.signing
    try:
        stage.issuer.sign_with("second", PRIVATE_KEYS["ES256"], "ES256")
        new = stage.token("rotating")
        for door in stage.cell.doors():
            assert exchange(door.api, "GET", "/v1/models", key=new).status == 200
            assert exchange(door.api, "GET", "/v1/models", key=account.key).status == 200
        withdrawn = stage.issuer.keys.pop(old_id)
        for door in stage.cell.doors():
            reply = exchange(door.api, "GET", "/v1/models", key=account.key)
            assert code_of(reply) == (401, "unauthenticated") and reply.headers["www-authenticate"] == "Bearer"
            assert exchange(door.api, "GET", "/v1/models", key=new).status == 200
        stage.issuer.keys[old_id] = withdrawn
    finally:
        stage.issuer.sign_with("first", PRIVATE_KEYS["RS256"], "RS256")


def test_an_issuer_that_is_away_ends_nothing(stage: TokenStage) -> None:
    """Protects tenants from their provider's outage: known keys serve on; one that was never there is a 503."""
    account = stage.account("outage")
    for door in stage.cell.doors():
        assert exchange(door.api, "GET", "/v1/models", key=account.key).status == 200
    try:
        stage.issuer.is_away = True
        for door in stage.cell.doors():
            for _ in range(3):
                assert exchange(door.api, "GET", "/v1/models", key=account.key).status == 200
    finally:
        stage.issuer.is_away = False
    reply = chat(account, stage.token("plain", iss=stage.away))
    assert code_of(reply) == (503, "issuer_unavailable") and int(reply.headers["retry-after-ms"]) >= 1


@pytest.mark.parametrize("caller", ["app-revoked", "rule-revoked"])
def test_what_is_revoked_is_refused_and_its_stream_ends(stage: TokenStage, caller: str) -> None:
    """Protects revocation, of an application or of a rule's callers alone: at once for new work, and for what runs."""
    account = stage.account(caller)
    path = f"/tenants/{account.tenant}/applications/app"
    with account:
        stream = account.stream(input=LONG)
        stream.read(3)
        if caller == "app-revoked":
            account.admin.done("POST", f"{path}/revoke")
        else:
            account.admin.done("DELETE", f"{path}/keys/{account.key_id}")
            assert account.admin.done("GET", f"{path}/keys")["keys"][0]["id"] == account.key_id
        assert stream.finish()["finish_reason"] == "revoked"
    for door in stage.cell.doors():
        assert code_of(exchange(door.api, "GET", "/v1/models", key=account.key)) == (403, "revoked")
    assert code_of(chat(account, account.key)) == (403, "revoked")


def test_a_disabled_tenant_is_refused(stage: TokenStage) -> None:
    """Protects the switch of a tenant: as with keys, and taken back as with keys."""
    account = stage.account("disabled")
    for disabled, status in ((False, 200), (True, 403), (False, 200)):
        account.admin.done("PATCH", f"/tenants/{account.tenant}", {"disabled": disabled})
        assert account.generate().status == status


def test_a_rule_has_limits_of_its_own(stage: TokenStage) -> None:
    """Protects limits by key: they hold for a rule's callers, whatever tokens they bring, and for nobody else of it."""
    account = stage.account("limited")
    scope = {"tenant": account.tenant, "application": "app", "key": account.key_id}
    account.limit(scope, requests_per_minute=1)
    assert account.generate().status == 200
    other = Account(stage.cell, account.tenant, "app", stage.token("limited", jti="2"), account.key_id, account.admin)
    refused = other.generate()
    assert code_of(refused) == (429, "requests_limited") and refused.json["scope"] == scope
    key = account.admin.done("POST", f"/tenants/{account.tenant}/applications/app/keys")["secret"]
    assert (
        exchange(stage.cell.api, "POST", "/v1/generations", key=key, body={"model_alias": "assistant", "input": "x"}).status
        == 200
    )


def test_a_rule_without_a_tenant_is_refused(stage: TokenStage) -> None:
    """Protects against a rule that names what is not there: 401, and a line in the log."""
    token = stage.token("nobody", **{f"claim_{number}": "x" * 60 for number in range(8)})
    reply = exchange(stage.cell.api, "GET", "/v1/models", key=token)
    assert code_of(reply) == (401, "unauthenticated")
    assert reply.json["error"]["reason"] == "no_application"
    wait_until(lambda: "sign_in_rule_without_application" in stage.cell.log.read_text())
