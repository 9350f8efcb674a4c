"""Avro data of one writer's schema → columns of a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from tidemill.base.runtime.tasks import is_fault
from tidemill.shards.api import Column
from tidemill.shards.nested.type_names import is_nested
from tidemill.spark.decode.block_decoder import MIN_BLOCK_VALUES, Block
from tidemill.spark.decode.newline_text import Places
from tidemill.spark.decode.stream import reason_of
from tidemill.spark.formats.avro.columns import FlatCursors, is_flat
from tidemill.spark.formats.avro.schema import AvroType
from tidemill.spark.formats.avro.values import AvroValueReader
from tidemill.spark.formats.conversion import ColumnPlan, raw_type

Dead = list[tuple[int, str]]
"""Places and reasons of dead letters."""


class AvroRecordReader:
    """Reader of records, or of a key that is a single value for a single column."""

    def __init__(self, kind: AvroType, columns: Sequence[Column], schema: str) -> None:
        if kind.kind != "record" and len(columns) == 1:
            alone, kind = kind, AvroType("record")
            kind.fields = [(columns[0].name, alone)]
        wanted = {column.name for column in columns}
        self._kind = kind
        self._nested = {column.name for column in columns if is_nested(column.type)}
        """Columns that are converted from decoded values, not from their JSON."""
        self._sources = {name: part.source_type() for name, part in kind.fields if name in wanted}
        self._plan = ColumnPlan(columns, self._sources, schema)
        self._flat = is_flat(kind) and all(source.kind != "json" for source in self._sources.values())
        self.problem = f"{schema} is no record" if kind.kind != "record" else self._plan.problem

    def read(self, body: bytes, at: Places, sizes: Places, places: Places, dead: Dead) -> list[Block]:
        """Read the data that starts at `at`, ascending; its records are `places`. Records that cannot be rows are
        added to `dead`."""
        if self.problem:
            dead += [(place, self.problem) for place in places.tolist()]
            return []
        blocks, slow = [], np.ones(len(at), dtype=bool)
        if self._flat and len(at) >= MIN_BLOCK_VALUES:
            walk = FlatCursors(body, at, at + sizes)
            found = walk.read_type(self._kind, slow)
            walk.check_end()
            good, slow = walk.good, ~walk.good
            if good.any():
                try:
                    arrays = {name: found.fields[name].array(body, good) for name in self._sources}
                    blocks.append(self._block(arrays, places[good], dead))
                except pa.ArrowInvalid:  # a text is not UTF-8: find out which
                    slow = np.ones(len(at), dtype=bool)
        if slow.any():
            blocks.append(self._read_one_by_one(body, at[slow], sizes[slow], places[slow], dead))
        return blocks

    def _block(self, arrays: dict[str, Any], places: Places, dead: Dead) -> Block:
        columns, kept = self._plan.convert(arrays, places.tolist(), dead)
        return Block(np.array(kept, dtype=np.int64), columns)

    def _read_one_by_one(self, body: bytes, at: Places, sizes: Places, places: Places, dead: Dead) -> Block:
        values: dict[str, list[Any]] = {name: [] for name in self._sources}
        good = []
        ends = (at + sizes).tolist()
        for begin, end, place in zip(at.tolist(), ends, places.tolist(), strict=True):
            try:
                row = self._read_record(AvroValueReader(body, begin, end))
            except BaseException as error:
                if not is_fault(error):
                    raise
                dead.append((place, reason_of(error)))
                continue
            good.append(place)
            for name, found in values.items():
                found.append(row[name])
        arrays = {
            name: found if name in self._nested else pa.array(found, raw_type(self._sources[name]))
            for name, found in values.items()
        }
        return self._block(arrays, np.array(good, dtype=np.int64), dead)

    def _read_record(self, reader: AvroValueReader) -> dict[str, Any]:
        out = {}
        for name, part in self._kind.fields:
            source = self._sources.get(name)
            in_json = source is not None and source.kind == "json" and name not in self._nested
            value = reader.read(part, for_json=in_json, depth=1)
            if source is not None:
                out[name] = msgspec.json.encode(value).decode() if in_json and value is not None else value
        reader.check_end()
        return out
