"""Topics written by capture → commands, dead letters, and the position where the table must stop.

key      JSON object of the key columns
value    JSON object of all columns; numbers and booleans as JSON, everything else as PostgreSQL's text; null = deletion
headers  tm.op = "truncate": every live key of the table is deleted at this position
         tm.unchanged: the value lacks these columns, which keep their previous values (partial_rows.py)

In a topic of events (events.py, in Avro avro.py), the value contains the row, in other forms; the rest is the same.

A value that its column cannot represent (NaN in numeric(6,2), a timestamp past the year 294246) makes the row a dead
letter, and its key absent: an old value never stays as if it were current. The next good value of the key restores it.
A record whose columns differ from its version of the table does not concern one row only: the table stops before its
time, at a `Stop`. So it does before a version that the reader does not know yet, and before a batch that cannot be
read, because its keys are unknown.

Values, and the keys of deletions, are read in blocks (block_decoder.py); rejected ones, and possible truncations, are
read one by one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidemill.base.errors import drop_table_command
from tidemill.base.runtime.tasks import error_sentence, is_fault
from tidemill.shards.api import Column, ShardSchema
from tidemill.spark.decode import events
from tidemill.spark.decode.avro import AvroReader, AvroVersion, SchemaMismatchError, after_row, locate_rows
from tidemill.spark.decode.block_decoder import Block, join_blocks, to_bool_mask
from tidemill.spark.decode.column_batches import ColumnBatch, read_column_rows
from tidemill.spark.decode.dead_letter_rows import DeadLetter, dead_letter_table
from tidemill.spark.decode.json.captured_values import NATIVE_JSON, CapturedDialect, text_to_column, values_to_array
from tidemill.spark.decode.newline_text import Places, bytes_of_ranges
from tidemill.spark.decode.partial_rows import OmittedColumns, add_unchanged_columns, split_partial_rows
from tidemill.spark.decode.records import Records
from tidemill.spark.decode.row_decoder import build_command_table, rows_to_columns
from tidemill.spark.decode.schema_versions import (
    VERSION_1_HEADERS,
    SchemaVersions,
    ValueFormat,
    VersionReaders,
    may_have_versions,
    places_between,
    version_at,
)
from tidemill.spark.merge.commands import Commands, Truncate, join_commands
from tidemill.spark.merge.toast_fill import unchanged_columns
from tidemill.topics.batch import RecordColumns

OP_HEADER = "tm.op"
TRUNCATE = b"truncate"


class Stop(msgspec.Struct, frozen=True, order=True):
    """Reason why the table cannot advance to `time_ms` or beyond, with the position. `grown`: it can once it is
    reopened, because the catalogue has a newer version of its description."""

    time_ms: int
    partition: int
    offset: int
    reason: str
    fix: str
    grown: bool = False


def stop_at(records: Records, at: int, reason: str, fix: str, *, grown: bool = False) -> Stop:
    """Return the stop at the record at this place of a block; its position is added to `reason`."""
    partition, offset = records.partition_of(at), int(records.offsets[at])
    said = f"{reason} topic={records.topic} partition={partition} offset={offset}."
    return Stop(int(records.times[at]), partition, offset, said, fix, grown)


class Captured(msgspec.Struct, frozen=True):
    commands: Commands
    dead: pa.Table
    stop: Stop | None = None


class _DecodeResults:
    """Results of decoding, run by run."""

    def __init__(self, stop: Stop | None) -> None:
        self.stop = stop
        self.blocks: list[Block] = []
        self.gone: list[Block] = []
        self.truncates: list[Truncate] = []
        self.dead: list[tuple[int, str]] = []
        self.leaving: list[OmittedColumns] = []

    def add_stop(self, at: Stop) -> None:
        self.stop = at if self.stop is None else min(self.stop, at)


class CapturedDecoder:
    """Decoder of one table's records."""

    def __init__(
        self,
        schema: ShardSchema,
        table: str = "",
        known: Sequence[Sequence[Column]] = (),
        forms: Mapping[str, str] | None = None,
        avro: Sequence[AvroVersion] = (),
    ) -> None:
        """Create the decoder of a table.

        `known`: the columns of each version of the table's description (schema_versions.py). `forms`: of the columns,
        if records are events (base/pgtypes/debezium). `avro`: the schemas of each version, if they are Avro.
        """
        self.schema = schema
        self.table = table
        self._events = forms is not None
        self._forms = forms or {}
        value, key = (CapturedDialect(self._forms, exact=exact) for exact in (True, False))
        self._dialect = value
        self._generations = SchemaVersions(ValueFormat(schema, NATIVE_JSON, value, key, self._forms), known, avro)

    def decode(self, records: Records) -> Captured:
        """Decode all records, or those before the stop, if there is one."""
        if records.partitions is None:
            return self._decode(records)
        # Within one partition only, records in offset order are in the order of times and of versions.
        parts = records.by_partition() if may_have_versions(records.columns) else []
        if len({run[2] for part in parts for run in self._generations.runs(part.columns, len(part))}) <= 1:
            found = self._decode(records)
            if found.stop is None:
                return found
        each = [self._decode(part) for part in parts or records.by_partition()]
        return Captured(
            join_commands(self.schema, [one.commands for one in each]),
            pa.concat_tables([one.dead for one in each]),
            min((one.stop for one in each if one.stop is not None), default=None),
        )

    @property
    def reads_columns(self) -> bool:
        """True if batches may have the rows as columns: those of events have none."""
        return not self._events

    def decode_columns(self, group: Sequence[ColumnBatch]) -> Commands | None:
        """Decode a group of batches from their columns. None: their records decide."""
        newest = self._generations[self._generations.newest]
        rows = read_column_rows(
            group, self._generations.newest, newest.names, [column.name for column in newest.columns]
        )
        if rows is None:
            return None
        arrays: dict[str, pa.Array] = {}
        for column in newest.columns:
            array = text_to_column(column, rows.texts[column.name], self._dialect)
            if array is None:
                return None
            arrays[column.name] = array
        every = newest.convert_to_newest(Block(np.arange(len(rows.live)), arrays))
        if rows.live.all():
            return Commands(build_command_table(self.schema, every.arrays, every.places, {}, every.places[:0], rows))
        live, gone = (np.flatnonzero(mask) for mask in (rows.live, ~rows.live))
        some, absent = (pa.array(places) for places in (live, gone))
        left = {name: array.take(some) for name, array in every.arrays.items()}
        keys = {name: every.arrays[name].take(absent) for name in self.schema.key}
        return Commands(build_command_table(self.schema, left, live, keys, gone, rows))

    def _decode(self, records: Records) -> Captured:
        """Decode records of one partition, or of one version."""
        found = _DecodeResults(
            stop=min((self._unreadable_batch_stop(letter) for letter in records.unread), default=None)
        )
        kinds = _classify_records(records.columns)
        for first, end, version in self._generations.runs(records.columns, len(records)):
            if version > self._generations.newest:
                found.add_stop(self._new_version_stop(records, first))
                break
            under = self._generations[version]
            valued, *others = (places_between(k, first, end) for k in kinds)
            whole, leaving = split_partial_rows(records.columns, valued, VERSION_1_HEADERS + (version > 1))
            goes_on = self._decode_run(under, records, [whole, *others], found)
            for some in leaving:
                goes_on &= self._decode_partial(under, some, records, found)
            if not goes_on:
                break
        newest, nothing = self._generations[self._generations.newest], np.zeros(0, dtype=np.int64)
        none = Block(nothing, rows_to_columns(newest.columns, [], [], [], self._to_array)[0])
        found.blocks.append(newest.convert_to_newest(none))
        found.gone.append(Block(nothing, rows_to_columns(newest.key_columns, [], [], [], self._to_array)[0]))
        live, live_at = join_blocks(found.blocks)
        table = build_command_table(self.schema, live, live_at, *join_blocks(found.gone), records)
        if found.leaving:
            table = add_unchanged_columns(table, live_at, found.leaving, records.columns)
        letters = dead_letter_table([self._dead_letter(records, at, reason) for at, reason in found.dead])
        return Captured(Commands(table, tuple(found.truncates)), letters, found.stop)

    def _decode_partial(
        self, under: VersionReaders, some: OmittedColumns, records: Records, found: _DecodeResults
    ) -> bool:
        """Decode records that omit the same columns; False if the table stops at one of them.

        If the key changed too, the previous row belongs to another key, which a reader of a part of the keys does not
        have: such a record is a dead letter, for every reader alike.
        """
        nothing = some.places[:0]
        try:
            under = under.omitting(unchanged_columns(some.names))
        except ValueError as error:
            found.add_stop(self._schema_stop(records, int(some.places[0]), str(error)))
            return False
        if some.moved:
            reason = f"its key changed, and the stream has no value of {', '.join(unchanged_columns(some.names))}"
            return self._decode_run(under, records, [nothing, nothing, some.places], found, reason)
        found.leaving.append(some)
        return self._decode_run(under, records, [some.places, nothing, nothing], found)

    def _decode_run(
        self, under: VersionReaders, records: Records, kinds: Sequence[Places], found: _DecodeResults, dies_of: str = ""
    ) -> bool:
        """Decode records of one version; False if the table stops at one of them. `dies_of`: reject all with this
        reason."""
        live_at: list[int] = []
        rows: list[Any] = []
        absent_at: list[int] = []
        keys: list[Any] = []
        dead: list[tuple[int, str]] = []
        goes_on = True
        columns = records.columns
        valued, deleted, others = kinds
        value_at, value_bytes = columns.value_at[valued], columns.value_bytes[valued]
        if self._events:
            value_at, value_bytes, valued, unclear = (
                events.locate_rows(columns, valued) if under.avro is None else locate_rows(columns, valued, under.avro)
            )
            others = np.concatenate([others, unclear])
        blocks, slow = under.values.read(columns.body, value_at, value_bytes, valued)
        gone, slow_keys = under.keys.read(columns.body, columns.key_at[deleted], columns.key_bytes[deleted], deleted)
        for at in np.sort(np.concatenate([slow, slow_keys, others])).tolist():
            value = None
            if dies_of:
                dead.append((at, dies_of))
                continue
            try:
                value, truncated = self._extract_row(under, columns, at)
                if value is not None:
                    rows.append(under.value.decode(value))
                    live_at.append(at)
                elif truncated:
                    truncate = Truncate(int(records.times[at]), records.partition_of(at), int(records.offsets[at]))
                    found.truncates.append(truncate)
                elif columns.value_bytes[at] < 0:  # not a deletion's event, whose tombstone carries the deletion
                    keys.append(self._decode_key(under, columns.key(at)))
                    absent_at.append(at)
            except BaseException as error:
                if not is_fault(error):
                    raise
                difference = (
                    str(error) if isinstance(error, SchemaMismatchError) else self._describe_difference(under, value)
                )
                if difference:
                    found.add_stop(self._schema_stop(records, at, difference))
                    # Offset order is time order, so everything after this record is beyond the stop.
                    blocks, gone = [b.before(at) for b in blocks], [b.before(at) for b in gone]
                    goes_on = False
                    break
                dead.append((at, error_sentence(error)))
        alone, live_at = rows_to_columns(under.columns, rows, live_at, dead, self._to_array)
        # The previous value of a rejected row is not current: its key is absent until a good value arrives.
        for at, _ in dead:
            if columns.value(at) is not None:
                try:
                    keys.append(self._decode_key(under, columns.key(at)))
                    absent_at.append(at)
                except BaseException as error:
                    if not is_fault(error):
                        raise
        named, keyless = {at for at, _ in dead}, list[tuple[int, str]]()
        alone_gone, absent_at = rows_to_columns(under.key_columns, keys, absent_at, keyless, self._to_array)
        found.dead += dead + [(at, reason) for at, reason in keyless if at not in named]
        blocks.append(Block(np.array(live_at, dtype=np.int64), alone))
        gone.append(Block(np.array(absent_at, dtype=np.int64), alone_gone))
        found.blocks += [under.convert_to_newest(block) for block in blocks]
        found.gone += [under.convert_to_newest(block, whole=False) for block in gone]
        return goes_on

    def _extract_row(self, under: VersionReaders, columns: RecordColumns, at: int) -> tuple[bytes | None, bool]:
        """Return the row in a record, if any, and whether the record truncates the table. Raises exceptions of any
        type, depending on the bytes."""
        value = columns.value(at)
        if value is None:
            return None, _is_truncate(columns, at)
        if not self._events:
            return value, False
        if under.avro is not None:
            after = after_row(value, under.avro)
            return after, after is None and columns.key_bytes[at] < 0 and _is_truncate(columns, at)
        event = events.read_event(value)
        if event.op in (events.DELETED, events.TRUNCATED):
            return None, event.op == events.TRUNCATED
        return bytes(event.after), False

    def _to_array(self, values: Sequence[Any], column: Column) -> pa.Array:
        found = events.convert_values(self._forms.get(column.name, ""), values, column)
        return values_to_array(values, column) if found is None else found

    @staticmethod
    def _decode_key(under: VersionReaders, key: bytes | None) -> Any:
        if key is None:
            raise ValueError("record has neither key nor value")
        return under.key.decode(key)

    @staticmethod
    def _describe_difference(under: VersionReaders, value: bytes | None) -> str:
        """Return how a record's columns differ from the table's; "" if they do not, or if it is not a JSON object."""
        if value is None:
            return ""
        try:
            found = msgspec.json.decode(value, type=dict[str, msgspec.Raw]).keys()
        except BaseException as error:
            if not is_fault(error):
                raise
            return ""
        out = [f"+{name}" for name in found if name not in under.names]
        out += [f"-{name}" for name in sorted(under.names - found)]
        return " ".join(out)

    def _schema_stop(self, records: Records, at: int, difference: str) -> Stop:
        reason = f"the source's columns differ from the table's: table={self.table} difference=[{difference}]"
        return stop_at(records, at, reason, _recopy_fix(self.table))

    def _new_version_stop(self, records: Records, at: int) -> Stop:
        reason = f"the source has a new description of the table: table={self.table}"
        return stop_at(records, at, reason, "The pipeline reopens the table with its present columns.", grown=True)

    def _unreadable_batch_stop(self, letter: DeadLetter) -> Stop:
        return Stop(
            letter.time_ms,
            letter.partition,
            letter.offset,
            f"records of a captured table cannot be read: table={self.table} topic={letter.topic}"
            f" partition={letter.partition} offsets={letter.offset}..{letter.last_offset} {letter.reason}.",
            _recopy_fix(self.table),
        )

    def _dead_letter(self, records: Records, at: int, reason: str) -> DeadLetter:
        value, key = records.columns.value(at), records.columns.key(at)
        offset = int(records.offsets[at])
        place = f"table={self.table} {reason}" if self.table else reason
        return DeadLetter(
            records.topic,
            records.partition_of(at),
            offset,
            offset,
            int(records.times[at]),
            place,
            value if value is not None else key,
            self.table,
            self.key_as_json(records.columns, at),
        )

    def key_as_json(self, columns: RecordColumns, at: int) -> str:
        """Return the key as JSON, which keys of rows and of JSON events already are."""
        key = columns.key(at) or b""
        keys = self._generations[version_at(columns, at)].keys
        if isinstance(keys, AvroReader):
            try:
                said = keys.values(key)
            except ValueError:
                return key.hex()
            return json.dumps(
                {n: _float_as_json(v) for n, v in said.items()}, ensure_ascii=False, separators=(",", ":")
            )
        return key.decode("utf-8", "replace")


def _classify_records(columns: RecordColumns) -> tuple[Places, Places, Places]:
    """Return the places of records with a value, of certain deletions, and of the others."""
    valued = columns.value_bytes >= 0
    deleted = ~valued & (columns.key_bytes >= 0)
    with_headers = np.flatnonzero(deleted & (columns.header_counts > 0))
    if len(with_headers):
        # The headers of a record end before the key of the next one; the end of the last one is unknown.
        ends = np.append(columns.key_at, -1)[with_headers + 1]
        known = ends >= 0
        deleted[with_headers[~known]] = False
        with_headers, ends = with_headers[known], ends[known]
    if len(with_headers):
        begins, all_of_them = columns.headers_at[with_headers], np.ones(len(ends), dtype=bool)
        headers = bytes_of_ranges(pa.py_buffer(columns.body), begins, ends, all_of_them)
        deleted[with_headers] = ~to_bool_mask(pc.match_substring(headers, TRUNCATE))
    return np.flatnonzero(valued), np.flatnonzero(deleted), np.flatnonzero(~valued & ~deleted)


def _is_truncate(columns: RecordColumns, at: int) -> bool:
    headers = columns.headers_of(at) if columns.header_counts[at] else ()
    return dict(headers).get(OP_HEADER) == TRUNCATE


def _float_as_json(value: object) -> object:
    """Return floats that JSON cannot represent as PostgreSQL's text."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _recopy_fix(table: str) -> str:
    remedy = drop_table_command("TABLE")
    return f"Run `tidemill capture resnapshot {table}`; for a table made from another source, `{remedy}`."
