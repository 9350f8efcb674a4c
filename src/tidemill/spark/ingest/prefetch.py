"""Prefetch of the next step: fetch and decode it while the current step is resolved, written and appended.

Bindings and the topic alone determine a step, so it can be read before the table has reached it. When its turn comes,
the caller checks whether it is the table's next step, and discards it otherwise. One step at a time: memory holds two.
"""

from __future__ import annotations

import threading
from concurrent.futures import Executor, Future

import msgspec

from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.shards.api import Remap
from tidemill.spark.ingest.fetch_decode import Decoded, decode, fetch_table
from tidemill.spark.ingest.sources import TopicFeed
from tidemill.spark.ingest.step_planner import Step, StepPlanner
from tidemill.spark.stores import Stores


class PrefetchedStep(msgspec.Struct, frozen=True):
    step: Step
    decoded: Decoded


class Prefetcher:
    """Prefetcher of one feed. Called by one thread at a time."""

    def __init__(self, portal: BlockingPortal, stores: Stores, remap: Remap, helpers: Executor | None = None) -> None:
        self._portal = portal
        self._helpers = helpers
        self._stores = stores
        # A separate planner, because a planner's round belongs to one caller.
        self._planner = StepPlanner(stores, remap)
        self._of: tuple[str, TopicFeed, int] | None = None
        self._under_way: Future[PrefetchedStep | None] | None = None
        self.bytes = 0
        """Stored bytes of the prefetched step."""

    def start(self, table: str, feed: TopicFeed, lower: int, end: int, most_records: int) -> None:
        """Start to read the table's step from `lower`, at most to `end`; a step of more than `most_records` is not
        read."""
        self.discard()
        if self._under_way is not None:
            return  # the discarded prefetch has not ended yet
        self._of = (table, feed, lower)
        self._under_way = under_way = Future[PrefetchedStep | None]()

        def run() -> None:
            try:
                under_way.set_result(self._read(table, feed, lower, end, most_records))
            except BaseException as error:  # of any type: `wait_result` handles it
                under_way.set_exception(error)

        # A daemon thread, because it may wait for storage when the process ends.
        threading.Thread(target=run, name="ahead", daemon=True).start()

    def is_for(self, table: str, feed: TopicFeed, lower: int) -> bool:
        return self._of == (table, feed, lower)

    def wait_result(self) -> PrefetchedStep | None:
        """Wait for the step and return it; None if it is too large or could not be read: then the caller reads it
        itself, and reports the error."""
        under_way, self._of = self._under_way, None
        error = under_way.exception() if under_way is not None else None
        self._under_way, self.bytes = None, 0
        return under_way.result() if under_way is not None and error is None else None

    def discard(self) -> None:
        """Discard the step."""
        self._of = None
        if self._under_way is not None and self._under_way.done():
            self._under_way = None
            self.bytes = 0

    def _read(self, table: str, feed: TopicFeed, lower: int, end: int, most_records: int) -> PrefetchedStep | None:
        self._planner.start_round()
        step = self._portal.call(self._planner.next(table, feed, lower, end))
        if step.large or step.records > most_records or not step.slices:
            return None
        self.bytes = step.bytes
        batches = fetch_table(self._portal, self._stores.objects, step.descriptors)
        return PrefetchedStep(step, decode(feed, step.descriptors, batches, self._helpers))
