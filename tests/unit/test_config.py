"""The configuration file: what is read as written, and what is refused by name."""

from pathlib import Path

import pytest

from weir import errors
from weir.config import FurtherPoolConfig, WeirConfig, environment_of_engine, load_config
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


@pytest.mark.parametrize(
    ("text", "field", "said"),
    [
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
    """Protects keys and the database's password from engine processes, which need neither."""
    secrets = {"WEIR_ADMIN_KEY": "k", "PGPASSWORD": "p"}
    for name, value in {**secrets, "LANG": "C"}.items():
        monkeypatch.setenv(name, value)
    passed_on = environment_of_engine()
    assert passed_on["LANG"] == "C" and not secrets.keys() & passed_on.keys()


@pytest.mark.parametrize("content", [b"[gateway\n", b"\xff\xfe", None])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    """Protects that a broken or absent file refuses the start, and says which one it was."""
    path = tmp_path / "weir.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(errors.InvalidRequest, match=r"weir\.toml"):
        load_config(path)
