"""One feed's life: a sink for the tables of one source, brought forward from here until a query does it.

While there is no query (the JVM starts, Spark makes its first plan, or Spark lost a worker) the same sink
is called from here, so that rows appear, and go on after a crash, long before the first micro-batch. Beside a
query it is called as soon as a time is bound: a micro-batch costs the JVM and its planner more than the rows of a
moment do, so under load those come a few times a second and mostly find the work done. The tables are units of
their own (unit.py).
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any

import structlog

from tidemill.base.errors import Closed, TidemillError, Unavailable, Unknown
from tidemill.base.histogram import Stages
from tidemill.base.tasks import Restarts, keep_thread, sentence
from tidemill.spark.dead_letters import DeadLetters
from tidemill.spark.feeds import TopicFeed, captured_feed, stream_feed
from tidemill.spark.growing import has_grown
from tidemill.spark.host import Host
from tidemill.spark.pipeline import CapturedTable, Input
from tidemill.spark.sink import FeedSink
from tidemill.spark.starting import STARTS
from tidemill.spark.unit import TableUnit

WARM_POLL_S = 0.15
"""Between two rounds without a query: the starting JVM needs the processor more."""
WATCH_S = 0.2
"""Between two rounds beside a query where storage is away: it is not asked more often."""
ROUND_S = 0.04
"""Two rounds begin at least this far apart: one for every binding would cost more than it brings."""
QUERY_PACE_MS = 500
"""Two micro-batches begin at least this far apart."""
FOLLOW_S = 5.0
"""For so long one wait for a binding may outlive its query."""
STABLE_S = 60.0
LONGEST_PAUSE_S = 30.0

log = structlog.get_logger()


class SessionLost(TidemillError):
    """Spark's JVM is gone: the process ends, for only a new one gets another."""


class Feed:
    """One source: its sink, once it is open, and its tables."""

    def __init__(self, source: str, tables: dict[str, Input], host: Host, dead_letters: DeadLetters) -> None:
        self.source = source
        self.mark = f"pipeline:{host.settings.name}:{source}"
        self.bindings_mark = f"{self.mark}:bindings"
        self.sink: FeedSink | None = None
        self.query: Any = None
        self._host = host
        self._dead = dead_letters
        self._restarts = Restarts(1.0, LONGEST_PAUSE_S, STABLE_S)
        # Queries in a row that ended before a batch. The first such is logged alone: until the next one the rows are
        # brought forward from here all the same, so nothing stands still that a mark would have to explain.
        self._in_vain = 0
        self.units = [
            TableUnit(name, source, table.upstream, self._look_up(table), host, lambda: self.sink, self._grown(table))
            for name, table in sorted(tables.items())
        ]

    def _look_up(self, table: Input) -> Callable[[], TopicFeed]:
        host = self._host

        def look() -> TopicFeed:
            catalogue = host.stores.catalogue
            if isinstance(table, CapturedTable):
                return host.portal.call(captured_feed(catalogue, table.capture, table.table))
            return host.portal.call(stream_feed(catalogue, table.topic, table.schema))

        return look

    def _grown(self, table: Input) -> Callable[[TopicFeed], bool]:
        host = self._host

        def grown(feed: TopicFeed) -> bool:
            if not isinstance(table, CapturedTable):
                return False
            return host.portal.call(has_grown(host.stores.catalogue, table.capture, table.table, feed))

        return grown

    def wake(self) -> None:
        """The pipeline ends."""
        if self.sink is not None:
            self.sink.seats.changed.set()
        for unit in self.units:
            unit.wake()

    def run(self) -> None:
        """Until the pipeline ends. Raises SessionLost alone; what else goes wrong is told and tried again."""
        host = self._host
        threads = [threading.Thread(target=unit.run, name=f"table-{unit.name}", daemon=True) for unit in self.units]
        for thread in threads:
            thread.start()
        lost: list[SessionLost] = []

        def body() -> None:
            try:
                self._run()
            except SessionLost as error:
                lost.append(error)

        keep_thread(self.mark, body, tracker=host.tracker, clock=host.stores.clock, ending=host.ending)
        if lost and not host.ending.is_set():
            raise lost[0]

    @property
    def waits_to_start(self) -> bool:
        """Do other queries start before this feed's may? Its rows are brought forward without one."""
        return STARTS.waits(self)

    def _run(self) -> None:
        try:
            self._feed()
        finally:
            STARTS.end(self)

    def _feed(self) -> None:
        host = self._host
        if self.sink is None:
            remap = host.portal.call(host.stores.remap(self.source))
            self.sink = FeedSink(
                host.portal,
                host.stores,
                self.source,
                remap,
                (),
                host.stages.setdefault(self.source, Stages()),
                dead_letters=self._dead,
                scratch=host.settings.scratch,
            )
        sink = self.sink
        pause_s = 0.0
        while not host.ending.is_set():
            self._bring_forward(sink, self._query_is_due(sink, pause_s))
            if host.ending.is_set():
                return
            began_s = host.stores.clock.monotonic_s()
            reason = self._watch_query(sink)
            if host.ending.is_set():
                return
            if host.session_is_lost():
                raise SessionLost(f"Spark's JVM is gone: source={self.source} error={reason}.")
            # Spark's own trouble, e.g. a worker that a busy machine did not start within its ten seconds. Rows go on.
            pause_s = self._restarts.pause_s(host.stores.clock.monotonic_s() - began_s)
            log.warning("streaming query ended, starting it again", source=self.source, error=reason, in_s=pause_s)
            self._in_vain = 1 if sink.called.is_set() else self._in_vain + 1
            if sink.called.is_set() or self._in_vain > 1:
                host.tracker.fail(self.mark, f"streaming query ended: {reason}", now_ms=host.stores.clock.now_ms())

    def _query_is_due(self, sink: FeedSink, pause_s: float) -> Callable[[], bool]:
        clock, ready = self._host.stores.clock, self._host.session_ready
        from_s = clock.monotonic_s() + pause_s

        def due() -> bool:
            now_s = clock.monotonic_s()
            return ready.is_set() and bool(sink.seats.tables) and now_s >= from_s and STARTS.begin(self, now_s)

        return due

    def _bring_forward(self, sink: FeedSink, done: Callable[[], bool]) -> None:
        """Process from this thread while there is no query."""
        host = self._host
        while not host.ending.is_set():
            self._forward(sink)
            if done() or host.ending.wait(WARM_POLL_S):
                return

    def _forward(self, sink: FeedSink) -> None:
        try:
            sink.process(sink.latest())
        except (Unavailable, Unknown) as error:
            sink.error = sentence(error)

    def _watch_query(self, sink: FeedSink) -> str:
        """Start the feed's query and wait for its end or the pipeline's; why it ended, or ""."""
        host = self._host
        spark = host.spark
        assert spark is not None
        sink.use(spark.sparkContext)
        sink.called.clear()
        try:
            query = self.query = self._query(spark, sink)
            ended = self._end_of(query, sink)
            # A query takes seconds to its first batch (planner, first plan): rows do not wait for it.
            self._bring_forward(sink, lambda: sink.called.is_set() or ended.is_set())
            STARTS.end(self)
            log.info("query runs", source=self.source, tables=len(sink.seats.tables))
            self._follow(sink, ended)
            began_s = host.stores.clock.monotonic_s()
            while not host.ending.is_set():
                ran_s = host.stores.clock.monotonic_s() - began_s
                if ended.is_set():
                    return str(query.exception())[:500]
                if ran_s > STABLE_S or sink.called.is_set():
                    host.tracker.heal(self.mark)
                if sink.due_in_s == 0:  # a time was bound, or a table waited or came late
                    round_s = host.stores.clock.monotonic_s()
                    self._forward(sink)
                    took_s = host.stores.clock.monotonic_s() - round_s
                    host.ending.wait(WATCH_S if sink.error else max(0.0, ROUND_S - took_s))
                failing = host.tracker.failure(self.mark) is not None
                waits_s = (sink.due_in_s, max(0.0, STABLE_S - ran_s) if failing else None)
                sink.seats.changed.wait(min((s for s in waits_s if s is not None), default=None))
                sink.seats.changed.clear()
        except Exception as error:  # py4j and Spark raise what they like
            return " ".join(str(error).split())[:500]
        finally:
            STARTS.end(self)
        return ""

    def _end_of(self, query: Any, sink: FeedSink) -> threading.Event:
        """Set when the query has ended, or the JVM is gone, of which the watch is told then."""
        ended = threading.Event()

        def wait() -> None:
            try:
                query.awaitTermination()
            except Exception as error:  # py4j and Spark raise what they like; the watch asks the query for its reason
                log.debug("streaming query failed", source=self.source, error=sentence(error))
            finally:
                ended.set()
                sink.seats.changed.set()

        threading.Thread(target=wait, name=f"query-{self.source}", daemon=True).start()
        return ended

    def _follow(self, sink: FeedSink, ended: threading.Event) -> None:
        """Wake the watch with every time that is bound, until the query has ended."""
        host = self._host

        def follow() -> None:
            while not (ended.is_set() or host.ending.is_set()):
                try:
                    host.portal.call(sink.arrival(FOLLOW_S))
                except (Closed, CancelledError):
                    return  # the process ends
                except TidemillError as error:  # whoever brings rows forward meets it too, and it is told there
                    log.debug("bindings cannot be followed", source=self.source, error=sentence(error))
                    host.ending.wait(WATCH_S)

        threading.Thread(target=follow, name=f"bindings-{self.source}", daemon=True).start()

    def _query(self, spark: Any, sink: FeedSink) -> Any:
        """A streaming query with a checkpoint of its own, made anew: where it starts follows from the shards (U5)."""
        from tidemill.spark.source import DESCRIPTOR_COLUMNS
        from tidemill.spark.types import spark_schema

        settings = self._host.settings
        checkpoint = settings.scratch / "checkpoints" / self.source.replace("/", "-")
        shutil.rmtree(checkpoint, ignore_errors=True)
        options = {  # not the stores' URLs: options are in Spark's event log
            "source": self.source,
            "rows": "false",
            "pace_ms": str(QUERY_PACE_MS),
            # It only says that time has come: what a table that is further behind lacks is read by the sink anyway.
            "start": str(max(table.upper for table in sink.seats.tables)),
        }
        frame = spark.readStream.format("tidemill").options(**options).schema(spark_schema(DESCRIPTOR_COLUMNS)).load()
        return (
            frame.writeStream.queryName(f"{settings.name}{settings.instance}:{self.source}")
            .option("checkpointLocation", str(checkpoint))
            .foreachBatch(sink.body(checkpoint))
            .start()
        )
