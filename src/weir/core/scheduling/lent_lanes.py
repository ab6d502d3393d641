"""Lanes of a pool that batches use: those that they give up when somebody waits for an answer, and those that they may keep.

A lane that nobody else waits for is lent. One is kept by work whose turn it was while others waited too, and by work that gave
up its place a few times, which might never end otherwise; no more at a time than the batches' share of the pool, so that all
the rest goes on yielding. What began last has done least, so it gives up its lane first. A lane that was given up is owed to
those for whom it was, whosever turn it is when it comes free.
"""

from typing import Final, Generic, TypeVar

Key = TypeVar("Key")

YIELDS_MAX: Final = 3
"""So often work gives up its place before it may keep one."""


class LentLanes(Generic[Key]):
    """Of one pool, by what runs on them. share_percent: of its lanes, which may be kept; one at least."""

    def __init__(self, share_percent: int) -> None:
        self._share_percent = share_percent
        self._lent: dict[Key, None] = {}  # in the order in which they were
        self._asked: set[Key] = set()
        self._kept: set[Key] = set()
        self._owed = 0

    def __len__(self) -> int:
        """How many may be asked for."""
        return len(self._lent)

    def may_keep(self, usable: int) -> bool:
        """Whether one more may be kept of so many lanes."""
        return len(self._kept) < max(1, usable * self._share_percent // 100)

    @property
    def is_owed(self) -> bool:
        """Whether a lane that was given up went to nobody yet."""
        return self._owed > 0

    def is_wanted_by_nobody(self) -> None:
        """No lane is waited for any more."""
        self._owed = 0

    def served_others(self) -> None:
        """One for whom a lane may have been given up has one."""
        self._owed = max(0, self._owed - 1)

    def take(self, key: Key, *, keeps: bool) -> None:
        """Work has a lane that it keeps, or is lent."""
        if keeps:
            self._kept.add(key)
        else:
            self._lent[key] = None

    def give_back(self, key: Key) -> None:
        """Its lane is free; one that was not taken is not known."""
        self._lent.pop(key, None)
        if key in self._asked:
            self._asked.remove(key)
            self._owed += 1
        self._kept.discard(key)

    def ask_for(self, wanted: int) -> list[Key]:
        """Who gives up its lane so that as many as wanted come free, those included that were asked before."""
        asked: list[Key] = []
        while self._lent and len(self._asked) < wanted:
            key, _ = self._lent.popitem()
            self._asked.add(key)
            asked.append(key)
        return asked
