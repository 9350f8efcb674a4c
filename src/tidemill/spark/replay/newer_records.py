"""Records after a dead letter: whether its key has a newer one, as the table has read the topic.

A record is newer if it is later in (time, offset, partition), as in merge/resolve.py, or has a greater sequence, as in
merge/sequence.py. Expectations are not applied: a
record that the table skipped as dropped counts as newer, which at worst leaves an older row in place. Letters do not
count; they are replayed in the same order.

If the bindings of the letters' time are gone, only records of one partition are in a known order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidemill.base.errors import InvalidError
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.shards.api import TIME, HistoryLostError, Remap
from tidemill.shards.parts.arrow_rows import int64s
from tidemill.shards.parts.row_hash import hash_rows
from tidemill.spark.decode.records import Slice, cut_blocks
from tidemill.spark.formats.schemas.lookup import writer_schemas
from tidemill.spark.ingest.fetch_decode import Decoded, decode_block, fetch_table
from tidemill.spark.ingest.sources import TopicFeed
from tidemill.spark.ingest.step_planner import STEP_BYTES, locate_batches, plan_interval, split_descriptors
from tidemill.spark.merge.commands import ORDER, PARTITION
from tidemill.spark.merge.key_grouping import exact_keys
from tidemill.spark.merge.sequence_ranks import comparable_sequences
from tidemill.spark.stores import Stores

Key = tuple[object, ...]
_SHIFT = 20


class Rank(NamedTuple):
    """Place of a command in the log, and its sequence if the table has one."""

    time_ms: int
    offset: int
    partition: int
    sequence: tuple[Any, ...] = ()

    @property
    def order(self) -> tuple[Any, ...]:
        """Place in the order of the key: the greatest wins."""
        return (self.sequence, self.time_ms, self.offset, self.partition)


def ranks_of(rows: pa.Table, at: npt.NDArray[np.int64], sequence_by: Sequence[str]) -> list[Rank]:
    """Return the ranks of some commands."""
    places = [int64s(rows, name)[at].tolist() for name in (TIME, ORDER, PARTITION)]
    if not sequence_by:
        return [Rank(*each) for each in zip(*places, strict=True)]
    return [Rank(*each) for each in zip(*places, comparable_sequences(rows, at, sequence_by), strict=True)]


class Newest:
    """Newest record of a key that is not a letter."""

    def __init__(self) -> None:
        self._rank: Rank | None = None
        self._truncation: Rank | None = None
        self._timed = True
        self.elsewhere = False
        """True if another partition has a record of the key, whose order is not known."""

    def add(self, rank: Rank, letter: Rank, timed: bool) -> None:
        if not timed and rank.partition != letter.partition:
            self.elsewhere = True
        elif self._rank is None or rank.order > self._rank.order:
            self._rank, self._timed = rank, timed

    def add_truncation(self, rank: Rank) -> None:
        """Add a truncation of a table with a sequence: it deletes every earlier row."""
        self._truncation = rank if self._truncation is None else max(rank, self._truncation)

    def supersedes(self, letter: Rank) -> str:
        """Return the place of the newer record, or ""."""
        newest, truncation = self._rank, self._truncation
        if truncation is not None and truncation[:3] > letter[:3]:
            return f"partition={truncation.partition} offset={truncation.offset}"
        if newest is None:
            return ""
        untimed = (newest.sequence, newest.offset) > (letter.sequence, letter.offset)
        if not (newest.order > letter.order if self._timed else untimed):
            return ""
        return f"partition={newest.partition} offset={newest.offset}"


def code_of(offset: int, partition: int) -> int:
    return offset << _SHIFT | partition


class NewerRecords:
    """Search for the newest records of some keys. `newest`: what was found.

    `keys`: key → its oldest letter; `hashes`: of these keys; `letters`: codes of all letters of the topic.
    """

    def __init__(
        self,
        portal: BlockingPortal,
        stores: Stores,
        feed: TopicFeed,
        keys: Mapping[Key, Rank],
        hashes: npt.NDArray[np.uint64],
        letters: npt.NDArray[np.int64],
    ) -> None:
        self.newest: dict[Key, Newest] = {}
        self._portal = portal
        self._stores = stores
        self._feed = feed
        self._schemas = writer_schemas(portal, stores, feed.record_format)
        self._keys = keys
        self._hashes = hashes
        self._letters = letters
        self._lower = min((rank.time_ms for rank in keys.values()), default=0)
        self._gaps: set[int] = set()
        """Partitions in which retention deleted records that might be newer."""

    def is_uncertain(self, key: Key) -> bool:
        """Return whether records that might be newer are no longer stored, or in an unknown order."""
        partition = self._keys[key].partition
        found = self.newest.get(key)
        return (found is not None and found.elsewhere) or any(gap != partition for gap in self._gaps)

    def advance(self, remap: Remap, upper: int, heads: Sequence[int]) -> None:
        """Read the records below `upper` that were not read yet. `heads`: next offset of each partition there.

        Raises InvalidError for a record that a captured table cannot pass, and as reading the topic.
        """
        if not self._keys or upper <= self._lower:
            return
        names = [(self._feed.topic, self._feed.topic_id)]
        try:
            planning = plan_interval(self._stores.topics, remap, names, self._lower, upper)
            descriptors, timed = self._portal.call(planning), True
        except HistoryLostError:
            slices = self._untimed_slices(upper, heads)
            descriptors, timed = self._portal.call(locate_batches(self._stores.topics, slices)), False
        for each in descriptors:
            start = self._portal.call(self._stores.topics.log_start(self._feed.topic_id, each.slice.partition))
            self._gaps |= {each.slice.partition} if start > each.slice.start else set()
        for piece in (piece for each in descriptors for piece in split_descriptors([each], STEP_BYTES)):
            batches = fetch_table(self._portal, self._stores.objects, [piece])
            for records in cut_blocks([(piece.slice, batches[0], piece.refs)]):
                self._add(decode_block(self._feed, records, self._schemas), timed)
        self._lower = upper

    def _add(self, block: Decoded, timed: bool) -> None:
        if block.stop is not None:
            raise InvalidError(block.stop.reason, fix=block.stop.fix)
        for key, rank in self._rows_of(block.commands.rows):
            self.newest.setdefault(key, Newest()).add(rank, self._keys[key], timed)
        for truncate in block.commands.truncates:
            rank = Rank(truncate.time_ms, truncate.order, truncate.partition)
            for key, letter in self._keys.items():
                newest = self.newest.setdefault(key, Newest())
                if self._feed.record_format.sequence_by:
                    newest.add_truncation(rank)
                else:
                    newest.add(rank, letter, timed)

    def _untimed_slices(self, upper: int, heads: Sequence[int]) -> list[Slice]:
        """Return all offsets that may be newer, at the time of the table: their own is not known any more."""
        start = min(rank.offset for rank in self._keys.values()) if len(heads) == 1 else 0
        feed = self._feed
        return [
            Slice(feed.topic, feed.topic_id, partition, start, head, (head,), (upper - 1,))
            for partition, head in enumerate(heads)
            if head > start
        ]

    def _rows_of(self, rows: pa.Table) -> Iterator[tuple[Key, Rank]]:
        """Yield (key, place) of the rows of these keys that are no letters."""
        if not rows.num_rows:
            return
        codes = int64s(rows, ORDER) << _SHIFT | int64s(rows, PARTITION)
        mine = np.isin(hash_rows(rows, self._feed.schema.key), self._hashes) & ~np.isin(codes, self._letters)
        at = np.flatnonzero(mine).astype(np.int64)
        ranks = ranks_of(rows, at, self._feed.record_format.sequence_by)
        for key, rank in zip(exact_keys(rows, at, self._feed.schema.key), ranks, strict=True):
            if key in self._keys:
                yield key, rank
