"""What was read and decoded, within one budget of bytes; what was not used lately goes first.

A hit costs one look-up and one store: it sets the entry's `hot` and moves nothing. Who looks for room
goes through the entries from the oldest: a hot one loses its mark and goes to the back, another one is
dropped. That is the CLOCK approximation of least recently used; a long scan, whose blocks are used
once, does not push out what is used often.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Protocol


class Entry(Protocol):
    cost_bytes: int
    hot: bool


class BlockCache:
    """Blocks, and indexes with filters, by any hashable key. May serve several databases of one event loop."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.dropped = 0
        self.entries: OrderedDict[Hashable, Entry] = OrderedDict()
        """For look-ups on the hot path only. Whoever takes an entry from here sets its `hot`."""

    def get(self, key: Hashable) -> Entry | None:
        entry = self.entries.get(key)
        if entry is not None:
            entry.hot = True
        return entry

    def put(self, key: Hashable, entry: Entry) -> None:
        """Keep it and drop others until the budget is kept. An entry larger than the budget is not kept."""
        if key in self.entries or entry.cost_bytes > self.budget_bytes:
            return
        entries = self.entries
        # Each round takes an entry out or a mark off one, so it ends, at the latest with nothing left.
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
        """An absent key is success."""
        entry = self.entries.pop(key, None)
        if entry is not None:
            self.used_bytes -= entry.cost_bytes
