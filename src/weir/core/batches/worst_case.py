"""Whether a batch could ever be run within its budgets: its worst case against each window's whole limit.

Nothing is held for a batch; each line takes its own hold as it is submitted, and waits where a window has no room left. So
only the limit counts here, never what is spent of it: above it the batch is refused, since no wait would let it all through.
"""

from collections.abc import Iterator

from weir import errors
from weir.core.batches.batch_records import AliasDemand, FileRecord
from weir.core.ledger.account import BUDGETS
from weir.core.metering import Worst, worst_case
from weir.core.registry.model import Alias, Revision
from weir.core.registry.snapshot import Snapshot
from weir.core.tenancy import UNLIMITED, Principal, Scope, ServiceClass, scopes_of

_NOTHING = Worst(0, 0, 0)


def refuse_unaffordable(record: FileRecord, principal: Principal, snapshot: Snapshot) -> None:
    """Compare a file's worst case with every budget of the caller's scopes. snapshot: a whole one, with limits and prices.

    Raises UnknownAlias, or ExceedsLimitCapacity for the first limit that is below, widest scope first.
    """
    for scope, worst in worst_by_scope(record.demands, principal, snapshot).items():
        limits = snapshot.limits.get(scope, UNLIMITED)
        for budget in BUDGETS:
            capacity, needed = getattr(limits, budget.name), budget.needed(worst)
            if capacity is not None and (not capacity or needed > capacity):
                raise errors.ExceedsLimitCapacity(
                    f"This file needs {needed} of {budget.name}, which allows {capacity} in all.",
                    members={"limit": budget.name, "scope": scope.public(), "needed": needed, "capacity": capacity},
                )


def worst_by_scope(demands: tuple[AliasDemand, ...], principal: Principal, snapshot: Snapshot) -> dict[Scope, Worst]:
    """The sum of what all lines hold, in every scope that they count in, widest first. Raises UnknownAlias.

    They are of the class `batch`, whatever their caller's application is.

    The cost is rounded up once for an alias and not for each line: it is below the sum of holds by less than a micro-dollar a
    line, so that nothing is refused which fits.
    """
    sums: dict[Scope, Worst] = {}
    for demand in demands:
        worst = _worst_of(demand, principal, snapshot)
        for scope in scopes_of(principal.tenant, principal.application, principal.key, demand.alias, ServiceClass.BATCH):
            sums[scope] = _added(sums.get(scope, _NOTHING), worst)
    return dict(sorted(sums.items(), key=lambda item: (item[0].service_class is not None, item[0].alias is not None)))


def _worst_of(demand: AliasDemand, principal: Principal, snapshot: Snapshot) -> Worst:
    """The most that these lines hold by any revision that may serve them."""
    alias, stable = snapshot.resolve(principal, demand.alias)
    worsts = [_worst_by(demand, alias, revision) for revision in (stable, *_canary(alias, principal, snapshot))]
    return Worst(
        max(worst.input_tokens for worst in worsts),
        max(worst.output_tokens for worst in worsts),
        max(worst.cost_microusd for worst in worsts),
    )


def _canary(alias: Alias, principal: Principal, snapshot: Snapshot) -> Iterator[Revision]:
    """The revision that the alias is about to mean, whatever its weight is now: that may rise while the batch runs."""
    if alias.canary is not None and snapshot.is_entitled(principal, alias.canary.revision):
        yield snapshot.revisions[alias.canary.revision]


def _worst_by(demand: AliasDemand, alias: Alias, revision: Revision) -> Worst:
    default = min(alias.default_max_output_tokens, revision.max_output_tokens)
    output_tokens = demand.output_tokens + demand.defaulted * default
    return worst_case(revision.price.of(ServiceClass.BATCH), demand.input_tokens, output_tokens, 1)


def _added(one: Worst, other: Worst) -> Worst:
    return Worst(
        one.input_tokens + other.input_tokens,
        one.output_tokens + other.output_tokens,
        one.cost_microusd + other.cost_microusd,
    )
