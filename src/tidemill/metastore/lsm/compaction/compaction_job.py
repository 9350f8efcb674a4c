"""The merge of one compaction, as a generator that requests its I/O: the same code runs on an event loop and in a
process.

    Read(file, start, end, ahead)   the driver sends back these bytes, and may start reading `ahead`
    Put(name, buffers)              the driver stores them durably, then continues
    Pause(rows_done)                about every `slice_rows` rows: the driver may yield to other tasks

Rows are processed in chunks. Each run has the rows of a few decoded blocks in memory; the smallest of their last keys
bounds how far all runs can advance. Up to it their rows are put into one dict, oldest run first, so that the newest row
of each key remains, and sorted: timsort merges ascending runs in linear time. All of these loops run in C; one Python
step handles many rows. If only one run has rows, they are passed on unchanged.

No cache is read or filled. A run holds one window of raw bytes and one chunk of decoded rows, and the next window may
be read ahead. So memory is bounded by twice WINDOWS_BYTES and one output file, regardless of the size of the job.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Generator, Sequence
from itertools import compress

import msgspec

from tidemill.base.errors import InvalidError
from tidemill.base.limits import MIB
from tidemill.metastore.lsm.block import decode_block
from tidemill.metastore.lsm.compaction.picker import Files, Job
from tidemill.metastore.lsm.file_store import FileName
from tidemill.metastore.lsm.manifest import FileMeta
from tidemill.metastore.lsm.options import Options
from tidemill.metastore.lsm.sst import SstWriter, TableMeta, decode_meta

WINDOWS_BYTES = 8 * MIB
"""Raw input held in memory over all runs; the same amount again may be read ahead."""
WINDOW_BYTES_MIN = 128 << 10
WINDOW_BYTES_MAX = 2 * MIB
"""Limits of one ranged read: large enough that the cost of a request is small compared to its bytes."""

CHUNK_BYTES = 512 << 10
"""Limit of a run's decoded rows in memory, exceeded by one block at most; large values give chunks of few rows."""

CHUNK_ROWS_MIN = 64


class ReadStep(msgspec.Struct, frozen=True):
    """Request for bytes of a file. `ahead` is the following read of this run, except that its own `ahead` is unset."""

    file: FileMeta
    start: int
    end: int
    ahead: ReadStep | None = None


class PutStep(msgspec.Struct, frozen=True):
    name: FileName
    buffers: list[bytes]
    size_bytes: int


class PauseStep(msgspec.Struct, frozen=True):
    """Report that `rows_done` of the job's rows have been read and merged."""

    rows_done: int


Step = ReadStep | PutStep | PauseStep
Steps = Generator[Step, bytes, list[FileMeta]]
"""Generator of steps. It is sent the bytes of a Read, and b"" after other steps; returns the new files by key."""

_Reading = Generator[Step, bytes, None]


def names_needed(job: Job, options: Options) -> int:
    """Return how many names to reserve: more than the outputs can need, since merged rows may compress slightly
    worse."""
    return 2 * -(-job.size_bytes // options.file_bytes) + 1


def merge_steps(job: Job, options: Options) -> Steps:
    """Merge `job`: keep the newest row of each key, without the tombstones that no file below needs.

    The outputs take `job.names` in order; without remaining rows there is no output. Raises CorruptError, naming the
    file, if an input is damaged, and InvalidError without names.
    """
    if not job.names:
        raise InvalidError(f"a compaction needs names for its outputs: level={job.level} target={job.target}.")
    window_bytes = min(WINDOW_BYTES_MAX, max(WINDOW_BYTES_MIN, WINDOWS_BYTES // len(job.runs)))
    chunk_rows = max(CHUNK_ROWS_MIN, options.slice_rows // len(job.runs))
    runs = [_CompactionRun(files, job.prefix, window_bytes, chunk_rows) for files in job.runs]
    older = _OlderRanges(job.older)
    names = list(reversed(job.names))
    made: list[FileMeta] = []
    writer = SstWriter(options)
    rows_done = paused_at = 0

    while True:
        for run in runs:
            yield from run.decode_next_chunk()
        runs = [run for run in runs if run.keys]
        if not runs:
            break
        keys, values, seqnos, taken = _merge_chunk(runs)
        rows_done += taken
        if b"" in values:
            keys, values, seqnos = older.drop_dead_tombstones(keys, values, seqnos)
        writer.add(keys, values, seqnos)
        if writer.size_bytes >= options.file_bytes and len(names) > 1:
            yield from _finish_file(writer, names.pop(), made, rows_done)
            writer = SstWriter(options)
            paused_at = rows_done
        if rows_done - paused_at >= options.slice_rows:
            paused_at = rows_done
            yield PauseStep(rows_done)
    if writer.rows:
        yield from _finish_file(writer, names.pop(), made, rows_done)
    return made


def _finish_file(writer: SstWriter, name: FileName, made: list[FileMeta], rows_done: int) -> _Reading:
    # Building filter and index is the longest single step, so other tasks may run before and after it.
    yield PauseStep(rows_done)
    buffers, summary = writer.finish()
    yield PauseStep(rows_done)
    yield PutStep(name, buffers, summary.size_bytes)
    made.append(summary.named(name.epoch, name.number, name.nonce))


def _merge_chunk(runs: Sequence[_CompactionRun]) -> tuple[list[bytes], list[bytes], list[int], int]:
    """Return the rows up to which all runs can advance: ascending keys, values, seqnos, and the number of input rows.

    `runs` are oldest first, each with rows in memory. At least one of them is exhausted, so every call makes progress.
    """
    reach = min(run.keys[-1] for run in runs)
    parts = [part for run in runs if (part := run.take_rows_through(reach))[0]]
    if len(parts) == 1:
        keys, values, seqnos = parts[0]
        return keys, values, seqnos, len(keys)
    newest: dict[bytes, bytes] = {}
    seqno_of: dict[bytes, int] = {}
    for keys, values, seqnos in parts:
        newest.update(zip(keys, values, strict=True))
        seqno_of.update(zip(keys, seqnos, strict=True))
    keys = sorted(newest)
    return (
        keys,
        list(map(newest.__getitem__, keys)),
        list(map(seqno_of.__getitem__, keys)),
        sum(len(part[0]) for part in parts),
    )


class _CompactionRun:
    """One sorted run of the job. `keys`, `values` and `seqnos` are the decoded rows that were not taken yet."""

    __slots__ = (
        "_at",
        "_block",
        "_chunk_rows",
        "_data",
        "_data_start",
        "_files",
        "_meta",
        "_prefix",
        "_window_bytes",
        "_window_end",
        "keys",
        "seqnos",
        "values",
    )

    def __init__(self, files: Files, prefix: str, window_bytes: int, chunk_rows: int) -> None:
        self.keys: list[bytes] = []
        self.values: list[bytes] = []
        self.seqnos: list[int] = []
        self._at = 0
        self._files = list(reversed(files))
        self._prefix = prefix
        self._window_bytes = window_bytes
        self._chunk_rows = chunk_rows
        self._meta: TableMeta | None = None
        self._block = self._window_end = 0  # next block to decode; first block beyond the window
        self._data = b""
        self._data_start = 0

    def take_rows_through(self, reach: bytes) -> tuple[list[bytes], list[bytes], list[int]]:
        """Remove and return the decoded rows whose key is at most `reach`."""
        at, count = self._at, len(self.keys)
        end = bisect_right(self.keys, reach, at)
        self._at = end
        if at == 0 and end == count:
            return self.keys, self.values, self.seqnos
        return self.keys[at:end], self.values[at:end], self.seqnos[at:end]

    def decode_next_chunk(self) -> _Reading:
        """Decode the next chunk if all decoded rows were taken; `keys` stays empty at the end of the run."""
        if self._at < len(self.keys):
            return
        keys: list[bytes] = []
        values: list[bytes] = []
        seqnos: list[int] = []
        size_bytes = 0
        while len(keys) < self._chunk_rows and size_bytes < CHUNK_BYTES:
            if self._meta is None or self._block == len(self._meta.rows):
                if not self._files:
                    break
                yield from self._open_next()
                continue
            if self._block == self._window_end:
                yield from self._read_window()
            assert self._meta is not None
            start, end = self._meta.starts[self._block], self._meta.starts[self._block + 1]
            data = self._data[start - self._data_start : end - self._data_start]
            block = decode_block(data, self._meta.name, start, self._meta.rows[self._block])
            self._block += 1
            keys += block.keys
            values += block.values
            seqnos += block.seqnos()
            size_bytes += block.cost_bytes
        self.keys, self.values, self.seqnos, self._at = keys, values, seqnos, 0

    def _open_next(self) -> _Reading:
        file = self._files[-1]
        data = yield _meta_of(file)
        self._meta = decode_meta(data, file, f"{self._prefix}{file.epoch}-{file.number}-{file.nonce}")
        self._block = self._window_end = 0

    def _read_window(self) -> _Reading:
        meta = self._meta
        assert meta is not None
        file = self._files[-1]
        self._data_start = meta.starts[self._block]
        self._window_end = self._window_from(meta, self._block)
        if self._window_end < len(meta.rows):
            following = self._window_from(meta, self._window_end)
            ahead: ReadStep | None = ReadStep(file, meta.starts[self._window_end], meta.starts[following])
        else:
            self._files.pop()
            ahead = _meta_of(self._files[-1]) if self._files else None
        self._data = yield ReadStep(file, self._data_start, meta.starts[self._window_end], ahead)

    def _window_from(self, meta: TableMeta, block: int) -> int:
        """Return the end of the window that begins with `block`: as many blocks as fit, and at least one."""
        end = bisect_right(meta.starts, meta.starts[block] + self._window_bytes) - 1
        return min(max(end, block + 1), len(meta.rows))


def _meta_of(file: FileMeta) -> ReadStep:
    return ReadStep(file, file.meta_start, file.size_bytes)


class _OlderRanges:
    """Key ranges in which an older file may hold a key. Tombstones within them must be kept."""

    def __init__(self, ranges: Sequence[tuple[bytes, bytes]]) -> None:
        self._smallest = [low for low, _ in ranges]
        self._largest = [high for _, high in ranges]

    def drop_dead_tombstones(
        self, keys: list[bytes], values: list[bytes], seqnos: list[int]
    ) -> tuple[list[bytes], list[bytes], list[int]]:
        """Return the rows without the tombstones that no older file can need."""
        stays: Sequence[object] = values
        if self._smallest and bisect_left(self._largest, keys[0]) <= bisect_right(self._smallest, keys[-1]) - 1:
            stays = [value or self._contains(key) for key, value in zip(keys, values, strict=True)]
        return list(compress(keys, stays)), list(compress(values, stays)), list(compress(seqnos, stays))

    def _contains(self, key: bytes) -> bool:
        at = bisect_left(self._largest, key)
        return at < len(self._smallest) and self._smallest[at] <= key
