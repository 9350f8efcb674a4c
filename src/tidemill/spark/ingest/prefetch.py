"""The step after the one under way, fetched and decoded while that one is resolved, written and appended.

What a step holds follows from bindings and topic alone, so it may be read before the table stands there. Whether it is
the table's next one is seen when its turn comes; else it is thrown away. One step at a time: memory holds two.
"""

from __future__ import annotations

import threading
from concurrent.futures import Executor, Future

import msgspec

from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.shards.api import Remap
from tidemill.spark.ingest.fetch_decode import Decoded, decode, fetch_here
from tidemill.spark.ingest.sources import TopicFeed
from tidemill.spark.ingest.step_planner import Planner, Step
from tidemill.spark.stores import Stores


class Prepared(msgspec.Struct, frozen=True):
    step: Step
    decoded: Decoded


class Prefetcher:
    """Of one feed. Called by one thread at a time."""

    def __init__(self, portal: BlockingPortal, stores: Stores, remap: Remap, helpers: Executor | None = None) -> None:
        self._portal = portal
        self._helpers = helpers
        self._stores = stores
        # Its own: a planner's round is one caller's.
        self._planner = Planner(stores, remap)
        self._of: tuple[str, TopicFeed, int] | None = None
        self._under_way: Future[Prepared | None] | None = None
        self.bytes = 0
        """Stored bytes of the step that is read ahead."""

    def begin(self, table: str, feed: TopicFeed, lower: int, end: int, most_records: int) -> None:
        """Read the table's step from `lower` on, at most to `end`; not one of more records."""
        self.drop()
        if self._under_way is not None:
            return  # what was thrown away is not at its end yet
        self._of = (table, feed, lower)
        self._under_way = under_way = Future[Prepared | None]()

        def run() -> None:
            try:
                under_way.set_result(self._read(table, feed, lower, end, most_records))
            except BaseException as error:  # of whatever type: `take` says what becomes of it
                under_way.set_exception(error)

        # A daemon, for it may wait for storage when the process ends.
        threading.Thread(target=run, name="ahead", daemon=True).start()

    def is_for(self, table: str, feed: TopicFeed, lower: int) -> bool:
        return self._of == (table, feed, lower)

    def take(self) -> Prepared | None:
        """The step, once it is read; None when it is too large to be read ahead, or could not be read: whoever needs it
        reads it himself then, and names what is wrong."""
        under_way, self._of = self._under_way, None
        error = under_way.exception() if under_way is not None else None
        self._under_way, self.bytes = None, 0
        return under_way.result() if under_way is not None and error is None else None

    def drop(self) -> None:
        """Nobody will ask for it."""
        self._of = None
        if self._under_way is not None and self._under_way.done():
            self._under_way = None
            self.bytes = 0

    def _read(self, table: str, feed: TopicFeed, lower: int, end: int, most_records: int) -> Prepared | None:
        self._planner.begin()
        step = self._portal.call(self._planner.next(table, feed, lower, end))
        if step.large or step.records > most_records or not step.slices:
            return None
        self.bytes = step.bytes
        batches = fetch_here(self._portal, self._stores.objects, step.descriptors)
        return Prepared(step, decode(feed, step.descriptors, batches, self._helpers))
