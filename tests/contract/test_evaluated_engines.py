"""An evaluation on real engines: two of one revision give one score, and a replica that is lost is a reason, not a score."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import pytest
from structlog.testing import capture_logs
from tests.contract.engine_servers import (
    IMPLEMENTATIONS,
    WAIT_S,
    Children,
    Implementation,
    UnderTest,
    llamacpp,
    simulated_server,
)

from weir.control.evaluation import ATTEMPTS_MAX, Evaluator
from weir.control.snapshots import build_snapshot
from weir.core.metering import Price
from weir.core.registry.golden_set import Score
from weir.core.registry.model import EngineKind, Pool, Revision, RevisionState
from weir.core.registry.rollout import Proposed
from weir.core.registry.rollout_decision import Evaluated, Evaluation, NotEvaluated
from weir.core.registry.rollout_plan import RolloutPlan
from weir.core.registry.rollout_record import Rollout
from weir.core.registry.snapshot import Snapshot
from weir.core.request import Sampling
from weir.messages import ReplicaAddress
from weir.ports import Catalog

OLD = Revision("old", EngineKind.SIMULATED, "m", 1_024, 256, 64, Price(1, 1, 1, 1))
NEW = replace(OLD, id="v", state=RevisionState.APPROVED, evaluation="sha256:set")
CATALOG = Catalog(1, revisions=(OLD, NEW), pools=(Pool("p", "v", 1, 2),))
ROLLOUT = Rollout("ro-1", "assistant", "old", "v", RolloutPlan(), Proposed(0), "ada", 0)
SNAPSHOT = build_snapshot(CATALOG)
TEXTS = ("Name a river.", "Count to five.", "Say a colour.")


@dataclass
class Shelf:
    """A cell with one replica, and a set."""

    replica: ReplicaAddress
    content: bytes
    published: Snapshot = SNAPSHOT

    async def catalog(self) -> Catalog:
        return CATALOG

    async def read_file(self, digest: str) -> bytes:
        return self.content

    def ready_of(self, pool: str) -> Sequence[ReplicaAddress]:
        return [self.replica]


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    """Engine processes of this module."""
    started = Children()
    yield started
    started.close()


@pytest.fixture(params=IMPLEMENTATIONS)
async def under_test(request: pytest.FixtureRequest, children: Children) -> AsyncIterator[UnderTest]:
    """A replica of each engine."""
    implementation: Implementation = request.param
    async with implementation(children, False) as opened:
        yield opened


def set_of(expected: Mapping[str, Mapping[str, str]], most: int = 12) -> bytes:
    """A set with a case for each text."""
    return b"\n".join(
        msgspec.json.encode({"id": f"case-{number}", "input": text, "max_output_tokens": most, "expect": expect})
        for number, (text, expect) in enumerate(expected.items())
    )


async def evaluated(under_test: UnderTest, content: bytes) -> Evaluation:
    shelf = Shelf(under_test.replica, content)
    async with asyncio.timeout(WAIT_S):
        return await Evaluator(shelf, shelf, lambda kind: under_test.engine, shelf).evaluate(ROLLOUT)


async def test_what_is_asked_twice_is_scored_alike(under_test: UnderTest) -> None:
    """Protects comparability: the set is asked as requests are, its answers are whole, and the next time they are the same."""
    asked = Sampling(temperature=0.0, seed=0)
    answers = [
        (await under_test.finish(replace(under_test.call(text, chat=True, most=12), sampling=asked))).text for text in TEXTS
    ]
    assert all(answer.strip() for answer in answers)
    expected = {text: {"equals": answer} for text, answer in zip(TEXTS, answers, strict=True)}
    expected["Sing."] = {"contains": "nothing says this"}
    with capture_logs() as logs:
        for _ in range(2):
            assert await evaluated(under_test, set_of(expected)) == Evaluated(Score(3, 4, ("case-3",)))
    await under_test.check_idle(0)
    assert not logs


async def test_a_replica_that_is_gone_is_the_reason(children: Children, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects a rollout from a score of what nobody answered: after few attempts it is not evaluated."""
    monkeypatch.setattr("weir.control.evaluation._RETRY_S", 0.01)
    async with simulated_server(children, True) as under_test:
        under_test.kill()
        found = await evaluated(under_test, set_of({"Name a river.": {"contains": "a"}}))
    assert isinstance(found, NotEvaluated) and found.detail.startswith(f"Case 'case-0' failed {ATTEMPTS_MAX} times: ")


@pytest.mark.model
async def test_a_model_is_told_from_what_it_knows(children: Children) -> None:
    """Protects what a set is for: a small model knows the capital of France, and not a name that was never said."""
    asked = "What is the capital of France? Answer with one word."
    expected = {asked: {"contains": "Paris"}, "Who am I?": {"contains": "Melusine"}}
    async with llamacpp(children, False) as under_test:
        assert await evaluated(under_test, set_of(expected, most=24)) == Evaluated(Score(1, 2, ("case-1",)))
