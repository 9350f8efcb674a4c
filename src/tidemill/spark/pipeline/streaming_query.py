"""The one streaming query of a pipeline: its planner waits for the bindings of all sources, whatever their number.

Every streaming query starts a Python planner, and Spark's worker factory allows ten seconds for it to connect. Several
planners that start together on a busy machine exceed that; one planner serves any number of sources. A micro-batch
names the sources with new bindings and their end times; the sink of each feed reads the records (feed_sink.py). Feeds
follow their bindings without the query, so its start and its failures delay no row. A sink that raises does not end the
query: its feed fails under its own mark.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import structlog

from tidemill.base.errors import TidemillError
from tidemill.base.runtime.tasks import Backoff, is_fault, sentence
from tidemill.spark.ingest.feed_sink import FeedSink
from tidemill.spark.ingest.pipeline_context import PipelineContext, feed_mark
from tidemill.spark.pipeline.start_limit import STARTS

PACE_MS = 500
"""Two micro-batches begin at least this far apart."""
STABLE_S = 60.0
LONGEST_PAUSE_S = 30.0
POLL_S = 0.2

SinkOf = Callable[[str], FeedSink | None]
Failed = Callable[[str, BaseException], None]
"""(source, what its sink raised)"""

log = structlog.get_logger()


class SparkSessionLostError(TidemillError):
    """Spark's JVM is gone: the process ends, for only a new one gets another."""


class StreamingQuery:
    """`run` is a thread's body. `sink_of` a source is None until its feed has opened one."""

    def __init__(self, host: PipelineContext, sources: Sequence[str], sink_of: SinkOf) -> None:
        self.mark = f"pipeline:{host.settings.name}:query"
        self.query: Any = None
        self.called = threading.Event()
        """Set when Spark has brought a batch since the query was started last."""
        self._host = host
        self._sources = tuple(sources)
        self._sink_of = sink_of
        self._changed = threading.Event()
        self._restarts = Backoff(1.0, LONGEST_PAUSE_S, STABLE_S)
        # Queries in a row that ended before a batch. The first such is logged alone: rows come forward all the same.
        self._in_vain = 0

    def wake(self) -> None:
        """The pipeline ends."""
        self._changed.set()

    def run(self) -> None:
        """Until the pipeline ends. Raises SparkSessionLostError alone; what else goes wrong is told and tried again."""
        host, clock = self._host, self._host.stores.clock
        while not host.session_ready.wait(POLL_S):
            if host.ending.is_set():
                return
        while not host.ending.is_set():
            while not STARTS.begin(self, clock.monotonic_s()):
                if host.ending.wait(POLL_S):
                    break
            if host.ending.is_set():
                break
            began_s = clock.monotonic_s()
            reason = self._watch()
            if host.ending.is_set():
                break
            if host.session_is_lost():
                raise SparkSessionLostError(f"Spark's JVM is gone: error={reason}.")
            # Spark's own trouble, e.g. a worker that a busy machine did not start within its ten seconds.
            pause_s = self._restarts.pause_s(clock.monotonic_s() - began_s)
            log.warning("streaming query ended, starting it again", error=reason, in_s=pause_s)
            self._in_vain = 1 if self.called.is_set() else self._in_vain + 1
            if self.called.is_set() or self._in_vain > 1:
                host.tracker.fail(self.mark, f"streaming query ended: {reason}", now_ms=clock.now_ms())
            host.ending.wait(pause_s)
        STARTS.end(self)

    def _watch(self) -> str:
        """Start the query and wait for its end or the pipeline's; why it ended, or ""."""
        host, clock = self._host, self._host.stores.clock
        self.called.clear()
        try:
            query = self.query = self._start()
            ended, began_s = self._end_of(query), clock.monotonic_s()
            while not host.ending.is_set():
                if ended.is_set():
                    return str(query.exception())[:500]
                ran_s = clock.monotonic_s() - began_s
                if ran_s > STABLE_S or self.called.is_set():
                    host.tracker.heal(self.mark)
                failing = host.tracker.failure(self.mark) is not None
                self._changed.wait(max(0.0, STABLE_S - ran_s) if failing else None)
                self._changed.clear()
        except Exception as error:  # py4j and Spark raise what they like
            return " ".join(str(error).split())[:500]
        finally:
            STARTS.end(self)
        return ""

    def _end_of(self, query: Any) -> threading.Event:
        """Set when the query has ended, or the JVM is gone."""
        ended = threading.Event()

        def wait() -> None:
            try:
                query.awaitTermination()
            except Exception as error:  # py4j and Spark raise what they like; the watch asks the query for its reason
                log.debug("streaming query failed", error=sentence(error))
            finally:
                ended.set()
                self._changed.set()

        threading.Thread(target=wait, name="query-ends", daemon=True).start()
        return ended

    def _start(self) -> Any:
        """With a checkpoint of its own, made anew: where tables go on follows from their shards (U5)."""
        from tidemill.spark.source import DESCRIPTOR_COLUMNS
        from tidemill.spark.types import spark_schema

        host = self._host
        assert host.spark is not None
        checkpoint = host.settings.scratch / "checkpoints"
        shutil.rmtree(checkpoint, ignore_errors=True)
        # Not the stores' URLs: options are in Spark's event log.
        options = {"source": ",".join(self._sources), "rows": "false", "pace_ms": str(PACE_MS)}
        frame = host.spark.readStream.format("tidemill").options(**options).schema(spark_schema(DESCRIPTOR_COLUMNS))
        return (
            frame.load()
            .writeStream.queryName(f"{host.settings.name}{host.settings.instance}")
            .option("checkpointLocation", str(checkpoint))
            .foreachBatch(body(checkpoint, self._sink_of, self._sink_failed, self._batch_came))
            .start()
        )

    def _sink_failed(self, source: str, error: BaseException) -> None:
        """Report it as the failure of the feed, and wake its thread, which retries and heals it."""
        host = self._host
        log.warning("sink failed in a micro-batch", source=source, error=sentence(error))
        host.tracker.fail(feed_mark(host.settings.name, source), sentence(error), now_ms=host.stores.clock.now_ms())
        if (sink := self._sink_of(source)) is not None:
            sink.seats.changed.set()

    def _batch_came(self) -> None:
        if not self.called.is_set():
            STARTS.end(self)
            self.called.set()
            self._changed.set()
            log.info("query runs", sources=len(self._sources))


def body(
    checkpoint: Path, sink_of: SinkOf, failed: Failed, came: Callable[[], None] = lambda: None
) -> Callable[[Any, int], None]:
    """The function for `foreachBatch`. The ends of a batch are read from Spark's own log of offsets. What a sink raises
    goes to `failed`, and the other sources continue."""
    before: dict[str, int] = {}

    def run(_: Any, batch_id: int) -> None:
        came()
        for source, end in planned_ends(checkpoint, batch_id).items():
            sink = sink_of(source)
            if sink is not None and end > before.get(source, 0):
                before[source] = end
                try:
                    sink.time_comes(end)
                except BaseException as error:
                    if not is_fault(error):
                        raise
                    failed(source, error)

    return run


def planned_ends(checkpoint: Path, batch_id: int) -> dict[str, int]:
    """{source: T} of a micro-batch, from the log that Spark writes before it runs one; {} when it is not readable here.

    A file of lines: version, metadata, then one offset a reader.
    """
    try:
        lines = (checkpoint / "offsets" / str(batch_id)).read_text().splitlines()
        return msgspec.json.decode(lines[2], type=dict[str, int])
    except (OSError, IndexError, ValueError, msgspec.MsgspecError):
        return {}
