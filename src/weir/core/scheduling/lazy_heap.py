"""A heap whose keys change priority: the smallest in O(log n), with stale entries dropped or moved when they surface.

Source: the lazy deletion of Python's `heapq` documentation. A priority that rises costs no push: the entry moves when it
surfaces, once, however often it rose before. Every key has an entry at its priority or below. It is rebuilt when most of it is
stale, so its size stays within a constant factor of what it holds.
"""

import heapq
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
P = TypeVar("P", bound=Any)

_STALE_MAX = 64
"""Stale entries that are not worth a rebuild."""


class LazyHeap(Generic[P, K]):
    """Keys by priority, smallest first; equal priorities by key."""

    __slots__ = ("_entries", "_priorities")

    def __init__(self) -> None:
        self._priorities: dict[K, P] = {}
        self._entries: list[tuple[P, K]] = []

    def __len__(self) -> int:
        return len(self._priorities)

    def __contains__(self, key: K) -> bool:
        return key in self._priorities

    def put(self, key: K, priority: P) -> None:
        """Add a key, or change its priority."""
        before = self._priorities.get(key)
        self._priorities[key] = priority
        if before is not None and before <= priority:
            return
        heapq.heappush(self._entries, (priority, key))
        if len(self._entries) > 2 * len(self._priorities) + _STALE_MAX:
            self._entries = [(priority, key) for key, priority in self._priorities.items()]
            heapq.heapify(self._entries)

    def discard(self, key: K) -> None:
        """Remove a key if it is there."""
        self._priorities.pop(key, None)

    def first(self) -> tuple[P, K] | None:
        """The smallest priority and its key; None when empty."""
        entries, priorities = self._entries, self._priorities
        while entries:
            priority, key = entry = entries[0]
            current = priorities.get(key)
            if current == priority:
                return entry
            if current is None or current < priority:
                heapq.heappop(entries)
            else:
                heapq.heapreplace(entries, (current, key))
        return None

    def smallest(self, number: int) -> list[tuple[P, K]]:
        """The `number` smallest, or all if there are fewer."""
        found: list[tuple[P, K]] = []
        while len(found) < number and (entry := self.first()) is not None:
            heapq.heappop(self._entries)
            if entry not in found:  # put twice at the same priority, it lies there twice
                found.append(entry)
        for entry in found:
            heapq.heappush(self._entries, entry)
        return found
