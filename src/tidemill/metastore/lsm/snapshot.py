"""Snapshot: the database as of the snapshot's creation, until it is closed."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Self

from tidemill.base.errors import ClosedError
from tidemill.metastore.lsm.read_view import PENDING, Pending, Pin, Row
from tidemill.metastore.lsm.scan import Scan
from tidemill.metastore.lsm.version import prefix_end


class Snapshot:
    """Consistent state, unaffected by batches, flushes and compactions. While it is open its files are not deleted.

    Close it with `with` or `close()`. After that every read raises ClosedError; reads also raise the errors of the
    database's own reads.
    """

    def __init__(self, pin: Pin, seqno: int) -> None:
        self._pin = pin
        self.seqno = seqno
        """Seqno of the newest batch that it contains."""

    def peek(self, key: bytes) -> bytes | Pending | None:
        """Return the value synchronously; PENDING if something must be read to know."""
        self._check_open()
        return self._pin.view.peek(key)

    async def get(self, key: bytes) -> bytes | None:
        value = self.peek(key)
        return await self._pin.view.get(key) if value is PENDING else value

    async def get_row(self, key: bytes) -> Row | None:
        """Return the live row with its seqno; None if it is absent or deleted."""
        self._check_open()
        row = self._pin.view.peek_row(key)
        return await self._pin.view.get_row(key) if row is PENDING else row

    async def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return one value, or None, for each key, in order."""
        self._check_open()
        return await self._pin.view.get_many(keys)

    def scan(self, lower: bytes = b"", upper: bytes | None = None, *, reverse: bool = False) -> Scan:
        """Iterate over chunks of the live rows in [lower, upper). The scan has its own pin and outlives the
        snapshot."""
        self._check_open()
        return Scan(self._pin.duplicate(), lower, upper, reverse)

    def prefix(self, prefix: bytes, *, reverse: bool = False) -> Scan:
        return self.scan(prefix, prefix_end(prefix), reverse=reverse)

    def close(self) -> None:
        """Release the snapshot. Idempotent."""
        self._pin.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._pin.released:
            raise ClosedError(f"the snapshot is closed: seqno={self.seqno}.")
        self._pin.check()

    def __del__(self) -> None:
        pin = getattr(self, "_pin", None)
        if pin is not None and not pin.released:
            warnings.warn(f"A snapshot was never closed: seqno={self.seqno}.", ResourceWarning, stacklevel=2)
            pin.release()
