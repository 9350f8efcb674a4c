"""Plan of a shard at one time for an engine that reads Parquet itself (Spark, DuckDB): files, and the changes to them.

    settled     files that only insert, read with the engine's column pruning, filters and row groups
    difference  the other parts, which are read here: the last state of every key that they touch

    settled ANTI JOIN gone (by the key, where `_time` < `_until`)  UNION ALL  live

If there is no difference, that is Parquet alone. The caller holds the time first.

The difference requires normal histories: per key at most one live row, and per (key, time) at most one retraction and
one insertion, the retraction first. Then the last update of a key decides, in whichever part the others are.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tidemill.base.errors import CorruptError
from tidemill.base.limits import MIB
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.objects.store import ObjectStore
from tidemill.shards.api import DIFF, HASH, TIME, Batch, Part, ShardSchema
from tidemill.shards.parts.arrow_rows import rows_at, rows_equal
from tidemill.shards.parts.checksums import open_part
from tidemill.shards.parts.consolidate import sum_contents
from tidemill.shards.parts.parts import sort_updates
from tidemill.shards.parts.schema import FLOATS, contents_schema
from tidemill.shards.parts.schema_evolution import check_schema_known
from tidemill.shards.parts.stored_types import chunk_places, has_types_of
from tidemill.shards.read.hash_ranges import FetchPart
from tidemill.shards.read.part_reader import PartReader, fetch_through

if TYPE_CHECKING:
    from tidemill.shards.handle import LogShard

DIFFERENCE_BYTES = 32 * MIB
"""Limit for encoded updates read here for one plan; with more, reading by ranges is better."""
SMALL_BYTES = 1 * MIB
"""Limit for a small shard, in encoded bytes. Up to here Spark spends more on files than on rows passed to it.

Measured in CPU-s with files and with rows: 5,000 rows 0.22 and 0.11, 30,000 rows 0.20 and 0.17, 100,000 rows 0.21 and
0.37.
"""
KNOWN_MAX = 8192

UNTIL_COLUMN = "_until"
NO_ROWS = {"min": None, "max": None}
"""Bounds of a column without rows."""


class PlanNotPossibleError(Exception):
    """The shard must be read in another way: a plan would not be exact, or not be worth it."""


class ReadPlan(NamedTuple):
    """Result of `plan_parts`.

    settled  objects that are Parquet files of this version of the schema, with `stored_types`
    gone     the key columns in order, then until when; use positions, since a key column may be named `_until`, too.
             If it has no rows, it may lack columns
    live     the shard's columns
    gone_hashes  hashes of the rows of `gone`, ascending
    gone_counts  numbers of settled rows that the rows of `gone` supersede: 0 for a key that is new
    """

    settled: list[Part]
    gone: Any
    live: Any
    gone_hashes: Any
    gone_counts: Any


def plan_parts(
    portal: BlockingPortal,
    objects: ObjectStore,
    shard: LogShard,
    chosen: Sequence[Batch],
    at: int,
    *,
    again: bool = False,
    no_files: str = "",
) -> ReadPlan:
    """Plan a read of the shard at time `at` from the batches that were chosen for it.

    If `again`, the handle plans repeatedly, so decoded parts are cached, and a small shard is read here whole.
    `no_files` is the reason why the engine cannot read the parts itself, or "". Raises PlanNotPossibleError,
    CorruptError, SchemaEvolvedError, MissingError, UnavailableError.
    """
    for batch in chosen:
        check_schema_known(shard.schema, batch)
    reader = shard.reader if again else PartReader(objects, shard.schema, cache_bytes=0)
    if again and (rows := small_contents(portal, shard, chosen, at)) is not None:
        return plan_of_rows(rows)
    if no_files:
        raise PlanNotPossibleError(no_files)
    if any(column.name in shard.schema.key and column.type in FLOATS for column in shard.schema.columns):
        # Statistics, by which engines skip rows, exclude NaN; and engines treat zeros and NaNs of different bits as
        # equal.
        raise PlanNotPossibleError("its key has a float, which may be NaN")
    fetch = fetch_through(portal, objects, whole=False)
    settled: list[Part] = []
    rest: list[Batch] = []
    for batch in chosen:
        others = []
        for part in batch.parts:
            times = _cached_insertion_times(part, shard.schema, fetch) if part.object_key else None
            if times is not None and batch.lower <= times[0] and times[1] < min(batch.upper, at + 1):
                settled.append(part)
            else:
                others.append(part)
        rest.append(msgspec.structs.replace(batch, parts=tuple(others)))
    return _difference(portal, reader, shard, rest, at)._replace(settled=settled)


def small_contents(portal: BlockingPortal, shard: LogShard, chosen: Sequence[Batch], at: int) -> pa.Table | None:
    """Return the contents at time `at` of a small shard, None of a larger one; decoded parts are cached.

    Raises CorruptError, SchemaEvolvedError, MissingError, UnavailableError.
    """
    if _size_bytes(chosen) > SMALL_BYTES:
        return None
    for batch in chosen:
        check_schema_known(shard.schema, batch)
    return sum_contents(shard.schema, portal.call(shard.reader.read_batches(chosen, 0, at + 1)))


def plan_of_rows(live: pa.Table) -> ReadPlan:
    """Return a plan of these rows alone."""
    return ReadPlan([], live.slice(0, 0), live, np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=np.int64))


def _size_bytes(batches: Sequence[Batch]) -> int:
    return sum(part.size_bytes for batch in batches for part in batch.parts)


_known: OrderedDict[tuple[str, ShardSchema], tuple[int, int] | None] = OrderedDict()
"""Cached by the key of an object, which never changes and is never reused."""
_known_lock = threading.Lock()


def _cached_insertion_times(part: Part, schema: ShardSchema, fetch: FetchPart) -> tuple[int, int] | None:
    """Return the first and last time of a part that only inserts single rows under this exact schema, else None."""
    key = part.object_key, schema
    with _known_lock:
        if key in _known:
            _known.move_to_end(key)
            return _known[key]
    found = _read_insertion_times(part, schema, fetch)
    with _known_lock:
        _known[key] = found
        if len(_known) > KNOWN_MAX:
            _known.popitem(last=False)
    return found


def _read_insertion_times(part: Part, schema: ShardSchema, fetch: FetchPart) -> tuple[int, int] | None:
    try:
        file = open_part(part, fetch(part))
        if not has_types_of(file.schema_arrow, schema):
            return None
        (first_ms, last_ms), diffs = (column_bounds(file, name) for name in (TIME, DIFF))
    except (OSError, pa.ArrowException) as error:
        raise CorruptError(f"part is unreadable: object={part.object_key} ({error}).") from error
    return (first_ms, last_ms) if diffs == (1, 1) else None


def column_bounds(file: pq.ParquetFile, name: str) -> tuple[int, int]:
    """Return the least and greatest value of a column: from the footer, or from the pages of a part without them."""
    place = chunk_places(file.schema_arrow)[name].start
    groups = [file.metadata.row_group(group).column(place).statistics for group in range(file.metadata.num_row_groups)]
    if groups and all(found is not None and found.has_min_max for found in groups):
        return min(found.min for found in groups), max(found.max for found in groups)
    values = pc.min_max(file.read(columns=[name], use_threads=False).column(name)).as_py()
    return values["min"], values["max"]


def _difference(portal: BlockingPortal, reader: PartReader, shard: LogShard, rest: list[Batch], at: int) -> ReadPlan:
    """Return the plan without its settled parts. Raises PlanNotPossibleError, and as reading."""
    size_bytes = _size_bytes(rest)
    if size_bytes > DIFFERENCE_BYTES:
        raise PlanNotPossibleError(f"{size_bytes >> 20} MiB of updates are not merged")
    updates = portal.call(reader.read_batches(rest, 0, at + 1))
    if not shard.schema.key and pc.min_max(updates.column(DIFF)).as_py() not in ({"min": 1, "max": 1}, NO_ROWS):
        raise PlanNotPossibleError("it has no key, and updates that are not merged")
    if not shard.schema.key or not updates.num_rows:
        return plan_of_rows(updates.select(contents_schema(shard.schema).names))
    found = last_states(shard.schema, updates)
    if found is None:
        raise PlanNotPossibleError("some key has several rows")
    return found


def last_states(schema: ShardSchema, updates: pa.Table) -> ReadPlan | None:
    """Return the plan of all keys that `updates` (with `_hash`) touch; None if their histories are not normal.

    gone    the columns of the key, `_until`: an insertion of this key elsewhere before that time is superseded
    live    the rows that result from these updates, with the shard's columns
    """
    hashes = updates.column(HASH).to_numpy()
    order = sort_updates(updates, hashes)
    if order is not None:
        updates, hashes = rows_at(updates, order), hashes[order]
    diffs = updates.column(DIFF).to_numpy()
    same = hashes[1:] == hashes[:-1]
    if not bool((np.abs(diffs) == 1).all()):
        return None
    # One key per hash, and none inserted twice without a retraction in between. (The insertion between two consecutive
    # retractions is in another part.)
    repeats = np.nonzero(same)[0] + 1
    if bool((diffs[repeats] + diffs[repeats - 1] > 1).any()):
        return None
    if not rows_equal(updates, repeats - 1, updates, repeats, schema.key).all():
        return None
    first, last = (np.zeros(len(hashes), dtype=bool) for _ in range(2))
    first[:1], first[1:], last[-1:], last[:-1] = True, ~same, True, ~same
    ends, left = updates.filter(pa.array(last)), diffs[last] == 1
    until = ends.column(TIME).to_numpy() + left
    gone = ends.select(list(schema.key)).append_column(UNTIL_COLUMN, pa.array(until, pa.int64()))
    live = ends.select(contents_schema(schema).names).filter(pa.array(left))
    # Diffs of a key sum to the number of its rows: what these updates lack of it, settled insertions have.
    sums = np.add.reduceat(diffs, np.flatnonzero(first)) if len(diffs) else diffs
    return ReadPlan([], gone, live, hashes[last], left - sums)
