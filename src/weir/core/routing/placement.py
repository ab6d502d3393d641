"""Which replica takes a request: filter by room, then the least predicted time to first token, within a bounded skew.

The time is that of the prompt tokens which the replica has still to read and of those of this input that it does not hold
already: replicas of a pool read equally fast, so tokens stand for it. The latter count double, because they delay also who
comes next: a fleet near its limit is quicker for all when little is read twice.

A replica that holds much of an input draws it, but only among those whose share of lanes taken is within SKEW of the smallest;
where that is equal the smallest share wins, then the name, so that a decision repeats. A half-open replica goes first, which is
how it is tried; a second attempt is the last one, and goes there only where no other has room.
"""

from collections.abc import Iterable, Mapping
from math import inf

import msgspec

from weir.core.routing.capacity import NOTHING, Need
from weir.core.routing.prefixes import PrefixIndex, cached_tokens
from weir.core.routing.replica import Replica, ReplicaState
from weir.units import Tokens

SKEW = 0.25
"""By which share of its lanes a replica may be fuller than the emptiest, and still take what it holds the beginning of."""
_READ_COST = 2
"""Of a token that this request has to have read, beside one that is read before it."""
_FEW = 4
"""Replicas that are asked one by one what they hold; for more the index is asked once."""


class Site(msgspec.Struct, frozen=True, gc=False):
    """A replica for a request, and how much of its input is believed to be held there."""

    replica: Replica
    cached_tokens: Tokens


def place(
    replicas: Iterable[Replica], need: Need = NOTHING, index: PrefixIndex | None = None, avoid: str | None = None
) -> Site | None:
    """The replica that is to take it, or None when none has room. avoid: not this one. index: None where none is kept."""
    able = [
        replica
        for replica in replicas
        if replica.free and replica.name != avoid and (not replica.running or replica.room.fits(need))
    ]
    if not able:
        return None  # most replicas of a busy pool are full, and this runs for every request
    if len(able) > 1:
        able = _tried_first(able, avoid)
    held = _held(able, need, index)
    replica = able[0] if len(able) == 1 else _soonest(able, held)
    return Site(replica, held.get(replica.name, 0))


def _tried_first(able: list[Replica], avoid: str | None) -> list[Replica]:
    """Those that are half-open, if any; for a second attempt, which avoids a replica, the others."""
    half_open = ReplicaState.HALF_OPEN
    trials = [replica for replica in able if replica.state is half_open]
    if not trials:
        return able
    others = [replica for replica in able if replica.state is not half_open]
    return trials if avoid is None or not others else others


def _soonest(able: list[Replica], held: Mapping[str, Tokens]) -> Replica:
    """Of an idle fleet all are here: one pass, and nothing is made that is not compared."""
    share_max = min([replica.share for replica in able]) + SKEW
    best, best_share, least = able[0], inf, inf
    for replica in able:
        share = replica.share
        if share > share_max:
            continue
        read = replica.room.prefill_tokens
        if held and (cached := held.get(replica.name)):
            read -= _READ_COST * cached
        if read > least or (read == least and (share > best_share or (share == best_share and replica.name >= best.name))):
            continue
        best, best_share, least = replica, share, read
    return best


def _held(able: list[Replica], need: Need, index: PrefixIndex | None) -> dict[str, Tokens]:
    """How much of the input each replica is believed to hold, for those that hold any."""
    prefix = need.prefix
    if index is None or not prefix:
        return {}
    few = len(able) <= _FEW
    marks = {replica.name: index.depth(replica.name, prefix) for replica in able} if few else index.held(prefix)
    tokens = {depth: cached_tokens(depth, need.prefix_bytes, need.input_tokens) for depth in set(marks.values())}
    return {name: tokens[depth] for name, depth in marks.items()}


def score(replica: Replica, need: Need, cached: Tokens) -> Tokens:
    """What is compared of replicas with room first, the least wins. cached: of the input, believed to be held there."""
    return replica.room.prefill_tokens + _READ_COST * (need.input_tokens - cached)
