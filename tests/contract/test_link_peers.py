"""The ends of a link and whom they meet: coordinators that are old, new or gone, and connections of no gateway."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.contract.link_stand import (
    FLEET,
    TERMS,
    LinkStand,
    OneWriteServer,
    StandingCoordinator,
    at,
    check_both_ways,
    link_standing,
    linked,
    until,
    until_settled,
)

from weir import errors
from weir.link import coordinator_end, frames, gateway_end
from weir.messages import HoldBooked, ReattachedAll

TOKEN = "t" * 32


@pytest.fixture
async def stand() -> AsyncIterator[LinkStand]:
    async with link_standing() as standing:
        yield standing


# ── coordinators ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_wrong_token_is_final(stand: LinkStand) -> None:
    """A gateway with another token is refused for good, and opens no session."""
    coordinator = await stand.coordinator(token=TOKEN)
    gateway = stand.gateway(coordinator.path, token="x" * 32)
    with pytest.raises(errors.LinkFault) as raised:
        await gateway.running
    assert raised.value.is_final
    assert coordinator.host.sessions == {}


async def test_no_common_version_is_final(stand: LinkStand, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway that shares no version of the messages with the coordinator is refused for good."""
    coordinator = await stand.coordinator()
    monkeypatch.setattr(frames, "OLDEST_VERSION", 2)
    monkeypatch.setattr(frames, "NEWEST_VERSION", 0)
    gateway = stand.gateway(coordinator.path)
    with pytest.raises(errors.LinkFault) as raised:
        await gateway.running
    assert raised.value.is_final


async def test_an_older_coordinator_is_not_entered(stand: LinkStand) -> None:
    """A gateway that has seen a coordinator works with none of a lower epoch, and finds the right one behind it."""
    old, new = await stand.coordinator(epoch=1), await stand.coordinator(epoch=2)
    relay, path = await stand.relay(new.path)
    gateway = stand.gateway(path)
    await until_settled(gateway)
    gateway.addresses[:] = [at(old.path), at(path)]
    relay.cut()
    await until(lambda: relay.opened == 2, "it comes back")
    await check_both_ways(new, gateway, 1)
    assert gateway.lost == 0
    assert old.host.sessions == {}


async def test_an_older_coordinator_is_not_entered_after_a_loss(stand: LinkStand) -> None:
    """Also a gateway without a session works with no coordinator of a lower epoch than it has seen."""
    old, new = await stand.coordinator(epoch=1), await stand.coordinator(epoch=2)
    gateway = stand.gateway(new.path)
    await until_settled(gateway)
    gateway.addresses[:] = [at(old.path), at(new.path)]
    path = new.path
    await new.stop()
    gateway.clock.advance(TERMS.silence_ms + 1)
    await until(lambda: gateway.lost == 1 and len(old.host.sessions) > 1, "it asks the old one")
    assert not gateway.end.is_linked
    again = await stand.coordinator(epoch=2, path=path)
    await until_settled(gateway, 2)
    await check_both_ways(again, gateway, 1)
    assert all(session.received == [] for session in old.host.sessions.values())


async def test_a_newer_coordinator_is_told_first(stand: LinkStand) -> None:
    """After a restart with a higher epoch the session is renewed once, told first of all; no other is opened, nothing lost."""
    coordinator, gateway = await linked(stand)
    await coordinator.stop()
    gateway.send(1)
    again = await stand.coordinator(epoch=2, path=coordinator.path)
    await until_settled(gateway, 2)
    await check_both_ways(again, gateway, 2)
    told = again.host.only
    assert (told.received[0], told.numbers) == (ReattachedAll(), [2])
    register = told.register
    assert (register.gateway, register.former, register.reattaches) == ("gateway-1", "gateway-1.1", True)
    assert (gateway.lost, gateway.renewed) == (0, 1)
    assert len(again.host.sessions) == 1


async def test_old_and_new_gateways_side_by_side(stand: LinkStand, monkeypatch: pytest.MonkeyPatch) -> None:
    """During an upgrade a coordinator serves both versions; at the next one the new tells what it carries, the old lost it."""

    def greeting(session: str, token: str, **more: Any) -> frames.Hello:
        newest = 1 if session.startswith("gateway-1.") else frames.NEWEST_VERSION
        return frames.Hello(session, token, newest_version=newest, **more)

    monkeypatch.setattr(gateway_end, "Hello", greeting)
    coordinator = await stand.coordinator()
    old, new = stand.gateway(coordinator.path), stand.gateway(coordinator.path)
    for gateway in (old, new):
        await until_settled(gateway)
    await coordinator.stop()
    again = await stand.coordinator(epoch=2, path=coordinator.path)
    for gateway in (old, new):
        await until_settled(gateway, 2)
    assert [(gateway.lost, gateway.renewed) for gateway in (old, new)] == [(1, 1), (0, 1)]
    told = {found.register.gateway: found for found in again.host.sessions.values()}
    assert [told[name].register.reattaches for name in ("gateway-1", "gateway-2")] == [False, True]
    assert (told["gateway-1"].received, told["gateway-2"].received) == ([], [ReattachedAll()])


async def test_a_dead_address_is_passed_over(stand: LinkStand) -> None:
    """A gateway finds its coordinator behind an address where nobody listens."""
    coordinator = await stand.coordinator()
    gateway = stand.gateway(stand.path(), coordinator.path)
    await until_settled(gateway)


async def test_a_stalled_address_is_passed_over(stand: LinkStand, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway finds its coordinator behind an address that takes connections and never answers."""
    monkeypatch.setattr(gateway_end, "_CONNECT_S", 0.1)
    coordinator = await stand.coordinator()
    relay, path = await stand.relay(coordinator.path)
    relay.holds_answers = True
    gateway = stand.gateway(path, coordinator.path)
    await until_settled(gateway)
    assert relay.opened == 1


async def test_cancelled_while_it_greets(stand: LinkStand) -> None:
    """A gateway that ends before it was welcomed closes its connection."""
    coordinator = await stand.coordinator()
    relay, path = await stand.relay(coordinator.path)
    relay.holds_answers = True
    gateway = stand.gateway(path)
    await until(lambda: relay.passed_up > 0, "it greets")
    await gateway.stop()
    await until(lambda: relay.is_idle, "its connection ends")


# ── connections of others ────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_connection_that_never_greets(stand: LinkStand, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection without a greeting is closed after its bound, and others live on."""
    monkeypatch.setattr(coordinator_end, "_GREETING_S", 0.1)
    coordinator, gateway = await linked(stand)
    assert await answer_to(coordinator, b"") == b""
    await check_both_ways(coordinator, gateway, 1)
    assert gateway.inbox.messages.count(FLEET) == 1


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: weir\r\n\r\n",
        frames.frame(frames.Kind.BATCH, frames.encode([]), epoch=1, number=1),
        frames.frame(frames.Kind.HELLO, b"\xc1"),
        frames.frame(frames.Kind.HELLO, frames.encode(["x"])),
    ],
    ids=["http", "no greeting", "no message", "another message"],
)
async def test_rubbish(stand: LinkStand, said: bytes) -> None:
    """A connection that begins with anything but a greeting is closed at once, and others live on."""
    coordinator, gateway = await linked(stand)
    assert await answer_to(coordinator, said) == b""
    await check_both_ways(coordinator, gateway, 1)
    assert gateway.lost == 0


@pytest.mark.parametrize(
    ("number", "body", "received"),
    [(1, b"\xc1", 0), (1, frames.encode([1]), 0), (2, frames.encode([]), 0), (1, frames.encode([]), 1_000)],
    ids=["no messages", "other messages", "a gap", "what was never sent"],
)
async def test_a_broken_session_is_lost(stand: LinkStand, number: int, body: bytes, received: int) -> None:
    """A session in which something comes that no repetition can mend ends, once, and others live on."""
    coordinator, gateway = await linked(stand)
    hello = frames.frame(frames.Kind.HELLO, frames.encode(frames.Hello("broken", "")))
    batch = frames.frame(frames.Kind.BATCH, body, epoch=1, number=number, received=received)
    answer = await answer_to(coordinator, hello + batch)
    assert frames.FrameSplitter().feed(answer)[0].kind is frames.Kind.WELCOME
    assert coordinator.host.lost == ["broken"]
    await check_both_ways(coordinator, gateway, 1)
    assert gateway.lost == 0


@pytest.mark.parametrize("frames_seen", [0, 1_000], ids=["a gap", "what was never sent"])
async def test_a_session_broken_by_its_coordinator(stand: LinkStand, frames_seen: int) -> None:
    """A gateway whose coordinator says what no repetition can mend loses its session, and does not repeat it for ever."""
    path, server = stand.path(), OneWriteServer([HoldBooked(1)], closes=False, number=2, received=frames_seen)
    listening = await asyncio.get_running_loop().create_unix_server(lambda: server, str(path))
    try:
        gateway = stand.gateway(path)
        await until(lambda: gateway.lost >= 1, "the session is lost")
        await gateway.stop()
        assert gateway.inbox.messages == []
    finally:
        listening.close()


async def test_taken_up_with_too_much(stand: LinkStand) -> None:
    """A greeting that has more of a session than was sent ends the session, and does not keep it from its gateway for ever."""
    coordinator, gateway = await linked(stand)
    hello = frames.encode(frames.Hello("gateway-1.1", ""))
    answer = await answer_to(coordinator, frames.frame(frames.Kind.HELLO, hello, epoch=1, received=1_000))
    assert len(frames.FrameSplitter().feed(answer)) <= 1
    await until_settled(gateway, 2)
    await check_both_ways(coordinator, gateway, 1)
    assert (gateway.lost, coordinator.host.lost) == (1, ["gateway-1.1"])


async def test_a_name_of_another(stand: LinkStand) -> None:
    """A greeting that opens a session of a name that is taken opens none, and harms none."""
    coordinator, gateway = await linked(stand)
    hello = frames.frame(frames.Kind.HELLO, frames.encode(frames.Hello("gateway-1.1", "")))
    assert await answer_to(coordinator, hello) == b""
    await check_both_ways(coordinator, gateway, 1)
    assert (gateway.lost, coordinator.host.lost) == (0, [])


async def test_a_name_that_a_former_coordinator_knew(stand: LinkStand) -> None:
    """A greeting under a name that is kept for another opens nothing and harms none; once it is free, it is anybody's."""
    coordinator, gateway = await linked(stand)
    coordinator.host.kept.add("kept.1")
    hello = frames.frame(frames.Kind.HELLO, frames.encode(frames.Hello("kept.1", "", reattaches=True)))
    assert await answer_to(coordinator, hello) == b""
    assert coordinator.end.sessions == ("gateway-1.1",)
    await check_both_ways(coordinator, gateway, 1)
    assert (gateway.lost, coordinator.host.lost) == (0, [])
    coordinator.host.kept.clear()
    broken = frames.frame(frames.Kind.BATCH, b"", epoch=2)
    answer = await answer_to(coordinator, hello + broken)
    assert frames.FrameSplitter().feed(answer)[0].kind is frames.Kind.WELCOME
    assert "kept.1" in coordinator.host.open


async def answer_to(coordinator: StandingCoordinator, said: bytes) -> bytes:
    """What a connection that says this gets until it is closed."""
    reader, writer = await asyncio.open_unix_connection(str(coordinator.path))
    try:
        async with asyncio.timeout(2):
            writer.write(said)
            with contextlib.suppress(ConnectionError):
                return await reader.read()
        return b""
    finally:
        writer.transport.abort()


async def test_too_many_links(stand: LinkStand, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections over the bound are closed at once; as one of the others goes, a gateway gets in."""
    monkeypatch.setattr(coordinator_end, "LINKS_MAX", 1)
    coordinator, first = await linked(stand)
    second = stand.gateway(coordinator.path)
    assert await answer_to(coordinator, b"") == b""
    await check_both_ways(coordinator, first, 1)
    assert not second.end.is_linked
    await first.stop()
    await until_settled(second)
