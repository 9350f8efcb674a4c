"""Stored data of a capture, read without faults and compared with the database's history (see `capture_topics`)."""

from __future__ import annotations

import json
from collections.abc import Mapping

from sim.scenarios.capture_database import Database, Taken, Wanted
from sim.world import Violated, World
from tidemill.capture.changes import LSN_NEVER
from tidemill.capture.config import CaptureConfig
from tidemill.capture.postgres.pg_snapshot import PgSnapshot
from tidemill.capture.topics.partition_tails import read_position
from tidemill.metastore.catalogue import CaptureTableRow, Catalogue, TopicRow
from tidemill.shards.api import Binding
from tidemill.shards.bindings.remap import decode_binding, remap_log_name
from tidemill.topics.batch import decode_batch
from tidemill.topics.partition_reader import LogPartitionReader

NAME = "sim"
"""Name of the capture."""


class Oracle:
    """Oracle that reads the stored data without faults."""

    def __init__(self, world: World, db: Database, config: CaptureConfig) -> None:
        self._world = world
        self._db = db
        self._config = config
        self._bindings: list[Binding] = []
        self._tags: dict[str, set[int]] = {}

    def bindings(self) -> list[Binding]:
        """Return every binding that ever landed, decoded."""
        landed = self._world.consensus.landed.get(remap_log_name(self._config.remap_name), [])
        for record in landed[len(self._bindings) :]:
            binding = decode_binding(record, self._bindings[-1] if self._bindings else None)
            self._bindings.append(binding)
            if binding.tag:
                self._tags.setdefault(binding.tag, set()).add(binding.lsn)
        return self._bindings

    @property
    def bound(self) -> int:
        stored = self.bindings()
        return stored[-1].lsn if stored else 0

    def check_reported(self, flushed: int) -> None:
        """Check that every confirmed commit is bound."""
        bound, slot = self.bound, self._db.slot_lsn
        unbound = [t.lsn for t in self._db.log if t.sent and max(bound, slot) < t.lsn <= flushed]
        if unbound:
            # Not raised: within a session it would be another fault, after which the session begins again.
            said = f"confirmed past what is bound: flushed={flushed} bound={bound} commits={unbound}"
            self._world.loop.call_exception_handler({"message": "a status", "exception": Violated(said)})

    async def watch(self) -> None:
        """Check every binding when it lands."""
        log, seen = remap_log_name(self._config.remap_name), 0
        while True:
            await self._world.consensus.wait(log, seen, 600.0)
            seen = len(self._world.consensus.landed.get(log, ()))
            await self.check_bound()

    async def check_bound(self) -> None:
        """Check that all bound offsets are durable."""
        reader = LogPartitionReader(self._world.consensus, self._world.objects)
        for binding in self.bindings()[-1:]:
            for topic_id, offsets in binding.offsets.items():
                for partition, offset in enumerate(offsets):
                    held = await reader.high_watermark(topic_id, partition)
                    if offset > held:
                        raise Violated(f"bound past what is durable: topic={topic_id} bound={offset} held={held}")

    def _lost(self, binding: Binding) -> bool:
        """Return whether the binding describes only history that the database lost in its failover."""
        fork_lsn = self._db.fork_lsn
        return fork_lsn is not None and not binding.era and binding.lsn >= fork_lsn and self._forked

    @property
    def _forked(self) -> bool:
        """True if a binding is of a later era."""
        return any(binding.era for binding in self.bindings())

    async def check(self, catalogue: Catalogue) -> None:
        """Check the stored data, once nothing moves any more."""
        for row in await catalogue.tables(NAME):
            topic = await catalogue.get(TopicRow, row.topic)
            if row.snapshot is None or topic is None or not (row.is_streaming or row.paused_lsn):
                raise Violated(f"a table is not captured in the end: row={row} topic={topic}")
            await self._check_topic(row, topic)
        bindings = self.bindings()
        for txn in self._db.log:
            # An idle binding after it hides the tag from the next life, which binds it again, at the same place.
            if txn.tag and txn.lsn > self._db.slot_lsn and txn.lsn <= bindings[-1].lsn:
                at = self._tags.get(txn.tag, set())
                # Tags from before a copy are bound by the first binding after it.
                late = min((copied for copied in self._db.copies if copied > txn.lsn), default=LSN_NEVER)
                if not at and self._cut_short(late):
                    continue
                if not at or any(lsn != txn.lsn and lsn < late for lsn in at):
                    raise Violated(f"a marker is not bound at its commit: tag={txn.tag} commit={txn.lsn} bound={at}")

    def _cut_short(self, late: int) -> bool:
        """Return whether a session ended after it had bound some of several tags from before one copy: the next session
        treats the rest as bound. Known limitation: it would have to read more than the newest binding."""
        early = [txn.tag for txn in self._db.log if txn.tag and txn.lsn < late < LSN_NEVER]
        return any(lsn >= late for tag in early for lsn in self._tags.get(tag, ()))

    async def _check_topic(self, row: CaptureTableRow, topic: TopicRow) -> None:
        snapshot = row.snapshot
        assert snapshot is not None
        seen = PgSnapshot(snapshot.xmin, snapshot.xmax, frozenset(snapshot.xip))
        taken = self._db.snapshots[seen, snapshot.lsn]
        wanted = self._db.wanted(row.oid, taken.visible, row.paused_lsn or LSN_NEVER, topic.partitions)
        reader = LogPartitionReader(self._world.consensus, self._world.objects)
        parts: list[list[Wanted]] = []
        copied: list[bytes | None] = []
        for partition, due in enumerate(wanted):
            end = await reader.high_watermark(topic.topic_id, partition)
            batches = await reader.read(await reader.plan(topic.topic_id, partition, 0, end))
            found = [Wanted(read_position(r), r.key, r.value) for b in batches for r in decode_batch(b).records]
            parts.append(found)
            start = sum(record.position.commit_lsn == 0 for record in found)
            of_side_topic = sum(record.position.commit_lsn <= snapshot.joined_lsn for record in due)
            if snapshot.offsets[partition] != start + of_side_topic:
                raise Violated(f"a table joins elsewhere: table={row.table}/{partition} copied={start}"
                               f" aside={of_side_topic} snapshot={snapshot}")  # fmt: skip
            copied += [record.key for record in found[:start]]
            held = found[start:]
            # Records that a transaction wrote before it paused the table remain, unbound.
            more = row.paused_lsn and all(r.position.commit_lsn >= row.paused_lsn for r in held[len(due) :])
            if held[: len(due)] != due or (len(held) > len(due) and not more):
                first = next((i for i, pair in enumerate(zip(held, due, strict=False)) if pair[0] != pair[1]),
                             min(len(held), len(due)))  # fmt: skip
                held, due = held[first : first + 3], due[first : first + 3]
                raise Violated(f"a topic is not the history: table={row.table}/{partition} at={start + first}"
                               f" held={held} due={due} copy={snapshot}")  # fmt: skip
            self._check_offsets(topic, partition, start, due, snapshot.exact_lsn)
        if not snapshot.settled_lsn:
            self._check_copy(row, taken, copied)
        self._check_states(row, topic, parts)

    def _check_states(self, row: CaptureTableRow, topic: TopicRow, parts: list[list[Wanted]]) -> None:
        """Check that at every bound time the topic shows one state of the table, independent of how it was copied."""
        for binding in self.bindings():
            offsets = binding.offsets.get(topic.topic_id)
            if offsets is None or self._lost(binding):
                continue
            shown: dict[bytes, bytes] = {}
            for records, offset in zip(parts, offsets, strict=True):
                shown |= _folded(records[:offset])
            rows = self._db.select(row.oid, frozenset(), min(binding.lsn, (row.paused_lsn or LSN_NEVER) - 1))
            due = {_text({"id": int(key)}): _text({**held, "id": int(key)}) for key, held in rows.items()}
            if shown != due:
                keys = {key: (shown.get(key), due.get(key)) for key in shown | due if shown.get(key) != due.get(key)}
                raise Violated(f"a binding shows no state of the table: {binding} topic={topic.name} shown and due="
                               f"{keys} row={row}")  # fmt: skip

    def _check_offsets(self, topic: TopicRow, partition: int, start: int, due: list[Wanted], copied_lsn: int) -> None:
        """Check that every binding is a commit boundary, and not from before a copy of the table."""
        for binding in self.bindings():
            offsets = binding.offsets.get(topic.topic_id)
            if offsets is None or self._lost(binding):
                continue
            covered = start + sum(record.position.commit_lsn <= binding.lsn for record in due)
            if offsets[partition] != covered:
                raise Violated(f"a binding is no commit boundary: {binding} topic={topic.name} covers={covered}")
            # The first binding of an era may be right before the copy's position: no commit is between the two.
            if binding.lsn + bool(binding.era) < copied_lsn:
                raise Violated(f"a binding is from before a copy: {binding} topic={topic.name} copy={copied_lsn}")

    @staticmethod
    def _check_copy(row: CaptureTableRow, taken: Taken, copied: list[bytes | None]) -> None:
        due = sorted(b'{"id":%s}' % key.encode() for key in taken.rows[row.oid])
        if sorted(key or b"" for key in copied) != due:
            raise Violated(f"a copy is not the table: table={row.table} held={copied} due={due}")


def _folded(records: list[Wanted]) -> dict[bytes, bytes]:
    """Return the rows of one partition, key → value."""
    rows: dict[bytes, bytes] = {}
    for record in records:
        if record.key is None:
            rows.clear()
        elif record.value is None:
            rows.pop(record.key, None)
        else:
            rows[record.key] = record.value
    return rows


def _text(row: Mapping[str, object]) -> bytes:
    return json.dumps(row, separators=(",", ":")).encode()
