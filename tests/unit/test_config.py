"""The configuration file: what is read as written, and what is refused by name."""

from pathlib import Path

import msgspec
import pytest

from weir import errors
from weir.config import FurtherPoolConfig, WeirConfig, environment_of_engine, environment_of_gateway, load_config
from weir.core.issuers import ISSUERS_MAX, RULE_CLAIMS_MAX, RULES_MAX, Issuer, SignInRule
from weir.core.tenancy import ServiceClass


def test_no_file_and_an_empty_one_are_the_defaults(tmp_path: Path) -> None:
    """Protects that every setting has a default."""
    (tmp_path / "weir.toml").write_text("")
    assert load_config(None) == load_config(tmp_path / "weir.toml") == WeirConfig()


def test_what_is_set_is_read_as_set(tmp_path: Path) -> None:
    """Protects sections, whole numbers and switches; the rest keeps its default."""
    path = tmp_path / "weir.toml"
    path.write_text("[gateway]\nbody_wait_ms = 5\n[pool]\nconcurrency = 3\n[log]\njson = false\n")
    config = load_config(path)
    assert (config.gateway.body_wait_ms, config.pool.concurrency, config.log.json) == (5, 3, False)
    assert config.coordinator == WeirConfig().coordinator


def test_further_pools_are_read_by_their_names(tmp_path: Path) -> None:
    """Protects pools beside the first: each its own section, in the order of the file, with the same defaults."""
    path = tmp_path / "weir.toml"
    path.write_text(
        "[pool]\nservice_classes = ['interactive']\ninput_tokens_max = 9\n"
        "[pools.jobs]\nservice_classes = ['batch', 'interactive']\nreplicas = 2\n"
        "[pools.acme-own]\ntenant = 'acme'\nurls = ['http://one', 'http://two']\ninput_tokens_max = 5\n[pools.plain]\n"
    )
    config = load_config(path)
    assert (config.pool.service_classes, config.pool.input_tokens_max) == ((ServiceClass.INTERACTIVE,), 9)
    assert list(config.pools.items()) == [
        ("jobs", FurtherPoolConfig(replicas=2, service_classes=(ServiceClass.BATCH, ServiceClass.INTERACTIVE))),
        ("acme-own", FurtherPoolConfig(tenant="acme", urls=("http://one", "http://two"), input_tokens_max=5)),
        ("plain", FurtherPoolConfig()),
    ]
    assert all(isinstance(each, ServiceClass) for each in config.pools["jobs"].service_classes)


ISSUER = """
[issuers.corporate]
url = "https://login.example.com"
audiences = ["weir"]
"""
RULES = """
[[issuers.corporate.rules]]
claims = { sub = "robot" }
tenant = "acme"
application = "assistant"
"""


def test_issuers_are_read_with_their_rules_in_order(tmp_path: Path) -> None:
    """Protects sign-in: rules stay in the order of the file, claims keep their types, and the rest has its defaults."""
    path = tmp_path / "weir.toml"
    second = "[[issuers.corporate.rules]]\nclaims = { admin = true, level = 3 }\ntenant = 'globex'\napplication = 'web'\n"
    path.write_text(ISSUER + "algorithms = ['ES256']\nleeway_ms = 0\n" + RULES + second)
    rules = SignInRule({"sub": "robot"}, "acme", "assistant"), SignInRule({"admin": True, "level": 3}, "globex", "web")
    expected = Issuer("https://login.example.com", ("weir",), rules, algorithms=("ES256",), leeway_ms=0)
    assert load_config(path).issuers == {"corporate": expected}
    assert type(load_config(path).issuers["corporate"].rules[1].claims["admin"]) is bool


def test_a_gateway_is_told_of_its_issuers_as_they_were_read(tmp_path: Path) -> None:
    """Protects gateways in processes of their own: what a cell tells them of issuers is what its file says, types included."""
    path = tmp_path / "weir.toml"
    path.write_text(ISSUER + RULES.replace('"robot"', '"robot", admin = true, level = 1'))
    config = load_config(path)
    told = msgspec.json.decode(msgspec.json.encode(config), type=WeirConfig)
    assert told == config and type(told.issuers["corporate"].rules[0].claims["admin"]) is bool


def test_there_are_only_so_many_issuers_rules_and_claims(tmp_path: Path) -> None:
    """Protects a gateway's memory and loop: each number has a bound, and is refused above it."""
    path = tmp_path / "weir.toml"
    issuers = [(ISSUER + RULES).replace("corporate", f"i{n}").replace("example", f"e{n}") for n in range(ISSUERS_MAX + 1)]
    claims = ", ".join(f"claim{number} = 1" for number in range(RULE_CLAIMS_MAX + 1))
    for field, parts in {
        "issuers": issuers,
        "issuers.corporate.rules": [ISSUER, *([RULES] * (RULES_MAX + 1))],
        "issuers.corporate.rules.1.claims": [ISSUER, RULES.replace('sub = "robot"', claims)],
    }.items():
        path.write_text("".join(parts))
        with pytest.raises(errors.InvalidRequest) as refused:
            load_config(path)
        assert refused.value.members["field"] == field
    path.write_text("".join(issuers[:-1]))
    assert len(load_config(path).issuers) == ISSUERS_MAX


@pytest.mark.parametrize(
    ("text", "field", "said"),
    [
        (RULES, "issuers.corporate.url", "is missing; accepted: an https URL"),
        (ISSUER, "issuers.corporate.rules", "is missing; accepted: an array of 1 to 256 tables"),
        (ISSUER + "rules = []\n", "issuers.corporate.rules", "is not one"),
        (ISSUER + "rules = [5]\n", "issuers.corporate.rules.1", "accepted: a table"),
        (ISSUER + "audience = 'x'\n" + RULES, "issuers.corporate.audience", "is unknown"),
        (ISSUER + RULES + "claim = 5\n", "issuers.corporate.rules.1.claim", "is unknown; accepted: one of claims,"),
        (ISSUER + RULES.replace("tenant", "# tenant"), "issuers.corporate.rules.1.tenant", "is missing; accepted: a tenant"),
        (ISSUER + RULES.replace('"robot"', "1.5"), "issuers.corporate.rules.1.claims", "a text, a whole number, true or false"),
        (ISSUER + RULES.replace('"robot"', f"'{'x' * 257}'"), "issuers.corporate.rules.1.claims", "a text, a whole number"),
        (ISSUER + RULES.replace('"robot"', str(2**53 + 1)), "issuers.corporate.rules.1.claims", "a text, a whole number"),
        (ISSUER + RULES.replace("sub", "s" * 257), "issuers.corporate.rules.1.claims", "a text, a whole number"),
        (ISSUER + RULES.replace('sub = "robot"', ""), "issuers.corporate.rules.1.claims", "1 to 8 names"),
        (ISSUER + RULES.replace("{ sub", '{ "" = 1, sub'), "issuers.corporate.rules.1.claims", "1 to 8 names"),
        (ISSUER + RULES.replace('{ sub = "robot" }', "5"), "issuers.corporate.rules.1.claims", "a table"),
        (ISSUER.replace("https:", "http:") + RULES, "issuers.corporate.url", "accepted: an https URL without a query"),
        (ISSUER.replace(".com", ".com?a=b") + RULES, "issuers.corporate.url", "does not fit"),
        (ISSUER.replace("login.", "u:p@login.") + RULES, "issuers.corporate.url", "does not fit"),
        (ISSUER + RULES + (ISSUER + RULES).replace("corporate", "twin"), "issuers.corporate.url", "every other issuer's"),
        (ISSUER + "jwks_url = 'http://127.0.0.1/keys'\n" + RULES, "issuers.corporate.jwks_url", "http where the issuer's is"),
        (ISSUER + "algorithms = ['none']\n" + RULES, "issuers.corporate.algorithms", "an array of RS256,"),
        (ISSUER + "algorithms = ['HS256']\n" + RULES, "issuers.corporate.algorithms", "an array of RS256,"),
        (ISSUER + "leeway_ms = 300001\n" + RULES, "issuers.corporate.leeway_ms", "from 0 to 300000"),
        (ISSUER + "keys_valid_ms = 5000\n" + RULES, "issuers.corporate.keys_refresh_ms", "at most keys_valid_ms"),
        (ISSUER + "keys_refresh_ms = 5000\n" + RULES, "issuers.corporate.keys_cool_down_ms", "at most keys_refresh_ms"),
        ("[gatway]\n", "gatway", "'gatway' is unknown; accepted: one of gateway,"),
        ("[gateway]\nbody_wait = 5\n", "gateway.body_wait", "is unknown; accepted: one of body_bytes_max,"),
        ("gateway = 5\n", "gateway", "is not one; accepted: a table"),
        ("[gateway]\nbody_wait_ms = 0\n", "gateway.body_wait_ms", "accepted: a whole number from 1 to 86400000"),
        ("[gateway]\nbody_wait_ms = 1.5\n", "gateway.body_wait_ms", "is 1.5"),
        ("[gateway]\nbody_wait_ms = '5'\n", "gateway.body_wait_ms", "is '5'"),
        ("[pool]\nconcurrency = true\n", "pool.concurrency", "is True; accepted: a whole number from 1 to 65536"),
        ("[store]\nurl = 5\n", "store.url", "accepted: a PostgreSQL URL"),
        ("[log]\njson = 1\n", "log.json", "is 1; accepted: true or false"),
        ("[pool]\nservice_classes = []\n", "pool.service_classes", "accepted: an array of interactive or batch, each once"),
        ("[pool]\nservice_classes = 'batch'\n", "pool.service_classes", "is not one"),
        ("[pool]\nservice_classes = ['batch', 'batch']\n", "pool.service_classes", "is not one"),
        ("[pools.a]\nservice_classes = ['batch', 'bulk']\n", "pools.a.service_classes", "interactive or batch"),
        ("[pools.a]\nservice_classes = [['batch']]\n", "pools.a.service_classes", "interactive or batch"),
        ("[pools.a]\nurls = []\n", "pools.a.urls", "accepted: an array of URLs, each once"),
        ("[pools.a]\nurls = [5]\n", "pools.a.urls", "is not one"),
        ("[pools.a]\nurls = ['']\n", "pools.a.urls", "is not one"),
        ("[pools.a]\ninput_tokens_max = 0\n", "pools.a.input_tokens_max", "a whole number from 1 to 100000000"),
        ("[pools.a]\ntenant = 5\n", "pools.a.tenant", "accepted: a tenant's name"),
        ("[pools.a]\nthreads = 5\n", "pools.a.threads", "is unknown; accepted: one of replicas,"),
        ("[pools]\nreplicas = 5\n", "pools.replicas", "is not one; accepted: a table"),
        ("pools = []\n", "pools", "is not one; accepted: a table"),
    ],
)
def test_a_wrong_setting_is_refused_by_its_path(tmp_path: Path, text: str, field: str, said: str) -> None:
    """Protects operators from settings that are silently ignored or bent."""
    path = tmp_path / "weir.toml"
    path.write_text(text)
    with pytest.raises(errors.InvalidRequest) as refused:
        load_config(path)
    assert refused.value.members["field"] == field and said in refused.value.detail


@pytest.mark.parametrize(
    "text",
    [
        'store = "postgresql://u:hunter2@h/db"\n',
        '[store]\nurl = ["postgresql://u:hunter2@h/db"]\n',
        '[store.url]\npassword = "hunter2"\n',
        '[store]\nurl = "postgresql://u:hunter2@h/db\n',
        'database = "postgresql://u:hunter2@h/db"\n',
        '[pools.a]\nurls = "http://u:hunter2@h"\n',
        '[pools]\nurls = "http://u:hunter2@h"\n',
    ],
)
def test_what_may_hold_a_password_is_refused_unquoted(tmp_path: Path, text: str) -> None:
    """Protects the database's password from the log of a start that was refused."""
    path = tmp_path / "weir.toml"
    path.write_text(text)
    with pytest.raises(errors.InvalidRequest) as refused:
        load_config(path)
    assert "hunter2" not in refused.value.detail + str(refused.value.members)


def test_engines_get_no_secret_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects keys and passwords: engines get none of the database's and none of a bucket's, gateways those of a bucket."""
    secrets = {"WEIR_ADMIN_KEY": "k", "PGPASSWORD": "p"}
    of_buckets = {"AWS_SECRET_ACCESS_KEY": "s", "AZURE_STORAGE_ACCOUNT_KEY": "a", "GOOGLE_APPLICATION_CREDENTIALS": "g"}
    for name, value in {**secrets, **of_buckets, "LANG": "C"}.items():
        monkeypatch.setenv(name, value)
    engine, gateway = environment_of_engine(), environment_of_gateway()
    assert engine["LANG"] == gateway["LANG"] == "C"
    assert not (secrets | of_buckets).keys() & engine.keys()
    assert not secrets.keys() & gateway.keys() and of_buckets.items() <= gateway.items()


@pytest.mark.parametrize("content", [b"[gateway\n", b"\xff\xfe", None])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    """Protects that a broken or absent file refuses the start, and says which one it was."""
    path = tmp_path / "weir.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(errors.InvalidRequest, match=r"weir\.toml"):
        load_config(path)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('directory = "a"', "retention.key_file"),
        ('bucket = "s3://a"', "retention.key_file"),
        ('directory = "a"\nbucket = "s3://a"\nkey_file = "k"', "retention.bucket"),
        ('directory = ""', "retention.directory"),
        ("sweep_ms = 0", "retention.sweep_ms"),
        ('folder = "a"', "retention.folder"),
    ],
)
def test_a_place_for_streams_is_one_place_with_keys(tmp_path: Path, text: str, field: str) -> None:
    """Protects what is kept: gateways know one place, and keys for it; what is wrong is told by its name."""
    path = tmp_path / "weir.toml"
    path.write_text(f"[retention]\n{text}\n")
    with pytest.raises(errors.InvalidRequest) as refused:
        load_config(path)
    assert refused.value.members["field"] == field
