"""Mint the capture's bindings: time → offsets of all its topics, always at a commit boundary.

    kind        when                                             what it covers
    busy        commits became durable; at most one per interval the newest durable commit
    marker      a commit with markers became durable             exactly up to that commit, one per tag
    idle        only the LSN moved; at most one per idle_ms,     the same offsets, the newest idle LSN
                the first one FIRST_IDLE_MS after a commit
    none        nothing moved                                    -

Invariant (one boundary): offsets and LSN of a binding describe one commit boundary: every transaction at or below `lsn`
is included, none after it.

Invariant (gate): no binding is minted below `gate`, from which on the newest table snapshot is exact. Only from there
on do all tables show one state of the database. Earlier tags are carried by the first binding at or above it.

Invariant (bound before flushed): the last commit of a binding is reported as flushed after the binding is stored, and
not before (topic_writer). A marker is therefore minted even if the process dies right after its commit was written.

Invariant (confirmed ≤ bound): the LSN of the newest binding is the last one that is confirmed to PostgreSQL, including
that of idle WAL (`on_stored`). So if a slot is beyond it, another client moved the slot. If the server requests a
reply, the idle LSN is bound immediately, because a server that shuts down waits for that.

There is one minter of boundaries, the session with the capture's lock. A ConflictError means that a predecessor's
attempt landed late, or that another process advanced an idle source's time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import msgspec

from tidemill.base.clock import Clock
from tidemill.base.lsn import ChangePosition
from tidemill.base.status.histogram import StageHistograms
from tidemill.metastore.catalogue import TableSnapshot
from tidemill.shards.api import Binding, Remap
from tidemill.shards.bindings.minter import BindingMinter

MAX_UNMERGED_BOUNDARIES = 256
FIRST_IDLE_MS = 500
"""Delay after a commit until the end of its WAL is bound, and confirmed; later only every `idle_ms`."""


class CommitBoundary(msgspec.Struct, frozen=True):
    """The end of one transaction (or, with `commit` false, of WAL without one, from a keepalive).

    lsn       inclusive: every transaction whose commit record starts at or below it is covered
    offsets   (topic id, partition, next offset) of the partitions that it touched
    tags      contents of its markers
    """

    lsn: int
    last: ChangePosition
    commit: bool
    commit_time_ms: int = 0
    offsets: Sequence[tuple[str, int, int]] = ()
    tags: tuple[str, ...] = ()


def merge_boundaries(earlier: CommitBoundary, later: CommitBoundary) -> CommitBoundary:
    """Merge two successive boundaries, the earlier of which has no tags, to one with everything that a binding at the
    later one needs.
    """
    offsets = {(topic_id, partition): offset for topic_id, partition, offset in (*earlier.offsets, *later.offsets)}
    newest = later if later.commit else earlier
    return CommitBoundary(
        lsn=later.lsn,
        last=newest.last,
        commit=newest.commit,
        commit_time_ms=max(earlier.commit_time_ms, later.commit_time_ms),
        offsets=tuple((topic_id, partition, offset) for (topic_id, partition), offset in offsets.items()),
        tags=later.tags,
    )


def compute_start(
    snapshots: Mapping[str, TableSnapshot], latest: Binding | None
) -> tuple[dict[str, list[int]], int, int | None]:
    """Return the arguments of `Binder.start_at` for tables by topic id: next offsets, gate and late LSN. Pure."""
    starts: dict[str, list[int]] = {}
    late: list[int] = []
    for topic_id, snapshot in snapshots.items():
        bound = latest.offsets.get(topic_id) if latest is not None else None
        if bound is None:
            # A commit that begins exactly where the WAL ended is in the stream, not in the copy.
            late.append(max(snapshot.lsn - 1, snapshot.joined_lsn))
        starts[topic_id] = list(bound if bound is not None else snapshot.offsets)
    gate = max((snapshot.exact_lsn for snapshot in snapshots.values()), default=0)
    return starts, gate, min(late, default=None)


class Binder:
    """Task that mints bindings. `on_bound(position)`: a stored binding covers everything up to this commit boundary.
    `on_stored(lsn)`: called for each binding once it is stored.
    """

    def __init__(
        self,
        remap: Remap,
        clock: Clock,
        on_bound: Callable[[ChangePosition], None],
        *,
        interval_ms: int = 50,
        idle_ms: int = 5_000,
        stages: StageHistograms | None = None,
        on_stored: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._clock = clock
        self._on_stored = on_stored
        self._hurried = False
        self._stages = stages or StageHistograms()
        self._timed_ms = 0
        """Commit time of the newest binding."""
        self._minter = BindingMinter(remap, clock, interval_ms=interval_ms)
        self._on_bound = on_bound
        self._idle_ms = self._pause_ms = idle_ms
        self._offsets: dict[str, list[int]] = {}
        self._lsn = 0
        self._era = 0
        self._source_time_ms = 0
        self._bound_to: ChangePosition | None = None
        self._early_tags: list[str] = []
        self._ready: deque[CommitBoundary] = deque()
        self._wake = asyncio.Event()
        self.gate = 0

    @property
    def latest(self) -> Binding | None:
        return self._minter.latest

    async def open(self) -> Binding | None:
        """Read the newest binding, where the previous session stopped."""
        latest = await self._minter.open()
        if latest is not None:
            self._lsn, self._era = latest.lsn, latest.era
            self._source_time_ms = self._timed_ms = latest.source_time_ms
        return latest

    def start_at(self, offsets: dict[str, list[int]], gate: int, late_lsn: int | None = None) -> None:
        """Set the start. `offsets`: next offset per partition of every topic, as of the newest binding or the
        snapshot's end.

        `late_lsn`: a table was copied concurrently with the stream, which is replayed from here. Until the replay
        reaches the newest binding, that table is behind the others, and no boundary describes all of them.
        """
        self._offsets = offsets
        self.gate = gate
        if late_lsn is not None and late_lsn < self._lsn:
            self.gate = max(gate, self._lsn)
            self._lsn = late_lsn

    def add_durable(self, boundaries: Sequence[CommitBoundary]) -> None:
        """Queue durable boundaries, in commit order. Synchronous. While minting is slow, boundaries without tags are
        merged, to bound memory.
        """
        newest = next((boundary for boundary in reversed(boundaries) if boundary.commit), None)
        if newest is not None:
            self._stages.add("durable", [newest.commit_time_ms], self._clock.now_ms())
        for boundary in boundaries:
            if len(self._ready) >= MAX_UNMERGED_BOUNDARIES and not self._ready[-1].tags:
                self._ready[-1] = merge_boundaries(self._ready[-1], boundary)
            else:
                self._ready.append(boundary)
        self._wake.set()

    async def run(self) -> None:
        """Run until cancelled. Raises UnavailableError if a binding of another process invalidates this session's
        count.
        """
        while True:
            self._fold_progress()
            if self._ready:
                await self._mint_ready()
            else:
                await self._wait_idle()

    async def _wait_idle(self) -> None:
        """Wait until there is more to bind, or the idle LSN is due. Without either, wait indefinitely."""
        self._wake.clear()
        if not self._has_unbound_progress():
            await self._wake.wait()
            return
        try:
            async with asyncio.timeout(0.0 if self._hurried else self._minter.due_in_s(self._pause_ms)):
                await self._wake.wait()
        except TimeoutError:
            # Possibly the first binding at or above the gate, so it carries the tags from below.
            tags, self._early_tags = self._early_tags or [""], []
            for tag in tags:
                await self._mint_binding(tag)
            self._pause_ms = self._idle_ms

    def bind_soon(self) -> None:
        """Bind the idle LSN as soon as it has moved."""
        self._hurried = True
        self._wake.set()

    def _has_unbound_progress(self) -> bool:
        if not self._offsets or self._lsn < self.gate:
            return False
        return self.latest is None or self._lsn > self.latest.lsn or self._have_offsets_changed()

    async def bind_idle_lsn(self) -> None:
        """Bind the idle LSN that PostgreSQL received before it was due. Called after `run` has ended, so that a restore
        of the present state does not find the slot ahead of it. Does not pass a commit that is not reported, because
        its markers still have to be bound.
        """
        self._fold_progress()
        if self._bound_to is None and not self._early_tags and self._has_unbound_progress():
            await self._mint_binding("")

    async def _mint_ready(self) -> None:
        self._pause_ms = min(self._idle_ms, FIRST_IDLE_MS)
        if not any(boundary.tags for boundary in self._ready):
            await self._minter.wait_until_due()
        before = self.latest.lsn if self.latest is not None else -1
        tags = self._fold_to_marker()
        if self._lsn >= self.gate:
            tags, self._early_tags = [*self._early_tags, *tags], []
            for tag in tags:
                await self._mint_binding(tag)
            if not tags and (self._lsn > before or self._have_offsets_changed()):
                await self._mint_binding("")
            self._report_bound()
        else:
            self._early_tags += tags

    def _fold_to_marker(self) -> list[str]:
        """Move to the newest ready boundary, but not past one with markers that still have to be bound."""
        while self._ready:
            boundary = self._ready.popleft()
            self._fold_boundary(boundary)
            if boundary.tags and not self._is_already_bound(boundary):
                return list(boundary.tags)
        return []

    def _fold_progress(self) -> None:
        """Process leading boundaries without a transaction, which move the LSN only."""
        while self._ready and not self._ready[0].commit:
            self._fold_boundary(self._ready.popleft())

    def _fold_boundary(self, boundary: CommitBoundary) -> None:
        for topic_id, partition, offset in boundary.offsets:
            self._offsets[topic_id][partition] = offset
        self._lsn = max(self._lsn, boundary.lsn)
        if boundary.commit:
            self._source_time_ms = max(self._source_time_ms, boundary.commit_time_ms)
            self._bound_to = boundary.last

    def _is_already_bound(self, boundary: CommitBoundary) -> bool:
        """Return whether a session that died before it could report them has already bound its markers. Bindings are
        minted in commit order.
        """
        latest = self.latest
        if latest is None or latest.lsn < boundary.lsn:
            return False
        return latest.lsn > boundary.lsn or latest.tag == boundary.tags[-1]

    def _report_bound(self) -> None:
        if self._bound_to is not None:
            self._on_bound(self._bound_to)
            self._bound_to = None

    def _have_offsets_changed(self) -> bool:
        offsets = self._current_offsets()
        return self.latest is None or self._minter.offsets_of(self.latest, offsets) != offsets

    def _current_offsets(self) -> dict[str, tuple[int, ...]]:
        return {topic_id: tuple(offsets) for topic_id, offsets in self._offsets.items()}

    async def _mint_binding(self, tag: str) -> None:
        """Store one binding for the current boundary."""
        time_ms = self._source_time_ms
        await self._minter.mint(Binding(0, self._current_offsets(), self._lsn, time_ms, tag, self._era))
        self._hurried = False
        self._on_stored(self._lsn)
        if time_ms > self._timed_ms:
            self._timed_ms = time_ms
            self._stages.add("bound", [time_ms], self._clock.now_ms())
