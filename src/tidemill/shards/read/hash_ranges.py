"""Contents of a shard by hash range, and their number of rows: many concurrent readers, each with bounded memory. Pure,
except for `fetch`.

All updates of a row have the row's hash, so hash ranges are independent of each other, in any batch or part. Within a
range, the largest non-overlapping parts are streamed, one row group at a time, and the updates of all other parts
(usually the recent difference) are held in memory. A streamed insertion whose hash no other update has is settled: it
is returned unchanged. Only the other updates are summed. The number of rows is the sum of all diffs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidemill.base.errors import CorruptError
from tidemill.base.limits import MIB
from tidemill.shards.api import DIFF, HASH, TIME, Batch, Part, ShardSchema
from tidemill.shards.parts.arrow_rows import rows_at
from tidemill.shards.parts.checksums import open_part
from tidemill.shards.parts.consolidate import newest_contents, sum_contents
from tidemill.shards.parts.parts import rows_within
from tidemill.shards.parts.schema import contents_schema, part_schema
from tidemill.shards.parts.schema_evolution import check_schema_known, convert_to_schema
from tidemill.shards.parts.stored_types import hash_bounds

RANGE_BYTES = 16 * MIB
RANGE_ROWS = 500_000
"""Approximate encoded bytes and updates of one range of a large shard, whichever limit is reached first.

Reading a range holds one decoded row group of the streamed parts (parts.ROW_GROUP_BYTES, or 128 k rows of an older
part) with one or two copies, and all updates of the range that are not streamed. Only RANGE_ROWS limits the latter.
"""
RANGES_MAX = 1024
HASH_MAX = (1 << 64) - 1

FetchPart = Callable[[Part], Any]
"""Function that returns the encoded bytes of a part, or a binary file of them, which may be read in pieces.

Raises MissingError or UnavailableError.
"""


class HashRange(msgspec.Struct, frozen=True):
    """Hashes low to high, both inclusive, and the batches with only those parts that may contain some of them.

    `wanted` restricts the range to these hashes, sorted; None = all.
    """

    low: int
    high: int
    batches: list[Batch]
    wanted: list[int] | None = None


def cut_ranges(batches: Sequence[Batch], wanted: Sequence[int] | None = None) -> list[HashRange]:
    """Divide all updates into equal ranges, except that bounds move to the start of a large part nearby."""
    parts = [part for batch in batches for part in batch.parts]
    size_bytes, rows = sum(p.size_bytes for p in parts), sum(p.rows for p in parts)
    count = min(max(1, -(-size_bytes // RANGE_BYTES), -(-rows // RANGE_ROWS)), RANGES_MAX)
    begins = np.array(sorted(p.min_hash for _, p in streamed_parts(batches)), dtype=np.uint64)
    cuts = [
        0,
        *(_snap_to_part((i << 64) // count, begins, (1 << 64) // (3 * count)) for i in range(1, count)),
        HASH_MAX + 1,
    ]
    found = []
    for low, after in pairwise(cuts):
        hashes = None if wanted is None else [h for h in sorted(wanted) if low <= h < after]
        one = range_between(batches, low, after - 1, hashes)
        if one.batches:
            found.append(one)
    return found


def range_between(batches: Sequence[Batch], low: int, high: int, wanted: list[int] | None = None) -> HashRange:
    """Return the range of these hashes, restricted to `wanted` (sorted) if given; without batches if it is empty."""
    chosen = [msgspec.structs.replace(b, parts=_parts_within(b.parts, low, high, wanted)) for b in batches]
    return HashRange(low, high, [b for b in chosen if b.parts], wanted)


def _snap_to_part(at: int, begins: Any, near: int) -> int:
    """Return `at`, or the start of a part nearby, so that two readers do not decode the same part."""
    index = int(np.searchsorted(begins, np.uint64(at)))
    around = [int(begins[i]) for i in (index - 1, index) if 0 <= i < len(begins)]
    closest = min(around, key=lambda hash_: abs(hash_ - at), default=at)
    return closest if abs(closest - at) < near else at


def _parts_within(parts: Sequence[Part], low: int, high: int, wanted: Sequence[int] | None) -> tuple[Part, ...]:
    return tuple(
        p
        for p in parts
        if p.min_hash <= high
        and low <= p.max_hash
        and (wanted is None or any(p.min_hash <= hash_ <= p.max_hash for hash_ in wanted))
    )


def streamed_parts(batches: Sequence[Batch]) -> list[tuple[Batch, Part]]:
    """Return the largest parts whose hashes do not overlap, largest first."""
    chosen: list[tuple[Batch, Part]] = []
    for batch, part in sorted(((b, p) for b in batches for p in b.parts), key=lambda found: -found[1].rows):
        if all(part.max_hash < other.min_hash or other.max_hash < part.min_hash for _, other in chosen):
            chosen.append((batch, part))
    return chosen


def read_range(
    schema: ShardSchema, chosen: HashRange, as_of: int, fetch: FetchPart, columns: Sequence[str] | None = None
) -> Iterator[pa.Table]:
    """Yield the rows of the range at `as_of`, in tables of the shard's columns, or of those in `columns`.

    If the shard has a key, only these columns and the key are decoded. Raises as `fetch`, CorruptError,
    SchemaEvolvedError.
    """
    for batch in chosen.batches:
        check_schema_known(schema, batch)
    names = contents_schema(schema).names if columns is None else list(columns)
    read = _RangeReader(schema, chosen, as_of, fetch, names if schema.key else contents_schema(schema).names)
    streamed = streamed_parts(chosen.batches)
    streams = {id(part) for _, part in streamed}
    held = [(batch, part) for batch in chosen.batches for part in batch.parts if id(part) not in streams]
    updates = [read.empty(), *(rows for batch, part in held for rows in read.groups(batch, part))]
    touched = np.unique(np.concatenate([rows.column(HASH).to_numpy() for rows in updates]))
    for batch, part in streamed:
        for rows in _regroup_by_hash(read.groups(batch, part)):
            settled = _settled_mask(rows, touched)
            if not settled.all():
                updates.append(rows.filter(pa.array(~settled)))
                rows = rows.filter(pa.array(settled))
            if rows.num_rows:
                yield rows.select(names)
    rest = pa.concat_tables(updates)
    if not rest.num_rows:
        return
    summed = newest_contents(read.schema, rest) if schema.key else None
    if summed is None and read.schema != schema:
        read = msgspec.structs.replace(read, names=contents_schema(schema).names)
        rest = _unsettled_rows(read, held, streamed, touched)  # comparing the keys was not enough: read whole rows
    yield (sum_contents(schema, rest) if summed is None else summed).select(names)


def _unsettled_rows(
    read: _RangeReader, held: Sequence[tuple[Batch, Part]], streamed: Sequence[tuple[Batch, Part]], touched: Any
) -> pa.Table:
    """Return every update of the range that is not settled."""
    found = [read.empty(), *(rows for batch, part in held for rows in read.groups(batch, part))]
    for batch, part in streamed:
        whole = _regroup_by_hash(read.groups(batch, part))
        found += [rows.filter(pa.array(~_settled_mask(rows, touched))) for rows in whole]
    return pa.concat_tables(found)


def read_batch_ordered(
    schema: ShardSchema, batch: Batch, as_of: int, fetch: FetchPart, columns: Sequence[str] | None = None
) -> Iterator[pa.Table]:
    """Yield the updates of one batch up to `as_of`, in tables of ascending hashes that never split one hash: with all
    columns, or with those in `columns` and the key.

    Memory holds one row group, or all parts that overlap each other. Raises as `fetch`, CorruptError,
    SchemaEvolvedError.
    """
    check_schema_known(schema, batch)
    names = contents_schema(schema).names if columns is None or not schema.key else columns
    read = _RangeReader(schema, HashRange(0, HASH_MAX, [batch]), as_of, fetch, names)

    def groups() -> Iterator[pa.Table]:
        for parts in _group_overlapping(batch.parts):
            found = (rows for part in parts for rows in read.groups(batch, part))
            if len(parts) == 1:
                yield from found
            elif tables := list(found):
                together = pa.concat_tables(tables)
                yield rows_at(together, np.argsort(together.column(HASH).to_numpy(), kind="stable"))

    return _regroup_by_hash(groups())


def _group_overlapping(parts: Sequence[Part]) -> list[list[Part]]:
    """Return groups of parts by ascending hashes; overlapping parts share a group."""
    out: list[list[Part]] = []
    end = -1
    for part in sorted(parts, key=lambda part: part.min_hash):
        if not out or part.min_hash > end:
            out.append([])
        out[-1].append(part)
        end = max(end, part.max_hash)
    return out


def _regroup_by_hash(groups: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Yield rows of ascending hashes in tables that never split a hash: rows of a table's last hash join the next
    table.
    """
    open_end: pa.Table | None = None
    for group in groups:
        rows = group if open_end is None else pa.concat_tables([open_end, group])
        hashes = rows.column(HASH).to_numpy()
        end = int(np.searchsorted(hashes, hashes[-1], side="left"))
        open_end = rows.slice(end)
        if end:
            yield rows.slice(0, end)
    if open_end is not None:
        yield open_end


def _settled_mask(rows: pa.Table, touched: Any) -> Any:
    """Return a mask of the rows, sorted by hash, that are single insertions without any other update."""
    hashes = rows.column(HASH).to_numpy()
    alone = rows.column(DIFF).to_numpy() == 1
    same = hashes[1:] == hashes[:-1]
    alone[1:] &= ~same
    alone[:-1] &= ~same
    if len(touched) and len(hashes):
        at = np.minimum(np.searchsorted(touched, hashes), len(touched) - 1)
        alone &= touched[at] != hashes
    return alone


class _RangeReader(msgspec.Struct, frozen=True):
    """Reader of the parts of one range, limited to the columns in `names` and the key's."""

    whole: ShardSchema
    chosen: HashRange
    as_of: int
    fetch: FetchPart
    names: Sequence[str]

    @property
    def schema(self) -> ShardSchema:
        """The shard's schema without the columns that are not read."""
        wanted = {*self.names, *self.whole.key}
        return msgspec.structs.replace(self.whole, columns=tuple(c for c in self.whole.columns if c.name in wanted))

    def empty(self) -> pa.Table:
        return part_schema(self.schema).empty_table()

    def groups(self, batch: Batch, part: Part) -> Iterator[pa.Table]:
        """Yield non-empty updates of a part, by hash: those in the range, in its batch's bounds and at most at
        `as_of`.
        """
        schema, target = self.schema, part_schema(self.schema)
        try:
            file = open_part(part, self.fetch(part))
            for group in range(file.metadata.num_row_groups):
                if not _may_hold(hash_bounds(file, group), self.chosen):
                    continue
                rows = convert_to_schema(
                    schema, file.read_row_group(group, columns=target.names, use_threads=False), target
                )
                rows = _in_range(rows_within(rows, batch.lower, min(batch.upper, self.as_of + 1)), self.chosen)
                if rows.num_rows:
                    yield rows
        except (pa.ArrowException, OSError) as error:
            raise CorruptError(f"part is unreadable: object={part.object_key or 'inline'} ({error}).") from error


def _may_hold(bounds: tuple[int, int] | None, chosen: HashRange) -> bool:
    if bounds is None:
        return True
    low, high = bounds
    if high < chosen.low or chosen.high < low:
        return False
    return chosen.wanted is None or any(low <= hash_ <= high for hash_ in chosen.wanted)


def _in_range(rows: pa.Table, chosen: HashRange) -> pa.Table:
    hashes = rows.column(HASH).to_numpy()
    if chosen.wanted is not None:
        return rows.filter(pa.array(np.isin(hashes, np.array(chosen.wanted, dtype=np.uint64))))
    if not len(hashes) or (chosen.low <= int(hashes[0]) and int(hashes[-1]) <= chosen.high):
        return rows
    start = int(np.searchsorted(hashes, np.uint64(chosen.low), side="left"))
    end = int(np.searchsorted(hashes, np.uint64(chosen.high), side="right"))
    return rows.slice(start, end - start)


def count_rows(batches: Sequence[Batch], as_of: int, fetch: FetchPart) -> int:
    """Return the number of rows at `as_of`; a row of multiplicity n counts n times. Raises as `fetch`, CorruptError.

    Reads two columns of each part, which are tiny: their values repeat.
    """
    count = 0
    for batch in batches:
        for part in batch.parts:
            try:
                file = open_part(part, fetch(part))
                for group in range(file.metadata.num_row_groups):
                    rows = file.read_row_group(group, columns=[TIME, DIFF], use_threads=False)
                    rows = rows_within(rows, batch.lower, min(batch.upper, as_of + 1))
                    count += pc.sum(rows.column(DIFF)).as_py() or 0
            except (pa.ArrowException, OSError) as error:
                raise CorruptError(f"part is unreadable: object={part.object_key or 'inline'} ({error}).") from error
    return count
