"""Decoder of topics in a declared format → commands and dead letters.

    rows of the format ─► metadata of Kafka ─► delete_when ─► sequence_by ─► commands

A record that cannot be read, or whose key or sequence is null, is a dead letter with its reason; the others are not
affected.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pyarrow as pa

from tidemill.shards.api import ShardSchema
from tidemill.spark.decode.block_decoder import Block, to_bool_mask
from tidemill.spark.decode.captured import Stop, stop_at
from tidemill.spark.decode.dead_letter_rows import dead_letter_table
from tidemill.spark.decode.partial_rows import OmittedColumns, add_unchanged_columns
from tidemill.spark.decode.records import Records
from tidemill.spark.decode.row_decoder import build_command_table
from tidemill.spark.decode.stream import NULL_KEY, letters_of
from tidemill.spark.formats.avro.reader import Dead
from tidemill.spark.formats.format_rows import FormatRows, format_rows, join_two
from tidemill.spark.formats.record_format import RecordFormat
from tidemill.spark.formats.record_metadata import RecordMetadata, keep_rows
from tidemill.spark.formats.record_sequence import RecordSequence
from tidemill.spark.formats.schemas.writer_schema import SchemaLookup
from tidemill.spark.merge.commands import Commands, Truncate
from tidemill.spark.merge.toast_fill import unchanged_columns
from tidemill.spark.predicates.predicate import compile_predicate


class TopicDecoder:
    """Decoder of one table's topic."""

    def __init__(self, schema: ShardSchema, record_format: RecordFormat, partitions: int = 1) -> None:
        """Create the decoder. `partitions`: of the topic."""
        self.schema = schema
        self._rows: FormatRows = format_rows(record_format, record_format.value_schema(schema))
        self._metadata = RecordMetadata(schema, record_format)
        columns = (*schema.columns, *record_format.hidden)
        self._deletes = compile_predicate(record_format.delete_when, columns) if record_format.delete_when else None
        self._partitions = partitions
        self._sequence = RecordSequence(record_format) if record_format.sequence_by else None
        self._deletion_columns = (*schema.key, *record_format.sequence_by)

    def decode(self, records: Records, schemas: SchemaLookup) -> tuple[Commands, pa.Table, Stop | None]:
        """Return (commands, dead letters as updates of DEAD_LETTERS, where the table must stop). Raises
        MissingSchemasError, and as `schemas`."""
        live, absent, dead, truncated, partial = self._rows.decode(records.columns, schemas)
        live, absent = (self._metadata.add_to(block, records, dead) for block in (live, absent))
        live, absent = (self._drop_null_keys(block, dead) for block in (live, absent))
        live, absent = self._delete_rows(live, absent)
        if self._sequence is not None:
            live, absent = self._sequence.check(live, absent, partial, records, dead)
            partial = ()
        table = build_command_table(self.schema, live.arrays, live.places, absent.arrays, absent.places, records)
        if partial:
            table = add_unchanged_columns(table, live.places, self._of_table(partial), records.columns)
        letters = dead_letter_table([*records.unread, *letters_of(records, dead)])
        if self._partitions > 1 and truncated:
            return Commands(table), letters, min(self._stop(records, at) for at in truncated)
        return Commands(table, tuple(self._truncate(records, at) for at in truncated)), letters, None

    def _of_table(self, partial: Sequence[OmittedColumns]) -> list[OmittedColumns]:
        """Return the partial rows with the table's columns only."""
        have = {column.name for column in self.schema.columns}
        out = []
        for one in partial:
            names = [name for name in unchanged_columns(one.names) if name in have]
            if names:
                out.append(OmittedColumns(msgspec.json.encode(names), one.moved, one.places))
        return out

    @staticmethod
    def _truncate(records: Records, at: int) -> Truncate:
        return Truncate(int(records.times[at]), records.partition_of(at), int(records.offsets[at]))

    @staticmethod
    def _stop(records: Records, at: int) -> Stop:
        """Return the stop before a truncation that has no place in the order of the other partitions."""
        return stop_at(
            records,
            at,
            "the source table was truncated, and records of other partitions may be older or newer:",
            "Let the connector write the table again to a new topic with one partition, or skip truncations:"
            " skipped.operations=t, its default.",
        )

    def _drop_null_keys(self, block: Block, dead: Dead) -> Block:
        null = np.zeros(len(block.places), dtype=bool)
        for name in self.schema.key:
            if block.arrays[name].null_count:
                null |= to_bool_mask(block.arrays[name].is_null())
        if not null.any():
            return block
        dead += [(place, NULL_KEY) for place in block.places[null].tolist()]
        return keep_rows(block, ~null)

    def _delete_rows(self, live: Block, absent: Block) -> tuple[Block, Block]:
        """Make deletions of the rows for which the condition holds."""
        if self._deletes is None or not len(live.places):
            return live, absent
        gone = self._deletes.true_mask(live.arrays, len(live.places))
        if not gone.any():
            return live, absent
        absent = self._with_columns(absent, live)
        keys = Block(live.places, {name: live.arrays[name] for name in self._deletion_columns})
        return keep_rows(live, ~gone), join_two(keep_rows(keys, gone), absent)

    def _with_columns(self, absent: Block, live: Block) -> Block:
        """Return deletions with the columns of a sequence that they lack, as nulls."""
        missing = [name for name in self._deletion_columns if name not in absent.arrays]
        nulls = {name: pa.nulls(len(absent.places), live.arrays[name].type) for name in missing}
        return Block(absent.places, absent.arrays | nulls)
