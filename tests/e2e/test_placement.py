"""Where requests go, through a whole cell: pools, held prefixes, deadlines, KV memory and prompts that are still to be read."""

import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

import pytest
from tests.e2e.conftest import engine_process
from tests.e2e.engine_tap import EngineTap
from tests.e2e.http_client import (
    Account,
    Json,
    Reply,
    admin_of,
    demo_account,
    exchange,
    is_at_rest,
    metrics,
    new_account,
    wait_until,
)
from tests.e2e.running_cell import RunningCell, running_cell

from weir.core.request import Message
from weir.engines.simulated_text import natural_output_tokens

ROW = "llama3.1-8b/a100_sxm/tp1"
"""About 13 ms a token, and 0.06 ms to read one: what is measured here is far above what a busy machine adds."""

POOLS = ("assistant", "long", "jobs", "own")
SHORT_MAX, LONG_MAX = 500, 1_500
KV_TOKENS = 2_048
TURNS = 4
_numbers = count(1)


def prompt_of(tokens: int, output_tokens: int = 1) -> str:
    """A prompt that nobody sent before, of about so many tokens, whose answer does not end by itself before so many, ≤ 240."""
    prompts = (f"request-{number} ".ljust(4 * tokens - 28, "x") for number in _numbers)
    return next(prompt for prompt in prompts if natural_output_tokens((Message("user", prompt),)) >= output_tokens)


def at_once(account: Account, asked: Iterable[Mapping[str, object]]) -> list[Json]:
    """Generations that are all sent now; their answers in the same order, each of which must be good."""
    bodies = list(asked)
    with ThreadPoolExecutor(len(bodies)) as threads:
        replies = list(threads.map(lambda fields: account.generate(**fields), bodies))
    assert [reply.status for reply in replies] == [200] * len(bodies), [reply.body for reply in replies if reply.status != 200]
    return [reply.json for reply in replies]


def dispatch_of(account: Account, request_id: str) -> Json:
    """How a request was placed, as it is explained."""
    path = f"/generations/{account.tenant}/{request_id}/explanation"
    [timeline] = account.admin.done("GET", path)["timelines"]
    [dispatched] = [event for event in timeline["events"] if event["event"] == "dispatched"]
    return {**dispatched, "considered": [event for event in timeline["events"] if event["event"] == "considered"]}


def replicas_of(cell: RunningCell) -> list[Json]:
    """All replicas as the management API shows them."""
    shown: list[Json] = admin_of(cell).done("GET", "/replicas")["replicas"]
    return shown


def refusal_of(reply: Reply, status: int, code: str) -> Json:
    """The problem, which must be this one."""
    assert (reply.status, reply.json.get("code")) == (status, code), reply.body
    return reply.json


# ── pools ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Pools:
    """A cell of several pools, each with an engine of its own behind a tap. urls: of the engines themselves.

    The dedicated pool's engine is the fastest: whoever may go there would.
    """

    cell: RunningCell
    taps: Mapping[str, EngineTap]
    urls: Mapping[str, str]

    def reached(self, prompts: Iterable[str]) -> Counter[str]:
        """How many of these prompts reached the engine of which pool."""
        bodies = {pool: [asked.body.decode() for asked in tap.generations] for pool, tap in self.taps.items()}
        return Counter(pool for prompt in prompts for pool, sent in bodies.items() for body in sent if prompt in body)

    def order(self, pool: str, **faults: object) -> None:
        """The faults of a pool's engine from now on."""
        assert exchange(self.urls[pool], "PUT", "/faults", body=faults).status == 200


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pools]:
    with ExitStack() as stack:
        urls = {pool: stack.enter_context(engine_process(*(() if pool == "own" else ("--row", ROW)))) for pool in POOLS}
        taps = {pool: stack.enter_context(EngineTap(url)) for pool, url in urls.items()}
        config = f"""
[pool]
service_classes = ["interactive"]
input_tokens_max = {SHORT_MAX}

[pools.long]
service_classes = ["interactive"]
input_tokens_max = {LONG_MAX}
urls = ["{taps["long"].url}"]

[pools.jobs]
service_classes = ["batch"]
urls = ["{taps["jobs"].url}"]

[pools.own]
tenant = "globex"
concurrency = 1
urls = ["{taps["own"].url}"]
"""
        state = tmp_path_factory.mktemp("pools") / "state"
        cell = stack.enter_context(running_cell(state, engine=(taps["assistant"].url,), config=config))
        yield Pools(cell, taps, urls)
        assert "Traceback" not in cell.tail()


def asked_in_turn(account: Account, prompts: Iterable[str]) -> None:
    """One generation after the other."""
    for prompt in prompts:
        assert account.generate(input=prompt).status == 200


def batch_account(account: Account) -> Account:
    """The same tenant through an application for batch work."""
    name = f"jobs-{next(_numbers)}"
    account.admin.done("POST", f"/tenants/{account.tenant}/applications", {"name": name, "service_class": "batch"})
    made = account.admin.done("POST", f"/tenants/{account.tenant}/applications/{name}/keys")
    return Account(account.cell, account.tenant, name, made["secret"], made["id"], account.admin)


def test_a_dedicated_pool_is_its_tenants_alone_and_batches_have_theirs(pools: Pools) -> None:
    """Protects isolation: by what engines were sent, a dedicated tenant and all others never meet, nor do jobs and people."""
    owner, other = demo_account(pools.cell, "globex"), demo_account(pools.cell)
    own, own_jobs, people, jobs = ([prompt_of(30) for _ in range(number)] for number in (3, 2, 8, 3))
    asked_in_turn(owner, own)
    asked_in_turn(batch_account(owner), own_jobs)
    asked_in_turn(other, people)
    asked_in_turn(batch_account(other), jobs)
    assert pools.reached(own + own_jobs) == {"own": 5}
    assert pools.reached(jobs) == {"jobs": 3}
    reached = pools.reached(people)
    assert set(reached) <= {"assistant", "long"} and reached.total() == 8


def test_a_long_input_goes_where_it_is_taken_or_is_refused_with_the_limit(pools: Pools) -> None:
    """Protects short requests from long ones, and callers from guessing how long an input may be."""
    account, fits_long = demo_account(pools.cell), prompt_of(2 * SHORT_MAX)
    asked_in_turn(account, [fits_long])
    assert pools.reached([fits_long]) == {"long": 1}
    too_long = prompt_of(2 * LONG_MAX)
    problem = refusal_of(account.generate(input=too_long), 400, "input_too_long")
    assert problem["limit"] == LONG_MAX and 2 * LONG_MAX - 20 < problem["input_tokens"] <= 2 * LONG_MAX
    assert pools.reached([too_long]) == {}


def test_a_tenant_that_may_leave_its_busy_pool_goes_where_it_starts_sooner(pools: Pools) -> None:
    """Protects a dedicated tenant's choice: it waits for its own pool, unless it may leave; then the sooner start decides."""
    waits, leaves = prompt_of(30), prompt_of(30)
    with demo_account(pools.cell, "globex") as owner, ThreadPoolExecutor(1) as thread:
        pools.order("own", slowdown=20)
        try:
            busy = owner.stream(input=prompt_of(30, output_tokens=240), max_output_tokens=256)
            waiting = thread.submit(owner.generate, input=waits)
            wait_until(lambda: queued_in(pools.cell, "own") == 1)
            owner.admin.done("PATCH", "/tenants/globex", {"leaves_its_pools": True})
            assert owner.generate(input=leaves).status == 200
            assert queued_in(pools.cell, "own") == 1
        finally:
            owner.admin.done("PATCH", "/tenants/globex", {"leaves_its_pools": False})
            pools.order("own")
        busy.wire.close()
        assert waiting.result().status == 200
    assert pools.reached([waits]) == {"own": 1}
    assert pools.reached([leaves]).keys() <= {"assistant", "long"} and pools.reached([leaves]).total() == 1


def queued_in(cell: RunningCell, pool: str) -> int:
    """Admitted requests that wait for a pool."""
    shown = admin_of(cell).done("GET", "/pools")["pools"]
    return int(next(each["queued"] for each in shown if each["name"] == pool))


def test_a_replica_whose_answers_are_late_is_allowed_fewer_lanes(pools: Pools) -> None:
    """Protects operators: that a replica adapts, and by how much, is in the management API and in the metrics."""
    pools.order("long", slowdown=5)
    try:
        at_once(demo_account(pools.cell), [{"input": prompt_of(SHORT_MAX + 100, 10), "max_output_tokens": 10}] * 4)
    finally:
        pools.order("long")
    wait_until(lambda: is_at_rest(pools.cell))
    [replica] = [each for each in replicas_of(pools.cell) if each["pool"] == "long"]
    assert (replica["allowed"], replica["running"], replica["concurrency"]) == (4, 0, 16)
    lanes = {name: value for name, value in metrics(pools.cell).items() if name.startswith("weir_lanes{") and '"long"' in name}
    states = {name.partition('state="')[2].rstrip('"}'): value for name, value in lanes.items()}
    assert states == {"taken": 0, "free": 4, "withheld": 12}


# ── held prefixes ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_conversations_spread_and_each_stays_where_it_is_held(tmp_path: Path) -> None:
    """Protects first tokens: what came together spreads evenly, and each next turn finds all before it in its own cache."""
    with ExitStack() as stack:
        engines = [stack.enter_context(engine_process("--prefix-cache", "--row", ROW)) for _ in range(2)]
        config = "[pool]\nconcurrency = 40\n[coordinator]\nconcurrency_min_percent = 100\nqueue_wait_ms = 60000\n"
        cell = stack.enter_context(running_cell(tmp_path / "state", engine=engines, config=config))
        account, prompts = demo_account(cell), [prompt_of(400, 20) for _ in range(40)]
        at_once(account, ({"request_id": f"c-{n}", "input": p, "max_output_tokens": 20} for n, p in enumerate(prompts)))
        placed = {number: dispatch_of(account, f"c-{number}")["replica"] for number in range(40)}
        spread = Counter(placed.values())
        assert len(spread) == 2 and min(spread.values()) >= 15, spread
        for replica in spread:
            number = next(number for number, at in placed.items() if at == replica)
            holder = check_stays(account, f"t-{number}", prompts[number], replica)
            last = f"t-{number}-{TURNS - 1}"
        told = " ".join(explained(account, last).split())
        assert f"score {holder['score']:,}, {holder['cached_tokens']:,} cached)" in told


def check_stays(account: Account, name: str, opening: str, replica: str) -> Json:
    """A conversation that began there grows there, nearly all that came before cached each time; its last candidate there."""
    holder: Json = {}
    turns, before = [{"role": "user", "content": opening}], 400
    for number in range(TURNS):
        turns += [{"role": "assistant", "content": "It does."}, {"role": "user", "content": prompt_of(400)}]
        request_id = f"{name}-{number}"
        usage = account.generate(request_id=request_id, input=turns, max_output_tokens=1).json["usage"]
        assert before - 60 <= usage["cached_input_tokens"] <= before + 20, (number, usage)
        dispatched = dispatch_of(account, request_id)
        scores = {each["replica"]: each["score"] for each in dispatched["candidates"]}
        [holder] = [each for each in dispatched["candidates"] if "cached_tokens" in each]
        assert dispatched["replica"] == holder["replica"] == replica == min(scores, key=scores.__getitem__)
        assert holder["score"] == 2 * (usage["input_tokens"] - holder["cached_tokens"])
        assert holder["cached_tokens"] <= usage["cached_input_tokens"] + 20
        before = usage["input_tokens"]
    return holder


def explained(account: Account, request_id: str) -> str:
    """What `weir explain` prints."""
    command = [sys.executable, "-m", "weir.cli.main", "explain", request_id, "--tenant", account.tenant]
    command += ["--state", str(account.cell.state)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


# ── deadlines, and prompts that are still to be read ─────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCell]:
    """A cell whose replicas, one for all and one for globex, have four lanes and read one prompt of 1,500 tokens at a time."""
    with ExitStack() as stack:
        flags = ("--row", ROW, "--context-tokens", "16384", "--faults", '{"slowdown": 3}')
        shared, own = (stack.enter_context(engine_process(*flags)) for _ in range(2))
        config = f"""
[pool]
concurrency = 4

[pools.own]
tenant = "globex"
urls = ["{own}"]

[coordinator]
queue_wait_ms = 600000
concurrency_min_percent = 100
"""
        state = tmp_path_factory.mktemp("reader") / "state"
        cell = stack.enter_context(running_cell(state, engine=(shared,), config=config))
        yield cell
        assert "Traceback" not in cell.tail()


def test_a_deadline_that_no_idle_replica_meets_is_refused_for_good(reader: RunningCell) -> None:
    """Protects callers from retries in vain: 400 with the field and from when on it may work, and then it does."""
    account, prompt = batch_account(demo_account(reader)), prompt_of(8_000)
    problem = refusal_of(account.generate(input=prompt, deadline_ms=500), 400, "deadline_infeasible")
    least_ms = int(problem["accepted"].removeprefix("above "))
    assert problem["field"] == "deadline_ms" and 0 < problem["deadline_ms"] <= 500 < least_ms < 4_000
    with ThreadPoolExecutor(1) as thread:
        asking = thread.submit(partial(account.generate, input=prompt, deadline_ms=4 * least_ms, max_output_tokens=1))
        wait_until(lambda: unread(reader) > 0)
        assert 7_900 < unread(reader) <= 8_000
        assert asking.result().status == 200
    assert unread(reader) == 0


def unread(cell: RunningCell) -> int:
    """Prompt tokens that the cell's replicas have still to read."""
    return sum(replica["prefill_tokens"] for replica in replicas_of(cell))


def test_a_deadline_that_only_load_makes_unmeetable_is_refused_for_now(reader: RunningCell) -> None:
    """Protects both: an idle replica takes what a busy one refuses with 503, and when to come again."""
    with new_account(reader) as account:
        question = {"max_output_tokens": 8, "deadline_ms": 3_000}
        assert account.generate(**question).status == 200
        body = {"model_alias": "assistant", "max_output_tokens": 256, "stream": True}
        for _ in range(10):
            account.connect().ask("POST", "/v1/generations", key=account.key, body=body | {"input": prompt_of(30, 240)})
        wait_until(lambda: queued_in(reader, "assistant") == 6)
        refused = account.generate(**question)
        problem = refusal_of(refused, 503, "deadline_unmeetable_now")
        assert problem["predicted_ms"] >= problem["deadline_ms"] > 1_000 and int(refused.headers["retry-after"]) >= 1
    wait_until(lambda: is_at_rest(reader))
    assert account.generate(**question).status == 200


def test_whole_answers_count_as_read_once_the_engine_has_output(reader: RunningCell) -> None:
    """Protects throughput: prompts are read one by one, and whole answers run beside one another all the same."""
    account, names = demo_account(reader, "globex"), [f"whole-{number}" for number in range(4)]
    at_once(account, ({"request_id": name, "input": prompt_of(1_500, 40), "max_output_tokens": 40} for name in names))
    met = [candidate for name in names for candidate in dispatch_of(account, name)["candidates"]]
    assert sorted(candidate["running"] for candidate in met) == [0, 1, 2, 3]
    assert [candidate["prefill_tokens"] for candidate in met] == [0] * 4


# ── KV memory ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_does_not_fit_the_kv_memory_waits_outside_the_engine(tmp_path: Path) -> None:
    """Protects from lost work: twelve requests of which four fit all complete, and the engine preempts none."""
    config = """
[pool]
concurrency = 16
typical_output_tokens = 240

[coordinator]
queue_wait_ms = 60000
concurrency_min_percent = 100
"""
    kv = str(KV_TOKENS)
    with (
        engine_process("--kv-tokens", kv, "--context-tokens", kv) as url,
        running_cell(tmp_path / "state", engine=(url,), config=config) as cell,
    ):
        account, prompts = demo_account(cell), [prompt_of(256, 240) for _ in range(12)]
        asked = [{"request_id": f"kv-{n}", "input": p, "max_output_tokens": 240} for n, p in enumerate(prompts)]
        answers = at_once(account, asked)
        assert [answer["usage"]["output_tokens"] for answer in answers] == [240] * 12
        check_held_back(account, [f"kv-{number}" for number in range(12)])
        assert preemptions(url) == 0
        wait_until(lambda: is_at_rest(cell))
        [replica] = replicas_of(cell)
        assert (replica["kv_tokens"], replica["kv_tokens_reserved"]) == (KV_TOKENS, 0)
        with ThreadPoolExecutor(12) as threads:
            list(threads.map(partial(asked_directly, url), prompts))
        assert preemptions(url) > 0, "the engine by itself would not have preempted either"


def check_held_back(account: Account, names: Iterable[str]) -> None:
    """Never more than four ran at once, by what was reserved, and only for want of room did any wait."""
    placed = [dispatch_of(account, name) for name in names]
    met = [candidate for dispatched in placed for candidate in dispatched["candidates"]]
    assert max(candidate["running"] for candidate in met) == 3
    assert max(candidate["kv_tokens"] for candidate in met) <= KV_TOKENS - 490
    whys = {why["why_not"] for dispatched in placed for seen in dispatched["considered"] for why in seen["candidates"]}
    assert whys == {"no room"}


def asked_directly(url: str, prompt: str) -> None:
    """The same request without Weir."""
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 240}
    assert exchange(url, "POST", "/v1/chat/completions", body=body).status == 200


def preemptions(url: str) -> float:
    """How often the engine gave up a sequence's blocks since it started."""
    lines = exchange(url, "GET", "/metrics").body.decode().splitlines()
    [line] = [line for line in lines if line.startswith("vllm:num_preemptions_total")]
    return float(line.rsplit(" ", 1)[1])
