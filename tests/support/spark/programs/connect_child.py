"""A client of Spark Connect that holds the parts that its frames read: `python connect_child.py URL DIRECTORY`."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.util import is_remote_only

from support.spark.harbour import Harbour
from support.spark.pipelines import until
from support.spark.wide_table import append, holds, merge, rows
from tidemill.base.clock import SystemClock
from tidemill.maintenance.shards.upkeep import collect_garbage
from tidemill.shards.compaction.compaction import compact_once
from tidemill.spark import read
from tidemill.spark import table_reader as reading

COUNT = 30_000
reading.USE_CHECK_S, reading.LINGER_S = 0.05, 0.2

url, directory = sys.argv[1:]
harbour = Harbour(Path(directory))
append(harbour, "t", 10, rows(range(COUNT), 0, 5, 1))
merge(harbour, "t", 9)
spark = SparkSession.builder.remote(url).getOrCreate()
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
found = {"client_alone": is_remote_only(), "held": held, "gone": gone, "counted": counted, "after": len(after)}
print(json.dumps(found))
spark.stop()
harbour.close()
