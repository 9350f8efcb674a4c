"""Positions in a shape's log, as Electric's HTTP protocol writes them.

    -1        before everything           (tx -1, op 0)
    0_n       after chunk n of the base   (tx 0, op n)
    0_inf     after the whole base        (tx 0, op ∞)
    tx_op     after that item of the log  (tx = commit LSN, or time in ms for a shard)
    tx_0      after the whole transaction: the op of an item is at least FIRST_OP. A client of server-sent events
              resumes with the LSN of its last up-to-date item and op 0, and has seen that transaction completely

Offsets compare as tuples. Real transactions are far above 0, so the base sorts before the log.
"""

from __future__ import annotations

import msgspec

from tidemill.base.errors import InvalidError

OP_INFINITY = (1 << 63) - 1
"""Largest LSN, time or op. SQLite cannot store a larger integer."""
FIRST_OP = 1
MAX_DIGITS = 20
"""Longest number on the wire: LSNs, times and ops have 64 bits. (Python rejects very long ones.)"""


def parse_number(text: str) -> int | None:
    """Parse a non-negative decimal number; return None if the text is not one."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS else None


class LogOffset(msgspec.Struct, frozen=True, order=True, gc=False):
    """A place between two items: everything at or below it has been read."""

    tx: int
    op: int

    def __str__(self) -> str:
        if self.tx < 0:
            return "-1"
        return f"{self.tx}_inf" if self.op == OP_INFINITY else f"{self.tx}_{self.op}"

    @property
    def read(self) -> LogOffset:
        """The last log position that a reader here has read: with `tx_0`, the whole transaction."""
        return self if self.op or self.tx <= 0 else LogOffset(self.tx, OP_INFINITY)

    @classmethod
    def parse(cls, text: str) -> LogOffset:
        """Parse the wire form. `now` is not an offset and is handled by the caller. Raises InvalidError."""
        if text == "-1":
            return BEFORE_ALL
        tx_text, separator, op_text = text.partition("_")
        tx = parse_number(tx_text)
        op = OP_INFINITY if op_text == "inf" else parse_number(op_text)
        if separator and tx is not None and op is not None and max(tx, op) <= OP_INFINITY:
            return cls(tx, op)
        raise InvalidError(
            f"invalid offset: offset={text!r}.", fix="Send -1, now, or the electric-offset of a response."
        )


BEFORE_ALL = LogOffset(-1, 0)
BASE_END = LogOffset(0, OP_INFINITY)
