"""Mints the capture's bindings: time → offsets of all its topics, always at a commit boundary.

    kind        when                                             what it covers
    busy        commits became durable; at most one per interval the newest durable commit
    marker      a commit with markers became durable             exactly up to that commit, one per tag
    idle        only the LSN moved; at most one per idle_ms,     the same offsets, the newest idle LSN
                the first one FIRST_IDLE_MS after a commit
    none        nothing moved                                    -

B1  Offsets and LSN of a binding describe one commit boundary: every transaction at or below `lsn` is in, none after.
B2  No binding is minted below `gate` (from where on the newest table snapshot is exact): only from there on do all
    tables show one state of the database. Tags met before are carried by the first binding at or above it.
B4  The LSN of the newest binding is the last one that is confirmed to PostgreSQL, that of idle WAL too (`on_stored`).
    So a slot that is beyond it was moved by somebody else. Where the server asks for a reply the idle LSN is bound at
    once: a server that shuts down waits for that.
B3  After a binding is stored, and not before, its last commit is reported flushed (topic_writer W2). A marker is
    therefore minted even if the process dies right after its commit was written.

There is one minter of boundaries, the holder of the capture's lock; a Conflict means that a predecessor's attempt
landed late, or that somebody moved an idle source's time on.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from tidemill.base.clock import Clock
from tidemill.base.lsn import ChangePosition
from tidemill.base.status.histogram import Stages
from tidemill.capture.topics.commit_boundaries import Boundary, merged
from tidemill.metastore.catalogue import TableSnapshot
from tidemill.shards.api import Binding, Remap
from tidemill.shards.bindings.minter import Minter

MERGE_ABOVE = 256
FIRST_IDLE_MS = 500
"""After a commit the end of its WAL is bound so soon, and confirmed; later only every `idle_ms`."""


def where_to_start(
    snapshots: Mapping[str, TableSnapshot], latest: Binding | None
) -> tuple[dict[str, list[int]], int, int | None]:
    """What `Binder.start_at` is told, of tables by topic id: next offsets, gate and late LSN. Pure."""
    starts: dict[str, list[int]] = {}
    late: list[int] = []
    for topic_id, snapshot in snapshots.items():
        bound = latest.offsets.get(topic_id) if latest is not None else None
        if bound is None:
            # A commit that begins right where the WAL ended is in the stream, not in the copy.
            late.append(max(snapshot.lsn - 1, snapshot.joined_lsn))
        starts[topic_id] = list(bound if bound is not None else snapshot.offsets)
    gate = max((snapshot.exact_lsn for snapshot in snapshots.values()), default=0)
    return starts, gate, min(late, default=None)


class Binder:
    """`on_bound(position)`: everything up to this commit boundary is covered by a stored binding. `on_stored(lsn)`: of
    each binding, as soon as it is."""

    def __init__(
        self,
        remap: Remap,
        clock: Clock,
        on_bound: Callable[[ChangePosition], None],
        *,
        interval_ms: int = 50,
        idle_ms: int = 5_000,
        stages: Stages | None = None,
        on_stored: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._clock = clock
        self._on_stored = on_stored
        self._hurried = False
        self._stages = stages or Stages()
        self._timed_ms = 0
        """Commit time that the newest binding has brought."""
        self._minter = Minter(remap, clock, interval_ms=interval_ms)
        self._on_bound = on_bound
        self._idle_ms = self._pause_ms = idle_ms
        self._offsets: dict[str, list[int]] = {}
        self._lsn = 0
        self._era = 0
        self._source_time_ms = 0
        self._bound_to: ChangePosition | None = None
        self._early_tags: list[str] = []
        self._ready: deque[Boundary] = deque()
        self._wake = asyncio.Event()
        self.gate = 0

    @property
    def latest(self) -> Binding | None:
        return self._minter.latest

    async def open(self) -> Binding | None:
        """Read the newest binding: where the previous session stopped."""
        latest = await self._minter.open()
        if latest is not None:
            self._lsn, self._era = latest.lsn, latest.era
            self._source_time_ms = self._timed_ms = latest.source_time_ms
        return latest

    def start_at(self, offsets: dict[str, list[int]], gate: int, late_lsn: int | None = None) -> None:
        """`offsets`: next offset per partition of every topic, as of the newest binding or the snapshot's end.

        `late_lsn`: a table was copied beside the stream, and the stream is told again from here. Until it has come to
        the newest binding, that table is behind the others, and no boundary describes all of them (B1).
        """
        self._offsets = offsets
        self.gate = gate
        if late_lsn is not None and late_lsn < self._lsn:
            self.gate = max(gate, self._lsn)
            self._lsn = late_lsn

    def durable(self, boundaries: Sequence[Boundary]) -> None:
        """Plain call, in commit order. While minting is slow, boundaries without tags are merged, to bound memory."""
        newest = next((boundary for boundary in reversed(boundaries) if boundary.commit), None)
        if newest is not None:
            self._stages.add("durable", [newest.commit_time_ms], self._clock.now_ms())
        for boundary in boundaries:
            if len(self._ready) >= MERGE_ABOVE and not self._ready[-1].tags:
                self._ready[-1] = merged(self._ready[-1], boundary)
            else:
                self._ready.append(boundary)
        self._wake.set()

    async def run(self) -> None:
        """For ever. Raises Unavailable when somebody else's binding makes this session's count worthless."""
        while True:
            self._fold_progress()
            if self._ready:
                await self._mint_ready()
            else:
                await self._idle()

    async def _idle(self) -> None:
        """Until there is more to bind, or the idle LSN's turn has come. Without either: for as long as it takes."""
        self._wake.clear()
        if not self._moved():
            await self._wake.wait()
            return
        try:
            async with asyncio.timeout(0.0 if self._hurried else self._minter.due_in_s(self._pause_ms)):
                await self._wake.wait()
        except TimeoutError:
            # The first one at or above the gate, as well as any: it carries the tags from below (B2).
            tags, self._early_tags = self._early_tags or [""], []
            for tag in tags:
                await self._mint(tag)
            self._pause_ms = self._idle_ms

    def hurry(self) -> None:
        """Bind the idle LSN as soon as it has moved (B4)."""
        self._hurried = True
        self._wake.set()

    def _moved(self) -> bool:
        if not self._offsets or self._lsn < self.gate:
            return False
        return self.latest is None or self._lsn > self.latest.lsn or self._changed()

    async def settle(self) -> None:
        """Once `run` has ended: bind the idle LSN that PostgreSQL was told of before its turn came, so that whoever
        restores what is stored now does not find the slot ahead of it. Not past a commit that is not reported: its
        markers are still to be bound (B3)."""
        self._fold_progress()
        if self._bound_to is None and not self._early_tags and self._moved():
            await self._mint("")

    async def _mint_ready(self) -> None:
        self._pause_ms = min(self._idle_ms, FIRST_IDLE_MS)
        if not any(boundary.tags for boundary in self._ready):
            await self._minter.until_due()
        before = self.latest.lsn if self.latest is not None else -1
        tags = self._fold()
        if self._lsn >= self.gate:
            tags, self._early_tags = [*self._early_tags, *tags], []
            for tag in tags:
                await self._mint(tag)
            if not tags and (self._lsn > before or self._changed()):
                await self._mint("")
            self._report()
        else:
            self._early_tags += tags

    def _fold(self) -> list[str]:
        """Move to the newest ready boundary, but not past one with markers that are still to be bound."""
        while self._ready:
            boundary = self._ready.popleft()
            self._take(boundary)
            if boundary.tags and not self._bound_before(boundary):
                return list(boundary.tags)
        return []

    def _fold_progress(self) -> None:
        """Leading boundaries without a transaction move the LSN only: the next binding tells."""
        while self._ready and not self._ready[0].commit:
            self._take(self._ready.popleft())

    def _take(self, boundary: Boundary) -> None:
        for topic_id, partition, offset in boundary.offsets:
            self._offsets[topic_id][partition] = offset
        self._lsn = max(self._lsn, boundary.lsn)
        if boundary.commit:
            self._source_time_ms = max(self._source_time_ms, boundary.commit_time_ms)
            self._bound_to = boundary.last

    def _bound_before(self, boundary: Boundary) -> bool:
        """Its markers were bound by a session that died before it could say so. Bindings are minted in commit order."""
        latest = self.latest
        if latest is None or latest.lsn < boundary.lsn:
            return False
        return latest.lsn > boundary.lsn or latest.tag == boundary.tags[-1]

    def _report(self) -> None:
        if self._bound_to is not None:
            self._on_bound(self._bound_to)
            self._bound_to = None

    def _changed(self) -> bool:
        offsets = self._snapshot()
        return self.latest is None or self._minter.whole(self.latest, offsets) != offsets

    def _snapshot(self) -> dict[str, tuple[int, ...]]:
        return {topic_id: tuple(offsets) for topic_id, offsets in self._offsets.items()}

    async def _mint(self, tag: str) -> None:
        """Store one binding for the boundary at hand."""
        time_ms = self._source_time_ms
        await self._minter.mint(Binding(0, self._snapshot(), self._lsn, time_ms, tag, self._era))
        self._hurried = False
        self._on_stored(self._lsn)
        if time_ms > self._timed_ms:
            self._timed_ms = time_ms
            self._stages.add("bound", [time_ms], self._clock.now_ms())
