"""Recorded workloads, read from a path row by row: tables of times and lengths, and Mooncake's lines with their ticks smeared.

A file is read twice: once to check every row and to know its tenants and its end, and once as it is replayed. Nothing of a
trace lies in this project; the folder is the reader's.

    NAME.csv[.gz]    t_s, input_tokens, output_tokens, and perhaps tenant or client
    NAME.jsonl[.gz]  timestamp (ms, in ticks of 3 s that many requests share), input_length, output_length, and perhaps
                     hash_ids (of the prompt's 512-token blocks), from which its tenant follows
"""

import csv
import gzip
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from weir.sim.runs.arrivals import TOKENS_MAX, Arrival
from weir.sim.runs.prompt_blocks import session_tenant
from weir.sim.runs.terms import refused

_TICK_S = 3.0
_SUFFIXES = ("", ".csv.gz", ".jsonl.gz", ".csv", ".jsonl")
_ALONE = "all"
"""The tenant of a trace that names none."""
_DAYS_MAX_S = 90 * 86_400.0


@dataclass(frozen=True, slots=True)
class TraceWorkload:
    """A checked trace. Use `trace_workload`."""

    path: Path
    tenants: tuple[str, ...]
    span_s: float

    @property
    def label(self) -> str:
        """The file's name."""
        return self.path.name

    def arrivals(self, random: Random) -> Iterator[Arrival]:
        """The file's rows; random places requests within their ticks."""
        return _read(self.path, random)


def trace_workload(path: Path, folder: Path | None = None) -> TraceWorkload:
    """A trace by path, or by its name in a folder, with or without its suffix. Raises InvalidRequest naming what is wrong."""
    places = [path] if folder is None else [path, folder / path]
    found = next(
        (at for place in places for suffix in _SUFFIXES if (at := place.with_name(place.name + suffix)).is_file()), None
    )
    if found is None or not found.name.removesuffix(".gz").endswith((".csv", ".jsonl")):
        raise refused("--trace", str(path), "a file .csv, .csv.gz, .jsonl or .jsonl.gz, by path or by name in --traces")
    tenants: dict[str, None] = {}
    span_s = -1.0
    for arrival in _read(found, Random(0)):
        tenants[arrival.tenant] = None
        span_s = arrival.at_s
    if span_s < 0:
        raise refused("--trace", found.name, "a file with at least one row")
    return TraceWorkload(found, tuple(tenants), span_s)


def _read(path: Path, random: Random) -> Iterator[Arrival]:
    is_table = path.name.removesuffix(".gz").endswith(".csv")
    at_s, number = 0.0, 0
    with _opened(path) as lines:
        rows = _table_rows(lines) if is_table else _smeared(lines, random)
        try:
            for number, arrival in enumerate(rows, 1):  # noqa: B007 (the refusal names it)
                if not at_s <= arrival.at_s <= _DAYS_MAX_S:
                    raise ValueError("its time is out of order")
                if not (1 <= arrival.input_tokens <= TOKENS_MAX and 1 <= arrival.output_tokens <= TOKENS_MAX):
                    raise ValueError("a length is out of range")
                at_s = arrival.at_s
                yield arrival
        except (ValueError, KeyError, TypeError, csv.Error, OSError, EOFError) as fault:
            raise refused(
                "--trace",
                f"{path.name} (near row {number + 1})",
                f"rows in the order of time, up to {_DAYS_MAX_S:,.0f} s, with lengths from 1 to {TOKENS_MAX:,}",
            ) from fault


@contextmanager
def _opened(path: Path) -> Iterator[io.TextIOBase]:
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        assert isinstance(lines, io.TextIOBase)
        yield lines


def _table_rows(lines: io.TextIOBase) -> Iterator[Arrival]:
    rows = csv.reader(lines)
    columns = next(rows, [])
    time, inputs, outputs = (columns.index(name) for name in ("t_s", "input_tokens", "output_tokens"))
    who = next((columns.index(name) for name in ("tenant", "client") if name in columns), None)
    for row in rows:
        if len(row) != len(columns):
            raise ValueError("it has too few or too many columns")
        yield Arrival(float(row[time]), _ALONE if who is None else row[who], int(row[inputs]), int(row[outputs]))


def _smeared(lines: io.TextIOBase, random: Random) -> Iterator[Arrival]:
    """Requests of one tick are spread evenly over it, at most until the next one."""
    tick: list[Arrival] = []
    for line in lines:
        arrival = _recorded(json.loads(line))
        if tick and arrival.at_s != tick[0].at_s:
            yield from _spread(tick, min(_TICK_S, arrival.at_s - tick[0].at_s), random)
            tick = []
        tick.append(arrival)
    yield from _spread(tick, _TICK_S, random)


def _recorded(row: dict[str, Any]) -> Arrival:
    blocks = tuple(row.get("hash_ids", ()))
    if not all(type(block) is int for block in blocks):
        raise ValueError("an id of a block is no integer")
    tenant = session_tenant(blocks) if blocks else _ALONE
    return Arrival(row["timestamp"] / 1e3, tenant, int(row["input_length"]), int(row["output_length"]), blocks)


def _spread(tick: list[Arrival], length_s: float, random: Random) -> Iterator[Arrival]:
    if length_s < 0:
        raise ValueError("its time is out of order")
    offsets = sorted(random.uniform(0, length_s) for _ in tick)
    for arrival, offset in zip(tick, offsets, strict=True):
        yield arrival._replace(at_s=arrival.at_s + offset)
