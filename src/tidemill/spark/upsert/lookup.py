"""Interface of the mirror that a step reads, and of the hash of keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import pyarrow as pa

from tidemill.shards.parts.arrow_rows import Index
from tidemill.shards.parts.row_hash import U64

HashRows = Callable[[pa.Table, tuple[str, ...]], U64]


class MirrorLookup(Protocol):
    """Part of the mirror that `resolve` uses."""

    def lookup(self, keys: pa.Table, hashes: U64) -> tuple[pa.Table, Index]:
        """Return (live rows found, for each given key its row in them or -1). Keys are distinct, sorted by hash."""
        ...

    def live_rows(self) -> pa.Table:
        """Return all live rows."""
        ...

    @property
    def empty(self) -> bool:
        """True only if nothing is live."""
        ...
