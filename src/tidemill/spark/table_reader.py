"""`read`: a shard at one time as a plan of Spark's own, over the Parquet parts themselves.

What the plan is made of is in `shards.plan`. Where a plan cannot be exact, or Spark cannot read the bucket, the shard
is read by the data source, at the same time, and the log says why.

The parts are held for as long as a plan of Spark's may read them: the hold ends when the JVM has let go of the last
frame that was made from this one. Under Spark Connect plans are trees of the client's, so it ends LINGER_S after the
client has let go of the last of them, for the server may be at work on it; a view that the server keeps is held with
the frames of the client alone.
"""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

import structlog
from pyspark.sql.functions import broadcast, col
from pyspark.sql.types import LongType, StructField, StructType

from tidemill.base.errors import TidemillError
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.shards.api import TIME, ShardSchema
from tidemill.shards.parts.schema import part_schema
from tidemill.shards.read.holds import holding
from tidemill.shards.read.read_plan import PlanNotPossibleError, plan_parts
from tidemill.shards.read.time_parsing import as_of_ms
from tidemill.spark.session.cluster_lookup import find_cluster
from tidemill.spark.session.python_worker import data_source_found
from tidemill.spark.source import registered_with
from tidemill.spark.source.batch import readable_at
from tidemill.spark.stores import Stores, shared
from tidemill.spark.types import spark_schema

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from tidemill.shards.handle import LogShard

WATCH_S = 5.0
"""How often a hold looks whether anybody can still read what it holds."""
LINGER_S = 300.0
"""Of Spark Connect: how long a job may go on whose frame its client has forgotten."""
FRAMES_MAX = 64
"""More frames that hold something: Python and the JVM are asked to look which of them are still in use."""
GLOB = set("*?[]{}\\")
GONE = "_gone"
VERIFY = "parquet.page.verify-checksum.enabled"
"""Spark's Parquet reader has the checksums of pages, and verifies them only when it is told to. That of the footer is
verified when the plan is made."""

log = structlog.get_logger()

_holds: set[str] = set()


def read(
    spark: SparkSession,
    name: str,
    *,
    as_of: int | str | datetime | None = None,
    config: str = "",
    objects: str = "",
    consensus: str = "",
) -> DataFrame:
    """The shard `name` at `as_of` (ms, ISO 8601 text or a datetime; None or `latest` = the newest time there is now).

    Which cluster: as for the data source (docs/pipelines.md, Reading), seen from this process. Raises Invalid (also
    when the time is not readable), Missing, Unavailable.
    """
    where = {key: value for key, value in (("config", config), ("objects", objects), ("consensus", consensus)) if value}
    portal, stores = shared(find_cluster(objects, consensus, config, registered_with(spark)))
    shard = portal.call(stores.shard(name))
    at = readable_at(portal, shard, as_of_ms(as_of))
    if at is None:
        return spark.createDataFrame([], spark_schema(shard.schema.columns))
    if len(_holds) >= FRAMES_MAX:
        gc.collect()
        if hasattr(spark, "_jvm"):
            spark._jvm.System.gc()
    release: Future[_Use] = Future()
    held: Future[None] = Future()
    asyncio.run_coroutine_threadsafe(_hold(shard, at, held, release), portal.loop)
    held.result()
    try:
        frame, because = frame_at(spark, portal, stores, shard, at, where)
        if because:
            log.warning("read through the data source", shard=name, as_of=at, because=because)
        in_use = _in_use(frame)
    except BaseException:
        release.set_result(NO_USE)
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
    """The contents at a time that is final, and that the caller holds for as long as Spark may read the frame; and why
    the data source reads them, or "". `where`: options that name the cluster to it; `again`: see `plan_parts`.

    Raises Corrupt, Evolved, HistoryLost, Missing, Unavailable.
    """
    try:
        return _planned(spark, portal, stores, shard, at, again), ""
    except PlanNotPossibleError as why:
        reader = spark.read.format("tidemill").schema(spark_schema(shard.schema.columns))
        with data_source_found():
            return reader.options(shard=shard.name, as_of=str(at), **where).load(), str(why)


class _Use(NamedTuple):
    """`goes_on`: may anybody still read? `linger_s`: how long after that somebody may."""

    goes_on: Callable[[], bool]
    linger_s: float = 0.0


NO_USE = _Use(lambda: False)


async def _hold(shard: LogShard, at: int, held: Future[None], release: Future[_Use]) -> None:
    """Hold until nobody can read any more. `held` ends when it is in force, or says why it is not."""
    name = shard.reader_name("dataframe")
    try:
        async with holding(shard, name, at):
            _holds.add(name)
            held.set_result(None)
            use = await asyncio.wrap_future(release)
            while True:
                if not await asyncio.to_thread(use.goes_on):
                    break
                await asyncio.sleep(WATCH_S)
            await asyncio.sleep(use.linger_s)
    except TidemillError as error:
        if held.done():
            raise
        held.set_exception(error)
    finally:
        _holds.discard(name)
        await shard.aclose()


def _in_use(frame: DataFrame) -> _Use:
    """Of what this frame reads. By a weak reference to what every copy of the plan's leaf in the JVM shares: the list
    of files, or the table of the data source. Under Spark Connect, to the frame's plan, which is a node of the plan of
    every frame that is made from it."""
    from py4j.protocol import Py4JError

    plan = getattr(frame, "_jdf", None)
    if plan is None:
        node = weakref.ref(frame._plan)
        return _Use(lambda: node() is not None, LINGER_S)
    leaf = plan.queryExecution().analyzed().collectLeaves().apply(0)
    kind = leaf.getClass().getSimpleName()
    if kind not in ("LogicalRelation", "DataSourceV2Relation"):
        return NO_USE  # rows that are in the plan itself
    weak = frame.sparkSession._jvm.java.lang.ref.WeakReference(
        leaf.relation().location() if kind == "LogicalRelation" else leaf.table()
    )

    def in_use() -> bool:
        try:
            return not weak.refersTo(None)
        except (Py4JError, OSError):
            return False  # the session has ended

    return _Use(in_use)


def _why_no_files(directory: str | None, schema: ShardSchema) -> str:
    """Why Spark cannot read the parts themselves, or ""."""
    if directory is None or GLOB & set(directory):
        return "the bucket is not a directory that Spark itself can read"
    stored = [name.lower() for name in part_schema(schema).names]
    if len(set(stored)) < len(stored):
        return "Spark tells no columns of Parquet apart by case, and one differs from another by that alone"
    return ""


def _planned(
    spark: SparkSession, portal: BlockingPortal, stores: Stores, shard: LogShard, at: int, again: bool
) -> DataFrame:
    """Raises PlanNotPossibleError."""
    directory = stores.directory
    plan = plan_parts(portal, stores.objects, shard, at, again=again, no_files=_why_no_files(directory, shard.schema))
    columns = spark_schema(shard.schema.columns)
    if not plan.settled:
        return spark.createDataFrame(plan.live, columns)
    wanted = StructType([*columns.fields, StructField(TIME, LongType())])
    # Stored times count from 1970 in the one calendar; who wrote them is in no file that Spark would trust.
    reader = spark.read.schema(wanted).option("datetimeRebaseMode", "CORRECTED").option(VERIFY, "true")
    rows = reader.parquet(*(f"file://{directory}/{part.object_key}" for part in plan.settled))
    if plan.gone.num_rows:
        names = [f"{GONE}{place}" for place in range(plan.gone.num_columns)]
        gone = spark.createDataFrame(plan.gone.rename_columns(names))
        rows = rows.join(broadcast(gone), _is_gone(rows, gone, shard.schema), "left_anti")
    rows = rows.select(*(col(_quoted(name)) for name in columns.names))
    return rows.union(spark.createDataFrame(plan.live, columns)) if plan.live.num_rows else rows


def _is_gone(rows: DataFrame, gone: DataFrame, schema: ShardSchema) -> Column:
    """By the key itself: Spark's vectorised reader has no way from a dictionary of unsigned hashes to a long."""
    found = rows[TIME] < gone[f"{GONE}{len(schema.key)}"]
    for place, name in enumerate(schema.key):
        found &= rows[_quoted(name)].eqNullSafe(gone[f"{GONE}{place}"])
    return found


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
