"""The one streaming query of a pipeline that uses Spark: its planner waits for the bindings of all sources, any number
of them.

Every streaming query starts a Python planner. Spark gives it ten seconds to connect, which no setting changes; several
that start together on a busy machine exceed that. One planner serves any number of sources, and if several pipelines
share a JVM, the number of queries that start concurrently is limited: the next one starts once an earlier one has had
its first batch, has ended, or has taken START_TIMEOUT_S.

No row waits for the query, so it starts after the first round of the derived tables. Both need the JVM, which is slow
until their code is compiled.

A micro-batch names the sources with new bindings and their end times; the sink of each feed reads the records
(feed_sink.py). Feeds follow their bindings without the query, so its start and its failures delay no row. A sink that
raises does not end the query: its feed fails under its own stage status.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import structlog

from tidemill.base.errors import TidemillError
from tidemill.base.runtime.tasks import Backoff, error_sentence, is_fault
from tidemill.spark.ingest.feed_sink import FeedSink
from tidemill.spark.ingest.pipeline_context import PipelineContext, feed_status_name

PACE_MS = 5000
"""Minimum interval between the starts of two micro-batches. No row waits for one (feed.py). The planner may outlive a
killed JVM by it."""
STABLE_S = 60.0
LONGEST_PAUSE_S = 30.0
POLL_S = 0.2
DERIVED_FIRST_S = 30.0
"""Limit of the wait for the first round of the derived tables."""

SinkOf = Callable[[str], FeedSink | None]
OnSinkFailure = Callable[[str, BaseException], None]
"""(source, the exception of its sink)."""

log = structlog.get_logger()

CONCURRENT_STARTS = 2
START_TIMEOUT_S = 120.0
"""A start that takes longer no longer blocks others."""


class StartLimiter:
    """Limiter of starts. Called by the threads of all queries. Times are those of a monotonic clock."""

    def __init__(self, at_once: int = CONCURRENT_STARTS, longest_s: float = START_TIMEOUT_S) -> None:
        self._at_once = at_once
        self._longest_s = longest_s
        self._began_s: dict[Hashable, float] = {}
        self._lock = threading.Lock()

    def try_start(self, who: Hashable, now_s: float) -> bool:
        """Return whether `who` may start now; it must call `end` later. False = ask again soon."""
        with self._lock:
            self._began_s = {w: at_s for w, at_s in self._began_s.items() if now_s - at_s < self._longest_s}
            if who not in self._began_s and len(self._began_s) >= self._at_once:
                return False
            self._began_s[who] = now_s
            return True

    def end(self, who: Hashable) -> None:
        """Release the slot: `who` runs, or has ended."""
        with self._lock:
            self._began_s.pop(who, None)


START_LIMITER = StartLimiter()
"""Limiter of this process, which has one JVM, however many pipelines share it."""


class SparkSessionLostError(TidemillError):
    """Spark's JVM has exited: the process ends, because only a new process gets another."""


class StreamingQuery:
    """Streaming query of a pipeline; `run` is the body of a thread. `sink_of` returns None until the source's feed has
    opened its sink. `may_start` returns whether the derived tables have had their first round."""

    def __init__(
        self, host: PipelineContext, sources: Sequence[str], sink_of: SinkOf, may_start: Callable[[], bool]
    ) -> None:
        self.mark = f"pipeline:{host.settings.name}:query"
        self.query: Any = None
        self.called = threading.Event()
        """Set when Spark has run a batch since the query was last started."""
        self._host = host
        self._sources = tuple(sources)
        self._sink_of = sink_of
        self._may_start = may_start
        self._changed = threading.Event()
        self._restarts = Backoff(1.0, LONGEST_PAUSE_S, STABLE_S)
        # Queries in a row that ended before a batch. The first is only logged, because rows advance without the query.
        self._in_vain = 0

    def wake(self) -> None:
        """End the wait, because the pipeline ends."""
        self._changed.set()

    def run(self) -> None:
        """Run until the pipeline ends. Raises only SparkSessionLostError; other failures are reported and retried."""
        host, clock = self._host, self._host.stores.clock
        while not host.session_ready.wait(POLL_S):
            if host.ending.is_set():
                return
        until_s = clock.monotonic_s() + DERIVED_FIRST_S
        while not self._may_start() and clock.monotonic_s() < until_s and not host.ending.wait(POLL_S):
            pass
        while not host.ending.is_set():
            while not START_LIMITER.try_start(self, clock.monotonic_s()):
                if host.ending.wait(POLL_S):
                    break
            if host.ending.is_set():
                break
            began_s = clock.monotonic_s()
            reason = self._run_query()
            if host.ending.is_set():
                break
            if host.session_is_lost():
                raise SparkSessionLostError(f"Spark's JVM has exited: error={reason}.")
            # A failure of Spark itself, e.g. a worker that a busy machine did not start within Spark's ten seconds.
            pause_s = self._restarts.pause_s(clock.monotonic_s() - began_s)
            log.warning("streaming query ended, restarting it", error=reason, in_s=pause_s)
            self._in_vain = 1 if self.called.is_set() else self._in_vain + 1
            if self.called.is_set() or self._in_vain > 1:
                host.tracker.fail(self.mark, f"streaming query ended: {reason}", now_ms=clock.now_ms())
            host.ending.wait(pause_s)
        START_LIMITER.end(self)

    def _run_query(self) -> str:
        """Start the query and wait for its end or the pipeline's; return the reason of its end, or ""."""
        host, clock = self._host, self._host.stores.clock
        self.called.clear()
        try:
            query = self.query = self._start()
            ended, began_s = self._watch_termination(query), clock.monotonic_s()
            while not host.ending.is_set():
                if ended.is_set():
                    return str(query.exception())[:500]
                ran_s = clock.monotonic_s() - began_s
                if ran_s > STABLE_S or self.called.is_set():
                    host.tracker.clear_failure(self.mark)
                failing = host.tracker.failure(self.mark) is not None
                self._changed.wait(max(0.0, STABLE_S - ran_s) if failing else None)
                self._changed.clear()
        except Exception as error:  # py4j and Spark raise exceptions of any type
            return " ".join(str(error).split())[:500]
        finally:
            START_LIMITER.end(self)
        return ""

    def _watch_termination(self, query: Any) -> threading.Event:
        """Return an event that is set when the query has ended, or the JVM has exited."""
        ended = threading.Event()

        def wait() -> None:
            try:
                query.awaitTermination()
            except Exception as error:  # of any type; the watch asks the query for its reason
                log.debug("streaming query failed", error=error_sentence(error))
            finally:
                ended.set()
                self._changed.set()

        threading.Thread(target=wait, name="query-ends", daemon=True).start()
        return ended

    def _start(self) -> Any:
        """Start the query with a new checkpoint: the shards alone determine where their tables continue."""
        from tidemill.spark.source import DESCRIPTOR_COLUMNS
        from tidemill.spark.types import spark_schema

        host = self._host
        assert host.spark is not None
        checkpoint = host.settings.scratch / "checkpoints"
        shutil.rmtree(checkpoint, ignore_errors=True)
        # Without the stores' URLs, because options appear in Spark's event log.
        options = {"source": ",".join(self._sources), "rows": "false", "pace_ms": str(PACE_MS)}
        frame = host.spark.readStream.format("tidemill").options(**options).schema(spark_schema(DESCRIPTOR_COLUMNS))
        return (
            frame.load()
            .writeStream.queryName(f"{host.settings.name}{host.settings.instance}")
            .option("checkpointLocation", str(checkpoint))
            .foreachBatch(batch_function(checkpoint, self._sink_of, self._on_sink_failure, self._on_batch))
            .start()
        )

    def _on_sink_failure(self, source: str, error: BaseException) -> None:
        """Report the failure of a feed, and wake its thread, which retries and clears the failure."""
        host = self._host
        log.warning("sink failed in a micro-batch", source=source, error=error_sentence(error))
        host.tracker.fail(
            feed_status_name(host.settings.name, source), error_sentence(error), now_ms=host.stores.clock.now_ms()
        )
        if (sink := self._sink_of(source)) is not None:
            sink.seats.changed.set()

    def _on_batch(self) -> None:
        if not self.called.is_set():
            START_LIMITER.end(self)
            self.called.set()
            self._changed.set()
            log.info("query runs", sources=len(self._sources))


def batch_function(
    checkpoint: Path, sink_of: SinkOf, failed: OnSinkFailure, came: Callable[[], None] = lambda: None
) -> Callable[[Any, int], None]:
    """Return the function for `foreachBatch`. It reads the ends of a batch from Spark's own log of offsets. An
    exception of a sink is passed to `failed`, and the other sources continue."""
    before: dict[str, int] = {}

    def run(_: Any, batch_id: int) -> None:
        came()
        for source, end in planned_ends(checkpoint, batch_id).items():
            sink = sink_of(source)
            if sink is not None and end > before.get(source, 0):
                before[source] = end
                try:
                    sink.advance_to(end)
                except BaseException as error:
                    if not is_fault(error):
                        raise
                    failed(source, error)

    return run


def planned_ends(checkpoint: Path, batch_id: int) -> dict[str, int]:
    """Return {source: T} of a micro-batch, from the log that Spark writes before the batch runs; {} if it is
    unreadable.

    The log is a file of lines: version, metadata, then one offset per reader.
    """
    try:
        lines = (checkpoint / "offsets" / str(batch_id)).read_text(encoding="utf-8").splitlines()
        return msgspec.json.decode(lines[2], type=dict[str, int])
    except (OSError, IndexError, ValueError, msgspec.MsgspecError):
        return {}
