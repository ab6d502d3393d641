"""Runs a revision's evaluation set on a replica of its own, and scores it.

One case after the other, greedily and with a fixed seed: what is decoded beside it changes an engine's rounding, and two
revisions are compared by this. Nothing may be routed to the revision meanwhile, so that it shares a replica with no tenant:
once something is, it ends. Answers are looked at one by one and dropped; nothing of a case but its id is ever told.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol, TypeVar
from weakref import WeakValueDictionary

import structlog

from weir import errors
from weir.control.catalog_lookup import require_revision
from weir.control.model_commands import targets_of
from weir.core.registry.golden_set import Case, Score, parse_golden_set, score
from weir.core.registry.model import EngineKind, Revision
from weir.core.registry.rollout_decision import Evaluated, Evaluation, NotEvaluated, NothingToEvaluate
from weir.core.registry.rollout_record import Rollout
from weir.core.registry.snapshot import Snapshot
from weir.core.request import Sampling
from weir.messages import ReplicaAddress
from weir.ports import Catalog, Delta, Engine, EngineCall, EngineEnd
from weir.units import Bytes

T = TypeVar("T")

ATTEMPTS_MAX = 3
"""Of a case: a replica that is lost under it may be chance, and a third one is not."""
CASE_S = 600.0
"""The longest output at 14 tokens a second. The engine's own bounds of silence are far shorter."""
ANSWER_BYTES_MAX: Bytes = 1 << 20
"""A hundred times what the longest output usually has: an engine that sends more does not do what it was asked."""
_RETRY_S = 3.0  # longer than until the next probe, which finds out about a replica that is lost
_CHECK_S = 0.5
_LANE = 0
_SAMPLING = Sampling(temperature=0.0, seed=0)

_log = structlog.get_logger("weir.control")


class EvaluationSets(Protocol):
    """Where evaluation sets are kept."""

    async def read_file(self, digest: str) -> bytes:
        """Raises ArtifactRefused, ArtifactsUnavailable."""
        ...


class ReadyReplicas(Protocol):
    """Who knows which replicas answer."""

    def ready_of(self, pool: str) -> Sequence[ReplicaAddress]:
        """The replicas of a pool that answered their last probe."""
        ...


class Approved(Protocol):
    """What is approved, and what is routed where."""

    @property
    def published(self) -> Snapshot:
        """The last snapshot that was published."""
        ...

    async def catalog(self) -> Catalog:
        """Everything as it is stored. Raises LedgerUnavailable."""
        ...


class _BrokeOff(Exception):
    """The evaluation cannot go on. detail: one sentence, without anybody's text."""

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail


class _InUse(Exception):
    """An alias leads to the revision."""


class Evaluator:
    """engine_for: the client of an engine kind."""

    def __init__(
        self, sets: EvaluationSets, replicas: ReadyReplicas, engine_for: Callable[[EngineKind], Engine], approved: Approved
    ) -> None:
        self._sets = sets
        self._replicas = replicas
        self._engine_for = engine_for
        self._approved = approved
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by revision, for two aliases' rollouts

    async def evaluate(self, rollout: Rollout) -> Evaluation:
        """How a rollout's canary does on its set; waits for a ready replica and for the store, so whoever asks bounds it.

        A canary that serves somebody already gets the score of its own last rollout instead, if that had one.
        """
        catalog = await _from_store(self._approved.catalog)
        canary = require_revision(catalog, rollout.canary)
        if canary.evaluation is None:
            return NothingToEvaluate()
        turn = self._turns.setdefault(canary.id, asyncio.Lock())
        async with turn:
            try:
                reached = await self._run(rollout.id, canary)
            except _BrokeOff as broke_off:
                return NotEvaluated(broke_off.detail)
            except _InUse:
                known = known_score(await _from_store(self._approved.catalog), canary.id)
                if known is None:
                    return NotEvaluated("An alias leads to the revision, so its replicas are not free.")
                reached = known
        stable = require_revision(catalog, rollout.stable)
        return Evaluated(reached, known_score(catalog, stable.id) if stable.evaluation == canary.evaluation else None)

    async def _run(self, rollout_id: str, revision: Revision) -> Score:
        """Raises _BrokeOff, and _InUse before the first case or as soon as that is so."""
        cases = await self._cases_of(revision)
        passed = set[str]()
        for case in cases:
            answer = await self._answer_to(case, revision, rollout_id)
            if answer is not None and case.expect.is_met(answer):
                passed.add(case.id)
        return score(cases, passed)

    async def _cases_of(self, revision: Revision) -> Sequence[Case]:
        """Raises _BrokeOff for a set that is not there, is not what was registered, or cannot be asked."""
        digest = revision.evaluation
        assert digest is not None
        try:
            cases = parse_golden_set(await _from_store(lambda: self._sets.read_file(digest)))
        except errors.CallerFault as refused:
            raise _BrokeOff(refused.detail) from refused
        talk = next((case for case in cases if not isinstance(case.input, str)), None)
        if talk is not None and not revision.chat:
            raise _BrokeOff(f"Case {talk.id!r} is a conversation, and the revision takes plain prompts only.")
        return cases

    def _check_unused(self, revision: Revision) -> None:
        if leads_to(self._approved.published, revision.id):
            raise _InUse

    # ── one case ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _answer_to(self, case: Case, revision: Revision, rollout_id: str) -> str | None:
        """The output; None where the engine refuses the case. Raises _BrokeOff once every attempt failed."""
        failed: dict[str, str] = {}
        for attempt in range(ATTEMPTS_MAX):
            if attempt:
                await asyncio.sleep(_RETRY_S)
            address = await self._ready_replica(revision, failed)
            try:
                return await self._generate(case, revision, address, rollout_id)
            except errors.EngineRejected:
                return None
            except errors.EngineFault as fault:
                failed[address.name] = fault.detail
        raise _BrokeOff(f"Case {case.id!r} failed {ATTEMPTS_MAX} times: {list(failed.values())[-1]}")

    async def _ready_replica(self, revision: Revision, failed: Mapping[str, str]) -> ReplicaAddress:
        """One that is ready, as soon as there is one, and rather one that did not fail before. Raises _InUse."""
        while True:
            self._check_unused(revision)
            pools = [pool.name for pool in self._approved.published.pools.values() if pool.revision == revision.id]
            ready = [address for pool in pools for address in self._replicas.ready_of(pool)]
            if ready:
                return min(ready, key=lambda address: address.name in failed)
            await asyncio.sleep(_CHECK_S)

    async def _generate(self, case: Case, revision: Revision, address: ReplicaAddress, rollout_id: str) -> str:
        """The output of one generation, once the replica runs nothing for it. Raises EngineFault, _InUse."""
        most = min(case.max_output_tokens, revision.max_output_tokens)
        salt = f"evaluation-{rollout_id}"
        answer, is_late = _Answer(), False
        call = EngineCall(address, _LANE, case.prompt, revision.chat, most, _SAMPLING, salt)
        run = self._engine_for(address.engine).start(call, answer)
        try:
            async with asyncio.timeout(CASE_S):
                while not await answer.is_over(_CHECK_S):
                    self._check_unused(revision)
        except TimeoutError:
            is_late = True
        finally:
            run.cancel()
        await run.stopped()
        if is_late:
            raise errors.Stalled(f"It did not end within {CASE_S:g} seconds.")
        return answer.text()


class _Answer:
    """A generation's sink: its text, as long as it is bounded."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._size_bytes: Bytes = 0
        self._fault: errors.WeirError | None = None
        self._ended = asyncio.Event()

    def on_deltas(self, deltas: Sequence[Delta]) -> None:
        """Output came; what is too much ends it."""
        for delta in deltas:
            self._size_bytes += len(delta.text.encode())
            self._pieces.append(delta.text)
        if self._size_bytes > ANSWER_BYTES_MAX:
            self._pieces.clear()
            self._fault = errors.EngineError(f"The engine sent more than {ANSWER_BYTES_MAX} bytes.")
            self._ended.set()

    def on_end(self, end: EngineEnd) -> None:
        """The generation is over."""
        self._fault = self._fault or end.fault
        self._ended.set()

    async def is_over(self, within_s: float) -> bool:
        """Whether it ended, once it did or after a time."""
        try:
            async with asyncio.timeout(within_s):
                await self._ended.wait()
        except TimeoutError:
            return False
        return True

    def text(self) -> str:
        """What was generated. Raises EngineFault if it failed."""
        if self._fault is not None:
            raise self._fault
        return "".join(self._pieces)


async def _from_store(ask: Callable[[], Awaitable[T]]) -> T:
    """The answer of a store, which is asked again while it is away."""
    is_away = False
    while True:
        try:
            return await ask()
        except errors.StoreFault as fault:
            if not is_away:
                _log.warning("evaluation_postponed", reason=fault.code)
            is_away = True
        await asyncio.sleep(_RETRY_S)


def leads_to(snapshot: Snapshot, revision: str) -> bool:
    """Whether an alias means a revision, or sends it a share."""
    aliases = (*snapshot.aliases.values(), *snapshot.tenant_aliases.values())
    return any(revision in targets_of(alias) for alias in aliases)


def known_score(catalog: Catalog, revision: str) -> Score | None:
    """A revision's score on its own set: that of the newest rollout that evaluated it, if one did."""
    scored = [each for each in catalog.rollouts if each.canary == revision and each.score is not None]
    newest = max(scored, key=lambda rollout: rollout.proposed_at_ms, default=None)
    return None if newest is None else newest.score
