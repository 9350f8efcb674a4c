"""A part as a Parquet file: its footer, the byte ranges of its columns, and their decoding. Pure."""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from tidemill.base.errors import CorruptError
from tidemill.shards.api import DIFF, HASH, TIME, Part
from tidemill.shards.parts.parquet_pages import chunk_range
from tidemill.shards.parts.stored_types import bounds_of_hashes, chunk_places

ALL_HASHES = (0, (1 << 64) - 1)

Array = npt.NDArray[Any]


class PartSummary(msgspec.Struct, frozen=True):
    """Footer of a part. `starts` are the positions of its row groups, and its number of rows.

    `low` and `high` bound the hashes of each group; `times` and `diffs` bound all rows, None without statistics.
    """

    starts: Array
    low: Array
    high: Array
    times: tuple[int, int] | None
    diffs: tuple[int, int] | None

    @property
    def rows(self) -> int:
        return int(self.starts[-1])

    @property
    def only_inserts(self) -> bool:
        """True if every row is the insertion of a single row."""
        return self.diffs == (1, 1)

    def groups_with(self, hashes: Array) -> list[int]:
        """Return the row groups that may have one of these hashes, which are sorted."""
        first = np.searchsorted(hashes, self.low, side="left")
        after = np.searchsorted(hashes, self.high, side="right")
        found: list[int] = np.flatnonzero(first < after).tolist()
        return found

    @property
    def all_groups(self) -> list[int]:
        return list(range(len(self.low)))


class PartFile(msgspec.Struct, frozen=True):
    """A part's footer. It stays encoded: decoded, it takes up to ten times as many bytes."""

    summary: PartSummary
    footer: bytes

    def metadata(self) -> Any:
        return pq.read_metadata(pa.BufferReader(self.footer))

    @property
    def memory_bytes(self) -> int:
        return len(self.footer) + sum(
            each.nbytes for each in (self.summary.starts, self.summary.low, self.summary.high)
        )


def open_file(part: Part, footer: bytes) -> PartFile:
    """Return the file with this footer. Raises CorruptError."""
    try:
        metadata = pq.read_metadata(pa.BufferReader(footer))
        return PartFile(_summarize(metadata, metadata.schema.to_arrow_schema()), footer)
    except (pa.ArrowException, OSError) as error:
        raise CorruptError(f"part is unreadable: object={part.object_key or 'inline'} ({error}).") from error


def _summarize(metadata: Any, columns: pa.Schema) -> PartSummary:
    groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
    places = {name: chunks.start for name, chunks in chunk_places(columns).items()}

    def overall(name: str) -> tuple[int, int] | None:
        found = [group.column(places[name]).statistics for group in groups]
        if not found or any(each is None or not each.has_min_max for each in found):
            return None
        return min(each.min for each in found), max(each.max for each in found)

    kind = columns.field(HASH).type
    hashes = [bounds_of_hashes(group.column(places[HASH]).statistics, kind) or ALL_HASHES for group in groups]
    starts = np.cumsum([0, *(group.num_rows for group in groups)])
    low, high = (np.array(each, dtype=np.uint64) for each in zip(*hashes, strict=True))
    return PartSummary(starts, low, high, overall(TIME), overall(DIFF))


def places_of(metadata: Any) -> dict[str, range]:
    """Return the chunks of a row group by column."""
    return chunk_places(metadata.schema.to_arrow_schema())


def byte_ranges(metadata: Any, groups: Sequence[int], names: Sequence[str]) -> list[tuple[int, int]]:
    """Return the byte ranges of columns of these row groups."""
    places, found = places_of(metadata), map(metadata.row_group, groups)
    return [chunk_range(group.column(place)) for group in found for name in names for place in places[name]]


def decode_groups(
    part: Part, opened: Callable[[], pq.ParquetFile], groups: Sequence[int], names: Sequence[str]
) -> list[pa.Table]:
    """Return columns of these row groups of the file that `opened` opens. Raises CorruptError."""
    try:
        file = opened()
        read = [file.read_row_group(group, columns=list(names), use_threads=False) for group in groups]
    except (pa.ArrowException, OSError) as error:
        raise CorruptError(f"part is unreadable: object={part.object_key or 'inline'} ({error}).") from error
    return [table.select(list(names)).combine_chunks() for table in read]


class Pieces(io.RawIOBase):
    """File of which only these pieces are present, by their start."""

    def __init__(self, pieces: dict[int, bytes]) -> None:
        self._starts = sorted(pieces)
        self._pieces = pieces
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_END:
            offset += self._starts[-1] + len(self._pieces[self._starts[-1]])
        self._at = offset + (self._at if whence == io.SEEK_CUR else 0)
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        place = bisect_right(self._starts, self._at) - 1
        start = self._starts[max(place, 0)]
        offset = self._at - start
        end = None if size is None or size < 0 else offset + size
        found = self._pieces[start][offset:end] if offset >= 0 else b""
        self._at += len(found)
        return found
