"""Checks of rows that only the rooms can make: the opaque parts of rows, and the order between the rooms' rows.

The order is that of the checkpoint: a shard of a pipeline is at most as far as the bindings of its source, and a
binding at most as far as its topics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec

from tidemill.base.errors import CorruptError, InvalidError
from tidemill.metastore.check.checker import Checker, Examine
from tidemill.metastore.check.findings import Findings, RowSource
from tidemill.metastore.check.objects import References
from tidemill.metastore.rows import BINDINGS, EXTENTS, PARTITIONS, PIPELINES, SHARD_BATCHES, SHARDS
from tidemill.metastore.rows.catalogue import source_of
from tidemill.metastore.rows.partitions import ExtentRow, PartitionRow
from tidemill.metastore.rows.row_family import Family
from tidemill.metastore.rows.shards import BindingRow, ShardBatchRow, ShardRow
from tidemill.shards.bindings.remap import decode_record
from tidemill.shards.state.checkpoint import decode_header
from tidemill.shards.state.codec import decode_batch
from tidemill.topics.partition.state_machine.row_codec import decode_batches, decode_producers, decode_transactions

R = TypeVar("R", bound=msgspec.Struct)

Offsets = dict[str, tuple[int, ...]]

ORDER_FIX = "Restore from an older manifest; the rows were not written by one checkpoint."


def row_checks() -> Mapping[str, Examine]:
    """Return, by family name, the check of each room for its own part of a row."""
    return {
        PARTITIONS.name: _check_partition_row,
        EXTENTS.name: _check_extent_row,
        SHARDS.name: _check_shard_row,
        SHARD_BATCHES.name: _check_batch_row,
        BINDINGS.name: _check_binding_row,
    }


async def check_rows(rows: RowSource, findings: Findings, references: References, incarnation: int) -> Checker:
    """Check every row, every reference between rows, and the order between partitions, bindings and shards.
    `incarnation` is that of the cluster: 1 if it was never restored."""
    checker = Checker(rows, findings, references, row_checks(), restores=incarnation - 1)
    await checker.run()
    newest: dict[str, BindingRow] = {}
    offsets: dict[str, Offsets] = {}
    async for keys, values in rows.prefix(BINDINGS.prefix()):
        for key, value in zip(keys, values, strict=True):
            row = _try_decode(BINDINGS, key, value)
            if row is not None:
                newest[row.source] = row
                _apply_binding(offsets, row)
    for row in newest.values():
        _check_binding(checker, findings, row, offsets.get(row.source, {}))
    async for keys, values in rows.prefix(PIPELINES.prefix()):
        for key, value in zip(keys, values, strict=True):
            pipeline = _try_decode(PIPELINES, key, value)
            for table, fed_by in pipeline.tables.items() if pipeline is not None else ():
                source = source_of(fed_by)
                shard = checker.shards.get(table)
                upper = newest[source].time_ms + 1 if source in newest else 0
                if fed_by != "derived" and shard is not None and shard.upper > upper:
                    problem = f"its upper {shard.upper} is beyond the newest binding {upper - 1}"
                    findings.add(f"table {table}", f"bindings of {source}", problem, ORDER_FIX)
    return checker


def _apply_binding(offsets: dict[str, Offsets], row: BindingRow) -> None:
    """Update `offsets` of the source to this row: a delta names only the offsets that moved."""
    try:
        stored = decode_record(row.binding)
    except CorruptError:
        return  # already a finding
    before = offsets.get(row.source, {}) if stored.back else {}
    offsets[row.source] = {**before, **stored.binding.offsets}


def _check_binding(checker: Checker, findings: Findings, row: BindingRow, offsets: Offsets) -> None:
    for topic_id, ends in offsets.items():
        if topic_id not in checker.topics:
            continue  # bindings carry topics that were replaced
        for number, end in enumerate(ends):
            found = checker.partitions.get((topic_id, number))
            if end > (found.next_offset if found is not None else 0):
                findings.add(f"binding {row.source}@{row.time_ms}", f"partition {topic_id}/{number}",
                             f"it covers offsets up to {end}, beyond the partition's end", ORDER_FIX)  # fmt: skip


def _check_partition_row(row: PartitionRow) -> str:
    def check() -> str:
        decode_producers(row)
        late = [first for first in decode_transactions(row).values() if first >= row.next_offset]
        return f"a transaction begins at {late[0]}, beyond its next offset {row.next_offset}" if late else ""

    return _run_row_check(check)


def _check_extent_row(row: ExtentRow) -> str:
    def check() -> str:
        batches = decode_batches(row)
        size = sum(batch[2] for batch in batches)
        if batches[0][:2] != (row.base_offset, row.first_byte) or size != row.size_bytes:
            return "its batches do not match its size and offsets"
        return ""

    return _run_row_check(check)


def _check_shard_row(row: ShardRow) -> str:
    def check() -> str:
        header = decode_header(row.header)
        same = (header.name, header.shard_id, header.since, header.upper) == (
            row.name, row.shard_id, row.since, row.upper,
        )  # fmt: skip
        return "" if same else "its header differs from the row"

    return _run_row_check(check)


def _check_batch_row(row: ShardBatchRow) -> str:
    def check() -> str:
        batch = decode_batch(row.batch)
        objects = tuple(part.object_key for part in batch.parts if part.object_key)
        same = (batch.lower, batch.upper, objects) == (row.lower, row.upper, row.objects)
        return "" if same else "its batch differs from the row"

    return _run_row_check(check)


def _check_binding_row(row: BindingRow) -> str:
    def check() -> str:
        return "" if decode_record(row.binding).binding.time_ms == row.time_ms else "its binding has another time"

    return _run_row_check(check)


def _run_row_check(check: Callable[[], object]) -> str:
    try:
        found = check()
    except CorruptError as error:
        return error.message
    return found if isinstance(found, str) else ""


def _try_decode(family: Family[R], key: bytes, value: bytes) -> R | None:
    """Decode a row. Return None for a row that the checker has already reported."""
    try:
        return family.decode(key, value)
    except (CorruptError, InvalidError):
        return None
