"""What the parts of one pipeline's process share: settings, stores, the session, the sign that it ends."""

from __future__ import annotations

import fcntl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import structlog
from msgspec.structs import replace

from tidemill.base.errors import InvalidError, UnavailableError, UnknownOutcomeError
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.base.runtime.private_directories import make_private_directory
from tidemill.base.status.freshness import REFUSED
from tidemill.base.status.histogram import Stages
from tidemill.base.status.status import StatusTracker
from tidemill.shards.api import ShardSchema
from tidemill.spark.ingest.schema_growth import grow, held
from tidemill.spark.ingest.sources import TopicFeed
from tidemill.spark.ingest.table_ownership import TableOwnership
from tidemill.spark.ingest.table_writer import TableWriter
from tidemill.spark.settings import DriverSettings
from tidemill.spark.stores import Stores

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MIRRORS = "mirrors"
"""The directory of mirrors in a pipeline's scratch directory."""
LOCK_ATTEMPTS = 50
STORAGE_RETRY_S = 1.0

log = structlog.get_logger()

T = TypeVar("T")


class PipelineContext:
    """`stores` is set before any part starts; `spark` once the JVM is up, with `session_ready` after it."""

    def __init__(self, settings: DriverSettings, claims: TableOwnership) -> None:
        self.settings = settings
        self.claims = claims
        self.stages: dict[str, Stages] = {}
        """Of each source that tables are fed from: how long its commits take to get where."""
        self.portal = BlockingPortal(f"pipeline-{settings.name}")
        self.stores: Stores
        self.spark: SparkSession | None = None
        self.spark_local: Path | None = None
        """Where the session that this process has opened keeps its blocks."""
        self.session_ready = threading.Event()
        self.ending = threading.Event()
        self.tracker = StatusTracker(settings.budget_ms)
        """Marks of the pipeline and its units; their supervision tells failures here."""

    def session_is_lost(self) -> bool:
        """Has the JVM that a session was opened on ended, or its cluster given the application up? Or has somebody
        deleted its directory, which Spark makes once: every shuffle fails from then on.

        A session of somebody else's JVM is not ours to judge.
        """
        from pyspark import SparkContext

        gateway = SparkContext._gateway
        process = getattr(gateway, "proc", None)
        if process is None:
            return False
        if self.spark_local is not None and not self.spark_local.is_dir():
            return True
        return process.poll() is not None or (self.spark is not None and _given_up(self.spark))

    def retried(self, call: Callable[[], T]) -> T:
        """Call until storage answers or the pipeline ends."""
        while True:
            try:
                return call()
            except (UnavailableError, UnknownOutcomeError) as error:
                log.warning("storage is away, waiting", error=str(error))
                if self.ending.wait(STORAGE_RETRY_S):
                    raise

    def writer(self, name: str, schema: ShardSchema, feed: TopicFeed | None = None) -> TableWriter:
        """The shard, created when absent and evolved when `schema` has more, with a hydrated mirror. The feed decodes
        what the shard holds. Raises InvalidError when it cannot become `schema`, and what storage raises."""
        if feed is not None and feed.captured:
            asked, feed = feed, self.portal.call(held(self.stores, name, feed))
            if feed.known or feed.accepted:
                self.portal.call(grow(self.stores, name, feed))
                feed = self.portal.call(held(self.stores, name, asked))  # one that goes leaves no types behind
            schema = feed.schema
        try:
            shard = self.portal.call(self.stores.shard(name, schema))
        except InvalidError as error:
            if feed is None or not feed.captured:
                raise
            fix = (
                f"The table is captured no more ({feed.gone}): leave it out of the pipeline's file, or have the shard"
                f" made anew from what was captured: tidemill shard drop {name}"
                if feed.gone
                else f"Run tidemill capture accept '{feed.table}': it shows what becomes of the shard, and does it once"
                f" you agree. Or have it made anew: tidemill shard drop {name}"
            )
            raise InvalidError(error.message, fix=fix) from error
        if feed is not None:
            # What the source has no more is in no record, whatever version it was written under.
            gone = any(column.retired for column in shard.schema.columns)
            feed = replace(feed, schema=shard.schema, known=feed.known or ((schema.columns,) if gone else ()))
        table = TableWriter(self.portal, self.stores, shard, self.mirror_dir(name), feed)
        table.hydrate()
        return table

    def refusal(self, table: str) -> str:
        """The mark of a table that this pipeline may not keep: the shard's own is told by who keeps it."""
        return f"pipeline:{self.settings.name}{REFUSED}{table}"

    def mirror_dir(self, name: str) -> Path:
        return self.settings.scratch / MIRRORS / name


def feed_mark(pipeline: str, source: str) -> str:
    """The mark of what brings all tables of a source forward."""
    return f"pipeline:{pipeline}:{source}"


def _given_up(spark: SparkSession) -> bool:
    """Spark stops a context whose master removed it, and never starts it again."""
    try:
        return bool(spark.sparkContext._jsc.sc().isStopped())
    except (OSError, AttributeError):
        return True  # the way to the JVM is gone
    except Exception as error:  # py4j raises what it likes
        log.warning("Spark does not say whether it runs", error=str(error).splitlines()[0][:200])
        return True


@contextmanager
def own_directory(scratch: Path) -> Iterator[None]:
    """Keep the scratch directory to this process: two that wrote mirrors into one would read each other's files.

    Raises InvalidError when it is taken or cannot be written. A predecessor that is just ending is waited for.
    """
    try:
        make_private_directory(scratch)
        lock = (scratch / "lock").open("w")
    except OSError as error:
        raise InvalidError(
            f"cannot write the scratch directory: scratch={scratch} error={error.strerror}.", fix="Make it writable."
        ) from error
    with lock:
        for attempt in range(LOCK_ATTEMPTS):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if attempt == LOCK_ATTEMPTS - 1:
                    raise InvalidError(
                        f"scratch directory is in use by another process: scratch={scratch}.",
                        fix="A driver of this name runs here already. Give a second one a name of its own: tidemill"
                        " pipeline run NAME --label TEXT.",
                    ) from error
                threading.Event().wait(0.1)
        yield
