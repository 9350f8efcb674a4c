"""Modes of a stream of rows for records that cannot be read, as in Spark's own JSON reader.

PERMISSIVE     (default) a separate row: the record's bytes in `_corrupt_record`, the reason in
               `_corrupt_record_reason`, its position in `_time`, `_order`, `_partition`; every other column is null,
               also `_live`: it is neither a row nor a deletion
FAILFAST       the query fails, naming the record
DROPMALFORMED  such records are omitted

An update of a captured table that omits unchanged values (tm.unchanged) counts as such a record, too: its row has the
values that are known, and the reason names the columns that are null because their values are unknown.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from tidemill.base.errors import InvalidError
from tidemill.shards.api import TIME, Column
from tidemill.shards.parts.arrow_rows import int64s
from tidemill.shards.parts.schema import arrow_type
from tidemill.spark.merge.commands import ORDER, PARTITION, RECORD_KEY, UNCHANGED
from tidemill.spark.source.options import SourceOptions

MODES = ("PERMISSIVE", "FAILFAST", "DROPMALFORMED")
COLUMN = "_corrupt_record"
UNCHANGED_TEXT = "left unchanged"


class CorruptRecordMode(msgspec.Struct, frozen=True):
    """Handling of corrupt records. `column`: receives the bytes; `column`_reason receives the reason."""

    mode: str = "PERMISSIVE"
    column: str = COLUMN

    @classmethod
    def from_options(cls, options: SourceOptions) -> CorruptRecordMode:
        """Return the handling that the options select. Raises InvalidError for an unknown mode."""
        mode = options.text("mode", MODES[0]).upper()
        if mode not in MODES:
            raise InvalidError(f"no such mode: mode={options.text('mode')}.", fix=f"Use one of {', '.join(MODES)}.")
        return cls(mode, options.text("columnnameofcorruptrecord", COLUMN))

    @property
    def columns(self) -> tuple[Column, ...]:
        """Columns that are added to the rows."""
        if self.mode != "PERMISSIVE":
            return ()
        return Column(self.column, "binary"), Column(f"{self.column}_reason", "string")

    def rows(self, rows: pa.Table, dead: pa.Table) -> pa.Table:
        """Return the rows of a stream with the unreadable records (updates of DEAD_LETTERS) handled by the mode. Raises
        InvalidError if the mode is FAILFAST and there is one."""
        rows, lacking = _split_partial(rows)
        if self.mode == "FAILFAST" and lacking is not None and lacking.null_count < len(lacking):
            at = int(np.flatnonzero(lacking.is_valid().to_numpy())[0])
            raise InvalidError(
                f"an update lacks the values of columns that it left unchanged:"
                f" columns={_column_names(lacking[at].as_py())} partition={rows.column(PARTITION)[at]}"
                f" offset={rows.column(ORDER)[at]}.",
                fix="Capture the table with whole rows (REPLICA IDENTITY FULL), or read it with another mode.",
            )
        if self.mode == "DROPMALFORMED" and lacking is not None:
            rows = rows.filter(lacking.is_null())
        if self.mode == "FAILFAST" and dead.num_rows:
            said = " ".join(f"{name}={dead.column(name)[0].as_py()}" for name in ("topic", "partition", "offset"))
            raise InvalidError(
                f"a record cannot be read: {said} ({dead.column('reason')[0].as_py()}).",
                fix="Set mode=PERMISSIVE to get it as a row, or mode=DROPMALFORMED to omit such records.",
            )
        for column in self.columns:
            rows = rows.append_column(column.name, pa.nulls(rows.num_rows, arrow_type(column.type)))
        if self.mode == "PERMISSIVE" and lacking is not None:
            sets = lacking.combine_chunks().dictionary_encode()
            said = pa.array(
                [f"{UNCHANGED_TEXT}: {_column_names(names)}" for names in sets.dictionary.to_pylist()], pa.string()
            )
            rows = rows.set_column(rows.num_columns - 1, rows.schema.field(-1), said.take(sets.indices))
        if self.mode != "PERMISSIVE" or not dead.num_rows:
            return rows
        said_of = dict(zip((c.name for c in self.columns), (dead.column("bytes"), _reasons(dead)), strict=True))
        found: dict[str, Any] = {
            TIME: dead.column(TIME), ORDER: dead.column("offset"), PARTITION: dead.column("partition"), **said_of,
        }  # fmt: skip
        arrays = [found.get(f.name, pa.nulls(dead.num_rows, f.type)) for f in rows.schema]
        return pa.concat_tables([rows, pa.Table.from_arrays(arrays, schema=rows.schema)])


def _split_partial(rows: pa.Table) -> tuple[pa.Table, Any]:
    """Return the rows without the columns of partial rows, and the names of the omitted columns (null = none), or
    None."""
    if UNCHANGED not in rows.column_names:
        return rows, None
    return rows.drop_columns([UNCHANGED, RECORD_KEY]), rows.column(UNCHANGED)


def _column_names(unchanged: bytes) -> str:
    return ",".join(msgspec.json.decode(unchanged, type=list[str]))


def _reasons(dead: pa.Table) -> Any:
    """Return the reasons, with the last offset if a whole batch cannot be read."""
    first, last = int64s(dead, "offset"), int64s(dead, "last_offset")
    reasons = dead.column("reason")
    if not np.any(last > first):
        return reasons
    many = [f"{r} last_offset={b}" if b > a else r for r, a, b in zip(reasons.to_pylist(), first, last, strict=True)]
    return pa.array(many, pa.string())
