"""Traces are read row by row from the files that people have; a file that is none is refused before anything runs."""

import gzip
import json
from pathlib import Path
from random import Random

import pytest

from weir import errors
from weir.sim.runs.arrivals import Arrival
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
