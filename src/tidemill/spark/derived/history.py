"""History of a table: its versions, maintained from its changes, at its times. Needs no Spark.

    changes of the input from the output's upper on ─► version_changes ─► one append of the same times

Invariant (the output is the state): the position is the output's upper. The mirror with the start of each key's current
version is a cache of the output on disk.
Invariant (held): the history of the input from that position on is held while the pipeline runs, and for HOLD_MS after.
A change that is gone anyway cannot be made up: the table then stops, rather than omit a version.

The first append has the contents at the oldest time that the input can be read at; changes after it follow one by one.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import structlog

from tidemill.base.errors import ConflictError, CorruptError, InvalidError, MissingError, drop_table_command
from tidemill.base.runtime.blocking_portal import BlockingPortal, SyncContext
from tidemill.objects.store import Buffer
from tidemill.shards.api import TIME, Batch, HistoryLostError, Part, SchemaEvolvedError
from tidemill.shards.handle import LogShard
from tidemill.shards.parts.schema import update_schema
from tidemill.shards.read.hash_ranges import cut_ranges, read_range
from tidemill.shards.state.state import input_of_token, input_token
from tidemill.spark.definition import HistoryTable
from tidemill.spark.derived.version_changes import (
    IS_CURRENT,
    current_changes,
    current_schema,
    first_versions,
    history_schema,
    tracked_columns,
    version_updates,
)
from tidemill.spark.ingest.fetch_decode import mirror_identity
from tidemill.spark.ingest.step_planner import STEP_RECORDS
from tidemill.spark.merge.mirror import Mirror
from tidemill.spark.stores import Stores

HOLD_MS = 7 * 86_400_000
"""Time for which the input's history is kept for a pipeline that does not run."""
HOLD_STEP_MS = 30_000
"""Least distance by which the hold advances; each move is a write."""
HOLD_RENEW_S = HOLD_MS / 1000 / 4
"""Interval at which the hold is renewed if the position does not move."""
IDLE_MOVE_S = 1.0
"""Minimum interval at which a history without changes moves its upper."""
STOP_CHECK_S = 1.0
SAVE_EVERY = 500
"""Appends between two saves of the mirror."""

log = structlog.get_logger()


class History:
    """Maintenance of one history. `run` is the body of its thread; `advance` is one step, callable from tests."""

    def __init__(self, portal: BlockingPortal, stores: Stores, table: HistoryTable, mirror_dir: Path) -> None:
        self.table = table
        self.target = 0
        self.error = ""
        self.waits_for = ""
        self.waits = False
        self.recomputed = 0
        """Appends with changes."""
        self.took_s = 0.0
        self.omitted_rows_error = ""
        self.won = 0
        self.lost = 0
        self.rows = 0
        self._portal = portal
        self._stores = stores
        self._mirror_dir = mirror_dir
        self._input: LogShard | None = None
        self._output: LogShard
        self._current: Mirror
        self._tracked: list[str] = []
        self._held = -HOLD_STEP_MS
        self._renewed_s = float("-inf")
        self._moved_s = float("-inf")

    @property
    def writer(self) -> LogShard | None:
        """The input while the table is open."""
        return self._input

    @property
    def held_bytes(self) -> int:
        """Memory of the mirror."""
        return self._current.held_bytes if self._input is not None else 0

    @property
    def upper(self) -> int:
        return self._current.upper if self._input is not None else 0

    def run(self, stopping: threading.Event, worked: Callable[[], None] = lambda: None) -> None:
        """Run until `stopping` is set; call `worked` after every step. Waits for an input that does not exist yet.
        Raises any other failure: call it again later."""
        try:
            while not stopping.is_set():
                advanced = False
                try:
                    if self._input is None:
                        self.open()
                    advanced = self.advance()
                    self.error = ""
                    worked()
                except (MissingError, SchemaEvolvedError) as error:
                    self.error = error.message
                    self.close()
                except CorruptError:  # the mirror is a cache: after any damage, it is built again
                    shutil.rmtree(self._mirror_dir, ignore_errors=True)
                    self.close(save=False)
                    raise
                if not advanced:
                    self._wait_for_changes(stopping)
        finally:
            self.close()

    def _wait_for_changes(self, stopping: threading.Event) -> None:
        if self._input is None:
            stopping.wait(STOP_CHECK_S)
            return
        end = max(self.upper, self.target)
        newer = asyncio.run_coroutine_threadsafe(self._input.wait_upper(end, IDLE_MOVE_S), self._portal.loop)
        while not newer.done() and not stopping.is_set():
            futures.wait([newer], STOP_CHECK_S)
        newer.cancel()  # an error of the wait is an error of the next step

    def open(self) -> None:
        """Open the input and the output, which is created or evolved. Raises MissingError (there is no input yet),
        InvalidError (the input can have no such history), and as storage."""
        name, call = self.table.of, self._portal.call
        self.waits_for = f"shard:{name}"
        found = call(self._stores.shard(name))
        try:
            schema = history_schema(name, found.schema)
            self._tracked = tracked_columns(name, found.schema, self.table.track)
            self._output = call(self._stores.shard(self.table.name, schema))
        except BaseException:
            call(found.aclose())
            raise
        try:
            self._check_same_input(found)
            self._check_defaults(found)
            self._current = self._open_mirror(found)
        except BaseException:
            call(found.aclose())
            call(self._output.aclose())
            raise
        self._input = found

    def _check_same_input(self, found: LogShard) -> None:
        """Raise InvalidError if the history is of an earlier table of this name, whose rows may have been others."""
        for writer in reversed(self._output.state.writers):
            input_id = input_of_token(writer.token)
            if not input_id:
                continue
            if input_id != found.shard_id:
                raise InvalidError(
                    f"the input of the history was dropped and created again: table={self.table.name}"
                    f" input={self.table.of}.",
                    fix="Keep the history under this name and declare another one, or let it begin again without its"
                    f" earlier versions: {drop_table_command(self.table.name)}",
                )
            return

    def _check_defaults(self, found: LogShard) -> None:
        """Raise InvalidError if an earlier release added columns to the history without their defaults: versions from
        before are null in them, and retractions of these match no row."""
        defaults = {column.name: column.default for column in found.schema.columns}
        own = [column for column in self._output.schema.columns if column.version > 1]
        if other := [column.name for column in own if column.default != defaults.get(column.name, column.default)]:
            raise InvalidError(
                f"the history lacks defaults of its input: table={self.table.name} input={self.table.of}"
                f" columns={','.join(other)}.",
                fix="Re-create the history from the present contents, without its earlier versions: "
                + drop_table_command(self.table.name),
            )

    def close(self, *, save: bool = True) -> None:
        """Save the mirror and close the shards."""
        if self._input is None:
            return
        found, self._input = self._input, None
        if save and not self._stores.is_rolled_back:
            self._current.save(self._output.shard_id, self._identity)
        self._portal.call(found.aclose())
        self._portal.call(self._output.aclose())

    @property
    def _identity(self) -> str:
        return mirror_identity(self._stores.consensus_life)

    def advance(self) -> bool:
        """Append one step; False if there was nothing to do or a peer was first.

        Raises InvalidError if changes of the input are gone, and as storage: call it again, or reopen.
        """
        assert self._input is not None
        self._follow()
        lower = self._current.upper
        since, end = self._portal.call(self._input.frontiers())
        self.target = max(self.target, end)
        if not end:
            return False
        if not lower:
            self._hold_input(since)
            return self._append_first_versions(since)
        self._hold_input(lower - 1)  # also of an idle input: the hold must outlast any stop that follows
        if end <= lower:
            return False
        upper, changes = self._read_changes(lower)
        clock = self._stores.clock
        if not changes.num_rows and clock.monotonic_s() - self._moved_s < IDLE_MOVE_S:
            return False
        began_s = clock.monotonic_s()
        updates = version_updates(self._input.schema, self._output.schema, self._tracked, changes, self._current)
        parts = (self._portal.call(self._output.write_part(updates)),) if updates.num_rows else ()
        if not self._append(lower, upper, parts):
            return False
        self._current.apply(current_changes(self._current.schema, updates), lower, upper)
        self._moved_s = clock.monotonic_s()
        if updates.num_rows:
            self.recomputed += 1
            self.rows += updates.num_rows
            self.took_s = clock.monotonic_s() - began_s
        return True

    def _read_changes(self, lower: int) -> tuple[int, pa.Table]:
        """Return the changes of whole batches from `lower` on, about STEP_RECORDS of them, and where they end."""
        assert self._input is not None
        upper, count, found = lower, 0, []
        try:
            for batch in self._portal.call(self._input.batches(lower)):
                if count >= STEP_RECORDS:
                    break
                if batch.upper > upper:
                    found.append(self._portal.call(self._input.read_batch(batch, upper, batch.upper)))
                    upper, count = batch.upper, count + found[-1].num_rows
        except HistoryLostError as error:
            raise InvalidError(
                f"changes of the input are no longer stored: table={self.table.name} input={self.table.of}"
                f" from={lower}.",
                fix="Re-create the history from the present contents, without its earlier versions:"
                f" {drop_table_command(self.table.name)}",
            ) from error
        return upper, pa.concat_tables(found) if found else pa.table({TIME: pa.array([], pa.int64())})

    def _append_first_versions(self, time_ms: int) -> bool:
        """Append the first versions: the contents of the input at `time_ms`, range by range."""
        assert self._input is not None
        call, parts, pieces = self._portal.call, [], []
        with SyncContext(self._portal, self._input.batches_held_until(time_ms)) as batches:
            for rows in self._read_ranges(self._input, batches, time_ms):
                updates = first_versions(self._output.schema, rows, time_ms)
                if updates.num_rows:
                    parts.append(call(self._output.write_part(updates)))
                    pieces.append(current_changes(self._current.schema, updates))
        if not self._append(0, time_ms + 1, tuple(parts)):
            return False
        no_versions = update_schema(self._output.schema).empty_table()
        pieces.append(current_changes(self._current.schema, no_versions))
        self._current.apply(pa.concat_tables(pieces), 0, time_ms + 1)
        self.recomputed += 1
        log.info("history begins", table=self.table.name, of=self.table.of, time_ms=time_ms)
        return True

    def _append(self, lower: int, upper: int, parts: tuple[Part, ...]) -> bool:
        try:
            assert self._input is not None
            token = input_token(self._input.shard_id, self._stores.rand.nonce())
            self._portal.call(self._output.compare_and_append(lower, upper, parts, token))
        except ConflictError:
            self.lost += 1
            return False
        self.won += 1
        if self.won % SAVE_EVERY == 0:
            self._current.save(self._output.shard_id, self._identity)
        return True

    def _hold_input(self, since: int) -> None:
        """Keep the input readable from `since` on. Peers share the hold, and one may have moved it further."""
        assert self._input is not None
        now_s = self._stores.clock.monotonic_s()
        if since - self._held < HOLD_STEP_MS and now_s - self._renewed_s < HOLD_RENEW_S:
            return
        with suppress(HistoryLostError, InvalidError):  # reading reports lost changes
            self._portal.call(self._input.set_hold(f"history/{self.table.name}", since, HOLD_MS))
        self._held, self._renewed_s = since, now_s

    # mirror -----------------------------------------------------------------------------------------
    def _open_mirror(self, source: LogShard) -> Mirror:
        """Return the mirror of the current versions, from disk if it can be trusted, else from the output."""
        schema = current_schema(source.schema)
        try:
            saved = Mirror.load(self._mirror_dir, schema, self._output.shard_id, self._identity)
        except CorruptError:
            saved = None
        if saved is not None:
            saved.sweep()
            return saved
        shutil.rmtree(self._mirror_dir, ignore_errors=True)
        self._mirror_dir.mkdir(parents=True, exist_ok=True)
        return self._build_mirror(Mirror(schema, directory=self._mirror_dir))

    def _build_mirror(self, mirror: Mirror) -> Mirror:
        """Fill an empty mirror from the output's contents, range by range."""
        _, upper = self._portal.call(self._output.frontiers())
        if not upper:
            return mirror
        names = [column.name for column in mirror.schema.columns]
        mirror.upper = upper
        with SyncContext(self._portal, self._output.batches_held_until(upper - 1)) as batches:
            for rows in self._read_ranges(self._output, batches, upper - 1, [*names, IS_CURRENT]):
                mirror.insert(rows.filter(pc.field(IS_CURRENT)).select(names))
        return mirror

    def _follow(self) -> None:
        """Apply what peers appended to the output."""
        _, upper = self._portal.call(self._output.frontiers())
        if upper <= self._current.upper:
            return
        try:
            batches = self._portal.call(self._output.batches(self._current.upper)) if self._current.upper else None
            for batch in batches or ():
                if batch.upper > self._current.upper:
                    lower = self._current.upper
                    rows = self._portal.call(self._output.read_batch(batch, lower, batch.upper))
                    self._current.apply(current_changes(self._current.schema, rows), lower, batch.upper)
        except HistoryLostError:
            batches = None
        if batches is None:
            self._current = self._build_mirror(Mirror(self._current.schema, directory=self._mirror_dir))
            self._current.sweep()

    def _read_ranges(
        self, shard: LogShard, batches: list[Batch], as_of: int, columns: list[str] | None = None
    ) -> Iterator[pa.Table]:
        def fetch(part: Part) -> Buffer:
            return self._portal.call(shard.fetch(part, batches))

        for chosen in cut_ranges(batches):
            yield from read_range(shard.schema, chosen, as_of, fetch, columns)
