"""`read`: a shard at one time as a plan of Spark's own, over the Parquet parts themselves.

    settled     parts that only insert, read by Spark: its columns, its filters, its row groups
    difference  the other parts, which the driver reads: the last state of every key that they touch

    settled ANTI JOIN (keys that the difference touches, until when)  UNION  (the rows that it leaves)

While there is no difference the plan is Parquet alone. Where a plan cannot be exact, or Spark cannot read the bucket,
the shard is read by the data source, at the same time, and the log says why.

The parts are held for as long as a plan of Spark's may read them: the hold ends when the JVM has let go of the last
frame that was made from this one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import structlog
from pyspark.sql.functions import broadcast, col
from pyspark.sql.types import LongType, StructField, StructType

from tidemill.base.errors import Corrupt, TidemillError
from tidemill.base.limits import MIB
from tidemill.base.portal import Portal
from tidemill.objects.open import local_directory
from tidemill.objects.store import ObjectStore
from tidemill.shards.difference import UNTIL, last_states
from tidemill.shards.front import DIFF, HASH, TIME, Batch, ShardSchema
from tidemill.shards.holding import holding
from tidemill.shards.moments import as_of_ms
from tidemill.shards.reading import PartReader
from tidemill.shards.schema import part_schema
from tidemill.spark.cluster import find_cluster
from tidemill.spark.source import registered_with
from tidemill.spark.source.batch import readable_at
from tidemill.spark.stores import Stores, shared
from tidemill.spark.types import spark_schema

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from tidemill.shards.handle import LogShard

DIFFERENCE_BYTES = 32 * MIB
"""Encoded updates that the driver reads for one plan; with more the data source is better."""
WATCH_S = 5.0
"""How often a hold looks whether anybody can still read what it holds."""
FRAMES_MAX = 64
"""More frames that hold something: the JVM is asked to look which of them are still in use."""
GLOB = set("*?[]{}\\")
GONE = "_gone"

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
    if len(_holds) >= FRAMES_MAX and hasattr(spark, "_jvm"):
        spark._jvm.System.gc()
    release: Future[Callable[[], bool]] = Future()
    held: Future[None] = Future()
    asyncio.run_coroutine_threadsafe(_hold(shard, at, held, release), portal.loop)
    held.result()
    try:
        try:
            frame = _planned(spark, portal, stores, shard, at)
        except _ByTheDataSource as why:
            log.warning("read through the data source", shard=name, as_of=at, because=str(why))
            frame = spark.read.format("tidemill").options(shard=name, as_of=str(at), **where).load()
        in_use = _in_use(frame)
    except BaseException:
        release.set_result(lambda: False)
        raise
    release.set_result(in_use)
    return frame


class _ByTheDataSource(Exception):
    """Why no plan over the parts is made."""


async def _hold(shard: LogShard, at: int, held: Future[None], release: Future[Callable[[], bool]]) -> None:
    """Hold until nobody can read any more. `held` ends when it is in force, or says why it is not."""
    name = shard.reader_name("dataframe")
    try:
        async with holding(shard, name, at):
            _holds.add(name)
            held.set_result(None)
            in_use = await asyncio.wrap_future(release)
            while True:
                if not await asyncio.to_thread(in_use):
                    return
                await asyncio.sleep(WATCH_S)
    except TidemillError as error:
        if held.done():
            raise
        held.set_exception(error)
    finally:
        _holds.discard(name)
        await shard.aclose()


def _in_use(frame: DataFrame) -> Callable[[], bool]:
    """May a plan in the JVM still read what this frame reads? By a weak reference to what every copy of the plan's leaf
    shares: the list of files, or the table of the data source."""
    from py4j.protocol import Py4JError

    plan = getattr(frame, "_jdf", None)
    if plan is None:
        return lambda: False  # Spark Connect: the plan is somebody else's, and the data source holds for itself
    leaf = plan.queryExecution().analyzed().collectLeaves().apply(0)
    kind = leaf.getClass().getSimpleName()
    if kind not in ("LogicalRelation", "DataSourceV2Relation"):
        return lambda: False  # rows that are in the plan itself
    weak = frame.sparkSession._jvm.java.lang.ref.WeakReference(
        leaf.relation().location() if kind == "LogicalRelation" else leaf.table()
    )

    def in_use() -> bool:
        try:
            return not weak.refersTo(None)
        except (Py4JError, OSError):
            return False  # the session has ended

    return in_use


def _planned(spark: SparkSession, portal: Portal, stores: Stores, shard: LogShard, at: int) -> DataFrame:
    """Raises _ByTheDataSource."""
    directory = local_directory(stores.urls.objects)
    if directory is None or GLOB & set(directory):
        raise _ByTheDataSource("the bucket is not a directory that Spark itself can read")
    settled: list[str] = []
    rest: list[Batch] = []
    for batch in portal.call(shard.batches_until(at)):
        others = []
        for part in batch.parts:
            path = f"{directory}/{part.object_key}"
            times = _insertions(path, shard.schema) if part.object_key else None
            if times is not None and batch.lower <= times[0] and times[1] < min(batch.upper, at + 1):
                settled.append(path)
            else:
                others.append(part)
        rest.append(msgspec.structs.replace(batch, parts=tuple(others)))
    columns = spark_schema(shard.schema.columns)
    found = _difference(portal, stores.objects, shard, rest, at)
    if not settled:
        return spark.createDataFrame(found[1], columns)
    wanted = StructType([*columns.fields, StructField(TIME, LongType())])
    # Stored times count from 1970 in the one calendar; who wrote them is in no file that Spark would trust.
    reader = spark.read.schema(wanted).option("datetimeRebaseMode", "CORRECTED")
    rows = reader.parquet(*(f"file://{path}" for path in settled))
    if found[0].num_rows:
        rows = rows.join(broadcast(spark.createDataFrame(found[0])), _is_gone(rows, shard.schema), "left_anti")
    rows = rows.select(*(col(_quoted(name)) for name in columns.names))
    return rows.union(spark.createDataFrame(found[1], columns)) if found[1].num_rows else rows


@lru_cache(maxsize=8192)
def _insertions(path: str, schema: ShardSchema) -> tuple[int, int] | None:
    """First and last time of a part that only inserts, single rows under this very schema; None of any other."""
    try:
        with pq.ParquetFile(path) as file:
            if not file.schema_arrow.equals(part_schema(schema)):
                return None
            read = file.read(columns=[TIME, DIFF], use_threads=False)
    except (OSError, pa.ArrowException) as error:
        raise Corrupt(f"part is unreadable: object={path} ({error}).") from error
    diffs, times = (pc.min_max(read.column(name)).as_py() for name in (DIFF, TIME))
    return (times["min"], times["max"]) if diffs == {"min": 1, "max": 1} else None


def _difference(
    portal: Portal, objects: ObjectStore, shard: LogShard, rest: list[Batch], at: int
) -> tuple[pa.Table, pa.Table]:
    """(gone, live) of `last_states`, the columns of gone named apart and without its hash."""
    size_bytes = sum(part.size_bytes for batch in rest for part in batch.parts)
    if size_bytes > DIFFERENCE_BYTES:
        raise _ByTheDataSource(f"{size_bytes >> 20} MiB of updates are not merged")
    updates = portal.call(PartReader(objects, shard.schema, cache_bytes=0).read_batches(rest, 0, at + 1))
    if updates.num_rows and not shard.schema.key:
        raise _ByTheDataSource("it has no key, and updates that are not merged")
    found = last_states(shard.schema, updates)
    if found is None:
        raise _ByTheDataSource("some key has several rows")
    gone, live = found
    gone = gone.drop_columns([HASH])
    return gone.rename_columns([f"{GONE}{name}" for name in gone.column_names]), live


def _is_gone(rows: DataFrame, schema: ShardSchema) -> Column:
    """By the key itself: Spark's vectorised reader has no way from a dictionary of unsigned hashes to a long."""
    found = rows[TIME] < col(GONE + UNTIL)
    for name in schema.key:
        found &= rows[_quoted(name)].eqNullSafe(col(_quoted(GONE + name)))
    return found


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
