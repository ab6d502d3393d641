"""What a simulated replica is ordered to do wrong: values that tests give as arguments or over the control route.

A marker is text that a prompt contains, so that one request of many meets the fault. Nothing here acts: `simulated` carries out
what concerns a replica, `simulated_server` what concerns its process. None of it happens unless it was ordered.
"""

from typing import Annotated

import msgspec

from weir.core.request import Message
from weir.units import Millis, Tokens

REFUSE_MS_MAX: Millis = 600_000


class Faults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The faults in force; the default is none. Markers concern requests that arrive while they are in force.

    crash_marker: a prompt with it kills the replica in the step that first computes it. stall_marker: a prompt with it stalls
    the replica as its output reaches stall_after_tokens. stalled: no step completes. slowdown: every step takes times as long.
    """

    crash_marker: str | None = None
    stall_marker: str | None = None
    stall_after_tokens: Annotated[Tokens, msgspec.Meta(ge=1)] = 1
    stalled: bool = False
    slowdown: Annotated[float, msgspec.Meta(gt=0)] = 1.0


NO_FAULTS = Faults()


class FaultOrder(Faults, frozen=True, forbid_unknown_fields=True):
    """What the control route takes: the faults from now on, in place of those before.

    refuse_ms: for so long the process refuses new connections, and closes each open one after its answer.
    """

    refuse_ms: Annotated[Millis, msgspec.Meta(ge=0, le=REFUSE_MS_MAX)] = 0


def is_marked(prompt: str | tuple[Message, ...], marker: str | None) -> bool:
    """Whether a prompt, or a turn of it, contains a marker; none has no marker."""
    if not marker:
        return False
    return marker in prompt if isinstance(prompt, str) else any(marker in turn.content for turn in prompt)
