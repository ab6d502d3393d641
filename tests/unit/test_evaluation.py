"""An evaluation: every case is asked once, alone and greedily; no tenant's replica is, and nobody's text is ever told."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeVar

import msgspec
import pytest
from structlog.testing import capture_logs
from tests.unit.registry_desk import STABLE, T0_MS, registered

from weir import errors
from weir.control.evaluation import ANSWER_BYTES_MAX, ATTEMPTS_MAX, CASE_S, Evaluator, known_score, leads_to
from weir.control.snapshots import build_snapshot
from weir.core.demands import NO_DEMANDS, Demands
from weir.core.endings import FinishReason
from weir.core.registry.golden_set import Score
from weir.core.registry.model import Alias, Canary, EngineKind, Pool, RevisionState
from weir.core.registry.rollout import Proposed
from weir.core.registry.rollout_decision import Evaluated, Evaluation, NotEvaluated, NothingToEvaluate
from weir.core.registry.rollout_plan import RolloutPlan
from weir.core.registry.rollout_record import Rollout
from weir.core.registry.snapshot import Snapshot
from weir.core.request import Message, Sampling
from weir.errors import WeirError
from weir.messages import ReplicaAddress
from weir.ports import Catalog, Delta, EngineCall, EngineEnd, EngineSink
from weir.sim.virtual_loop import run
from weir.units import Tokens

T = TypeVar("T")
SECRET = "heliotrope"
"""Is in every prompt and every answer, and must be nowhere else."""
SET = "sha256:" + "5e" * 32
CANARY = registered("small@2", state=RevisionState.APPROVED, evaluation=SET)
POOL = Pool("small-2", CANARY.id, 2, 4)
ROLLOUT = Rollout("ro-1", "assistant", STABLE.id, CANARY.id, RolloutPlan(), Proposed(T0_MS), "ada", T0_MS)
CATALOG = Catalog(
    1, revisions=(STABLE, CANARY), pools=(Pool("small", STABLE.id, 1, 4), POOL), aliases=(Alias("assistant", STABLE.id, 600),)
)
FIRST, SECOND = (
    ReplicaAddress(name, POOL.name, CANARY.id, EngineKind.LLAMACPP, "http://r", CANARY.id, 4_096) for name in ("r-1", "r-2")
)

FLOOD = f"{SECRET} " * (ANSWER_BYTES_MAX // 10)
Reply = str | WeirError | None
"""What is generated, a fault, or nothing ever."""


def cases(*expected: str, most: int = 64, **members: Any) -> bytes:
    """A set whose cases, `case-0` and on, each expect a text."""
    lines = [
        {"id": f"case-{number}", "input": f"{SECRET} {number}", "max_output_tokens": most, "expect": {"contains": text}}
        | members
        for number, text in enumerate(expected)
    ]
    return b"\n".join(msgspec.json.encode(line) for line in lines)


class Speaking:
    """An engine that replies as it is told, half a second later. most_at_once: generations that ran at the same time."""

    def __init__(self, reply: Callable[[EngineCall], Reply]) -> None:
        self._reply = reply
        self.calls: list[EngineCall] = []
        self.began_s: list[float] = []
        self.cancelled = 0
        self.running = self.most_at_once = 0

    def start(self, call: EngineCall, sink: EngineSink) -> "Generation":
        self.calls.append(call)
        self.began_s.append(asyncio.get_running_loop().time())
        self.running += 1
        self.most_at_once = max(self.most_at_once, self.running)
        generation = Generation(self, sink)
        asyncio.get_running_loop().call_later(0.25, generation.end, self._reply(call))
        return generation

    async def count_input(
        self, replica: ReplicaAddress, prompt: str | tuple[Message, ...], chat: bool, demands: Demands = NO_DEMANDS
    ) -> Tokens | None:
        raise AssertionError("nobody counts")

    async def probe(self, replica: ReplicaAddress) -> ReplicaAddress:
        return replica

    async def aclose(self) -> None:
        """Nothing is open."""


class Generation:
    """One run. It counts as running until somebody waited for its stop."""

    def __init__(self, engine: Speaking, sink: EngineSink) -> None:
        self._engine, self._sink = engine, sink
        self._is_over = False

    def end(self, reply: Reply) -> None:
        """Say all of it; what begins so has no end."""
        if isinstance(reply, str):
            for piece in (reply[:5], reply[5:]):
                self._tell(lambda piece=piece: self._sink.on_deltas([Delta(piece)]))  # type: ignore[misc]
            if not reply.startswith("endless"):
                self._tell(lambda: self._sink.on_end(EngineEnd(FinishReason.STOP, None)), is_end=True)
        elif reply is not None:
            self._tell(lambda: self._sink.on_end(EngineEnd(None, None, reply)), is_end=True)

    def _tell(self, tell: Callable[[], None], *, is_end: bool = False) -> None:
        if not self._is_over:
            self._is_over = is_end
            tell()

    def pause(self) -> None:
        """There is nothing to pause."""

    def resume(self) -> None:
        """There is nothing to resume."""

    def cancel(self) -> None:
        self._engine.cancelled += not self._is_over
        self._is_over = True

    async def stopped(self) -> None:
        await asyncio.sleep(0.01)
        self._engine.running -= 1


@dataclass
class Cell:
    """What is approved, which replicas are ready, and the store of sets. away: so many questions to a store go wrong."""

    content: bytes
    stored: Catalog = CATALOG
    ready: Sequence[ReplicaAddress] = (FIRST, SECOND)
    away: int = 0
    published: Snapshot = field(default_factory=lambda: build_snapshot(CATALOG))

    async def catalog(self) -> Catalog:
        self._ask(errors.LedgerUnavailable())
        return self.stored

    async def read_file(self, digest: str) -> bytes:
        self._ask(errors.ArtifactsUnavailable())
        if digest != SET:
            raise errors.ArtifactRefused(f"Nothing of the digest {digest} is kept here.")
        return self.content

    def _ask(self, fault: errors.StoreFault) -> None:
        if self.away:
            self.away -= 1
            raise fault

    def ready_of(self, pool: str) -> Sequence[ReplicaAddress]:
        return [address for address in self.ready if address.pool == pool]

    def publish(self, catalog: Catalog) -> None:
        self.stored, self.published = catalog, build_snapshot(catalog)


def evaluator(cell: Cell, engine: Speaking) -> Evaluator:
    return Evaluator(cell, cell, lambda kind: engine, cell)


def evaluated(cell: Cell, engine: Speaking, *, until_ms: int = 60_000) -> Evaluation:
    return in_time(evaluator(cell, engine).evaluate(ROLLOUT), until_ms=until_ms)


def in_time(work: Coroutine[Any, Any, T], *, until_ms: int = 60_000) -> T:
    with capture_logs() as logs:
        found = run(work, until_ms=until_ms)
    assert SECRET not in repr((found, logs))
    return found


def echo(call: EngineCall) -> str:
    return f"{SECRET}: {call.prompt}"


# ── the cases ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_case_is_asked_alone_and_greedily() -> None:
    """Protects comparability: one at a time, no sampling, its own bound of output, and no cache that a tenant could share."""
    engine = Speaking(echo)
    assert evaluated(Cell(cases("0", "1", "no", "3", most=100)), engine) == Evaluated(Score(3, 4, ("case-2",)))
    assert [call.prompt for call in engine.calls] == [f"{SECRET} {number}" for number in range(4)]
    assert engine.most_at_once == 1 and {call.sampling for call in engine.calls} == {Sampling(temperature=0.0, seed=0)}
    facts = {(call.lane, call.chat, call.max_output_tokens, call.cache_salt, call.replica.name) for call in engine.calls}
    assert facts == {(0, True, 100, "evaluation-ro-1", "r-1")}


def test_no_case_gets_more_than_the_revision_gives() -> None:
    """Protects truth: a request could not have had more output either."""
    engine = Speaking(echo)
    evaluated(Cell(cases("0", most=8_192)), engine)
    assert [call.max_output_tokens for call in engine.calls] == [CANARY.max_output_tokens]


def test_a_conversation_is_asked_as_one() -> None:
    """Protects what a case says; a model that takes plain prompts only cannot be asked it, and that is the reason given."""
    talk = cases("0", input=[{"role": "system", "content": SECRET}, {"role": "user", "content": "0"}])
    engine = Speaking(echo)
    assert isinstance(evaluated(Cell(talk), engine), Evaluated)
    assert [call.prompt for call in engine.calls] == [(Message("system", SECRET), Message("user", "0"))]
    cell = Cell(talk)
    cell.publish(replace(CATALOG, revisions=(STABLE, replace(CANARY, chat=False))))
    found = evaluated(cell, engine)
    assert found == NotEvaluated("Case 'case-0' is a conversation, and the revision takes plain prompts only.")


def test_a_revision_without_a_set_has_nothing_to_evaluate() -> None:
    """Protects rollouts of what has no set: no engine is asked, and no store of sets."""
    cell, engine = Cell(b""), Speaking(echo)
    cell.publish(replace(CATALOG, revisions=(STABLE, replace(CANARY, evaluation=None))))
    assert evaluated(cell, engine) == NothingToEvaluate() and not engine.calls


# ── what goes wrong ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_case_that_the_engine_refuses_has_not_passed() -> None:
    """Protects the score: a refusal is an answer, whatever it does not contain, and it is not asked again."""
    engine = Speaking(lambda call: errors.EngineRejected() if "1" in call.prompt else echo(call))
    content = cases("0", "", "2", expect={"not_contains": "no"})
    assert evaluated(Cell(content), engine) == Evaluated(Score(2, 3, ("case-1",)))
    assert len(engine.calls) == 3


def test_a_fault_is_tried_again_on_another_replica() -> None:
    """Protects an evaluation from one lost replica: the case runs again elsewhere, and the next one on the first again."""
    engine = Speaking(lambda call: echo(call) if len(engine.calls) != 1 else errors.ReplicaLost())
    assert evaluated(Cell(cases("0", "1")), engine) == Evaluated(Score(2, 2))
    assert [call.replica.name for call in engine.calls] == ["r-1", "r-2", "r-1"]


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (errors.EngineError("The engine answered 500."), "The engine answered 500."),
        ("too much: " + FLOOD, f"The engine sent more than {ANSWER_BYTES_MAX} bytes."),
        ("endless: " + FLOOD, f"The engine sent more than {ANSWER_BYTES_MAX} bytes."),
        (None, f"It did not end within {CASE_S:g} seconds."),
    ],
    ids=["fault", "flood", "endless", "silence"],
)
def test_a_case_that_keeps_failing_ends_it(reply: Reply, said: str) -> None:
    """Protects against going on without an answer: after few attempts it is over, with the fault, and nothing runs on."""
    engine = Speaking(lambda call: reply if "1" in call.prompt else echo(call))
    found = evaluated(Cell(cases("0", "1", "2")), engine, until_ms=3_600_000)
    assert found == NotEvaluated(f"Case 'case-1' failed {ATTEMPTS_MAX} times: {said}")
    assert len(engine.calls) == 1 + ATTEMPTS_MAX and (engine.running, engine.most_at_once) == (0, 1)
    never_ends = reply is None or str(reply).startswith("endless")
    assert engine.cancelled == (ATTEMPTS_MAX if never_ends else 0)
    attempts_s = engine.began_s[1:]
    assert all(later - sooner >= 3 for sooner, later in pairwise(attempts_s)), "a probe came between"


def test_it_waits_for_a_ready_replica() -> None:
    """Protects an evaluation from a replica that starts again: what is not ready is not asked."""

    async def main() -> Evaluation:
        cell.ready = ()
        asyncio.get_running_loop().call_later(20, setattr, cell, "ready", (replace_pool(FIRST, "small"), SECOND))
        return await evaluator(cell, engine).evaluate(ROLLOUT)

    cell, engine = Cell(cases("0")), Speaking(echo)
    assert in_time(main()) == Evaluated(Score(1, 1)) and [call.replica.name for call in engine.calls] == ["r-2"]


def replace_pool(address: ReplicaAddress, pool: str) -> ReplicaAddress:
    return msgspec.structs.replace(address, pool=pool)


@pytest.mark.parametrize("content", [b"{}", b""])
def test_a_set_that_cannot_be_read_is_the_reason(content: bytes) -> None:
    """Protects whoever asks why: the line and what is wrong with it."""
    found = evaluated(Cell(content), Speaking(echo))
    assert isinstance(found, NotEvaluated) and found.detail.startswith("Line 1")


def test_a_set_that_is_not_kept_is_the_reason() -> None:
    """Protects against passing what nobody evaluated."""
    cell = Cell(b"")
    cell.publish(replace(CATALOG, revisions=(STABLE, replace(CANARY, evaluation="sha256:none"))))
    assert evaluated(cell, Speaking(echo)) == NotEvaluated("Nothing of the digest sha256:none is kept here.")


def test_stores_that_are_away_are_waited_for() -> None:
    """Protects a rollout from a store: it is asked again, and that is said once for each."""
    cell = Cell(cases("0"), away=3)
    with capture_logs() as logs:
        found = run(evaluator(cell, Speaking(echo)).evaluate(ROLLOUT), until_ms=60_000)
    assert found == Evaluated(Score(1, 1))
    assert [(line["event"], line["reason"]) for line in logs] == [("evaluation_postponed", "ledger_unavailable")]
    cell.away = 1
    cell.catalog = always(CATALOG)  # type: ignore[method-assign]
    with capture_logs() as logs:
        run(evaluator(cell, Speaking(echo)).evaluate(ROLLOUT), until_ms=60_000)
    assert [(line["event"], line["reason"]) for line in logs] == [("evaluation_postponed", "artifacts_unavailable")]


def always(catalog: Catalog) -> Callable[[], Coroutine[Any, Any, Catalog]]:
    async def answer() -> Catalog:
        return catalog

    return answer


def test_who_stops_it_stops_the_engine() -> None:
    """Protects the replica of a rollout that is over."""

    async def main() -> None:
        task = asyncio.get_running_loop().create_task(evaluator(cell, engine).evaluate(ROLLOUT))
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    cell, engine = Cell(cases("0")), Speaking(echo)
    in_time(main())
    assert (len(engine.calls), engine.cancelled) == (1, 1)


# ── who else is there ────────────────────────────────────────────────────────────────────────────────────────────────


ROUTED = (
    Alias("other", CANARY.id, 600),
    Alias("other", CANARY.id, 600, tenant="acme"),
    Alias("other", STABLE.id, 600, Canary("ro-9", 0, CANARY.id, 1)),
)


@pytest.mark.parametrize("alias", ROUTED, ids=["alias", "tenants", "share"])
def test_a_replica_that_serves_tenants_is_not_asked(alias: Alias) -> None:
    """Protects tenants: what an alias leads to is not evaluated, and keeps the score that it had before if it had one."""
    cell, engine = Cell(cases("0")), Speaking(echo)
    cell.publish(replace(CATALOG, aliases=(*CATALOG.aliases, alias)))
    assert evaluated(cell, engine) == NotEvaluated("An alias leads to the revision, so its replicas are not free.")
    earlier = replace(ROLLOUT, id="ro-0", score=Score(9, 10))
    cell.publish(replace(cell.stored, rollouts=(earlier, ROLLOUT)))
    assert evaluated(cell, engine) == Evaluated(Score(9, 10)) and not engine.calls


def test_an_evaluation_ends_once_somebody_is_routed_there() -> None:
    """Protects the first tenant on a replica: within a second no case runs there any more."""

    async def main() -> Evaluation:
        task = asyncio.get_running_loop().create_task(evaluator(cell, engine).evaluate(ROLLOUT))
        await asyncio.sleep(5)
        cell.publish(replace(CATALOG, aliases=(*CATALOG.aliases, ROUTED[2])))
        await asyncio.sleep(1)
        assert task.done() and engine.cancelled == 1
        return await task

    cell, engine = Cell(cases("0")), Speaking(lambda call: None)
    assert isinstance(in_time(main()), NotEvaluated)


@pytest.mark.parametrize("serves_then", [False, True])
def test_two_rollouts_of_a_revision_take_turns(serves_then: bool) -> None:
    """Protects the one lane: the second evaluation waits for the first, whose score it takes if the canary serves by then."""

    async def main() -> list[Evaluation]:
        subject = evaluator(cell, engine)

        async def first() -> Evaluation:
            found = await subject.evaluate(ROLLOUT)
            if serves_then:
                scored = replace(ROLLOUT, score=Score(1, 2))
                cell.publish(replace(CATALOG, rollouts=(scored,), aliases=(*CATALOG.aliases, ROUTED[2])))
            return found

        return list(await asyncio.gather(first(), subject.evaluate(replace(ROLLOUT, id="ro-2", alias="other"))))

    cell, engine = Cell(cases("0", "1")), Speaking(echo)
    second = Score(1, 2) if serves_then else Score(2, 2)
    assert in_time(main()) == [Evaluated(Score(2, 2)), Evaluated(second)]
    assert (len(engine.calls), engine.most_at_once) == (2 if serves_then else 4, 1)


# ── what is known already ────────────────────────────────────────────────────────────────────────────────────────────


def test_the_stable_revisions_score_is_that_of_its_newest_rollout() -> None:
    """Protects the comparison: of the same set, and no other revision's."""
    rollouts = [
        replace(ROLLOUT, id=f"ro-{number}", canary=canary, score=score, proposed_at_ms=at_ms)
        for number, (canary, score, at_ms) in enumerate(
            [(STABLE.id, Score(7, 10), 5), (STABLE.id, Score(8, 10), 9), (STABLE.id, None, 12), (CANARY.id, Score(1, 10), 20)]
        )
    ]
    catalog = replace(CATALOG, rollouts=rollouts)
    assert known_score(catalog, STABLE.id) == Score(8, 10) and known_score(catalog, "none@1") is None
    cell = Cell(cases("0"))
    cell.publish(catalog)
    assert evaluated(cell, Speaking(echo)) == Evaluated(Score(1, 1), None), "it was another set"
    cell.publish(replace(catalog, revisions=(replace(STABLE, evaluation=SET), CANARY)))
    assert evaluated(cell, Speaking(echo)) == Evaluated(Score(1, 1), Score(8, 10))


def test_where_aliases_lead() -> None:
    """Protects isolation: an alias, a tenant's own and a share count; a revision that nobody names does not."""
    for alias in ROUTED:
        assert leads_to(build_snapshot(replace(CATALOG, aliases=(alias,))), CANARY.id)
    assert not leads_to(build_snapshot(CATALOG), CANARY.id)
