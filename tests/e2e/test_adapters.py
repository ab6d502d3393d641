"""Two tenants with adapters of one name on one real model: each is served its own, and nothing of the other's."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.contract.lora_adapters import lora_adapter
from tests.e2e.adapter_stage import ACMES, GLOBEX, READY_S, AdapterStage, adapter_stage
from tests.e2e.http_client import Account, Reply, wait_until
from tests.e2e.processes import children_of, open_files
from tests.e2e.running_cell import running_cell

pytestmark = pytest.mark.model

CONFIG = """
[pool]
second_model = false
[engine]
restart_backoff_ms = 200
"""
ADAPTER = "tone.gguf"
KEYS = {"acme": ACMES, "globex": GLOBEX}


class Tones:
    """The stage, and what both tenants serve as `tone`. model: whose answers they change; digests: of their artifacts."""

    def __init__(self, stage: AdapterStage) -> None:
        self.stage = stage
        self.model = str(stage.cell.ready["aliases"][0]["model_revision"])
        self.revisions = {tenant: self.register(tenant, "tone", number) for tenant, number in KEYS.items()}
        self.pools = {tenant: stage.served("tone", revision, tenant) for tenant, revision in self.revisions.items()}

    def register(self, tenant: str, name: str, seed: int) -> str:
        """An approved adapter of the packaged model."""
        files = {ADAPTER: lora_adapter(seed)}
        fields = {"engine": "llamacpp", "tenant": tenant, "adapter_of": self.model}
        return self.stage.approved(name, files, KEYS[tenant], **fields)

    def kept(self, tenant: str) -> Path:
        """The file of a tenant's adapter in the state directory."""
        digest = str(self.stage.admin.done("GET", f"/revisions/{self.revisions[tenant]}")["artifact_digest"])
        return self.stage.cell.state / "artifacts" / digest.removeprefix("sha256:") / ADAPTER


@pytest.fixture(scope="module")
def tones(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tones]:
    folder = tmp_path_factory.mktemp("tones")
    with running_cell(folder / "state", engine=("llamacpp",), config=CONFIG) as cell:
        yield Tones(adapter_stage(cell, folder))
        assert "Traceback" not in cell.tail()


def said(account: Account, alias: str) -> tuple[str, str]:
    """The revision that answers, and its answer."""
    reply = account.generate(model_alias=alias, input="What is the capital of France?", temperature=0, max_output_tokens=12)
    assert reply.status == 200, reply.body
    return reply.json["model_revision"], reply.json["output"]


def refusal(reply: Reply) -> tuple[int, str]:
    """Status and code, whatever the surface."""
    return reply.status, str(reply.json.get("error", reply.json)["code"])


def test_each_tenant_is_answered_by_its_own(tones: Tones) -> None:
    """Protects tenants: one name, two adapters, three different answers; and the shared model is the same for both."""
    accounts = {tenant: tones.stage.account(tenant) for tenant in KEYS}
    shared = {tenant: said(account, "assistant") for tenant, account in accounts.items()}
    own = {tenant: said(account, "tone") for tenant, account in accounts.items()}
    again = {tenant: said(account, "tone") for tenant, account in reversed(accounts.items())}
    assert {tenant: revision for tenant, (revision, _) in own.items()} == tones.revisions and again == own
    assert shared["acme"] == shared["globex"] and shared["acme"][0] == tones.model
    assert len({answer for _, answer in (shared["acme"], own["acme"], own["globex"])}) == 3


def test_anothers_adapter_can_neither_be_seen_nor_used(tones: Tones) -> None:
    """Protects tenants: an alias of another tenant does not exist, on no surface, nor does anybody's revision by its id."""
    acme, globex = tones.stage.account("acme"), tones.stage.account("globex")
    tones.stage.admin.done("PUT", "/aliases/secret", {"revision": tones.revisions["acme"], "tenant": "acme"})
    assert said(acme, "secret")[0] == tones.revisions["acme"]
    listed = [[model["id"] for model in each.ask("GET", "/v1/models").json["data"]] for each in (acme, globex)]
    assert listed == [["assistant", "secret", "tone"], ["assistant", "tone"]]
    for alias in ("secret", tones.revisions["acme"], "never"):
        chat = {"model": alias, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        for reply in (
            globex.generate(model_alias=alias),
            globex.ask("POST", "/v1/chat/completions", chat),
            globex.ask("GET", f"/v1/models/{alias.replace('@', '%40')}"),
        ):
            assert refusal(reply) == (404, "unknown_alias"), reply.body
    never = globex.generate(model_alias="never").body
    assert globex.generate(model_alias="secret").body.replace(b"secret", b"never") == never


def test_administrators_cannot_give_it_away(tones: Tones) -> None:
    """Protects tenants from mistakes: another tenant's or everybody's alias, pool or adapter is refused for such a revision."""
    admin, acmes = tones.stage.admin, tones.revisions["acme"]
    for tenant in ("globex", None):
        assert refusal(admin.ask("PUT", "/aliases/tone", {"revision": acmes, "tenant": tenant})) == (409, "not_allowed_now")
        asked = {"name": "stolen", "revision": acmes, "tenant": tenant}
        assert refusal(admin.ask("POST", "/pools", asked)) == (400, "invalid_request")
    fields = {"engine": "llamacpp", "tenant": "globex", "adapter_of": tones.model}
    with pytest.raises(AssertionError, match="signature_refused"):
        tones.stage.approved("tone", {ADAPTER: lora_adapter(9)}, ACMES, **fields)


def test_limits_and_usage_of_one_name_are_each_tenants_own(tones: Tones) -> None:
    """Protects budgets: what limits one tenant's `tone` limits nobody else's, and each sees its own rows only."""
    acme, globex = tones.stage.account("acme"), tones.stage.account("globex")
    before = {each.tenant: len(each.usage("alias,revision")) for each in (acme, globex)}
    acme.limit({"alias": "tone"}, requests_per_minute=0)
    try:
        assert refusal(acme.generate(model_alias="tone")) == (429, "requests_limited")
        assert globex.generate(model_alias="tone").status == acme.generate().status == 200
    finally:
        acme.limit({"alias": "tone"}, requests_per_minute=None)
    assert acme.generate(model_alias="tone").status == 200 and before.keys() == KEYS.keys()
    for account in (acme, globex):
        rows = {(row["alias"], row["revision"]) for row in account.usage("alias,revision")}
        assert ("tone", tones.revisions[account.tenant]) in rows
        assert {revision for _, revision in rows} <= {tones.model, tones.revisions[account.tenant]}


def test_a_tampered_adapter_is_not_started_again(tones: Tones) -> None:
    """Protects what is served: the pool says which file is not what was signed, and everybody else is served as before."""
    acme, globex, kept = tones.stage.account("acme"), tones.stage.account("globex"), tones.kept("acme")
    before, content = said(globex, "tone"), kept.read_bytes()
    kept.parent.chmod(0o755)
    kept.chmod(0o644)
    kept.write_bytes(lora_adapter(9))
    [replica] = [pid for pid in children_of(tones.stage.cell.process.pid) if str(kept) in open_files(pid)]
    os.kill(replica, signal.SIGKILL)
    words = f"The artifact of {tones.revisions['acme']} cannot be loaded: The file {ADAPTER} is not what was signed."
    wait_until(lambda: tones.stage.pool(tones.pools["acme"]).get("detail") == words, READY_S)
    assert refusal(acme.generate(model_alias="tone")) == (503, "no_capacity")
    assert said(globex, "tone") == before and acme.generate().status == 200
    kept.write_bytes(content)
    wait_until(lambda: tones.stage.pool(tones.pools["acme"])["ready"] == 1, READY_S)
    assert said(acme, "tone")[0] == tones.revisions["acme"]
