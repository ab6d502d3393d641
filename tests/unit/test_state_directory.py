"""The state directory: one owner, private files, secrets that stay, and clear refusals; and the schema that lies in it."""

import os
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from random import Random

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine
from sqlalchemy.pool import NullPool

from weir import errors
from weir.storage import state_directory
from weir.storage.database import open_sqlite
from weir.storage.schema import METADATA
from weir.storage.state_directory import StateDirectory, write_private_file


class SeededEntropy:
    """Predictable bytes."""

    def __init__(self) -> None:
        self._random = Random(1)

    def token(self, size: int) -> bytes:
        return self._random.randbytes(size)


@pytest.fixture
def state(tmp_path: Path) -> Iterator[StateDirectory]:
    opened = StateDirectory(tmp_path / "deep" / "state")
    yield opened
    opened.close()


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_directory_is_private(state: StateDirectory) -> None:
    """Protects: nobody else reads the state: 0700 for the directory, 0600 for what lies in it, and nothing but files does."""
    state.secret(state_directory.BODY_DIGEST_SECRET, SeededEntropy())
    open_sqlite(state.database)
    assert mode_of(state.path) == 0o700
    assert {mode_of(path) for path in state.path.iterdir()} == {0o600}


def test_a_second_owner_is_refused_by_name(state: StateDirectory) -> None:
    """Protects: two processes never own one state directory, and the refusal says who does."""
    attempt = f"from pathlib import Path; from weir.storage.state_directory import *; StateDirectory(Path({str(state.path)!r}))"
    refused = subprocess.run([sys.executable, "-c", attempt], capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 1
    assert "StateLocked" in refused.stderr
    with pytest.raises(errors.StateLocked, match=rf"{state.path} is owned by process {os.getpid()}\."):
        StateDirectory(state.path)


def test_children_inherit_no_lock(state: StateDirectory) -> None:
    """Protects: an engine process that outlives its parent does not keep the directory locked."""
    command = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, close_fds=False) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"\n"
        state.close()
        state.close()
        StateDirectory(state.path).close()
        child.communicate(b"\n", timeout=30)


def test_secrets_and_bootstrap_keys_survive_a_restart(state: StateDirectory) -> None:
    """Protects: a second start has the same secrets and shows the same keys; secrets differ from each other."""
    entropy = SeededEntropy()
    names = (state_directory.BODY_DIGEST_SECRET, state_directory.CACHE_SALT_SECRET)
    made = [state.secret(name, entropy) for name in names]
    assert len(set(made)) == 2
    assert {len(secret) for secret in made} == {32}
    state.keep_bootstrap_keys({"0a": "weir-0a", "0b": "weir-0b"})
    state.keep_bootstrap_keys({"0a": "weir-0a"})
    state.close()
    again = StateDirectory(state.path)
    assert [again.secret(name, entropy) for name in names] == made
    assert again.bootstrap_keys == {"0a": "weir-0a"}
    again.close()


def test_a_damaged_secrets_file_is_refused_without_showing_it(state: StateDirectory) -> None:
    """Protects: damage is reported, never repaired by new secrets, and no secret reaches an error."""
    state.close()
    write_private_file(state.path / "secrets.json", b'{"secrets": {"body_digest": "hunter2')
    with pytest.raises(errors.StateUnreadable, match="damaged") as refused:
        StateDirectory(state.path)
    assert "hunter2" not in str(refused.value)
    assert refused.value.__cause__ is None
    with pytest.raises(errors.StateUnreadable):  # and not locked: a refusal gives the directory up
        StateDirectory(state.path)


@pytest.mark.parametrize("path", ["/dev/null", "/dev/null/state", "/proc/weir-state"])
def test_what_cannot_be_a_state_directory_is_refused(path: str) -> None:
    """Protects: a file, or a place where nothing can be written, is refused with its path."""
    with pytest.raises(errors.StateUnreadable, match=path):
        StateDirectory(Path(path))


def test_a_file_is_replaced_whole_and_private(tmp_path: Path) -> None:
    """Protects: a replaced file is private whatever it was before, and nothing temporary stays."""
    path = tmp_path / "ready.json"
    path.write_bytes(b"old and longer")
    path.chmod(0o644)
    write_private_file(path, b"new")
    assert (path.read_bytes(), mode_of(path)) == (b"new", 0o600)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "full").touch()
    with pytest.raises(OSError, match="folder"):
        write_private_file(tmp_path / "folder", b"new")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["folder", "ready.json"]


# ── the database in it ───────────────────────────────────────────────────────────────────────────────────────────────


def test_migrations_and_metadata_agree(tmp_path: Path) -> None:
    """Protects: a migrated database is exactly what the metadata describes: columns, keys, indexes, layout."""
    migrated, described = tmp_path / "migrated", tmp_path / "described"
    open_sqlite(migrated)
    METADATA.create_all(create_engine(f"sqlite:///{described}", poolclass=NullPool))
    with create_engine(f"sqlite:///{migrated}", poolclass=NullPool).connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), METADATA) == []
    assert structure_of(migrated) == structure_of(described)


def structure_of(path: Path) -> dict[str, list[tuple[object, ...]]]:
    """Of each table: whether it has row numbers; name, type, nullability and place in the key of each column; indexes."""
    with closing(sqlite3.connect(path)) as database:
        found: dict[str, list[tuple[object, ...]]] = {}
        for _, table, _, _, without_rowid, _ in database.execute("PRAGMA table_list").fetchall():
            columns = database.execute(f"SELECT name, type, \"notnull\", pk FROM pragma_table_info('{table}')").fetchall()
            indexes = database.execute(
                'SELECT l.name, l."unique", i.seqno, i.name FROM pragma_index_list(?) l, pragma_index_info(l.name) i '
                "WHERE l.origin = 'c' ORDER BY l.name, i.seqno",
                (table,),
            ).fetchall()
            found[table] = [(without_rowid,), *columns, *indexes]
        return {table: rows for table, rows in found.items() if not table.startswith(("alembic", "sqlite"))}


def test_opening_again_keeps_everything(tmp_path: Path) -> None:
    """Protects: migrations run once; a database of this version is opened as it is."""
    path = tmp_path / "weir.sqlite3"
    open_sqlite(path)
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE cell SET epoch = 7")
    open_sqlite(path)
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT epoch FROM cell").fetchall() == [(7,)]


def test_a_newer_schema_is_refused_untouched(tmp_path: Path) -> None:
    """Protects: an old version never works on what a newer one wrote."""
    path = tmp_path / "weir.sqlite3"
    open_sqlite(path)
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE alembic_version SET version_num = '9999'")
    before = structure_of(path)
    with pytest.raises(errors.StateUnreadable, match="newer version of Weir"):
        open_sqlite(path)
    assert structure_of(path) == before


@pytest.mark.parametrize(("offset", "damage"), [(0, b"not a database at all"), (4096, b"\xff" * 8192)])
def test_a_damaged_database_is_refused(tmp_path: Path, offset: int, damage: bytes) -> None:
    """Protects: a damaged file is refused at start, whether its header or its pages are hurt."""
    path = tmp_path / "weir.sqlite3"
    open_sqlite(path)
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(damage)
    with pytest.raises(errors.StateUnreadable, match="damaged"):
        open_sqlite(path)
