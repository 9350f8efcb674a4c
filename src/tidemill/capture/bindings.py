"""Mints the capture's bindings: time → offsets of all its topics, always at a commit boundary.

    kind        when                                             what it covers
    busy        commits became durable; at most one per interval the newest durable commit
    marker      a commit with markers became durable             exactly up to that commit, one per tag
    idle        nothing was minted for idle_binding_ms           the same offsets, the newest idle LSN: time moves on

B1  Offsets and LSN of a binding describe one commit boundary: every transaction at or below `lsn` is in, none after.
B2  No binding is minted below `gate` (the LSN of the newest table snapshot): only from there on do all tables show
    one state of the database. Tags met before are carried by the first binding at or above it.
B3  After a binding is stored, and not before, its last commit is reported flushed (topic_writer W2). A marker is
    therefore minted even if the process dies right after its commit was written.

There is one minter, the holder of the capture's lock; a Conflict means a predecessor's attempt landed late.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

import structlog

from tidemill.base.clock import Clock
from tidemill.base.errors import Conflict, Unavailable, Unknown
from tidemill.base.frontier import ChangePosition
from tidemill.capture.boundaries import Boundary, merged
from tidemill.shards.front import Binding, Remap

log = structlog.get_logger()

RETRY_PAUSE_S = 0.1
MERGE_ABOVE = 256


class Binder:
    """`on_bound(position)`: everything up to this commit boundary is covered by a stored binding."""

    def __init__(
        self,
        remap: Remap,
        clock: Clock,
        on_bound: Callable[[ChangePosition], None],
        *,
        interval_ms: int = 50,
        idle_ms: int = 500,
    ) -> None:
        self._remap = remap
        self._clock = clock
        self._on_bound = on_bound
        self._interval_ms = interval_ms
        self._idle_ms = idle_ms
        self._latest: Binding | None = None
        self._offsets: dict[str, list[int]] = {}
        self._lsn = 0
        self._source_time_ms = 0
        self._bound_to: ChangePosition | None = None
        self._early_tags: list[str] = []
        self._ready: deque[Boundary] = deque()
        self._wake = asyncio.Event()
        self._minted_s = float("-inf")
        self.gate = 0

    @property
    def latest(self) -> Binding | None:
        return self._latest

    async def open(self) -> Binding | None:
        """Read the newest binding: where the previous session stopped."""
        self._latest = await self._remap.latest()
        if self._latest is not None:
            self._lsn = self._latest.lsn
            self._source_time_ms = self._latest.source_time_ms
        return self._latest

    def start_at(self, offsets: dict[str, list[int]], gate: int) -> None:
        """`offsets`: next offset per partition of every topic, as of the newest binding or the snapshot's end."""
        self._offsets = offsets
        self.gate = gate

    def durable(self, boundaries: Sequence[Boundary]) -> None:
        """Plain call, in commit order. While minting is slow, boundaries without tags are merged, to bound memory."""
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
        left_s = self._minted_s + self._idle_ms / 1000 - self._clock.monotonic_s()
        self._wake.clear()
        try:
            async with asyncio.timeout(max(0.0, min(left_s, self._idle_ms / 1000))):
                await self._wake.wait()
        except TimeoutError:
            if self._lsn >= self.gate and (self._latest is not None or self._offsets):
                await self._mint("")
            else:
                self._minted_s = self._clock.monotonic_s()

    async def _mint_ready(self) -> None:
        if not any(boundary.tags for boundary in self._ready):
            wait_s = self._minted_s + self._interval_ms / 1000 - self._clock.monotonic_s()
            if wait_s > 0:
                await asyncio.sleep(min(wait_s, self._interval_ms / 1000))
        before = self._latest.lsn if self._latest is not None else -1
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
        latest = self._latest
        if latest is None or latest.lsn < boundary.lsn:
            return False
        return latest.lsn > boundary.lsn or latest.tag == boundary.tags[-1]

    def _report(self) -> None:
        if self._bound_to is not None:
            self._on_bound(self._bound_to)
            self._bound_to = None

    def _changed(self) -> bool:
        return self._latest is None or self._whole(self._latest) != self._snapshot()

    def _snapshot(self) -> dict[str, tuple[int, ...]]:
        return {topic_id: tuple(offsets) for topic_id, offsets in self._offsets.items()}

    def _whole(self, binding: Binding) -> dict[str, tuple[int, ...]]:
        """Its offsets of our topics (bindings also carry topics of tables that are captured no longer)."""
        return {topic_id: binding.offsets.get(topic_id, ()) for topic_id in self._offsets}

    async def _mint(self, tag: str) -> None:
        """Store one binding for the boundary at hand, at the first free time from now on."""
        offsets, lsn = self._snapshot(), self._lsn
        while True:
            latest = self._latest
            now_ms = self._clock.now_ms()
            time_ms = now_ms if latest is None else max(now_ms, latest.time_ms + 1)
            binding = Binding(time_ms, offsets, lsn, self._source_time_ms, tag)
            try:
                self._latest = await self._remap.mint(binding)
                break
            except Conflict:
                self._latest = await self._remap.latest()
                if self._lands_on(binding):
                    break
                if self._latest is not None and self._goes_back(binding):
                    raise Unavailable(
                        f"another minter is ahead: remap={self._remap.name} lsn={self._latest.lsn} ours={lsn}."
                    ) from None
            except (Unavailable, Unknown) as error:
                log.warning("binding not stored, trying again", remap=self._remap.name, cause=str(error))
                await asyncio.sleep(RETRY_PAUSE_S)
        self._minted_s = self._clock.monotonic_s()

    def _lands_on(self, binding: Binding) -> bool:
        """The attempt whose answer was lost did land."""
        latest = self._latest
        return latest is not None and (latest.time_ms, latest.lsn, latest.tag, self._whole(latest)) == (
            binding.time_ms,
            binding.lsn,
            binding.tag,
            binding.offsets,
        )

    def _goes_back(self, binding: Binding) -> bool:
        assert self._latest is not None
        theirs = self._whole(self._latest)
        return self._latest.lsn > binding.lsn or any(
            old > new
            for topic_id, offsets in binding.offsets.items()
            for old, new in zip(theirs[topic_id], offsets, strict=False)
        )
