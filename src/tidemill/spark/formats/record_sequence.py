"""Sequences of records: `sequence_by` of a topic. Every command of such a topic has one.

null value      a deletion without columns: only metadata of Kafka can be its sequence
delete_when     the sequence of the record
Debezium        d: that of the row before; an update of the key deletes the old key at the sequence of the row after

Without a sequence a record has no place in the order of its key, so it changes nothing: it is a dead letter. Two kinds
of records need none. A null value after Debezium's `d` deletes what is deleted. And the key of an event that cannot be
read keeps its row, as its dead letter says.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tidemill.spark.decode.block_decoder import Block, to_bool_mask
from tidemill.spark.decode.partial_rows import OmittedColumns
from tidemill.spark.decode.records import Records
from tidemill.spark.formats.avro.reader import Dead
from tidemill.spark.formats.record_format import RecordFormat
from tidemill.spark.formats.record_metadata import keep_rows

PARTIAL = "values that the connector did not send cannot be filled in the order of sequence_by"


class RecordSequence:
    """Check of the sequences of one table's records."""

    def __init__(self, record_format: RecordFormat) -> None:
        self._columns = record_format.sequence_by
        self._debezium = record_format.envelope == "debezium"
        named = ", ".join(record_format.record_sequence)
        self._no_sequence = (
            f"a deletion without a sequence: a record without a value has no {named}; mark deletions with delete_when,"
            " or let sequence_by name metadata of Kafka"
        )
        if self._debezium:
            self._no_sequence = (
                f"a deletion without a sequence: the event has no {named} in before; let the table log whole rows"
                " (REPLICA IDENTITY FULL), or let sequence_by name metadata of Kafka"
            )

    def check(
        self, live: Block, absent: Block, partial: Sequence[OmittedColumns], records: Records, dead: Dead
    ) -> tuple[Block, Block]:
        """Return the rows and deletions that have a sequence; the others are added to `dead`."""
        unsent = np.concatenate([np.zeros(0, np.int64), *(one.places for one in partial)])
        whole = ~np.isin(live.places, unsent)
        dead += [(place, PARTIAL) for place in live.places[~whole].tolist()]
        live = keep_rows(live, whole)
        for name in self._columns:
            valid = to_bool_mask(live.arrays[name].is_valid())
            if not valid.all():
                dead += [(place, _null(name)) for place in live.places[~valid].tolist()]
                live = keep_rows(live, valid)
        missing: dict[int, str] = {}
        for name in self._columns:
            array = absent.arrays.get(name)
            null = absent.places if array is None else absent.places[to_bool_mask(array.is_null())]
            missing = dict.fromkeys(null.tolist(), name) | missing
        if not missing:
            return live, absent
        known = {place for place, _ in dead}
        for place, name in missing.items():
            empty = records.columns.value_bytes[place] < 0
            if place not in known and not (self._debezium and empty):
                dead.append((place, self._no_sequence if empty or self._debezium else _null(name)))
        return live, keep_rows(absent, ~np.isin(absent.places, np.array([*missing], dtype=np.int64)))


def _null(column: str) -> str:
    return f"the sequence is null: column={column}"
