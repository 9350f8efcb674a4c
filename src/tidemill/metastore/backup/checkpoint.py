"""Checkpoint: rows that copy the consensus state of other packages, so that a restore needs only the bucket (RFC 0002
§6).

    gather     downstream first:  shards → bindings → partitions
    write      upstream first:    partitions → bindings → shards

The leader persists them like all rows, within its persist interval.

- Invariant (inputs cover outputs): after every commit of a round, and so in every manifest, the inputs of each stage
  are at or beyond its outputs. The inputs of an output gathered in this round are gathered after it and written before
  it; a newer input never removes the inputs of an older output.
- Invariant (flush between stages): domains persist independently. If there are several, the rows of a stage are flushed
  before the next stage writes, so that inputs cover outputs across all their manifests.
- Invariant (one writer): every commit changes the domain's checkpoint row and expects it as this process left it. A
  process that was replaced while it was paused writes nothing more; its older state would violate the first invariant.
- Commits contain whole units as long as they fit; a unit larger than a commit is split only between its groups.
- Late things: for a log that cannot be read, its rows and those of everything derived from it stay unchanged; all other
  rows are written. The round then fails with the cause, and no domain's checkpoint age advances.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Protocol, TypeVar

import msgspec
import structlog

from tidemill.base.clock import Clock
from tidemill.base.errors import ClosedError, ConflictError, FencedError, InvalidError, TidemillError
from tidemill.base.limits import (
    METASTORE_BATCH_BYTES,
    METASTORE_BATCH_ROWS,
    METASTORE_CHECKPOINT_INTERVAL_S,
    METASTORE_VALUE_BYTES,
)
from tidemill.base.status.status import StatusTracker
from tidemill.metastore.cluster import domain_of
from tidemill.metastore.domain.state import batch_bytes
from tidemill.metastore.metastore import Metastore
from tidemill.metastore.rows.checkpoints import CHECKPOINTS, CheckpointRow

STAGE_NAME = "checkpoint"
COMMIT_BYTES = 1 << 20
"""Size limit of a commit of several units: a quarter of a batch, so that a checkpoint never delays other commits for
long."""

UNIT_BYTES = 3 << 20
"""Limit up to which one unit is one commit. Only then is there no moment at which half of it can be restored."""

COMMIT_ROWS = METASTORE_BATCH_ROWS - 2
"""Limit of rows in a commit. It leaves room for the checkpoint's own row and the row for the request log's position."""

FLUSH_TIMEOUT_S = 60.0
RETRY_PAUSE_S = 1.0
BUDGET_MS = 60_000

Group = list[tuple[bytes, bytes]]
"""Rows written in one commit: keys and values; the empty value deletes."""

Unit = list[Group]
"""Changes of one thing (a partition, a source, a shard). After each group its rows can be restored."""

LATE_SHOWN = 10

T = TypeVar("T")

_log = structlog.get_logger()


class Stage(Protocol):
    """One kind of thing that is checkpointed. It follows its logs in memory and reads only new records."""

    name: str

    async def load(self) -> None:
        """Start from the stored rows and discard all other state."""
        ...

    async def gather(self) -> dict[str, Unit]:
        """Return the changes since the stored rows, as of some moment during this call, by thing. Raises
        UnavailableError, ClosedError."""
        ...

    unreadable: dict[str, TidemillError]
    """Things that the last `gather` could not read, and why. Things that cannot be written are added."""

    def late_things(self, before: Set[str]) -> set[str]:
        """Return the late things of this stage: unreadable ones, and those that may derive from them or from
        `before`."""
        ...

    def mark_written(self, late: Set[str]) -> None:
        """Record that everything the last `gather` returned is committed, except the late things."""
        ...


class Checkpointer:
    """Writer of the checkpoint. `stages`: upstream first. One instance runs in the cluster; a second one is
    harmless."""

    def __init__(
        self,
        metastore: Metastore,
        stages: Sequence[Stage],
        clock: Clock,
        *,
        holder: str,
        interval_s: float = METASTORE_CHECKPOINT_INTERVAL_S,
        tracker: StatusTracker | None = None,
    ) -> None:
        self._metastore = metastore
        self._stages = list(stages)
        self._clock = clock
        self._holder = holder
        self._interval_s = interval_s
        self._tracker = tracker
        self._owned: dict[int, tuple[int, CheckpointRow]] = {}
        """domain → (seqno of its checkpoint row as this process left it, the row)"""
        self._round = 0
        self._position_ms = 0
        self._rows = 0
        self._late: set[str] = set()

    def facts(self) -> dict[str, object]:
        """Return plain values for reports."""
        age_ms = self._clock.now_ms() - self._position_ms if self._position_ms else None
        return {
            "checkpoint_age_ms": age_ms,
            "checkpoint_rounds": self._round,
            "checkpoint_rows": self._rows,
            "checkpoint_late": sorted(self._late)[:LATE_SHOWN],
        }

    async def run(self) -> None:
        """Write a round every interval, indefinitely. Raises ClosedError; other errors appear in the stage status and
        the round is retried."""
        try:
            while True:
                started_s = self._clock.monotonic_s()
                try:
                    await self.round()
                    pause_s = max(0.0, self._interval_s - (self._clock.monotonic_s() - started_s))
                except ClosedError:
                    raise
                except TidemillError as error:
                    self._publish_status(self._clock.now_ms(), str(error))
                    _log.warning("checkpoint not written, retrying", cause=str(error), late=len(self._late))
                    # With late things all other rows are written and nothing is reloaded: no need for a quick retry.
                    pause_s = self._interval_s if self._late else min(self._interval_s, RETRY_PAUSE_S)
                await asyncio.sleep(pause_s)
        finally:
            if self._tracker is not None:
                self._tracker.remove(STAGE_NAME)

    async def round(self) -> int:
        """Gather and write; return the number of rows written.

        Raises FencedError if another process took over the checkpoint, UnavailableError, UnknownOutcomeError: the next
        round then starts from the stored rows. The error of a log that cannot be read is raised after all other rows
        were written.
        """
        self._late = set()
        try:
            count, unreadable = await self._gather_and_write()
        except BaseException:
            self._owned.clear()
            raise
        if unreadable is not None:
            raise unreadable
        return count

    async def _gather_and_write(self) -> tuple[int, TidemillError | None]:
        if not self._owned:
            await self._claim_rows()
        gathered_ms = self._clock.now_ms()
        gathered: list[tuple[Stage, dict[str, Unit]]] = []
        for stage in reversed(self._stages):
            found = await stage.gather()
            stage.unreadable.update(find_too_large(found))
            gathered.append((stage, found))
        gathered.reverse()
        late: set[str] = set()
        for stage, _ in gathered:
            late |= stage.late_things(late)
        self._late = late
        units = [
            (stage, [unit for thing, unit in found.items() if unit and thing not in late]) for stage, found in gathered
        ]
        several = len(self._owned) > 1
        count = sum(len(group) for _, found in units for unit in found for group in unit)
        if count:
            self._publish_status(gathered_ms, "writing")
            if several:
                await self._metastore.flush(FLUSH_TIMEOUT_S)  # the catalogue rows that the partitions refer to
        for stage, changed in units:
            wrote = await self._write_units(changed)
            stage.mark_written(late)
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
        self._publish_status(gathered_ms, "")
        return count, None

    async def _claim_rows(self) -> None:
        """Read the checkpoint rows, claim them for this process, then load the stages from the stored rows."""
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

    async def _write_units(self, units: Iterable[Unit]) -> bool:
        """Write one stage's units, domain by domain; within a stage their order is free."""
        by_domain: dict[int, list[Unit]] = {}
        for unit in units:
            if unit:
                by_domain.setdefault(domain_of(unit[0][0][0], len(self._owned)), []).append(unit)
        for index, found in by_domain.items():
            for rows in pack_commits(found, COMMIT_BYTES, UNIT_BYTES):
                await self._commit(index, rows)
        return bool(by_domain)

    async def _commit(self, index: int, rows: Group, gathered_ms: int = 0) -> None:
        """Commit rows. `gathered_ms` > 0: with these rows the domain is complete as of that time."""
        seqno, row = self._owned[index]
        row = msgspec.structs.replace(row, complete=gathered_ms > 0)
        if gathered_ms:
            row = msgspec.structs.replace(row, round=row.round + 1, gathered_ms=gathered_ms)
        key, value = CHECKPOINTS.encode(row)
        try:
            seqno = await self._metastore.commit([*rows, (key, value)], expects={key: seqno})
        except ConflictError as conflict:
            raise FencedError(
                f"another process writes the checkpoint now: holder={self._holder}.", current=conflict.current
            ) from conflict
        self._owned[index] = (seqno, row)

    def _publish_status(self, target_ms: int, reason: str) -> None:
        if self._tracker is not None:
            self._tracker.set(
                STAGE_NAME,
                self._position_ms,
                target_ms,
                now_ms=self._clock.now_ms(),
                held_by="metastore" if reason else "",
                reason=reason,
                budget_ms=BUDGET_MS,
                unit="ms",
            )


async def gather_readable(gathering: Mapping[str, Awaitable[T]], unreadable: dict[str, TidemillError]) -> dict[str, T]:
    """Return the results by thing; errors are put into `unreadable` instead. Raises ClosedError."""
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


def find_too_large(units: Mapping[str, Unit]) -> dict[str, TidemillError]:
    """Return an error for each thing with a value or group too large for a commit. Only these things are not
    written."""
    found: dict[str, TidemillError] = {}
    for thing, unit in units.items():
        value_bytes = max((len(value) for group in unit for _, value in group), default=0)
        group_rows = max(map(len, unit), default=0)
        group_bytes = max(map(_bytes, unit), default=0)
        if value_bytes > METASTORE_VALUE_BYTES or group_rows > COMMIT_ROWS or group_bytes > METASTORE_BATCH_BYTES:
            found[thing] = InvalidError(
                f"part of the checkpoint is too large: thing={thing} value_bytes={value_bytes} rows={group_rows}"
                f" bytes={group_bytes}.",
                fix="Report this. Until it is fixed, a restore uses this thing's last written rows.",
            )
    return found


def slot_of(domain: int, domains: int) -> str:
    """Return the first of keeper-0, keeper-1, … whose row belongs to `domain`."""
    number = 0
    while domain_of(CHECKPOINTS.key(f"keeper-{number}"), domains) != domain:
        number += 1
    return f"keeper-{number}"


def pack_commits(units: Iterable[Unit], limit_bytes: int, unit_bytes: int) -> Iterator[Group]:
    """Yield the rows of one commit after another, in order. Pure. A group larger than the limits gets its own
    commit."""
    pending: dict[bytes, bytes] = {}  # the last write of a key within a commit wins
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
