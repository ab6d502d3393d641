"""Snapshots in parts: whatever changed, the parts of the change put the new snapshot together, and never a half of it."""

import string
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir import errors
from weir.core.metering import Price
from weir.core.registry.model import DEFAULT_WORKLOAD_CLASSES, Alias, Canary, EngineKind, Pool, Revision, RevisionState
from weir.core.registry.rollout_plan import Tolerances
from weir.core.registry.snapshot import Snapshot
from weir.core.registry.snapshot_parts import (
    ROWS_PER_PART,
    SnapshotAssembly,
    SnapshotPart,
    parts_between,
    whole_parts_between,
)
from weir.core.tenancy import ApiKey, Application, Limits, Retention, Scope, ServiceClass, Tenant
from weir.core.windows import FormerZone
from weir.link.control_messages import decode_control_up
from weir.link.frames import FRAME_BYTES_MAX, decode_down, encode
from weir.units import INT64_MAX

_NAMES = st.sampled_from(["a", "b", "c", "é 😀\0"])
_NUMBERS = st.sampled_from([0, 1, INT64_MAX])
_PRICES = st.builds(Price, _NUMBERS, _NUMBERS, _NUMBERS, _NUMBERS, _NUMBERS)
_CLASSES = st.sampled_from(ServiceClass)

_TENANTS = st.builds(
    Tenant,
    _NAMES,
    st.sampled_from(["UTC", "Europe/Oslo"]),
    disabled=st.booleans(),
    former_time_zones=st.lists(st.builds(FormerZone, _NAMES, _NUMBERS), max_size=2).map(tuple),
    weight=st.integers(1, 1_000),
    retention=st.none() | st.builds(Retention, _NUMBERS, _NUMBERS, _NUMBERS),
    deleted=st.booleans(),
)
_APPLICATIONS = st.builds(
    Application,
    _NAMES,
    _NAMES,
    _CLASSES,
    aliases=st.none() | st.frozensets(_NAMES, max_size=2),
    revoked=st.booleans(),
)
_KEYS = st.builds(ApiKey, _NAMES, _NAMES, _NAMES, st.sampled_from([b"", b"\0" * 32, b"\xff" * 32]), revoked=st.booleans())
_CANARIES = st.builds(
    Canary, _NAMES, _NUMBERS, _NAMES, st.integers(0, 100), st.builds(Tolerances, errors_points=st.integers(0, 100))
)
_ALIASES = st.builds(Alias, _NAMES, _NAMES, _NUMBERS, st.none() | _CANARIES)
_TENANT_ALIASES = st.builds(Alias, _NAMES, _NAMES, _NUMBERS, st.none() | _CANARIES, _NAMES)
_REVISIONS = st.builds(
    Revision,
    _NAMES,
    st.sampled_from(EngineKind),
    _NAMES,
    _NUMBERS,
    _NUMBERS,
    _NUMBERS,
    _PRICES,
    state=st.sampled_from(RevisionState),
    arguments=st.lists(st.tuples(_NAMES, st.booleans() | _NUMBERS | _NAMES), max_size=2).map(tuple),
    tenant=st.none() | _NAMES,
)
_POOLS = st.builds(
    Pool,
    _NAMES,
    _NAMES,
    _NUMBERS,
    _NUMBERS,
    urls=st.lists(_NAMES, max_size=2).map(tuple),
    tenant=st.none() | _NAMES,
    service_classes=st.lists(_CLASSES, max_size=2).map(tuple),
    input_tokens_max=st.none() | _NUMBERS,
)
_SCOPES = st.builds(Scope, _NAMES, st.none() | _NAMES, st.none() | _NAMES, st.none() | _NAMES)
_LIMITS = st.builds(Limits, requests_per_minute=_NUMBERS, tokens_lifetime=st.none() | _NUMBERS)
_NOTHING = Snapshot()


@st.composite
def _snapshots(draw: st.DrawFn, version: int) -> Snapshot:
    """Of few names, so that two have rows that are the same, that differ, and that only one has."""

    def rows(row: st.SearchStrategy[Any]) -> Sequence[Any]:
        return draw(st.lists(row, max_size=4))

    return Snapshot(
        version,
        {row.name: row for row in rows(_TENANTS)},
        {(row.tenant, row.name): row for row in rows(_APPLICATIONS)},
        {row.secret_sha256: row for row in rows(_KEYS)},
        {row.name: row for row in rows(_ALIASES)},
        {(row.tenant, row.name): row for row in rows(_TENANT_ALIASES)},
        {row.id: row for row in rows(_REVISIONS)},
        {row.name: row for row in rows(_POOLS)},
        dict(rows(st.tuples(_SCOPES, _LIMITS))),
        {(revision, price.version): price for revision, price in rows(st.tuples(_NAMES, _PRICES))},
        draw(st.sampled_from([DEFAULT_WORKLOAD_CLASSES, DEFAULT_WORKLOAD_CLASSES[1:], ()])),
    )


def _as_told(snapshot: Snapshot) -> Snapshot:
    """What a gateway gets of it."""
    return replace(snapshot, limits={}, prices={})


def _rows_in(part: SnapshotPart) -> int:
    columns = set(part.__struct_fields__) - {"base", "version", "is_last", "workload_classes"}
    return sum(len(getattr(part, column)) for column in columns)


def _take(assembly: SnapshotAssembly, parts: Sequence[SnapshotPart]) -> Snapshot:
    """What the parts put together. Fails where anything is in force before the last one."""
    before = assembly.current
    for part in parts[:-1]:
        assert not part.is_last and assembly.take(part) is None and assembly.current is before
    assert parts[-1].is_last
    snapshot = assembly.take(parts[-1])
    assert snapshot is not None and assembly.current is snapshot
    return snapshot


@given(st.lists(_snapshots(0), min_size=1, max_size=4), st.integers(1, 6))
def test_the_parts_of_each_change_give_the_new_snapshot(drawn: list[Snapshot], rows_max: int) -> None:
    """Protects every gateway's view: change after change it has what the coordinator has, without limits and prices."""
    assembly, told = SnapshotAssembly(), _NOTHING
    for version, snapshot in enumerate(drawn, 1):
        wanted = replace(snapshot, version=version)
        parts = list(parts_between(told, wanted, rows_max))
        assert all(part.base == told.version and part.version == version for part in parts)
        assert all(_rows_in(part) >= 1 for part in parts[:-1]) and all(_rows_in(part) <= rows_max for part in parts)
        assert _take(assembly, parts) == _as_told(wanted)
        told = wanted


@given(_snapshots(3), _snapshots(7), st.integers(1, 6))
def test_a_change_from_nothing_replaces_everything(known: Snapshot, after: Snapshot, rows_max: int) -> None:
    """Protects a session that begins again: what was known before leaves nothing behind."""
    assembly = SnapshotAssembly()
    _take(assembly, list(parts_between(_NOTHING, known)))
    assert _take(assembly, list(parts_between(_NOTHING, after, rows_max))) == _as_told(after)


@given(_snapshots(1), _snapshots(2), st.integers(1, 6))
def test_a_part_is_the_same_after_its_journey(before: Snapshot, after: Snapshot, rows_max: int) -> None:
    """Protects the wire form: a gateway in another process is told the same values."""
    parts = list(parts_between(before, after, rows_max))
    assert decode_down(encode(parts)) == parts


@given(st.lists(_snapshots(0), min_size=1, max_size=4), st.integers(1, 6))
def test_the_coordinators_parts_give_the_whole_snapshot(drawn: list[Snapshot], rows_max: int) -> None:
    """Protects decisions: change after change the coordinator has all that control has, limits and prices too."""
    assembly, told = SnapshotAssembly(), _NOTHING
    for version, snapshot in enumerate(drawn, 1):
        wanted = replace(snapshot, version=version)
        parts = list(whole_parts_between(told, wanted, rows_max))
        assert decode_control_up(encode(parts)) == parts
        assert _take(assembly, parts) == wanted
        told = wanted


@given(_snapshots(1), _snapshots(2))
def test_gateways_never_get_limits_or_prices(before: Snapshot, after: Snapshot) -> None:
    """Protects tenants' limits and prices: a gateway's parts have no place for them, and its reader takes no others."""
    whole = list(whole_parts_between(before, after))
    for part in parts_between(before, after):
        assert not {"limits", "prices"} & set(part.__struct_fields__)
    with pytest.raises(errors.LinkFault):
        decode_down(encode(whole))


@given(_snapshots(1))
def test_what_is_equal_is_told_in_one_part_without_rows(snapshot: Snapshot) -> None:
    """Protects the links: a snapshot that was read again is not sent again, only its version is."""
    again = replace(snapshot, version=2, tenants={name: replace(tenant) for name, tenant in snapshot.tenants.items()})
    [part] = parts_between(snapshot, again)
    assert part == SnapshotPart(1, 2, is_last=True, workload_classes=snapshot.workload_classes)


# ── by hand ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_parts_tell_what_differs_and_nothing_else() -> None:
    """Protects the form of a change: new and changed rows by value, the keys of those gone, cut where a part is full."""
    kept, changed = Tenant("kept"), Tenant("changed")
    before = Snapshot(1, {"kept": kept, "changed": changed, "gone": Tenant("gone")}, aliases={"m": Alias("m", "r", 1)})
    tenants = {"kept": Tenant("kept"), "changed": replace(changed, weight=2), "new": Tenant("new")}
    after = replace(before, version=2, tenants=tenants, pools={"p": Pool("p", "r", 1, 1)})
    assert list(parts_between(before, after, 2)) == [
        SnapshotPart(1, 2, tenants=(replace(changed, weight=2), Tenant("new"))),
        SnapshotPart(1, 2, True, gone_tenants=("gone",), pools=(after.pools["p"],), workload_classes=before.workload_classes),
    ]


def test_an_assembly_takes_changes_one_after_another() -> None:
    """Protects the order of a gateway's snapshots: from nothing in parts, then what differs."""
    first = Snapshot(1, {name: Tenant(name) for name in "abc"})
    second = replace(first, version=2, tenants={"a": Tenant("a", weight=2), "d": Tenant("d")})
    assembly = SnapshotAssembly()
    assert assembly.current == _NOTHING
    assert _take(assembly, list(parts_between(_NOTHING, first, 1))) == first
    parts = list(parts_between(first, second, 1))
    assert len(parts) == 4 and _take(assembly, parts) == second


def test_parts_fit_a_frame_however_long_the_lists_in_rows_are() -> None:
    """Protects a link from a part that no frame takes: names in an application and addresses of a pool count as rows do."""
    names = frozenset(f"{letter}{number:062}" for letter in string.ascii_lowercase for number in range(20))
    applications = {("t", f"a{number}"): Application("t", f"a{number}", aliases=names) for number in range(400)}
    pools = {f"p{number}": Pool(f"p{number}", "r", 1, 1, urls=tuple(sorted(names))) for number in range(20)}
    open_to_all = {("t", "open"): Application("t", "open")}
    after = Snapshot(1, applications={**applications, **open_to_all}, pools=pools)
    parts = list(parts_between(_NOTHING, after))
    assert max(len(encode([part])) for part in parts) < FRAME_BYTES_MAX // 8
    assert max(_rows_in(part) for part in parts) <= ROWS_PER_PART and _take(SnapshotAssembly(), parts) == after


def test_a_row_that_is_longer_than_a_part_travels_alone() -> None:
    """Protects progress: what is more than a part's bound is still told, and once."""
    many = Application("t", "many", aliases=frozenset("abc"))
    few = Application("t", "few", aliases=frozenset())
    after = Snapshot(1, applications={("t", "many"): many, ("t", "few"): few})
    assert [part.applications for part in parts_between(_NOTHING, after, 2)] == [(many,), (few,)]
