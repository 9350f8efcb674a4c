"""Life cycle of one feed: a sink for the tables of one source, advanced as soon as a time is bound.

It needs neither the JVM nor a streaming query (streaming_query.py), which only some pipelines have: rows appear, also
after a crash, while Spark starts or has lost a worker. A micro-batch costs the JVM and its planner more than processing
the rows of a moment, so micro-batches run every few seconds and mostly find the work done. Each table is a unit of
failure (table_unit.py).

Pace: a step costs a table the same for one record and for a thousand, so the feed gathers records between two rounds
(`round_interval_s`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError

import structlog
from msgspec.structs import replace

from tidemill.base.errors import ClosedError, TidemillError
from tidemill.base.runtime.tasks import error_sentence, run_unit_thread
from tidemill.base.status.histogram import StageHistograms
from tidemill.metastore.catalogue import Catalogue
from tidemill.spark.definition import CapturedTable, Input
from tidemill.spark.ingest.dead_letters import DeadLetterWriter
from tidemill.spark.ingest.feed_sink import FeedSink
from tidemill.spark.ingest.pipeline_context import PipelineContext, feed_status_name
from tidemill.spark.ingest.schema_growth import has_grown
from tidemill.spark.ingest.sources import TopicFeed, captured_feed, stream_feed
from tidemill.spark.ingest.table_schedule import TableSchedule
from tidemill.spark.ingest.table_unit import TableUnit
from tidemill.spark.predicates.expectations import Expectations

WARM_ROUND_S = 0.15
"""Minimum interval between the starts of two rounds while the JVM starts, which needs the processor more."""
WATCH_S = 0.2
"""Pause between two rounds while storage is unavailable, which limits the requests to it."""
SMALL_ROUND_RECORDS = 1000
SMALL_ROUND_SHARE = 0.5
"""Maximum share of the feed's time for rounds of at most SMALL_ROUND_RECORDS."""
SMALL_ROUND_INTERVAL_S_MAX = 0.5
"""Limit of the interval that this share requires on a busy machine."""
FOLLOW_S = 5.0
"""Limit of one wait for a binding, and so of the time that it may outlive the pipeline."""

log = structlog.get_logger()


def round_interval_s(freshness_s: float, took_s: float, records: int) -> float:
    """Return the minimum interval between the starts of two rounds, if the first one took `took_s` for `records`.

    It is the pipeline's `freshness_s`, and longer if small rounds would fill the machine. A pause after a large round
    would save less than it delays."""
    if records > SMALL_ROUND_RECORDS:
        return freshness_s
    return max(freshness_s, min(took_s / SMALL_ROUND_SHARE, SMALL_ROUND_INTERVAL_S_MAX))


async def feed_of(catalogue: Catalogue, table: Input) -> TopicFeed:
    """Return the topic of a table. Raises SourceNotReadyError, InvalidError."""
    if isinstance(table, CapturedTable):
        return await captured_feed(catalogue, table.capture, table.table, table.as_text)
    return await stream_feed(catalogue, table.topic, table.schema, table.record_format)


class Feed:
    """One source: its sink, once it is open, and its table units."""

    def __init__(
        self,
        source: str,
        tables: dict[str, Input],
        host: PipelineContext,
        dead_letters: DeadLetterWriter,
        expectations: Mapping[str, Expectations] | None = None,
    ) -> None:
        self.source = source
        self.mark = feed_status_name(host.settings.name, source)
        self.bindings_mark = f"{self.mark}:bindings"
        self.sink: FeedSink | None = None
        self._host = host
        self._dead = dead_letters
        self._follows = False
        self.units = [
            TableUnit(
                name,
                source,
                table.upstream,
                self._feed_lookup(table, (expectations or {}).get(name)),
                host,
                lambda: self.sink,
                self._growth_check(table),
            )
            for name, table in sorted(tables.items())
        ]

    def _feed_lookup(self, table: Input, expectations: Expectations | None) -> Callable[[], TopicFeed]:
        host = self._host
        return lambda: replace(host.portal.call(feed_of(host.stores.catalogue, table)), expectations=expectations)

    def _growth_check(self, table: Input) -> Callable[[TopicFeed], bool]:
        host = self._host

        def has_newer_version(feed: TopicFeed) -> bool:
            if not isinstance(table, CapturedTable):
                return False
            return host.portal.call(has_grown(host.stores.catalogue, table.capture, table.table, feed))

        return has_newer_version

    def wake(self) -> None:
        """Wake all waits, because the pipeline ends."""
        if self.sink is not None:
            self.sink.seats.attached.set()
            self.sink.seats.changed.set()
        for unit in self.units:
            unit.wake()

    def run(self) -> None:
        """Run until the pipeline ends. Failures are reported and retried."""
        host = self._host
        threads = [threading.Thread(target=unit.run, name=f"table-{unit.name}", daemon=True) for unit in self.units]
        for thread in threads:
            thread.start()
        run_unit_thread(
            self.mark, self._advance_tables, tracker=host.tracker, clock=host.stores.clock, ending=host.ending
        )

    def _advance_tables(self) -> None:
        host, clock = self._host, self._host.stores.clock
        sink = self.sink = self.sink or self._open_sink()
        self._follow_bindings(sink)
        has_tasks = False
        while not host.ending.is_set():
            if not has_tasks and host.session_ready.is_set() and host.spark is not None:
                sink.steps.use_spark(host.spark.sparkContext)
                has_tasks = True
            if sink.due_in_s == 0:  # a time was bound, or a table's pause ended, or a table joined
                began_s, before = clock.monotonic_s(), sink.records
                sink.advance()
                took_s = clock.monotonic_s() - began_s
                freshness_s = host.settings.freshness_ms / 1000
                if not host.session_ready.is_set():
                    freshness_s = max(freshness_s, WARM_ROUND_S)
                pause_s = round_interval_s(freshness_s, took_s, sink.records - before) - took_s
                self._pause(sink, WATCH_S if sink.error else pause_s)
            else:
                host.tracker.clear_failure(self.mark)
            sink.seats.changed.wait(sink.due_in_s)
            sink.seats.changed.clear()

    def _pause(self, sink: FeedSink, pause_s: float) -> None:
        """Wait, at most until the pipeline ends or a table that was attached in the meantime is due."""
        host, clock = self._host, self._host.stores.clock
        until_s = clock.monotonic_s() + pause_s
        while (left_s := until_s - clock.monotonic_s()) > 0 and sink.seats.attached.wait(left_s):
            sink.seats.attached.clear()
            if host.ending.is_set() or sink.due_in_s == 0:
                return

    def _open_sink(self) -> FeedSink:
        host = self._host
        return FeedSink(
            host.portal,
            host.stores,
            self.source,
            host.portal.call(host.stores.remap(self.source)),
            TableSchedule(host.stores.clock, host.stages.setdefault(self.source, StageHistograms())),
            self._dead,
        )

    def _follow_bindings(self, sink: FeedSink) -> None:
        """Wake the feed when a time is bound, until the pipeline ends. While a round is due or runs, or waits for more
        records, later times need no look: the next round begins with the newest."""
        host = self._host

        def follow() -> None:
            while not host.ending.is_set():
                try:
                    host.portal.call(sink.wait_for_binding(FOLLOW_S))
                    sink.wait_until_reached(FOLLOW_S)
                except (ClosedError, CancelledError):
                    return  # the process ends
                except TidemillError as error:  # the status report reads bindings too, and reports the error
                    log.debug("cannot follow bindings", source=self.source, error=error_sentence(error))
                    host.ending.wait(WATCH_S)

        if not self._follows:
            self._follows = True
            threading.Thread(target=follow, name=f"bindings-{self.source}", daemon=True).start()
