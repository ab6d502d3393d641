"""Closing an exchange at the moment its connection is made, on the event loop that the product runs on."""

import asyncio

import uvloop

from weir.engines.http_client import HttpClient
from weir.engines.http_exchange import HttpRequest
from weir.errors import EngineFault

TRIES = 20
TURNS_MAX = 100_000
WAIT_S = 5


class Nobody:
    """A receiver that expects no call."""

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        raise AssertionError("no answer was sent")

    def on_body(self, data: bytes) -> None:
        raise AssertionError("no answer was sent")

    def on_complete(self) -> None:
        raise AssertionError("no answer was sent")

    def on_lost(self, fault: EngineFault) -> None:
        raise AssertionError("the exchange was closed before")


async def close_when_just_connected(url: str) -> None:
    """One exchange that is closed in the turn of the loop after its connection was made."""
    client = HttpClient()
    exchange = client.open(HttpRequest("GET", url, "/"), Nobody())
    for _ in range(TURNS_MAX):
        if exchange.bound:
            break
        await asyncio.sleep(0)
    exchange.close()
    async with asyncio.timeout(WAIT_S):
        await exchange.wait_closed()
    assert not client.connections
    await client.aclose()


async def serve_and_close() -> None:
    """A server that never answers, and clients that leave it at once."""

    async def never_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(never_answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        for _ in range(TRIES):
            await close_when_just_connected(f"http://127.0.0.1:{port}")


def test_a_connection_that_was_just_made_is_confirmed_closed() -> None:
    """A cancel in that moment is confirmed like any other: a lost confirmation would keep the replica's slot for ever."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve_and_close())
