"""Replay of the dead letters of one table.

    records of the letters → commands, with the pipeline's file of today → without keys that have a newer record
    → the operator of the pipeline, against the table's rows of these keys → one append → outcomes

The append is like that of any other writer next to a pipeline (write/commit.py): at the table's upper, a time to which
its source binds nothing, so that no record of the source is skipped. After a lost race everything is computed again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
from msgspec.structs import replace

from tidemill.base.errors import ConflictError, InvalidError, MissingError, UnavailableError
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.metastore.catalogue import TopicRow
from tidemill.shards.api import TIME, HistoryLostError, Remap, SchemaEvolvedError
from tidemill.shards.handle import LogShard
from tidemill.shards.parts.arrow_rows import Index, int64s, rows_at
from tidemill.shards.parts.row_hash import hash_rows
from tidemill.shards.parts.schema import contents_schema
from tidemill.shards.read.hash_ranges import HASH_MAX, range_between, read_range
from tidemill.shards.read.part_reader import fetch_through
from tidemill.spark.decode.dead_letter_rows import Place
from tidemill.spark.decode.records import Slice
from tidemill.spark.formats.schemas.lookup import writer_schemas
from tidemill.spark.ingest.dead_letters import letters_of_resolved
from tidemill.spark.ingest.fetch_decode import decode, fetch_table
from tidemill.spark.ingest.schema_growth import feed_for_shard, keep_shard_types
from tidemill.spark.ingest.sources import TopicFeed
from tidemill.spark.ingest.step_planner import STEP_BYTES, locate_batches
from tidemill.spark.merge.commands import ORDER, PARTITION, Commands, join_commands, no_commands
from tidemill.spark.merge.key_grouping import exact_keys, group_by_key
from tidemill.spark.merge.mirror import Mirror
from tidemill.spark.merge.resolve import Resolved, resolve, resolve_in_sequence
from tidemill.spark.merge.sequence import DELETED_MS
from tidemill.spark.merge.sequence_ranks import NO_RANK, comparable_sequences, rank_rows
from tidemill.spark.predicates.expectations import DEAD_LETTER, expectation_check
from tidemill.spark.replay.newer_records import Key, NewerRecords, Rank, code_of, ranks_of
from tidemill.spark.stored_letters import StoredLetter
from tidemill.spark.stores import Stores
from tidemill.spark.tombstones import Tombstones
from tidemill.spark.write import WRITES
from tidemill.spark.write.commit import ATTEMPTS, PAUSE_S, is_quiet_at
from tidemill.spark.write.write_lease import WriteLease

APPLIED, SUPERSEDED, INVALID, WAITING, UNKNOWN = "applied", "superseded", "invalid", "waiting", "unknown"
FINAL = (APPLIED, SUPERSEDED)
"""Outcomes after which a letter is removed."""
_SEVERITY = (SUPERSEDED, APPLIED, WAITING, UNKNOWN, INVALID)
TOMBSTONES_MS = 86_400_000
"""Default of delete.retention.ms: a compacted topic may lack a deletion that is older."""


class Outcome(msgspec.Struct, frozen=True):
    """Result of the replay of a letter in one table.

    applied      its row is in the table, or, for a deletion, its key is not
    superseded   the key has a newer record, or the topic was created again: the table is right without it
    invalid      it is still a dead letter, for `reason`
    waiting      the table has not read the record yet
    unknown      the record, or those after it, are no longer stored
    """

    table: str
    place: Place
    outcome: str
    reason: str = ""


class _Prepared(NamedTuple):
    """Commands of the letters, with the keys and places of each, and the outcomes of letters without a command."""

    feed: TopicFeed
    rows: pa.Table
    keys: Sequence[Key]
    ranks: Sequence[Rank]
    newer: NewerRecords
    outcomes: dict[Place, Outcome]


class TableReplay:
    """Replay of one table. `feed` as of the pipeline's file and the catalogue of today."""

    def __init__(
        self,
        portal: BlockingPortal,
        stores: Stores,
        name: str,
        source: str,
        feed: TopicFeed,
        *,
        dry: bool = False,
    ) -> None:
        self._portal = portal
        self._stores = stores
        self._name = name
        self._source = source
        self._asked = feed
        self._dry = dry
        self._remap: Remap = portal.call(stores.remap(source))
        self._outcomes: dict[Place, Outcome] = {}
        self._letter_at: dict[Place, Place] = {}
        """Record → its letter, for letters of several records."""
        self._prepared: _Prepared | None = None
        self._tombstones: Tombstones | None = None
        """Tombstones, if the table has a sequence."""

    def run(self, letters: Sequence[StoredLetter], every: Sequence[StoredLetter]) -> list[Outcome]:
        """Replay these letters. `every`: all letters of the topic. Raises InvalidError (the file's schema differs from
        the table's), UnavailableError, UnknownOutcomeError: run again."""
        self._letter_at = {
            Place(x.place.topic, x.place.partition, offset): x.place
            for x in letters
            for offset in range(x.place.offset + 1, x.last_offset + 1)
        }
        for _ in range(ATTEMPTS):
            try:
                shard = self._portal.call(self._stores.shard(self._name))
            except MissingError:
                return [Outcome(self._name, x.place, WAITING, "the table does not exist yet") for x in letters]
            turn = WriteLease(self._stores, f"{WRITES}/{shard.shard_id}")
            try:
                self._portal.call(turn.acquire())
                rule = self._asked.record_format.sequence_rule
                if rule is not None:
                    self._tombstones = Tombstones(self._portal, self._stores, shard, rule, None)
                self._attempt(shard, letters, every)
                return [self._outcomes[letter.place] for letter in letters]
            except ConflictError:
                continue  # another writer was first: what was read of the topic stays valid
            except (SchemaEvolvedError, HistoryLostError):
                self._prepared = None
            finally:
                self._portal.call(turn.release())
                if self._tombstones is not None:
                    self._tombstones.close()
                    self._tombstones = None
                self._portal.call(shard.aclose())
        raise UnavailableError(
            f"the pipeline was first each time: table={self._name} attempts={ATTEMPTS}.",
            fix="Run it again, when the source of the table is less busy.",
        )

    def _set(self, place: Place, outcome: str, reason: str = "") -> None:
        """Set the outcome of a record. Its letter has that of the record that is furthest from done."""
        letter = self._letter_at.get(place, place)
        found = self._outcomes.get(letter)
        if found is None or _SEVERITY.index(outcome) > _SEVERITY.index(found.outcome):
            self._outcomes[letter] = Outcome(self._name, letter, outcome, reason)

    def _feed_of(self, shard: LogShard) -> TopicFeed:
        feed = self._portal.call(keep_shard_types(self._stores, self._name, self._asked))
        wanted = {(c.name, c.type) for c in feed.schema.columns}
        if feed.schema.key != shard.schema.key or wanted - {(c.name, c.type) for c in shard.schema.columns}:
            raise InvalidError(
                f"the pipeline maintains the table under another schema: table={self._name}.",
                fix="Restart the pipeline with its present file, then replay.",
            )
        found = feed_for_shard(feed, shard.schema)
        expectations = feed.expectations
        if expectations is not None:
            found = replace(found, expectations=replace(expectations, on_violation=DEAD_LETTER))
        return found

    def _attempt(self, shard: LogShard, letters: Sequence[StoredLetter], every: Sequence[StoredLetter]) -> None:
        lower = self._portal.call(shard.frontiers())[1]
        if self._prepared is None:
            feed = self._feed_of(shard)
            self._prepared = self._prepare(feed, letters, self._codes_of(feed, every), lower)
        mine = self._prepared
        self._outcomes = dict(mine.outcomes)
        mine.newer.advance(self._remap, lower, self._heads(mine.feed, lower))
        stored = self._contents(shard, mine.rows, lower)
        kept = self._current_commands(mine, stored, self._states(mine, stored, lower))
        if kept:
            self._apply(shard, mine.feed, rows_at(mine.rows, np.array(kept, dtype=np.int64)), stored, lower)
        winners: dict[Key, Rank] = {}
        for at in kept:
            winner = winners.get(mine.keys[at], mine.ranks[at])
            winners[mine.keys[at]] = max(winner, mine.ranks[at], key=lambda rank: rank.order)
        for at in kept:
            place, winner = _place(mine.feed, mine.ranks[at]), winners[mine.keys[at]]
            if winner == mine.ranks[at]:
                self._set(place, APPLIED)
            else:
                self._set(place, SUPERSEDED, f"partition={winner.partition} offset={winner.offset} is newer")
        for letter in letters:
            if letter.place not in self._outcomes:
                self._set(letter.place, UNKNOWN, "compaction deleted the record")

    def _heads(self, feed: TopicFeed, lower: int) -> Sequence[int]:
        """Return the next offset of each partition that the table has not read."""
        bound = self._portal.call(self._remap.at(lower - 1)) if lower else None
        return bound.offsets.get(feed.topic_id, ()) if bound is not None else ()

    def _prepare(self, feed: TopicFeed, letters: Sequence[StoredLetter], codes: Index, lower: int) -> _Prepared:
        """Read and decode the records of the letters; those that cannot be replayed get their outcome."""
        self._outcomes = {}
        rows = self._decode(feed, self._choose(feed, letters, lower)).rows
        ranks = ranks_of(rows, np.arange(rows.num_rows, dtype=np.int64), feed.record_format.sequence_by)
        keys = exact_keys(rows, np.arange(rows.num_rows, dtype=np.int64), feed.schema.key)
        oldest: dict[Key, Rank] = {}
        for key, rank in zip(keys, ranks, strict=True):
            oldest[key] = min(oldest.get(key, rank), rank)
        plain, hashes = replace(feed, expectations=None), np.unique(hash_rows(rows, feed.schema.key))
        newer = NewerRecords(self._portal, self._stores, plain, oldest, hashes, codes)
        return _Prepared(feed, rows, keys, ranks, newer, dict(self._outcomes))

    def _codes_of(self, feed: TopicFeed, every: Sequence[StoredLetter]) -> Index:
        """Return the codes of the records of letters. Those of a deleted topic of the same name are of other
        records."""
        mine = every[self._first_of_topic(feed, [letter.time_ms for letter in every]) :]
        codes = [code_of(o, x.place.partition) for x in mine for o in range(x.place.offset, x.last_offset + 1)]
        return np.array(codes, dtype=np.int64)

    def _choose(self, feed: TopicFeed, letters: Sequence[StoredLetter], lower: int) -> list[StoredLetter]:
        """Return the letters whose records are in the part of the topic that the table has read. Letters are in the
        order of time."""
        heads = self._heads(feed, lower)
        log_start = self._stores.topics.log_start
        starts = [self._portal.call(log_start(feed.topic_id, partition)) for partition in range(len(heads))]
        first = self._first_of_topic(feed, [letter.time_ms for letter in letters])
        out = []
        for number, letter in enumerate(letters):
            partition, offset = letter.place.partition, letter.place.offset
            if letter.time_ms >= lower:
                self._set(letter.place, WAITING, "the table has not read the record yet")
            elif number < first or partition >= len(heads) or letter.last_offset >= heads[partition]:
                self._set(letter.place, SUPERSEDED, "the topic was created again since")
            elif starts[partition] > offset:
                self._set(letter.place, UNKNOWN, "retention deleted the record")
            else:
                out.append(letter)
        return out

    def _first_of_topic(self, feed: TopicFeed, times: Sequence[int]) -> int:
        """Return the number of the first time at which this topic was bound; earlier letters are of a topic of the
        same name that was deleted.

        Bindings may be gone, then all before them are too. A letter of a deleted topic that is taken for one of this
        topic does no harm: the table has read the record at its place.
        """

        def is_bound(time_ms: int) -> bool | None:
            try:
                bound = self._portal.call(self._remap.at(time_ms))
            except HistoryLostError:
                return None
            return bound is not None and feed.topic_id in bound.offsets

        first = bisect_left(times, True, key=lambda time_ms: bool(is_bound(time_ms)))
        return 0 if first and is_bound(times[first - 1]) is None else first

    def _decode(self, feed: TopicFeed, letters: Sequence[StoredLetter]) -> Commands:
        """Decode the records of letters; those that are still invalid get their outcome. Memory holds the batches of
        STEP_BYTES, or of one letter."""
        slices = []
        for letter in letters:
            topic, partition, start = letter.place
            end = letter.last_offset + 1
            slices.append(Slice(topic, feed.topic_id, partition, start, end, (end,), (letter.time_ms,)))
        descriptors = self._portal.call(locate_batches(self._stores.topics, slices))
        sizes = np.cumsum([sum(ref.size_bytes for ref in each.refs) for each in descriptors])
        found = [no_commands(feed.schema)]
        schemas = writer_schemas(self._portal, self._stores, feed.record_format)
        for _, group in groupby(range(len(letters)), key=lambda at: int(sizes[at]) // STEP_BYTES):
            mine = list(group)
            some = [descriptors[at] for at in mine]
            decoded = decode(feed, some, fetch_table(self._portal, self._stores.objects, some), schemas=schemas)
            found.append(decoded.commands)
            for row in decoded.dead.select(["topic", "partition", "offset", "reason"]).to_pylist():
                self._set(Place(row["topic"], row["partition"], row["offset"]), INVALID, row["reason"])
            for at in mine if decoded.stop is not None else ():
                if decoded.stop is not None and letters[at].time_ms >= decoded.stop.time_ms:
                    self._set(letters[at].place, INVALID, decoded.stop.reason)
        return join_commands(feed.schema, found)

    def _contents(self, shard: LogShard, rows: pa.Table, lower: int) -> Mirror:
        """Return the table's rows of these keys."""
        wanted = sorted(set(hash_rows(rows, shard.schema.key).tolist()))
        batches = self._portal.call(shard.batches_until(lower - 1)) if lower and wanted else []
        fetch = fetch_through(self._portal, self._stores.objects, whole=False)
        found = read_range(shard.schema, range_between(batches, 0, HASH_MAX, wanted), lower - 1, fetch)
        return Mirror.hydrate(
            shard.schema, pa.concat_tables([contents_schema(shard.schema).empty_table(), *found]), lower
        )

    def _states(self, mine: _Prepared, stored: Mirror, lower: int) -> dict[Key, tuple[Any, ...]]:
        """Return the sequences of the keys of a table with a sequence: of their rows and tombstones."""
        tombstones = self._tombstones
        if tombstones is None:
            return {}
        tombstones.follow(lower)
        schema, rule = mine.feed.schema, tombstones.rule
        firsts = rows_at(mine.rows.select(list(schema.key)), _distinct(mine.rows, schema.key))
        buried, _ = tombstones.lookup(firsts, hash_rows(firsts, schema.key))
        count = int64s(buried, DELETED_MS) + rule.keep_ms > lower
        found: dict[Key, tuple[Any, ...]] = {}
        for rows in (buried.filter(pa.array(count)), stored.live_rows()):
            whole = np.flatnonzero(rank_rows(rows, rule.columns) != NO_RANK)
            keys = exact_keys(rows, whole, schema.key)
            found |= dict(zip(keys, comparable_sequences(rows, whole, rule.columns), strict=True))
        return found

    def _current_commands(self, mine: _Prepared, stored: Mirror, states: Mapping[Key, tuple[Any, ...]]) -> list[int]:
        """Return the commands whose key has no newer record; the letters of the others get their outcome. `states`:
        sequences of keys."""
        deletions_from_ms = self._deletions_from_ms(mine.feed)
        live = stored.live_rows()
        held = set(exact_keys(live, np.arange(live.num_rows, dtype=np.int64), mine.feed.schema.key))
        kept = []
        for at, (key, rank) in enumerate(zip(mine.keys, mine.ranks, strict=True)):
            place, newest = _place(mine.feed, rank), mine.newer.newest.get(key)
            if newest is not None and (newer := newest.supersedes(rank)):
                self._set(place, SUPERSEDED, f"{newer} is newer")
            elif key in states and states[key] > rank.sequence:
                self._set(place, SUPERSEDED, "its key has a greater sequence")
            elif mine.newer.is_uncertain(key):
                self._set(place, UNKNOWN, "newer records of its key may be gone, or in another partition")
            elif key not in held and rank.time_ms < deletions_from_ms:
                self._set(place, UNKNOWN, "compaction may have removed a newer deletion of its key")
            else:
                kept.append(at)
        return kept

    def _deletions_from_ms(self, feed: TopicFeed) -> int:
        """Return the time from which on the topic has all deletions; 0 = always."""
        row = self._portal.call(self._stores.catalogue.get(TopicRow, feed.topic))
        if row is None or "compact" not in row.config.get("cleanup.policy", ""):
            return 0
        return self._stores.clock.now_ms() - int(row.config.get("delete.retention.ms", TOMBSTONES_MS))

    def _apply(self, shard: LogShard, feed: TopicFeed, rows: pa.Table, stored: Mirror, lower: int) -> None:
        """Resolve the commands in their order, at one time, and append the result."""
        times, offsets, partitions = (int64s(rows, name) for name in (TIME, ORDER, PARTITION))
        order = np.lexsort((partitions, offsets, times))
        numbers = np.empty(len(order), dtype=np.int64)
        numbers[order] = np.arange(len(order))
        for name, values in ((TIME, np.full(len(order), lower, dtype=np.int64)), (ORDER, numbers)):
            rows = rows.set_column(rows.schema.get_field_index(name), name, pa.array(values))
        commands, step = Commands(rows), (lower, lower + 1)
        if self._tombstones is not None:
            found = resolve_in_sequence(shard.schema, commands, stored, *step, self._tombstones.sequence)
        else:
            check = expectation_check(feed.schema, feed.expectations)
            found = resolve(shard.schema, commands, stored, *step, check=check)
        ordered = [Rank(int(times[at]), int(offsets[at]), int(partitions[at])) for at in order]
        for row in letters_of_resolved(feed, found).select(["offset", "reason"]).to_pylist():
            self._set(_place(feed, ordered[row["offset"]]), INVALID, row["reason"])
        buried = found.tombstones is not None and found.tombstones.num_rows > 0
        if (found.updates.num_rows or buried) and not self._dry:
            self._append(shard, found, lower)

    def _append(self, shard: LogShard, found: Resolved, lower: int) -> None:
        """Append at `lower`. Raises ConflictError if a time of the source, or another writer, was first."""
        if not self._portal.call(is_quiet_at(self._stores.remap, (self._source,), lower)):
            self._portal.call(shard.wait_upper(lower, PAUSE_S))
            raise ConflictError(f"the pipeline writes at this time: table={self._name} time={lower}.")

        tombstones, new = self._tombstones, found.tombstones
        if tombstones is not None and new is not None and not tombstones.put(new, lower):
            raise ConflictError(f"the pipeline was first: table={self._name} time={lower}.")

        async def run() -> None:
            parts = (await shard.write_part(found.updates),) if found.updates.num_rows else ()
            await shard.compare_and_append(lower, lower + 1, parts, f"{WRITES}-{self._stores.rand.nonce()}")

        self._portal.call(run())


def _distinct(rows: pa.Table, key: tuple[str, ...]) -> Index:
    """Return the first row of each key, sorted by hash."""
    order, starts = group_by_key(rows, hash_rows(rows, key), key)
    return order[starts]


def _place(feed: TopicFeed, rank: Rank) -> Place:
    return Place(feed.topic, rank.partition, rank.offset)
