"""Positions in PostgreSQL's write-ahead log as small ordered classes: comparing different kinds raises."""

from __future__ import annotations

import msgspec

from tidemill.base.errors import InvalidError


class Lsn(msgspec.Struct, frozen=True, order=True):
    """A PostgreSQL log sequence number: a byte position in the WAL (pg_lsn)."""

    value: int

    @classmethod
    def parse(cls, text: str) -> Lsn:
        """Read PostgreSQL's `X/Y` notation. Raises InvalidError."""
        try:
            high, low = text.split("/")
            return cls((int(high, 16) << 32) | int(low, 16))
        except ValueError as error:
            raise InvalidError(
                f"not an LSN: lsn={text!r}.", fix="Write it as PostgreSQL does, e.g. 0/16B3748."
            ) from error

    def __str__(self) -> str:
        return f"{self.value >> 32:X}/{self.value & 0xFFFFFFFF:X}"


class ChangePosition(msgspec.Struct, frozen=True, order=True):
    """Position of one change of a captured database: the commit LSN of its transaction, then its ordinal in it.

    Row LSNs interleave across transactions and repeat (multi-row INSERT, COPY), so they do not identify a position.
    """

    commit_lsn: int
    ordinal: int

    def __str__(self) -> str:
        return f"{self.commit_lsn}_{self.ordinal}"


BEFORE_ALL = ChangePosition(-1, 0)
