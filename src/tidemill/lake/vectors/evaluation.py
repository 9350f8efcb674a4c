"""The rows of a shard's parts that count at a time, from those at an earlier time and the parts that changed since.

A view is a part with the bounds of its batch: rows outside do not exist. The updates of one hash are independent of all
others. So only these hashes are looked up, in all views:

    other than single insertions in a view that came or went        it may change which row of another view counts
    an insertion in a view that came, and one of these in a later   it may already be retracted

All other insertions in views that came count.

Invariant (conservation): the rows that count are as many as the sum of all updates. This is checked each time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

import msgspec
import numpy as np
import pyarrow as pa

from tidemill.base.errors import CorruptError, MissingError
from tidemill.lake.format.deletion_vectors import decode_vector, encode_vector
from tidemill.lake.vectors.part_columns import PartColumns
from tidemill.lake.vectors.part_files import Array, PartSummary
from tidemill.lake.vectors.row_states import Updates, classify, sum_rows
from tidemill.shards.api import DIFF, HASH, TIME, Batch, Part, ShardSchema
from tidemill.shards.parts.arrow_rows import Index, Mask, rows_at
from tidemill.shards.parts.schema import contents_schema
from tidemill.shards.parts.schema_evolution import check_schema_known, convert_to_schema

T = TypeVar("T")
V = TypeVar("V")

CHUNK_HASHES = 500_000
"""Hashes looked up at a time: they and their updates are in memory, about 100 bytes each."""

CONCURRENT_VIEWS = 4
"""Views read at a time: each may have 24 bytes per row in memory, and more for a part of another writer."""

ViewId = tuple[str | bytes, int, int]


class View(msgspec.Struct, frozen=True):
    """A part in its batch, at a time: its rows with lower ≤ `_time` < upper. `batch` orders views by time."""

    part: Part
    lower: int
    upper: int
    batch: int = 0

    @property
    def id(self) -> ViewId:
        return self.part.object_key or self.part.inline, self.lower, self.upper


class ViewState(msgspec.Struct, frozen=True):
    """Rows of a view that count: all but those of its vector.

    blob      the deletion vector, encoded; b"" if all rows count
    counting  number of rows that count
    net       sum of the multiplicities of its updates
    mixed     whether it has updates other than single insertions
    """

    view: View
    blob: bytes
    counting: int
    net: int
    mixed: bool

    @property
    def dead(self) -> int:
        return self.view.part.rows - self.counting

    def mask(self) -> Mask:
        """Return a mask of the rows that do not count."""
        rows = self.view.part.rows
        return decode_vector(self.blob, rows) if self.blob else np.zeros(rows, dtype=bool)


class Evaluation(msgspec.Struct, frozen=True):
    """Contents at a time. `copies` has further copies of rows, with `_hash`: a row cannot be listed twice."""

    states: Mapping[ViewId, ViewState]
    copies: pa.Table

    @property
    def rows(self) -> int:
        return sum(state.counting for state in self.states.values()) + int(self.copies.num_rows)


def views_at(batches: Sequence[Batch], schema: ShardSchema, time_ms: int) -> list[View]:
    """Return the views of all updates up to `time_ms`. Raises SchemaEvolvedError for a batch of a newer schema."""
    found = []
    for number, batch in enumerate(batches):
        if batch.lower <= time_ms and batch.parts:
            check_schema_known(schema, batch)
            upper = min(batch.upper, time_ms + 1)
            found += [View(part, batch.lower, upper, number) for part in batch.parts]
    return found


async def evaluate(
    columns: PartColumns, schema: ShardSchema, views: Sequence[View], before: Evaluation | None = None
) -> Evaluation:
    """Return the contents of `views`. `before` is a result for earlier views of this shard.

    Raises MissingError, CorruptError, UnavailableError.
    """
    if before is not None:
        try:
            return await _Pass(columns, schema, views, before).run()
        except MissingError:
            pass  # a part of the earlier views is deleted; if it is one of the present views, the next line raises
    empty = contents_schema(schema).append(pa.field(HASH, pa.uint64())).empty_table()
    return await _Pass(columns, schema, views, Evaluation({}, empty)).run()


class _Pass:
    """One evaluation."""

    def __init__(self, columns: PartColumns, schema: ShardSchema, views: Sequence[View], before: Evaluation) -> None:
        self._columns = columns
        self._schema = schema
        self._views = list(views)
        self._before = before
        present = {view.id for view in views}
        self._came = [view for view in views if view.id not in before.states]
        self._went = [state for id_, state in before.states.items() if id_ not in present]
        self._slots = asyncio.Semaphore(CONCURRENT_VIEWS)
        self._masks: dict[ViewId, Mask] = {}
        """Masks that may differ from those before, by view: True = the row does not count."""
        self._net: dict[ViewId, int] = {}
        self._mixed: dict[ViewId, bool] = {}

    async def run(self) -> Evaluation:
        target = contents_schema(self._schema).append(pa.field(HASH, pa.uint64()))
        copies = convert_to_schema(self._schema, self._before.copies, target)
        if not self._came and not self._went:
            return Evaluation({view.id: self._before.states[view.id] for view in self._views}, copies)
        wanted = await self._hashes_to_look_up()
        if copies.num_rows and len(wanted):
            copies = copies.filter(pa.array(~_is_in(copies.column(HASH).to_numpy(), wanted)))
        found = [copies]
        for start in range(0, len(wanted), CHUNK_HASHES):
            found.append(await self._evaluate_hashes(wanted[start : start + CHUNK_HASHES]))
        states = {view.id: self._state(view) for view in self._views}
        result = Evaluation(states, pa.concat_tables(found))
        net = sum(state.net for state in states.values())
        if result.rows != net:
            raise CorruptError(f"the rows that count are not the sum of all updates: rows={result.rows} sum={net}.")
        return result

    # hashes -----------------------------------------------------------------------------------------
    async def _hashes_to_look_up(self) -> Array:
        found = await self._each(self._add_view, self._came)
        found += await self._each(self._irregular_hashes, self._went)
        first = min((view.batch for view in self._came), default=0)
        later = [
            state
            for view in self._views
            if view.batch >= first and (state := self._before.states.get(view.id)) is not None and state.mixed
        ]
        if later:
            retracted = _unique(await self._each(self._irregular_hashes, later))
            found += await self._each(lambda view: self._hashes_among(view, retracted), self._came)
        return _unique(found)

    async def _each(self, read: Callable[[V], Awaitable[T]], views: Sequence[V]) -> list[T]:
        """Return the results of `read` for each view, in their order."""

        async def limited(view: V) -> T:
            async with self._slots:
                return await read(view)

        return list(await asyncio.gather(*map(limited, views)))

    async def _add_view(self, view: View) -> Array:
        """Begin the mask of a view that came; return the hashes of its updates other than single insertions."""
        summary = await self._columns.summary(view.part)
        if summary.rows != view.part.rows:
            raise CorruptError(
                f"part has another number of rows: object={view.part.object_key} rows={summary.rows}"
                f" want={view.part.rows}."
            )
        mask = self._masks[view.id] = np.zeros(summary.rows, dtype=bool)
        whole = summary.times is not None and view.lower <= summary.times[0] and summary.times[1] < view.upper
        self._mixed[view.id] = not summary.only_inserts
        if whole and summary.only_inserts:
            self._net[view.id] = summary.rows
            return np.zeros(0, dtype=np.uint64)
        net, found = 0, []
        for group, values in zip(
            summary.all_groups,
            await self._columns.columns(view.part, summary.all_groups, [HASH, TIME, DIFF]),
            strict=True,
        ):
            exists = (view.lower <= values[TIME]) & (values[TIME] < view.upper)
            mask[summary.starts[group] : summary.starts[group + 1]] = ~exists
            net += int(values[DIFF][exists].sum())
            found.append(values[HASH][exists & (values[DIFF] != 1)])
        self._net[view.id] = net
        return np.concatenate(found)

    async def _irregular_hashes(self, state: ViewState) -> Array:
        """Return the hashes of a known view's updates other than single insertions."""
        if not state.mixed:
            return np.zeros(0, dtype=np.uint64)
        view, summary = state.view, await self._columns.summary(state.view.part)
        found = await self._columns.columns(view.part, summary.all_groups, [HASH, TIME, DIFF])
        return np.concatenate(
            [v[HASH][(view.lower <= v[TIME]) & (v[TIME] < view.upper) & (v[DIFF] != 1)] for v in found]
        )

    async def _hashes_among(self, view: View, wanted: Array) -> Array:
        """Return the hashes of a view that are also in `wanted`, which is sorted."""
        summary = await self._columns.summary(view.part)
        groups = summary.groups_with(wanted)
        found = await self._columns.columns(view.part, groups, [HASH])
        return _unique([values[HASH][_is_in(values[HASH], wanted)] for values in found])

    # rows -------------------------------------------------------------------------------------------
    async def _evaluate_hashes(self, hashes: Array) -> pa.Table:
        """Decide which updates of these hashes count, in all views. Return further copies of rows, with `_hash`."""
        low = np.array([view.part.min_hash for view in self._views], dtype=np.uint64)
        high = np.array([view.part.max_hash for view in self._views], dtype=np.uint64)
        near = np.searchsorted(hashes, low, side="left") < np.searchsorted(hashes, high, side="right")
        numbers = np.flatnonzero(near).tolist()
        copies = contents_schema(self._schema).append(pa.field(HASH, pa.uint64())).empty_table()
        if not numbers:
            return copies
        found = await self._each(lambda number: self._updates_in(number, hashes), numbers)
        updates = Updates(*(np.concatenate(each) for each in zip(*found, strict=True)))
        counting, irregular = classify(updates)
        if irregular.any():
            at = np.flatnonzero(irregular)
            rows = await self._rows_of(updates, at)
            counting[at], further = sum_rows(rows, updates.diff[at], updates.time[at])
            hashed = rows.append_column(pa.field(HASH, pa.uint64()), pa.array(updates.hash[at]))
            copies = rows_at(hashed, further)
        for number in numbers:
            mine = updates.view == number
            if mine.any():
                self._mask(self._views[number])[updates.place[mine]] = ~counting[mine]
        return copies

    async def _updates_in(self, number: int, hashes: Array) -> Updates:
        """Return the updates of these hashes in one view."""
        view = self._views[number]
        summary = await self._columns.summary(view.part)
        groups = summary.groups_with(hashes)
        names = [HASH, *([] if _one_time(summary) else [TIME]), *([] if summary.only_inserts else [DIFF])]
        places = [np.zeros(0, dtype=np.int64)]
        out = [(np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))]
        for group, values in zip(groups, await self._columns.columns(view.part, groups, names), strict=True):
            at = np.flatnonzero(_is_in(values[HASH], hashes))
            times = values[TIME][at] if TIME in values else np.full(len(at), _one_time(summary), dtype=np.int64)
            diffs = values[DIFF][at] if DIFF in values else np.ones(len(at), dtype=np.int64)
            exists = (view.lower <= times) & (times < view.upper)
            places.append(at[exists] + int(summary.starts[group]))
            out.append((values[HASH][at][exists], times[exists], diffs[exists]))
        place = np.concatenate(places)
        hash_, time, diff = (np.concatenate(each) for each in zip(*out, strict=True))
        return Updates(np.full(len(place), number, dtype=np.int64), place, hash_, time, diff)

    async def _rows_of(self, updates: Updates, at: Index) -> pa.Table:
        """Return the whole rows of the updates at these positions, in their order."""
        tables, order = [contents_schema(self._schema).empty_table()], [np.zeros(0, dtype=np.int64)]
        for number in np.unique(updates.view[at]).tolist():
            part = self._views[number].part
            summary = await self._columns.summary(part)
            mine = np.flatnonzero(updates.view[at] == number)
            places = updates.place[at[mine]]
            groups = np.searchsorted(summary.starts, places, side="right") - 1
            needed = np.unique(groups).tolist()
            for group, rows in zip(needed, await self._columns.rows(part, needed, self._schema), strict=True):
                here = groups == group
                tables.append(rows_at(rows, places[here] - int(summary.starts[group])))
                order.append(mine[here])
        back = np.argsort(np.concatenate(order), kind="stable")
        return rows_at(pa.concat_tables(tables), back)

    # results ----------------------------------------------------------------------------------------
    def _mask(self, view: View) -> Mask:
        if view.id not in self._masks:
            self._masks[view.id] = self._before.states[view.id].mask().copy()
        return self._masks[view.id]

    def _state(self, view: View) -> ViewState:
        known = self._before.states.get(view.id)
        mask = self._masks.get(view.id)
        if mask is None:
            assert known is not None, "a view that came has a mask"
            return msgspec.structs.replace(known, view=view)
        dead = int(np.count_nonzero(mask))
        blob = encode_vector("", mask).blob if dead else b""
        net = self._net[view.id] if known is None else known.net
        mixed = self._mixed[view.id] if known is None else known.mixed
        return ViewState(view, blob, len(mask) - dead, net, mixed)


def _one_time(summary: PartSummary) -> int | None:
    return summary.times[0] if summary.times is not None and summary.times[0] == summary.times[1] else None


def _unique(arrays: Sequence[Array]) -> Array:
    return np.unique(np.concatenate([np.zeros(0, dtype=np.uint64), *arrays]))


def _is_in(values: Array, wanted: Array) -> Mask:
    """Return which values are in `wanted`, which is sorted and not empty."""
    at = np.minimum(np.searchsorted(wanted, values), len(wanted) - 1)
    found: Mask = wanted[at] == values
    return found
