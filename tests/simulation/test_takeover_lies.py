"""What a gateway of ours never says, at a takeover and before: it is refused, and changes nothing for anybody else."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest
from tests.simulation.session_stand import Listening, Stand, finish_of, play, run_of
from tests.simulation.test_lost_gateways import a_moment

from weir import errors
from weir.coordinator import strays
from weir.core.endings import FinishReason
from weir.core.registry.snapshot import Snapshot
from weir.core.tenancy import ServiceClass
from weir.messages import Granted, Reattach, Reattached, Register, Stopped, StopRequest
from weir.sim.world import key_of, tenant_name

LEASE_S = 15.0


async def taken_over(stand: Stand) -> tuple[int, Granted, Listening]:
    """A request that runs, what it was granted, and its gateway's session with the next coordinator."""
    former = stand.gateway("gateway.1")
    ref = former.ask()
    await a_moment()
    [granted] = former.about(ref, Granted)
    await stand.take_over()
    return ref, granted, stand.again(former)


def never_held(stand: Stand, ref: int, granted: Granted, number: int = 0) -> Reattach:
    """A request that runs there and that no coordinator holds."""
    asked = msgspec.structs.replace(stand.asked[ref][0], ref=100 + number, request_id="unknown", generation_id="unknown")
    return Reattach(asked, run_of(granted))


def with_revoked(snapshot: Snapshot, key: str) -> Snapshot:
    """The same with this key revoked."""
    keys = {digest: replace(row, revoked=row.revoked or row.id == key) for digest, row in snapshot.keys.items()}
    return replace(snapshot, keys=keys)


async def lose(stand: Stand, gateway: Listening) -> None:
    """Its session ends, and so does what is kept for it."""
    stand.coordinator.lose(gateway.name)
    await asyncio.sleep(LEASE_S)


def test_nobody_opens_a_session_under_the_name_of_a_former_one() -> None:
    """Protects what is kept for a gateway: a greeting under its former session's name is refused, and it goes on."""

    async def script(stand: Stand) -> None:
        ref, granted, gateway = await taken_over(stand)
        with pytest.raises(errors.LinkFault):
            Listening(stand, Register("gateway.1", reattaches=True))
        gateway.tell(ref, run_of(granted))
        gateway.tell_all()
        gateway.end(ref)
        await a_moment()
        assert stand.end_of(ref).status == "completed"

    play(script)


@pytest.mark.parametrize(
    "impossible",
    [
        lambda told, run: msgspec.structs.replace(told, run=run, earlier=run),
        lambda told, run: msgspec.structs.replace(told, earlier=run),
        lambda told, run: msgspec.structs.replace(
            told, run=msgspec.structs.replace(run, attempt=2), earlier=msgspec.structs.replace(run, attempt=2)
        ),
        lambda told, run: msgspec.structs.replace(told, run=run, finish=finish_of(1, attempt=2)),
        lambda told, run: msgspec.structs.replace(told, finish=finish_of(1)),
    ],
    ids=["one attempt twice", "an earlier one alone", "two second ones", "the end of another one", "the end of none"],
)
def test_attempts_that_there_cannot_be_are_refused(impossible: Callable[..., Reattach]) -> None:
    """Protects lanes and the process: what cannot have run takes nothing, and what is held ends with its gateway."""

    async def script(stand: Stand) -> None:
        ref, granted, gateway = await taken_over(stand)
        with pytest.raises(errors.LinkFault):
            gateway.say(impossible(Reattach(stand.asked[ref][0]), run_of(granted)))
        assert stand.running == 0 and not gateway.about(ref, Reattached)
        await lose(stand, gateway)

    play(script)


@pytest.mark.parametrize("is_held", [True, False])
def test_one_ref_is_of_one_request(is_held: bool) -> None:
    """Protects lanes and holds: what is told twice under one ref counts once, so all of it ends with its gateway."""

    async def script(stand: Stand) -> None:
        ref, granted, gateway = await taken_over(stand)
        told = Reattach(stand.asked[ref][0], run_of(granted)) if is_held else never_held(stand, ref, granted)
        gateway.say(told)
        if is_held:
            with pytest.raises(errors.LinkFault):
                gateway.say(told)
        else:
            gateway.say(told)  # its answer may have crossed
        assert stand.running == 1
        await lose(stand, gateway)
        assert stand.running == 0

    play(script)


@pytest.mark.parametrize("is_new", [True, False])
def test_who_has_nothing_to_tell_tells_nothing(is_new: bool) -> None:
    """Protects lanes: a gateway that carries nothing, or has told everything, cannot say that engines run more."""

    async def script(stand: Stand) -> None:
        ref, granted, gateway = await taken_over(stand)
        gateway.tell_all()
        with pytest.raises(errors.LinkFault):
            (stand.gateway("other.1") if is_new else gateway).say(never_held(stand, ref, granted))
        assert stand.running == 0

    play(script)


def test_what_runs_unheld_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects memory: a gateway can tell of so many runs that nobody holds, and not of one more."""
    monkeypatch.setattr(strays, "STRAYS_MAX", 2)

    async def script(stand: Stand) -> None:
        ref, granted, gateway = await taken_over(stand)
        for number in range(2):
            gateway.say(never_held(stand, ref, granted, number))
        with pytest.raises(errors.LinkFault):
            gateway.say(never_held(stand, ref, granted, 2))
        assert stand.running == 2
        await lose(stand, gateway)

    play(script, lanes=3)


@pytest.mark.parametrize("is_asking", [True, False], ids=["looked up", "admitted"])
@pytest.mark.parametrize(
    "other",
    [{"tenant": "nobody"}, {"application": "nothing"}, {"workload_class": "none"}, {"ref": 1}],
    ids=lambda other: next(iter(other)),
)
def test_what_cannot_be_asked_is_refused(other: dict[str, str | int], is_asking: bool) -> None:
    """Protects the process and holds: nobody is admitted who is not in the snapshot, or under a ref that is in use."""

    async def script(stand: Stand) -> None:
        gateway = stand.gateway("gateway.1")
        ref = gateway.ask(request_id_given=is_asking)
        asked = msgspec.structs.replace(stand.asked[ref][0], ref=2, request_id="other", generation_id="other")
        with pytest.raises(errors.LinkFault):
            gateway.say(msgspec.structs.replace(asked, **other))
        await a_moment()
        assert stand.executions.live_count == 1
        gateway.end(ref)

    play(script)


def test_a_ref_that_waits_for_a_decision_is_not_told() -> None:
    """Protects other gateways: what one asked and then told under the same ref ends its session, not their decisions."""

    async def script(stand: Stand) -> None:
        ref, granted, gateway = await taken_over(stand)
        gateway.say(msgspec.structs.replace(stand.asked[ref][0], request_id="other", generation_id="other"))
        other = stand.gateway("other.1")
        asked = other.ask()
        with pytest.raises(errors.LinkFault):
            gateway.tell(ref, run_of(granted))
        await lose(stand, gateway)
        assert other.about(asked, Granted)
        other.end(asked)

    play(script)


@pytest.mark.parametrize(
    "other",
    [
        {"tenant": tenant_name(1)},
        {"key": key_of(1)},
        {"choices": 3},
        {"max_output_tokens": 1},
        {"service_class": ServiceClass.BATCH},
    ],
    ids=lambda other: next(iter(other)),
)
def test_whose_it_is_and_what_it_may_cost_is_as_it_was_written_down(other: dict[str, object]) -> None:
    """Protects tenants and revocations: a gateway that tells otherwise changes neither who pays nor whose key stops it."""

    async def script(stand: Stand) -> None:
        ref, granted, gateway = await taken_over(stand)
        asked = stand.asked[ref][0]
        gateway.say(Reattach(msgspec.structs.replace(asked, **other), run_of(granted)))
        gateway.tell_all()
        execution = stand.execution(ref)
        assert execution is not None
        assert {name: getattr(execution.acquire, name) for name in other} == {name: getattr(asked, name) for name in other}
        stand.publish(with_revoked(stand.snapshot, key_of(0)))
        assert gateway.about(ref, StopRequest) == [StopRequest(ref, FinishReason.REVOKED)]
        gateway.finish(ref, reason=FinishReason.REVOKED)
        gateway.say(Stopped(ref, 1))

    play(script)
