"""Cache of decoded blocks and indexes with a byte budget, which drops entries that were not used recently.

A hit costs one look-up and one store: it sets the entry's `hot` and moves nothing. To make room, entries are examined
from the oldest on: a hot one loses its flag and moves to the back, any other is dropped. This is the CLOCK
approximation of least recently used; a long scan, whose blocks are used once, does not evict frequently used entries.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Protocol


class Entry(Protocol):
    cost_bytes: int
    hot: bool


class BlockCache:
    """Cache of blocks, and of indexes with filters, by any hashable key. May serve several databases of one event
    loop."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.dropped = 0
        self.entries: OrderedDict[Hashable, Entry] = OrderedDict()
        """Entries, for look-ups on the hot path only. Code that uses an entry directly must set its `hot`."""

    def get(self, key: Hashable) -> Entry | None:
        entry = self.entries.get(key)
        if entry is not None:
            entry.hot = True
        return entry

    def put(self, key: Hashable, entry: Entry) -> None:
        """Add an entry and drop others until the budget holds. An entry larger than the budget is not added."""
        if key in self.entries or entry.cost_bytes > self.budget_bytes:
            return
        entries = self.entries
        # Each iteration removes an entry or clears a flag, so the loop terminates.
        while entries and self.used_bytes + entry.cost_bytes > self.budget_bytes:
            oldest, victim = next(iter(entries.items()))
            if victim.hot:
                victim.hot = False
                entries.move_to_end(oldest)
            else:
                self.remove(oldest)
                self.dropped += 1
        entries[key] = entry
        self.used_bytes += entry.cost_bytes

    def remove(self, key: Hashable) -> None:
        """Remove an entry. An absent key is not an error."""
        entry = self.entries.pop(key, None)
        if entry is not None:
            self.used_bytes -= entry.cost_bytes
