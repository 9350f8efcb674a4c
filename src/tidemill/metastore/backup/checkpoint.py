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
CP5  A log that cannot be read leaves its own rows as they are, and those of everything made from it (CP1): it is
     *late*. All others are written. The round then fails with what is wrong, and counts for nobody's age.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Protocol, TypeVar

import msgspec
import structlog

from tidemill.base.clock import Clock
from tidemill.base.errors import ClosedError, ConflictError, FencedError, InvalidError, TidemillError
from tidemill.base.limits import METASTORE_BATCH_ROWS, METASTORE_VALUE_BYTES
from tidemill.base.status.status import StatusTracker
from tidemill.metastore.cluster import domain_of
from tidemill.metastore.domain.state import batch_bytes
from tidemill.metastore.metastore import Metastore
from tidemill.metastore.rows.checkpoints import CHECKPOINTS, CheckpointRow

MARK = "checkpoint"
COMMIT_BYTES = 1 << 20
"""A quarter of what one batch may hold, so that no checkpoint keeps other commits waiting for long."""

UNIT_BYTES = 3 << 20
"""One unit up to this size is still one commit: only then is there no moment at which half of it can be restored."""

COMMIT_ROWS = METASTORE_BATCH_ROWS - 2
"""Beside the checkpoint's own row, and the one that says how far the request log was executed."""

FLUSH_TIMEOUT_S = 60.0
RETRY_PAUSE_S = 1.0
BUDGET_MS = 60_000

Group = list[tuple[bytes, bytes]]
"""Rows written at once: keys and values; the empty value deletes (L8)."""

Unit = list[Group]
"""What one thing (a partition, a source, a shard) changed. After each group its rows can be restored."""

LATE_SHOWN = 10

T = TypeVar("T")

_log = structlog.get_logger()


class Stage(Protocol):
    """One kind of thing that is checkpointed. Follows its logs in memory; reads only what they gained."""

    name: str

    async def load(self) -> None:
        """Begin from what the rows say, forgetting everything else."""
        ...

    async def gather(self) -> dict[str, Unit]:
        """What the rows lack as of some moment during this call, by thing. Raises Unavailable, ClosedError."""
        ...

    unreadable: dict[str, TidemillError]
    """The things that the last `gather` could not read, and why. What cannot be written is put there besides."""

    def late(self, before: Set[str]) -> set[str]:
        """Of this stage: what is unreadable, and what may be made from it or from things `before` it that are late."""
        ...

    def written(self, late: Set[str]) -> None:
        """Everything the last `gather` returned is committed, but for what is late."""
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
        tracker: StatusTracker | None = None,
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
        self._late: set[str] = set()

    def facts(self) -> dict[str, object]:
        """For reports: plain values."""
        age_ms = self._clock.now_ms() - self._position_ms if self._position_ms else None
        return {
            "checkpoint_age_ms": age_ms,
            "checkpoint_rounds": self._round,
            "checkpoint_rows": self._rows,
            "checkpoint_late": sorted(self._late)[:LATE_SHOWN],
        }

    async def run(self) -> None:
        """For ever, a round every interval. Raises ClosedError; everything else is shown by the mark and tried
        again."""
        try:
            while True:
                started_s = self._clock.monotonic_s()
                try:
                    await self.round()
                    pause_s = max(0.0, self._interval_s - (self._clock.monotonic_s() - started_s))
                except ClosedError:
                    raise
                except TidemillError as error:
                    self._mark(self._clock.now_ms(), str(error))
                    _log.warning("checkpoint not written, trying again", cause=str(error), late=len(self._late))
                    # The logs that could be read are written, and nothing begins anew: no haste.
                    pause_s = self._interval_s if self._late else min(self._interval_s, RETRY_PAUSE_S)
                await asyncio.sleep(pause_s)
        finally:
            if self._tracker is not None:
                self._tracker.remove(MARK)

    async def round(self) -> int:
        """Gather and write; returns how many rows were written.

        Raises FencedError when another keeper has taken over meanwhile, Unavailable, Unknown: then the next round
        begins from the rows. What a log that cannot be read raised (CP5) comes after everything else was written.
        """
        self._late = set()
        try:
            count, unreadable = await self._one_round()
        except BaseException:
            self._owned.clear()
            raise
        if unreadable is not None:
            raise unreadable
        return count

    async def _one_round(self) -> tuple[int, TidemillError | None]:
        if not self._owned:
            await self._take_over()
        gathered_ms = self._clock.now_ms()
        gathered: list[tuple[Stage, dict[str, Unit]]] = []
        for stage in reversed(self._stages):
            found = await stage.gather()
            stage.unreadable.update(too_large(found))
            gathered.append((stage, found))
        gathered.reverse()
        late: set[str] = set()
        for stage, _ in gathered:
            late |= stage.late(late)
        self._late = late
        units = [
            (stage, [unit for thing, unit in found.items() if unit and thing not in late]) for stage, found in gathered
        ]
        several = len(self._owned) > 1
        count = sum(len(group) for _, found in units for unit in found for group in unit)
        if count:
            self._mark(gathered_ms, "writing")
            if several:
                await self._metastore.flush(FLUSH_TIMEOUT_S)  # catalogue rows that the partitions refer to
        for stage, changed in units:
            wrote = await self._write(changed)
            stage.written(late)
            if wrote and several:
                await self._metastore.flush(FLUSH_TIMEOUT_S)
        self._rows += count
        for stage, _ in gathered:
            for error in stage.unreadable.values():
                return count, error
        if count or self._position_ms == 0:
            for index in self._owned:
                await self._commit(index, [], gathered_ms)
        self._round += 1
        self._position_ms = gathered_ms
        self._mark(gathered_ms, "")
        return count, None

    async def _take_over(self) -> None:
        """Read the checkpoint rows and make them this keeper's; then begin from what the rows say."""
        domains = len(await self._metastore.domains())
        owned: dict[int, tuple[int, CheckpointRow]] = {}
        for index in range(domains):
            key = CHECKPOINTS.key(slot_of(index, domains))
            found = await self._metastore.get_row(key)
            row = CHECKPOINTS.decode(key, found.value) if found is not None and found.value else None
            number, gathered_ms = (row.round + 1, row.gathered_ms) if row is not None else (1, 0)
            row = CheckpointRow(slot_of(index, domains), self._holder, number, gathered_ms)
            owned[index] = (found.seqno if found is not None else 0, row)
        self._owned = owned
        for index in range(domains):
            await self._commit(index, [])
        for stage in self._stages:
            await stage.load()

    async def _write(self, units: Iterable[Unit]) -> bool:
        """One stage's units, domain by domain; their order among each other is free within a stage."""
        by_domain: dict[int, list[Unit]] = {}
        for unit in units:
            if unit:
                by_domain.setdefault(domain_of(unit[0][0][0], len(self._owned)), []).append(unit)
        for index, found in by_domain.items():
            for rows in packed(found, COMMIT_BYTES, UNIT_BYTES):
                await self._commit(index, rows)
        return bool(by_domain)

    async def _commit(self, index: int, rows: Group, gathered_ms: int = 0) -> None:
        """`gathered_ms` > 0: with these rows the domain holds all that was there then."""
        seqno, row = self._owned[index]
        row = msgspec.structs.replace(row, complete=gathered_ms > 0)
        if gathered_ms:
            row = msgspec.structs.replace(row, round=row.round + 1, gathered_ms=gathered_ms)
        key, value = CHECKPOINTS.encode(row)
        try:
            seqno = await self._metastore.commit([*rows, (key, value)], expects={key: seqno})
        except ConflictError as conflict:
            raise FencedError(
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


async def each_readable(gathering: Mapping[str, Awaitable[T]], unreadable: dict[str, TidemillError]) -> dict[str, T]:
    """What these give, by thing; those that raise are put into `unreadable` instead. Raises ClosedError."""
    found: dict[str, T] = {}
    outcomes = await asyncio.gather(*gathering.values(), return_exceptions=True)
    for thing, outcome in zip(gathering, outcomes, strict=True):
        if isinstance(outcome, TidemillError) and not isinstance(outcome, ClosedError):
            unreadable[thing] = outcome
        elif isinstance(outcome, BaseException):
            raise outcome
        else:
            found[thing] = outcome
    return found


def too_large(units: Mapping[str, Unit]) -> dict[str, TidemillError]:
    """The things with something that no commit takes: they alone are not written."""
    found: dict[str, TidemillError] = {}
    for thing, unit in units.items():
        value_bytes = max((len(value) for group in unit for _, value in group), default=0)
        group_rows = max(map(len, unit), default=0)
        if value_bytes > METASTORE_VALUE_BYTES or group_rows > COMMIT_ROWS:
            found[thing] = InvalidError(
                f"Part of the checkpoint is too large: thing={thing} value_bytes={value_bytes} rows={group_rows}.",
                fix="Report it; until then this thing is restored as it was last written.",
            )
    return found


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
        pieces = [whole] if _bytes(whole) <= unit_bytes and len(whole) <= COMMIT_ROWS else unit
        for piece in pieces:
            piece_bytes = _bytes(piece)
            if pending and (size + piece_bytes > limit_bytes or len(pending) + len(piece) > COMMIT_ROWS):
                yield list(pending.items())
                pending, size = {}, 0
            pending.update(piece)
            size += piece_bytes
    if pending:
        yield list(pending.items())


def _bytes(rows: Group) -> int:
    return batch_bytes([key for key, _ in rows], [value for _, value in rows])
