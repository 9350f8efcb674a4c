"""Read of one shard: its time, its hold, the parts it reads, and their bytes, also as a Polars frame (Polars is an
optional dependency); or its changelog, under a hold that moves with the reader.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import structlog

from tidemill.base.clock import Clock
from tidemill.base.errors import MissingError
from tidemill.base.libraries import require
from tidemill.base.runtime.blocking_portal import BlockingPortal, SyncContext
from tidemill.base.runtime.tasks import Tasks
from tidemill.objects.store import ObjectStore
from tidemill.shards.api import Batch, Delta, HistoryLostError
from tidemill.shards.handle import LogShard
from tidemill.shards.read.hash_ranges import cut_ranges, read_range
from tidemill.shards.read.holds import HOLD_ABOVE_BYTES, HOLD_TTL_MS, MovingHold
from tidemill.shards.read.part_reader import fetch_through

if TYPE_CHECKING:
    import polars as pl
    import pyarrow as pa

    from tidemill.query.table import Table

NEWEST_ATTEMPTS = 3
"""Attempts to look up the newest time, because since may pass it before it is held."""

log = structlog.get_logger()


class ReadSelection(NamedTuple):
    """Time of a read and its batches. `at` -1: nothing was ever written."""

    at: int
    batches: list[Batch]


@asynccontextmanager
async def select_read(shard: LogShard, as_of: int | None, wait_s: float, *, long: bool) -> AsyncIterator[ReadSelection]:
    """Yield the batches that hold the contents at `as_of` (None = the newest time). Inside, they stay readable.

    `long`: the read may take any time; else a hold is taken only for a large one, as for every short read. Raises
    HistoryLostError, UnavailableError (not final within `wait_s`), ClosedError, UnknownOutcomeError.
    """
    async with AsyncExitStack() as stack:
        for attempt in range(NEWEST_ATTEMPTS):
            at = (await shard.frontiers())[1] - 1 if as_of is None else as_of
            try:
                batches = await shard.batches_until(at, wait_s) if at >= 0 or as_of is not None else []
                if not batches or not (long or _size_bytes(batches) > HOLD_ABOVE_BYTES):
                    break
                await stack.enter_async_context(shard.hold_during("python", at))
                batches = await shard.batches_until(at)  # choose after the hold is in force, so that all parts stay
                break
            except HistoryLostError:
                if as_of is not None or attempt == NEWEST_ATTEMPTS - 1:
                    raise
        yield ReadSelection(at, batches)


def _size_bytes(batches: Sequence[Batch]) -> int:
    return sum(part.size_bytes for batch in batches for part in batch.parts)


def read_rows(
    portal: BlockingPortal,
    objects: ObjectStore,
    shard: LogShard,
    found: ReadSelection,
    columns: Sequence[str],
    wanted: list[int] | None,
) -> Iterator[pa.Table]:
    """Yield `columns` of the contents, by ranges of the hash; `wanted`: only rows with these hashes. Raises
    HistoryLostError, CorruptError, UnavailableError."""
    fetch = fetch_through(portal, objects, whole=len(columns) == len(shard.schema.columns))
    try:
        for chosen_range in cut_ranges(found.batches, wanted):
            yield from read_range(shard.schema, chosen_range, found.at, fetch, columns)
    except MissingError as error:
        raise portal.call(shard.explain_missing(error, found.batches)) from error


@asynccontextmanager
async def open_changelog(
    shard: LogShard, clock: Clock, since: int, *, follow: bool
) -> AsyncIterator[AsyncIterator[Delta]]:
    """Yield the deltas of `Table.changes`. Inside, history after the last delta is held, however long its reader
    takes."""
    hold = MovingHold(shard, shard.reader_name("changes"), clock, ttl_ms=HOLD_TTL_MS, kept=True)
    until = (await shard.frontiers())[1]

    async def deltas() -> AsyncGenerator[Delta, None]:
        if until <= since + 1 and not follow:
            return
        async for delta in shard.listen(since + 1):
            yield delta
            await hold.move_to(delta.upper - 1)
            if delta.upper >= until and not follow:
                return

    async with Tasks(lambda _, error: log.warning("hold lapsed", shard=shard.name, cause=str(error))) as tasks:
        found = deltas()
        try:
            if until:
                await hold.move_to(max(0, since))
            tasks.spawn(hold.renew_until_cancelled(), name="changes-hold")
            yield found
        finally:
            await found.aclose()
            await hold.release()


async def next_delta(deltas: AsyncIterator[Delta]) -> Delta | None:
    """Return the next delta; None at the end."""
    return await anext(deltas, None)


def import_polars() -> Any:
    """Import Polars. Raises InvalidError if it is not installed."""
    require("polars")
    import polars

    return polars


def lazy_frame(table: Table, found: SyncContext[ReadSelection]) -> pl.LazyFrame:
    """Return a frame of the chosen contents. Polars references the source while a frame may read it, and so the
    hold."""
    module = import_polars()
    from polars.io.plugins import register_io_source

    def source(
        columns: list[str] | None, predicate: pl.Expr | None, rows: int | None, batch_rows: int | None
    ) -> Iterator[pl.DataFrame]:
        """Yield the rows of a Polars IO source; `batch_rows` is only a hint."""
        names = schema.names() if columns is None else columns or schema.names()[:1]
        used = [] if predicate is None else predicate.meta.root_names()
        left = rows
        read = list(dict.fromkeys([*names, *used]))
        types = {name: schema[name] for name in read}  # the table's types may have been widened since
        for batch in table._stream_chosen(found, read, None, end=lambda: None):
            frame = module.from_arrow(batch).cast(types)
            if predicate is not None:
                frame = frame.filter(predicate).select(names)
            if left is not None:
                frame, left = frame.head(left), left - min(left, frame.height)
            yield frame
            if left == 0:
                return

    schema = module.from_arrow(table.schema.empty_table()).schema
    frame: pl.LazyFrame = register_io_source(source, schema=schema, validate_schema=False, is_pure=True)
    return frame
