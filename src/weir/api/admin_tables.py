"""A usage report as a file: CSV or Parquet, with the columns of the JSON rows, and amounts as whole micro-dollars.

It decides the form that an answer takes, and names each column as the JSON does, so that all three can be compared. Parquet
needs the extra `weir[parquet]`, which is imported when it is asked for and not before.
"""

import csv
import io
from collections.abc import Mapping, Sequence

from weir import errors
from weir.ports import UsageRow

CSV_TYPE = "text/csv"
PARQUET_TYPE = "application/vnd.apache.parquet"
USAGE_FORMATS: Mapping[str, str] = {"json": "application/json", "csv": CSV_TYPE, "parquet": PARQUET_TYPE}
"""Formats of a usage report by name, with their media types."""

USAGE_SUMS = (
    "requests",
    "input_tokens",
    "cached_input_tokens",
    "output_tokens",
    "cost_microusd",
    "platform_cost_microusd",
)
"""The summed columns, in the order in which a table has them after its grouping columns."""


def format_of(named: str | None, accept: str) -> str:
    """The form that is asked for: by name, else the first of the accepted media types that we have, else JSON.

    Raises InvalidRequest for an unknown name.
    """
    if named is not None:
        if named not in USAGE_FORMATS:
            members = {"field": "format", "accepted": list(USAGE_FORMATS)}
            raise errors.InvalidRequest("There is no such format.", members=members)
        return named
    by_type = {kind: name for name, kind in USAGE_FORMATS.items()}
    accepted = (entry.partition(";")[0].strip().lower() for entry in accept.split(","))
    return next((by_type[kind] for kind in accepted if kind in by_type), "json")


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
