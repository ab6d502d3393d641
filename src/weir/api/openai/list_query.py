"""The query of a list: which page is asked for. Everything else is refused by its name."""

import re
from collections.abc import Sequence
from urllib.parse import parse_qsl

from weir import errors
from weir.api.wire import refuse_field
from weir.core.batches.batch_records import id_pattern


class ListQuery:
    """A query's values by name. Raises InvalidRequest for a name that comes twice, UnsupportedField for an unknown one."""

    def __init__(self, query: bytes, known: Sequence[str]) -> None:
        self._values: dict[str, str] = {}
        for name, value in parse_qsl(query.decode("latin-1"), keep_blank_values=True):
            if name not in known:
                members = {"field": name[:100], "accepted": list(known)}
                raise errors.UnsupportedField("Nothing else can be asked for.", members=members)
            if name in self._values:
                refuse_field(name, "one value")
            self._values[name] = value

    def limit(self, default: int, high: int) -> int:
        """How many are asked for, 1 to high. Raises InvalidRequest."""
        value = self._values.get("limit", str(default))
        if not (value.isascii() and value.isdigit() and len(value) <= len(str(high)) and 1 <= int(value) <= high):
            refuse_field("limit", f"a whole number from 1 to {high}")
        return int(value)

    def after(self, prefix: str) -> str:
        """The id behind which the page begins; empty for the first. prefix: of the ids listed. Raises InvalidRequest."""
        value = self._values.get("after")
        if value is not None and not re.fullmatch(id_pattern(prefix), value):
            refuse_field("after", f"an id of this list, {prefix}…")
        return value or ""

    def word(self, name: str, accepted: Sequence[str]) -> str | None:
        """One of these, None where it is absent. Raises InvalidRequest."""
        value = self._values.get(name)
        if value is not None and value not in accepted:
            refuse_field(name, " or ".join(accepted))
        return value
