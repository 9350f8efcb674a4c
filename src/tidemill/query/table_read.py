"""One read of one shard: its time, its hold, what it reads, and the bytes of that."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

from tidemill.base.errors import MissingError
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.objects.store import ObjectStore
from tidemill.shards.api import Batch, HistoryLostError
from tidemill.shards.read.hash_ranges import cut, read_range
from tidemill.shards.read.holds import HOLD_ABOVE_BYTES
from tidemill.shards.read.part_bytes import fetching

if TYPE_CHECKING:
    import pyarrow as pa

    from tidemill.shards.handle import LogShard

NEWEST_ATTEMPTS = 3
"""How often the newest time is looked up anew, because history moved past it before it was held."""


class Chosen(NamedTuple):
    """`at` -1: nothing was ever written."""

    at: int
    batches: list[Batch]


@asynccontextmanager
async def chosen(shard: LogShard, as_of: int | None, wait_s: float, *, long: bool) -> AsyncIterator[Chosen]:
    """What the contents at `as_of` (None = the newest time) are read from. Inside, it stays readable.

    `long`: the reader may take as long as it likes; else only what is large is held, as for every short read. Raises
    HistoryLostError, Unavailable (not final within `wait_s`), Closed, Unknown.
    """
    async with AsyncExitStack() as stack:
        for attempt in range(NEWEST_ATTEMPTS):
            at = (await shard.frontiers())[1] - 1 if as_of is None else as_of
            try:
                batches = await shard.batches_until(at, wait_s) if at >= 0 or as_of is not None else []
                if not batches or not (long or _size_bytes(batches) > HOLD_ABOVE_BYTES):
                    break
                await stack.enter_async_context(shard.holding("python", at))
                batches = await shard.batches_until(at)  # held first, then chosen (A1)
                break
            except HistoryLostError:
                if as_of is not None or attempt == NEWEST_ATTEMPTS - 1:
                    raise
        yield Chosen(at, batches)


def _size_bytes(batches: Sequence[Batch]) -> int:
    return sum(part.size_bytes for batch in batches for part in batch.parts)


def rows_of(
    portal: BlockingPortal,
    objects: ObjectStore,
    shard: LogShard,
    found: Chosen,
    columns: Sequence[str],
    wanted: list[int] | None,
) -> Iterator[pa.Table]:
    """`columns` of the contents, by ranges of the hash; `wanted`: of rows with these hashes alone. Raises
    HistoryLostError, Corrupt, Unavailable."""
    fetch = fetching(portal, objects, whole=len(columns) == len(shard.schema.columns))
    try:
        for chosen_range in cut(found.batches, wanted):
            yield from read_range(shard.schema, chosen_range, found.at, fetch, columns)
    except MissingError as error:
        raise portal.call(shard.why_missing(error, found.batches)) from error
