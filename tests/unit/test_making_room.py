"""Who gives up a lane for those who wait: the fewest, where it helps, the last begun first."""

from hypothesis import given
from hypothesis import strategies as st

from weir.core.scheduling.making_room import Claim, Lent, Site, who_makes_room

FULL = Site(0, 2)


def lent_on(*sites: str, kv_tokens: int = 10) -> list[Lent[str]]:
    """Work on these sites, the last begun first."""
    return [Lent(f"{number}", site, kv_tokens) for number, site in enumerate(sites)]


def test_the_last_begun_stops_first_and_no_more_than_wait() -> None:
    """Protects work that is done: what has run longest has most to lose."""
    sites = {"a": FULL, "b": FULL}
    lent = lent_on("a", "b", "a", "b")
    assert who_makes_room([Claim(5)], sites, lent) == ["0"]
    assert who_makes_room([Claim(5)] * 3, sites, lent) == ["0", "1", "2"]
    assert who_makes_room([Claim(5)] * 9, sites, lent) == ["0", "1", "2", "3"]
    assert who_makes_room([], sites, lent) == []


def test_what_is_free_is_used_before() -> None:
    """Protects work: whoever can start without stops nobody."""
    assert who_makes_room([Claim(5)], {"a": FULL, "b": Site(1, 1)}, lent_on("a", "b")) == []
    assert who_makes_room([Claim(5)] * 2, {"a": FULL, "b": Site(1, 1)}, lent_on("a", "b")) == ["0"]


def test_nobody_stops_where_that_helps_nobody() -> None:
    """Protects work on what takes none, on what is to be avoided, and on what has not enough memory even then."""
    assert who_makes_room([Claim(5)], {"b": FULL}, lent_on("a", "a", "b")) == ["2"], "a takes no work"
    assert who_makes_room([Claim(5)], {}, lent_on("a")) == []
    assert who_makes_room([Claim(5, avoid="a")], {"a": FULL, "b": FULL}, lent_on("a", "a", "b")) == ["2"]
    assert who_makes_room([Claim(5, avoid="a")], {"a": FULL}, lent_on("a")) == []
    tight = {"a": Site(0, 3, 0)}
    assert who_makes_room([Claim(21)], tight, lent_on("a", "a")) == []
    assert who_makes_room([Claim(20)], tight, lent_on("a", "a")) == ["0", "1"]


def test_memory_is_made_on_one_replica_by_the_fewest() -> None:
    """Protects work: pieces of memory on several replicas start nobody."""
    sites = {"a": Site(1, 5, 0), "b": Site(1, 5, 15)}
    assert who_makes_room([Claim(25)], sites, lent_on("a", "a", "b")) == ["2"]
    assert who_makes_room([Claim(30)], sites, lent_on("a", "a", "a", "b")) == ["0", "1", "2"]


def test_more_stop_where_more_run_than_may() -> None:
    """Protects whoever waits: a replica that is over its lanes has a free one only after those."""
    assert who_makes_room([Claim(5)], {"a": Site(-1, 3)}, lent_on("a", "a", "a")) == ["0", "1"]


def test_what_runs_nothing_takes_whatever_comes() -> None:
    """Protects large requests: no figure locks an empty replica."""
    assert who_makes_room([Claim(1_000)], {"a": Site(1, 2, 0)}, lent_on("a", "a")) == ["0", "1"]


SITES = st.dictionaries(st.sampled_from("abcd"), st.builds(Site, st.integers(-2, 2), st.integers(4, 9), st.integers(0, 60)))
CLAIMS = st.lists(st.builds(Claim, st.integers(1, 60), st.sampled_from([None, "a", "b"])), max_size=6)
LENT = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 30)), max_size=12)


@given(CLAIMS, SITES, LENT)
def test_each_that_stops_is_needed(claims: list[Claim], sites: dict[str, Site], lent: list[tuple[str, int]]) -> None:
    """Protects both, whatever runs: nobody stops twice or where no work is taken, and none could have gone on."""
    work = [Lent(number, site, kv_tokens) for number, (site, kv_tokens) in enumerate(lent)]
    stopped = who_makes_room(claims, sites, work)
    assert len(set(stopped)) == len(stopped) and all(work[key].site in sites for key in stopped)
    served = _served(claims, sites, [work[key] for key in stopped])
    for spared in stopped:
        rest = [work[key] for key in stopped if key != spared]
        assert _served(claims, sites, rest) < served, "it stopped for nothing"


def _served(claims: list[Claim], sites: dict[str, Site], stopped: list[Lent[int]]) -> int:
    """How many could start then at most, of any choice of replicas."""
    freed = dict(sites)
    for each in stopped:
        freed[each.site] = freed[each.site].with_one(each.kv_tokens, -1)
    return _most(tuple(claims), freed)


def _most(claims: tuple[Claim, ...], sites: dict[str, Site]) -> int:
    if not claims:
        return 0
    first, rest = claims[0], claims[1:]
    best = _most(rest, sites)
    for name, site in sites.items():
        if name != first.avoid and site.has_room(first.kv_tokens):
            best = max(best, 1 + _most(rest, {**sites, name: site.with_one(first.kv_tokens)}))
    return best
