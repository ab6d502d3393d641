"""A usage report in each of its forms: JSON, or a file of CSV or Parquet, with the same columns and whole micro-dollars.

It decides the form that an answer takes, and names each column alike, so that all three can be compared. A report may have
many rows, so it is written on a thread, off the event loop. Parquet needs the extra `weir[parquet]`, which is imported when it
is asked for and not before.
"""

import csv
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from weir import errors
from weir.ports import UsageRow

CSV_TYPE = "text/csv"
PARQUET_TYPE = "application/vnd.apache.parquet"

_WEIGHT = re.compile(r"q=(0(?:\.[0-9]{0,3})?|1(?:\.0{0,3})?)")

USAGE_SUMS = (
    "requests",
    "input_tokens",
    "cached_input_tokens",
    "output_tokens",
    "cost_microusd",
    "platform_cost_microusd",
)
"""The summed columns, in the order in which a table has them after its grouping columns."""

_encode = msgspec.json.Encoder().encode


def as_json(groups: Sequence[str], rows: Sequence[UsageRow]) -> bytes:
    """`{"rows": [...]}`, one object per row; each is encoded by itself, so that other threads get their turn."""
    documents = (_encode(row.group | dict(zip(USAGE_SUMS, _sums(row), strict=True))) for row in rows)
    return b'{"rows":[' + b",".join(documents) + b"]}"


def as_csv(groups: Sequence[str], rows: Sequence[UsageRow]) -> bytes:
    """The rows under a line with the names of their columns, in UTF-8."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow((*groups, *USAGE_SUMS))
    writer.writerows((*(row.group[name] for name in groups), *_sums(row)) for row in rows)
    return text.getvalue().encode()


def as_parquet(groups: Sequence[str], rows: Sequence[UsageRow]) -> bytes:
    """The rows as one Parquet file: groups are strings, sums 64-bit integers. Raises UnsupportedField without the extra."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as absent:
        members = {"field": "format", "accepted": [name for name in USAGE_FORMATS if name != "parquet"]}
        detail = "Parquet needs the extra weir[parquet], which is not installed where the cell runs."
        raise errors.UnsupportedField(detail, members=members) from absent
    schema = pyarrow.schema([(name, pyarrow.string()) for name in groups] + [(name, pyarrow.int64()) for name in USAGE_SUMS])
    columns = [[row.group[name] for row in rows] for name in groups]
    columns += [[getattr(row, name) for row in rows] for name in USAGE_SUMS]
    content = io.BytesIO()
    arrays = [pyarrow.array(values, field.type) for values, field in zip(columns, schema, strict=True)]
    parquet.write_table(pyarrow.Table.from_arrays(arrays, schema=schema), content)
    return content.getvalue()


def _sums(row: UsageRow) -> list[int]:
    return [getattr(row, name) for name in USAGE_SUMS]


@dataclass(frozen=True, slots=True)
class UsageFormat:
    """A form of the report. write: its bytes, from the grouping columns and the rows; for a thread."""

    media_type: str
    write: Callable[[Sequence[str], Sequence[UsageRow]], bytes]
    is_file: bool = True


USAGE_FORMATS: Mapping[str, UsageFormat] = {
    "json": UsageFormat("application/json", as_json, is_file=False),
    "csv": UsageFormat(CSV_TYPE, as_csv),
    "parquet": UsageFormat(PARQUET_TYPE, as_parquet),
}
"""Formats of a usage report by name."""


def format_of(named: str | None, accept: str) -> str:
    """The form that is asked for: by name, else the most wanted of the accepted media types that we have, else JSON.

    Raises InvalidRequest for an unknown name.
    """
    if named is not None:
        if named not in USAGE_FORMATS:
            members = {"field": "format", "accepted": list(USAGE_FORMATS)}
            raise errors.InvalidRequest("There is no such format.", members=members)
        return named
    by_type = {form.media_type: name for name, form in USAGE_FORMATS.items()}
    wanted = {by_type[kind]: weight for kind, weight in map(_accepted, accept.split(",")) if kind in by_type and weight > 0}
    return max(wanted, key=wanted.__getitem__, default="json")


def _accepted(entry: str) -> tuple[str, float]:
    """A media type of an Accept header and its weight: 1 where none is given, 0 for one that is none."""
    kind, *parameters = (part.strip().lower() for part in entry.split(";"))
    weights = [_WEIGHT.fullmatch(parameter) for parameter in parameters if parameter.startswith("q=")]
    return kind, min((float(found[1]) if found else 0.0 for found in weights), default=1.0)
