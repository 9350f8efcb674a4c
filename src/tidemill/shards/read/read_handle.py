"""A shard's handle, for readers: holds, snapshots, batches, listeners.

Relies on two facts: `state_machine` yields states that only advance; parts are write-once.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pyarrow as pa

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import CorruptError, MissingError, TidemillError
from tidemill.base.limits import MIB
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.objects.store import Buffer, ObjectStore
from tidemill.shards.api import HASH, Batch, Delta, HistoryLostError, Part, RunCpuWork, ShardSchema, run_inline
from tidemill.shards.parts.consolidate import sum_contents
from tidemill.shards.read.hash_ranges import FetchPart
from tidemill.shards.read.holds import HOLD_ABOVE_BYTES, hold_during
from tidemill.shards.read.part_reader import CACHE_BYTES, PartReader, fetch_through, read_part_bytes
from tidemill.shards.read.state_reader import WAIT_SLICE_S, StateReader
from tidemill.shards.state.commands import DowngradeSince, ReleaseHold, SetHold
from tidemill.shards.state.state import ShardState
from tidemill.shards.state.state_machine import ShardMachine

LISTEN_AHEAD_BYTES = 32 * MIB
LISTEN_AHEAD_BATCHES = 32
"""Limits of what a listener that catches up fetches at a time."""


class ShardReadHandle:
    """The part of `api.Shard` that does not change contents."""

    def __init__(
        self,
        machine: ShardMachine,
        objects: ObjectStore,
        clock: Clock,
        rand: Rand,
        *,
        cpu: RunCpuWork = run_inline,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self.name = machine.state.name
        self.shard_id = machine.state.shard_id
        self.schema = machine.state.schema
        self.writer = f"w{rand.nonce()[:12]}"
        """Name of this handle as a writer, unique among all handles."""
        self.reader = PartReader(objects, self.schema, cache_bytes=cache_bytes, cpu=cpu)
        self._machine = machine
        self._states = StateReader(machine)
        self._objects = objects
        self._clock = clock
        self._rand = rand
        self._cpu = cpu

    @property
    def state(self) -> ShardState:
        """The state as last seen; it may be old, but never contradicts the log."""
        return self._states.state

    def reader_under(self, schema: ShardSchema) -> PartReader:
        """Return a reader of parts under any version of the shard's schema."""
        return self.reader if schema == self.schema else PartReader(self._objects, schema, cache_bytes=0, cpu=self._cpu)

    # holds ------------------------------------------------------------------------------------------

    async def set_hold(self, reader: str, since: int, ttl_ms: int) -> None:
        """Keep every time ≥ since readable for `ttl_ms`. Repeat to renew or to advance the hold.

        Raises HistoryLostError below since.
        """
        now_ms = self._clock.now_ms()
        await self._states.propose(SetHold(reader, since, now_ms + ttl_ms, now_ms))

    async def release_hold(self, reader: str) -> None:
        await self._states.propose(ReleaseHold(reader, self._clock.now_ms()))

    async def downgrade_since(self, owner: str, epoch: int, since: int) -> int:
        """Advance critical hold `owner` to `since`; return the shard's since, the minimum of all holds.

        Raises FencedError if a newer epoch owns the hold.
        """
        return (await self._states.propose(DowngradeSince(owner, epoch, since, self._clock.now_ms()))).since

    # reading ----------------------------------------------------------------------------------------

    async def frontiers(self, *, fresh: bool = True) -> tuple[int, int]:
        state = await self._states.refresh() if fresh else self.state
        return state.since, state.upper

    async def snapshot(self, as_of: int, timeout_s: float | None = None) -> pa.Table:
        """Return the contents at `as_of` (see `api.Shard`). Waits indefinitely without a timeout.

        Raises HistoryLostError below since, UnavailableError if `as_of` is not final after timeout_s.
        """
        updates = await self.updates_until(as_of, timeout_s)
        return await self._cpu(lambda: sum_contents(self.schema, updates))

    async def updates_until(self, as_of: int, timeout_s: float | None = None) -> pa.Table:
        """Return every update with time ≤ as_of, as stored (columns, `_time`, `_diff`, `_hash`), to be summed.

        A large read holds its time first, and then chooses its batches.
        """
        async with self.batches_held_until(as_of, timeout_s) as batches:
            try:
                return await self.reader.read_batches(batches, 0, as_of + 1)
            except MissingError as error:
                raise await self.explain_missing(error, batches) from error

    @asynccontextmanager
    async def batches_held_until(self, as_of: int, timeout_s: float | None = None) -> AsyncIterator[list[Batch]]:
        """Yield the batches with every update of time ≤ as_of, to be read inside the context. A large read is held."""
        batches = await self.batches_until(as_of, timeout_s)
        if _size(batches) <= HOLD_ABOVE_BYTES:
            yield batches
            return
        async with self.hold_during("read", as_of):
            yield await self.batches_until(as_of)

    async def fetch(self, part: Part, chosen: Sequence[Batch]) -> Buffer:
        """Return the encoded bytes of a part of one of the batches.

        Raises HistoryLostError, CorruptError, UnavailableError.
        """
        try:
            return await read_part_bytes(self._objects, part)
        except MissingError as error:
            raise await self.explain_missing(error, chosen) from error

    def fetch_through(self, portal: BlockingPortal, *, whole: bool = False) -> FetchPart:
        """Return the function with which synchronous readers fetch parts (`part_reader.fetch_through`). A missing
        object raises MissingError: see `explain_missing`."""
        return fetch_through(portal, self._objects, whole=whole)

    async def explain_missing(self, error: MissingError, batches: Sequence[Batch]) -> TidemillError:
        """Explain a missing object of the chosen batches: it was deleted since (read again), or is lost
        (CorruptError).
        """
        state = await self._states.refresh()
        named = {part.object_key for batch in state.batches for part in batch.parts}
        chosen = {part.object_key for batch in batches for part in batch.parts if part.object_key}
        if chosen <= named:
            return CorruptError(
                f"an object of a table is missing: table={self.name} ({error.message}).", fix="Restore the object."
            )
        return HistoryLostError(
            f"the chosen batches were merged and deleted in the meantime: table={self.name}.",
            fix="Read again, and hold the time for as long as the read takes.",
        )

    def hold_during(self, what: str, since: int) -> AbstractAsyncContextManager[None]:
        return hold_during(self, self.reader_name(what), since)

    def reader_name(self, what: str) -> str:
        """Return a name for one hold of this handle."""
        return f"{what}/{self.writer}-{self._rand.nonce()[:8]}"

    async def batches_until(self, as_of: int, timeout_s: float | None = None) -> list[Batch]:
        state = await self._states.wait_readable(as_of, timeout_s)
        return [b for b in state.batches if b.lower <= as_of]

    async def batches(self, lower: int) -> list[Batch]:
        # Choice and check use one state: since may move, and compaction with it, before the caller's next call.
        state = await self._states.refresh()
        self._states.check_history(state, lower)
        return _batches_from(state, lower)

    async def read_batch(self, batch: Batch, lower: int, upper: int) -> pa.Table:
        """Read a batch (see `api.Shard`). The rows include `_hash`, and each part's rows are sorted by it."""
        try:
            return await self.reader.read_batch(batch, lower, upper)
        except MissingError as error:
            raise await self.explain_missing(error, [batch]) from error

    async def listen(self, lower: int) -> AsyncIterator[Delta]:
        """Yield updates (see `api.Shard`). Raises HistoryLostError if history at `lower` is lost, at the start or later
        (no hold).

        Ends when the shard is closed and everything was yielded.

        Rows that compaction moved are never seen twice: it moves times only up to since, and a listener is stopped once
        since reaches its frontier; everything else is filtered by time.
        """
        frontier = lower
        state = await self._states.refresh()
        while True:
            self._states.check_history(state, frontier)
            async with self._batches_to_listen(_batches_from(state, frontier), frontier) as ready:
                for group in _fetch_groups(ready):
                    tables = await asyncio.gather(*(self.read_batch(b, frontier, b.upper) for b in group))
                    for batch, rows in zip(group, tables, strict=True):
                        start, frontier = max(frontier, batch.lower), batch.upper
                        yield Delta(start, batch.upper, rows.drop_columns([HASH]))
            if state.closed and frontier >= state.upper:
                return
            state = await self._states.wait_beyond(frontier, WAIT_SLICE_S)

    @asynccontextmanager
    async def _batches_to_listen(self, ready: list[Batch], frontier: int) -> AsyncIterator[list[Batch]]:
        """Yield the batches that a listener reads next; many of them are chosen again under a hold.

        The hold is one tick behind the frontier, since a listener must distinguish frontier - 1 from frontier.
        """
        if _size(ready) <= HOLD_ABOVE_BYTES:
            yield ready
            return
        async with self.hold_during("listen", max(0, frontier - 1)):
            state = await self._states.refresh()
            self._states.check_history(state, frontier)
            yield _batches_from(state, frontier)

    async def wait_upper(self, beyond: int, timeout_s: float) -> int:
        return (await self._states.wait_beyond(beyond, timeout_s)).upper


def _batches_from(state: ShardState, lower: int) -> list[Batch]:
    at = bisect_right(state.batches, lower, key=lambda b: b.upper)
    return list(state.batches[at:])


def _size(batches: Sequence[Batch]) -> int:
    return sum(part.size_bytes for batch in batches for part in batch.parts)


def _fetch_groups(batches: Sequence[Batch]) -> list[list[Batch]]:
    """Split batches into runs that a listener that catches up may fetch together."""
    out: list[list[Batch]] = []
    held = 0
    for batch in batches:
        size = _size([batch])
        if not out or held + size > LISTEN_AHEAD_BYTES or len(out[-1]) >= LISTEN_AHEAD_BATCHES:
            out.append([])
            held = 0
        out[-1].append(batch)
        held += size
    return out
