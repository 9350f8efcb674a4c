"""The engine that turns progress into time: stores the known progress of a source as its next binding.

    minter             its knowledge                              after another minter was first
    a capture          commit boundaries, as the only minter      its own late attempt landed, or the session ends
    a stream's nodes   high watermarks of their own partitions    mint what is still missing, or nothing

Invariant (idle source): nothing is minted while nothing moved; an idle source costs no write and no read. A consumer
that needs its time to advance calls `Remap.advance`.

Invariant (equal minters): concurrent minters lose nothing, since a binding is completed from the newest one.

Invariant (no guess): a binding with an unknown outcome is looked up; until it is resolved, nothing else is minted.
"""

from __future__ import annotations

import asyncio

import structlog
from msgspec.structs import replace

from tidemill.base.clock import Clock
from tidemill.base.errors import ConflictError, UnavailableError, UnknownOutcomeError
from tidemill.shards.api import Binding, Remap
from tidemill.shards.bindings.reclock import missing_offsets

RETRY_PAUSE_S = 0.1

Offsets = dict[str, tuple[int, ...]]

log = structlog.get_logger()


class BindingMinter:
    """Minter of one source, for one caller at a time."""

    def __init__(self, remap: Remap, clock: Clock, *, interval_ms: int) -> None:
        self.latest: Binding | None = None
        self._remap = remap
        self._clock = clock
        self._interval_ms = interval_ms
        self._minted_s = float("-inf")

    @property
    def name(self) -> str:
        return self._remap.name

    async def open(self) -> Binding | None:
        """Read and return the newest binding."""
        self.latest = await self._remap.latest()
        return self.latest

    def due_in_s(self, interval_ms: int | None = None) -> float:
        """Return the time until the next binding may be minted; at most the interval."""
        wait_s = (self._interval_ms if interval_ms is None else interval_ms) / 1000
        return max(0.0, min(wait_s, self._minted_s + wait_s - self._clock.monotonic_s()))

    async def wait_until_due(self) -> None:
        if wait_s := self.due_in_s():
            await asyncio.sleep(wait_s)

    async def mint(self, said: Binding) -> None:
        """Store `said` at the first free time from now on (its own time is ignored), as the only minter.

        Raises UnavailableError if another minter's binding invalidates the caller's progress.
        """
        while True:
            attempt = replace(said, time_ms=self._next_ms())
            try:
                self.latest = await self._remap.mint(attempt)
                break
            except ConflictError:
                self.latest = await self._remap.latest()
                if self._is_latest(attempt):
                    break
                if self.latest is not None and self._is_behind_latest(attempt):
                    raise UnavailableError(
                        f"another minter is ahead: remap={self.name} lsn={self.latest.lsn} ours={attempt.lsn}."
                    ) from None
            except (UnavailableError, UnknownOutcomeError) as error:
                await self._pause(error)
        self._minted_s = self._clock.monotonic_s()

    async def mint_missing(self, seen: Offsets, source_time_ms: int) -> bool:
        """Store the part of `seen` (topic → next offsets, 0 = not known here) that no binding covers yet; False if all
        is covered.
        """
        while True:
            offsets = missing_offsets(self.latest, seen)
            if not offsets and self.latest is not None:
                return False
            try:
                self.latest = await self._remap.mint(
                    Binding(self._next_ms(), offsets or seen, source_time_ms=source_time_ms)
                )
                break
            except ConflictError:
                self.latest = await self._remap.latest()
            except (UnavailableError, UnknownOutcomeError) as error:
                await self._pause(error)
                self.latest = await self._remap.latest()
        self._minted_s = self._clock.monotonic_s()
        return True

    def offsets_of(self, binding: Binding, topics: Offsets) -> Offsets:
        """Return a binding's offsets of these topics.

        Bindings also have topics of tables that are no longer captured.
        """
        return {topic_id: binding.offsets.get(topic_id, ()) for topic_id in topics}

    def _next_ms(self) -> int:
        now_ms = self._clock.now_ms()
        return now_ms if self.latest is None else max(now_ms, self.latest.time_ms + 1)

    async def _pause(self, error: UnavailableError | UnknownOutcomeError) -> None:
        log.warning("binding not stored, retrying", remap=self.name, cause=str(error))
        await asyncio.sleep(RETRY_PAUSE_S)

    def _is_latest(self, binding: Binding) -> bool:
        """Return whether the attempt whose answer was lost did land."""
        latest = self.latest
        return latest is not None and (
            latest.time_ms, latest.era, latest.lsn, latest.tag, self.offsets_of(latest, binding.offsets),
        ) == (binding.time_ms, binding.era, binding.lsn, binding.tag, binding.offsets)  # fmt: skip

    def _is_behind_latest(self, binding: Binding) -> bool:
        assert self.latest is not None
        theirs = self.offsets_of(self.latest, binding.offsets)
        return (self.latest.era, self.latest.lsn) > (binding.era, binding.lsn) or any(
            old > new
            for topic_id, offsets in binding.offsets.items()
            for old, new in zip(theirs[topic_id], offsets, strict=False)
        )
