"""A program of Spark Connect with a separate server: `python connect_child.py DIRECTORY` prints what it saw."""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))  # the packages of tests

from tidemill.spark.session.java import export_java, find_java

directory = Path(sys.argv[1])
export_java(find_java())
os.environ.update(PYSPARK_PYTHON=sys.executable, SPARK_TESTING="1", SPARK_LOCAL_IP="127.0.0.1")

from pyspark.sql import SparkSession  # noqa: E402

from support.spark.harbour import Harbour  # noqa: E402
from support.spark.pipelines import until  # noqa: E402
from support.spark.wide_table import append, holds, merge, rows  # noqa: E402
from tidemill.base.clock import SystemClock  # noqa: E402
from tidemill.base.errors import InvalidError  # noqa: E402
from tidemill.maintenance.shards.upkeep import collect_garbage  # noqa: E402
from tidemill.shards.compaction.compaction import compact_once  # noqa: E402
from tidemill.spark import build_session, read, run, upsert  # noqa: E402
from tidemill.spark import table_reader as reading  # noqa: E402

COUNT = 30_000
reading.USE_CHECK_S, reading.LINGER_S = 0.05, 0.2

CLASSIC = ("py4j", "py4j.protocol", "py4j.java_gateway")
harbour = Harbour(directory)
append(harbour, "t", 10, rows(range(COUNT), 0, 5, 1))
merge(harbour, "t", 9)
spark = SparkSession.builder.remote("local[1]").config("spark.ui.enabled", "false").getOrCreate()
for name in CLASSIC:
    sys.modules[name] = None  # type: ignore[assignment]  # as with pyspark-client, which has no py4j
read_at_first = [part.object_key for batch in harbour.shard("t").state.batches for part in batch.parts]
frame = read(spark, "t", as_of=9, objects=harbour.urls.objects, consensus=harbour.urls.consensus)
descendant = frame.where("k >= 10").groupBy("s").count()
del frame
gc.collect()
append(harbour, "t", 20, rows(range(COUNT), 0, 15, -1))
held = holds(harbour, "t")


async def collected() -> list[str]:
    """Collect as the maintenance job does once history has advanced, as far as holds permit."""
    shard = await harbour.stores.shard("t")
    await shard.downgrade_since("keeper", 1, 19)
    await compact_once(shard, harbour.stores.objects, harbour.stores.rand)
    await collect_garbage(shard, harbour.stores.objects, SystemClock(), after_ms=-1, persisted=1 << 60)
    return [key for key in read_at_first if await harbour.stores.objects.head(key) is None]


gone = harbour.portal.call(collected())
counted = sum(row["count"] for row in descendant.collect())
del descendant


def let_go() -> bool:
    gc.collect()
    return not holds(harbour, "t")


until(let_go, "the hold ends")
after = harbour.portal.call(collected())
connect = "connect" in type(spark).__module__

# The other ways: the data source plans and runs on the server, so the client needs nothing but its plans.
cluster = {"objects": harbour.urls.objects, "consensus": harbour.urls.consensus}
upsert(spark.createDataFrame([(1, 10), (2, 20)], "id long, n long"), "stock", key="id", **cluster)
upsert(spark.createDataFrame([(2, None)], "id long, n long"), "stock", delete_when="n IS NULL", **cluster)
source = spark.readStream.format("tidemill").options(table="stock", changes="true", **cluster).load()
query = source.writeStream.format("parquet").option("checkpointLocation", str(directory / "checkpoint"))
query.trigger(availableNow=True).start(str(directory / "changes")).awaitTermination(120)
changes = spark.read.schema(source.schema).parquet(str(directory / "changes")).select("id", "n", "_diff").collect()
needs_jvm = []
for refused in (lambda: run(spark, lambda p: None, name="p", **cluster), lambda: build_session("p")):
    try:
        refused()
    except InvalidError as error:
        needs_jvm.append(str(error))
found = {"connect": connect, "held": held, "gone": gone, "counted": counted, "after": len(after)}
found |= {"changes": [list(row) for row in changes], "needs_jvm": needs_jvm}
print(json.dumps(found))
for name in CLASSIC:
    del sys.modules[name]
spark.stop()
harbour.close()
