"""The job `topic-objects`: an L0 object goes when no partition reads it, or ever will.

    list ──► read every partition's log ──► not named by any: garbage, if every partition in its footer has decided
                                                  │ (else, in time, the partition is made to: topics.settle)
                                                  ▼
             its rows have followed, and are in the bucket ──► collect_after_s later ──► deleted

L1  Listed first, read afterwards, and every log is read: one that cannot be read ends the round.
L2  Decided: the partition's log says, after the object was seen, that its writer has placed what it will ever place
    of it (`partition.state.Settled`). Neither a clock nor an age tells that: a writer may only have been paused.
L3  A restore from the newest manifest finds every object that its rows name: rows first, then the deletion.
L4  Leak before lose: what is not understood stays. A step that was cut off is done again.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import msgspec

from tidemill.base.errors import CorruptError, MissingError, TidemillError
from tidemill.consensus.change_cursor import ChangedLogs
from tidemill.maintenance.checkpoint.restore_horizon import Persisted
from tidemill.maintenance.context import JobContext
from tidemill.maintenance.scheduler import Budget
from tidemill.metastore.rows import PARTITIONS, TOPICS
from tidemill.objects.store import ObjectMeta
from tidemill.objects.verified_read import checked
from tidemill.topics.l0.format import PREFIX, decode_footer, writer_of
from tidemill.topics.lifecycle.settle import settle
from tidemill.topics.partition.recovery import LOG_PREFIX, catch_up, partition_log, place_of
from tidemill.topics.partition.state import PartitionState

LISTED_AT_ONCE = 20_000
"""Keys held at once; the next step goes on after them."""
FOOTER_BYTES = 16 << 10
"""Read from the end of an object at first: the regions of some 250 partitions."""
FOOTERS_AT_LEAST = 64
"""Read in a step whatever its budget: each step gets somewhere."""
SETTLED_AT_ONCE = 16
"""Partitions made to decide in one step: their leaders step down by it."""
QUIET_S = 600.0
"""Between two readings of all logs while nothing is written."""

NOTHING = PartitionState()
"""Of all partitions that nobody has written to: never changed."""

Place = tuple[str, int]


class _Garbage(msgspec.Struct):
    """An object that nothing names. `places`: the partitions in its footer. Times are the monotonic clock's: a wall
    clock that was set must neither shorten a wait nor make it last for ever."""

    meta: ObjectMeta
    places: tuple[Place, ...]
    seen_s: float
    at: dict[Place, int]
    """Where the logs ended, at least, when it was first found that nothing names it."""
    passed: dict[Place, int] | None = None
    """Where the hot states began when none of them named it any more, or ever will."""
    ready_s: float | None = None
    horizon: list[int] = []


class _Seen(msgspec.Struct):
    """How far the logs were, at least, after the writer's newest listed object had been listed: of a writer that has
    stopped, older than when its objects became garbage. Of one that goes on it moves on with every round."""

    number: int
    at: dict[Place, int]


class Figures(msgspec.Struct):
    """Since this node began to lead the job; `waiting`: garbage that may not go yet, `strange`: no L0 objects."""

    deleted_objects: int = 0
    deleted_bytes: int = 0
    settled: int = 0
    waiting: int = 0
    strange: int = 0


class TopicObjects:
    def __init__(self, grounds: JobContext, *, quiet_s: float = QUIET_S, fault: str = "") -> None:
        self._g = grounds
        self._quiet_s = quiet_s
        self._fault = fault
        """Test-only: `first-region` believes that the first partition in an object is the only one, `undecided` that
        what no log names will never be named, `one-report` that a log that cannot be read names nothing."""
        self._persisted = Persisted(grounds.metastore)
        self._logs = ChangedLogs(grounds.consensus, LOG_PREFIX)
        self._states: dict[Place, PartitionState] = {}
        """Of every partition there is."""
        self._garbage: dict[str, _Garbage] = {}
        self._strange: set[str] = set()
        self._seen: dict[str, _Seen] = {}
        self._writers: set[str] = set()
        self._after = ""
        self._listing: tuple[int, str, str] = (0, "", "")
        self._again_s = 0.0
        self._figures = Figures()

    def facts(self) -> dict[str, object]:
        return msgspec.structs.asdict(self._figures)

    async def run(self, budget: Budget) -> bool:
        """One stretch of the listing; True while it has not come to its end."""
        found: list[ObjectMeta] = []
        async for meta in self._g.objects.list(PREFIX, self._after):
            found.append(meta)
            if len(found) >= LISTED_AT_ONCE:
                break
        more = listed = len(found) >= LISTED_AT_ONCE
        self._after = found[-1].key if listed else ""
        if found and not self._worth(found):
            return more
        if found:
            more = await self._round(found, budget) or more
        if not listed:
            self._seen = {writer: seen for writer, seen in self._seen.items() if writer in self._writers}
            self._writers = set()
        self._figures.waiting, self._figures.strange = len(self._garbage), len(self._strange)
        return more

    def _worth(self, found: list[ObjectMeta]) -> bool:
        """An idle cluster is read seldom: nothing new was written, and nothing waits to go."""
        now_s, listing = self._g.clock.monotonic_s(), (len(found), found[0].key, found[-1].key)
        if listing == self._listing and not self._garbage and now_s < self._again_s:
            return False
        self._listing, self._again_s = listing, now_s + self._quiet_s
        return True

    async def _round(self, found: list[ObjectMeta], budget: Budget) -> bool:
        """True when the budget ended before the last footer."""
        topics = {row.topic_id: row.partitions for row in await self._g.metastore.rows(TOPICS)}
        await self._follow(topics)
        self._see(found)
        live = set[str]().union(*(state.live_objects() for state in self._states.values()))
        unread = await self._look(found, live, budget)
        rows = {(row.topic_id, row.partition): row.hot_start for row in await self._g.metastore.rows(PARTITIONS)}
        undecided: dict[Place, float] = {}
        for key, garbage in list(self._garbage.items()):
            if key in live and self._fault != "first-region":
                # Its placeholder was still on its way when the object was listed.
                del self._garbage[key]
            elif waits := self._undecided(garbage):
                for place in waits:
                    undecided[place] = min(garbage.seen_s, undecided.get(place, garbage.seen_s))
            else:
                await self._collect(garbage, rows)
        await self._settle(undecided)
        return unread

    async def _follow(self, topics: Mapping[str, int]) -> None:
        """L1: all that changed is read, and what did not is as it was. Raises whatever keeps a log from being read."""
        places = [(topic_id, partition) for topic_id, count in topics.items() for partition in range(count)]
        self._states = {place: self._states.get(place, NOTHING) for place in places}
        written = await self._logs.look(lambda name: place_of(name) in self._states)
        for name in sorted(written):
            place = place_of(name)
            known = self._states[place]
            state = PartitionState() if known is NOTHING else known
            try:
                found = await catch_up(self._g.consensus, self._g.objects, partition_log(*place), state)
            except TidemillError:
                if self._fault != "one-report":
                    raise
                self._states.pop(place, None)
            else:
                self._states[place] = found[0]
                self._logs.done([name])

    def _see(self, found: list[ObjectMeta]) -> None:
        newest: dict[str, int] = {}
        for meta in found:
            writer, number = writer_of(meta.key)
            newest[writer] = max(number, newest.get(writer, 0))
        at: dict[Place, int] | None = None
        for writer, number in newest.items():
            known = self._seen.get(writer)
            if known is None or known.number < number:
                at = at if at is not None else {place: state.applied for place, state in self._states.items()}
                self._seen[writer] = _Seen(number, at)
        self._writers |= newest.keys()

    async def _look(self, found: list[ObjectMeta], live: set[str], budget: Budget) -> bool:
        """Read the footer of what nothing names, once; True when some are left for the next step."""
        read = 0
        for meta in found:
            if meta.key in self._garbage or meta.key in self._strange:
                continue
            if meta.key in live and self._fault != "first-region":
                continue
            if read >= FOOTERS_AT_LEAST and not budget.left:
                return True
            read += 1
            try:
                places = await self._places(meta)
            except MissingError:
                continue
            except CorruptError:
                self._strange.add(meta.key)
                continue
            if self._fault == "first-region":
                state = self._states.get(places[0])
                if state is not None and meta.key in state.live_objects():
                    continue
                places = places[:1]
            at = {place: self._states[place].applied for place in places if place in self._states}
            self._garbage[meta.key] = _Garbage(meta, places, self._g.clock.monotonic_s(), at)
        return False

    async def _places(self, meta: ObjectMeta) -> tuple[Place, ...]:
        """Raises CorruptError, MissingError."""
        return await checked(self._g.objects, meta.key, partial(self._read_places, meta))

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

    def _undecided(self, garbage: _Garbage) -> list[Place]:
        """L2: the partitions that may still come to name it."""
        if self._fault == "undecided":
            return []
        writer, number = writer_of(garbage.meta.key)
        seen = self._seen.get(writer)
        waits = []
        for place in garbage.places:
            state = self._states.get(place)
            if state is None:
                continue  # deleted: nobody reads it, whatever is still placed
            # Both were read after the object had been listed, so the lesser decides.
            known = [at[place] for at in (garbage.at, seen.at if seen is not None else {}) if place in at]
            if not known or not state.settled.covers(writer, number, min(known)):
                waits.append(place)
        return waits

    async def _collect(self, garbage: _Garbage, rows: Mapping[Place, int]) -> None:
        if garbage.passed is None:
            states = {place: self._states[place] for place in garbage.places if place in self._states}
            garbage.passed = {place: state.hot_start for place, state in states.items()}
        for place in garbage.places:
            deleted = place not in self._states
            # L3: its row is to follow; to where the hot state began then, for a busy one goes on for ever.
            if place in rows and (deleted or rows[place] < garbage.passed.get(place, 0)):
                return
        now_s = self._g.clock.monotonic_s()
        if garbage.ready_s is None:
            garbage.ready_s, garbage.horizon = now_s, await self._persisted.horizon()
        if now_s - garbage.ready_s >= self._g.retention.collect_after_s and await self._persisted.covers(
            garbage.horizon
        ):
            await self._g.objects.delete(garbage.meta.key)
            del self._garbage[garbage.meta.key]
            self._figures.deleted_objects += 1
            self._figures.deleted_bytes += garbage.meta.size_bytes

    async def _settle(self, undecided: Mapping[Place, float]) -> None:
        """Leaders decide by themselves where something is written; after a while the others are made to."""
        before_s = self._g.clock.monotonic_s() - self._g.retention.collect_after_s
        due = sorted((seen_s, place) for place, seen_s in undecided.items() if seen_s <= before_s)
        error: TidemillError | None = None
        for _, place in due[:SETTLED_AT_ONCE]:
            try:
                await settle(self._g.consensus, self._g.objects, self._g.clock, self._g.rand, *place)
                self._figures.settled += 1
            except TidemillError as failed:
                error = failed
        if error is not None:
            raise error
