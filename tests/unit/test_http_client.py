"""The engine client: which connection carries a request, what is tried again, and that nothing outlives a close."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop

from weir.engines.http_client import HEAD_BYTES_MAX, HttpClient
from weir.engines.http_exchange import HttpRequest
from weir.errors import EngineError, EngineFault, ReplicaLost, Stalled

BOUND_S = 10
LONG_MS = 10_000
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"

Serve = Callable[["Peer"], Awaitable[None]]


class Peer:
    """A server's side of one connection. number: 1 for the first connection of the server."""

    def __init__(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.number = number
        self._reader, self._writer = reader, writer

    async def request(self) -> bytes:
        """The next request's head and body, b"" when the client is gone."""
        try:
            head = await self._reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            return head + await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError):
            return b""

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    def cut(self) -> None:
        self._writer.transport.abort()

    def close(self) -> None:
        self._writer.close()


@asynccontextmanager
async def _server(serve: Serve) -> AsyncIterator[str]:
    """A server on loopback whose every connection is served by `serve`; its URL."""
    writers: list[asyncio.StreamWriter] = []
    tasks: set[asyncio.Task[None]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        writers.append(writer)
        await serve(Peer(len(writers), reader, writer))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for writer in writers:
            writer.transport.abort()
        await asyncio.gather(*tasks)


class Receiver:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.status = 0
        self.bodies: list[bytes] = []
        self.fault: EngineFault | None = None
        self.complete = False
        self.got_body, self.ended = asyncio.Event(), asyncio.Event()

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        self.status = status

    def on_body(self, data: bytes) -> None:
        self.bodies.append(data)
        self.got_body.set()

    def on_complete(self) -> None:
        self.complete = True
        self.ended.set()

    def on_lost(self, fault: EngineFault) -> None:
        self.fault = fault
        self.ended.set()


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, None]], None]:
    """Runs a coroutine on one of both loops, within a bound."""

    def run_bounded(main: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(asyncio.wait_for(main, BOUND_S))

    return run_bounded


Run = Callable[[Coroutine[Any, Any, None]], None]


@asynccontextmanager
async def _client(**options: Any) -> AsyncIterator[HttpClient]:
    client = HttpClient(**options)
    try:
        yield client
    finally:
        await client.aclose()
        assert not client.connections


def _get(url: str, path: str = "/x", **fields: Any) -> HttpRequest:
    return HttpRequest("GET", url, path, **fields)


def test_a_connection_is_used_again(run: Run) -> None:
    """Requests one after another share a connection, and say exactly what we decided to say."""
    seen: list[tuple[int, bytes]] = []

    async def serve(peer: Peer) -> None:
        while request := await peer.request():
            seen.append((peer.number, request))
            peer.send(OK)

    async def main() -> None:
        async with _server(serve) as url, _client() as client:
            for _ in range(2):
                answer = await client.request(_get(url, body=b"{}", api_key="k"), timeout_ms=LONG_MS)
                assert (answer.status, answer.headers, answer.body) == (200, {b"content-length": b"2"}, b"ok")
            host = url.removeprefix("http://")
        expected = (
            f"GET /x HTTP/1.1\r\nHost: {host}\r\nAccept: */*\r\nAuthorization: Bearer k\r\n"
            "Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
        ).encode()
        assert seen == [(1, expected), (1, expected)]

    run(main())


@pytest.mark.parametrize("how", ["cut", "close"])
def test_a_kept_connection_that_died_is_replaced_once(run: Run, how: str) -> None:
    """A kept connection that closes before any byte of the response costs one retry, on a fresh connection."""
    served: list[int] = []

    async def serve(peer: Peer) -> None:
        while await peer.request():
            served.append(peer.number)
            if peer.number == 1 and served.count(1) == 2:
                getattr(peer, how)()
                return
            peer.send(OK)

    async def main() -> None:
        async with _server(serve) as url, _client() as client:
            for _ in range(2):
                assert (await client.request(_get(url), timeout_ms=LONG_MS)).body == b"ok"
            assert served == [1, 1, 2]

    run(main())


def test_nothing_is_tried_again_on_a_fresh_connection(run: Run) -> None:
    """A fresh connection that closes without an answer is a lost replica, at the first attempt and at the retry."""
    served: list[int] = []

    async def serve(peer: Peer) -> None:
        while await peer.request():
            served.append(peer.number)
            if len(served) == 2:
                peer.send(OK)
                continue
            peer.cut()
            return

    async def main() -> None:
        async with _server(serve) as url, _client() as client:
            with pytest.raises(ReplicaLost):
                await client.request(_get(url), timeout_ms=LONG_MS)
            assert served == [1]
            await client.request(_get(url), timeout_ms=LONG_MS)
            with pytest.raises(ReplicaLost):
                await client.request(_get(url), timeout_ms=LONG_MS)
            assert served == [1, 2, 2, 3]

    run(main())


def test_nothing_is_tried_again_after_a_byte(run: Run) -> None:
    """A kept connection that closes within the response's head is a lost replica."""
    served: list[int] = []

    async def serve(peer: Peer) -> None:
        while await peer.request():
            served.append(peer.number)
            peer.send(OK if len(served) == 1 else b"HTTP/1.1 2")
            if len(served) == 2:
                peer.close()

    async def main() -> None:
        async with _server(serve) as url, _client() as client:
            await client.request(_get(url), timeout_ms=LONG_MS)
            with pytest.raises(ReplicaLost):
                await client.request(_get(url), timeout_ms=LONG_MS)
            assert served == [1, 1]

    run(main())


def test_kept_connections_are_bounded(run: Run) -> None:
    """Of many connections only so many are kept, and the others are closed."""
    gone: list[int] = []
    together = asyncio.Barrier(3)
    two_gone = asyncio.Event()

    async def serve(peer: Peer) -> None:
        await peer.request()
        await together.wait()
        peer.send(OK)
        assert await peer.request() == b""
        gone.append(peer.number)
        if len(gone) == 2:
            two_gone.set()

    async def main() -> None:
        async with _server(serve) as url, _client(idle_per_origin_max=1) as client:
            await asyncio.gather(*(client.request(_get(url), timeout_ms=LONG_MS) for _ in range(3)))
            await two_gone.wait()
            assert len(client.connections) == 1

    run(main())


@pytest.mark.parametrize(
    ("raw", "body"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\nto the end", b"to the end"),
        (b"HTTP/1.0 200 OK\r\n\r\nold", b"old"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, b"ok"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n", b"abc"),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 1\r\n\r\nx", b"x"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        (OK + OK, b"ok"),
    ],
)
def test_bodies(run: Run, raw: bytes, body: bytes) -> None:
    """Every way of ending a body is understood; a connection that said too much or is to close isn't used again."""

    async def serve(peer: Peer) -> None:
        await peer.request()
        peer.send(raw)
        peer.close()

    async def main() -> None:
        async with _server(serve) as url, _client() as client:
            for _ in range(2):
                assert (await client.request(_get(url), timeout_ms=LONG_MS)).body == body

    run(main())


@pytest.mark.parametrize(
    ("raw", "fault"),
    [
        (b"SSH-2.0-x\r\n", EngineError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n", EngineError),
        (b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", EngineError),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * HEAD_BYTES_MAX, EngineError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nab", ReplicaLost),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n", ReplicaLost),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2000000\r\n\r\n" + b"x" * 2_000_000, EngineError),
    ],
)
def test_broken_answers(run: Run, raw: bytes, fault: type[EngineFault]) -> None:
    """What is not HTTP or too large is the engine's error; what is cut is a lost replica."""

    async def serve(peer: Peer) -> None:
        await peer.request()
        peer.send(raw)
        peer.close()

    async def main() -> None:
        async with _server(serve) as url, _client() as client:
            with pytest.raises(fault):
                await client.request(_get(url), timeout_ms=LONG_MS)

    run(main())


def test_one_call_per_read(run: Run) -> None:
    """All chunks that arrive in one read reach the receiver in one call."""

    async def serve(peer: Peer) -> None:
        await peer.request()
        peer.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 50 + b"0\r\n\r\n")

    async def main() -> None:
        async with _server(serve) as url, _client() as client:
            receiver = Receiver()
            client.open(_get(url), receiver)
            await receiver.ended.wait()
            assert receiver.complete and receiver.bodies == [b"a" * 50]

    run(main())


def test_pause_and_resume(run: Run) -> None:
    """A paused exchange reads nothing, however much is sent, and the connection is usable after it."""
    size = 8 * 1024 * 1024

    async def serve(peer: Peer) -> None:
        while request := await peer.request():
            small = request.startswith(b"GET /small")
            peer.send(OK if small else b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + b"x" * size)

    async def main() -> None:
        async with _server(serve) as url, _client() as client:
            receiver = Receiver()
            exchange = client.open(_get(url), receiver)
            exchange.pause()
            exchange.pause()
            await client.request(_get(url, "/small"), timeout_ms=LONG_MS)
            assert not receiver.bodies
            exchange.resume()
            await receiver.got_body.wait()
            exchange.pause()
            so_far = len(receiver.bodies)
            await client.request(_get(url, "/small"), timeout_ms=LONG_MS)
            assert len(receiver.bodies) == so_far
            exchange.resume()
            exchange.resume()
            await receiver.ended.wait()
            assert sum(map(len, receiver.bodies)) == size
            for _ in range(3):
                assert (await client.request(_get(url, "/small"), timeout_ms=LONG_MS)).body == b"ok"

    run(main())


@pytest.mark.parametrize("when", ["connecting", "waiting", "reading"])
def test_close_cuts_at_once(run: Run, when: str) -> None:
    """A closed exchange's server sees the end of the connection, and the receiver hears nothing more."""
    arrived, seen_gone = asyncio.Event(), asyncio.Event()

    async def serve(peer: Peer) -> None:
        if not await peer.request():
            return
        arrived.set()
        if when == "reading":
            peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nx")
        assert await peer.request() == b""
        seen_gone.set()

    async def main() -> None:
        async with _server(serve) as url, _client() as client:
            receiver = Receiver()
            exchange = client.open(_get(url), receiver)
            if when != "connecting":
                await (receiver.got_body if when == "reading" else arrived).wait()
            exchange.close()
            exchange.close()
            await exchange.wait_closed()
            if when != "connecting":
                await seen_gone.wait()
            assert exchange.sent is (when != "connecting")
            assert not client.connections and not receiver.ended.is_set()

    run(main())


def test_refused(run: Run) -> None:
    """Nobody listening is a lost replica, told later and not from within the call."""

    async def main() -> None:
        async with _client() as client:
            receiver = Receiver()
            exchange = client.open(_get(f"http://127.0.0.1:{_closed_port()}"), receiver)
            assert not receiver.ended.is_set()
            await receiver.ended.wait()
            assert isinstance(receiver.fault, ReplicaLost)
            assert not exchange.sent

    run(main())


@pytest.mark.parametrize(
    ("url", "api_key"), [("engine", None), ("http://127.0.0.1:1", "a\r\nb: c"), ("http://127.0.0.1:1", "ż")]
)
def test_what_cannot_be_sent(run: Run, url: str, api_key: str | None) -> None:
    """A bad address or key is told as a fault, later."""

    async def main() -> None:
        async with _client() as client:
            receiver = Receiver()
            exchange = client.open(_get(url, api_key=api_key), receiver)
            exchange.pause()
            exchange.resume()
            assert not receiver.ended.is_set()
            await receiver.ended.wait()
            assert isinstance(receiver.fault, EngineError)

    run(main())


def test_connecting_is_bounded(run: Run) -> None:
    """A host that never answers a connection attempt is lost after the bound."""

    async def main() -> None:
        async with _client(connect_ms=100) as client:
            with _full_listener() as address, pytest.raises(ReplicaLost):
                await client.request(_get(f"http://127.0.0.1:{address}"), timeout_ms=LONG_MS)

    run(main())


def test_a_control_call_is_bounded(run: Run) -> None:
    """A server that does not answer is Stalled after the bound, and its connection is cut."""
    seen_gone = asyncio.Event()

    async def serve(peer: Peer) -> None:
        await peer.request()
        assert await peer.request() == b""
        seen_gone.set()

    async def main() -> None:
        async with _server(serve) as url, _client() as client:
            with pytest.raises(Stalled):
                await client.request(_get(url), timeout_ms=100)
            await seen_gone.wait()

    run(main())


def test_the_end_of_the_client(run: Run) -> None:
    """Closing the client ends what runs as a lost replica, and nothing can be sent afterwards."""
    arrived = asyncio.Event()

    async def serve(peer: Peer) -> None:
        await peer.request()
        arrived.set()
        await peer.request()

    async def main() -> None:
        async with _server(serve) as url, _client() as client:
            running, connecting, late = Receiver(), Receiver(), Receiver()
            client.open(_get(url), running)
            await arrived.wait()
            client.open(_get(url), connecting)
            await client.aclose()
            client.open(_get(url), late)
            await late.ended.wait()
            assert isinstance(running.fault, ReplicaLost) and isinstance(connecting.fault, ReplicaLost)
            assert isinstance(late.fault, EngineError)

    run(main())


def _closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class _full_listener:  # noqa: N801 - reads as the context it is
    """A listener whose queue of connections is full, so that the next attempt gets no answer; its port."""

    def __enter__(self) -> int:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=0)
        address = self._listener.getsockname()
        self._waiting = [socket.socket() for _ in range(3)]
        for waiting in self._waiting:
            waiting.setblocking(False)
            waiting.connect_ex(address)
        return int(address[1])

    def __exit__(self, *_: object) -> None:
        for held in (*self._waiting, self._listener):
            held.close()


def test_tls_that_cannot_be_trusted(run: Run) -> None:
    """A server that cannot prove who it is is unreachable; nothing is sent to it."""

    async def serve(peer: Peer) -> None:
        peer.close()

    async def main() -> None:
        async with _server(serve) as url, _client() as client:
            with pytest.raises(ReplicaLost):
                await client.request(_get(url.replace("http:", "https:")), timeout_ms=LONG_MS)

    run(main())
