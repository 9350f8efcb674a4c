"""A part as a file, for engines that do not verify checksums: whole column chunks are verified before they are read.

The footer is verified when the file is opened, the pages of a chunk whenever a part of it is fetched from the store.
The last fetched range is cached, since engines read a chunk in pieces.
"""

from __future__ import annotations

import io
from bisect import bisect_left, bisect_right
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tidemill.objects.reads import ObjectFile, read_verified_sync
from tidemill.shards.api import Part
from tidemill.shards.parts.checksums import read_footer
from tidemill.shards.parts.parquet_pages import check_pages, chunk_range


class VerifiedFile(io.RawIOBase):
    """Reader of `part` through `file`, for one reader at a time. Raises CorruptError, and the errors of `file`."""

    def __init__(self, part: Part, file: ObjectFile) -> None:
        self._part = part
        self._file = file
        self._footer = memoryview(read_verified_sync(file, part.object_key, lambda: read_footer(part, file)))
        self._footer_at = part.size_bytes - len(self._footer)
        self._chunks = _chunks_of(pq.read_metadata(pa.BufferReader(self._footer)))
        self._held_at, self._held = self._footer_at, self._footer
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._part.size_bytes}[whence]
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        end = self._part.size_bytes if size is None or size < 0 else min(self._at + size, self._part.size_bytes)
        if end <= self._at:
            return b""
        start, self._at = self._at, end
        head = b"" if start >= self._footer_at else self._pages(start, min(end, self._footer_at))
        return head + bytes(self._footer[max(start - self._footer_at, 0) : max(end - self._footer_at, 0)])

    def readall(self) -> bytes:
        return self.read()

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        found = self.read(len(view))
        view[: len(found)] = found
        return len(found)

    def _pages(self, start: int, end: int) -> bytes:
        if not self._held_at <= start <= end <= self._held_at + len(self._held):
            self._fetch(start, end)
        return bytes(self._held[start - self._held_at : end - self._held_at])

    def _fetch(self, start: int, end: int) -> None:
        """Fetch and cache verified bytes of at least [start, end): all chunks that it touches, whole."""
        first = max(0, bisect_right(self._chunks, start, key=lambda chunk: chunk[0]) - 1)
        last = bisect_left(self._chunks, end, key=lambda chunk: chunk[0])
        touched = [(a, b) for a, b in self._chunks[first:last] if a < end and start < b]
        lower, upper = min([start, *(a for a, _ in touched)]), max([end, *(b for _, b in touched)])

        def read() -> memoryview:
            self._file.seek(lower)
            held = memoryview(self._file.read(upper - lower))
            for a, b in touched:
                check_pages(held[a - lower : b - lower], f"object={self._part.object_key} chunk_byte={a}")
            return held

        self._held_at, self._held = lower, read_verified_sync(self._file, self._part.object_key, read)


def _chunks_of(metadata: pq.FileMetaData) -> list[tuple[int, int]]:
    """Return [start, end) of every column chunk, in file order."""
    groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
    return sorted(chunk_range(group.column(column)) for group in groups for column in range(metadata.num_columns))
