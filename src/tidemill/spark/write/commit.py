"""Commit of a write: compare staged rows with the shard's contents, range by range, and publish one append.

Invariant (atomic and idempotent): one append publishes all rows at one time, or none of them. Its token is the job's,
so a repeated commit finds the token and is done. The job of a streaming query is one epoch (stream_epoch.py).
Invariant (exact lower): updates are computed at exactly the upper that the append names. After a lost race the contents
are read and all updates computed again.
Invariant (quiet time): a shard that a pipeline maintains is written by others only when the user requests it
(`beside`), and only at a time to which the pipeline's sources bind nothing. An append covers a whole interval of times,
and the updates of the pipeline for that interval are then dropped (below the upper). So a write uses an interval of one
ms to which every source of the table is known to bind nothing.

Writers take turns, so that a writer of many rows is not overtaken indefinitely by writers of few. A turn is a lease
that only saves work. Memory holds one range: its rows, the shard's rows of that range, and the updates of a part.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

import msgspec
import pyarrow as pa
import structlog

from tidemill.base.errors import ConflictError, InvalidError, MissingError, UnavailableError
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.metastore.catalogue import PipelineRow
from tidemill.metastore.rows.catalogue import source_of
from tidemill.shards.api import HASH, Batch, HistoryLostError, Part, Remap, SchemaEvolvedError, ShardSchema
from tidemill.shards.handle import LogShard
from tidemill.shards.parts.arrow_rows import to_mask
from tidemill.shards.parts.schema import conform_rows, contents_schema
from tidemill.shards.read.hash_ranges import RANGE_BYTES, RANGE_ROWS, RANGES_MAX, range_between, read_range
from tidemill.shards.read.holds import HOLD_TTL_MS, MovingHold
from tidemill.shards.read.part_reader import fetch_through
from tidemill.shards.registry import table_of_tombstones
from tidemill.spark.merge.commands import LIVE, Commands
from tidemill.spark.merge.diff import check_distinct, diff_commands, rows_as_commands
from tidemill.spark.merge.mirror import Mirror
from tidemill.spark.merge.range_mirror import HashRange
from tidemill.spark.merge.resolve import resolve
from tidemill.spark.stores import Stores
from tidemill.spark.write import WRITES
from tidemill.spark.write.schema_match import WriteFrame, required_schema
from tidemill.spark.write.staging import STAGE_BYTES, Staged, read_staged_rows
from tidemill.spark.write.stream_epoch import StreamEpoch
from tidemill.spark.write.write_lease import WriteLease

POINT_LOOKUP_ROWS_MAX = 10_000
"""A write of at most this many rows reads only the row groups that may hold their keys; a larger one reads all."""
ATTEMPTS = 20
PAUSE_S = 0.2
PROGRESS_LOG_S = 5.0
"""Interval of the progress messages of a commit in the log of Spark's driver."""

log = structlog.get_logger()


class CommitLimits(msgspec.Struct, frozen=True):
    """Limits of memory: the rows of a range, and the updates of a part."""

    range_rows: int = RANGE_ROWS
    range_bytes: int = STAGE_BYTES
    wanted_rows: int = POINT_LOOKUP_ROWS_MAX


def pipeline_sources(portal: BlockingPortal, stores: Stores, frame: WriteFrame) -> set[str] | None:
    """Return the sources of the bindings of this table in the pipeline `frame.beside`; None if no pipeline maintains
    it.

    Raises InvalidError if another pipeline maintains the shard, or if `frame.beside` does not.
    """
    name, found = frame.shard, None
    for row in portal.call(stores.catalogue.list(PipelineRow)):
        if name in row.tables and row.name == frame.beside:
            fed_by = row.tables[name]
            found = set() if fed_by == "derived" else {source_of(fed_by)}
        elif name == row.dead_letters:
            raise InvalidError(f"only the pipeline writes its dead letters: table={name} pipeline={row.name}.")
        elif table_of_tombstones(name)[0] in row.tables:
            raise InvalidError(f"only the pipeline writes its tombstones: table={name} pipeline={row.name}.")
        elif name in row.tables:
            raise InvalidError(
                f"a pipeline maintains this table: table={name} pipeline={row.name}.",
                fix="Write into another table; a derived table can join both. If it is intended that both this job and"
                f" the pipeline write this table, set option `beside` to {row.name}.",
            )
    if frame.beside and found is None:
        raise InvalidError(
            f"the pipeline does not maintain this table: table={name} beside={frame.beside}.",
            fix="Remove option `beside`.",
        )
    return found


def open_existing(portal: BlockingPortal, stores: Stores, name: str, writer: str = "") -> LogShard | None:
    """Return an open handle, which the caller closes, or None if the shard does not exist. Raises as `open_shard`."""
    try:
        return portal.call(stores.shard(name, writer=writer))
    except MissingError:
        return None


class WriteCommit:
    """Commit of one job; `job` identifies it permanently."""

    def __init__(
        self,
        portal: BlockingPortal,
        stores: Stores,
        frame: WriteFrame,
        job: str | StreamEpoch,
        limits: CommitLimits | None = None,
    ) -> None:
        self._portal = portal
        self._stores = stores
        self._frame = frame
        self._epoch = job if isinstance(job, StreamEpoch) else None
        self._token = f"{WRITES}-{job.job if isinstance(job, StreamEpoch) else job}"
        self._writer = self._epoch.writer if self._epoch is not None else ""
        self._limits = limits or CommitLimits()
        self._rows = 0
        self._sources: set[str] | None = None

    def run(self, staged: Sequence[Staged]) -> int:
        """Publish the staged rows and return the shard's upper after the append.

        Raises InvalidError (rejected by `required_schema` or `compute_updates`, or a pipeline's shard),
        UnavailableError (nothing was written), UnknownOutcomeError (it may have been written: run again, or write the
        same rows again).
        """
        self._rows = sum(one.rows for one in staged)
        for _ in range(ATTEMPTS):
            shard = self._prepare_shard(staged)
            turn = WriteLease(self._stores, f"{WRITES}/{shard.shard_id}")
            try:
                self._portal.call(turn.acquire())
                return self._try_append(shard, turn, staged)
            except (ConflictError, SchemaEvolvedError, HistoryLostError):
                continue  # another writer was first; the batches that were chosen may no longer exist
            finally:
                self._portal.call(turn.release())
                self._portal.call(shard.aclose())
        raise UnavailableError(
            f"other writers were first each time: table={self._frame.shard} attempts={ATTEMPTS} rows={self._rows}.",
            fix="Write fewer rows at a time, or write when the table has fewer other writers.",
        )

    def _prepare_shard(self, staged: Sequence[Staged]) -> LogShard:
        """Return the shard, created or evolved if the frame requests it, but only once its keys are known to be
        distinct."""
        name = self._frame.shard
        self._sources = pipeline_sources(self._portal, self._stores, self._frame)
        shard = open_existing(self._portal, self._stores, name, self._writer)
        if shard is None and self._frame.there:
            raise MissingError(
                f"the table was dropped during the write: table={name}.",
                fix="Set option key=COLUMN,… to create it.",
            )
        try:
            schema = required_schema(self._frame, shard.schema if shard is not None else None)
        except BaseException:
            if shard is not None:
                self._portal.call(shard.aclose())
            raise
        if shard is not None and schema.columns == shard.schema.columns:
            return shard
        if shard is not None:
            self._portal.call(shard.aclose())
        count = self._range_count([], staged, few=False)
        for number in range(count):
            check_distinct(
                self._frame.stored, read_staged_rows(self._frame, staged, HashRange(number, count), self._get)
            )
        return self._portal.call(self._stores.shard(name, schema, writer=self._writer))

    def _try_append(self, shard: LogShard, turn: WriteLease, staged: Sequence[Staged]) -> int:
        """Try one append. Raises ConflictError or SchemaEvolvedError if another writer was first."""
        call, lower = self._portal.call, self._portal.call(shard.frontiers())[1]
        if (done := self._appended_upper(shard)) is not None:
            return done  # an earlier attempt of this job already published the rows
        at = max(self._stores.clock.now_ms(), lower)
        if self._sources is not None:
            at = lower
            if not call(is_quiet_at(self._stores.remap, self._sources, at)):
                call(shard.wait_upper(lower, PAUSE_S))
                raise ConflictError(f"the pipeline writes at this time: table={self._frame.shard} time={at}.")
        hold = MovingHold(shard, shard.reader_name(WRITES), self._stores.clock, ttl_ms=HOLD_TTL_MS, kept=True)
        parts: list[Part] = []
        held: list[pa.Table] = []
        try:
            call(hold.move_to(max(0, lower - 1)))
            batches = call(shard.batches_until(lower - 1)) if lower else []
            for updates in self._compute_updates(shard, batches, staged, lower, at):
                call(turn.renew())
                call(hold.move_to(max(0, lower - 1)))
                held.append(updates)
                if self._is_part(held):
                    parts.append(call(shard.write_part(pa.concat_tables(held))))
                    held = []
            if any(u.num_rows for u in held):
                parts.append(call(shard.write_part(pa.concat_tables(held))))
            upper = call(shard.compare_and_append(lower, at + 1, parts, self._token))
            if self._epoch is not None:
                call(self._epoch.end(self._stores, shard))
            return upper
        finally:
            call(hold.release())

    def _appended_upper(self, shard: LogShard) -> int | None:
        """Return the upper after this job's append, or None if it is still to be made."""
        if self._epoch is None:
            return next((w.upper for w in shard.state.writers if w.token == self._token), None)
        found = self._epoch.appended_upper(shard.state)
        if found is None and not self._portal.call(self._epoch.begin_epoch(self._stores, shard)):
            return shard.state.upper
        return found

    def _compute_updates(
        self, shard: LogShard, batches: Sequence[Batch], staged: Sequence[Staged], lower: int, at: int
    ) -> Iterator[pa.Table]:
        """Yield the updates of one range after another, in the order of their hashes."""
        few = not self._frame.overwrite and self._rows <= self._limits.wanted_rows
        count = self._range_count(batches, staged, few)
        clock = self._stores.clock
        tell_s = clock.monotonic_s() + PROGRESS_LOG_S
        for number in range(count):
            if clock.monotonic_s() >= tell_s:
                tell_s = clock.monotonic_s() + PROGRESS_LOG_S
                log.info("writing", shard=self._frame.shard, rows=self._rows, done=f"{number * 100 // count} %")
            rows = read_staged_rows(self._frame, staged, HashRange(number, count), self._get)
            if rows.num_rows or self._frame.overwrite:
                wanted = sorted(set(rows.column(HASH).to_pylist())) if few else None
                found = self._read_contents(shard, batches, number, count, wanted, lower)
                yield compute_updates(self._frame, shard.schema, rows.drop_columns([HASH]), found, lower, at)

    def _read_contents(
        self, shard: LogShard, batches: Sequence[Batch], number: int, count: int, wanted: list[int] | None, lower: int
    ) -> pa.Table:
        width = (1 << 64) // count
        chosen = range_between(batches, number * width, (number + 1) * width - 1, wanted)
        fetch = fetch_through(self._portal, self._stores.objects, whole=wanted is None)
        return pa.concat_tables(
            [contents_schema(shard.schema).empty_table(), *read_range(shard.schema, chosen, lower - 1, fetch)]
        )

    def _is_part(self, held: Sequence[pa.Table]) -> bool:
        rows, size_bytes = sum(int(u.num_rows) for u in held), sum(int(u.nbytes) for u in held)
        return rows >= self._limits.range_rows or size_bytes >= self._limits.range_bytes

    def _range_count(self, batches: Sequence[Batch], staged: Sequence[Staged], few: bool) -> int:
        """Return the number of ranges: a power of two, as for the ranges of staged rows."""
        parts = [] if few else [part for batch in batches for part in batch.parts]
        wanted = max(
            self._rows // self._limits.range_rows,
            sum(one.size_bytes for one in staged) // self._limits.range_bytes,
            sum(p.rows for p in parts) // self._limits.range_rows,
            sum(p.size_bytes for p in parts) // RANGE_BYTES,
        )
        return int(min(RANGES_MAX, 1 << wanted.bit_length()))

    def _get(self, key: str, start: int, end: int) -> bytes:
        return self._portal.call(self._stores.objects.get(key, start, end))


async def is_quiet_at(open_remap: Callable[[str], Awaitable[Remap]], sources: Iterable[str], time_ms: int) -> bool:
    """Return whether none of these sources binds anything to `time_ms`, now or later.

    A source whose bindings end earlier is advanced to that time. Raises HistoryLostError, UnavailableError,
    UnknownOutcomeError.
    """
    for source in sources:
        remap = await open_remap(source)
        latest = await remap.advance(time_ms)
        if latest is None or latest.time_ms < time_ms:
            return False  # nothing has been bound yet: the first binding may get this time
        at, before = await remap.at(time_ms), await remap.at(time_ms - 1)
        if at is None or (before.offsets if before is not None else {}) != at.offsets:
            return False
    return True


def compute_updates(
    frame: WriteFrame, schema: ShardSchema, rows: pa.Table, contents: pa.Table, lower: int, at: int
) -> pa.Table:
    """Return updates at time `at` for an append of [lower, at + 1), sorted by hash.

    `rows` have the DataFrame's columns and `_live`; `schema` is the shard's and contains them; `contents` are those at
    `lower` - 1. Raises InvalidError if a key occurs twice, CorruptError if a key has two live rows in the shard.
    """
    target = contents_schema(schema)
    for field in target:
        if frame.keys_only and field.name not in rows.column_names:
            rows = rows.append_column(field, pa.nulls(rows.num_rows, field.type))
    run = check_distinct(schema, conform_rows(rows, target.append(pa.field(LIVE, pa.bool_()))))
    mirror = Mirror.hydrate(schema, contents, lower)
    if frame.overwrite:
        commands = diff_commands(schema, run.rows.select(target.names), mirror, at)
    else:
        commands = Commands(rows_as_commands(schema, run.rows, at, to_mask(run.rows.column(LIVE))))
    return resolve(schema, commands, mirror, lower, at + 1).updates
