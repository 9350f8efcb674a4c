"""Dead-letter shard of a pipeline: every record of its topics that could not be decoded, exactly once; and every update
whose previous row, which has the values of unchanged columns, is missing.

Invariant (letters first): a letter is stored before the table passes its record: the letters of an interval are
appended first, then the table's updates. After a crash in between, the interval is decoded again, and the letters are
recognized by their positions. The same holds for a driver that loses a race.
Invariant (no duplicates): an append names the shard's upper, and its writer has read every letter below that upper, so
two writers never add the same letter.
Invariant (one letter at a place): a topic that is created again, or whose table is copied again, begins at offset 0.
Its letters have later times, and replace those at the same places, whose records are gone.

So letters need no agreed time, no table waits for another, and an interval without letters costs nothing. Any thread
may add letters, one at a time.

A run of dead letters: the newest records of a table, which is at its target, are all dead letters.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import structlog

from tidemill.base.clock import Rand
from tidemill.base.errors import ConflictError, MissingError
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.shards.api import DIFF, TIME, Batch, HistoryLostError, SchemaEvolvedError
from tidemill.shards.handle import LogShard
from tidemill.shards.parts.arrow_rows import int64s
from tidemill.shards.parts.schema import update_schema
from tidemill.spark.decode.captured import Stop
from tidemill.spark.decode.dead_letter_rows import (
    DeadLetter,
    dead_letter_table,
    live_letters,
    places_of,
    retractions,
)
from tidemill.spark.ingest.sources import TopicFeed
from tidemill.spark.merge.commands import ORDER, PARTITION, Commands
from tidemill.spark.merge.resolve import Resolved
from tidemill.spark.merge.toast_fill import LostCommand, RejectedCommand
from tidemill.spark.predicates.expectations import DEAD_LETTER, FAIL, Violations
from tidemill.spark.violations import violation_stop

RUN_RECORDS_MIN = 10
"""A run of this many dead letters without a good record is no accident; for a table that holds nothing, one
suffices."""
DEAD_RUN_TEXT = "its newest records are all dead letters"
_SHIFT = 20

log = structlog.get_logger()

_Partition = tuple[str, int]


class _Letters(NamedTuple):
    """Letters of one partition: ascending offsets, and the time of the newest letter at each, in µs."""

    offsets: npt.NDArray[np.int64]
    times: npt.NDArray[np.int64]


class DeadLetterWriter:
    """Writer of dead letters. `opened` returns the shard and creates it if absent; it is called on first use, and the
    caller retries it."""

    def __init__(self, portal: BlockingPortal, opened: Callable[[], LogShard], rand: Rand) -> None:
        self.total = 0
        """Number of letters that this process added."""
        self._portal = portal
        self._opened = opened
        self._rand = rand
        self._shard: LogShard | None = None
        self._upper = 0
        self._known: dict[_Partition, _Letters] = {}
        self._one_at_a_time = threading.Lock()

    def open(self) -> None:
        """Create the shard, so that readers find it. Raises as opening a shard."""
        with self._one_at_a_time:
            self._opened_shard()

    def put(self, letters: pa.Table) -> None:
        """Add those of these letters that are not stored yet.

        Raises UnavailableError, UnknownOutcomeError: call again with the same letters.
        """
        if letters.num_rows == 0:
            return
        with self._one_at_a_time:
            while not self._try_add(self._opened_shard(), letters):
                pass

    def _try_add(self, shard: LogShard, letters: pa.Table) -> bool:
        """Add the new letters; False if a peer was first, or evolved the shard, or it was dropped: try again."""
        try:
            self._follow(shard)
            fresh, replacing = self._compare_to_known(letters)
            new = letters.filter(pa.array(fresh))
            replaced = self._stored(shard, letters.filter(pa.array(replacing)))
            if new.num_rows and not self._append(shard, new, replaced):
                return False
        except SchemaEvolvedError:
            self._shard = None
            return False
        except MissingError:
            if not shard.state.dropped:
                raise
            self._shard, self._upper, self._known = None, 0, {}
            return False
        self.total += new.num_rows
        return True

    def _opened_shard(self) -> LogShard:
        if self._shard is None:
            self._shard = self._opened()
        return self._shard

    def _stored(self, shard: LogShard, letters: pa.Table) -> pa.Table:
        """Return the stored letters at the places of these."""
        if not letters.num_rows:
            return update_schema(shard.schema).empty_table()
        call = self._portal.call
        found = (call(shard.read_batch(b, 0, b.upper)) for b in call(shard.batches_until(self._upper - 1)))
        return live_letters(found, set(places_of(letters)), update_schema(shard.schema))

    def _append(self, shard: LogShard, new: pa.Table, replaced: pa.Table) -> bool:
        lower = self._upper
        at = max(lower, int(int64s(new, TIME).max()))
        times = pa.array(np.full(new.num_rows, at, dtype=np.int64))
        rows = new.set_column(new.schema.get_field_index(TIME), TIME, times)
        updates = rows
        if replaced.num_rows:
            updates = pa.concat_tables([retractions(replaced, at), rows.select(replaced.column_names)])

        async def run() -> None:
            part = await shard.write_part(updates)
            await shard.compare_and_append(lower, at + 1, (part,), self._rand.nonce())

        try:
            self._portal.call(run())
        except ConflictError:
            return False  # a peer added letters: read them before the next attempt
        self._upper = at + 1
        self._add_known(updates)
        return True

    def _follow(self, shard: LogShard) -> None:
        """Learn the positions of all letters below the shard's upper."""
        _, upper = self._portal.call(shard.frontiers())
        if upper <= self._upper:
            return
        batches: list[Batch] | None = None
        if self._upper:
            try:
                batches = self._portal.call(shard.batches(self._upper))
            except HistoryLostError:
                batches = None
        if batches is None:
            self._upper, self._known = 0, {}
            batches = self._portal.call(shard.batches_until(upper - 1))
        for batch in batches:  # compaction may have merged one across the upper: each update counts once
            self._add_known(self._portal.call(shard.read_batch(batch, self._upper, batch.upper)))
            self._upper = batch.upper

    def _add_known(self, updates: pa.Table) -> None:
        """Apply updates of the shard. A letter that a replay removed is unknown: its record may fail again."""
        record_times, diffs = _record_times(updates), int64s(updates, DIFF)
        for partition, offsets, at in _by_partition(updates):
            times, counts, known = record_times[at], diffs[at], self._known.pop(partition, None)
            if known is not None:
                offsets, times = np.append(known.offsets, offsets), np.append(known.times, times)
                counts = np.append(np.ones(len(known.offsets), dtype=np.int64), counts)
            order = np.lexsort((times, offsets))
            offsets, times = offsets[order], times[order]
            starts = np.flatnonzero(np.append(True, (np.diff(offsets) != 0) | (np.diff(times) != 0)))
            live = starts[np.add.reduceat(counts[order], starts) > 0]
            if len(live):
                newest = live[np.append(np.diff(offsets[live]) != 0, True)]
                self._known[partition] = _Letters(offsets[newest], times[newest])

    def _compare_to_known(self, letters: pa.Table) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Return masks of the new letters, and of those among them at whose places there may be an older one. Two
        tables may fail on one record: of its letters only the first counts as new."""
        fresh, replacing = (np.zeros(letters.num_rows, dtype=bool) for _ in range(2))
        record_times = _record_times(letters)
        for partition, offsets, at in _by_partition(letters):
            _, first = np.unique(offsets, return_index=True)
            at, known = at[first], self._known.get(partition)
            if known is None:
                fresh[at] = True
                continue
            found = np.searchsorted(known.offsets, offsets[first])
            found = np.minimum(found, len(known.offsets) - 1)
            stored = known.offsets[found] == offsets[first]
            later = known.times[found] < record_times[at]
            fresh[at] = ~stored | later
            replacing[at] = stored & later
        return fresh, replacing


def _record_times(rows: pa.Table) -> npt.NDArray[np.int64]:
    """Return the times of the records of letters, in µs."""
    times: npt.NDArray[np.int64] = rows.column("at").cast(pa.int64()).to_numpy()
    return times


def _by_partition(rows: pa.Table) -> list[tuple[_Partition, npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Return (topic and partition, offsets, row numbers) of each partition that has rows."""
    topics = rows.column("topic").to_pylist()
    partitions = rows.column("partition").to_pylist()
    offsets = int64s(rows, "offset")
    found: dict[_Partition, list[int]] = {}
    for at, partition in enumerate(zip(topics, partitions, strict=True)):
        found.setdefault(partition, []).append(at)
    numbers = {partition: np.array(at, dtype=np.int64) for partition, at in found.items()}
    return [(partition, offsets[at], at) for partition, at in numbers.items()]


def letters_of_resolved(feed: TopicFeed, found: Resolved) -> pa.Table:
    """Return lost and rejected commands as updates of the dead-letter shard, without the record itself: it is at its
    position in the topic."""
    letters = [
        _letter_of(
            feed,
            each,
            f"{f'table={feed.table} ' if feed.table else ''}the previous row, which has the values of"
            f" {', '.join(each.columns)}, is missing",
        )
        for each in found.lost
    ]
    expectations = feed.expectations
    if expectations is not None and expectations.on_violation == DEAD_LETTER:
        letters += [_letter_of(feed, each, expectations.reason(each.rules)) for each in found.rejected]
    return dead_letter_table(letters)


def _letter_of(feed: TopicFeed, each: LostCommand | RejectedCommand, reason: str) -> DeadLetter:
    key = each.key.decode("utf-8", "replace")
    return DeadLetter(
        feed.topic, each.partition, each.order, each.order, each.time_ms, reason, each.key, feed.table, key
    )


def stop_of_rejected(feed: TopicFeed, found: Resolved) -> Stop | None:
    """Return where the table stops, if violations stop it."""
    expectations = feed.expectations
    if not found.rejected or expectations is None or expectations.on_violation != FAIL:
        return None
    first = min(found.rejected, key=lambda each: (each.time_ms, each.partition, each.order))
    return violation_stop(
        expectations, feed.topic, (first.time_ms, first.partition, first.order), np.array(first.rules, dtype=np.int64)
    )


def violations_of_rejected(found: Resolved) -> tuple[Violations, ...]:
    """Return one entry for each expectation that a command violates."""
    return tuple(Violations(each.time_ms, rule, 1) for each in found.rejected for rule in each.rules)


class StepDeadLetters:
    """Count of the dead letters of one step, which may arrive in any number of pieces; none of the pieces is
    retained."""

    def __init__(self) -> None:
        self.records = 0
        self.last = ""
        """Position and reason of the newest of them."""
        self._newest: tuple[int, int] | None = None

    def add(self, letters: pa.Table) -> None:
        if not letters.num_rows:
            return
        self.records += int((int64s(letters, "last_offset") - int64s(letters, "offset") + 1).sum())
        newest, last = _newest_of(letters)
        if self._newest is None or newest >= self._newest:
            self._newest, self.last = newest, last


class DeadLetterRun:
    """Run of dead letters of a table. `count`: dead letters after the newest good record; `last`: position and reason
    of the newest of them."""

    def __init__(self) -> None:
        self.count = 0
        self.last = ""

    def add_counted_step(self, records: int, buried: StepDeadLetters) -> None:
        """Add a step whose commands were not seen here: if it has fewer letters than records, one of them was good."""
        if buried.records < records:
            self.count = 0
        elif buried.records:
            self.count, self.last = self.count + buried.records, buried.last

    def add_step(self, commands: Commands | None, letters: pa.Table) -> None:
        """Add the result of one step, in order of time; `commands` None: no record of it was good."""
        if not letters.num_rows:
            self.count = 0 if commands else self.count
            return
        good = _newest_good(commands, letters) if commands is not None else None
        if good is not None:
            self.count = 0
        times, lasts = int64s(letters, TIME), int64s(letters, "last_offset")
        behind = np.ones(len(times), dtype=bool)
        if good is not None:
            behind = (times > good[0]) | ((times == good[0]) & (lasts > good[1]))
        self.count += int((lasts - int64s(letters, "offset") + 1)[behind].sum())
        if behind.any():
            _, self.last = _newest_of(letters)

    def sentence(self, empty: bool) -> str:
        """Return the error text, or "" if there is no run. `empty`: the table holds no row."""
        if not self.count or (self.count < RUN_RECORDS_MIN and not empty):
            return ""
        return f"{DEAD_RUN_TEXT}: count={self.count} {self.last}"


def _newest_of(letters: pa.Table) -> tuple[tuple[int, int], str]:
    """Return ((time, last offset) of the newest letter, its position and reason)."""
    times, lasts = int64s(letters, TIME), int64s(letters, "last_offset")
    at = int(np.lexsort((lasts, times))[-1])
    row = letters.slice(at, 1).select(["topic", "partition", "offset", "reason"]).to_pylist()[0]
    place = f"topic={row['topic']} partition={row['partition']} offset={row['offset']}"
    return (int(times[at]), int(lasts[at])), f"{place} reason=[{row['reason'][:200]}]"


def _newest_good(commands: Commands, letters: pa.Table) -> tuple[int, int] | None:
    """Return (time, order) of the newest record that is not a dead letter. A captured row that is one leaves a
    deletion."""
    found = [(truncate.time_ms, truncate.order) for truncate in commands.truncates]
    rows = commands.rows
    if rows.num_rows:
        dead = int64s(letters, "offset") << _SHIFT | int64s(letters, "partition")
        good = ~np.isin(int64s(rows, ORDER) << _SHIFT | int64s(rows, PARTITION), dead)
        times, orders = int64s(rows, TIME)[good], int64s(rows, ORDER)[good]
        if len(times):
            at = int(np.lexsort((orders, times))[-1])
            found.append((int(times[at]), int(orders[at])))
    return max(found, default=None)
