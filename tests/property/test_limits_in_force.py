"""Protects limits through many changes: what is in force is the last set, made of the entries before or of equal ones."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from weir.control.snapshots import build_snapshot
from weir.core.ledger.book import Book
from weir.core.metering import Charge, Worst
from weir.core.registry.snapshot import Snapshot
from weir.core.tenancy import Limits, Scope, ServiceClass, scopes_of
from weir.ports import Catalog
from weir.units import Moment

CALLER = scopes_of("acme", "app", "key", "assistant", ServiceClass.INTERACTIVE)
BATCH = Scope("acme", service_class=ServiceClass.BATCH)
SCOPES = (*CALLER, Scope("acme", "other"), Scope("acme", alias="other"), BATCH)
NOW = Moment(0, 1_767_225_600_000)
WORST = Worst(3, 4, 5)
NOTHING = Charge(0, 0, 0, 0, 0, False)

entries = st.builds(Limits, concurrency=st.sampled_from([None, 1, 2]), tokens_per_day=st.sampled_from([None, 50]))
changes = st.lists(st.dictionaries(st.sampled_from(SCOPES), entries), min_size=1, max_size=6)


def rows_of(limits: dict[Scope, Limits]) -> list[tuple[str, str, int, int]]:
    """Scope, name, limit and what one open hold takes of it, of each limit that is set."""
    return sorted(
        (str(scope.public()), name, limit, held if scope in CALLER else 0)
        for scope, entry in limits.items()
        for name, limit, held in (("concurrency", entry.concurrency, 1), ("tokens_per_day", entry.tokens_per_day, WORST.tokens))
        if limit is not None
    )


def in_force(book: Book) -> list[tuple[str, str, int, int]]:
    """The same, as the book has it."""
    rows = book.accounts_of("acme", NOW)
    return sorted((str(row["scope"]), row["limit_name"], row["limit"], row["held"]) for row in rows)


@given(changes, st.booleans())
def test_the_last_limits_are_in_force_and_everything_counts_in_them(sets: list[dict[Scope, Limits]], shared: bool) -> None:
    """Protects admission: scopes that come, change and go count the holds that are open, and no account is left behind."""
    book, before = Book(), Snapshot()
    for number, wanted in enumerate(sets):
        stored = [(replace(scope), replace(entry)) for scope, entry in wanted.items()]
        snapshot = build_snapshot(Catalog(number, limits=stored), before if shared else Snapshot())
        assert dict(snapshot.limits) == {scope: entry for scope, entry in wanted.items() if not entry.is_empty}
        book.configure(snapshot.limits, {}, 0)
        book.take("hold", CALLER, WORST, NOW)
        assert in_force(book) == rows_of(wanted)
        book.end("hold", NOTHING, 0)
        before = snapshot
    book.configure({scope: Limits() for scope in SCOPES}, {}, 0)
    assert in_force(book) == []


def test_a_change_of_one_shares_everything_else() -> None:
    """Protects the event loop: of many limits only what changed is new, so that nothing else has to be compared."""
    scopes = [Scope("acme", f"app-{number}") for number in range(5)]
    first = build_snapshot(Catalog(1, limits=[(scope, Limits(concurrency=1)) for scope in scopes]))
    stored = [(replace(scope), Limits(concurrency=1)) for scope in scopes if scope != scopes[2]]
    stored[0] = (stored[0][0], Limits(concurrency=2))
    second = build_snapshot(Catalog(2, limits=stored), first)
    assert dict(second.limits) == dict(stored)
    assert [(scope, entry) for scope, entry in second.limits.items() if first.limits[scope] is not entry] == stored[:1]
    assert all(scope is known for scope, known in zip(second.limits, [scopes[0], scopes[1], *scopes[3:]], strict=True))
    assert second.serving({"any"}).limits is second.limits
