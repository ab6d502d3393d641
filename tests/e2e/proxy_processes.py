"""nginx and HAProxy in front of a cell, configured by the blocks of the page that recommends them, and an HTTP/2 client.

Of a block only addresses, certificates and time-outs are replaced; each replacement must be found. The programs are the
system's: `make proxies` installs them.
"""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from tests.docs.pages import blocks_of
from tests.e2e.running_cell import kill_if_running, unused_ports
from tests.e2e.sse_client import WAIT_S
from tests.e2e.surfaces import SURFACES, Shown
from tests.event_streams import Event, EventReader

PAGE = "docs/howto/put-a-proxy-in-front.md"
START_S = 20.0
NGINX_AROUND = """
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log {folder}/nginx-error.log;
events {{ worker_connections 256; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    {block}
}}
"""


def program(name: str) -> str:
    """The path of a program. Raises AssertionError that says how to get it."""
    found = shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/bin"]))
    assert found is not None, f"the tests of proxies need {name}; run: make proxies (on Debian: apt-get install {name})"
    return found


def block_of(language: str) -> str:
    """The page's block for a proxy."""
    [block] = [block.text for block in blocks_of(PAGE) if block.language == language]
    return block


def replaced(text: str, changes: Mapping[str, str]) -> str:
    """The text with each of these replaced, all of which it has."""
    for before, after in changes.items():
        assert before in text, f"{PAGE} no longer has {before!r}"
        text = text.replace(before, after)
    return text


@dataclass(frozen=True)
class Certificate:
    """A certificate for 127.0.0.1 that signs itself. both: it and its key in one file."""

    public: Path
    key: Path
    both: Path


def new_certificate(folder: Path) -> Certificate:
    """Made by openssl, for two days."""
    made = Certificate(folder / "api.pem", folder / "api.key", folder / "both.pem")
    command = [program("openssl"), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", made.key, "-out", made.public], check=True, capture_output=True, timeout=START_S)
    made.both.write_bytes(made.public.read_bytes() + made.key.read_bytes())
    return made


@dataclass(frozen=True)
class Proxy:
    """A proxy that listens with TLS."""

    name: str
    url: str
    certificate: Certificate


def nginx_command(folder: Path, api: str, port: int, certificate: Certificate, idle: str) -> list[str]:
    """nginx with the page's block."""
    changes = {
        "127.0.0.1:8080": api,
        "listen 443 ssl http2": f"listen 127.0.0.1:{port} ssl http2",
        "/etc/weir/api.pem": str(certificate.public),
        "/etc/weir/api.key": str(certificate.key),
        "proxy_read_timeout 300s": f"proxy_read_timeout {idle}",
    }
    path = folder / "nginx.conf"
    path.write_text(NGINX_AROUND.format(folder=folder, block=replaced(block_of("nginx"), changes)), encoding="utf-8")
    return [program("nginx"), "-e", str(folder / "nginx-start.log"), "-c", str(path)]


def haproxy_command(folder: Path, api: str, port: int, certificate: Certificate, idle: str) -> list[str]:
    """HAProxy with the page's block."""
    changes = {
        "127.0.0.1:8080": api,
        "bind :443": f"bind 127.0.0.1:{port}",
        "/etc/weir/api-and-key.pem": str(certificate.both),
        "timeout server 300s": f"timeout server {idle}",
        "timeout client 60s": f"timeout client {idle}",
    }
    path = folder / "haproxy.cfg"
    path.write_text(replaced(block_of("haproxy"), changes), encoding="utf-8")
    return [program("haproxy"), "-db", "-f", str(path)]


COMMANDS = {"nginx": nginx_command, "haproxy": haproxy_command}


@contextmanager
def running_proxy(name: str, folder: Path, api: str, idle: str) -> Iterator[Proxy]:
    """One proxy in front of a base URL. idle: its bound of silence, towards Weir and towards clients."""
    folder.mkdir()
    certificate, port = new_certificate(folder), unused_ports(1)
    command = COMMANDS[name](folder, urlsplit(api).netloc, port, certificate, idle)
    log = folder / "output.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=folder)
    try:
        deadline = time.monotonic() + START_S
        while not listens(port):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text(errors="replace")
            time.sleep(0.02)
        yield Proxy(name, f"https://127.0.0.1:{port}", certificate)
    finally:
        process.send_signal(signal.SIGTERM)  # at once, also with streams open
        try:
            process.wait(START_S)
        except subprocess.TimeoutExpired:
            kill_if_running(process)


def listens(port: int) -> bool:
    """Whether a connection is accepted."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


@dataclass
class ProxiedCall:
    """A request through a proxy, by a client process that speaks HTTP/2. seen: the events read so far."""

    surface: str
    process: asyncio.subprocess.Process
    protocol: str = ""
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    seen: list[Event] = field(default_factory=list)
    parsed: EventReader = field(default_factory=EventReader)

    async def head(self) -> int:
        """The status, once the headers are here."""
        if not self.status:
            assert self.process.stdout is not None
            raw = await asyncio.wait_for(self.process.stdout.readuntil(b"\r\n\r\n"), WAIT_S)
            first, *lines = raw.decode("latin-1").split("\r\n")
            self.headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines if line)}
            self.protocol, status = first.split(" ")[:2]
            self.status = int(status)
        return self.status

    async def read_until(self, text: str) -> None:
        """Read events until they have shown this text."""
        await self.head()
        assert self.process.stdout is not None
        async with asyncio.timeout(WAIT_S):
            while SURFACES[self.surface].text(self.seen) != text:
                piece = await self.process.stdout.read(65_536)
                assert piece, f"it ended with {self.seen}"
                self.seen += self.parsed.feed(piece)

    async def shown(self) -> Shown:
        """The whole answer."""
        await self.head()
        assert self.process.stdout is not None
        rest = await asyncio.wait_for(self.process.stdout.read(-1), 2 * WAIT_S)
        assert await asyncio.wait_for(self.process.wait(), WAIT_S) == 0, "the client calls it a whole answer"
        if self.headers["content-type"].startswith("text/event-stream"):
            self.seen += self.parsed.feed(rest)
            self.parsed.close()
            return SURFACES[self.surface].shown_stream(self.seen)
        return SURFACES[self.surface].shown_whole(self.status, self.headers, msgspec.json.decode(rest))

    def leave(self) -> None:
        """End the client, and its connection with it."""
        self.process.kill()


@asynccontextmanager
async def through(
    proxy: Proxy, surface: str, body: Mapping[str, Any], headers: Mapping[str, str]
) -> AsyncIterator[ProxiedCall]:
    """Send one generation through a proxy with HTTP/2; the client ends with the block."""
    command = [program("curl"), "-sS", "-N", "-i", "--http2", "--cacert", str(proxy.certificate.public), "--data-binary", "@-"]
    for name, value in {"content-type": "application/json", "expect": "", **headers}.items():
        command += ["-H", f"{name}: {value}" if value else f"{name}:"]
    process = await asyncio.create_subprocess_exec(
        *command,
        proxy.url + SURFACES[surface].path,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(body))
        process.stdin.close()
        yield ProxiedCall(surface, process)
    finally:
        if process.returncode is None:
            process.kill()
        await asyncio.wait_for(process.wait(), WAIT_S)
