"""What the lines of a batch's input ask for, all together: from them its worst case is known before anything runs.

Nothing runs yet, so input is bounded and not counted, as for a request whose replicas cannot count.
"""

from dataclasses import dataclass

from weir import errors
from weir.core.batches.batch_records import AliasDemand
from weir.core.metering import upper_bound_of_input
from weir.core.request import InferenceRequest
from weir.units import Tokens

ALIASES_MAX = 64
"""Of one file: a record stays small."""
_LEAST_OUTPUT: Tokens = 1
"""What the hold of a request for vectors takes for output."""


@dataclass(slots=True)
class _Sum:
    lines: int = 0
    input_tokens: Tokens = 0
    output_tokens: Tokens = 0
    defaulted: int = 0


class DemandSum:
    """Adds up the lines of a file in their order."""

    def __init__(self) -> None:
        self._sums: dict[str, _Sum] = {}
        self._lines = 0

    def add(self, request: InferenceRequest) -> None:
        """Count the next line in. Raises InvalidRequest naming it where it asks for one alias more than ALIASES_MAX."""
        self._lines += 1
        found = self._sums.get(request.model_alias)
        if found is None:
            found = self._sums[request.model_alias] = self._new_sum()
        choices = request.demands.choices
        found.lines += 1
        found.input_tokens += choices * upper_bound_of_input(request.prompt_bytes, request.turns)
        output = _LEAST_OUTPUT if request.demands.embedding is not None else request.max_output_tokens
        if output is None:
            found.defaulted += choices
        else:
            found.output_tokens += choices * output

    def _new_sum(self) -> _Sum:
        if len(self._sums) == ALIASES_MAX:
            accepted = f"at most {ALIASES_MAX} models"
            raise errors.InvalidRequest(
                f"Line {self._lines} asks for one model too many; accepted: {accepted}.",
                members={"field": "file", "line": self._lines, "accepted": accepted},
            )
        return _Sum()

    def result(self) -> tuple[AliasDemand, ...]:
        """The sums by alias, in the order in which the file first asks for each."""
        return tuple(
            AliasDemand(alias, each.lines, each.input_tokens, each.output_tokens, each.defaulted)
            for alias, each in self._sums.items()
        )
