"""The simulated batch under any load: blocks, preemption, prefix cache, order; and that a salt hides what others asked."""

from collections import deque
from dataclasses import dataclass, field
from random import Random

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from weir.engines.simulated_batch import SimulatedBatch, Step
from weir.engines.simulated_blocks import BLOCK_TOKENS
from weir.engines.step_time import StepTime, step_time
from weir.units import ceil_div

STEP_TOKENS = 48
STEPS_MAX = 20_000
FITTED = step_time("llama3.1-8b/h100_sxm/tp1")
SMALL = StepTime(msgspec.structs.replace(FITTED.row, step_tokens_max=STEP_TOKENS), FITTED.preset)


@dataclass(frozen=True)
class _Job:
    """A sequence. topic: equal topics begin with equal tokens; cancel_after: steps after its arrival, None for never."""

    arrives: int
    prompt: int
    output: int
    topic: int
    salt: str
    cancel_after: int | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(f"{self.topic}/{number}" for number in range(self.prompt // BLOCK_TOKENS)) if self.topic else ()


def _jobs(*, cancels: bool) -> st.SearchStrategy[list[_Job]]:
    after = st.none() | st.integers(0, 30) if cancels else st.none()
    sizes = (st.integers(1, 200), st.integers(1, 60))
    job = st.builds(_Job, st.integers(0, 40), *sizes, st.integers(0, 2), st.sampled_from(["", "a", "b"]), after)
    return st.lists(job, min_size=1, max_size=14)


WORLDS = given(jobs=_jobs(cancels=False), concurrency=st.integers(1, 8), blocks=st.integers(17, 40))


@dataclass
class _Recount:
    """What runs and which tokens of it exist, kept from the steps alone. tokens: in the order in which they started."""

    jobs: list[_Job]
    tokens: dict[int, int] = field(default_factory=dict)
    emitted: dict[int, int] = field(default_factory=dict)

    def count(self, step: Step | None, preempted: int) -> None:
        """Book a step that was just scheduled."""
        for _ in range(preempted):
            self.tokens.popitem()
        if step is None:
            return
        self.tokens.update(step.started)
        for number, chunk in step.prefills:
            self.tokens[number] += chunk
        for number in step.decodes:
            self.tokens[number] = self.jobs[number].prompt + self.emitted[number]

    @property
    def blocks(self) -> int:
        """Blocks that must be held: prefixes once each, everything else by itself."""
        prefixes: set[tuple[str, tuple[str, ...]]] = set()
        own = 0
        for number, tokens in self.tokens.items():
            job = self.jobs[number]
            full = min(tokens // BLOCK_TOKENS, len(job.keys))
            prefixes.update((job.salt, job.keys[: index + 1]) for index in range(full))
            own += ceil_div(tokens, BLOCK_TOKENS) - full
        return len(prefixes) + own


@dataclass
class _Course:
    """A batch, driven to its end. outputs: the counts that each sequence emitted, in order."""

    batch: SimulatedBatch
    jobs: list[_Job]
    steps: list[Step] = field(default_factory=list)
    outputs: dict[int, list[int]] = field(default_factory=dict)
    finished: list[int] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    submitted: list[int] = field(default_factory=list)
    left: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.recount = _Recount(self.jobs)
        self.outputs = {number: [] for number in range(len(self.jobs))}
        todo = deque(sorted(range(len(self.jobs)), key=lambda number: self.jobs[number].arrives))
        for now in range(STEPS_MAX):
            while todo and self.jobs[todo[0]].arrives <= now:
                job = self.jobs[number := todo.popleft()]
                self.submitted.append(number)
                self.batch.submit(number, job.prompt, job.output, job.keys, job.salt)
            if not self._advance(now) and not todo:
                return
        raise AssertionError("the batch does not come to an end")

    def _cancel(self, now: int) -> None:
        for number, job in enumerate(self.jobs):
            if job.cancel_after is not None and now == job.arrives + job.cancel_after:
                self.batch.cancel(number)
                self.left.add(number)

    def _sweep(self) -> None:
        for number in self.batch.sweep():
            self.cancelled.append(number)
            self.recount.tokens.pop(number, None)

    def _advance(self, now: int) -> bool:
        """One step, cancels during it, and what must hold at any of them; False when there was nothing to do."""
        batch, recount = self.batch, self.recount
        preemptions = batch.preemptions
        step = batch.schedule()
        recount.count(step, batch.preemptions - preemptions)
        held = batch.kv_usage * batch.kv_tokens / BLOCK_TOKENS
        assert round(held, 6) == recount.blocks <= batch.kv_tokens // BLOCK_TOKENS
        assert batch.running == len(recount.tokens)
        waiting = set(self.submitted) - recount.tokens.keys() - {*self.finished, *self.cancelled}
        assert batch.waiting == len(waiting)
        assert not waiting or all(
            self.submitted.index(number) < min(map(self.submitted.index, waiting)) for number in recount.tokens
        )
        if step is None:
            return False
        assert len(step.decodes) + sum(chunk for _, chunk in step.prefills) <= STEP_TOKENS
        assert all(chunk > 0 for _, chunk in step.prefills)
        self.steps.append(step)
        self._cancel(now)
        outcome = batch.complete(step)
        for number, tokens in outcome.emitted:
            assert number not in self.left
            self.outputs[number].append(tokens)
            recount.emitted[number] = tokens
        for number in outcome.finished:
            self.finished.append(number)
            del recount.tokens[number]
        self._sweep()
        return True


def _course(jobs: list[_Job], concurrency: int, blocks: int) -> _Course:
    return _Course(SimulatedBatch(SMALL, concurrency, blocks * BLOCK_TOKENS), jobs)


@WORLDS
def test_every_sequence_yields_its_output_however_often_preempted(jobs: list[_Job], concurrency: int, blocks: int) -> None:
    """Protects results and memory: exactly the tokens asked for, once each and in order, and every block given back."""
    course = _course(jobs, concurrency, blocks)
    assert course.outputs == {number: list(range(1, job.output + 1)) for number, job in enumerate(jobs)}
    assert sorted(course.finished) == list(range(len(jobs)))
    assert (course.batch.kv_usage, course.batch.running, course.batch.waiting) == (0, 0, 0)


@given(jobs=_jobs(cancels=True), concurrency=st.integers(1, 8), blocks=st.integers(17, 40))
def test_a_cancel_at_any_time_gives_its_blocks_back(jobs: list[_Job], concurrency: int, blocks: int) -> None:
    """Protects memory from those who leave: running, waiting or preempted, nothing of them stays and nothing more comes."""
    course = _course(jobs, concurrency, blocks)
    assert sorted(course.finished + course.cancelled) == list(range(len(jobs)))
    assert all(course.outputs[number] == list(range(1, len(course.outputs[number]) + 1)) for number in course.cancelled)
    assert course.batch.kv_usage == 0


@WORLDS
def test_who_came_first_runs_first(jobs: list[_Job], concurrency: int, blocks: int) -> None:
    """Protects the order of arrival: no small, cached or preempted one passes who waits longer, nor runs while that waits."""
    course = _course(jobs, concurrency, blocks)
    started = [number for step in course.steps for number, _ in step.started]
    assert list(dict.fromkeys(started)) == sorted(range(len(jobs)), key=lambda number: jobs[number].arrives)


@given(jobs=_jobs(cancels=False), blocks=st.integers(17, 40), concurrency=st.integers(1, 8))
def test_another_salt_finds_a_cold_cache(jobs: list[_Job], blocks: int, concurrency: int) -> None:
    """Protects tenants from each other: after the same prompts under other salts every step is what it is on a new replica."""
    mine = [_salted(job, "mine") for job in jobs]
    warm = _course([_salted(job, "theirs") for job in jobs], concurrency, blocks).batch
    assert _Course(warm, mine).steps == _course(mine, concurrency, blocks).steps


def _salted(job: _Job, salt: str) -> _Job:
    return _Job(job.arrives, job.prompt, job.output, job.topic, salt)


@given(first=st.integers(1, 400), second=st.integers(1, 400), salt=st.sampled_from(["", "a"]))
def test_what_was_computed_under_a_salt_is_not_computed_again(first: int, second: int, salt: str) -> None:
    """Protects the gain: all full blocks in common are found, but one token at least is always computed."""
    jobs = [_Job(0, first, 1, 1, salt), _Job(20, second, 1, 1, salt)]
    course = _course(jobs, 4, 100)
    hits = min(first // BLOCK_TOKENS, (second - 1) // BLOCK_TOKENS) * BLOCK_TOKENS
    computed = sum(chunk for step in course.steps for number, chunk in step.prefills if number == 1)
    assert dict(pair for step in course.steps for pair in step.started) == {0: 0, 1: hits}
    assert (computed, course.batch.prefix_hits) == (second - hits, hits)


# ── a tenant with a stopwatch ────────────────────────────────────────────────────────────────────────────────────────

SECRET, OTHER, GUESS_TOKENS = 1, 2, 480


def _ttft_of_guesses(seed: int, victim_topic: int, guess_salt: str) -> list[float]:
    """The first-token times, in ms, of a tenant that keeps guessing a prompt beside a victim who keeps asking for its own."""
    random = Random(seed)
    batch = SimulatedBatch(FITTED, 8, 3_200)
    arrivals = sorted((random.uniform(0, 20_000), random.random() < 0.5) for _ in range(160))
    asked: dict[int, float] = {}
    ttft: list[float] = []
    now_ms, number = 0.0, 0
    for _ in range(STEPS_MAX):
        while number < len(arrivals) and arrivals[number][0] <= now_ms:
            at_ms, guesses = arrivals[number]
            topic, salt = (SECRET, guess_salt) if guesses else (victim_topic, "victim")
            keys = tuple(f"{topic}/{index}" for index in range(GUESS_TOKENS // BLOCK_TOKENS))
            batch.submit(number, GUESS_TOKENS, random.randint(1, 90), keys, salt)
            if guesses:
                asked[number] = at_ms
            number += 1
        step = batch.schedule()
        if step is None and number == len(arrivals):
            return ttft
        if step is None:
            now_ms = arrivals[number][0]
            continue
        now_ms += step.duration_ms
        ttft += [now_ms - asked[who] for who, tokens in batch.complete(step).emitted if tokens == 1 and who in asked]
    raise AssertionError("the load does not come to an end")


def test_a_stopwatch_tells_nothing_about_another_salt() -> None:
    """Protects secrets: whether the victim asks just what is guessed or something else, the guesser's times are the same."""
    for seed in range(5):
        times = _ttft_of_guesses(seed, SECRET, "guesser")
        assert len(times) > 50 and times == _ttft_of_guesses(seed, OTHER, "guesser")
        # The stopwatch is good enough: with the victim's own salt it does tell.
        assert _ttft_of_guesses(seed, SECRET, "victim") != _ttft_of_guesses(seed, OTHER, "victim")
