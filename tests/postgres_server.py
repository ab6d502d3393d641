"""A PostgreSQL of the tests' own: one server per test process in a temporary folder, a fresh database for whoever asks.

It starts with the first question and stops with the session (`stop_servers`, called by conftest). It never touches a server
or a cluster that was there before. Without PostgreSQL's programs the tests fail, and say how to install them.
"""

import asyncio
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import asyncpg
from sqlalchemy import make_url

from weir.storage.postgres_database import prepare_postgres

START_S = 60.0
STOP_S = 30.0
DATABASES_MAX = 16
"""Databases for one test each: older ones are dropped, so that a session's folder stays small."""

_READY = "ready to accept connections"
_SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "fsync": "off",  # a killed server loses nothing that it handed to the kernel; only a power cut would
    "max_connections": "100",
    "shared_buffers": "64MB",
    "autovacuum_naptime": "10s",
}


def postgres_programs() -> Path:
    """The folder of `initdb` and `postgres`, the newest of Debian's or that on PATH. Fails with what to install."""
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: float(path.parts[-3]))
    if versions:
        return versions[-1].parent
    found = shutil.which("postgres")
    if found is None or not Path(found).with_name("initdb").exists():
        raise AssertionError("These tests need PostgreSQL: on Debian `make setup` as root, or apt-get install postgresql.")
    return Path(found).parent


def _unprivileged() -> dict[str, Any]:
    """Arguments of subprocess that run a program as another user where we are root, as PostgreSQL demands."""
    if os.geteuid() != 0:
        return {}
    known = {entry.pw_name: entry for entry in pwd.getpwall()}
    owner = known.get("postgres") or known["nobody"]
    return {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": []}


class PostgresServer:
    """A server on a free loopback port. settings: of this server, beside those that every one gets."""

    def __init__(self, **settings: str) -> None:
        self._programs = postgres_programs()
        self._owner = _unprivileged()
        self._folder = Path(tempfile.mkdtemp(prefix="weir-postgres-"))
        if self._owner:
            os.chown(self._folder, self._owner["user"], self._owner["group"])
        self.port = _free_port()
        self._settings = {**_SETTINGS, **settings, "unix_socket_directories": str(self._folder), "port": str(self.port)}
        self._said: deque[str] = deque(maxlen=40)
        self._process: subprocess.Popen[str] | None = None
        self._template: str | None = None
        self._numbers = count(1)
        self._databases: deque[str] = deque()
        command = [
            "initdb",
            "--no-sync",
            "--auth=trust",
            "--username=weir",
            "--encoding=UTF8",
            "--locale=C.UTF-8",
            "-D",
            "data",
        ]
        self._run(*command)

    def _run(self, program: str, *arguments: str) -> None:
        subprocess.run(
            [self._programs / program, *arguments],
            cwd=self._folder,
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=START_S,
            **self._owner,
        )

    def start(self) -> None:
        """Start it and wait until it accepts connections."""
        assert self._process is None
        options = [part for name, value in self._settings.items() for part in ("-c", f"{name}={value}")]
        self._process = subprocess.Popen(
            [self._programs / "postgres", "-D", "data", *options],
            cwd=self._folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            **self._owner,
        )
        ready = threading.Event()
        threading.Thread(target=self._listen, args=(self._process, ready), daemon=True).start()
        if not ready.wait(START_S) or self._process.poll() is not None:
            self.stop(signal.SIGKILL)
            raise AssertionError("PostgreSQL did not start:\n" + "".join(self._said))

    def _listen(self, process: "subprocess.Popen[str]", ready: threading.Event) -> None:
        """Keep the end of what the server says, and say when it is ready or gone."""
        assert process.stderr is not None
        with process.stderr:
            for line in process.stderr:
                self._said.append(line)
                if _READY in line:
                    ready.set()
        ready.set()

    def stop(self, number: signal.Signals = signal.SIGINT) -> None:
        """Stop it by signal (SIGINT: disconnect everyone; SIGQUIT: as a crash) and wait until it is gone. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(number)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_S)
            raise

    def remove(self) -> None:
        """Stop it and remove its folder."""
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def url(self, database: str) -> str:
        """The address of one of its databases."""
        return f"postgresql://weir@127.0.0.1:{self.port}/{database}"

    def sql(self, *statements: str, database: str = "postgres") -> str:
        """Run statements, each in a transaction of its own; what they answered, without headings."""
        commands = [part for statement in statements for part in ("-c", statement)]
        address = ["-h", "127.0.0.1", "-p", str(self.port), "-U", "weir", "-d", database]
        done = subprocess.run(
            [self._programs / "psql", "-XAtq", "-v", "ON_ERROR_STOP=1", *address, *commands],
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            timeout=START_S,
        )
        return done.stdout

    def create_database(self, template: str = "template0", *, keep: bool = False) -> str:
        """A new database; its URL. keep: until the server is removed, however many come after it."""
        name = f"weir_{next(self._numbers)}"
        statements = [f"CREATE DATABASE {name} TEMPLATE {template}"]
        if not keep:
            self._databases.append(name)
        if len(self._databases) > DATABASES_MAX:
            statements.append(f"DROP DATABASE {self._databases.popleft()} WITH (FORCE)")
        self.sql(*statements)
        return self.url(name)

    def migrated_database(self, *, keep: bool = False) -> str:
        """A new database of this version, without running migrations again; its URL."""
        if self._template is None:
            url = self.create_database(keep=True)
            _migrate(url)
            self._template = make_url(url).database
        assert self._template is not None
        return self.create_database(self._template, keep=keep)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _migrate(url: str) -> None:
    """On a thread of its own: a test's event loop may be running on this one."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(lambda: asyncio.run(prepare_postgres(url))).result(START_S)


_started: list[PostgresServer] = []


@cache
def shared_server() -> PostgresServer:
    """The server of this test process, started by the first who asks."""
    server = PostgresServer()
    _started.append(server)
    server.start()
    return server


def stop_servers() -> None:
    """The end of the session: stop the shared server, if it was ever started."""
    for server in _started:
        server.remove()
    _started.clear()


async def waiting_pid(connection: "asyncpg.Connection[asyncpg.Record]") -> int:
    """The server process of whoever waits for a lock in this connection's database, once somebody does."""
    async with asyncio.timeout(10):
        while True:
            await connection.execute("SELECT pg_stat_clear_snapshot()")
            waiting = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
            found = await connection.fetchval(waiting)
            if found is not None:
                return int(found)
