"""Scenario of every supported Spark, in one process: `python scenario.py DIRECTORY` prints its results as JSON.

The PySpark that is first on PYTHONPATH is used. The scenario writes a table, reads it in both ways, follows its changes
over a restart, streams a topic, writes a stream, and runs a pipeline with a derived table.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[2]
sys.path.insert(0, str(TESTS))

import pyspark  # noqa: E402
from pyspark.sql import SparkSession  # noqa: E402

import tidemill.spark  # noqa: E402
from support.spark.harbour import Harbour  # noqa: E402
from support.waiting import eventually  # noqa: E402
from tidemill.spark import Pipeline  # noqa: E402

directory = Path(sys.argv[1])
os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
began_s = time.monotonic()
seen: dict[str, Any] = {"version": pyspark.__version__}

harbour = Harbour(directory)
cluster = {"objects": harbour.urls.objects, "consensus": harbour.urls.consensus}
spark: SparkSession = tidemill.spark.build_session("versions", "local[2]", scratch=directory / "spark")
spark.sparkContext.setLogLevel("ERROR")
stock = "id long, n long"


def rows(frame: Any) -> list[list[Any]]:
    return sorted([list(row) for row in frame.collect()], key=repr)


def delivered(name: str, options: dict[str, str]) -> list[list[Any]]:
    """Return everything that a stream of the source has delivered, once it has delivered what is there now."""
    frame = spark.readStream.format("tidemill").options(**options, **cluster).load()
    frame = frame.select([column for column in ("id", "n", "_diff", "product") if column in frame.columns])
    out, checkpoint = str(directory / name), str(directory / f"{name}-checkpoint")
    query = frame.writeStream.format("parquet").option("checkpointLocation", checkpoint)
    query.trigger(availableNow=True).start(out).awaitTermination(120)
    return rows(spark.read.schema(frame.schema).parquet(out))


# writer and reader
tidemill.spark.upsert(spark.createDataFrame([(1, 10), (2, 20)], stock), "stock", key="id", **cluster)
reader = spark.read.format("tidemill").options(**cluster)
seen["read"] = rows(reader.load("stock"))
seen["plan"] = rows(tidemill.spark.read(spark, "stock", **cluster).where("id > 1"))
named = ", ".join(f"{name} '{url}'" for name, url in cluster.items())
spark.sql(f"CREATE TEMPORARY VIEW v USING tidemill OPTIONS (table 'stock', {named})")
seen["sql"] = rows(spark.sql("SELECT n FROM v WHERE id = 1"))

# change stream, over a restart of the query
changes = {"table": "stock", "changes": "true"}
seen["changes"] = delivered("changes", changes)
tidemill.spark.upsert(
    spark.createDataFrame([(1, 11), (2, None), (3, 30)], stock), "stock", delete_when="n IS NULL", **cluster
)
seen["later"] = delivered("changes", changes)

# topic stream
topic = harbour.create_topic("clicks")
harbour.produce(topic, [(None, {"id": key, "product": product}) for key, product in (("a", 1), ("b", 1), ("c", 2))])
harbour.mint("topic/clicks", harbour.stores.clock.now_ms(), topic)
clicks = {"source": "topic/clicks", "schema": "id string, product bigint", "key": "id"}
seen["topic"] = delivered("clicks", clicks)

# streaming write
try:
    frame = spark.readStream.format("tidemill").options(**clicks, **cluster).load().select("id", "product")
    query = frame.writeStream.format("tidemill").option("checkpointLocation", str(directory / "copy-c"))
    query.options(key="id", **cluster).trigger(availableNow=True).start("copy").awaitTermination(120)
    seen["copy"] = rows(reader.load("copy"))
except Exception as error:
    seen["copy"] = next(line for line in str(error).splitlines() if "needs Spark 4" in line)


# pipeline
def shop(p: Pipeline) -> None:
    p.table("clicked", p.topic("clicks", key="id", schema="id string, product bigint"))

    @p.derived(key="product", every_s=0.05)
    def counted(spark: Any, clicked: Any) -> Any:
        return clicked.groupBy("product").count()


with tidemill.spark.run(spark, shop, scratch=directory / "scratch", **cluster):
    eventually(lambda: harbour.upper("counted") and len(harbour.contents("counted")) == 2, "the pipeline counts")
seen["counted"] = [[row["product"], row["count"]] for row in harbour.contents("counted")]

seen["seconds"] = round(time.monotonic() - began_s)
print(json.dumps(seen))
spark.stop()
harbour.close()
