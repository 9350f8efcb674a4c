"""A client of Spark Connect without a JVM: `connect_client.py URL OBJECTS CONSENSUS DIRECTORY [OBJECTS CONSENSUS]...`.

It writes, streams and follows tables with the API of PySpark and of `tidemill.spark`, and prints its results as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.functions import col
from pyspark.util import is_remote_only
from structlog.testing import capture_logs

import tidemill.spark
from tidemill.spark import Pipeline, build_session, register, run, upsert

url, objects, consensus, directory, *buckets = sys.argv[1:]
cluster = {"objects": objects, "consensus": consensus}
spark = SparkSession.builder.remote(url).getOrCreate()
seen: dict[str, Any] = {"client_alone": is_remote_only(), "session": type(spark).__module__, "seconds": {}}
stock = "id long, n long"


@contextmanager
def timed(name: str) -> Iterator[None]:
    began_s = time.monotonic()
    yield
    seen["seconds"][name] = round(time.monotonic() - began_s, 1)
    print(name, seen["seconds"][name], file=sys.stderr, flush=True)


def rows(frame: Any) -> list[list[Any]]:
    return sorted([list(row) for row in frame.collect()], key=repr)


def read(table: str) -> list[list[Any]]:
    return rows(spark.read.format("tidemill").options(**cluster).load(table))


def refused(call: Callable[[], object]) -> list[str]:
    """Return the class of the error of `call` and its text."""
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["", "it was not refused"]


def frame(*values: tuple[Any, ...], schema: str = stock) -> Any:
    return spark.createDataFrame(list(values), schema)


def changes(table: str) -> Any:
    return spark.readStream.format("tidemill").options(table=table, changes="true", **cluster).load()


def finish(writer: Any, name: str, table: str = "") -> None:
    """Run a query of this checkpoint until it has processed what is there now; start it again as the guide says."""
    writer = writer.option("checkpointLocation", f"{directory}/{name}").trigger(availableNow=True)
    while True:
        query = writer.start(table) if table else writer.start()
        try:
            query.awaitTermination()
            return
        except Exception as error:
            # Spark's limit of ten seconds for the start of a Python process, too short for a busy machine
            if "Python worker failed to connect back" not in str(error):
                raise
            print("started again:", name, file=sys.stderr, flush=True)


with timed("write"):
    writer = frame((1, 10), (2, 20), (3, 30)).write.format("tidemill").options(key="id", **cluster)
    writer.mode("append").save("stock")
with timed("upsert"):
    upsert(frame((1, 11), (2, None), (4, 40)), "stock", delete_when="n IS NULL", **cluster)
with timed("read"):
    seen["upserted"] = read("stock")
with timed("follow"):
    delivered = changes("stock").select("id", "n", "_diff")
    sink = delivered.writeStream.format("parquet").option("path", f"{directory}/delivered")
    finish(sink, "delivered-checkpoint")
with timed("overwrite"):
    frame((1, 11), (5, 50)).write.format("tidemill").options(**cluster).mode("overwrite").save("stock")
seen["overwritten"] = read("stock")
with timed("follow further"):
    finish(sink, "delivered-checkpoint")
    seen["delivered"] = rows(spark.read.schema(delivered.schema).parquet(f"{directory}/delivered"))

with timed("write a stream"):
    copied = changes("stock").where("_diff > 0").select("id", "n")
    finish(copied.writeStream.format("tidemill").options(key="id", **cluster), "copy-checkpoint", "copy")
    seen["copy"] = read("copy")


def each(batch: Any, _: int) -> None:
    upsert(batch.groupBy("id").agg({"n": "max"}).toDF("id", "n"), "batched", key="id", **cluster)


with timed("foreachBatch"):
    finish(copied.writeStream.foreachBatch(each), "batched-checkpoint")
    seen["batched"] = read("batched")

with timed("register"):
    register(spark, **cluster)
    upsert(frame((6, 60), (7, 70)), "named", key=["id"])
    upsert(frame((6, 0), (7, 71)), "named", delete_when=col("n") == 0)
    seen["named"] = rows(spark.read.format("tidemill").load("named"))
    seen["plan"] = rows(tidemill.spark.read(spark, "named").where("n > 0"))

with timed("nested"):
    nested = "id long, tags array<string>, m map<string,array<int>>, who struct<name:string,at:long>"
    tagged = frame((1, ["x", None], {"b": [1], "a": None}, ("n", 5)), (2, None, {}, None), schema=nested)
    tagged.write.format("tidemill").options(key="id", **cluster).mode("append").save("tagged")
    upserted = frame((2, [], None, (None, 6)), (3, ["y"], {"c": []}, None), schema=nested)
    upsert(upserted, "tagged", **cluster)
    seen["tagged"] = read("tagged")
    followed = changes("tagged").where("_diff > 0").drop("_time", "_diff")
    finish(followed.writeStream.format("tidemill").options(key="id", **cluster), "nested-checkpoint", "tagged_copy")
    seen["tagged_copy"] = read("tagged_copy")

with timed("buckets"):
    seen["buckets"] = []
    for in_s3 in [{"objects": one, "consensus": other} for one, other in zip(buckets[::2], buckets[1::2], strict=True)]:
        with capture_logs() as logs:
            found = tidemill.spark.read(spark, "t", **in_s3)
        because = [str(entry["because"]) for entry in logs if "because" in entry]
        seen["buckets"].append([found.where("k >= 5").count(), *because])


def pipeline(p: Pipeline) -> None:
    p.table("clicks", p.topic("clicks", key="id", schema="id string"))


with timed("refusals"):
    twice = frame((1, 1), (1, 2))
    wrong = twice.write.format("tidemill").options(as_of="3", **cluster).mode("append")
    other_key = copied.writeStream.format("tidemill").options(key="n", **cluster)
    seen["refused"] = {
        "run": refused(lambda: run(spark, pipeline, **cluster)),
        "build_session": refused(lambda: build_session("p")),
        "twice": refused(lambda: upsert(twice, "stock", **cluster)),
        "option": refused(lambda: wrong.save("stock")),
        "missing": refused(lambda: read("nothing")),
        "key": refused(lambda: finish(other_key, "key-checkpoint", "copy")),
    }
print(json.dumps(seen))
spark.stop()
