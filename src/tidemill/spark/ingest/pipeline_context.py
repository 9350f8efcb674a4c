"""Context that the parts of one pipeline's process share: settings, stores, the session, the end of the process, and
its scratch directory.

All of the scratch directory is a cache; a driver removes what is no longer used when it starts.

mirrors/TABLE    mirrors of the pipeline's tables; those of former tables are removed
  pending-…      runs of tasks whose results never arrived
derived/         inputs of derived tables, by group; every process creates them again
large/           an oversized step that was interrupted
checkpoints/     every process creates them again
archive/         code that is sent to executors that lack it (code_shipping.py)
spark-local/     Spark's shuffle files; a killed JVM leaves its files behind
sockets/         sockets between the JVM and Python, of which a killed process leaves some behind
"""

from __future__ import annotations

import fcntl
import shutil
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import structlog
from msgspec.structs import replace

from tidemill.base.errors import InvalidError, UnavailableError, UnknownOutcomeError, drop_table_command
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.base.runtime.private_directories import make_private_directory
from tidemill.base.status.freshness import REFUSED_SEPARATOR
from tidemill.base.status.histogram import StageHistograms
from tidemill.base.status.status import StatusTracker
from tidemill.shards.api import ShardSchema
from tidemill.shards.registry import read_shard
from tidemill.spark.ingest.schema_growth import evolve_shard, feed_for_shard, keep_shard_types
from tidemill.spark.ingest.sources import TopicFeed, as_text_error
from tidemill.spark.ingest.steps.distributed_step import sweep_pending
from tidemill.spark.ingest.table_ownership import TableOwnership
from tidemill.spark.ingest.table_writer import TableWriter
from tidemill.spark.predicates.expectations import expectation_check
from tidemill.spark.session.requirements import is_context_stopped
from tidemill.spark.settings import DriverSettings
from tidemill.spark.stores import Stores

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MIRRORS = "mirrors"
"""Name of the directory of mirrors in a pipeline's scratch directory."""
RECREATED = ("derived", "large", "checkpoints", "spark-local", "sockets", "archive")
LOCK_ATTEMPTS = 50
STORAGE_RETRY_S = 1.0

log = structlog.get_logger()

T = TypeVar("T")


class PipelineContext:
    """Shared context. `stores` is set before any part starts; `spark` once the JVM runs, followed by
    `session_ready`."""

    def __init__(self, settings: DriverSettings, claims: TableOwnership) -> None:
        self.settings = settings
        self.claims = claims
        self.stages: dict[str, StageHistograms] = {}
        """Latency of commits by stage, for each source that feeds tables."""
        self.portal = BlockingPortal(f"pipeline-{settings.name}")
        self.stores: Stores
        self.spark: SparkSession | None = None
        self.spark_local: Path | None = None
        """Directory in which the session that this process opened stores its blocks."""
        self.session_ready = threading.Event()
        """Set once the session can be used. In a pipeline that uses none it is always set, and `spark` stays None."""
        self.ending = threading.Event()
        self.tracker = StatusTracker(settings.budget_ms + settings.freshness_ms)
        """Stage statuses of the pipeline and its units; their supervision reports failures here."""

    def session_is_lost(self) -> bool:
        """Return whether this process's session is unusable: its JVM has exited, its cluster has removed the
        application, or its local directory was deleted. Spark creates that directory once, so every shuffle fails from
        then on.

        The session of a JVM that another process started is never judged.
        """
        from pyspark import SparkContext

        gateway = SparkContext._gateway
        process = getattr(gateway, "proc", None)
        if process is None:
            return False
        if self.spark_local is not None and not self.spark_local.is_dir():
            return True
        return process.poll() is not None or (self.spark is not None and is_context_stopped(self.spark))

    def retry_until_available(self, call: Callable[[], T]) -> T:
        """Call until storage answers or the pipeline ends."""
        while True:
            try:
                return call()
            except (UnavailableError, UnknownOutcomeError) as error:
                log.warning("storage is unavailable, waiting", error=str(error))
                if self.ending.wait(STORAGE_RETRY_S):
                    raise

    def open_writer(self, name: str, schema: ShardSchema, feed: TopicFeed | None = None) -> TableWriter:
        """Open the shard, created if absent and evolved if `schema` has more, with a hydrated mirror.

        The feed then decodes to the shard's columns. Raises InvalidError if the shard cannot evolve to `schema`, or
        an expectation does not fit it, and as storage.
        """
        if feed is not None and feed.captured:
            asked, feed = feed, self.portal.call(keep_shard_types(self.stores, name, feed))
            if feed.known or feed.accepted:
                self.portal.call(evolve_shard(self.stores, name, feed))
                feed = self.portal.call(keep_shard_types(self.stores, name, asked))  # it may have been dropped
            schema = feed.schema
            self._check_as_text(name, feed.as_text)
        expectation_check(schema, feed.expectations if feed is not None else None)
        try:
            shard = self.portal.call(self.stores.shard(name, schema))
        except InvalidError as error:
            if feed is None or not feed.captured:
                raise
            fix = (
                f"The table is no longer captured ({feed.gone}): remove it from the pipeline's file, or re-create the"
                f" table from the captured records: {drop_table_command(name)}"
                if feed.gone
                else f"Run tidemill capture accept '{feed.table}': it shows the effect on the table, and applies it"
                f" once you agree. Or re-create the table: {drop_table_command(name)}"
            )
            raise InvalidError(error.message, fix=fix) from error
        if feed is not None:
            feed = feed_for_shard(replace(feed, schema=schema), shard.schema)
        table = TableWriter(self.portal, self.stores, shard, self.mirror_dir(name), feed)
        table.hydrate()
        return table

    def _check_as_text(self, name: str, as_text: Collection[str]) -> None:
        state = self.portal.call(read_shard(self.stores.consensus, name)) if as_text else None
        error = as_text_error(name, as_text, state.schema) if state is not None else None
        if error is not None:
            raise error

    def refusal_status_name(self, table: str) -> str:
        """Return the name of the status of a table that this pipeline may not maintain; the owner reports the shard's
        own."""
        return f"pipeline:{self.settings.name}{REFUSED_SEPARATOR}{table}"

    def mirror_dir(self, name: str) -> Path:
        return self.settings.scratch / MIRRORS / name


def feed_status_name(pipeline: str, source: str) -> str:
    """Return the name of the stage status of a feed, which advances all tables of a source."""
    return f"pipeline:{pipeline}:{source}"


def executors_status_name(pipeline: str) -> str:
    """Return the name of the status that reports that a cluster has no executor left."""
    return f"pipeline:{pipeline}:executors"


@contextmanager
def lock_scratch_directory(scratch: Path) -> Iterator[None]:
    """Lock the scratch directory for this process: two processes that share one would read each other's mirror files.

    Waits for a predecessor that is exiting. Raises InvalidError if the directory is in use or cannot be written.
    """
    try:
        make_private_directory(scratch)
        lock = (scratch / "lock").open("w", encoding="utf-8")
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
                        fix="A driver of this name already runs here. Start a second one under another name: tidemill"
                        " pipeline run NAME --label TEXT.",
                    ) from error
                threading.Event().wait(0.1)
        yield


def sweep_scratch(scratch: Path, tables: Collection[str]) -> None:
    """Remove unused files. The caller holds the directory's lock. Files that cannot be removed are left for the next
    start."""
    for name in RECREATED:
        shutil.rmtree(scratch / name, ignore_errors=True)
    mirrors = scratch / "mirrors"
    for directory in mirrors.iterdir() if mirrors.is_dir() else ():
        if directory.name not in tables:
            shutil.rmtree(directory, ignore_errors=True)
        else:
            sweep_pending(directory)
