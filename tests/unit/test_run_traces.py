"""Traces are read row by row from the files that people have; a file that is none is refused before anything runs."""

import gzip
import json
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from weir import errors
from weir.core.routing.prefixes import marks_within
from weir.sim.runs.arrivals import Arrival, drawn_workload
from weir.sim.runs.mixtures import Chosen, Faster
from weir.sim.runs.prompt_blocks import engine_keys, prefix_of, session_tenant
from weir.sim.runs.traces import trace_workload


def written(path: Path, text: str) -> Path:
    """A file with this text, compressed if its name says so."""
    content = text.encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@pytest.mark.parametrize("name", ["small.csv", "small.csv.gz"])
@pytest.mark.parametrize("column", ["tenant", "client"])
def test_a_table_with_tenants(tmp_path: Path, name: str, column: str) -> None:
    """Protects tables with a column of tenants or clients, compressed or not."""
    path = written(tmp_path / name, f"t_s,{column},input_tokens,output_tokens\n0.0,7,10,3\n1.25,x,20,1\n1.25,7,5,5\n")
    trace = trace_workload(path)
    assert (trace.tenants, trace.span_s, trace.label) == (("7", "x"), 1.25, name)
    assert list(trace.arrivals(Random(1))) == [Arrival(0.0, "7", 10, 3), Arrival(1.25, "x", 20, 1), Arrival(1.25, "7", 5, 5)]


def test_a_table_without_tenants_found_by_its_name(tmp_path: Path) -> None:
    """Protects traces that name nobody, and looking in a folder, with and without the suffix."""
    written(tmp_path / "plain.csv.gz", "t_s,input_tokens,output_tokens\n0.5,10,3\n")
    for name in ("plain", "plain.csv.gz"):
        trace = trace_workload(Path(name), tmp_path)
        assert trace.tenants == ("all",) and list(trace.arrivals(Random(1))) == [Arrival(0.5, "all", 10, 3)]


def test_requests_of_one_tick_are_spread_over_it(tmp_path: Path) -> None:
    """Protects recorded lines: requests that share a tick come within it and before the next, in order, repeatably."""
    rows = [(0, 100, 1), (0, 200, 2), (0, 300, 3), (3_000, 400, 4), (4_000, 500, 5), (4_000, 600, 6)]
    lines = [{"timestamp": at, "input_length": i, "output_length": o, "hash_ids": [0, 1]} for at, i, o in rows]
    path = written(tmp_path / "ticks.jsonl.gz", "".join(json.dumps(line) + "\n" for line in lines))
    trace = trace_workload(path)
    arrivals = list(trace.arrivals(Random(5)))
    assert arrivals == list(trace.arrivals(Random(5))) != list(trace.arrivals(Random(6)))
    assert [(arrival.input_tokens, arrival.output_tokens) for arrival in arrivals] == [(i, o) for _, i, o in rows]
    times = [arrival.at_s for arrival in arrivals]
    assert times == sorted(times) and len(set(times)) == 6
    assert times[2] < 3.0 <= times[3] < 4.0 <= times[4] and times[5] < 7.0


def test_a_session_is_one_tenants(tmp_path: Path) -> None:
    """Protects recorded blocks: who shares more than the first one is the same tenant; without any there is one tenant."""
    blocks = [[0, 1, 2], [0, 3], [0, 1, 4, 5], [0], [0, 3]]
    lines = [{"timestamp": 0, "input_length": 2_000, "output_length": 1, "hash_ids": each} for each in blocks]
    path = written(tmp_path / "sessions.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    trace = trace_workload(path)
    arrivals = list(trace.arrivals(Random(1)))
    assert [list(arrival.blocks) for arrival in arrivals] == blocks
    tenants = [arrival.tenant for arrival in arrivals]
    assert tenants[0] == tenants[2] != tenants[1] == tenants[4] and set(trace.tenants) == set(tenants)
    bare = written(tmp_path / "bare.jsonl", '{"timestamp": 0, "input_length": 5, "output_length": 5}\n')
    assert next(trace_workload(bare).arrivals(Random(1)))[1:] == ("all", 5, 5, ())


def test_sessions_are_spread_over_few_tenants() -> None:
    """Protects the number of tenants: fifty for any number of sessions, each with about as many."""
    found = Counter(session_tenant((0, session)) for session in range(5_000))
    assert len(found) == 50 and max(found.values()) < 150


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("empty.csv", "t_s,input_tokens,output_tokens\n"),
        ("columns.csv", "t_s,input,output\n0,1,1\n"),
        ("order.csv", "t_s,input_tokens,output_tokens\n1,1,1\n0.5,1,1\n"),
        ("zero.csv", "t_s,input_tokens,output_tokens\n1,0,1\n"),
        ("huge.csv", "t_s,input_tokens,output_tokens\n1,1,1000001\n"),
        ("word.csv", "t_s,input_tokens,output_tokens\n1,many,1\n"),
        ("nan.csv", "t_s,input_tokens,output_tokens\nnan,1,1\n"),
        ("short.csv", "t_s,input_tokens,output_tokens\n1,1\n"),
        ("key.jsonl", '{"timestamp": 0, "input_length": 5}\n'),
        ("json.jsonl", "{\n"),
        ("blocks.jsonl", '{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": [1.5]}\n'),
        ("hash.jsonl", '{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": 3}\n'),
        ("order.jsonl", "".join(f'{{"timestamp": {at}, "input_length": 5, "output_length": 5}}\n' for at in (3_000, 0))),
        ("other.txt", "t_s,input_tokens,output_tokens\n1,1,1\n"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, name: str, text: str) -> None:
    """Protects people from a trace that would be read as something else."""
    with pytest.raises(errors.InvalidRequest, match="--trace takes"):
        trace_workload(written(tmp_path / name, text))


def test_a_file_that_is_not_there_or_no_archive_is_refused(tmp_path: Path) -> None:
    """Protects people from a traceback."""
    (tmp_path / "broken.csv.gz").write_bytes(b"not compressed")
    (tmp_path / "cut.csv.gz").write_bytes(gzip.compress(b"t_s,input_tokens,output_tokens\n" + b"1,1,1\n" * 500)[:-20])
    (tmp_path / "bytes.csv").write_bytes(b"t_s,input_tokens,output_tokens\n\xff,1,1\n")
    for name in ("missing", "broken", "cut", "bytes"):
        with pytest.raises(errors.InvalidRequest, match="--trace takes"):
            trace_workload(Path(name), tmp_path)


# ── what prompts share ───────────────────────────────────────────────────────────────────────────────────────────────


def shared(one: tuple[bytes, ...], other: tuple[bytes, ...]) -> int:
    """Leading digests that are the same."""
    return next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def test_an_engine_looks_up_its_own_blocks() -> None:
    """Protects the simulated prefix cache: 32 blocks of 16 tokens for each recorded one, the same for the same id alone."""
    one, other = engine_keys((0, 7)), engine_keys((0, 9))
    assert len(one) == len(set(one)) == 64 and one[:32] == other[:32] and not set(one[32:]) & set(other[32:])
    assert engine_keys(()) == ()


def test_digests_follow_the_blocks_in_which_the_marks_lie() -> None:
    """Protects what placement is told: prompts share the marks within their shared blocks, and none with another tenant."""
    size = 4 * 1_600
    marks = marks_within(size)
    whole = prefix_of("a", (0, 1, 2, 3), size)
    assert len(whole) == len(set(whole)) == len(marks) and {len(digest) for digest in whole} == {8}
    assert shared(whole, prefix_of("a", (0, 1, 8, 9), size)) == sum(mark <= 4 * 1_024 for mark in marks)
    assert shared(whole, prefix_of("a", (0, 1, 2, 3, 4), 4 * 2_200)) == len(marks)
    assert shared(whole, prefix_of("b", (0, 1, 2, 3), size)) == 0
    assert prefix_of("a", (), size) == () and prefix_of("a", (0,), 4 * 10) == ()
    assert len(prefix_of("a", (0,), size)) == sum(mark <= 4 * 512 for mark in marks)


# ── made of another ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_some_tenants_in_less_time(tmp_path: Path) -> None:
    """Protects measurements of a part: the chosen ones' own requests, each at its share of the time."""
    text = "t_s,tenant,input_tokens,output_tokens\n0.0,a,10,3\n1.0,b,20,1\n3.0,a,5,5\n"
    trace = trace_workload(written(tmp_path / "some.csv", text))
    chosen = Chosen(trace, ("a",))
    assert list(chosen.arrivals(Random(1))) == [Arrival(0.0, "a", 10, 3), Arrival(3.0, "a", 5, 5)]
    assert (chosen.span_s, chosen.label) == (3.0, "some.csv (1 of 2 tenants)")
    faster = Faster(chosen, 1.5)
    assert list(faster.arrivals(Random(1))) == [Arrival(0.0, "a", 10, 3), Arrival(2.0, "a", 5, 5)]
    assert (faster.span_s, faster.tenants, faster.label) == (2.0, ("a",), "some.csv (1 of 2 tenants) (1.5 times its rate)")
    assert Faster(drawn_workload("poisson:1"), 2).span_s is None
