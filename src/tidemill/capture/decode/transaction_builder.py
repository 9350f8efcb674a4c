"""Build fragments of transactions from pgoutput messages. Pure: no I/O, no clock.

    message          effect
    Begin            opens a transaction; within one stream commit LSNs grow
    Insert/Update/Delete/Truncate   changes, ordinal + 2 each (a key change may be split into n and n + 1)
    Message          transactional with prefix `tidemill`: a Marker on the fragment that commits; others ignored
    Relation         `RelationSeen`, immediately, even inside a transaction; buffered changes stay where they are
    Commit           the last fragment, with everything that is still buffered; with `batches` a whole transaction
                     without markers joins the batch, which the caller takes before what follows it

Invariant (distinct ends): a fragment is emitted when `max_changes` (or `max_bytes`) are buffered, always without the
newest change. So the fragment that commits has its own last position, and a transaction whose size is a multiple of the
limit does not lose its commit to the recognition of replays (electric #3726).

Invariant (deterministic cut): the cut depends only on the stream, so a replay from the same start yields the same
fragments, whether the changes were fed one by one or as ranges of rows (`feed_rows`), and however they were received.

The changes of a paused relation are left out from its LSN on, but keep their ordinals. So later changes have the same
positions whether it was paused then or before a restart. The first transaction from there on ends with a truncate of
the relation, for shapes that follow it outside the topics: their content ends here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

import msgspec

from tidemill.base.errors import CorruptError, InvalidError
from tidemill.base.lsn import ChangePosition
from tidemill.capture.changes import ORDINAL_STEP, Change, Column, Fragment, Marker, Relation
from tidemill.capture.decode.batches import BatchBuilder, join_parts, last_position
from tidemill.capture.decode.row_blocks import ChangePart, RowSegment, SegmentRows
from tidemill.capture.decode.row_tuples import build_change
from tidemill.capture.postgres.pgoutput import (
    PREFIX_AT,
    Begin,
    Commit,
    Delete,
    Insert,
    LogicalMessage,
    Message,
    Origin,
    RelationMessage,
    Truncate,
    TypeMessage,
    Update,
)

MARKER_PREFIX = "tidemill"
FRAGMENT_CHANGES = 500
FRAGMENT_BYTES = 1 << 20
MARKERS_PER_TXN = 64
MARKER_BYTES = 256
"""Maximum size of a marker. Each marker of a transaction becomes a binding in consensus. Additional or longer ones are
left out and counted, because any client that may call pg_logical_emit_message can write them.
"""
_CHANGES = (b"I", b"U", b"D")


class RelationSeen(msgspec.Struct, frozen=True):
    """The stream describes a relation. `changed`: the description is new here; the caller looks it up and calls
    `set_relation` before it feeds the next message.
    """

    message: RelationMessage
    changed: bool


class TransactionBuilder:
    def __init__(
        self,
        relations: Mapping[int, Relation] | None = None,
        *,
        max_changes: int = FRAGMENT_CHANGES,
        max_bytes: int = FRAGMENT_BYTES,
    ) -> None:
        if max_changes < 2:
            raise InvalidError(f"a fragment must hold at least two changes: max_changes={max_changes}.")
        self.changes = 0
        """Version counter of `relations` and of the paused relations."""
        self.relations: dict[int, Relation] = {}
        self.deferrable = False
        """True if some relation has a deferrable key (deferrable_keys.py)."""
        self._names: dict[int, tuple[str, ...]] = {}
        for relation in (relations or {}).values():
            self.set_relation(relation)
        self._max_changes = max_changes
        self._max_bytes = max_bytes
        self._begin: Begin | None = None
        self._last_commit_lsn = 0
        self._emitted = False
        self._buffer: list[ChangePart] = []
        self._count = 0
        self._buffer_bytes = 0
        self._newest_bytes = 0
        self._ordinal = 0
        self._markers: list[Marker] = []
        self.markers_left_out = 0
        self._paused_lsns: dict[int, int] = {}
        self._followed: set[int] = set()
        self._announce: list[Relation] = []
        self.batches = False
        """True if whole transactions are put into batches."""
        self.batch = BatchBuilder()
        """Transactions that are not handed on yet. They come before anything that is fed or returned after them."""

    @property
    def inside_txn(self) -> bool:
        return self._begin is not None

    @property
    def next_position(self) -> ChangePosition | None:
        """Position that the next change gets; None outside a transaction."""
        return ChangePosition(self._begin.final_lsn, self._ordinal) if self._begin is not None else None

    @property
    def commit_lsn(self) -> int:
        """Commit LSN of the open transaction, or 0."""
        return self._begin.final_lsn if self._begin is not None else 0

    @property
    def xid(self) -> int:
        """Transaction id of the open transaction, or 0."""
        return self._begin.xid if self._begin is not None else 0

    def skip_message(self, payload: bytes) -> None:
        """Skip a message that cannot be read. A change keeps its ordinal, so that later changes have the same positions
        even if it can be read some day.
        """
        if payload[:1] in _CHANGES:
            self._ordinal += ORDINAL_STEP

    def set_relation(self, relation: Relation) -> None:
        self.changes += 1
        self.deferrable |= relation.deferrable
        self.relations[relation.oid] = relation
        self._names[relation.oid] = tuple(column.name for column in relation.columns)

    def pause_relation(self, oid: int, lsn: int) -> None:
        """Leave out the relation's changes from the first transaction with a commit LSN of at least `lsn`."""
        if oid not in self._paused_lsns and oid in self.relations:
            self._announce.append(self.relations[oid])
        self.changes += 1
        self._paused_lsns[oid] = min(lsn, self._paused_lsns.get(oid, lsn))

    def continue_for_followers(self, oid: int) -> None:
        """Emit the changes of a paused relation, because shapes follow it outside the topics
        (unaffected_columns.py).
        """
        self.changes += 1
        self._followed.add(oid)

    def is_paused_or_followed(self, oid: int) -> bool:
        """Return whether some future changes of the relation are left out, or are in no topic."""
        return oid in self._paused_lsns or oid in self._followed

    def _skip_if_paused(self, oid: int) -> bool:
        begin = self._begin
        if begin is None or begin.final_lsn < self._paused_lsns.get(oid, begin.final_lsn + 1):
            return False
        self._ordinal += ORDINAL_STEP
        return True

    def feed_message(self, message: Message, size_bytes: int = 0) -> Fragment | RelationSeen | None:
        """Process one message, return what it completes.

        Raises CorruptError if the stream breaks its own grammar, InvalidError if less of an old row is present than the
        relation's `old_rows` demands.
        """
        match message:
            case Insert() | Update() | Delete():
                if self._paused_lsns and self._skip_if_paused(message.oid):
                    return None
                relation, names = self._find_relation(message.oid)
                self._append_change(
                    build_change(relation, names, message, self._next_position_in(relation)), size_bytes
                )
                return self._emit_if_full()
            case Begin():
                if self._begin is not None:
                    raise CorruptError(
                        f"a Begin message inside a transaction: open_xid={self._begin.xid} xid={message.xid}."
                    )
                if message.final_lsn <= self._last_commit_lsn:
                    # The collector would treat it as a replay and drop it.
                    raise CorruptError(
                        f"commits go back: after={self._last_commit_lsn} commit_lsn={message.final_lsn}."
                    )
                self._begin, self._emitted, self._ordinal = message, False, 0
                return None
            case Commit():
                return self._finish_transaction(message)
            case Truncate():
                # One change per relation; only the last can complete a fragment that is returned here.
                return self._add_truncates(message)
            case RelationMessage():
                return RelationSeen(message, not _is_same_description(self.relations.get(message.oid), message))
            case LogicalMessage():
                if message.transactional and message.prefix == MARKER_PREFIX and message.content:
                    self._add_marker(message.content)
                return None
            case TypeMessage() | Origin():
                return None

    def accepts_ranges_of(self, oid: int) -> bool:
        """Return whether the relation's rows may be fed as ranges: it is not paused at any LSN, and they
        can be read.
        """
        return oid not in self._paused_lsns and self.relations[oid].old_rows != "lacking"

    def accepts_segment(self, segment: RowSegment) -> bool:
        """Return whether `feed_rows` may be called for the segment now; otherwise its messages are fed one by one."""
        return self._begin is not None and (not self._paused_lsns or self._paused_lsns.keys().isdisjoint(segment.oids))

    def feed_rows(self, segment: RowSegment, start: int, end: int) -> tuple[Fragment | None, int]:
        """Process changes at the places [start, end) until they complete a fragment; return it, and the place up to
        which they were processed. Equivalent to feeding their messages one by one.
        """
        assert self._begin is not None
        sums = segment.sums
        fits = bisect_right(sums, self._max_bytes - self._buffer_bytes + sums[start], start + 1, end + 1) - start
        count = min(max(min(self._max_changes + 1 - self._count, fits), 2 - self._count), end - start)
        stop = start + count
        rows = SegmentRows(segment, start, stop, self._begin.final_lsn, self._ordinal - ORDINAL_STEP * start)
        self._ordinal += ORDINAL_STEP * count
        self._buffer.append(rows)
        self._count += count
        self._buffer_bytes += sums[stop] - sums[start]
        self._newest_bytes = sums[stop] - sums[stop - 1]
        return self._emit_if_full(), stop

    def count_oversized_marker(self, payload: bytes) -> None:
        """Count a marker that is too large to be read, of which only the head is present. A message with another prefix
        belongs to the application, and is not counted.
        """
        if payload[1] & 1 and payload.startswith(f"{MARKER_PREFIX}\0".encode(), PREFIX_AT):
            self.markers_left_out += 1

    def _add_marker(self, content: bytes) -> None:
        if len(content) > MARKER_BYTES or len(self._markers) >= MARKERS_PER_TXN:
            self.markers_left_out += 1
        else:
            self._markers.append(Marker(content.decode(errors="replace")))

    def _add_truncates(self, message: Truncate) -> Fragment | None:
        for oid in message.oids:
            if self._paused_lsns and self._skip_if_paused(oid):
                continue
            self._append_change(self._build_truncate(self._find_relation(oid)[0]), 0)
        return self._emit_if_full()

    def _finish_transaction(self, message: Commit) -> Fragment | None:
        begin = self._begin
        if begin is None or begin.final_lsn != message.commit_lsn:
            raise CorruptError(f"a Commit message without its Begin: commit_lsn={message.commit_lsn}.")
        for relation in [r for r in self._announce if self._paused_lsns[r.oid] <= begin.final_lsn]:
            # At or above the position where it is paused, so the topic writer leaves it out.
            self._append_change(self._build_truncate(relation), 0)
            self._announce.remove(relation)
        joins_batch = self.batches and not (self._emitted or self._markers or self.deferrable)
        parts, count, size_bytes, markers = self._buffer, self._count, self._buffer_bytes, tuple(self._markers)
        self._begin, self._last_commit_lsn = None, begin.final_lsn
        self._buffer, self._count, self._buffer_bytes, self._markers = [], 0, 0, []
        if joins_batch:
            batch = self.batch
            batch.add(begin.xid, begin.final_lsn, message.commit_time_ms, parts, count, size_bytes)
            full = batch.count > self._max_changes or batch.size_bytes > self._max_bytes
            return batch.take_fragment() if full else None
        return Fragment(
            xid=begin.xid,
            commit_lsn=begin.final_lsn,
            commit_time_ms=message.commit_time_ms,
            begins=not self._emitted,
            commits=True,
            changes=join_parts(parts),
            last=last_position(parts[-1]) if parts else ChangePosition(begin.final_lsn, 0),
            markers=markers,
            size_bytes=size_bytes,
        )

    def _emit_if_full(self) -> Fragment | None:
        """Emit all but the newest change if the buffer is full."""
        if self._count < 2 or (self._count <= self._max_changes and self._buffer_bytes <= self._max_bytes):
            return None
        assert self._begin is not None
        kept = self._hold_back_newest()
        fragment = Fragment(
            xid=self._begin.xid,
            commit_lsn=self._begin.final_lsn,
            commit_time_ms=self._begin.commit_time_ms,
            begins=not self._emitted,
            commits=False,
            changes=join_parts(self._buffer),
            last=last_position(self._buffer[-1]),
            size_bytes=self._buffer_bytes,
        )
        self._emitted = True
        self._buffer, self._count, self._buffer_bytes = kept, len(kept), self._newest_bytes
        return fragment

    def _hold_back_newest(self) -> list[ChangePart]:
        """Remove the newest change from the buffer; return the buffer of the next fragment, which begins with it."""
        newest = self._buffer.pop()
        if isinstance(newest, SegmentRows) and len(newest) > 1:
            before, newest = newest.split_at(newest.end - 1)
            self._buffer.append(before)
        self._buffer_bytes -= self._newest_bytes
        return [newest]

    def _next_position_in(self, relation: Relation) -> ChangePosition:
        """Return the position of the next change."""
        if self._begin is None:
            raise CorruptError(f"change outside a transaction: relation={relation.name}.")
        return ChangePosition(self._begin.final_lsn, self._ordinal)

    def _build_truncate(self, relation: Relation) -> Change:
        return Change(relation, "truncate", self._next_position_in(relation))

    def _append_change(self, change: Change, size_bytes: int) -> None:
        self._ordinal += ORDINAL_STEP
        self._buffer.append(change)
        self._count += 1
        self._buffer_bytes += size_bytes
        self._newest_bytes = size_bytes

    def _find_relation(self, oid: int) -> tuple[Relation, tuple[str, ...]]:
        """Return the relation and its column names."""
        relation = self.relations.get(oid)
        if relation is None:
            raise CorruptError(f"change for a relation that the stream has not described: oid={oid}.")
        return relation, self._names[oid]


def is_key_changed(change: Change) -> bool:
    """Return whether an UPDATE changed the primary key of the row."""
    if change.op != "update" or change.old is None or change.new is None:
        return False
    return any(change.old[c.name] != change.new[c.name] for c in change.relation.key_columns)


def merge_relation(message: RelationMessage, known: Relation | None, *, gone: bool = False) -> Relation:
    """Return the relation as the stream describes it, completed by column name with what only the catalogue knows.

    Columns come from the stream, since its tuples contain them. Key, type names and NOT NULL come from `known`; without
    it every column is part of the key. For a table that is `gone` the catalogue cannot report whether its key was
    deferrable. It counts as deferrable if whole old rows permit it, which is correct for any key.
    """
    by_name = {column.name: column for column in known.columns} if known else {}
    columns = []
    for index, wire in enumerate(message.columns):
        old = by_name.get(wire.name)
        same_type = old is not None and (old.type_oid, old.type_mod) == (wire.type_oid, wire.type_mod)
        columns.append(
            Column(
                name=wire.name,
                type_oid=wire.type_oid,
                type_mod=wire.type_mod,
                type_name=old.type_name if old is not None and same_type else f"oid {wire.type_oid}",
                key_index=old.key_index if old is not None else (index if known is None else -1),
                not_null=old.not_null if old is not None else False,
            )
        )
    deferrable = message.identity == "f" if gone or known is None else known.deferrable
    return Relation(message.oid, message.schema, message.table, tuple(columns), deferrable=deferrable)


def includes_primary_key(message: RelationMessage, relation: Relation) -> bool:
    """Return whether the identity that the stream describes has every column of the primary key of `relation`, by name.
    Then each DELETE identifies its row, and each UPDATE that changes the key its old row. For a deferrable key, which
    two rows may share, only a whole row does that.
    """
    flagged = {column.name for column in message.columns if column.identity}
    keys = {column.name for column in relation.key_columns}
    return message.identity == "f" or (flagged >= keys and not relation.deferrable)


def _is_same_description(known: Relation | None, message: RelationMessage) -> bool:
    if known is None or (known.schema, known.table) != (message.schema, message.table):
        return False
    ours = [(c.name, c.type_oid, c.type_mod) for c in known.columns]
    return ours == [(c.name, c.type_oid, c.type_mod) for c in message.columns]
