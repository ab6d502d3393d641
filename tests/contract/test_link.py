"""The link between a gateway's process and the coordinator's: each message once and in order, whatever breaks in between."""

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
from tests.contract.link_stand import (
    FLEET,
    TERMS,
    LinkStand,
    OneWriteServer,
    check_both_ways,
    link_standing,
    linked,
    relayed,
    until,
    until_settled,
)

from weir.core.registry.snapshot import Snapshot
from weir.core.tenancy import ApiKey, Tenant
from weir.link import endpoint
from weir.link.channel import Channel
from weir.messages import Found, HoldBooked

THOUSANDS = 3_000
SLIPPED_MS = 100
TOKEN = "t" * 32


@pytest.fixture
async def stand() -> AsyncIterator[LinkStand]:
    async with link_standing() as standing:
        yield standing


# ── an unbroken link ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_session_begins(stand: LinkStand) -> None:
    """A greeting opens one session, which begins with the terms, the snapshot and the fleet."""
    coordinator, gateway = await linked(stand)
    assert gateway.end.opened.is_set()
    assert gateway.end.terms == TERMS
    assert [snapshot.version for snapshot in gateway.inbox.snapshots] == [1]
    assert coordinator.host.open == list(coordinator.end.sessions) == ["gateway-1.1"]


async def test_messages_arrive_in_order(stand: LinkStand) -> None:
    """Messages arrive both ways, in order, those from before the session began too."""
    coordinator = await stand.coordinator()
    gateway = stand.gateway(coordinator.path)
    gateway.send(1, 2)
    await until_settled(gateway)
    await check_both_ways(coordinator, gateway, *range(3, 2_000))
    assert coordinator.host.only.numbers == list(range(1, 2_000))
    coordinator.host.only.inbox.deliver(Found(7, None))
    await until(lambda: gateway.inbox.messages[-1] == Found(7, None), "an answer arrives")


async def test_gateways_are_apart(stand: LinkStand) -> None:
    """Two gateways at once never see each other's messages."""
    coordinator, first = await linked(stand)
    second = stand.gateway(coordinator.path)
    await until_settled(second)
    sessions = [coordinator.host.sessions[name] for name in coordinator.host.open]
    for number in range(500):
        first.send(number)
        second.send(1_000 + number)
        sessions[0].inbox.deliver(HoldBooked(number))
        sessions[1].inbox.deliver(HoldBooked(1_000 + number))
    await until(lambda: all(len(session.received) >= 500 for session in sessions), "all arrives")
    await until(lambda: all(len(gateway.inbox.numbers) == 500 for gateway in (first, second)), "all arrives")
    assert [first.inbox.numbers, second.inbox.numbers] == [list(range(500)), list(range(1_000, 1_500))]
    assert [session.numbers for session in sessions] == [list(range(500)), list(range(1_000, 1_500))]


async def test_a_gateway_leaves(stand: LinkStand) -> None:
    """A gateway that says goodbye is lost at once, with no lease to wait for."""
    coordinator, gateway = await linked(stand)
    await gateway.end.leave()
    await gateway.stop()
    await until(lambda: coordinator.host.lost == ["gateway-1.1"], "the session ends")
    assert gateway.lost == 0


async def test_tcp_with_tls(stand: LinkStand) -> None:
    """A link over TCP with TLS and a token carries the same, and is taken up again after a break."""
    server_tls, client_tls = certified(stand.directory)
    coordinator = await stand.coordinator(token=TOKEN)
    port = await coordinator.serve_tls(server_tls)

    async def connect(make: Callable[[], Channel]) -> None:
        await asyncio.get_running_loop().create_connection(make, "127.0.0.1", port, ssl=client_tls)

    gateway = stand.gateway(connect, token=TOKEN)
    await until_settled(gateway)
    await check_both_ways(coordinator, gateway, *range(1_000))
    coordinator.clock.advance(3 * TERMS.heartbeat_ms + 1)
    await check_both_ways(coordinator, gateway, *range(1_000, 2_000))
    assert coordinator.host.only.numbers == gateway.inbox.numbers == list(range(2_000))


def certified(directory: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A server's side and a client's, by a certificate for the loopback that signs itself."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl command to make a certificate with")
    key, certificate = directory / "key.pem", directory / "certificate.pem"
    asked = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=weir"
    files = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(["openssl", *asked.split(), *files], check=True, capture_output=True, timeout=20)
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(certificate, key)
    return server, ssl.create_default_context(cafile=certificate)


@pytest.mark.parametrize("closes", [False, True])
async def test_a_welcome_and_messages_in_one_read(stand: LinkStand, closes: bool) -> None:
    """Messages that come in one read with the welcome arrive once, also where the link ends right behind them."""
    path, server = stand.path(), OneWriteServer([HoldBooked(1), HoldBooked(2)], closes=closes)
    listening = await asyncio.get_running_loop().create_unix_server(lambda: server, str(path))
    try:
        gateway = stand.gateway(path)
        await until(lambda: len(server.greetings) == 1 + 2 * closes, "it greets")
        await until(lambda: gateway.inbox.numbers == [1, 2], "both arrive")
        await until(lambda: gateway.end.is_linked is not closes, "the link stays, or is over")
        assert [found.received for found in server.greetings] == [0, 1, 1][: len(server.greetings)]
        await gateway.stop()
        assert (gateway.inbox.numbers, gateway.lost) == ([1, 2], 0)
    finally:
        listening.close()


async def test_served_before_it_runs(stand: LinkStand) -> None:
    """A session that opens before the coordinator's end runs gets its snapshot as it does."""
    coordinator = await stand.coordinator(runs=False)
    gateway = stand.gateway(coordinator.path)
    await until(lambda: gateway.inbox.messages == [FLEET], "the session begins")
    assert gateway.inbox.snapshots == []
    coordinator.run()
    await until_settled(gateway)


# ── links that break ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_cuts_lose_nothing(stand: LinkStand) -> None:
    """Links that are cut within frames, again and again, lose no message, double none, and keep the session."""
    coordinator, relay, gateway = await relayed(stand)
    session = coordinator.host.only
    relay.cut_every = 30_000
    relay.cut()
    for number in range(THOUSANDS):
        gateway.send(number)
        session.inbox.deliver(HoldBooked(number))
        if number % 50 == 0:
            await asyncio.sleep(0)
    await until(lambda: len(session.numbers) >= THOUSANDS and len(gateway.inbox.numbers) >= THOUSANDS, "all arrives")
    assert session.numbers == gateway.inbox.numbers == list(range(THOUSANDS))
    assert relay.opened > 3
    assert (gateway.lost, coordinator.host.lost, list(coordinator.host.sessions)) == (0, [], ["gateway-1.1"])


@pytest.mark.parametrize("who", ["gateway", "coordinator"])
async def test_a_link_held_back_is_given_up(stand: LinkStand, who: str) -> None:
    """Either end gives a link up after three heartbeats without anything, and the session goes on over another."""
    coordinator, relay, gateway = await relayed(stand)
    relay.hold_back(rising=who == "coordinator", falling=who == "gateway")
    gateway.send(1)
    coordinator.host.only.inbox.deliver(HoldBooked(1))
    clock = gateway.clock if who == "gateway" else coordinator.clock
    passed = 0

    def is_another() -> bool:
        nonlocal passed
        if passed < 3 * TERMS.heartbeat_ms + 1 + SLIPPED_MS:  # a beat that was on its way as the link stood counts as heard
            clock.advance(1)
            passed += 1
        return relay.opened == 2

    await until(is_another, "another link")
    await check_both_ways(coordinator, gateway, 2, 3)
    assert coordinator.host.only.numbers == gateway.inbox.numbers == [1, 2, 3]
    assert (gateway.lost, coordinator.host.lost) == (0, [])


async def test_a_beating_link_is_kept(stand: LinkStand) -> None:
    """A link on which nothing but heartbeats pass lives on, for longer than any lease."""
    coordinator, relay, gateway = await relayed(stand)
    for _ in range(2 * TERMS.lease_ms // TERMS.heartbeat_ms):
        passed = relay.passed_up
        coordinator.clock.advance(TERMS.heartbeat_ms)
        gateway.clock.advance(TERMS.heartbeat_ms)
        await until(lambda passed=passed: relay.passed_up > passed, "a heartbeat")  # type: ignore[misc]
    await check_both_ways(coordinator, gateway, 1)
    assert (gateway.lost, coordinator.host.lost) == (0, [])


async def test_a_silent_gateway_is_lost(stand: LinkStand) -> None:
    """A gateway silent for its lease is lost once; as it comes back it is told so, once, and gets a new session."""
    coordinator, relay, gateway = await relayed(stand)
    relay.holds_all = True
    relay.cut()
    await until(lambda: relay.opened == 2, "it tries")
    coordinator.clock.advance(TERMS.lease_ms + 1)
    await until(lambda: coordinator.host.lost == ["gateway-1.1"], "the session ends")
    assert gateway.lost == 0
    relay.holds_all = False
    relay.cut()
    await until_settled(gateway, 2)
    await check_both_ways(coordinator, gateway, 1)
    assert (gateway.lost, coordinator.host.lost) == (1, ["gateway-1.1"])
    assert len(coordinator.host.open) == 1


async def test_a_lost_session_stays_lost(stand: LinkStand) -> None:
    """A gateway that misses the word that its session was lost hears it on the next link, and no session comes of the first."""
    coordinator, relay, gateway = await relayed(stand)
    await check_both_ways(coordinator, gateway, *range(5))
    relay.holds_all = True
    relay.cut()
    await until(lambda: relay.opened == 2, "it tries")
    coordinator.clock.advance(TERMS.lease_ms + 1)
    await until(lambda: coordinator.host.lost == ["gateway-1.1"], "the session ends")
    relay.holds_all, relay.holds_answers = False, True
    opened, passed = relay.opened, relay.passed_up
    relay.cut()
    await until(lambda: relay.opened > opened and relay.passed_up > passed, "it greets, and hears no answer")
    relay.holds_answers = False
    relay.cut()
    await until_settled(gateway, 2)
    await check_both_ways(coordinator, gateway, 5, 6)
    assert gateway.lost == 1
    assert len(coordinator.host.sessions) == 2


async def test_a_silent_coordinator_loses_the_session(stand: LinkStand) -> None:
    """A gateway that heard no coordinator for the bound loses its session once, and all works in a new one."""
    coordinator, gateway = await linked(stand)
    path = coordinator.path
    await coordinator.stop()
    gateway.send(1)
    gateway.clock.advance(TERMS.silence_ms + 1)
    await until(lambda: gateway.lost == 1, "the session is lost")
    again = await stand.coordinator(path=path)
    await until_settled(gateway, 2)
    await check_both_ways(again, gateway, 2, 3)
    assert again.host.only.numbers == [2, 3]
    assert gateway.lost == 1


async def test_an_overfull_gateway_loses_the_session(stand: LinkStand, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway with too much to say and no link loses its session once, and goes on in a new one."""
    monkeypatch.setattr(endpoint, "OUTBOX_BYTES_MAX", 20_000)
    coordinator, relay, gateway = await relayed(stand)
    relay.holds_answers = True
    relay.cut()
    await until(lambda: relay.opened == 2, "it tries")
    gateway.send(*range(1_000))
    await until(lambda: gateway.lost == 1, "the session is lost")
    relay.holds_answers = False
    relay.cut()
    await until_settled(gateway, 2)
    gateway.send(1_000)
    await until(lambda: coordinator.host.sessions[coordinator.host.open[-1]].numbers == [1_000], "the new one works")
    assert gateway.lost == 1


async def test_overfull_while_a_welcome_is_on_its_way(stand: LinkStand, monkeypatch: pytest.MonkeyPatch) -> None:
    """A welcome for a session that was lost meanwhile opens nothing: the next greeting does."""
    monkeypatch.setattr(endpoint, "OUTBOX_BYTES_MAX", 20_000)
    coordinator, relay, gateway = await relayed(stand)
    await check_both_ways(coordinator, gateway, *range(5))
    relay.holds_answers = True
    passed = relay.passed_up
    relay.cut()
    await until(lambda: relay.opened == 2 and relay.passed_up > passed, "it greets")
    await until(lambda: not gateway.end.is_linked, "the link is over")
    passed = relay.passed_up
    gateway.send(*range(5, 1_000))
    await until(lambda: gateway.lost == 1, "the session is lost")
    relay.go_on()
    await until_settled(gateway, 2)
    gateway.send(1_000)
    await until(lambda: coordinator.host.sessions[coordinator.host.open[-1]].numbers == [1_000], "the new one works")
    assert gateway.lost == 1


async def test_an_overfull_link_that_lives(stand: LinkStand, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway that overflows on a living link comes back at once, not after three heartbeats without anything."""
    monkeypatch.setattr(endpoint, "OUTBOX_BYTES_MAX", 20_000)
    coordinator, gateway = await linked(stand)
    gateway.send(*range(1_000))
    await until_settled(gateway, 2)
    assert gateway.lost == 1
    assert len(coordinator.host.sessions) == 2


async def test_an_overfull_coordinator_loses_the_session(stand: LinkStand, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway that falls too far behind is lost by its coordinator, once, and gets a new session."""
    monkeypatch.setattr(endpoint, "OUTBOX_BYTES_MAX", 20_000)
    coordinator, relay, gateway = await relayed(stand)
    relay.hold_back()
    for number in range(2_000):
        coordinator.host.only.inbox.deliver(HoldBooked(number))
    await until(lambda: coordinator.host.lost == ["gateway-1.1"], "the session ends")
    relay.cut()
    await until_settled(gateway, 2)
    await check_both_ways(coordinator, gateway, 1)
    assert (gateway.lost, coordinator.host.lost) == (1, ["gateway-1.1"])


# ── snapshots ────────────────────────────────────────────────────────────────────────────────────────────────────────


def keyed(version: int, keys: int, *, offset: int = 0) -> Snapshot:
    """A snapshot with many rows."""
    rows = [ApiKey(str(number), "acme", "app", number.to_bytes(32, "big")) for number in range(offset, offset + keys)]
    return Snapshot(version=version, tenants={"acme": Tenant("acme")}, keys={row.secret_sha256: row for row in rows})


async def test_a_snapshot_changed_twice(stand: LinkStand) -> None:
    """A snapshot that changes again while it is told ends at the newest, and the coordinator knows who holds it."""
    coordinator, gateway = await linked(stand)
    coordinator.host.publish(keyed(2, 10_000))
    await asyncio.sleep(0)
    coordinator.host.publish(keyed(3, 10_000, offset=1))
    coordinator.host.publish(keyed(4, 10_000, offset=5_000))
    await until(lambda: gateway.inbox.version == 4, "the newest arrives")
    assert gateway.inbox.snapshots[-1].keys == coordinator.host.snapshot.keys
    assert await coordinator.end.all_hold(4, 1_000) == ()


async def test_a_snapshot_over_cut_links(stand: LinkStand) -> None:
    """A snapshot whose parts are cut on their way arrives whole, with what changed meanwhile."""
    coordinator, relay, gateway = await relayed(stand)
    relay.cut_every = 250_000
    relay.cut()
    coordinator.host.publish(keyed(2, 10_000))
    await until(lambda: relay.opened > 2, "a cut within the parts")
    coordinator.host.publish(keyed(3, 9_000, offset=500))
    await until(lambda: gateway.inbox.version == 3, "the newest arrives")
    assert gateway.inbox.snapshots[-1].keys == coordinator.host.snapshot.keys
    assert relay.opened > 3
    assert (gateway.lost, coordinator.host.lost) == (0, [])


async def test_a_gateway_behind_is_named(stand: LinkStand) -> None:
    """A gateway that doesn't hold a snapshot within the bound is named."""
    coordinator, relay, gateway = await relayed(stand)
    relay.hold_back()
    coordinator.host.publish(keyed(2, 10))
    asyncio.get_running_loop().call_later(0.02, coordinator.clock.advance, 51)
    assert await coordinator.end.all_hold(2, 50) == ("gateway-1.1",)
    assert gateway.lost == 0


async def test_terms_travel(stand: LinkStand) -> None:
    """What a coordinator tells is what its gateways get, also after it changed."""
    coordinator, gateway = await linked(stand)
    await coordinator.stop()
    terms = msgspec.structs.replace(TERMS, step_tokens=7)
    await stand.coordinator(epoch=2, terms=terms, path=coordinator.path)
    await until_settled(gateway, 2)
    assert gateway.end.terms == terms
