"""What a step asks of the mirror, and how keys are hashed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import pyarrow as pa

from tidemill.shards.parts.arrow_rows import Index
from tidemill.shards.parts.row_hash import U64

HashRows = Callable[[pa.Table, tuple[str, ...]], U64]


class Lookup(Protocol):
    """What `resolve` needs of the mirror."""

    def lookup(self, keys: pa.Table, hashes: U64) -> tuple[pa.Table, Index]:
        """(live rows found, for each asked key its row in them or -1). Keys are distinct, sorted by hash."""
        ...

    def live_rows(self) -> pa.Table:
        """All live rows."""
        ...

    @property
    def empty(self) -> bool:
        """True only when nothing is live."""
        ...
