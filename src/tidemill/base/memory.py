"""The memory budget of a process: named shares of one limit, counted by their owners, enforced where they are taken.

A share is asked before memory is taken: `take` says no instead of letting the process grow, and what cannot wait
fails as one unit. What a library allocates is not seen here; `resident_bytes` is what the system says.
"""

from __future__ import annotations

import os
from collections.abc import Callable

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """Of this process, as Linux counts; 0 where /proc is not there."""
    try:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return 0


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
