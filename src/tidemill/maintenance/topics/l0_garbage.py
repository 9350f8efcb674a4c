"""The job `topic-objects`: delete an L0 object when no partition reads it, or ever will.

    list ──► read every partition's log ──► not named by any: garbage, if every partition in its footer has decided
                                                 │ (otherwise the partition is made to decide: lifecycle.deletion)
                                                 ▼
             its rows have followed, and are in the bucket ──► collect_after_s later ──► deleted

Invariants:

- List first: objects are listed first and logs read afterwards. Every log is read; an unreadable one ends the round.
- Decided: the partition's log shows, after the object was seen, that its writer has placed everything it will ever
  place of it (`SettledMark`). Neither a clock nor an age proves that: a writer may only have been paused.
- Restorable: a restore from the newest manifest finds every object that its rows name. Rows come first, then the
  deletion.
- Leak rather than lose: an object that is not understood stays. An interrupted step is repeated.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import msgspec

from tidemill.base.errors import CorruptError, MissingError, TidemillError
from tidemill.consensus.change_journal import ChangedLogs
from tidemill.maintenance.checkpoint.restore_horizon import RestoreHorizon
from tidemill.maintenance.scheduler import JobContext, MaintenanceJob, StepBudget
from tidemill.metastore.rows import PARTITIONS, TOPICS
from tidemill.objects.reads import read_verified
from tidemill.objects.store import ObjectMeta
from tidemill.topics.l0.format import PREFIX, decode_footer, parse_writer
from tidemill.topics.lifecycle.deletion import settle_partition
from tidemill.topics.partition.recovery import LOG_PREFIX, catch_up, parse_log_name, partition_log
from tidemill.topics.partition.state_machine.state import PartitionState

LISTING_BATCH = 20_000
"""Number of keys held at a time; the next step continues after them."""
FOOTER_BYTES = 16 << 10
"""Bytes that are first read from the end of an object: the regions of some 250 partitions."""
FOOTERS_MIN = 64
"""Footers read in a step independent of its budget, so that each step makes progress."""
SETTLED_PER_STEP = 16
"""Number of partitions that are made to decide in one step. Their leaders step down."""
IDLE_INTERVAL_S = 600.0
"""Time between two reads of all logs while nothing is written."""

NEVER_WRITTEN = PartitionState()
"""State of all partitions that were never written to. Never changed."""

Place = tuple[str, int]


class _GarbageObject(msgspec.Struct):
    """Object that no log names. `places` are the partitions in its footer. Times are those of the monotonic clock: a
    change of the wall clock must neither shorten a wait nor make it last forever."""

    meta: ObjectMeta
    places: tuple[Place, ...]
    seen_s: float
    at: dict[Place, int]
    """Lower bound of the logs' ends when the object was first found to be unnamed."""
    passed: dict[Place, int] | None = None
    """Starts of the hot states when none of them named it any more, or ever will."""
    ready_s: float | None = None
    horizon: list[int] = []


class _WriterProgress(msgspec.Struct):
    """Lower bound of the logs' positions after the newest listed object of a writer had been listed. For a writer
    that has stopped this is older than when its objects became garbage; for a running writer it advances with every
    round."""

    number: int
    at: dict[Place, int]


class L0GarbageCounters(msgspec.Struct):
    """Counters since this process started. `waiting` is garbage that may not be deleted yet; `strange`
    counts objects that are no L0 objects."""

    deleted_objects: int = 0
    deleted_bytes: int = 0
    settled: int = 0
    waiting: int = 0
    strange: int = 0


class L0GarbageCollector(MaintenanceJob):
    """The job `topic-objects`."""

    def __init__(self, context: JobContext, *, quiet_s: float = IDLE_INTERVAL_S) -> None:
        self._g = context
        self._quiet_s = quiet_s
        self._persisted = RestoreHorizon(context.metastore)
        self._logs = ChangedLogs(context.consensus, LOG_PREFIX)
        self._states: dict[Place, PartitionState] = {}
        """State of every existing partition."""
        self._garbage: dict[str, _GarbageObject] = {}
        self._strange: set[str] = set()
        self._seen: dict[str, _WriterProgress] = {}
        self._writers: set[str] = set()
        self._after = ""
        self._listing: tuple[int, str, str] = (0, "", "")
        self._again_s = 0.0
        self._figures: L0GarbageCounters = L0GarbageCounters()

    async def run(self, budget: StepBudget) -> bool:
        """Process one stretch of the listing. Return True until its end is reached."""
        found: list[ObjectMeta] = []
        async for meta in self._g.objects.list(PREFIX, self._after):
            found.append(meta)
            if len(found) >= LISTING_BATCH:
                break
        more = listed = len(found) >= LISTING_BATCH
        self._after = found[-1].key if listed else ""
        if found and not self._is_round_due(found):
            return more
        if found:
            more = await self._run_round(found, budget) or more
        if not listed:
            self._seen = {writer: seen for writer, seen in self._seen.items() if writer in self._writers}
            self._writers = set()
        self._figures.waiting, self._figures.strange = len(self._garbage), len(self._strange)
        return more

    def _is_round_due(self, found: list[ObjectMeta]) -> bool:
        """Return whether to read the logs. An idle cluster is read seldom: nothing new was written, and no garbage
        waits."""
        now_s, listing = self._g.clock.monotonic_s(), (len(found), found[0].key, found[-1].key)
        if listing == self._listing and not self._garbage and now_s < self._again_s:
            return False
        self._listing, self._again_s = listing, now_s + self._quiet_s
        return True

    async def _run_round(self, found: list[ObjectMeta], budget: StepBudget) -> bool:
        """Process listed objects. Return True when the budget ended before the last footer."""
        topics = {row.topic_id: row.partitions for row in await self._g.metastore.rows(TOPICS)}
        await self._read_changed_logs(topics)
        self._record_writers(found)
        live = set[str]().union(*(state.live_objects() for state in self._states.values()))
        unread = await self._read_footers(found, live, budget)
        rows = {(row.topic_id, row.partition): row.hot_start for row in await self._g.metastore.rows(PARTITIONS)}
        undecided: dict[Place, float] = {}
        for key, garbage in list(self._garbage.items()):
            if key in live:
                # Its placeholder was not in the log yet when the object was listed.
                del self._garbage[key]
            elif waits := self._undecided_partitions(garbage):
                for place in waits:
                    undecided[place] = min(garbage.seen_s, undecided.get(place, garbage.seen_s))
            else:
                await self._collect_if_safe(garbage, rows)
        await self._settle_partitions(undecided)
        return unread

    async def _read_changed_logs(self, topics: Mapping[str, int]) -> None:
        """Read every log that changed; unchanged logs have unchanged states. Raises the error of a log that cannot
        be read, which ends the round."""
        places = [(topic_id, partition) for topic_id, count in topics.items() for partition in range(count)]
        self._states = {place: self._states.get(place, NEVER_WRITTEN) for place in places}
        written = await self._logs.next_changed(lambda name: parse_log_name(name) in self._states)
        for name in sorted(written):
            place = parse_log_name(name)
            known = self._states[place]
            state = PartitionState() if known is NEVER_WRITTEN else known
            self._states[place], _ = await catch_up(self._g.consensus, self._g.objects, partition_log(*place), state)
            self._logs.done([name])

    def _record_writers(self, found: list[ObjectMeta]) -> None:
        newest: dict[str, int] = {}
        for meta in found:
            writer, number = parse_writer(meta.key)
            newest[writer] = max(number, newest.get(writer, 0))
        at: dict[Place, int] | None = None
        for writer, number in newest.items():
            known = self._seen.get(writer)
            if known is None or known.number < number:
                at = at if at is not None else {place: state.applied for place, state in self._states.items()}
                self._seen[writer] = _WriterProgress(number, at)
        self._writers |= newest.keys()

    async def _read_footers(self, found: list[ObjectMeta], live: set[str], budget: StepBudget) -> bool:
        """Read the footer of each unnamed object once. Return True when some are left for the next step."""
        read = 0
        for meta in found:
            if meta.key in self._garbage or meta.key in self._strange:
                continue
            if meta.key in live:
                continue
            if read >= FOOTERS_MIN and not budget.has_budget:
                return True
            read += 1
            try:
                places = await self._checked_places(meta)
            except MissingError:
                continue
            except CorruptError:
                self._strange.add(meta.key)
                continue
            at = {place: self._states[place].applied for place in places if place in self._states}
            self._garbage[meta.key] = _GarbageObject(meta, places, self._g.clock.monotonic_s(), at)
        return False

    async def _checked_places(self, meta: ObjectMeta) -> tuple[Place, ...]:
        """Return the partitions in an object's footer. Raises CorruptError, MissingError."""
        return await read_verified(self._g.objects, meta.key, partial(self._read_places, meta))

    async def _read_places(self, meta: ObjectMeta) -> tuple[Place, ...]:
        size = FOOTER_BYTES
        while True:
            start = max(0, meta.size_bytes - size)
            tail = await self._g.objects.get(meta.key, start, meta.size_bytes)
            try:
                return tuple((region.topic_id, region.partition) for region in decode_footer(tail))
            except CorruptError:
                if start == 0:
                    raise
                size *= 16

    def _undecided_partitions(self, garbage: _GarbageObject) -> list[Place]:
        """Return the partitions whose logs may still come to name the object."""
        writer, number = parse_writer(garbage.meta.key)
        seen = self._seen.get(writer)
        waits = []
        for place in garbage.places:
            state = self._states.get(place)
            if state is None:
                continue  # deleted: no reader reads it, even if more is placed
            # Both positions were read after the object had been listed, so the lesser one decides.
            known = [at[place] for at in (garbage.at, seen.at if seen is not None else {}) if place in at]
            if not known or not state.settled.is_settled(writer, number, min(known)):
                waits.append(place)
        return waits

    async def _collect_if_safe(self, garbage: _GarbageObject, rows: Mapping[Place, int]) -> None:
        if garbage.passed is None:
            states = {place: self._states[place] for place in garbage.places if place in self._states}
            garbage.passed = {place: state.hot_start for place, state in states.items()}
        for place in garbage.places:
            deleted = place not in self._states
            # Invariant (restorable): wait until the row has followed to where the hot state began then. The current
            # start of a busy partition would never be reached.
            if place in rows and (deleted or rows[place] < garbage.passed.get(place, 0)):
                return
        now_s = self._g.clock.monotonic_s()
        if garbage.ready_s is None:
            garbage.ready_s, garbage.horizon = now_s, await self._persisted.committed_seqnos()
        if now_s - garbage.ready_s >= self._g.retention.collect_after_s and await self._persisted.is_persisted_up_to(
            garbage.horizon
        ):
            await self._g.objects.delete(garbage.meta.key)
            del self._garbage[garbage.meta.key]
            self._figures.deleted_objects += 1
            self._figures.deleted_bytes += garbage.meta.size_bytes

    async def _settle_partitions(self, undecided: Mapping[Place, float]) -> None:
        """Make partitions decide. Leaders decide without help where something is written; the others are made to
        after a while."""
        before_s = self._g.clock.monotonic_s() - self._g.retention.collect_after_s
        due = sorted((seen_s, place) for place, seen_s in undecided.items() if seen_s <= before_s)
        error: TidemillError | None = None
        for _, place in due[:SETTLED_PER_STEP]:
            try:
                await settle_partition(self._g.consensus, self._g.objects, self._g.clock, self._g.rand, *place)
                self._figures.settled += 1
            except TidemillError as failed:
                error = failed
        if error is not None:
            raise error
