"""The address of a PostgreSQL database: read in one way only, by everything that connects, and never shown when refused."""

from pathlib import Path
from urllib.parse import quote

import asyncpg
import pytest
from tests.postgres_server import shared_server

from weir import errors
from weir.app.stores import open_stores
from weir.config import StoreConfig
from weir.storage.postgres_address import parse_address
from weir.storage.postgres_session import FAULTS, connect, why_unusable
from weir.storage.reading import verify_database

ODD = "h/u#n?t@e:r%2 &"
WRONG = [
    "",
    "weir",
    "mysql://u:hunter2@h/db",
    "postgresql://u:hunter2@h",
    "postgresql://u:hunter2@h:x/db",
    "postgresql://u:hunter2@h:99999/db",
    "postgresql://u:hunter2@h:0/db",
    "postgresql://u:p@hunter2@h:1/db",
    "postgresql://u:p@hunter2/x@h/db",
    "postgresql://u:p/hunter2@h:1/db",
    "postgresql://u:p#hunter2@h:1/db",
    "postgresql://u:p?hunter2@h:1/db",
    "postgresql://u:p@s/w?hunter2@h/db",
    "postgresql://u:hunter2@h1:1,h2:2/db",
    "postgresql://u:hunter2@a%40b:1/db",
    "postgresql://u:hunter2@a%2Fb:1/db",
    "postgresql://u:hunter2%00@h:1/db",
    "postgresql://u:hunter2%ff@h:1/db",
    "postgresql://u:hunter2@h:1/db?sslmode",
    "postgresql://u:hunter2@h/db?port=99999",
    "postgresql:///db?host=h&port=hunter2",
]


@pytest.mark.parametrize("address", WRONG)
async def test_a_wrong_address_is_refused_everywhere_without_being_shown(address: str, tmp_path: Path) -> None:
    """Protects: what is no address, or could be read in two ways, ends in a sentence; what may be a password stays unsaid."""
    said: list[str] = []
    with pytest.raises(errors.InvalidRequest) as refused:
        async with open_stores(tmp_path, StoreConfig(address), said.append):
            pass
    with pytest.raises(errors.InvalidRequest) as unread:
        await verify_database(address)
    assert "hunter2" not in refused.value.detail + unread.value.detail + "".join(said)


@pytest.mark.parametrize(
    ("address", "shown", "host", "port"),
    [
        (
            "postgresql://u:hunter2@db.example:5433/weir?password=hunter2&sslmode=require",
            "db.example:5433/weir",
            "db.example",
            5433,
        ),
        ("postgres://u:hunter2@[::1]:1/db", "[::1]:1/db", "::1", 1),
        ("postgresql://db.example/db", "db.example:5432/db", "db.example", None),
        ("postgresql:///db", "local:5432/db", None, None),
        ("postgresql:///db?host=/run/hunter2&port=5433", "local:5433/db", "/run/hunter2", 5433),
        ("postgresql://%2Frun%2Fhunter2/db", "local:5432/db", "/run/hunter2", None),
    ],
)
def test_an_address_is_shown_without_its_secrets(address: str, shown: str, host: str | None, port: int | None) -> None:
    """Protects: what is announced of a database is where it is, which is where the driver goes."""
    parsed = parse_address(address)
    assert (parsed.shown, parsed.arguments()["host"], parsed.arguments()["port"]) == (shown, host, port)
    assert "hunter2" not in parsed.shown + repr(parsed).replace("/run/hunter2", "")


def test_each_part_reaches_the_driver_as_it_was_meant() -> None:
    """Protects passwords of any characters, and settings that the driver takes only in an address."""
    odd = quote(ODD, safe="")
    arguments = parse_address(f"postgresql://{odd}:{odd}@h:1/{odd}?sslmode=verify-full&sslrootcert=/etc/ca").arguments()
    assert (arguments["user"], arguments["password"], arguments["database"]) == (ODD, ODD, ODD)
    assert arguments["dsn"] == "postgresql:///?sslmode=verify-full&sslrootcert=%2Fetc%2Fca"
    named = parse_address(f"postgresql:///db?user={odd}&password={odd}&host=h").arguments()
    assert (named["user"], named["password"], named["host"], named["dsn"]) == (ODD, ODD, "h", None)


async def test_odd_names_and_settings_arrive_at_the_server() -> None:
    """Protects: role and database are those of the address, and its settings hold in the session."""
    server, odd = shared_server(), quote(ODD, safe="")
    server.sql(f'CREATE ROLE "{ODD}" LOGIN SUPERUSER', f'CREATE DATABASE "{ODD}"')
    address = f"postgresql://{odd}:{odd}@127.0.0.1:{server.port}/{odd}?sslmode=prefer&work_mem=4321kB"
    connection = await connect(parse_address(address))
    try:
        found = await connection.fetchrow("SELECT current_user, current_database(), current_setting('work_mem')")
        assert found is not None and tuple(found) == (ODD, ODD, "4321kB")
    finally:
        await connection.close()
        server.sql(f'DROP DATABASE "{ODD}"', f'DROP ROLE "{ODD}"')


@pytest.mark.parametrize(
    ("address", "environment"),
    [
        (f"postgresql://u:hunter2@{'a' * 70}.invalid:1/db", {}),
        ("postgresql://u:hunter2@127.0.0.1:1/db?sslmode=bogus", {}),
        ("postgresql://u:hunter2@127.0.0.1:1/db?sslmode=verify-full&sslrootcert=/nope", {}),
        ("postgresql://u:hunter2@127.0.0.1/db", {"PGPORT": "many"}),
        ("postgresql://u:hunter2@127.0.0.1/db", {"PGPORT": "99999"}),
    ],
)
async def test_what_the_driver_cannot_use_is_a_fault_in_words(
    address: str, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Protects an operator from a traceback, and a password from being in it."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(FAULTS) as fault:
        await connect(parse_address(address))
    assert "hunter2" not in why_unusable(fault.value)
    with pytest.raises(errors.StateUnreadable) as refused:
        await verify_database(address)
    assert "hunter2" not in refused.value.detail and not isinstance(fault.value, asyncpg.PostgresError)
