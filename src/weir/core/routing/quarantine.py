"""Which requests are kept from replicas because they may be what crashes them.

A crash is counted for every request that was in prefill or decode on the replica as it was lost. Most of them are innocent and
were only there; one crash is forgotten after ten minutes, or when the same body completes. The second one, on another replica,
quarantines: for ten minutes after its latest crash the same body of the same tenant for the same revision is refused at the
door. It decides nothing about replicas, and knows a body only by its keyed digest.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import TypeAlias

from weir.units import NANOS_PER_MINUTE, Nanos

REMEMBERED_NS: Nanos = 10 * NANOS_PER_MINUTE
ENTRIES_MAX = 10_000

Fingerprint: TypeAlias = tuple[str, str, bytes]
"""(tenant, revision, keyed digest of the body)."""


@dataclass(frozen=True, slots=True)
class _Crash:
    """The latest one of a fingerprint. is_second: another replica had crashed under it shortly before."""

    replica: str
    at_ns: Nanos
    is_second: bool

    def is_remembered(self, now_ns: Nanos) -> bool:
        return now_ns < self.at_ns + REMEMBERED_NS


class Quarantine:
    """Crashes by fingerprint. entries_max: beyond it the one whose crash is oldest is forgotten; ≥ 1. Time never goes back."""

    def __init__(self, entries_max: int = ENTRIES_MAX) -> None:
        self._entries_max = entries_max
        self._crashes: OrderedDict[Fingerprint, _Crash] = OrderedDict()

    def __len__(self) -> int:
        return len(self._crashes)

    def crashed(self, fingerprint: Fingerprint, replica: str, now_ns: Nanos) -> bool:
        """It ran on this replica as that was lost; whether it is in quarantine now."""
        before = self._crashes.pop(fingerprint, None)
        is_second = before is not None and before.is_remembered(now_ns) and (before.is_second or before.replica != replica)
        self._crashes[fingerprint] = _Crash(replica, now_ns, is_second)
        if len(self._crashes) > self._entries_max:
            self._crashes.popitem(last=False)
        return is_second

    def completed(self, fingerprint: Fingerprint) -> None:
        """It ended well somewhere: a single crash before that was not its doing."""
        crash = self._crashes.get(fingerprint)
        if crash is not None and not crash.is_second:
            del self._crashes[fingerprint]

    def holds(self, fingerprint: Fingerprint, now_ns: Nanos) -> bool:
        """Whether it is refused now."""
        crash = self._crashes.get(fingerprint)
        return crash is not None and crash.is_second and crash.is_remembered(now_ns)
