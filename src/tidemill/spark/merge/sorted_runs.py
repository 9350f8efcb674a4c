"""Immutable hash-sorted runs of a mirror: lookup in one, merge of several, and their files.

A run holds distinct keys, sorted by hash: the last known contents of each key, or its absence (`live` False). Its rows
may be in several chunks; no chunk ends between two rows of one hash.

    file   memory-mapped as a whole, so that pages that are not read need no memory:
           the shard's columns, an Arrow IPC file without compression, padded to 8 bytes
           hash of each row, uint64
           whether it is live, one byte per row
           bytes of the first section, rows, CRC32C of all before these three, FORM: 8 bytes each

           Little-endian. It is a cache of one machine: a file of another form, or a damaged one, is built again.

    The checksum is verified when a process opens a file that an earlier process wrote, and before a merge reads the
    whole file. In between the mapped pages are trusted like memory: a lookup touches only a few of them.
"""

from __future__ import annotations

import mmap
import shutil
import struct
import tempfile
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from tidemill.base.errors import CorruptError
from tidemill.shards.api import ShardSchema
from tidemill.shards.parts.arrow_rows import Index, Mask, combine_columns, rows_at, rows_equal
from tidemill.shards.parts.checksums import checksum
from tidemill.shards.parts.row_hash import U64
from tidemill.shards.parts.schema import contents_schema
from tidemill.shards.parts.schema_evolution import convert_to_schema
from tidemill.spark.merge.key_grouping import exact_keys, group_by_key

FILE_FORMAT = b"tm-run-3"
_END = struct.Struct("<QQQ8s")

FIX = "Check the disk. The run is a cache and is rebuilt from the table."

PIECE_ROWS = 64 << 10
"""Rows of a piece of a merge: the working set of a piece fits in the CPU cache, and memory holds one piece."""


COMPARED_ROWS = 1 << 20
"""Hashes compared at a time, so that no more of a mapped run is in memory."""


class SortedRun:
    """Sorted run. `collides`: two of its keys share a hash, so a lookup may have to check neighbours."""

    __slots__ = ("_chunks", "_starts", "collides", "hashes", "live", "path", "rows")

    def __init__(self, rows: pa.Table, hashes: U64, live: Mask, path: Path | None = None) -> None:
        self.rows, self.hashes, self.live, self.path = rows, hashes, live, path
        self._chunks = rows.to_batches()
        self._starts = np.cumsum([0, *(chunk.num_rows for chunk in self._chunks)])
        self.collides = any(
            bool(
                (
                    hashes[at + 1 : at + 1 + COMPARED_ROWS] == hashes[at : at + COMPARED_ROWS][: len(hashes) - at - 1]
                ).any()
            )
            for at in range(0, len(hashes), COMPARED_ROWS)
        )

    def __len__(self) -> int:
        return len(self.hashes)

    @property
    def size_bytes(self) -> int:
        return int(self.rows.nbytes) + self.hashes.nbytes

    def rows_at(self, at: Index, columns: Sequence[str] | None = None) -> pa.Table:
        """Return the rows at these places, which ascend except within one hash."""
        rows = self.rows if columns is None else self.rows.select(list(columns))
        ends = np.searchsorted(at, self._starts)
        found = []
        for number, chunk in enumerate(self._chunks):
            first, last = ends[number], ends[number + 1]
            if first < last:
                mine = pa.Table.from_batches([chunk.select(rows.column_names)])
                found.append(rows_at(mine, at[first:last] - self._starts[number]))
        return pa.concat_tables(found) if found else rows.slice(0, 0)

    def between(self, lower: int, upper: int) -> SortedRun:
        """Return the rows at places [lower, upper), as views."""
        return SortedRun(self.rows.slice(lower, upper - lower), self.hashes[lower:upper], self.live[lower:upper])

    def within_hashes(self, lower: int, upper: int) -> SortedRun:
        """Return the rows with hashes in [lower, upper), as views; `upper` is at most 2 ** 64."""
        first = int(np.searchsorted(self.hashes, np.uint64(lower)))
        last = int(np.searchsorted(self.hashes, np.uint64(upper))) if upper < 1 << 64 else len(self)
        return self.between(first, last)

    def find(self, keys: pa.Table, hashes: U64, key: Sequence[str]) -> Index:
        """Return the row of each key in this run, or -1. An equal hash only nominates; the real keys decide."""
        n = len(self.hashes)
        found = np.full(len(hashes), -1, dtype=np.int64)
        if n == 0 or len(hashes) == 0:
            return found
        at = np.searchsorted(self.hashes, hashes)
        hit = np.nonzero((at < n) & (self.hashes[np.minimum(at, n - 1)] == hashes))[0]
        if not len(hit):
            return found
        equal = rows_equal(keys, hit, self.rows_at(at[hit], key), np.arange(len(hit), dtype=np.int64), key)
        found[hit[equal]] = at[hit[equal]]
        if self.collides and not equal.all():
            self._find_colliding(keys, hashes, key, hit[~equal], found)
        return found

    def _find_colliding(self, keys: pa.Table, hashes: U64, key: Sequence[str], asked: Index, found: Index) -> None:
        """Slow path: compare with every row of equal hash."""
        for row, wanted in zip(asked.tolist(), exact_keys(keys, asked, key), strict=True):
            first = int(np.searchsorted(self.hashes, hashes[row], side="left"))
            last = int(np.searchsorted(self.hashes, hashes[row], side="right"))
            candidates = np.arange(first, last, dtype=np.int64)
            for at, candidate in zip(candidates.tolist(), exact_keys(self.rows, candidates, key), strict=True):
                if candidate == wanted:
                    found[row] = at
                    break


def merge_runs(
    schema: ShardSchema, runs: Sequence[SortedRun], *, drop_absent: bool, path: Path | None = None
) -> SortedRun:
    """Merge runs, newest first, into one with the newest state of every key. `drop_absent` if no older run remains.

    Works piece by piece, each a range of hashes; with a path into that file, so that memory holds one piece. Raises
    CorruptError if the file of a run is damaged.
    """
    for run in runs:
        if run.path is not None and run.path.exists():  # a file that was deleted in the meantime is still mapped
            verify_run(run.path)
    pieces = (_merge_piece(schema, piece, drop_absent) for piece in cut_pieces(runs))
    if path is not None:
        write_pieces(schema, pieces, path)
        return open_run(schema, path, verify=False)
    found = list(pieces)
    rows = pa.concat_tables([piece.rows for piece in found])
    return SortedRun(rows, np.concatenate([p.hashes for p in found]), np.concatenate([p.live for p in found]))


def cut_pieces(runs: Sequence[SortedRun]) -> Iterator[list[SortedRun]]:
    """Cut the runs at common hashes. Hashes are uniform, so each piece has about PIECE_ROWS rows of all runs
    together."""
    count = max(1, -(-sum(len(run) for run in runs) // PIECE_ROWS))
    bounds = np.array([(number << 64) // count for number in range(1, count)], dtype=np.uint64)
    cuts = [[0, *np.searchsorted(run.hashes, bounds).tolist(), len(run)] for run in runs]
    for number in range(count):
        yield [run.between(cut[number], cut[number + 1]) for run, cut in zip(runs, cuts, strict=True)]


def count_live_keys(schema: ShardSchema, runs: Sequence[SortedRun]) -> int:
    """Return the number of keys whose newest state is live; `runs` newest first, a piece of `cut_pieces`."""
    keys = combine_columns(pa.concat_tables([run.rows.select(list(schema.key)) for run in runs]))
    order, starts = group_by_key(keys, np.concatenate([run.hashes for run in runs]), schema.key)
    return int(np.count_nonzero(np.concatenate([run.live for run in runs])[order[starts]]))


def _merge_piece(schema: ShardSchema, runs: Sequence[SortedRun], drop_absent: bool) -> SortedRun:
    rows = combine_columns(pa.concat_tables([run.rows for run in runs]))
    hashes = np.concatenate([run.hashes for run in runs])
    live = np.concatenate([run.live for run in runs])
    order, starts = group_by_key(rows, hashes, schema.key)
    keep = order[starts]
    if drop_absent:
        keep = keep[live[keep]]
    return SortedRun(rows_at(rows, keep), hashes[keep], live[keep])


def write_run(schema: ShardSchema, run: SortedRun, path: Path) -> SortedRun:
    """Store a run and return it memory-mapped. The file is not synced: a mirror is a cache."""
    write_pieces(schema, [run], path)
    return open_run(schema, path, verify=False)


def write_pieces(schema: ShardSchema, pieces: Iterable[SortedRun], path: Path) -> None:
    """Write runs of ascending hash ranges as the file of one run. Memory holds one piece."""
    target, count = contents_schema(schema), 0
    with (
        tempfile.TemporaryFile(dir=path.parent) as hashes,
        tempfile.TemporaryFile(dir=path.parent) as live,
        path.open("w+b") as file,
    ):
        with pa.ipc.new_file(file, target) as writer:
            for piece in pieces:
                if len(piece):
                    writer.write_table(piece.rows.cast(target))
                    hashes.write(np.ascontiguousarray(piece.hashes, dtype=np.uint64).data)
                    live.write(np.ascontiguousarray(piece.live, dtype=bool).data)
                    count += len(piece)
        size_bytes = file.tell()
        file.write(bytes(-size_bytes % 8))
        for section in (hashes, live):
            section.seek(0)
            shutil.copyfileobj(section, file, 1 << 20)
        file.flush()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
            crc = checksum(whole)
        file.write(_END.pack(size_bytes, count, crc, FILE_FORMAT))


def convert_run(old: ShardSchema, schema: ShardSchema, path: Path, into: Path) -> SortedRun:
    """Rewrite a run that is stored under an older version of the schema, piece by piece, as a new file.

    Hashes and order stay: a key has one hash under every version. Raises CorruptError.
    """
    run = open_run(old, path)
    pieces = (run.between(at, min(at + PIECE_ROWS, len(run))) for at in range(0, len(run), PIECE_ROWS))
    target = contents_schema(schema)
    write_pieces(schema, (SortedRun(convert_to_schema(schema, p.rows, target), p.hashes, p.live) for p in pieces), into)
    return open_run(schema, into)


_verified: OrderedDict[tuple[str, int, int], None] = OrderedDict()
"""Path, inode and mtime of files that this process has verified: a task opens the same mirror at every step."""
VERIFIED_MAX = 1024


def verify_run(path: Path) -> None:
    """Read the whole file. Raises CorruptError if it differs from what was written."""
    try:
        data = pa.memory_map(str(path), "rb").read_buffer()
        crc = _END.unpack(data[-_END.size :])[2]
    except (OSError, struct.error, pa.ArrowException) as error:
        raise CorruptError(f"mirror run is unreadable: path={path} ({error}).", fix=FIX) from error
    if (computed := checksum(data[: -_END.size])) != crc:
        for identity in [known for known in list(_verified) if known[0] == str(path)]:
            del _verified[identity]
        raise CorruptError(
            f"mirror run is damaged: path={path} stored_crc32c={crc:08x} computed_crc32c={computed:08x}.", fix=FIX
        )


def _verify_once(path: Path) -> None:
    try:
        found = path.stat()
    except OSError as error:
        raise CorruptError(f"mirror run is unreadable: path={path} ({error}).", fix=FIX) from error
    identity = str(path), found.st_ino, found.st_mtime_ns
    if identity not in _verified:
        verify_run(path)
        _verified[identity] = None
        if len(_verified) > VERIFIED_MAX:
            _verified.popitem(last=False)


def open_run(schema: ShardSchema, path: Path, *, verify: bool = True) -> SortedRun:
    """Map a stored run; `verify` if another process wrote it. Raises CorruptError if it is damaged or has another
    schema."""
    if verify:
        _verify_once(path)
    try:
        data = pa.memory_map(str(path), "rb").read_buffer()
        size_bytes, count, _, form = _END.unpack(data[-_END.size :])
        hashes_at = size_bytes + -size_bytes % 8
        live_at = hashes_at + 8 * count
        if form != FILE_FORMAT or data.size != live_at + count + _END.size:
            raise CorruptError(f"mirror run has another form: path={path}.", fix=FIX)
        table = pa.ipc.open_file(data.slice(0, size_bytes)).read_all()
        rows = table.select(contents_schema(schema).names).cast(contents_schema(schema))
        hashes = np.frombuffer(data, dtype=np.uint64, count=count, offset=hashes_at)
        live = np.frombuffer(data, dtype=bool, count=count, offset=live_at)
        if rows.num_rows != count:
            raise CorruptError(f"mirror run is truncated: path={path}.", fix=FIX)
        return SortedRun(rows, hashes, live, path)
    except (OSError, struct.error, pa.ArrowException, KeyError) as error:
        raise CorruptError(f"mirror run is unreadable: path={path} ({error}).", fix=FIX) from error
