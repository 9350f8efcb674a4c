"""The checkpoint: rows of what lives in consensus elsewhere, so that the bucket alone can bring it back (RFC 0002 §6).

    gather     downstream first:  shards → bindings → partitions
    write      upstream first:    partitions → bindings → shards

The leader persists them like all rows, within its persist interval.

CP1  After every commit of a round, and so in every manifest, each stage's inputs are at or beyond its outputs: what
     an output of this round was made from had been there when its inputs were gathered, later, and is written
     before it; and what an older output was made from is never taken away by a newer input.
CP2  Domains persist on their own. With several of them, what a stage wrote is flushed before the next stage
     writes, so that CP1 holds over all their manifests together.
CP3  Every commit changes the domain's checkpoint row and expects it as this keeper left it: a keeper that was
     replaced while it was paused writes nothing any more (its older state would break CP1).
CP4  A commit is whole units as long as they fit; one unit larger than a commit is cut between its groups only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import msgspec
import structlog

from tidemill.base.clock import Clock
from tidemill.base.errors import Closed, Conflict, Fenced, TidemillError
from tidemill.base.marks import Tracker
from tidemill.metastore.cluster import domain_of
from tidemill.metastore.metastore import Metastore
from tidemill.metastore.rows.checkpoints import CHECKPOINTS, CheckpointRow
from tidemill.metastore.state import batch_bytes

MARK = "checkpoint"
COMMIT_BYTES = 1 << 20
"""A quarter of what one batch may hold, so that no checkpoint keeps other commits waiting for long."""

UNIT_BYTES = 3 << 20
"""One unit up to this size is still one commit: only then is there no moment at which half of it can be restored."""

FLUSH_TIMEOUT_S = 60.0
RETRY_PAUSE_S = 1.0
BUDGET_MS = 60_000

Group = list[tuple[bytes, bytes]]
"""Rows written at once: keys and values; the empty value deletes (L8)."""

Unit = list[Group]
"""What one thing (a partition, a source, a shard) changed. After each group its rows can be restored."""

_log = structlog.get_logger()


class Stage(Protocol):
    """One kind of thing that is checkpointed. Follows its logs in memory; reads only what they gained."""

    name: str

    async def load(self) -> None:
        """Begin from what the rows say, forgetting everything else."""
        ...

    async def gather(self) -> list[Unit]:
        """What the rows lack as of some moment during this call. Raises Corrupt, Unavailable."""
        ...

    def written(self) -> None:
        """Everything the last `gather` returned is committed."""
        ...


class Checkpointer:
    """`stages`: upstream first. One runs in the cluster; a second one is harmless (CP3)."""

    def __init__(
        self,
        metastore: Metastore,
        stages: Sequence[Stage],
        clock: Clock,
        *,
        holder: str,
        interval_s: float = 10.0,
        tracker: Tracker | None = None,
    ) -> None:
        self._metastore = metastore
        self._stages = list(stages)
        self._clock = clock
        self._holder = holder
        self._interval_s = interval_s
        self._tracker = tracker
        self._owned: dict[int, tuple[int, CheckpointRow]] = {}
        """domain → seqno of its checkpoint row as this keeper left it, and the row"""
        self._round = 0
        self._position_ms = 0
        self._rows = 0

    def facts(self) -> dict[str, object]:
        """For reports: plain values."""
        age_ms = self._clock.now_ms() - self._position_ms if self._position_ms else None
        return {"checkpoint_age_ms": age_ms, "checkpoint_rounds": self._round, "checkpoint_rows": self._rows}

    async def run(self) -> None:
        """For ever, a round every interval. Raises Closed; everything else is shown by the mark and tried again."""
        try:
            while True:
                started_s = self._clock.monotonic_s()
                try:
                    await self.round()
                    pause_s = max(0.0, self._interval_s - (self._clock.monotonic_s() - started_s))
                except Closed:
                    raise
                except TidemillError as error:
                    self._mark(self._clock.now_ms(), str(error))
                    _log.warning("checkpoint not written, trying again", cause=str(error))
                    pause_s = min(self._interval_s, RETRY_PAUSE_S)
                await asyncio.sleep(pause_s)
        finally:
            if self._tracker is not None:
                self._tracker.remove(MARK)

    async def round(self) -> int:
        """Gather and write; returns how many rows were written.

        Raises Fenced when another keeper has taken over meanwhile, Unavailable, Unknown, Corrupt. After any of
        them the next round begins from the rows.
        """
        try:
            return await self._one_round()
        except BaseException:
            self._owned.clear()
            raise

    async def _one_round(self) -> int:
        if not self._owned:
            await self._take_over()
        gathered_ms = self._clock.now_ms()
        units: list[tuple[Stage, list[Unit]]] = []
        for stage in reversed(self._stages):
            units.append((stage, await stage.gather()))
        several = len(self._owned) > 1
        count = sum(len(group) for _, found in units for unit in found for group in unit)
        if count:
            self._mark(gathered_ms, "writing")
            if several:
                await self._metastore.flush(FLUSH_TIMEOUT_S)  # catalogue rows that the partitions refer to
        for stage, found in reversed(units):
            wrote = await self._write(found, gathered_ms)
            stage.written()
            if wrote and several:
                await self._metastore.flush(FLUSH_TIMEOUT_S)
        if count or self._position_ms == 0:
            for index in self._owned:
                await self._commit(index, [], gathered_ms, complete=True)
        self._round += 1
        self._rows += count
        self._position_ms = gathered_ms
        self._mark(gathered_ms, "")
        return count

    async def _take_over(self) -> None:
        """Read the checkpoint rows and make them this keeper's; then begin from what the rows say."""
        domains = len(await self._metastore.domains())
        now_ms = self._clock.now_ms()
        owned: dict[int, tuple[int, CheckpointRow]] = {}
        for index in range(domains):
            key = CHECKPOINTS.key(slot_of(index, domains))
            found = await self._metastore.get_row(key)
            row = CHECKPOINTS.decode(key, found.value) if found is not None and found.value else None
            number = row.round + 1 if row is not None else 1
            row = CheckpointRow(slot_of(index, domains), self._holder, number, now_ms)
            owned[index] = (found.seqno if found is not None else 0, row)
        self._owned = owned
        for index in range(domains):
            await self._commit(index, [], now_ms, complete=False)
        for stage in self._stages:
            await stage.load()

    async def _write(self, units: Iterable[Unit], gathered_ms: int) -> bool:
        """One stage's units, domain by domain; their order among each other is free within a stage."""
        by_domain: dict[int, list[Unit]] = {}
        for unit in units:
            if unit:
                by_domain.setdefault(domain_of(unit[0][0][0], len(self._owned)), []).append(unit)
        for index, found in by_domain.items():
            for rows in packed(found, COMMIT_BYTES, UNIT_BYTES):
                await self._commit(index, rows, gathered_ms, complete=False)
        return bool(by_domain)

    async def _commit(self, index: int, rows: Group, gathered_ms: int, *, complete: bool) -> None:
        seqno, row = self._owned[index]
        row = msgspec.structs.replace(row, round=row.round + complete, gathered_ms=gathered_ms, complete=complete)
        key, value = CHECKPOINTS.encode(row)
        try:
            seqno = await self._metastore.commit([*rows, (key, value)], expects={key: seqno})
        except Conflict as conflict:
            raise Fenced(
                f"another process keeps the checkpoint now: holder={self._holder}.", current=conflict.current
            ) from conflict
        self._owned[index] = (seqno, row)

    def _mark(self, target_ms: int, reason: str) -> None:
        if self._tracker is not None:
            self._tracker.set(
                MARK,
                self._position_ms,
                target_ms,
                now_ms=self._clock.now_ms(),
                held_by="metastore" if reason else "",
                reason=reason,
                budget_ms=BUDGET_MS,
                unit="ms",
            )


def slot_of(domain: int, domains: int) -> str:
    """The first of keeper-0, keeper-1, … whose row lies in `domain`."""
    number = 0
    while domain_of(CHECKPOINTS.key(f"keeper-{number}"), domains) != domain:
        number += 1
    return f"keeper-{number}"


def packed(units: Iterable[Unit], limit_bytes: int, unit_bytes: int) -> Iterator[Group]:
    """Rows for one commit after another, in order (CP4). Pure. One group larger than the limits goes alone."""
    pending: dict[bytes, bytes] = {}  # a key that a unit writes twice is written as it ends
    size = 0
    for unit in units:
        whole = [row for group in unit for row in group]
        pieces = [whole] if _bytes(whole) <= unit_bytes else unit
        for piece in pieces:
            piece_bytes = _bytes(piece)
            if pending and size + piece_bytes > limit_bytes:
                yield list(pending.items())
                pending, size = {}, 0
            pending.update(piece)
            size += piece_bytes
    if pending:
        yield list(pending.items())


def _bytes(rows: Group) -> int:
    return batch_bytes([key for key, _ in rows], [value for _, value in rows])
