"""Unit of failure: one table of a feed. Wait for its input, open and hydrate it, attach it to the feed's sink.

    waiting → opening → attached ──► failed: reported under shard:NAME, and restarted after a pause
                            └─────► storage unavailable: waits while attached, reported the same way

An exception ends this unit and nothing larger. Its failure is cleared when its position passes the place, or when it is
at its target again (status_report.py).
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from contextlib import suppress

from tidemill.base.errors import CorruptError, TidemillError
from tidemill.base.runtime.tasks import Backoff, error_sentence, run_unit_thread
from tidemill.shards.api import SchemaEvolvedError
from tidemill.spark.ingest.dead_letters import DeadLetterRun
from tidemill.spark.ingest.feed_sink import FeedSink
from tidemill.spark.ingest.pipeline_context import PipelineContext
from tidemill.spark.ingest.schema_growth import GROWTH_CHECK_S, SourceSchemaGrewError
from tidemill.spark.ingest.sources import SourceNotReadyError, TopicFeed
from tidemill.spark.ingest.step_planner import TopicReplacedError
from tidemill.spark.ingest.table_writer import TableWriter

INPUT_POLL_S = 0.25
SLOWEST_INPUT_POLL_S = 1.0
SINK_POLL_S = 0.2


class TableUnit:
    """One table of a feed; `run` is the body of its thread. `upstream`: the stage status of this table's own input.
    `waits_for` and `reason` explain why it is not attached yet."""

    def __init__(
        self,
        name: str,
        source: str,
        upstream: str,
        look_up: Callable[[], TopicFeed],
        host: PipelineContext,
        seat_in: Callable[[], FeedSink | None],
        grown: Callable[[TopicFeed], bool] = lambda _: False,
    ) -> None:
        self.name = name
        self.mark = f"shard:{name}"
        self.writer: TableWriter | None = None
        self.upstream = upstream
        self.waits_for = source.replace("/", ":", 1)
        self.reason = "opening"
        self.waits = False
        """True while it waits for something else: its input does not exist, or is not ready."""
        self.holder_tells = False
        """True if the blocker has a stage status that reports whether it moves."""
        self.input_absent = False
        """True if its input has to be created first: it waits for any time, and is never stuck because of that."""
        self.seated = False
        self._look_up = look_up
        self._grown = grown
        self._opened = ("", 0)
        """Topic of its input and the number of versions of its description, when it was last opened."""
        self._host = host
        self._seat_in = seat_in
        self._left = threading.Event()
        self._failure: BaseException | None = None
        self._dead_run: tuple[tuple[str, str, int], DeadLetterRun] | None = None
        """((shard, topic, upper), dead letters) when it was last detached. If no process wrote since, they are still
        the newest records."""

    def run(self) -> None:
        host = self._host
        run_unit_thread(
            self.mark, self._run_reopening, tracker=host.tracker, clock=host.stores.clock, ending=host.ending
        )

    def wake(self) -> None:
        """End the wait, because the pipeline ends."""
        self._left.set()

    def _run_reopening(self) -> None:
        """Run the table. A new description or a re-snapshot of its input is no failure: the table is reopened
        immediately."""
        before = self._opened
        while True:
            try:
                return self._run_once()
            except (SourceSchemaGrewError, TopicReplacedError):
                if self._opened == before:  # the catalogue does not have it yet
                    raise
                before = self._opened

    def _run_once(self) -> None:
        if not self._host.claims.wait_ownership(self.name, self._host.ending):
            return
        feed = self._wait_input()
        if feed is None:
            return
        self._opened = (feed.topic_id, max(1, len(feed.known)))
        self.reason, self.waits, self.waits_for = "hydrating", False, ""
        try:
            writer = self._host.open_writer(self.name, feed.schema, feed)
        except CorruptError:
            # The mirror is a cache of the shard: after any damage, rebuild it from the shard.
            shutil.rmtree(self._host.mirror_dir(self.name), ignore_errors=True)
            raise
        sink = self._wait_sink()
        if sink is None:
            return
        self.reason = ""
        self._failure = None
        self._left.clear()
        if self._dead_run is not None and self._dead_run[0] == (writer.shard.shard_id, feed.topic_id, writer.upper):
            writer.dead_run = self._dead_run[1]
        self.writer = writer
        sink.seats.attach(writer, self._on_failure)
        self.seated = True
        try:
            self._wait_attached()
        except (SchemaEvolvedError, TopicReplacedError):
            writer.save()  # the mirror stays valid, under the new version or with the new topic
            raise
        finally:
            self.seated = False
            self._dead_run = ((writer.shard.shard_id, feed.topic_id, writer.upper), writer.dead_run)
            if not self._host.ending.is_set():  # at the end it stays attached: its mirror is still to be saved
                sink.seats.detach(self.name)
                writer.close()

    def _wait_attached(self) -> None:
        """Wait until the table leaves the schedule, or the pipeline ends (`ending` is set before `wake`)."""
        if not self._host.ending.is_set():
            while not self._left.wait(GROWTH_CHECK_S):
                self._check_growth()
        failure = self._failure
        if failure is None:
            return
        if isinstance(failure, CorruptError):
            shutil.rmtree(self._host.mirror_dir(self.name), ignore_errors=True)
        raise failure

    def _check_growth(self) -> None:
        """Mark an outgrown table. The thread that advances it detaches it: only that thread knows when nothing is in
        progress."""
        writer = self.writer
        if writer is None or writer.feed is None or writer.outgrown:
            return
        with suppress(TidemillError):  # checked again soon; other calls report that the catalogue is unavailable
            writer.outgrown = self._grown(writer.feed)

    def _on_failure(self, error: BaseException, left: bool) -> None:
        if left:
            self._failure = error
            self._left.set()
        else:
            self._host.tracker.fail(self.mark, error_sentence(error), now_ms=self._host.stores.clock.now_ms())

    def _wait_input(self) -> TopicFeed | None:
        """Wait until the input exists; None if the pipeline ends first. Raises InvalidError if it can never exist."""
        pauses = Backoff(INPUT_POLL_S, SLOWEST_INPUT_POLL_S)
        while True:
            try:
                return self._look_up()
            except SourceNotReadyError as error:
                self.waits_for, self.reason, self.waits = error.held_by, error.reason, True
                self.holder_tells, self.input_absent = error.tells, error.absent
                if self._host.ending.wait(pauses.pause_s(0.0)):
                    return None
            except TidemillError:
                self.reason = "opening"  # the input for which it waited exists now
                raise

    def _wait_sink(self) -> FeedSink | None:
        while (sink := self._seat_in()) is None:
            if self._host.ending.wait(SINK_POLL_S):
                return None
        return sink
