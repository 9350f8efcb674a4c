"""Read of one shard: its time, its hold, the parts it reads, and their rows; or its changelog, under a hold that moves
with the reader.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

import structlog

from tidemill.base.clock import Clock
from tidemill.base.errors import MissingError
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.base.runtime.tasks import Tasks
from tidemill.objects.store import ObjectStore
from tidemill.shards.api import Batch, Delta, HistoryLostError
from tidemill.shards.handle import LogShard
from tidemill.shards.read.deletion_vectors import deletion_vectors
from tidemill.shards.read.hash_ranges import cut_ranges, read_range
from tidemill.shards.read.holds import HOLD_ABOVE_BYTES, HOLD_TTL_MS, MovingHold
from tidemill.shards.read.part_reader import fetch_through
from tidemill.shards.read.planned_rows import read_planned
from tidemill.shards.read.read_plan import PlanNotPossibleError, ReadPlan, plan_parts

if TYPE_CHECKING:
    import pyarrow as pa


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
    """Yield `columns` of the contents: as planned, or by ranges of the hash where no plan exists, or only rows with the
    hashes `wanted` are asked for. Raises HistoryLostError, CorruptError, UnavailableError."""
    fetch = fetch_through(portal, objects, whole=len(columns) == len(shard.schema.columns))
    try:
        plan = None if wanted is not None else plan_read(portal, objects, shard, found)
        if plan is not None:
            vectors = deletion_vectors(plan, shard.schema, fetch_through(portal, objects, whole=False))
            yield from read_planned(plan, vectors, fetch, columns)
            return
        for chosen_range in cut_ranges(found.batches, wanted):
            yield from read_range(shard.schema, chosen_range, found.at, fetch, columns)
    except MissingError as error:
        raise portal.call(shard.explain_missing(error, found.batches)) from error


def plan_read(portal: BlockingPortal, objects: ObjectStore, shard: LogShard, found: ReadSelection) -> ReadPlan | None:
    """Return the plan of a read; None if none exists. Raises as `plan_parts`."""
    try:
        return plan_parts(portal, objects, shard, found.batches, found.at)
    except PlanNotPossibleError:
        return None


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
