"""`Shard` on its log: the handle of one process. Reads and operations that leave the contents unchanged are in
`read_handle`.

Relies on three facts: `state_machine` yields states that only advance; `apply` decides; parts are write-once.
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
from tidemill.shards.parts.parts import PartTarget, store_part
from tidemill.shards.parts.schema_evolution import SchemaChanges
from tidemill.shards.read.read_handle import ShardReadHandle
from tidemill.shards.state.apply import RejectedCommand, RejectionReason, batch_bounds_error
from tidemill.shards.state.commands import Append, Close, Drop, Evolve, MarkCollected, Replace, Sweep
from tidemill.shards.state.state import ShardState

INLINE_BUDGET_BYTES = 1 * MIB
"""Limit for inline parts in a shard's state; above it, small parts become objects until compaction makes room."""

APPEND_ATTEMPTS = 8
APPEND_PAUSE_S = 0.2


class LogShard(ShardReadHandle):
    """Implementation of `api.Shard`. Any number of handles, in any processes, are equals."""

    @cached_property
    def _appending(self) -> asyncio.Lock:
        return asyncio.Lock()

    async def write_part(self, rows: pa.Table, bucket: int = 0) -> Part:
        if not 0 <= bucket < self.schema.buckets:
            raise InvalidError(f"no such bucket: table={self.name} bucket={bucket} buckets={self.schema.buckets}.")
        target = PartTarget(
            self.shard_id,
            self.writer,
            self.part_time_ms(),
            bucket,
            inline_bytes=INLINE_PART_BYTES if self.state.inline_bytes < INLINE_BUDGET_BYTES else 0,
        )
        return await store_part(self._objects, self.schema, rows, target, self._rand, cpu=self._cpu)

    def part_time_ms(self) -> int:
        """Return the current time for the key of a part: never before the last sweep, even if this process's clock
        is.
        """
        return max(self._clock.now_ms(), self.state.swept_ms)

    async def compare_and_append(self, lower: int, upper: int, parts: Sequence[Part], token: str) -> int:
        """Append a batch (see `api.Shard`). An empty token is replaced by a fresh one, so only this call itself can
        retry.

        Raises ConflictError(current=int), InvalidError, ClosedError (the shard is closed), SchemaEvolvedError,
        UnavailableError (did not happen), UnknownOutcomeError (its token could not be looked up within the attempts:
        call again with the same token).
        """
        token = token or self._rand.nonce()
        batch = Batch(lower, upper, tuple(parts), self.writer, token, schema_version=self.schema.version)
        bad = batch_bounds_error(batch)
        if bad:
            raise InvalidError(f"{bad} table={self.name}.", fix="Append [lower, upper) with lower = the table's upper.")
        # One append of a writer at a time, since only its newest token is remembered.
        async with self._appending:
            result = await self._propose_append(Append(batch))
        if isinstance(result, RejectedCommand) and result.reason is not RejectionReason.COMMITTED:
            raise self._states.rejection_error(result)
        return upper

    async def _propose_append(self, command: Append) -> ShardState | RejectedCommand:
        """Propose until the outcome is known. The token makes a repetition of a landed append succeed."""
        unknown: UnknownOutcomeError | None = None
        for attempt in range(APPEND_ATTEMPTS):
            try:
                return await self._machine.propose(command)
            except UnknownOutcomeError as error:
                unknown = error
            except UnavailableError:
                if unknown is None:
                    raise  # the outcome was never in doubt
            await asyncio.sleep(APPEND_PAUSE_S * (attempt + 1))
        assert unknown is not None
        raise UnknownOutcomeError(
            f"append could not be resolved: table={self.name} token={command.batch.token}.",
            fix="Append again with the same token once consensus answers.",
        ) from unknown

    async def replace(self, command: Replace) -> bool:
        """Replace batches by a merged one; False if the batches moved in the meantime (nothing changed)."""
        result = await self._machine.propose(command)
        if isinstance(result, RejectedCommand):
            if result.reason is RejectionReason.MOVED:
                return False
            raise self._states.rejection_error(result)
        return True

    async def evolve(self, changes: SchemaChanges) -> ShardSchema:
        """Add these columns and types to the shard, and return its newest schema. Changes that it already has are
        no-ops.

        This handle retains its own schema: reopen the shard. Raises InvalidError (RFC 0003: only new columns and wider
        types), ClosedError, MissingError, UnavailableError, UnknownOutcomeError (call again: idempotent).
        """
        result = await self._machine.propose(Evolve(changes, self._clock.now_ms()))
        if isinstance(result, RejectedCommand):
            if result.reason is not RejectionReason.COMMITTED:
                raise self._states.rejection_error(result)
            return self.state.schema
        return result.schema

    async def close(self) -> None:
        """Reject all further appends. Idempotent."""
        result = await self._machine.propose(Close())
        if isinstance(result, RejectedCommand) and result.reason is not RejectionReason.CLOSED:
            raise self._states.rejection_error(result)

    async def drop(self) -> None:
        """Reject all further reads and writes, of any handle. The caller deletes the objects. Idempotent."""
        result = await self._machine.propose(Drop(self.shard_id))
        if isinstance(result, RejectedCommand) and result.reason is not RejectionReason.DROPPED:
            raise self._states.rejection_error(result)

    async def mark_collected(self, version: int) -> None:
        """Record that the objects of the garbage up to `version` are deleted."""
        await self._states.propose(MarkCollected(version))

    async def advance_sweep(self, before_ms: int) -> ShardState:
        """Reject all parts written before this time from now on: those without a reference are orphans permanently."""
        return await self._states.propose(Sweep(before_ms))

    async def rollup(self) -> None:
        """Write the whole state now, so that opening the shard reads little else."""
        await self._machine.rollup()

    async def aclose(self) -> None:
        """Close the handle: an append in flight ends with UnknownOutcomeError. The shard itself is unaffected."""
        await self._machine.aclose()


if TYPE_CHECKING:
    from tidemill.shards.api import Shard

    def _is_the_front(handle: LogShard) -> Shard:
        return handle
