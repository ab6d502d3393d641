"""The engine client: what an answer means, backpressure, bounds, and that nothing outlives a close."""

import asyncio
import socket
from contextlib import suppress

import pytest
from tests.unit.http_peer import LONG_MS, OK, Peer, Receiver, Run, get, http_client, peer_server

from weir.engines.http_client import HEAD_BYTES_MAX
from weir.errors import EngineError, EngineFault, ReplicaLost, Stalled


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
        async with peer_server(serve) as url, http_client() as client:
            for _ in range(2):
                assert (await client.request(get(url), timeout_ms=LONG_MS)).body == body

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
        async with peer_server(serve) as url, http_client() as client:
            with pytest.raises(fault):
                await client.request(get(url), timeout_ms=LONG_MS)

    run(main())


def test_one_call_per_read(run: Run) -> None:
    """All chunks that arrive in one read reach the receiver in one call."""

    async def serve(peer: Peer) -> None:
        await peer.request()
        peer.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 50 + b"0\r\n\r\n")

    async def main() -> None:
        async with peer_server(serve) as url, http_client() as client:
            receiver = Receiver()
            client.open(get(url), receiver)
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
        async with peer_server(serve) as url, http_client() as client:
            receiver = Receiver()
            exchange = client.open(get(url), receiver)
            exchange.pause()
            exchange.pause()
            await client.request(get(url, "/small"), timeout_ms=LONG_MS)
            assert not receiver.bodies
            exchange.resume()
            await receiver.got_body.wait()
            exchange.pause()
            so_far = len(receiver.bodies)
            await client.request(get(url, "/small"), timeout_ms=LONG_MS)
            assert len(receiver.bodies) == so_far
            exchange.resume()
            exchange.resume()
            await receiver.ended.wait()
            assert sum(map(len, receiver.bodies)) == size
            for _ in range(3):
                assert (await client.request(get(url, "/small"), timeout_ms=LONG_MS)).body == b"ok"

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
        async with peer_server(serve) as url, http_client() as client:
            receiver = Receiver()
            exchange = client.open(get(url), receiver)
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
        async with http_client() as client:
            receiver = Receiver()
            exchange = client.open(get(f"http://127.0.0.1:{_closed_port()}"), receiver)
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
        async with http_client() as client:
            receiver = Receiver()
            exchange = client.open(get(url, api_key=api_key), receiver)
            exchange.pause()
            exchange.resume()
            assert not receiver.ended.is_set()
            await receiver.ended.wait()
            assert isinstance(receiver.fault, EngineError)

    run(main())


def test_connecting_is_bounded(run: Run) -> None:
    """A host that never answers a connection attempt is lost after the bound."""

    async def main() -> None:
        async with http_client(connect_ms=100) as client:
            with _full_listener() as address, pytest.raises(ReplicaLost) as caught:
                await client.request(get(f"http://127.0.0.1:{address}"), timeout_ms=LONG_MS)
            assert not caught.value.reached

    run(main())


def test_a_request_that_kills_its_server_at_once_has_reached_it(run: Run) -> None:
    """Protects replicas from poison: sent on a kept connection, and the server is gone before a byte came back."""

    async def main() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                while b"/poison" not in await reader.readuntil(b"\r\n\r\n"):
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
                server.close()
                writer.transport.abort()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with http_client() as client:
            await client.request(get(url, "/fine"), timeout_ms=LONG_MS)
            with pytest.raises(ReplicaLost) as caught:
                await client.request(get(url, "/poison"), timeout_ms=LONG_MS)
            assert caught.value.reached

    run(main())


def test_a_control_call_is_bounded(run: Run) -> None:
    """A server that does not answer is Stalled after the bound, and its connection is cut."""
    seen_gone = asyncio.Event()

    async def serve(peer: Peer) -> None:
        await peer.request()
        assert await peer.request() == b""
        seen_gone.set()

    async def main() -> None:
        async with peer_server(serve) as url, http_client() as client:
            with pytest.raises(Stalled):
                await client.request(get(url), timeout_ms=100)
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
        async with peer_server(serve) as url, http_client() as client:
            running, connecting, late = Receiver(), Receiver(), Receiver()
            client.open(get(url), running)
            await arrived.wait()
            client.open(get(url), connecting)
            await client.aclose()
            client.open(get(url), late)
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
        async with peer_server(serve) as url, http_client() as client:
            with pytest.raises(ReplicaLost):
                await client.request(get(url.replace("http:", "https:")), timeout_ms=LONG_MS)

    run(main())
