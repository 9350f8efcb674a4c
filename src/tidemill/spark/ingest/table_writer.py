"""One output table of one writer: the shard, the operator on its mirror, and the append between them.

Called by one thread at a time (a query's). I/O goes through the portal's loop; computing stays on the
caller's thread, so that marks and consensus are never kept waiting by a merge.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from tidemill.base.errors import ConflictError, CorruptError, InvalidError, UnavailableError
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.base.runtime.sync_context import SyncContext
from tidemill.objects.store import Buffer
from tidemill.shards.api import HistoryLostError, Part, ShardSchema
from tidemill.shards.handle import LogShard
from tidemill.shards.parts.key_hash import spelled_otherwise
from tidemill.spark.ingest.dead_letter_run import DeadRun
from tidemill.spark.ingest.fetch_decode import saved_under
from tidemill.spark.ingest.sources import TopicFeed
from tidemill.spark.progress import Progress
from tidemill.spark.stores import Stores
from tidemill.spark.upsert.hydrate import mirror_of
from tidemill.spark.upsert.mirror import Mirror
from tidemill.spark.upsert.operator import Fault, Upsert
from tidemill.spark.upsert.resolve import KeyChanges, Resolved

SAVE_EVERY = 500
"""Appends between two saves of the mirror: what a restart after a crash has to read again is that much at most."""

START_ATTEMPTS = 5


class TableWriter:
    """`won` and `lost` count compare-and-appends; `feed` is None for derived tables."""

    def __init__(
        self,
        portal: BlockingPortal,
        stores: Stores,
        shard: LogShard,
        mirror_dir: Path,
        feed: TopicFeed | None = None,
        fault: Fault = Fault.NONE,
    ) -> None:
        self.portal = portal
        self.stores = stores
        self.shard = shard
        self.feed = feed
        self.outgrown = False
        """Its input is described anew: it is to leave its seat and be opened again."""
        self.mirror_dir = mirror_dir
        self.won = 0
        self.lost = 0
        self.rows = 0
        self.progress = Progress(stores.clock)
        self.dead_run = DeadRun()
        self._fault = fault
        self._tokens = 0
        self._prefix = stores.rand.nonce()
        self.operator = Upsert(shard.schema, Mirror(shard.schema, directory=mirror_dir), fault=fault)

    @property
    def name(self) -> str:
        return self.shard.name

    @property
    def schema(self) -> ShardSchema:
        return self.shard.schema

    @property
    def upper(self) -> int:
        """The upper this writer's mirror is at: at most the shard's."""
        return self.operator.upper

    # following --------------------------------------------------------------------------------------
    def hydrate(self) -> None:
        """Bring the mirror to the shard's upper: from the cache on disk if there is one to trust, else anew.

        Raises InvalidError for a table of records whose shard has keys in a spelling that no record has any more: each
        would get a second row.
        """
        saved = Mirror.load(self.mirror_dir, self.schema, self.shard.shard_id, saved_under(self.stores.life))
        if saved is not None:
            self.operator = Upsert(self.schema, saved, fault=self._fault)
        self.operator.mirror.sweep()  # what an earlier life left: it may have been cut off again and again
        self.follow()
        key, mirror = self.schema.key, self.operator.mirror
        # The runs first: only one in doubt is worth to read every live row for.
        doubtful = self.feed is not None and any(spelled_otherwise(run.rows, key) for run in mirror.runs)
        if doubtful and spelled_otherwise(mirror.live_rows(), key):
            raise InvalidError(
                f"the shard has keys that an earlier release wrote, -0.0 or a NaN of other bits: shard={self.name}.",
                fix=f"Drop it, and the pipeline makes it anew: tidemill shard drop {self.name}",
            )

    def follow(self) -> bool:
        """Apply what the shard accepted since the mirror's upper, whoever wrote it; whether it had rows."""
        _, upper = self.portal.call(self.shard.frontiers())
        at = self.operator.upper
        if upper == at:
            return False
        if upper < at:
            raise CorruptError(
                f"the shard's upper went back: shard={self.name} mirror={at} upper={upper}.",
                fix="The shard was recreated or restored: restart the pipeline with a fresh scratch directory.",
            )
        try:
            # An empty mirror is made from contents: its history is as long as the shard's.
            batches = self.portal.call(self.shard.batches(at)) if at else None
        except HistoryLostError:
            batches = None
        if batches is None:
            self._start_over()
            return True
        had_rows = False
        try:
            for batch in batches:
                if batch.upper <= self.operator.upper:
                    continue
                lower = self.operator.upper
                rows = self.portal.call(self.shard.read_batch(batch, lower, batch.upper))
                self.operator.feedback(rows, lower, batch.upper)
                self._forget_merged()
                if rows.num_rows:
                    had_rows = True
                    self.dead_run = DeadRun()  # a peer met good records, and tells what came after them
        except HistoryLostError:
            self._start_over()
            return True
        return had_rows

    def _start_over(self) -> None:
        """A new mirror from the shard's contents: what changed since the old one can no longer be told."""
        for _ in range(START_ATTEMPTS):
            self.operator.mirror.sweep()  # what an attempt left that was cut off
            _, upper = self.portal.call(self.shard.frontiers())
            try:
                mirror = self._read(upper)
                break
            except HistoryLostError:
                continue  # since passed the time in between: read at a newer one
        else:
            raise UnavailableError(f"the shard's history is forgotten while it is read: shard={self.name}.")
        kept = self.operator
        self.operator = Upsert(self.schema, mirror, fault=self._fault)
        self.operator.adopt(kept)
        mirror.sweep()

    def _read(self, upper: int) -> Mirror:
        """A mirror of the contents at upper - 1, made on the caller's thread: a large one takes minutes."""
        shard = self.shard
        with SyncContext(self.portal, shard.chosen_until(upper - 1)) as batches:

            def fetch(part: Part) -> Buffer:
                return self.portal.call(shard.fetch(part, batches))

            return mirror_of(self.schema, batches, upper, fetch, self.mirror_dir)

    # writing ----------------------------------------------------------------------------------------
    def token(self) -> str:
        """Names one append for good: repeating it is harmless, and no two appends share it."""
        self._tokens += 1
        return f"{self._prefix}-{self._tokens}"

    async def write(self, updates: pa.Table) -> tuple[Part, ...]:
        return (await self.shard.write_part(updates),) if updates.num_rows else ()

    async def append(self, lower: int, upper: int, parts: Sequence[Part]) -> bool:
        """Our one compare-and-append; False when a peer was first.

        Raises UnavailableError, Unknown: to be computed again, where a peer or our own lost success then shows as lost.
        Whoever wrote the interval, its content is the same. Parts that did not get in stay as orphans: nothing is
        deleted (U4).
        """
        try:
            await self.shard.compare_and_append(lower, upper, parts, self.token())
        except ConflictError:
            self.lost += 1
            return False
        self.won += 1
        return True

    def committed(self, pending: Resolved) -> None:
        self.operator.committed(pending)
        self.rows += pending.updates.num_rows
        if self.won % SAVE_EVERY == 0:
            self.save()
        self._forget_merged()

    def took(self, changes: KeyChanges, lower: int, upper: int, rows: int) -> None:
        """Our append [lower, upper) of what was computed elsewhere landed."""
        self.operator.mirror.advance(changes, lower, upper)
        self.operator.advance(upper)
        self.rows += rows
        self._forget_merged()

    def _forget_merged(self) -> None:
        """Files that were merged go once they weigh something: a save makes the manifest name what replaced them."""
        if self.operator.mirror.outdated:
            self.save()

    def save(self) -> None:
        """Let other processes of this machine open the mirror."""
        self.operator.mirror.save(self.shard.shard_id, saved_under(self.stores.life))
