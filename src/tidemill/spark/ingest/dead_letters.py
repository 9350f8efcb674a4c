"""Dead-letter shard of a pipeline: every record of its topics that could not be decoded, exactly once; and every update
whose previous row, which has the values of unchanged columns, is missing.

Invariant (letters first): a letter is stored before the table passes its record: the letters of an interval are
appended first, then the table's updates. After a crash in between, the interval is decoded again, and the letters are
recognized by their positions. The same holds for a driver that loses a race.
Invariant (no duplicates): an append names the shard's upper, and its writer has read every letter below that upper, so
two writers never add the same letter.
Invariant (one letter at a place): a topic that is created again, or whose table is copied again, begins at offset 0.
Its letters have later times, and replace those at the same places, whose records are gone.

Invariant (counted when they expire): one append removes letters that are too old and replaces the row that states how
many have expired (`EXPIRED`).

So letters need no agreed time, no table waits for another, and an interval without letters costs nothing. Any thread
may add letters, one at a time.

A run of dead letters: the newest records of a table, which is at its target, are all dead letters.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import pyarrow as pa
import structlog

from tidemill.base.clock import Clock, Rand, SystemClock
from tidemill.base.errors import MissingError
from tidemill.base.limits import DEAD_LETTERS_KEEP_MS, MIB
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.shards.api import TIME, Batch, HistoryLostError, SchemaEvolvedError
from tidemill.shards.handle import LogShard
from tidemill.shards.parts.arrow_rows import combine_columns, cut_positions, int64s, row_sizes
from tidemill.spark.decode.captured import Stop
from tidemill.spark.decode.dead_letter_rows import (
    EXPIRED,
    DeadLetter,
    Place,
    dead_letter_table,
    places_of,
    retractions,
)
from tidemill.spark.ingest.sources import TopicFeed
from tidemill.spark.merge.commands import ORDER, PARTITION, Commands
from tidemill.spark.merge.resolve import Resolved
from tidemill.spark.merge.toast_fill import LostCommand, RejectedCommand
from tidemill.spark.predicates.expectations import DEAD_LETTER, FAIL, Violations
from tidemill.spark.stored_letters import (
    EXPIRED_PARTITION,
    NONE,
    Changes,
    KnownLetters,
    NewestOfRows,
    Positions,
    append_updates,
    changes_of,
    expired_row,
    is_at,
    letters_at,
    positions_of,
    read_letter_pieces,
    read_updates,
)
from tidemill.spark.violations import violation_stop

RUN_RECORDS_MIN = 10
"""A run of this many dead letters without a good record is no accident; for a table that holds nothing, one
suffices."""
DEAD_RUN_TEXT = "its newest records are all dead letters"
_SHIFT = 20

EXPIRY_CHECK_S = 3_600.0
"""Longest time between two checks for old letters."""
EXPIRY_RETRY_S = 60.0
"""Longest time until a check that failed is repeated."""
SWEEPS = 8
"""Number of times within the retention of letters that old ones are removed."""
EXPIRED_ROWS = 10_000
EXPIRED_BYTES = 16 * MIB
"""Limits of the letters that one append removes."""

log = structlog.get_logger()


class DeadLetterWriter:
    """Writer of dead letters. `opened` returns the shard and creates it if absent; it is called on first use, and the
    caller retries it. `keep_ms`: see `expire`."""

    def __init__(
        self,
        portal: BlockingPortal,
        opened: Callable[[], LogShard],
        rand: Rand,
        clock: Clock | None = None,
        keep_ms: int = DEAD_LETTERS_KEEP_MS,
    ) -> None:
        self.total = 0
        """Number of letters that this process added."""
        self.expired = 0
        """Number of letters that this process removed because of their age."""
        self._portal = portal
        self._opened = opened
        self._rand = rand
        self._clock = clock or SystemClock()
        self._keep_ms = keep_ms
        self._check_s = float("-inf")
        """Time of the next check for old letters."""
        self._old: Positions = {}
        """Letters that were old at the last check."""
        self._stay: Positions = {}
        """Old letters that do not expire, as of the last sweep."""
        self._removed: set[Place] | None = None
        """Letters that were removed or replaced since the present sweep began; None between sweeps."""
        self._shard: LogShard | None = None
        self._upper = 0
        self._known = KnownLetters()
        self._stated: pa.Table | None = None
        """The row EXPIRED, or no row; None = not read since another process changed it."""
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
        with self._reopening(shard) as outcome:
            self._follow(shard)
            fresh, replacing = self._known.compare(letters)
            new = letters.filter(pa.array(fresh))
            replaced = letters_at(self._portal, shard, places_of(letters.filter(pa.array(replacing))))
            if new.num_rows and not self._append_letters(shard, new, replaced):
                return False
            self.total += new.num_rows
        return outcome.done

    @contextmanager
    def _reopening(self, shard: LogShard) -> Iterator[_Outcome]:
        """Open the shard again on its next use if it was evolved or dropped in the body: `done` is False then."""
        outcome = _Outcome()
        try:
            yield outcome
        except SchemaEvolvedError:
            self._shard = None
        except MissingError:
            if not shard.state.dropped:
                raise
            self._shard = None
            self._forget()
        else:
            outcome.done = True

    def _forget(self) -> None:
        self._upper, self._known, self._stated = 0, KnownLetters(), None

    def _opened_shard(self) -> LogShard:
        if self._shard is None:
            self._shard = self._opened()
        return self._shard

    def _append_letters(self, shard: LogShard, new: pa.Table, replaced: pa.Table) -> bool:
        at = max(self._upper, int(int64s(new, TIME).max()))
        times = pa.array(np.full(new.num_rows, at, dtype=np.int64))
        rows = new.set_column(new.schema.get_field_index(TIME), TIME, times)
        updates = rows
        if replaced.num_rows:
            gone = retractions(replaced, at)
            updates = pa.concat_tables([gone, rows.select(gone.column_names)])
        if not self._append(shard, updates, at):
            return False
        self._learn([changes_of(updates)])
        return True

    def _append(self, shard: LogShard, updates: pa.Table, at: int) -> bool:
        if not append_updates(self._portal, shard, updates, self._upper, at + 1, self._rand):
            return False
        self._upper = at + 1
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
            self._forget()
            batches = self._portal.call(shard.batches_until(upper - 1))
        for batch in batches:  # compaction may have merged one across the upper: each update counts once
            updates = read_updates(self._portal, shard, batch, self._upper, ("at",))
            self._learn([changes_of(rows) for rows in updates])
            self._upper = batch.upper

    def _learn(self, changes: Sequence[Changes]) -> None:
        """Apply updates of the shard, in which EXPIRED may have changed."""
        self._known.add(changes, self._removed)
        if any(EXPIRED_PARTITION in each for each in changes):
            self._stated = None

    # letters that expire ----------------------------------------------------------------------------
    def expire(self, ending: threading.Event) -> int | None:
        """Remove letters whose records are older than `keep_ms`, except the newest one of each captured row; return
        their number, or None if no check was due.

        To be called at any interval: most calls do nothing. All letters are read for it, so old ones are removed at
        most SWEEPS times within `keep_ms`: in pieces, between which other threads add letters. A letter goes one check
        after the one that found it old, so that a slower peer that stores the letters of its interval again recognizes
        it. Raises UnavailableError, UnknownOutcomeError, HistoryLostError: call again.
        """
        now_s = self._clock.monotonic_s()
        if now_s < self._check_s:
            return None
        interval_s, old = min(EXPIRY_CHECK_S, self._keep_ms / 1000 / SWEEPS), self._old
        self._check_s = now_s + interval_s
        try:
            with self._one_at_a_time:
                if (shard := self._shard) is None:
                    return 0  # not open yet, or dropped
                with self._reopening(shard) as outcome:
                    self._follow(shard)
                found = self._find_expired() if outcome.done else {}
                self._removed = set()
            return self._sweep(shard, found, ending) if found else 0
        except BaseException:
            self._check_s, self._old = now_s + min(EXPIRY_RETRY_S, interval_s), old
            raise
        finally:
            self._removed = None

    def _find_expired(self) -> Positions:
        """Return the letters that a sweep may remove; none while a sweep is not worth it."""
        limit_ms = self._clock.now_ms() - self._keep_ms
        before, self._old = self._old, self._known.older_than(limit_ms)
        late = self._known.older_than(limit_ms - self._keep_ms // SWEEPS)
        if all(np.isin(offsets, self._stay.get(partition, NONE)).all() for partition, offsets in late.items()):
            return {}
        both = {partition: np.intersect1d(before.get(partition, NONE), old) for partition, old in self._old.items()}
        return {partition: offsets for partition, offsets in both.items() if offsets.size}

    def _sweep(self, shard: LogShard, found: Positions, ending: threading.Event) -> int:
        newest = NewestOfRows(read_letter_pieces(self._portal, shard, NewestOfRows.COLUMNS))
        stay: list[Changes] = []
        count = 0
        for rows in read_letter_pieces(self._portal, shard):
            expired = is_at(rows, found)
            stays = expired & newest.include(rows)
            stay.append(changes_of(rows.filter(pa.array(stays))))
            gone = combine_columns(rows.filter(pa.array(expired & ~stays)))
            cuts = cut_positions(row_sizes(gone), EXPIRED_BYTES, EXPIRED_ROWS) if gone.num_rows else []
            for start, end in pairwise(cuts):
                if ending.is_set():
                    return count
                count += self._remove_expired(shard, gone.slice(start, end - start))
        self._stay = positions_of(stay)
        log.info("dead letters expired", shard=shard.name, letters=count)
        return count

    def _remove_expired(self, shard: LogShard, letters: pa.Table) -> int:
        """Remove those of these letters that are still stored, and count them in the shard."""
        while True:
            with self._one_at_a_time, self._reopening(shard) as outcome:
                self._follow(shard)
                removed = self._removed or set()
                changed = np.array([place in removed for place in places_of(letters)], dtype=bool)
                gone = letters.filter(pa.array(self._known.include(letters) & ~changed))
                if not gone.num_rows or self._append_expired(shard, gone, self._upper):
                    return int(gone.num_rows)
            if not outcome.done:
                return 0  # the shard was evolved or dropped: the next check opens it

    def _append_expired(self, shard: LogShard, gone: pa.Table, at: int) -> bool:
        """Append the removal of these letters, and their number; False if a peer appended first."""
        before = self._stated if self._stated is not None else letters_at(self._portal, shard, [EXPIRED])
        removed = [retractions(rows, at) for rows in (gone, before)]
        stated = expired_row(before, gone, at).select(removed[0].column_names)
        if not self._append(shard, pa.concat_tables([*removed, stated]), at):
            return False
        self._known.add([changes_of(removed[0])])
        self._stated = stated.select(before.column_names)
        self.expired += gone.num_rows
        return True


class _Outcome:
    done = False


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
