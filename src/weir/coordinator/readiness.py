"""Whether a coordinator may decide about new work now: by what is approved, by its ledger, and by who leads."""

from collections.abc import Callable

from weir import errors
from weir.coordinator.store_watch import StoreWatch
from weir.ports import Clock
from weir.units import Millis, Nanos, ms_from_ns, ns_from_ms

RETRY_MS: Millis = 1_000


class Readiness:
    """leads: whether it may grant now; is_lease_away: whether it may not because the store cannot be asked for the lease.

    is_draining, is_closed: since when nothing new is welcome.
    """

    def __init__(
        self, clock: Clock, store_watch: StoreWatch, leads: Callable[[], bool], is_lease_away: Callable[[], bool]
    ) -> None:
        self._clock = clock
        self._store_watch = store_watch
        self._is_lease_away = is_lease_away
        self._fresh_until_ns: Nanos | None = None
        self.leads = leads
        self.is_draining = self.is_closed = False

    def renew(self, valid_ms: Millis) -> None:
        """What is approved may be worked by for so long; never renewed, for ever."""
        self._fresh_until_ns = self._clock.monotonic_ns() + ns_from_ms(valid_ms)

    @property
    def fresh_ms(self) -> Millis | None:
        """For how long what is approved may still be worked by, ≥ 0; None: no bound was told."""
        if self._fresh_until_ns is None:
            return None
        return max(0, ms_from_ns(self._fresh_until_ns - self._clock.monotonic_ns()))

    def refusal(self) -> errors.WeirError | None:
        """Why nothing new is decided now; None where it is."""
        if self.is_draining or self.is_closed:
            return errors.Draining("The platform is draining.", retry_after_ms=RETRY_MS)
        if self.fresh_ms == 0:
            detail = "The approved configuration could not be checked for too long."
            return errors.SnapshotExpired(detail, retry_after_ms=RETRY_MS)
        leads = self.leads()
        if self._store_watch.is_late or (not leads and self._is_lease_away()):
            return errors.LedgerUnavailable("The ledger cannot be written now.")
        if not leads:
            return errors.CoordinatorLost("Another coordinator takes over.", retry_after_ms=RETRY_MS)
        return None
