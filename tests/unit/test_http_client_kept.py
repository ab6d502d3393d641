"""The engine client's kept connections: which one carries a request, what is sent again, and how many are kept."""

import asyncio

import pytest
from tests.unit.http_peer import LONG_MS, OK, Peer, Run, get, http_client, peer_server

from weir.engines.http_client import IDLE_CLOSE_MS
from weir.errors import ReplicaLost


def test_a_connection_is_used_again(run: Run) -> None:
    """Requests one after another share a connection, and say exactly what we decided to say."""
    seen: list[tuple[int, bytes]] = []

    async def serve(peer: Peer) -> None:
        while request := await peer.request():
            seen.append((peer.number, request))
            peer.send(OK)

    async def main() -> None:
        async with peer_server(serve) as url, http_client() as client:
            for _ in range(2):
                answer = await client.request(get(url, body=b"{}", api_key="k"), timeout_ms=LONG_MS)
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
        async with peer_server(serve) as url, http_client() as client:
            for _ in range(2):
                assert (await client.request(get(url), timeout_ms=LONG_MS)).body == b"ok"
            assert served == [1, 1, 2]

    run(main())


@pytest.mark.parametrize("how", ["cut", "close"])
def test_what_an_engine_worked_on_is_not_sent_again(run: Run, how: str) -> None:
    """A kept connection that is lost later than any idle close crosses a request is a lost replica: it may have generated."""
    served: list[int] = []

    async def serve(peer: Peer) -> None:
        while await peer.request():
            served.append(peer.number)
            if len(served) == 2:
                await asyncio.sleep(1.5 * IDLE_CLOSE_MS / 1e3)  # it works
                getattr(peer, how)()
                return
            peer.send(OK)

    async def main() -> None:
        async with peer_server(serve) as url, http_client() as client:
            await client.request(get(url), timeout_ms=LONG_MS)
            with pytest.raises(ReplicaLost):
                await client.request(get(url), timeout_ms=LONG_MS)
            assert served == [1, 1]

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
        async with peer_server(serve) as url, http_client() as client:
            with pytest.raises(ReplicaLost):
                await client.request(get(url), timeout_ms=LONG_MS)
            assert served == [1]
            await client.request(get(url), timeout_ms=LONG_MS)
            with pytest.raises(ReplicaLost):
                await client.request(get(url), timeout_ms=LONG_MS)
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
        async with peer_server(serve) as url, http_client() as client:
            await client.request(get(url), timeout_ms=LONG_MS)
            with pytest.raises(ReplicaLost):
                await client.request(get(url), timeout_ms=LONG_MS)
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
        async with peer_server(serve) as url, http_client(idle_per_origin_max=1) as client:
            await asyncio.gather(*(client.request(get(url), timeout_ms=LONG_MS) for _ in range(3)))
            await two_gone.wait()
            assert len(client.connections) == 1

    run(main())


def test_a_busy_pool_keeps_its_connections(run: Run) -> None:
    """As many requests at once as a large engine has lanes, again and again, connect only once each."""
    lanes, numbers = 80, set[int]()
    together = asyncio.Barrier(lanes)

    async def serve(peer: Peer) -> None:
        while await peer.request():
            numbers.add(peer.number)
            await together.wait()
            peer.send(OK)

    async def main() -> None:
        async with peer_server(serve) as url, http_client() as client:
            for _ in range(3):
                await asyncio.gather(*(client.request(get(url), timeout_ms=LONG_MS) for _ in range(lanes)))
            assert numbers == set(range(1, lanes + 1))

    run(main())
