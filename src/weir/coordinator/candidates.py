"""The replicas that a placement compared, as a request's timeline keeps them: what was seen of each, and why not another.

It looks and decides nothing; `core/routing/placement.py` does.
"""

from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from itertools import islice

import msgspec

from weir.core.routing.capacity import Need
from weir.core.routing.placement import score
from weir.core.routing.prefixes import PrefixIndex, cached_tokens
from weir.core.routing.replica import Replica, ReplicaState
from weir.units import Tokens

CANDIDATES_MAX = 8
"""Of one look at a pool: each costs half a microsecond of every dispatch."""


class WhyNot(StrEnum):
    """Why a replica could not take a request."""

    FULL = "full"
    ON_TRIAL = "on trial"
    AVOIDED = "avoided"
    NOT_READY = "not ready"
    NO_ROOM = "no room"


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """A replica as the placement met it. score: what was compared first, the least wins; None where why_not says why.

    free, running: lanes. kv_tokens: reserved; prefill_tokens: still to be read; cached_tokens: of this input, held there.
    score: prompt tokens that are to be read until its first output, this input's double.
    """

    replica: str
    free: int
    running: int
    kv_tokens: Tokens
    prefill_tokens: Tokens
    cached_tokens: Tokens | None = None
    score: Tokens | None = None
    why_not: WhyNot | None = None


class Candidates(msgspec.Struct, frozen=True, gc=False):
    """Some replicas of a pool as the placement met them, and how many more it has."""

    kept: Sequence[Candidate] = ()
    more: int = 0


NO_CANDIDATES = Candidates()


def candidates_of(
    replicas: Collection[Replica],
    need: Need,
    index: PrefixIndex,
    avoid: str | None = None,
    chosen: Replica | None = None,
) -> Candidates:
    """A pool as the placement meets it now: its first replicas, the chosen among them. avoid: the one that it leaves out."""
    kept = list(islice(replicas, CANDIDATES_MAX))
    if chosen is not None and chosen not in kept:
        kept[-1] = chosen
    held = index.held(need.prefix) if need.prefix else {}
    return Candidates([_candidate(replica, need, held, avoid) for replica in kept], len(replicas) - len(kept))


def _candidate(replica: Replica, need: Need, held: Mapping[str, int], avoid: str | None) -> Candidate:
    room, name = replica.room, replica.name
    free, running, kv_tokens, prefill_tokens = replica.free, replica.running, room.kv_tokens, room.prefill_tokens
    if (why_not := _why_not(replica, avoid)) is not None:
        return Candidate(name, free, running, kv_tokens, prefill_tokens, None, None, why_not)
    cached = cached_tokens(held[name], need.prefix_bytes, need.input_tokens) if name in held else 0
    if not room.fits(need):
        return Candidate(name, free, running, kv_tokens, prefill_tokens, cached or None, None, WhyNot.NO_ROOM)
    return Candidate(name, free, running, kv_tokens, prefill_tokens, cached or None, score(replica, need, cached))


def _why_not(replica: Replica, avoid: str | None) -> WhyNot | None:
    """Why it takes nothing, whatever it is asked for."""
    if replica.free and replica.name != avoid:
        return None  # most are so, and this runs for several replicas of every dispatch
    if not replica.takes_work:
        return WhyNot.NOT_READY
    if replica.name == avoid:
        return WhyNot.AVOIDED
    on_trial = replica.state is ReplicaState.HALF_OPEN and replica.running < replica.limits.concurrency
    return WhyNot.ON_TRIAL if on_trial else WhyNot.FULL
