"""Rules for the transactions that committed readers see, checked on all records shown to them of every partition.

whole       all or nothing of a transaction is shown, over all partitions: all of it if its commit was acknowledged,
            nothing if no commit was requested
once        no record is shown twice
in order    a producer's records are shown in the order in which it sent them
as one      a group has the offsets of a committed transaction, and of no other
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from sim.world import Violated


class Fate(Enum):
    UNASKED = "no commit was asked for"
    MAYBE = "a commit was asked for"
    COMMITTED = "its commit was acknowledged"
    ABORTED = "its abort was acknowledged"


class Sent:
    """One transaction as its producer knows it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.fate = Fate.UNASKED
        self.records: set[tuple[int, bytes]] = set()
        """(partition, value)."""
        self.offset = -1
        """Offset of the group, in partition `number` of a topic that no client reads."""


def check_order(shown: Mapping[tuple[int, int], bytes]) -> None:
    newest: dict[tuple[int, bytes], int] = {}
    for (partition, offset), value in sorted(shown.items()):
        by, number = (partition, value[: value.index(b".")]), int(value[value.index(b"/") + 1 :])
        if number <= newest.get(by, -1):
            raise Violated(f"a producer's records are out of order: {partition=} {offset=} {value=} after={newest[by]}")
        newest[by] = number


def check_transaction(
    prefix: bytes, sent: Sent, found: list[tuple[int, bytes]], offsets: dict[tuple[str, int], int]
) -> None:
    name = prefix.decode()
    if len(set(found)) != len(found):
        raise Violated(f"a record is shown twice: transaction={name}")
    if found and set(found) != sent.records:
        raise Violated(
            f"a part of a transaction is shown: transaction={name} shown={len(found)} of {len(sent.records)}"
        )
    if found and sent.fate in (Fate.UNASKED, Fate.ABORTED):
        raise Violated(f"an aborted transaction is shown: transaction={name} fate={sent.fate.value}")
    if not found and sent.fate is Fate.COMMITTED:
        raise Violated(f"a committed transaction is not shown: transaction={name}")
    if sent.offset >= 0:
        offset = offsets.get((name.partition(".")[0], sent.number), -1)
        if offset != (sent.offset if found else -1):
            raise Violated(f"offsets and records part: transaction={name} offset={offset} shown={bool(found)}")
