"""Configuration: frozen sections, one per consumer, and the only reader of files and environment.

A TOML file (`--config weir.toml`) has one table per section below, and one per name of `pools` and `issuers`. An unknown key, a
wrong type or a value out of its range refuses to start, naming the path and what is accepted. What operators change while it
runs (tenants, limits, prices) is not here.
"""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from weir import errors
from weir.core.issuers import (
    ALGORITHMS,
    ISSUERS_MAX,
    RULE_CLAIMS_MAX,
    RULES_MAX,
    ClaimValue,
    Issuer,
    is_claim,
    is_issuer_url,
    is_key_url,
)
from weir.core.scheduling.queues import QueueBounds
from weir.core.tenancy import ServiceClass
from weir.units import Bytes, Millis, Tokens

Section = TypeVar("Section")

_BOUNDS: dict[str, tuple[float, float]] = {
    "concurrency": (1, 65_536),
    "context_tokens": (16, 100_000_000),
    "input_tokens_max": (1, 100_000_000),
    "max_output_tokens": (1, 100_000_000),
    "default_max_output_tokens": (1, 100_000_000),
    "typical_output_tokens": (1, 100_000_000),
    "threads": (1, 1_024),
    "replicas": (1, 1_024),
    "backlog": (1, 65_535),
    "fair_slack_tokens": (0, 1_000_000),
    "fair_burst_tokens": (0, 1_000_000),
    "explained_requests": (1, 100_000),
    "retention_days": (2, 36_500),
    "retries_min": (0, 65_536),
    "retry_percent": (0, 100),
    "backlog_percent": (1, 1_000),
    "batch_share_percent": (1, 99),
    "yield_after_ms": (10, 60_000),
    "concurrency_min_percent": (1, 100),
    "leeway_ms": (0, 300_000),
    "line_bytes_max": (1_024, 8 * 1024 * 1024),
    "lines_max": (1, 1_000_000),
    "files_max": (1, 100_000),
    "file_days": (1, 3_650),
    "open_batches_max": (1, 10_000),
    "lines_in_flight": (1, 10_000),
    "batches_at_once": (4, 1_000),
}
"""Accepted ranges by key; a key ending in _ms takes 1 ms … 1 day, _bytes 1 byte … 64 GiB, others 1 … 2^31."""

_OF_BUCKETS = ("AWS_", "AZURE_", "GOOGLE_")

_TEXTS = {
    "api_key_file": "a path",
    "certificate_file": "a path",
    "private_key_file": "a path",
    "authority_file": "a path",
    "token_file": "a path",
    "control_token_file": "a path",
    "vllm_python": "a path",
    "listen": "HOST:PORT",
    "directory": "a path",
    "bucket": "a URL of a bucket, such as s3://name/prefix",
    "key_file": "a path",
    "url": "a PostgreSQL URL",
    "tenant": "a tenant's name",
    "urls": "an array of URLs, each once",
    "service_classes": f"an array of {' or '.join(ServiceClass)}, each once",
    "issuers.url": "an https URL without a query, another than every other issuer's; http for 127.0.0.1, [::1] and localhost",
    "jwks_url": "an https URL; http where the issuer's is",
    "audiences": "an array of texts, each once",
    "algorithms": f"an array of {', '.join(ALGORITHMS)}, each once",
    "rules": f"an array of 1 to {RULES_MAX} tables",
    "claims": f"a table of 1 to {RULE_CLAIMS_MAX} names with a text, a whole number, true or false each",
    "application": "an application's name",
    "keys_refresh_ms": "at most keys_valid_ms",
    "keys_cool_down_ms": "at most keys_refresh_ms",
}
"""What a key that takes text, or several, accepts. Such a value is not quoted: it may hold a password."""


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """What tenants meet. Defaults carry their reason."""

    body_bytes_max: Bytes = 8 * 1024 * 1024  # a long conversation fits; memory per connection stays bounded
    bodies_bytes_max: Bytes = 256 * 1024 * 1024  # all bodies that are still arriving: 32 of the largest; else `queue_full`
    body_wait_ms: Millis = 30_000  # a body that never ends is given up
    stream_buffer_bytes: Bytes = 256 * 1024  # per stream, before the engine is paused
    socket_buffer_bytes: Bytes = 64 * 1024  # SO_SNDBUF: what the kernel takes counts as accepted
    slow_client_grace_ms: Millis = 5_000  # oldest byte not accepted by the socket
    keep_alive_ms: Millis = 10_000  # comment on a silent stream, below every proxy's idle bound
    early_headers_ms: Millis = 2_000  # queued this long: show the client that it is admitted
    idle_connection_ms: Millis = 75_000  # HTTP keep-alive
    backlog: int = 2_048
    connections_max: int = 10_000  # far above what the queues hold; descriptors are left for engines, operators and metrics


@dataclass(frozen=True, slots=True)
class CoordinatorConfig:
    """Admission, ledger and queues."""

    queue_entries_per_tenant: int = 256
    queue_entries: int = 2_000
    queue_bytes: Bytes = 64 * 1024 * 1024
    queue_wait_ms: Millis = 5_000  # interactive work is better refused than late
    store_wait_ms: Millis = 2_000  # a write later than this fails what waits for it
    backlog_percent: int = 100  # of each workload class's backlog: less is quicker for who asks little, and wastes engine time
    batch_share_percent: int = 10  # of a pool that batch requests get while interactive ones wait too
    yield_after_ms: Millis = 250  # an interactive request's wait after which a batch's line on an idle lane gives it up
    concurrency_min_percent: int = 25  # of a replica's concurrency that adaptation leaves; 100: it never adapts
    group_ms: Millis = 5  # between the starts of two ledger writes: shorter costs CPU, longer delays whole answers
    delivery_step_tokens: Tokens = 256
    remembered_executions: int = 10_000  # ended ones kept in memory for look-ups; older ones come from the store
    fair_slack_tokens: Tokens = 1_000  # input tokens by which urgency may go before fairness; 0: never
    fair_burst_tokens: int = 10_000  # input tokens that a tenant with little work may be behind, and catch up at once; 0: none
    explained_requests: int = 4_000  # timelines kept in memory, and a quarter as many of rejections: about 20 MB
    request_id_ms: Millis = 86_400_000  # how long an ended request id stays bound
    drain_grace_ms: Millis = 30_000
    retries_min: int = 3  # per pool and window: a quiet pool may retry too; with retry_percent 0, nothing above it
    retry_percent: int = 10  # of what was admitted to the pool: a failing pool is not loaded with its own failures
    retry_window_ms: Millis = 10_000

    @property
    def queue_bounds(self) -> QueueBounds:
        """The bounds of each scheduling domain."""
        return QueueBounds(self.queue_entries_per_tenant, self.queue_entries, self.queue_bytes, self.queue_wait_ms)


@dataclass(frozen=True, slots=True)
class LedgerConfig:
    """What the ledger keeps in full. Balances and sums of usage are kept for ever."""

    retention_days: int = 400  # a year and the month after it, for whoever checks an invoice; a request id needs two


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Bounds on engines, whatever their kind."""

    first_output_ms: Millis = 60_000  # silence before its first output after which a run is stalled: a prompt may be long
    idle_ms: Millis = 30_000  # silence between outputs after which a run is stalled
    start_ms: Millis = 120_000  # from launch to listening
    probe_ms: Millis = 2_000  # between probes of a ready replica
    restart_backoff_ms: Millis = 1_000  # before a restart, or another try of a replica that failed: first; doubles to 30 s
    api_key_file: str | None = None  # a file with the bearer key of the engine behind `--engine URL`; read at start
    vllm_python: str | None = None  # the interpreter that has vLLM: its packages are not ours; None: this one
    external: bool = False  # `--engine URL` is outside the platform: only tenants with external_allowed
    embeddings: bool = False  # `--engine URL` or `simulated` makes vectors, and no text


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """The pool behind alias `assistant`. None: the engine kind's own default."""

    replicas: int = 1
    concurrency: int | None = None
    context_tokens: Tokens | None = None
    max_output_tokens: Tokens | None = None
    default_max_output_tokens: Tokens = 256
    typical_output_tokens: Tokens = 128
    threads: int | None = None
    second_model: bool = True  # llama.cpp: also alias `completion`, started on first use
    service_classes: tuple[ServiceClass, ...] = tuple(ServiceClass)  # whose requests it takes
    input_tokens_max: Tokens | None = None  # of one request that it takes; None: no bound


@dataclass(frozen=True, slots=True)
class FurtherPoolConfig:
    """A pool beside the first, `[pools.NAME]`: it serves the same revision. concurrency: None for that of `[pool]`."""

    replicas: int = 1
    concurrency: int | None = None
    tenant: str | None = None  # it is dedicated to this one
    service_classes: tuple[ServiceClass, ...] = tuple(ServiceClass)
    input_tokens_max: Tokens | None = None
    urls: tuple[str, ...] = ()  # of its own engines, where `--engine` is a URL too


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Where ledger and catalog are kept. url: a PostgreSQL database; None: SQLite in the state directory."""

    url: str | None = None  # may hold a password: never printed


@dataclass(frozen=True, slots=True)
class LinkConfig:
    """Between gateways, control and the coordinator. The files are for links over TCP, which need all that their side reads."""

    listen: str | None = None  # HOST:PORT or unix:PATH where the coordinator is reached by what it does not start itself
    certificate_file: str | None = None  # the coordinator shows it, with its chain
    private_key_file: str | None = None
    authority_file: str | None = None  # whose certificates a gateway or control trusts
    token_file: str | None = None  # both sides: at least 32 characters
    control_token_file: str | None = None  # of control and coordinators: another one, which gateways must not know
    heartbeat_ms: Millis = 1_000  # each side says something as often; three without anything break the link
    silence_ms: Millis = 10_000  # without a coordinator after which a gateway ends its requests; below the lease
    lease_ms: Millis = 15_000  # without a gateway after which the coordinator does
    snapshot_valid_ms: Millis = 60_000  # what is approved may be worked by for so long without a check against the store


@dataclass(frozen=True, slots=True)
class RetentionConfig:
    """Where gateways keep the streams of tenants that asked for it; without a place `weir up` takes its state directory."""

    directory: str | None = None  # of every gateway of the cell: what one of them keeps, all must be able to read
    bucket: str | None = None  # in its place; its credentials come from the environment
    key_file: str | None = None  # what streams are sealed with; `weir retention rotate-key` makes it
    sweep_ms: Millis = 10_000  # between looks at what is over: so late it may be deleted


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """Files and batches of tenants: where they are kept, and how much; without a place `weir up` takes its state directory."""

    directory: str | None = None  # of every part of the cell that serves tenants or runs batches
    bucket: str | None = None  # in its place; its credentials come from the environment
    file_bytes_max: Bytes = 200 * 1024 * 1024  # of one file
    line_bytes_max: Bytes = 1024 * 1024  # of one line: it waits in memory
    lines_max: int = 50_000  # of one file
    tenant_bytes_max: Bytes = 10 * 1024 * 1024 * 1024  # of all files of a tenant
    files_max: int = 10_000  # of a tenant
    file_days: int = 30  # for which files stay that say nothing else, results too
    open_batches_max: int = 100  # of a tenant, that have not ended
    lines_in_flight: int = 64  # of all batches: admitted, queued or running
    batches_at_once: int = 16  # that run; a tenant's share is a quarter
    poll_ms: Millis = 1_000  # between looks for new batches


@dataclass(frozen=True, slots=True)
class LogConfig:
    """json: one object per line; false: text for a terminal."""

    json: bool = True


@dataclass(frozen=True, slots=True)
class WeirConfig:
    """Everything in weir.toml."""

    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    coordinator: CoordinatorConfig = field(default_factory=CoordinatorConfig)
    ledger: LedgerConfig = field(default_factory=LedgerConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    pool: PoolConfig = field(default_factory=PoolConfig)
    pools: Mapping[str, FurtherPoolConfig] = field(default_factory=dict)
    issuers: Mapping[str, Issuer] = field(default_factory=dict)
    store: StoreConfig = field(default_factory=StoreConfig)
    link: LinkConfig = field(default_factory=LinkConfig)
    retention: RetentionConfig = field(default_factory=RetentionConfig)
    batches: BatchConfig = field(default_factory=BatchConfig)
    log: LogConfig = field(default_factory=LogConfig)


def load_config(path: Path | None) -> WeirConfig:
    """Configuration from a TOML file, or the defaults. Raises InvalidRequest naming the key and what is accepted."""
    if path is None:
        return WeirConfig()
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as fault:
        raise errors.InvalidRequest(f"{path}: {fault}", members={"field": str(path)}) from fault
    config = _section(WeirConfig, tables, "")
    _check_issuers(config.issuers)
    _check_retention(config.retention)
    _check_places(config.batches, "batches")
    return config


def _section(cls: type[Section], table: dict[str, Any], path: str) -> Section:
    assert is_dataclass(cls)
    types = get_type_hints(cls)
    known = [f.name for f in fields(cls)]
    values: dict[str, Any] = {}
    for key, value in table.items():
        where = f"{path}{key}"
        if key not in known:
            raise _refuse(where, f"one of {', '.join(known)}", "is unknown")
        if is_dataclass(types[key]):
            values[key] = _section(types[key], _table(where, value), f"{where}.")
        elif types[key] == Mapping[str, ClaimValue]:
            values[key] = _claims(where, value)
        elif get_origin(types[key]) is Mapping:
            values[key] = _named_sections(get_args(types[key])[1], _table(where, value), f"{where}.")
        else:
            values[key] = _value(where, key, types[key], value)
    for needed in fields(cls):
        if needed.name not in values and needed.default is MISSING and needed.default_factory is MISSING:
            raise _refuse(f"{path}{needed.name}", _text(f"{path}{needed.name}", needed.name), "is missing")
    return cls(**values)


def _named_sections(cls: type[Section], table: dict[str, Any], path: str) -> dict[str, Section]:
    return {name: _section(cls, _table(f"{path}{name}", inner), f"{path}{name}.") for name, inner in table.items()}


def _table(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _refuse(where, "a table", "is not one")  # unquoted: an address may hold a password
    return value


def _value(where: str, key: str, kind: Any, value: Any) -> Any:
    if kind is bool:
        if not isinstance(value, bool):
            raise _refuse(where, "true or false", f"is {value!r}")
        return value
    if kind in (str, str | None):
        if not isinstance(value, str) or not value:
            raise _refuse(where, _text(where, key), "is not one")
        return value
    if get_origin(kind) is tuple:
        inner = get_args(kind)[0]
        return _texts(where, key, inner, value) if issubclass(inner, str) else _sections(where, key, inner, value)
    low, high = _bounds_of(key)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _refuse(where, f"a whole number from {low} to {high}", f"is {value!r}")
    return value


def _text(where: str, key: str) -> str:
    """What a key that takes text accepts; one name means another thing in another section."""
    return _TEXTS.get(f"{where.partition('.')[0]}.{key}") or _TEXTS[key]


def _sections(where: str, key: str, cls: type[Any], value: Any) -> tuple[Any, ...]:
    """The tables of an array, each named by its place."""
    if not isinstance(value, list) or not value:
        raise _refuse(where, _TEXTS[key], "is not one")
    tables = [(f"{where}.{place}", table) for place, table in enumerate(value, 1)]
    return tuple(_section(cls, _table(path, table), f"{path}.") for path, table in tables)


def _claims(where: str, value: Any) -> dict[str, ClaimValue]:
    claims = _table(where, value)
    if not 1 <= len(claims) <= RULE_CLAIMS_MAX or not all(is_claim(name, wanted) for name, wanted in claims.items()):
        raise _refuse(where, _TEXTS["claims"], "is not one")
    return claims


def _texts(where: str, key: str, kind: type[str], value: Any) -> tuple[str, ...]:
    try:
        texts = tuple(kind(text) for text in value) if isinstance(value, list) else ()
    except ValueError:
        texts = ()
    if not texts or len(set(texts)) < len(texts) or list(texts) != value or "" in texts:
        raise _refuse(where, _TEXTS[key], "is not one")
    return texts


def _check_issuers(issuers: Mapping[str, Issuer]) -> None:
    """What one value alone does not show. Raises InvalidRequest."""
    if len(issuers) > ISSUERS_MAX:
        raise _refuse("issuers", f"at most {ISSUERS_MAX} tables", "has more")
    urls = [issuer.url for issuer in issuers.values()]
    for name, issuer in issuers.items():
        keys_url = issuer.jwks_url or issuer.url
        right = {
            "url": is_issuer_url(issuer.url) and urls.count(issuer.url) == 1,
            "jwks_url": is_key_url(keys_url) and (keys_url.startswith("https:") or issuer.url.startswith("http:")),
            "algorithms": set(issuer.algorithms) <= set(ALGORITHMS),
            "rules": len(issuer.rules) <= RULES_MAX,
            "keys_refresh_ms": issuer.keys_refresh_ms <= issuer.keys_valid_ms,
            "keys_cool_down_ms": issuer.keys_cool_down_ms <= issuer.keys_refresh_ms,
        }
        for key, is_right in right.items():
            if not is_right:
                raise _refuse(f"issuers.{name}.{key}", _text("issuers.", key), "does not fit")


def _check_retention(retention: RetentionConfig) -> None:
    """One place, and keys wherever there is one. Raises InvalidRequest."""
    _check_places(retention, "retention")
    if (retention.directory or retention.bucket) and retention.key_file is None:
        raise _refuse("retention.key_file", _text("retention.key_file", "key_file"), "is missing")


def _check_places(section: RetentionConfig | BatchConfig, name: str) -> None:
    """Raises InvalidRequest where two places are named."""
    if section.directory is not None and section.bucket is not None:
        raise _refuse(f"{name}.bucket", "absent beside directory", "is a second place")


def _bounds_of(key: str) -> tuple[float, float]:
    if key in _BOUNDS:
        return _BOUNDS[key]
    if key.endswith("_ms"):
        return 1, 86_400_000
    if key.endswith("_bytes") or "_bytes_" in key:
        return 1, 64 * 1024**3
    return 1, 2**31


def _refuse(where: str, accepted: str, problem: str) -> errors.InvalidRequest:
    return errors.InvalidRequest(
        f"Configuration key '{where}' {problem}; accepted: {accepted}.", members={"field": where, "accepted": accepted}
    )


def read_api_key(config: EngineConfig) -> str | None:
    """The key of the engine behind a URL, or None. Raises InvalidRequest when its file cannot be read or is empty."""
    if config.api_key_file is None:
        return None
    try:
        key = Path(config.api_key_file).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as fault:
        raise _refuse("engine.api_key_file", "a readable file with one ASCII key", "cannot be read") from fault
    if not key:
        raise _refuse("engine.api_key_file", "a readable file with one ASCII key", "is empty")
    return key


def environment_of_engine() -> dict[str, str]:
    """The environment that engine processes start with: that of gateways, without the credentials of any bucket."""
    return {name: value for name, value in environment_of_gateway().items() if not name.startswith(_OF_BUCKETS)}


def environment_of_gateway() -> dict[str, str]:
    """The environment that gateway processes start with: ours, without anything of Weir's own or of its database's."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("WEIR_", "PG"))}
