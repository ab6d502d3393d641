"""Limits of one service class in the book: what they count, whom they refuse, and what they cost."""

from tests.property.test_book import CALLER, ZERO

from weir import errors
from weir.core.ledger.book import Book
from weir.core.metering import Charge, Worst
from weir.core.tenancy import Limits, Scope, ServiceClass, scopes_of


def test_a_class_meets_its_own_limits_and_leaves_the_rest() -> None:
    """Protects interactive requests: what batch may not have any more, they have, and the tenant's limit counts both."""
    book, batch = Book(), scopes_of("acme", "web", "k1", "large", ServiceClass.BATCH)
    jobs = Scope("acme", service_class=ServiceClass.BATCH)
    book.take("before any limit", batch, Worst(10, 10, 60), ZERO)
    book.configure({Scope("acme"): Limits(concurrency=2), jobs: Limits(concurrency=1, tokens_lifetime=90)}, {}, 0)
    refusal = book.check(batch, Worst(1, 1, 1), ZERO)
    assert isinstance(refusal, errors.ConcurrencyLimited)
    assert refusal.members["scope"] == {"tenant": "acme", "service_class": "batch"}
    assert (refusal.members["limit"], refusal.members["used"]) == (1, 1)
    assert book.check(CALLER, Worst(1, 1, 1), ZERO) is None
    book.take("interactive", CALLER, Worst(10, 10, 60), ZERO)
    refusal = book.check(CALLER, Worst(1, 1, 1), ZERO)
    assert refusal is not None and refusal.members["scope"] == {"tenant": "acme"}
    book.end("before any limit", Charge(10, 0, 10, 60, 0, False), 0)
    refusal = book.check(batch, Worst(70, 1, 1), ZERO)
    assert isinstance(refusal, errors.BudgetExhausted)
    assert (refusal.members["used"], refusal.members["held"]) == (20, 0)
    book.configure({}, {}, 0)
    assert book.check(batch, Worst(70, 1, 1), ZERO) is None


def test_a_request_asks_no_more_accounts_than_have_limits() -> None:
    """Protects the hot path: of its many scopes only those with limits, and its leaf, are looked at."""
    book = Book()
    book.configure({Scope("acme"): Limits(concurrency=9), Scope("acme", alias="large"): Limits(concurrency=9)}, {}, 0)
    book.take("hold", CALLER, Worst(10, 10, 60), ZERO)
    [path] = vars(book)["_paths"].values()
    assert [account.scope for account in path] == [CALLER[0], CALLER[3], CALLER[-1]]
