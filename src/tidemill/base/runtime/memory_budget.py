"""The memory budget of a process: named shares of one limit, counted and enforced by their owners.

A share is requested before memory is allocated: its owner rejects the request instead of letting the process grow, and
work that cannot wait fails as one unit. A cache drops what was used longest ago (`RecentCache`). Allocations of
libraries are not visible here; `resident_bytes` returns the system's figure.
"""

from __future__ import annotations

import ctypes
import os
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

_LARGEST_KEPT = (-3, 32 << 20)
"""glibc's M_MMAP_THRESHOLD at its maximum: larger blocks are mapped individually."""
_TRIM_THRESHOLD = -1
"""M_TRIM_THRESHOLD: an arena returns pages when more than this is free at its end."""
_ARENAS = (-8, 1)
"""M_ARENA_MAX: memory freed by one thread is available to the next, and can be returned to the system.

In any arena other than the first, malloc_trim trims the middle, but not the end.
"""


def resident_bytes() -> int:
    """Return the resident memory of this process, as counted by Linux; 0 without /proc."""
    try:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return 0


def retain_freed_memory(kept_bytes: int = 1 << 30) -> bool:
    """Keep up to `kept_bytes` of freed memory in the process for its next work. Return False without glibc
    (mallopt(3)).

    The system zeroes new pages, which costs more than much of the work on them. Call this before there are threads.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return all([mallopt(*option) == 1 for option in (_LARGEST_KEPT, (_TRIM_THRESHOLD, kept_bytes), _ARENAS)])


def release_freed_memory() -> None:
    """Return freed memory to the system, from which the next work requests it again (malloc_trim(3)).

    No-op without glibc.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return
    trim(0)


class IdleDetector:
    """Detects, once, the end of a period of work: `after_s` without work, by the caller's clock."""

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._done = 0
        self._since_s: float | None = None

    def has_become_idle(self, done: int, now_s: float) -> bool:
        """Return True once if there was work and then none for `after_s`.

        `done` counts work: a changed count is work.
        """
        if done != self._done:
            self._done, self._since_s = done, now_s
        if self._since_s is None or now_s - self._since_s < self._after_s:
            return False
        self._since_s = None
        return True


class MemoryBudget:
    """Registry of shares: `register_share(name, limit, used)` registers an owner that counts for itself.

    The limits of all shares together need not reach `limit_bytes`: the rest is for code, libraries and the allocator.
    """

    def __init__(self, limit_bytes: int = 0) -> None:
        self.limit_bytes = limit_bytes
        self._shares: dict[str, tuple[int, Callable[[], int]]] = {}

    def register_share(self, name: str, limit_bytes: int, used: Callable[[], int]) -> None:
        self._shares[name] = (limit_bytes, used)

    def shares(self) -> dict[str, tuple[int, int]]:
        """Return {name: (used, limit)} in bytes."""
        return {name: (used(), limit) for name, (limit, used) in sorted(self._shares.items())}


class RecentCache(Generic[K, V]):
    """Values up to a total weight of `limit`, in any unit. The least recently used ones are dropped first.

    `most`: limit of the weight of one value, `limit` unless given. A heavier value is not cached.
    """

    def __init__(self, limit: int, most: int | None = None) -> None:
        self._limit = limit
        self._most = limit if most is None else most
        self._found: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self.weight = 0

    def get(self, key: K) -> V | None:
        found = self._found.get(key)
        if found is None:
            return None
        self._found.move_to_end(key)
        return found[0]

    def put(self, key: K, value: V, weight: int) -> None:
        if weight > self._most:
            return
        old = self._found.pop(key, None)
        self.weight += weight - (old[1] if old is not None else 0)
        self._found[key] = (value, weight)
        while self.weight > self._limit:
            _, (_, gone) = self._found.popitem(last=False)
            self.weight -= gone

    def clear(self) -> None:
        self._found.clear()
        self.weight = 0
