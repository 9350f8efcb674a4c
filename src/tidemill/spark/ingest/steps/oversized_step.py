"""Oversized step: a single time with more records than a step may hold, read in pieces, resolved by hash range, and
published by one append.

    pieces of STEP_BYTES → blocks → a file per hash range (scratch) → each range separately: resolve, write its part

Memory holds one piece, then one range. The scratch directory holds the decoded commands, the mirror's directory the
changes. The result equals that of the whole interval computed in one piece: a key is in one range, and ranges share
nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from msgspec.structs import replace

from tidemill.base.errors import CorruptError
from tidemill.shards.api import TIME, Part
from tidemill.shards.parts.arrow_rows import Index, int64s
from tidemill.shards.parts.checksums import checksum
from tidemill.shards.parts.row_hash import U64
from tidemill.shards.parts.schema import update_schema
from tidemill.spark.decode.captured import Stop
from tidemill.spark.ingest.dead_letters import letters_of_resolved, stop_of_rejected, violations_of_rejected
from tidemill.spark.ingest.fetch_decode import decode_blocks, fetch_table
from tidemill.spark.ingest.step_planner import STEP_BYTES, Step, split_descriptors
from tidemill.spark.ingest.table_writer import TableWriter
from tidemill.spark.merge.commands import (
    RECORD_KEY,
    UNCHANGED,
    Commands,
    Truncate,
    filter_commands,
    partial_command_schema,
    times_of,
)
from tidemill.spark.merge.mirror import Mirror
from tidemill.spark.merge.range_mirror import HashRange, cut_by_hash
from tidemill.spark.merge.resolve import KeyChanges, Resolved, no_changes, resolve, resolve_in_sequence
from tidemill.spark.merge.sorted_runs import SortedRun
from tidemill.spark.predicates.expectations import Violations
from tidemill.spark.stores import Stores

RANGE_RECORDS = 250_000
RANGE_BYTES = 64 << 20
"""Size of stored record batches; decoded they take several times as much."""


class OversizedStep:
    """Computation of an oversized step. `run` produces parts and changes; the caller appends. `progressed(records)` is
    called after every block."""

    def __init__(
        self, stores: Stores, table: TableWriter, step: Step, scratch: Path, progressed: Callable[[int], None]
    ) -> None:
        assert table.feed is not None
        self._stores = stores
        self._table = table
        self._feed = table.feed
        self._step = step
        self._directory = scratch
        self._progressed = progressed
        self._ranges = max(1 + step.records // RANGE_RECORDS, 1 + step.bytes // RANGE_BYTES)
        self._truncates: list[Truncate] = []
        self._crcs: list[int] = []
        """Checksums of the files of ranges, once they are written."""
        self.stop: Stop | None = None
        self.upper = step.upper
        self.parts: list[Part] = []
        self.changes: KeyChanges = no_changes(table.schema)
        self.rows = 0
        self.violations: list[Violations] = []
        self.resolved: list[Resolved] = []
        """Results of the ranges without their rows: tombstones and late records."""

    def run(self, bury: Callable[[pa.Table], None], stopping: Callable[[], bool]) -> bool:
        """Compute the step; False if it was stopped on the way. `bury` stores dead letters, always before the
        append."""
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory.mkdir(parents=True)
        try:
            if not self._spill(bury, stopping):
                return False
            self._resolve_ranges(bury)
            if self.stop is not None and self.stop.time_ms < self.upper:  # by a command that a range rejected
                self.upper = self.stop.time_ms
                self.parts, self.changes, self.rows = [], no_changes(self._table.schema), 0
                self.resolved = []
            return True
        finally:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _spill(self, bury: Callable[[pa.Table], None], stopping: Callable[[], bool]) -> bool:
        schema = partial_command_schema(self._table.schema)
        sinks = [pa.OSFile(str(self._file(number)), "wb") for number in range(self._ranges)]
        writers = [pa.ipc.new_stream(sink, schema) for sink in sinks]
        try:
            for piece in split_descriptors(self._step.descriptors, STEP_BYTES):
                batches = fetch_table(self._table.portal, self._stores.objects, [piece])
                for block in decode_blocks(self._feed, [piece], batches, schemas=self._table.schemas):
                    if stopping():
                        return False
                    if block.stop is not None:
                        self.stop = block.stop if self.stop is None else min(self.stop, block.stop)
                        self.upper = min(self.upper, self.stop.time_ms)
                    bury(block.dead.filter(pa.array(int64s(block.dead, TIME) < self.upper)))
                    self._truncates += block.commands.truncates
                    self.violations += block.violations
                    self._write_by_range(block.commands.rows, writers)
                    self._progressed(block.commands.rows.num_rows + block.dead.num_rows)
        finally:
            for writer, sink in zip(writers, sinks, strict=True):
                writer.close()
                sink.close()
        for number in range(self._ranges):
            with pa.memory_map(str(self._file(number)), "rb") as written:
                self._crcs.append(checksum(written.read_buffer()))
        return True

    def _write_by_range(self, rows: pa.Table, writers: Sequence[Any]) -> None:
        if not rows.num_rows:
            return
        for name in (UNCHANGED, RECORD_KEY):
            if name not in rows.column_names:
                rows = rows.append_column(name, pa.nulls(rows.num_rows, pa.binary()))
        for mine, writer in zip(cut_by_hash(rows, self._table.schema.key, self._ranges), writers, strict=True):
            if mine.num_rows:
                writer.write_table(mine)

    def _resolve_ranges(self, bury: Callable[[pa.Table], None]) -> None:
        # Ranges ascend, so their changes form one run.
        run = self._table.operator.mirror.store_run(self._resolve_each_range(bury))
        self.changes = KeyChanges(run.rows, run.hashes, run.live, run.path)

    def _resolve_each_range(self, bury: Callable[[pa.Table], None]) -> Iterator[SortedRun]:
        schema, mirror = self._table.schema, self._table.operator.mirror
        self._table.follow_tombstones()
        tombstones = self._table.tombstones
        for number in range(self._ranges):
            with pa.memory_map(str(self._file(number)), "rb") as source:
                data = source.read_buffer()
                if checksum(data) != self._crcs[number]:
                    raise CorruptError(
                        f"spilled records are damaged: path={self._file(number)}.", fix="Check the disk."
                    )
                rows = pa.ipc.open_stream(data).read_all()
                commands = Commands(rows, tuple(self._truncates))
                commands = filter_commands(commands, times_of(commands) < self.upper)
                view = _RangeView(mirror, HashRange(number, self._ranges))
                step = self._step.lower, self.upper
                if tombstones is not None:
                    resolved = resolve_in_sequence(schema, commands, view, *step, tombstones.sequence)
                else:
                    resolved = resolve(schema, commands, view, *step, check=self._table.check)
                del rows, commands, data
            stop = stop_of_rejected(self._feed, resolved)
            if stop is not None:
                self.stop = stop if self.stop is None else min(self.stop, stop)
            self.violations += violations_of_rejected(resolved)
            bury(letters_of_resolved(self._feed, resolved))
            self.parts += self._table.portal.call(self._table.write(resolved.updates))
            self.rows += resolved.updates.num_rows
            nothing = update_schema(schema).empty_table()
            self.resolved.append(replace(resolved, updates=nothing, changes=no_changes(schema)))
            yield SortedRun(resolved.changes.rows, resolved.changes.hashes, resolved.changes.live)

    def _file(self, number: int) -> Path:
        return self._directory / f"range-{number}.arrow"


class _RangeView:
    """View of a mirror restricted to one range, for truncations; lookups only ask for keys of the range anyway."""

    def __init__(self, mirror: Mirror, part: HashRange) -> None:
        self._mirror, self._part = mirror, part

    def lookup(self, keys: pa.Table, hashes: U64) -> tuple[pa.Table, Index]:
        return self._mirror.lookup(keys, hashes)

    def live_rows(self, columns: tuple[str, ...] | None = None) -> pa.Table:
        return self._mirror.live_rows(columns, self._part.bounds)

    @property
    def empty(self) -> bool:
        return self._mirror.empty
