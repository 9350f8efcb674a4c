"""The memory budget of a process: named shares of one limit, counted by their owners, enforced where they are taken.

A share is asked before memory is taken: `take` says no instead of letting the process grow, and what cannot wait
fails as one unit. What a library allocates is not seen here; `resident_bytes` is what the system says.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

_LARGEST_KEPT = (-3, 32 << 20)
"""glibc's M_MMAP_THRESHOLD, the most it takes: what is larger is mapped for its time."""
_TRIM_THRESHOLD = -1
"""M_TRIM_THRESHOLD: an arena gives pages back when more than this is free at its end."""
_ARENAS = (-8, 1)
"""M_ARENA_MAX: what one thread freed is there for the next one, and can be given back; of any other arena than the
first, malloc_trim trims what lies between, and not the end."""


def resident_bytes() -> int:
    """Of this process, as Linux counts; 0 where /proc is not there."""
    try:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return 0


def keep_freed_memory(kept_bytes: int = 1 << 30) -> bool:
    """From now on what this process frees stays with it, up to `kept_bytes` of it, for its next work: pages that the
    system gave are zeroed first, which costs more than much of what is done with them. Call it before there are
    threads. False where the C library is not glibc, and everything is as it was (mallopt(3))."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return all([mallopt(*option) == 1 for option in (_LARGEST_KEPT, (_TRIM_THRESHOLD, kept_bytes), _ARENAS)])


def give_freed_memory_back() -> None:
    """To the system: the next work asks for it again (malloc_trim(3)). Nothing where there is no glibc."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return
    trim(0)


class Rest:
    """Tells once, after a while without work, that there was some. `after_s` by the caller's clock."""

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._done = 0
        self._since_s: float | None = None

    def begins(self, done: int, now_s: float) -> bool:
        """`done` counts what was worked; another count than last time is work."""
        if done != self._done:
            self._done, self._since_s = done, now_s
        if self._since_s is None or now_s - self._since_s < self._after_s:
            return False
        self._since_s = None
        return True


class Budget:
    """`share(name, limit, used)`: an owner that counts for itself is shown here under its name. Limits of all shares
    together need not reach `limit_bytes`: the rest is for code, libraries and the allocator."""

    def __init__(self, limit_bytes: int = 0) -> None:
        self.limit_bytes = limit_bytes
        self._shares: dict[str, tuple[int, Callable[[], int]]] = {}

    def share(self, name: str, limit_bytes: int, used: Callable[[], int]) -> None:
        self._shares[name] = (limit_bytes, used)

    def shares(self) -> dict[str, tuple[int, int]]:
        """{name: (used, limit)} in bytes."""
        return {name: (used(), limit) for name, (limit, used) in sorted(self._shares.items())}
