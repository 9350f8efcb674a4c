"""Writer of one output table: the shard, the operator on its mirror, and the append between them; and the progress of
its catch-up, which the driver publishes with its stage statuses.

Called by one thread at a time (a query's). I/O runs on the portal's loop; computing stays on the caller's thread, so
that a merge never delays status updates and consensus.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pyarrow as pa

from tidemill.base.clock import Clock
from tidemill.base.errors import (
    AS_RETAINED,
    ConflictError,
    CorruptError,
    InvalidError,
    UnavailableError,
    drop_table_command,
)
from tidemill.base.runtime.blocking_portal import BlockingPortal, SyncContext
from tidemill.objects.store import Buffer
from tidemill.shards.api import HistoryLostError, Part, ShardSchema
from tidemill.shards.handle import LogShard
from tidemill.shards.parts.key_hash import has_unnormalized_keys
from tidemill.spark.formats.record_format import PLAIN
from tidemill.spark.formats.schemas.lookup import writer_schemas
from tidemill.spark.ingest.dead_letters import DeadLetterRun
from tidemill.spark.ingest.fetch_decode import mirror_identity
from tidemill.spark.ingest.sources import TopicFeed
from tidemill.spark.merge.mirror import Mirror, build_mirror
from tidemill.spark.merge.operator import UpsertOperator
from tidemill.spark.merge.resolve import KeyChanges, Resolved
from tidemill.spark.predicates.expectations import Violations, expectation_check
from tidemill.spark.stores import Stores
from tidemill.spark.tombstones import Tombstones

SAVE_EVERY = 500
"""Appends between two saves of the mirror: the most that a restart after a crash has to read again."""

REBUILD_ATTEMPTS = 5

RATE_OVER_S = 10.0


class CatchUpProgress:
    """Catch-up of a table: records read by this process, records remaining, and the estimated time.

    `read` never decreases, so a stage status can show it as movement while one time takes long (status.progress).
    """

    def __init__(self, clock: Clock) -> None:
        self.read = 0
        self.to_go = 0
        self._clock = clock
        self._since_s = clock.monotonic_s()
        self._at_since = 0
        self._per_s = 0.0

    def start(self, to_go: int) -> None:
        self.to_go = to_go

    def add(self, records: int) -> None:
        self.read += records
        self.to_go = max(0, self.to_go - records)
        passed_s = self._clock.monotonic_s() - self._since_s
        if passed_s > RATE_OVER_S or (self._per_s == 0.0 and passed_s > 0.5):
            self._per_s = (self.read - self._at_since) / passed_s
            self._since_s, self._at_since = self._clock.monotonic_s(), self.read

    @property
    def eta_s(self) -> float | None:
        return self.to_go / self._per_s if self._per_s > 0 else None

    def sentence(self) -> str:
        """Return the progress as a sentence, "" if nothing remains."""
        eta_s = self.eta_s
        about = f", about {eta_s:.0f} s" if eta_s is not None else ""
        return f"catching up: {self.read:,} records read, {self.to_go:,} to go{about}" if self.to_go else ""


class TableWriter:
    """Writer of one table. `won` and `lost` count compare-and-appends; `feed` is None for derived tables."""

    def __init__(
        self,
        portal: BlockingPortal,
        stores: Stores,
        shard: LogShard,
        mirror_dir: Path,
        feed: TopicFeed | None = None,
    ) -> None:
        self.portal = portal
        self.stores = stores
        self.shard = shard
        self.feed = feed
        self.schemas = writer_schemas(portal, stores, feed.record_format if feed is not None else PLAIN)
        """Schemas of the writers of its topic, by id."""
        self.outgrown = False
        """True if its input has a new description: it must be detached and opened again."""
        self.mirror_dir = mirror_dir
        self.won = 0
        self.lost = 0
        self.rows = 0
        self.progress = CatchUpProgress(stores.clock)
        self.dead_run = DeadLetterRun()
        self._tokens = 0
        self._prefix = stores.rand.nonce()
        self.check = expectation_check(shard.schema, feed.expectations if feed is not None else None)
        self.violations: dict[str, int] = {}
        """Expectation → records that violate it, in the appends that this process won."""
        if self.check is not None:
            self.violations = {rule.name: 0 for rule in self.check.expectations.rules}
        rule = feed.record_format.sequence_rule if feed is not None else None
        self.tombstones = Tombstones(portal, stores, shard, rule, mirror_dir) if rule is not None else None
        """Tombstones, if the table has a sequence."""
        self.late = self.revived = 0
        """Late records, and records that would have been late if a tombstone had not expired, in the appends that this
        process won (merge/sequence.py)."""
        self.operator = self._operator(Mirror(shard.schema, directory=mirror_dir))

    @property
    def name(self) -> str:
        return self.shard.name

    @property
    def schema(self) -> ShardSchema:
        return self.shard.schema

    @property
    def upper(self) -> int:
        """Upper of this writer's mirror: at most the shard's."""
        return self.operator.upper

    def _operator(self, mirror: Mirror) -> UpsertOperator:
        sequence = self.tombstones.sequence if self.tombstones is not None else None
        return UpsertOperator(self.schema, mirror, check=self.check, sequence=sequence)

    def count_violations(self, found: Iterable[Violations], upper: int) -> None:
        """Count violations of an append up to `upper` that this writer won."""
        if self.check is not None:
            rules = self.check.expectations.rules
            for each in found:
                if each.time_ms < upper:
                    self.violations[rules[each.rule].name] += each.count

    # following --------------------------------------------------------------------------------------
    def hydrate(self) -> None:
        """Bring the mirror to the shard's upper, from the cache on disk if it can be trusted, else from the shard.

        Raises InvalidError if a table of records has keys in the shard in a form that no record has any more: each such
        key would get a second row.
        """
        saved = Mirror.load(
            self.mirror_dir, self.schema, self.shard.shard_id, mirror_identity(self.stores.consensus_life)
        )
        if saved is not None:
            self.operator = self._operator(saved)
        self.operator.mirror.sweep()  # files of an earlier process: it may have been killed again and again
        self.follow()
        key, mirror = self.schema.key, self.operator.mirror
        # Runs first: only if one of them is in doubt is it worth reading every live row.
        doubtful = self.feed is not None and any(has_unnormalized_keys(run.rows, key) for run in mirror.runs)
        if doubtful and has_unnormalized_keys(mirror.live_rows(), key):
            raise InvalidError(
                f"the table has keys that an earlier release wrote, -0.0 or a NaN of other bits: table={self.name}.",
                fix=f"Drop the table; the pipeline re-creates it from the topic, {AS_RETAINED}:"
                f" {drop_table_command(self.name)}",
            )

    def follow(self) -> bool:
        """Apply what any writer appended since the mirror's upper; return whether it had rows."""
        _, upper = self.portal.call(self.shard.frontiers())
        at = self.operator.upper
        if upper == at:
            return False
        if upper < at:
            raise CorruptError(
                f"the table's upper went back: table={self.name} mirror={at} upper={upper}.",
                fix="Restart the pipeline with a fresh scratch directory: the table was re-created or restored.",
            )
        try:
            # An empty mirror is built from the contents: following the history would read as much as the shard has.
            batches = self.portal.call(self.shard.batches(at)) if at else None
        except HistoryLostError:
            batches = None
        if batches is None:
            self._rebuild_mirror()
            return True
        had_rows = False
        try:
            for batch in batches:
                if batch.upper <= self.operator.upper:
                    continue
                lower = self.operator.upper
                rows = self.portal.call(self.shard.read_batch(batch, lower, batch.upper))
                self.operator.apply_peer(rows, lower, batch.upper)
                self._save_if_outdated()
                if rows.num_rows:
                    had_rows = True
                    self.dead_run = DeadLetterRun()  # a peer had good records, and reports those after them
        except HistoryLostError:
            self._rebuild_mirror()
            return True
        return had_rows

    def _rebuild_mirror(self) -> None:
        """Build a new mirror from the shard's contents, because the changes since the old one are no longer
        available."""
        for _ in range(REBUILD_ATTEMPTS):
            self.operator.mirror.sweep()  # files of an attempt that was interrupted
            _, upper = self.portal.call(self.shard.frontiers())
            try:
                mirror = self._read_mirror(upper)
                break
            except HistoryLostError:
                continue  # since advanced past the time in the meantime: read at a newer one
        else:
            raise UnavailableError(f"the table's history expires while it is read: table={self.name}.")
        kept = self.operator
        self.operator = self._operator(mirror)
        self.operator.adopt_stash(kept)
        mirror.sweep()

    def _read_mirror(self, upper: int) -> Mirror:
        """Build a mirror of the contents at upper - 1 on the caller's thread: a large one takes minutes."""
        shard = self.shard
        with SyncContext(self.portal, shard.batches_held_until(upper - 1)) as batches:

            def fetch(part: Part) -> Buffer:
                return self.portal.call(shard.fetch(part, batches))

            return build_mirror(self.schema, batches, upper, fetch, self.mirror_dir)

    # writing ----------------------------------------------------------------------------------------
    def next_token(self) -> str:
        """Return the permanent name of one append: repeating it is harmless, and no two appends share it."""
        self._tokens += 1
        return f"{self._prefix}-{self._tokens}"

    def follow_tombstones(self) -> None:
        """Bring the tombstones up to date with the mirror, before a step is resolved."""
        if self.tombstones is not None:
            self.tombstones.follow(self.upper)

    def put_tombstones(self, found: Sequence[Resolved]) -> None:
        """Store the tombstones of a step, before its append. If a peer was first, they are void, and so is the
        append."""
        if self.tombstones is not None:
            new = [each.tombstones for each in found if each.tombstones is not None]
            if new:
                self.tombstones.put(pa.concat_tables(new), found[0].lower)

    async def write(self, updates: pa.Table) -> tuple[Part, ...]:
        return (await self.shard.write_part(updates),) if updates.num_rows else ()

    async def append(self, lower: int, upper: int, parts: Sequence[Part]) -> bool:
        """Append by one compare-and-append; False if a peer was first.

        Raises UnavailableError, UnknownOutcomeError: compute again; an append by a peer, or our own success that we did
        not learn of, then shows as lost. Its content is the same whichever writer appended it. Parts of a lost append
        stay as orphans: nothing is deleted.
        """
        try:
            await self.shard.compare_and_append(lower, upper, parts, self.next_token())
        except ConflictError:
            self.lost += 1
            return False
        self.won += 1
        return True

    def close(self) -> None:
        """Close the shards."""
        if self.tombstones is not None:
            self.tombstones.close()
        self.portal.call(self.shard.aclose())

    def committed(self, pending: Resolved) -> None:
        self.operator.committed(pending)
        self.count_late([pending])
        self.rows += pending.updates.num_rows
        if self.won % SAVE_EVERY == 0:
            self.save()
        self._save_if_outdated()

    def count_late(self, found: Iterable[Resolved]) -> None:
        """Count the late records of an append that this writer won, and remove expired tombstones."""
        for each in found:
            self.late += each.late
            self.revived += each.revived
        if self.tombstones is not None:
            self.tombstones.sweep(self.upper)

    def apply_external(self, changes: KeyChanges, lower: int, upper: int, rows: int) -> None:
        """Apply changes that were computed elsewhere and whose append [lower, upper) landed."""
        self.operator.mirror.advance(changes, lower, upper)
        self.operator.advance(upper)
        self.rows += rows
        self._save_if_outdated()

    def _save_if_outdated(self) -> None:
        """Save once merged files take much space, so that the manifest names their replacements and they are
        deleted."""
        if self.operator.mirror.is_outdated:
            self.save()

    def save(self) -> None:
        """Save the mirror, so that other processes of this machine can open it."""
        self.operator.mirror.save(self.shard.shard_id, mirror_identity(self.stores.consensus_life))
