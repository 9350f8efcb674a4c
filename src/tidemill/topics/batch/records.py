"""Decoded records: one as an object, or many as columns of positions in the bytes of one or more batches.

The produce and fetch paths never create objects; capture and Spark do. Columns create them on demand.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from tidemill.topics.batch.varint import read_varint

Headers = tuple[tuple[str, bytes | None], ...]


class Record(msgspec.Struct, frozen=True):
    """One record. `offset` is absolute once decoded, and −1 in a record that is still to be written."""

    key: bytes | None
    value: bytes | None
    headers: Headers = ()
    timestamp_ms: int = -1
    offset: int = -1


Int64s = npt.NDArray[np.int64]


class RecordColumns(Struct, frozen=True):
    """Parallel columns over `body`. A field is at `*_at` and `*_bytes` long, −1 for null."""

    body: bytes
    offsets: Int64s
    timestamps_ms: Int64s
    key_at: Int64s
    key_bytes: Int64s
    value_at: Int64s
    value_bytes: Int64s
    headers_at: Int64s
    header_counts: Int64s

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def keys(self) -> list[bytes | None]:
        return self._fields(self.key_at, self.key_bytes)

    @property
    def values(self) -> list[bytes | None]:
        return self._fields(self.value_at, self.value_bytes)

    @property
    def headers(self) -> list[Headers]:
        return [self.headers_of(at) if count else () for at, count in enumerate(self.header_counts.tolist())]

    def key(self, index: int) -> bytes | None:
        return self._field(self.key_at, self.key_bytes, index)

    def value(self, index: int) -> bytes | None:
        return self._field(self.value_at, self.value_bytes, index)

    def headers_of(self, index: int) -> Headers:
        at, found = int(self.headers_at[index]), []
        for _ in range(int(self.header_counts[index])):
            size, at = read_varint(self.body, at)
            name, at = self.body[at : at + size], at + size
            size, at = read_varint(self.body, at)
            found.append((name.decode(errors="replace"), self.body[at : at + size] if size >= 0 else None))
            at += max(size, 0)
        return tuple(found)

    def select(self, at: slice | npt.NDArray[np.intp]) -> RecordColumns:
        """Select the records at these places; they share the bytes."""
        return RecordColumns(self.body, *(getattr(self, name)[at] for name in _NAMES))

    def _fields(self, places: Int64s, sizes: Int64s) -> list[bytes | None]:
        body, ends = self.body, places + sizes
        if len(sizes) and sizes.min() >= 0:
            return [body[at:end] for at, end in zip(places.tolist(), ends.tolist(), strict=True)]
        return [body[at:end] if end >= at else None for at, end in zip(places.tolist(), ends.tolist(), strict=True)]

    def _field(self, places: Int64s, sizes: Int64s, index: int) -> bytes | None:
        at, size = int(places[index]), int(sizes[index])
        return self.body[at : at + size] if size >= 0 else None


_NAMES = RecordColumns.__struct_fields__[1:]


def build_columns(body: bytes, columns: Sequence[Sequence[int] | Int64s]) -> RecordColumns:
    """Build columns, in the order of the fields. Raises OverflowError if a number has more than 64 bits."""
    return RecordColumns(body, *(np.asarray(column, dtype=np.int64) for column in columns))


def empty_columns() -> RecordColumns:
    return build_columns(b"", [()] * len(_NAMES))


def columns_from_fields(keys: Sequence[bytes | None], values: Sequence[bytes | None]) -> RecordColumns:
    """Build records that are not from a batch: offsets from 0, times 0, no headers."""
    body, places = bytearray(), []
    for fields in zip(keys, values, strict=True):
        row = []
        for field in fields:
            row += [len(body), -1 if field is None else len(field)]
            body += (field or b"") + b"\0"  # As in a batch, a value is not the last byte.
        places.append(row)
    count = len(places)
    zeros = [0] * count
    fields_at = list(zip(*places, strict=True)) or [()] * 4
    return build_columns(bytes(body), [range(count), zeros, *fields_at, zeros, zeros])
