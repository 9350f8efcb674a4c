"""Shards and bindings as rows of the metastore (RFC 0002 §6): their changes, in groups that are committed atomically.

A shard is a header (its state without batches) and one row per batch, named by its lower bound. Groups are written in
order, each atomically. After each of them the rows are a state that can be restored:

    header with the new since, the old upper      merged batches have times only from the new since on; since < upper
    a batch, and the deletion of those it covers  compaction replaced several batches by it
    header with the new upper                     counts only batches that exist; together with the batch across the
                                                  old upper, whose times may all have been moved beyond that

Rows beyond the header's upper are ignored when a shard is reassembled.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from tidemill.base.errors import CorruptError, MissingError
from tidemill.consensus.api import Consensus
from tidemill.consensus.state_log.replica import Replica
from tidemill.shards.api import Batch
from tidemill.shards.bindings.remap import StoredRecord, decode_record, remap_log_name
from tidemill.shards.state.codec import decode_state, encode_batch, encode_state
from tidemill.shards.state.state import ShardState, batch_sums
from tidemill.shards.state.state_machine import shard_replica


class BatchBytes(NamedTuple):
    """One batch as a row. `objects` are the keys of its parts that are objects."""

    lower: int
    upper: int
    data: bytes
    objects: tuple[str, ...]


class ShardGroup(NamedTuple):
    """Rows that are written atomically.

    `header` is the state without batches, or None to leave the shard's row unchanged.
    """

    header: ShardState | None
    batches: tuple[BatchBytes, ...] = ()
    removed: tuple[int, ...] = ()
    """Lower bounds of batch rows to delete."""


class ShardFollower:
    """Follower of one shard's log. `header` and `batches` (lower → upper, bytes) are the contents of its rows."""

    def __init__(
        self,
        consensus: Consensus,
        shard_id: str,
        header: ShardState | None = None,
        batches: Mapping[int, tuple[int, bytes]] | None = None,
    ) -> None:
        self._log: Replica[ShardState | None] = shard_replica(consensus, shard_id)
        self._header = header
        self._uppers = {lower: upper for lower, (upper, _) in (batches or {}).items()}
        self._bytes: dict[int, bytes] = {lower: data for lower, (_, data) in (batches or {}).items()}
        """Bytes of the rows found at the start, compared once; later the batches themselves are compared."""
        self._known: dict[int, Batch] = {}
        self._state: ShardState | None = None

    @property
    def position(self) -> int:
        """Next position of the shard's log as of the last `gather`."""
        return self._log.position

    async def read_changes(self) -> list[ShardGroup]:
        """Return the groups to write, [] if nothing changed. Raises CorruptError, UnavailableError."""
        await self._log.catch_up()
        state = self._state = self._log.state
        if state is None:
            return []
        return shard_row_changes(self._header, self._uppers, state, self._same)

    def mark_committed(self) -> None:
        """Record that the groups of the last `gather` are committed."""
        state = self._state
        if state is None:
            return
        self._header = state_header(state)
        self._known = {batch.lower: batch for batch in state.batches}
        self._uppers = {batch.lower: batch.upper for batch in state.batches}
        self._bytes = {}

    def _same(self, batch: Batch) -> bool:
        known = self._known.get(batch.lower)
        if known is not None:
            return known is batch or known == batch
        found = self._bytes.get(batch.lower)
        return found is not None and found == encode_batch(batch)


def state_header(state: ShardState) -> ShardState:
    """Return the state without its batches and their sums: the contents of a shard's row.

    Garbage is left out, too, since that of a busy shard may not fit a row. A restored shard has another id, and the old
    one's leftovers are swept as orphans.
    """
    return replace(state, batches=(), rows=0, size_bytes=0, inline_bytes=0, garbage=())


def shard_row_changes(
    old: ShardState | None,
    old_uppers: Mapping[int, int],
    state: ShardState,
    same: Callable[[Batch], bool],
) -> list[ShardGroup]:
    """Return the groups that change rows (`old` header, batch rows by lower → upper) into `state`. Pure.

    The rows are of this shard, or of the one from which it was restored. Raises CorruptError if the state is older than
    the rows: it is another life of the shard, and the rows may be all that is left of the old one.
    """
    header = state_header(state)
    if old is not None and (state.upper < old.upper or state.since < old.since):
        raise CorruptError(
            f"a table's log holds less than its rows: table={state.name} upper={state.upper} row={old.upper}.",
            fix="Consensus was replaced without `tidemill restore`: restore it, or start with an empty bucket.",
        )
    changed = [batch for batch in state.batches if not same(batch)]
    left = sorted(old_uppers)
    covered: set[int] = set()
    groups: list[ShardGroup] = []
    last = ShardGroup(header)
    for batch in changed:
        inside = [lower for lower in _between(left, batch.lower, batch.upper) if lower != batch.lower]
        covered.update(inside)
        if old is not None and batch.lower < old.upper < batch.upper:
            last = ShardGroup(header, (batch_bytes(batch),), tuple(inside))
        else:
            groups.append(ShardGroup(None, (batch_bytes(batch),), tuple(inside)))
    standing = {batch.lower for batch in state.batches}
    stray = tuple(lower for lower in left if lower not in standing and lower not in covered)
    if not changed and not stray and old == header:
        return []
    first: list[ShardGroup] = []
    if old is not None and groups and (header.since != old.since or header.schema != old.schema):
        # With the old tokens: a token means that its append is present, which it may not be yet. A newer schema reads
        # every older batch, but an older one no newer batch. No batch below the old upper has times moved beyond its
        # own upper.
        since = max(old.since, min(header.since, old.upper - 1))
        first = [ShardGroup(replace(old, since=since, schema=header.schema, versions=header.versions))]
    return [*first, *groups, last._replace(removed=(*last.removed, *stray))]


def batch_bytes(batch: Batch) -> BatchBytes:
    objects = tuple(part.object_key for part in batch.parts if part.object_key)
    return BatchBytes(batch.lower, batch.upper, encode_batch(batch), objects)


def _between(ordered: Sequence[int], lower: int, upper: int) -> Sequence[int]:
    return ordered[bisect_left(ordered, lower) : bisect_left(ordered, upper)]


def assemble_state(header: ShardState, batches: Iterable[Batch]) -> ShardState:
    """Assemble the state from a header and batches in order of their lower bounds. Pure.

    Batches beyond the header's upper are left out; one that crosses it is cut there (its rows beyond are hidden).
    Raises CorruptError if the batches are not contiguous from 0 to the upper.
    """
    found: list[Batch] = []
    at = 0
    for batch in batches:
        if batch.lower >= header.upper:
            break
        if batch.lower != at:
            raise CorruptError(
                f"the batches of a table are not contiguous: table={header.name} expected={at} found={batch.lower}.",
                fix="Restore from an older manifest.",
            )
        found.append(batch if batch.upper <= header.upper else replace(batch, upper=header.upper))
        at = found[-1].upper
    if at != header.upper or (header.since and header.since >= header.upper):
        raise CorruptError(
            f"a table's newest batches are missing: table={header.name} found_to={at} upper={header.upper}"
            f" since={header.since}.",
            fix="Restore from an older manifest.",
        )
    sums = [batch_sums(batch) for batch in found]
    return replace(
        header,
        batches=tuple(found),
        rows=sum(s[0] for s in sums),
        size_bytes=sum(s[1] for s in sums),
        inline_bytes=sum(s[2] for s in sums),
    )


def encode_header(state: ShardState) -> bytes:
    return encode_state(state_header(state))


def decode_header(data: bytes) -> ShardState:
    """Decode a header. Raises CorruptError."""
    return decode_state(data)


class StoredBinding(NamedTuple):
    """A binding with `data` as stored in the log (layout: remap)."""

    position: int
    time_ms: int
    data: bytes


class BindingFollower:
    """Follower of the bindings of one source from `last` = (time, position) on, the newest one in a row.

    After a `gather`, rows of times below `forgotten_ms` belong to bindings that the log has truncated since.
    """

    def __init__(self, consensus: Consensus, source: str, last: tuple[int, int] | None = None) -> None:
        self._consensus = consensus
        self._source = source
        self._log = remap_log_name(source)
        self._last = last
        self._next: int | None = None
        self._gathered: tuple[int, int] | None = None
        self._start = -1
        self._new_start = -1
        self.forgotten_ms = 0

    async def read_new_bindings(self) -> list[StoredBinding]:
        """Return the bindings newer than the last one written, oldest first. Raises CorruptError, UnavailableError."""
        while True:
            if self._next is None:
                self._next = await self._resume()
            try:
                found = await self._from(self._next)
                self._new_start = (await self._consensus.log_head(self._log)).start
                self.forgotten_ms = 0
                if self._new_start > max(self._start, 0):
                    self.forgotten_ms = (await self._at(self._new_start)).binding.time_ms
                break
            except MissingError:
                self._next = None  # truncated past the position of the rows: start again from the log's start
        self._gathered = (found[-1].time_ms, found[-1].position) if found else None
        return found

    async def _from(self, position: int) -> list[StoredBinding]:
        found: list[StoredBinding] = []
        while True:
            page = await self._consensus.read(self._log, position)
            for record in page.records:
                found.append(StoredBinding(record.position, decode_record(record.data).binding.time_ms, record.data))
            position += len(page.records)
            if position >= page.head.next:
                return found

    def mark_committed(self) -> None:
        """Record that the bindings of the last `gather` are committed."""
        self._start = self._new_start
        if self._gathered is not None:
            self._last, self._gathered = self._gathered, None
            self._next = self._last[1] + 1

    async def _resume(self) -> int:
        """Return the position after the last binding written: by its time, since a restored log has other positions."""
        head = await self._consensus.log_head(self._log)
        if self._last is None:
            return head.start
        time_ms, position = self._last
        if head.next <= head.start or (await self._at(head.next - 1)).binding.time_ms < time_ms:
            raise CorruptError(
                f"the bindings of a source are older than their rows: source={self._source} row_time_ms={time_ms}.",
                fix="Consensus was replaced without `tidemill restore`: restore it, or start with an empty bucket.",
            )
        low, high = head.start, head.next
        if low <= position < high and (await self._at(position)).binding.time_ms == time_ms:
            return position + 1
        while low < high:
            middle = (low + high) // 2
            if (await self._at(middle)).binding.time_ms > time_ms:
                high = middle
            else:
                low = middle + 1
        # Start at a whole record: the one that a delta refers to may be in no row.
        return low - (await self._at(low)).back if low < head.next else low

    async def _at(self, position: int) -> StoredRecord:
        """Read one binding. Raises MissingError if it is truncated concurrently."""
        page = await self._consensus.read(self._log, position, limit_records=1)
        return decode_record(page.records[0].data)
