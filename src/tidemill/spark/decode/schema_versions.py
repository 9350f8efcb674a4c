"""Versions of a captured table's description: read records of each version, as columns of the newest one.

    version 1   no header `tm.version`, as before versions existed      version n   the header has the number

Within a partition versions only increase, as those of the stream do. A record is read with the columns and types of its
own version. A column that the version lacks has the column's default, as PostgreSQL reads it; a narrower value is
widened after reading (0.1 of a real is 0.10000000149011612 as a double precision, not 0.1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidemill.base.pgtypes.avro import record_prefix
from tidemill.base.pgtypes.debezium import NUMBERS
from tidemill.shards.api import Column, ShardSchema
from tidemill.shards.nested.type_names import is_nested
from tidemill.shards.parts.schema import arrow_type
from tidemill.shards.parts.schema_evolution import default_value
from tidemill.spark.decode.avro import AvroReader, AvroVersion
from tidemill.spark.decode.block_decoder import Block, JsonDialect, ObjectReader
from tidemill.spark.decode.newline_text import Places
from tidemill.spark.decode.row_decoder import RowDecoder, row_decoder
from tidemill.topics.batch import RecordColumns

VERSION_HEADER = "tm.version"
VERSION_1_HEADERS = 3
"""Headers of a record under version 1; a record of a later version has one more."""
CACHED_READERS_MAX = 64
"""Limit of cached readers of one version, one for each set of columns that records omit."""


class ValueFormat(NamedTuple):
    """Format of the values of a table's records, the same in every version of its description.

    schema        the table's
    kinds         the JSON types that the columns of a type may have
    value, key    dialects of the values of a whole row, and of a key
    forms         of the columns; empty if records are rows (events.py)
    """

    schema: ShardSchema
    kinds: Mapping[str, Any]
    value: JsonDialect
    key: JsonDialect
    forms: Mapping[str, str]


class VersionReaders:
    """Readers of one version. `columns`: as the version has them; `defaults`: the newest ones by name."""

    def __init__(
        self,
        value_format: ValueFormat,
        columns: Sequence[Column],
        defaults: Mapping[str, Column],
        avro: AvroVersion | None = None,
    ) -> None:
        schema, kinds, exact, some, forms = value_format
        here = {c.name: c for c in columns}
        self._without: dict[frozenset[str], VersionReaders] = {}
        self._less = partial(VersionReaders, value_format, defaults=defaults)
        self.columns = [here[c.name] for c in schema.columns if c.name in here]
        self.key_columns = [c for c in self.columns if c.name in schema.key]
        self.names = set(here)
        self.avro = avro
        self.value: RowDecoder
        self.key: RowDecoder
        self.values: AvroReader | ObjectReader
        self.keys: AvroReader | ObjectReader
        if avro is not None:
            self.value = self.values = AvroReader(avro.row, self.columns, exact, forms)
            self.key = self.keys = AvroReader(avro.key, self.key_columns, some, forms, record_prefix(avro.key_id))
        else:
            self.value = row_decoder(_json_columns(self.columns, forms), kinds, str | None, exact=True)
            self.key = row_decoder(_json_columns(self.key_columns, forms), kinds, str | None)
            self.values = ObjectReader(self.columns, exact)
            self.keys = ObjectReader(self.key_columns, some)
        self._wider = {c.name: c.type for c in schema.columns if c.name in here and here[c.name].type != c.type}
        self._lacking = [_default_column(c, defaults) for c in schema.columns if c.name not in here]

    def omitting(self, names: Sequence[str]) -> VersionReaders:
        """Return readers for records that omit these columns, whose values are then placeholders. Raises ValueError for
        a column that values of this version may not omit."""
        left = frozenset(names)
        if not left <= self.names - {c.name for c in self.key_columns}:
            raise ValueError(f"these columns may not be omitted: {', '.join(sorted(left))}")
        found = self._without.get(left)
        if found is None:
            if len(self._without) >= CACHED_READERS_MAX:
                self._without.clear()
            found = self._without[left] = self._less([c for c in self.columns if c.name not in left])
        return found

    def convert_to_newest(self, block: Block, *, whole: bool = True) -> Block:
        """Return the block's arrays with the table's types; `whole`: add the columns that this version lacks."""
        if not self._wider and not (whole and self._lacking):
            return block
        arrays = {
            name: pc.cast(array, arrow_type(self._wider[name])) if name in self._wider else array
            for name, array in block.arrays.items()
        }
        for column in self._lacking if whole else ():
            arrays[column.name] = pa.repeat(default_value(column), len(block.places))
        return Block(block.places, arrays)


class SchemaVersions:
    """Versions of one table. `known`: the columns of each version, oldest first; empty = one version, the schema's."""

    def __init__(
        self, value_format: ValueFormat, known: Sequence[Sequence[Column]], avro: Sequence[AvroVersion] = ()
    ) -> None:
        """Create the readers. `avro`: schemas of each version, if records are Avro."""
        described = known or (value_format.schema.columns,)
        defaults = {c.name: c for c in described[-1]}
        versions: Sequence[AvroVersion | None] = avro or [None] * len(described)
        self._of = [
            VersionReaders(value_format, columns, defaults, version)
            for columns, version in zip(described, versions, strict=True)
        ]

    def __getitem__(self, version: int) -> VersionReaders:
        return self._of[version - 1]

    @property
    def newest(self) -> int:
        return len(self._of)

    def runs(self, columns: RecordColumns, count: int) -> list[tuple[int, int, int]]:
        """Return (first, end, version) of the records in order; one run if all are under version 1, which is cheap to
        check."""
        if not count or not may_have_versions(columns):
            return [(0, count, 1)] if count else []
        out: list[tuple[int, int, int]] = []
        first = 0
        while first < count:
            version = version_at(columns, first)
            low, high = first + 1, count
            while low < high:
                middle = (low + high) // 2
                if version_at(columns, middle) > version:
                    high = middle
                else:
                    low = middle + 1
            out.append((first, low, version))
            first = low
        return out


def may_have_versions(columns: RecordColumns) -> bool:
    """Return False if all records are certainly under version 1."""
    return bool((columns.header_counts > VERSION_1_HEADERS).any())


def version_at(columns: RecordColumns, at: int) -> int:
    """Return the version of the description that a record was written under."""
    if columns.header_counts[at] <= VERSION_1_HEADERS:
        return 1
    return int(dict(columns.headers_of(at)).get(VERSION_HEADER) or b"1")


def places_between(places: Places, first: int, end: int) -> Places:
    return places[np.searchsorted(places, first) : np.searchsorted(places, end)]


def _json_columns(columns: Sequence[Column], forms: Mapping[str, str]) -> list[Column]:
    """Return the columns with the types of their values in JSON, in which an array is text."""
    texts = [Column(c.name, "string") if is_nested(c.type) else c for c in columns]
    return [Column(c.name, "int64") if forms.get(c.name) in NUMBERS else c for c in texts]


def _default_column(column: Column, defaults: Mapping[str, Column]) -> Column:
    return Column(column.name, column.type, defaults[column.name].default if column.name in defaults else None)
