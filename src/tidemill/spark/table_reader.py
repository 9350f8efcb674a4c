"""`read`: a shard at one time as a native Spark plan over the Parquet parts themselves.

`shards.read.read_plan` chooses the parts. If a plan cannot be exact, or Spark cannot read the bucket, the data source
reads the shard at the same time, and the log states the reason.

A read hold retains the parts for as long as a Spark plan may read them. It ends LINGER_S after the last frame that was
derived from this one was released: by the JVM, or under Spark Connect, where plans are trees on the client, by the
client. Until then a job may continue, an iterator may start the job of its next partition, or an RDD may be used. In
the JVM, jobs over the RDDs that were being read at the release, and were created after the frame, prolong this time.
Which files they read is unknown, so released frames with such a job count towards LINGERING_MAX, too. Nothing is known
of an RDD that was idle then, nor of a view that a Connect server stores: the program has to keep the frame.
"""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from datetime import datetime
from enum import Enum
from typing import TYPE_CHECKING, Any

import structlog
from pyspark.sql.functions import broadcast, col
from pyspark.sql.types import LongType, StructField, StructType

from tidemill.base.errors import TidemillError
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.shards.api import TIME, ShardSchema
from tidemill.shards.parts.schema import part_schema
from tidemill.shards.read.holds import as_of_ms, hold_during
from tidemill.shards.read.read_plan import PlanNotPossibleError, plan_parts
from tidemill.spark.file_access import files_base, report_unreadable
from tidemill.spark.session.python_worker import translate_missing_source
from tidemill.spark.settings import find_cluster
from tidemill.spark.source import registered_urls, source_format
from tidemill.spark.source.batch import readable_at
from tidemill.spark.stores import Stores, shared_stores
from tidemill.spark.types import local_frame, spark_schema, spark_type

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from tidemill.shards.handle import LogShard

USE_CHECK_S = 5.0
"""Interval at which a hold checks whether its parts can still be read."""
LINGER_S = 300.0
"""Time that jobs, iterators and RDDs may read the parts after the last frame was released, or after the last known job.
"""
LINGERING_MAX = 32
"""Number of released frames of this process whose parts are held; older ones end early, those without a job first. A
table has HOLDS_MAX holds."""
HOLDS_BEFORE_GC = 64
"""Number of holds from which on a read first makes Python and the JVM collect garbage, to release frames out of use."""
SUPERSEDED_PREFIX = "_gone"
VERIFY_CHECKSUM_SETTING = "parquet.page.verify-checksum.enabled"
"""Setting that makes Spark's Parquet reader verify the checksums of pages, which it does not by default. The checksum
of the footer is verified when the plan is made."""

log = structlog.get_logger()

_holds: set[str] = set()
"""Holds of frames that are not known to be released."""
_lingering: dict[str, bool] = {}
"""Holds of released frames, in order of their release: whether a job that may read the parts runs."""


def read(
    spark: SparkSession,
    name: str,
    *,
    as_of: int | str | datetime | None = None,
    config: str = "",
    objects: str = "",
    consensus: str = "",
) -> DataFrame:
    """Return shard `name` at `as_of` (ms, ISO 8601 text or a datetime; None or `latest` = the newest time now).

    The cluster is chosen as for the data source (docs/guides/pipelines.md, Reading), as seen from this process. Raises
    InvalidError (also if the time is not readable), MissingError, UnavailableError.
    """
    where = {key: value for key, value in (("config", config), ("objects", objects), ("consensus", consensus)) if value}
    portal, stores = shared_stores(find_cluster(objects, consensus, config, registered_urls(spark)))
    shard = portal.call(stores.shard(name))
    at = readable_at(portal, shard, as_of_ms(as_of))
    if at is None:
        return spark.createDataFrame([], spark_schema(shard.schema.columns))
    if len(_holds) >= HOLDS_BEFORE_GC:
        gc.collect()
        if hasattr(spark, "_jvm"):
            spark._jvm.System.gc()
    release: Future[Callable[[], _Use]] = Future()
    held: Future[None] = Future()
    asyncio.run_coroutine_threadsafe(_hold_while_used(shard, at, held, release), portal.loop)
    held.result()
    try:
        frame, because = frame_at(spark, portal, stores, shard, at, where)
        if because:
            log.warning("read through the data source", shard=name, as_of=at, because=because)
        in_use = _track_use(frame)
    except BaseException:
        release.set_result(_no_use)
        raise
    release.set_result(in_use)
    return frame


def frame_at(
    spark: SparkSession,
    portal: BlockingPortal,
    stores: Stores,
    shard: LogShard,
    at: int,
    where: dict[str, str],
    *,
    again: bool = False,
) -> tuple[DataFrame, str]:
    """Return the contents at a final time, and the reason why the data source reads them, or "".

    The caller holds that time for as long as Spark may read the frame. `where`: options that name the cluster to the
    data source; `again`: see `plan_parts`. Raises CorruptError, SchemaEvolvedError, HistoryLostError, MissingError,
    UnavailableError.
    """
    try:
        return _native_plan(spark, portal, stores, shard, at, again), ""
    except PlanNotPossibleError as why:
        reader = spark.read.format(source_format(spark)).schema(spark_schema(shard.schema.columns))
        with translate_missing_source():
            return reader.options(table=shard.name, as_of=str(at), **where).load(), str(why)


class _Use(Enum):
    """Answer to the question whether the parts of a frame are still in use."""

    FRAME = "a frame may read them"
    JOB = "the frame was released, and a job that may read them has run since"
    POSSIBLE = "the frame was released: jobs, iterators and RDDs may remain"
    NONE = "nothing can read them"


async def _hold_while_used(shard: LogShard, at: int, held: Future[None], release: Future[Callable[[], _Use]]) -> None:
    """Hold until no reader is left. `held` completes when the hold is in force, or fails with the reason why it is
    not."""
    name = shard.reader_name("dataframe")
    try:
        async with hold_during(shard, name, at):
            _holds.add(name)
            held.set_result(None)
            find_use = await asyncio.wrap_future(release)
            left_s = LINGER_S
            while (use := await asyncio.to_thread(find_use)) is not _Use.NONE and left_s > 0:
                left_s = left_s - USE_CHECK_S if use is _Use.POSSIBLE else LINGER_S
                if use is not _Use.FRAME:
                    _holds.discard(name)
                    _lingering[name] = use is _Use.JOB
                    ending = sorted(_lingering, key=lambda each: _lingering[each])  # stable: then by release
                    if name in ending[: max(0, len(ending) - LINGERING_MAX)]:
                        break
                await asyncio.sleep(USE_CHECK_S)
    except TidemillError as error:
        if held.done():
            raise
        held.set_exception(error)
    finally:
        _holds.discard(name)
        _lingering.pop(name, None)
        await shard.aclose()


def _track_use(frame: DataFrame) -> Callable[[], _Use]:
    """Return how to find out whether the parts that this frame reads are still in use.

    In the JVM, through a weak reference to the object that all copies of the plan's leaf share: the list of files, or
    the table of the data source. Under Spark Connect, through one to the frame's plan, which is a node in the plan of
    every frame derived from it.
    """
    plan = getattr(frame, "_jdf", None)
    if plan is None:
        node = weakref.ref(frame._plan)
        return lambda: _Use.POSSIBLE if node() is None else _Use.FRAME
    from py4j.protocol import Py4JError  # not part of pyspark-client

    leaf = plan.queryExecution().analyzed().collectLeaves().apply(0)
    kind = leaf.getClass().getSimpleName()
    if kind not in ("LogicalRelation", "DataSourceV2Relation"):
        return _no_use  # the rows are in the plan itself
    session: Any = frame.sparkSession  # find_use does not refer to it: its views may refer to the parts
    context, convert = session._jsc.sc(), session._jvm.scala.jdk.javaapi.CollectionConverters
    weak = session._jvm.java.lang.ref.WeakReference(
        leaf.relation().location() if kind == "LogicalRelation" else leaf.table()
    )
    older = session._jsc.emptyRDD().id()  # ids ascend, so no RDD up to this one can read the parts
    read_at_release: set[int] | None = None

    def find_use() -> _Use:
        nonlocal read_at_release
        try:
            if context.isStopped():
                return _Use.NONE
            if not weak.refersTo(None):
                return _Use.FRAME
            if read_at_release is None:
                read_at_release = {rdd for rdd in _rdds_being_read(context, convert) if rdd > older}
            still = bool(read_at_release) and not read_at_release.isdisjoint(_rdds_being_read(context, convert))
        except (Py4JError, OSError):
            return _Use.NONE  # the JVM has ended
        return _Use.JOB if still else _Use.POSSIBLE

    return find_use


def _no_use() -> _Use:
    return _Use.NONE


def _rdds_being_read(context: Any, convert: Any) -> set[int]:
    """Return the ids of the RDDs that active jobs compute. An iterator starts a job for each partition of one RDD."""
    stages = convert.asJava(context.statusStore().activeStages())
    return {rdd for stage in stages for rdd in convert.asJava(stage.rddIds())}


def _reason_against_files(schema: ShardSchema) -> str:
    """Return why Spark cannot read the parts of this table itself, or ""."""
    stored = [name.lower() for name in part_schema(schema).names]
    if len(set(stored)) < len(stored):
        return "Spark ignores the case of Parquet column names, and two columns differ only in case"
    return ""


def _native_plan(
    spark: SparkSession, portal: BlockingPortal, stores: Stores, shard: LogShard, at: int, again: bool
) -> DataFrame:
    """Return a native plan. Raises PlanNotPossibleError."""
    chosen = portal.call(shard.batches_until(at))
    base, no_files = "", _reason_against_files(shard.schema)
    try:
        base = files_base(spark, stores.objects_url)
    except PlanNotPossibleError as why:  # a small shard is read without files
        no_files = no_files or str(why)
    plan = plan_parts(portal, stores.objects, shard, chosen, at, again=again, no_files=no_files)
    columns = spark_schema(shard.schema.columns)
    if not plan.settled:
        return local_frame(spark, plan.live, columns)
    wanted = StructType([*columns.fields, StructField(TIME, LongType())])
    # Stored times use the proleptic Gregorian calendar; the files carry no writer version that Spark would accept as
    # proof.
    reader = spark.read.schema(wanted).option("datetimeRebaseMode", "CORRECTED").option(VERIFY_CHECKSUM_SETTING, "true")
    with report_unreadable(base):
        rows = reader.parquet(*(f"{base}/{part.object_key}" for part in plan.settled))
        _ = rows.schema  # a client of Spark Connect analyses a plan only when asked
    if plan.gone.num_rows:
        names = [f"{SUPERSEDED_PREFIX}{place}" for place in range(plan.gone.num_columns)]
        kinds = {column.name: column.type for column in shard.schema.columns}
        types = [*(spark_type(kinds[name]) for name in shard.schema.key), LongType()]
        # Without types Spark would take times without a zone for instants of the session's zone.
        keys = StructType([StructField(name, kind) for name, kind in zip(names, types, strict=True)])
        gone = local_frame(spark, plan.gone.rename_columns(names), keys)
        rows = rows.join(broadcast(gone), _is_superseded(rows, gone, shard.schema), "left_anti")
    rows = rows.select(*(col(_quoted(name)) for name in columns.names))
    return rows.union(local_frame(spark, plan.live, columns)) if plan.live.num_rows else rows


def _is_superseded(rows: DataFrame, gone: DataFrame, schema: ShardSchema) -> Column:
    """Compare the keys themselves: Spark's vectorised reader cannot decode a dictionary of unsigned hashes to a
    long."""
    found = rows[TIME] < gone[f"{SUPERSEDED_PREFIX}{len(schema.key)}"]
    for place, name in enumerate(schema.key):
        found &= rows[_quoted(name)].eqNullSafe(gone[f"{SUPERSEDED_PREFIX}{place}"])
    return found


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
