"""A snapshot: the database as it was when the snapshot was made, until it is closed."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Self

from tidemill.base.errors import ClosedError
from tidemill.metastore.lsm.pin import Pin
from tidemill.metastore.lsm.read_view import PENDING, Pending, Row
from tidemill.metastore.lsm.scan import Scan
from tidemill.metastore.lsm.version import prefix_end


class Snapshot:
    """Stable over batches, flushes and merges. While it is open its files stay; close it with `with` or `close()`.

    Every read raises ClosedError after that, and what the database's own reads raise.
    """

    def __init__(self, pin: Pin, seqno: int) -> None:
        self._pin = pin
        self.seqno = seqno
        """The seqno of the newest batch it sees."""

    def peek(self, key: bytes) -> bytes | Pending | None:
        """The value without waiting; PENDING when something must be read to know."""
        self._check()
        return self._pin.view.peek(key)

    async def get(self, key: bytes) -> bytes | None:
        value = self.peek(key)
        return await self._pin.view.get(key) if value is PENDING else value

    async def get_row(self, key: bytes) -> Row | None:
        """The live row with its seqno; None when it is absent or deleted."""
        self._check()
        row = self._pin.view.peek_row(key)
        return await self._pin.view.get_row(key) if row is PENDING else row

    async def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """One value, or None, for each key, in order."""
        self._check()
        return await self._pin.view.get_many(keys)

    def scan(self, lower: bytes = b"", upper: bytes | None = None, *, reverse: bool = False) -> Scan:
        """Chunks of the live rows in [lower, upper). Outlives the snapshot: it has a pin of its own."""
        self._check()
        return Scan(self._pin.again(), lower, upper, reverse)

    def prefix(self, prefix: bytes, *, reverse: bool = False) -> Scan:
        return self.scan(prefix, prefix_end(prefix), reverse=reverse)

    def close(self) -> None:
        """Idempotent."""
        self._pin.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _check(self) -> None:
        if self._pin.released:
            raise ClosedError(f"The snapshot was closed: seqno={self.seqno}.")
        self._pin.check()

    def __del__(self) -> None:
        pin = getattr(self, "_pin", None)
        if pin is not None and not pin.released:
            warnings.warn(f"A snapshot was never closed: seqno={self.seqno}.", ResourceWarning, stacklevel=2)
            pin.release()
