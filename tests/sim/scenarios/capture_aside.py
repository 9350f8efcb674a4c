"""Worlds with slow copies, whose concurrent changes go to the side topic, and the faults planted into that."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from sim.world import swapped
from tidemill.capture.config import CaptureConfig
from tidemill.capture.session import continuity_check, table_adder
from tidemill.capture.snapshot import chunks, copier, side_topic, side_topic_append, wal_hold
from tidemill.capture.tables import context
from tidemill.metastore.catalogue import CaptureTableRow, TableSnapshot

FAULTS = ("unheld-copy", "shown-twice", "joined-ahead", "late-stop")


def slowly_copied(
    source: random.Random, config: CaptureConfig, stack: contextlib.ExitStack, fault: str
) -> CaptureConfig:
    """Configure copies of one or two rows at a time, recorded immediately, which yield soon, and small appends."""
    for module, name, value in (
        (copier, "RECORD_S", 0.05),
        (copier, "MIN_REMAINING_SHARE", 0.0),
        (chunks, "PART_S", 0.01),
        (wal_hold, "HOLD_POLL_S", source.choice((0.05, 0.5))),
        (wal_hold, "RECORD_S", source.choice((0.1, 5.0))),
        (wal_hold, "MIB", 300 if fault == "late-stop" else source.choice((400, 1500, 1 << 20, 1 << 20))),
        (side_topic_append, "READ_BYTES", source.choice((1, 500, 1 << 20))),
        (table_adder, "MAX_REMAINING_RECORDS", source.choice((0, 3, 2000))),
        (side_topic, "MAX_RECORDS_BETWEEN_SESSIONS", source.choice((3, 20_000))),
    ):
        stack.enter_context(swapped(module, name, value))
    return replace(
        config, partitions=source.choice((1, 1, 2)), copy_chunk_blocks=source.choice((1, 2)), copy_aside_max_mb=1,
        copy_rows_per_s=source.choice((2, 5, 10)), copy_aside_after_s=source.choice((0.05, 0.3)),
    )  # fmt: skip


def _nothing_shown(row: CaptureTableRow, partitions: int) -> TableSnapshot:
    """Plant the fault shown-twice."""
    assert row.copy is not None
    return TableSnapshot(0, 0, (), row.copy.lsn, 0, (0,) * partitions)


def _ahead(*args: Any) -> tuple[int, tuple[int, ...]] | None:
    """Plant the fault joined-ahead."""
    found = _joins_at(*args)
    return None if found is None else (found[0] + 3, found[1])


async def _at_confirmed(self: context.SideLoopContext) -> int:
    """Plant the fault late-stop."""
    found = await _wal_end(self)
    return max(1, found - 40)


_joins_at, _wal_end = side_topic.find_join_position, context.SideLoopContext.read_wal_end


@contextlib.contextmanager
def planted_aside(fault: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        match fault:
            case "unheld-copy":
                # The check whether WAL was released is removed too: either of the two compensates for the other.
                stack.enter_context(swapped(wal_hold.ConfirmedWal, "hold_wal", lambda self, on: None))
                stack.enter_context(swapped(wal_hold, "tables_needing_wal", lambda *_: []))
                stack.enter_context(swapped(continuity_check, "is_confirmed", lambda slot, lsn: False))
            case "shown-twice":
                stack.enter_context(swapped(side_topic, "first_snapshot_of", _nothing_shown))
            case "joined-ahead":
                stack.enter_context(swapped(side_topic, "find_join_position", _ahead))
            case "late-stop":
                stack.enter_context(swapped(context.SideLoopContext, "read_wal_end", _at_confirmed))
        yield
