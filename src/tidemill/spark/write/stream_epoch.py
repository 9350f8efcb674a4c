"""Epoch of a streaming query: decide whether it was appended before, however long ago.

    register of (shard, query)    the newest epoch that was begun, whether it is done, and the version of the shard's
                                  state when it was begun (`shards.state.stream_registers`)

Spark repeats the last epoch of a query after a crash, with the same rows, and begins an epoch only after the one before
was committed. All appends of a query have one writer, so the shard's state has the token of the newest one, until 64
other writers have appended. Beyond that the register decides. Only if a process died between the append and the
register's change, and 64 others appended before the next one started, is the outcome unknown, and reported as such.

A restore has no registers, and may lack the newest epochs, which the query will not repeat. So a query whose next epoch
does not follow the one that the restored shard knows is refused.

Invariant (begun first): the register has the epoch before the epoch's first append is tried.
"""

from __future__ import annotations

from typing import NamedTuple

import structlog

from tidemill.base.errors import InvalidError, TidemillError, UnknownOutcomeError
from tidemill.shards.handle import LogShard
from tidemill.shards.state.state import WRITER_TOKENS_MAX, ShardState
from tidemill.shards.state.stream_registers import (
    BEFORE_FIRST_EPOCH,
    QUERIES_MAX,
    QueryProgress,
    count_queries,
    is_restored,
    read_progress,
    stream_register,
    write_progress,
)
from tidemill.spark.stores import Stores
from tidemill.spark.write import WRITES

log = structlog.get_logger()


class StreamEpoch(NamedTuple):
    query_id: str
    number: int

    @property
    def job(self) -> str:
        return f"{self.query_id}-{self.number}"

    @property
    def writer(self) -> str:
        return f"{WRITES}-{self.query_id}"

    def appended_upper(self, state: ShardState) -> int | None:
        """Return the upper after the append of this epoch, or of a later one; None if the state has none."""
        for known in state.writers:
            if known.writer == self.writer and _epoch_of(known.token) >= self.number:
                return known.upper
        return None

    async def begin_epoch(self, stores: Stores, shard: LogShard) -> bool:
        """Return whether the epoch must be appended, after recording that it is begun; False if it was appended.

        Called if `appended_upper` found nothing in the newest state. Raises UnknownOutcomeError if the state no longer
        shows what happened to an epoch that was begun, ConflictError if another process has begun one now, InvalidError
        if too many queries have written the table.
        """
        key, state = self._register(shard), shard.state
        found = await read_progress(stores.consensus, key)
        if found is None:
            await self._check_first(stores, shard)
        last, seq = found or (BEFORE_FIRST_EPOCH, 0)
        if last.epoch > self.number or (last.epoch == self.number and last.is_done):
            return False
        if last.epoch < self.number:
            begun = QueryProgress(self.number, False, state.version)
            await write_progress(stores.consensus, key, begun, seq, stores.rand.nonce())
        elif len(state.writers) >= WRITER_TOKENS_MAX and state.version - last.version >= WRITER_TOKENS_MAX:
            raise UnknownOutcomeError(
                f"it is no longer known whether an epoch was written: table={shard.name} query={self.query_id}"
                f" epoch={self.number}. Many others wrote to the table since the query ended.",
                fix="Compare the table with the query's input, and start the query with a new checkpointLocation.",
            )
        return True

    async def _check_first(self, stores: Stores, shard: LogShard) -> None:
        """Check the first epoch of a query that has no register. Raises UnknownOutcomeError if a restore may have lost
        epochs of the query, InvalidError if too many queries have written the shard."""
        known = max((_epoch_of(w.token) for w in shard.state.writers if w.writer == self.writer), default=-1)
        if self.number > known + 1 and await is_restored(stores.consensus, shard.shard_id):
            raise UnknownOutcomeError(
                f"the table was restored, and it is not known which epochs it has: table={shard.name}"
                f" query={self.query_id} epoch={self.number} newest_known={known}.",
                fix="Start the query with a new checkpointLocation: it writes its input again, which repairs the rows.",
            )
        if await count_queries(stores.consensus, shard.shard_id) >= QUERIES_MAX:
            raise InvalidError(
                f"too many streaming queries have written the table: table={shard.name} limit={QUERIES_MAX}.",
                fix="Keep the checkpointLocation of a query, use foreachBatch with tidemill.spark.upsert, or re-create"
                " the table.",
            )

    async def end(self, stores: Stores, shard: LogShard) -> None:
        """Record that the epoch is appended. A failure is only logged: the state still has the token."""
        key = self._register(shard)
        try:
            found = await read_progress(stores.consensus, key)
            if found is not None and found[0].epoch == self.number:
                done = found[0]._replace(is_done=True)
                await write_progress(stores.consensus, key, done, found[1], stores.rand.nonce())
        except TidemillError as error:
            log.info("end of epoch not recorded", table=shard.name, query=self.query_id, cause=str(error))

    def _register(self, shard: LogShard) -> str:
        return stream_register(shard.shard_id, self.query_id)


def _epoch_of(token: str) -> int:
    return int(token.rpartition("-")[2])
