"""Which replica takes a request: filter by room, then the least predicted time to first token, within a bounded skew.

The time is that of the prompt tokens which the replica has still to read and of those of this input that it does not hold
already: replicas of a pool read equally fast, so tokens stand for it. The latter count double, because they delay also who
comes next: a fleet near its limit is quicker for all when little is read twice.

A replica that holds much of an input draws it, but only among those whose share of lanes taken is within SKEW of the smallest;
where that is equal the smallest share wins, then the name, so that a decision repeats. A half-open replica goes first, which is
how it is tried; a second attempt is the last one, and goes there only where no other has room.
"""

from collections.abc import Iterable

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
    able = [replica for replica in replicas if replica.free and replica.name != avoid and replica.room.fits(need)]
    if not able:
        return None  # most replicas of a busy pool are full, and this runs for every request
    if len(able) == 1:
        return _site(able[0], need, index)
    sites = _sites(able, need, index)
    if trials := [site for site in sites if site.replica.state is ReplicaState.HALF_OPEN]:
        others = [site for site in sites if site not in trials]
        sites = trials if avoid is None or not others else others
    share_max = min([site.replica.running / site.replica.allowed for site in sites]) + SKEW
    near = [site for site in sites if site.replica.running / site.replica.allowed <= share_max]
    return min(near, key=lambda site: _score(site, need))


def _sites(able: list[Replica], need: Need, index: PrefixIndex | None) -> list[Site]:
    if index is None or not need.prefix or len(able) <= _FEW:
        return [_site(replica, need, index) for replica in able]
    held, size, tokens = index.held(need.prefix), need.prefix_bytes, need.input_tokens
    return [Site(replica, cached_tokens(held.get(replica.name, 0), size, tokens)) for replica in able]


def _site(replica: Replica, need: Need, index: PrefixIndex | None) -> Site:
    if index is None or not need.prefix:
        return Site(replica, 0)
    return Site(replica, cached_tokens(index.depth(replica.name, need.prefix), need.prefix_bytes, need.input_tokens))


def _score(site: Site, need: Need) -> tuple[Tokens, float, str]:
    """What is compared, the least wins."""
    replica = site.replica
    return score(replica, need, site.cached_tokens), replica.running / replica.allowed, replica.name


def score(replica: Replica, need: Need, cached: Tokens) -> Tokens:
    """What is compared of replicas with room first, the least wins. cached: of the input, believed to be held there."""
    return replica.room.prefill_tokens + _READ_COST * (need.input_tokens - cached)
