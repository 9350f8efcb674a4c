"""`Shard` on its log: the handle of one process. Checks before it asks. What changes no contents is in `read_handle`.

What it relies on: `state_machine` gives states that only move forward; `apply` decides; parts are write-once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import pyarrow as pa

from tidemill.base.errors import InvalidError, UnavailableError, UnknownOutcomeError
from tidemill.base.limits import INLINE_PART_BYTES, MIB
from tidemill.shards.api import Batch, Part, ShardSchema
from tidemill.shards.parts.parts import store_part
from tidemill.shards.parts.schema_evolution import Changes
from tidemill.shards.read.read_handle import ShardReads
from tidemill.shards.state.apply import Reason, Rejected, bounds_error
from tidemill.shards.state.commands import Append, Close, Collected, Drop, Evolve, Replace, Sweep
from tidemill.shards.state.state import ShardState

INLINE_BUDGET_BYTES = 1 * MIB
"""Inline parts a shard's state may hold; beyond it small parts become objects until compaction made room."""

APPEND_ATTEMPTS = 8
APPEND_PAUSE_S = 0.2


class LogShard(ShardReads):
    """See `api.Shard` for the contract. Any number of handles, in any processes, are equals."""

    @cached_property
    def _appending(self) -> asyncio.Lock:
        return asyncio.Lock()

    async def write_part(self, rows: pa.Table, bucket: int = 0) -> Part:
        if not 0 <= bucket < self.schema.buckets:
            raise InvalidError(f"no such bucket: shard={self.name} bucket={bucket} buckets={self.schema.buckets}.")
        return await store_part(
            self._objects,
            self.shard_id,
            self.schema,
            rows,
            writer=self.writer,
            rand=self._rand,
            now_ms=self.stamp_ms(),
            bucket=bucket,
            inline_bytes=INLINE_PART_BYTES if self.state.inline_bytes < INLINE_BUDGET_BYTES else 0,
            cpu=self._cpu,
        )

    def stamp_ms(self) -> int:
        """Now, for the key of a part: never before the last sweep, whatever this process's clock says."""
        return max(self._clock.now_ms(), self.state.swept_ms)

    async def compare_and_append(self, lower: int, upper: int, parts: Sequence[Part], token: str) -> int:
        """See the front. With an empty token a fresh one is drawn: the call itself is then its only retry.

        Raises Conflict(current=int), InvalidError, Closed (the shard takes no more), Evolved, UnavailableError (did not
        happen), UnknownOutcomeError (its token could not be looked up within the attempts: call again with the same
        token).
        """
        token = token or self._rand.nonce()
        batch = Batch(lower, upper, tuple(parts), self.writer, token, schema_version=self.schema.version)
        bad = bounds_error(batch)
        if bad:
            raise InvalidError(f"{bad} shard={self.name}.", fix="Append [lower, upper) with lower = the shard's upper.")
        # One append of a writer at a time: only its newest token is remembered.
        async with self._appending:
            result = await self._propose_append(Append(batch))
        if isinstance(result, Rejected) and result.reason is not Reason.COMMITTED:
            raise self._error(result)
        return upper

    async def _propose_append(self, command: Append) -> ShardState | Rejected:
        """Propose until the outcome is known. The token makes a repeat of what landed a success."""
        unknown: UnknownOutcomeError | None = None
        for attempt in range(APPEND_ATTEMPTS):
            try:
                return await self._machine.propose(command)
            except UnknownOutcomeError as error:
                unknown = error
            except UnavailableError:
                if unknown is None:
                    raise  # nothing was ever in doubt
            await asyncio.sleep(APPEND_PAUSE_S * (attempt + 1))
        assert unknown is not None
        raise UnknownOutcomeError(
            f"append could not be resolved: shard={self.name} token={command.batch.token}.",
            fix="Append again with the same token once consensus answers.",
        ) from unknown

    async def replace(self, command: Replace) -> bool:
        """Put a merged batch in place; False when the batches have moved meanwhile (nothing changed)."""
        result = await self._machine.propose(command)
        if isinstance(result, Rejected):
            if result.reason is Reason.MOVED:
                return False
            raise self._error(result)
        return True

    async def evolve(self, changes: Changes) -> ShardSchema:
        """Give the shard these columns and types; what it has already changes nothing. Returns its newest schema.

        This handle goes on under its own schema: open the shard again. Raises InvalidError (RFC 0003: only new columns
        and wider types), Closed, Missing, Unavailable, Unknown (call again: twice is fine).
        """
        result = await self._machine.propose(Evolve(changes, self._clock.now_ms()))
        if isinstance(result, Rejected):
            if result.reason is not Reason.COMMITTED:
                raise self._error(result)
            return self.state.schema
        return result.schema

    async def close(self) -> None:
        """No append is ever accepted again. Closing twice is fine."""
        result = await self._machine.propose(Close())
        if isinstance(result, Rejected) and result.reason is not Reason.CLOSED:
            raise self._error(result)

    async def drop(self) -> None:
        """Nothing is read or written any more, by any handle. The objects are the caller's to delete. Twice is fine."""
        result = await self._machine.propose(Drop(self.shard_id))
        if isinstance(result, Rejected) and result.reason is not Reason.DROPPED:
            raise self._error(result)

    async def collected(self, version: int) -> None:
        """The objects of the garbage up to `version` are deleted."""
        await self._settle(Collected(version))

    async def sweep(self, before_ms: int) -> ShardState:
        """From now on no part written before can be shown: what nobody refers to of them is an orphan for good."""
        return await self._settle(Sweep(before_ms))

    async def rollup(self) -> None:
        """Write the whole state now, so that the next one who opens the shard reads little else."""
        await self._machine.rollup()

    async def aclose(self) -> None:
        """Let go of the handle: an append under way ends as Unknown. The shard itself is untouched."""
        await self._machine.aclose()


if TYPE_CHECKING:
    from tidemill.shards.api import Shard

    def _is_the_front(handle: LogShard) -> Shard:
        return handle
