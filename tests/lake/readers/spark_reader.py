"""Spark 4.1 with Iceberg's runtime; the first argument is the jar."""

import sys
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession
from serve import serve

spark = (
    SparkSession.builder.master("local[1]")
    .config("spark.jars", sys.argv[1])
    .config("spark.ui.enabled", "false")
    .config("spark.driver.memory", "1g")
    .config("spark.sql.session.timeZone", "UTC")
    .config("spark.sql.shuffle.partitions", "1")
    .config("spark.sql.extensions", "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions")
    .getOrCreate()
)
spark.sparkContext.setLogLevel("OFF")


def read(request: dict[str, Any]) -> pa.Table:
    spark.conf.set("spark.sql.iceberg.vectorization.enabled", str(request.get("vectorized", True)).lower())
    if "parquet" in request:
        frame = spark.read.parquet(request["parquet"])
    elif "metadata" in request:
        reader = spark.read.format("iceberg")
        if "snapshot" in request or "tag" in request:
            reader = reader.option("versionAsOf", request.get("snapshot", request.get("tag")))
        frame = reader.load(request["metadata"])
    else:
        spark.conf.set("spark.sql.catalog.lake", "org.apache.iceberg.spark.SparkCatalog")
        spark.conf.set("spark.sql.catalog.lake.type", "rest")
        spark.conf.set("spark.sql.catalog.lake.uri", request["catalogue"])
        spark.conf.set("spark.sql.catalog.lake.cache-enabled", "false")  # as in the guide
        if "token" in request:
            spark.conf.set("spark.sql.catalog.lake.token", request["token"])
        version = f" VERSION AS OF {request['snapshot']}" if "snapshot" in request else ""
        if "tag" in request:
            version = f" VERSION AS OF '{request['tag']}'"
        frame = spark.sql(f"SELECT * FROM lake.tidemill.`{request['table']}`{version}")
    if "between" in request:
        column, first, end = request["between"]
        frame = frame.where(f"`{column}` >= {first!r} AND `{column}` < {end!r}")
    if "select" in request:
        frame.createOrReplaceTempView("source")
        frame = spark.sql(f"SELECT {request['select']} FROM source")
    return frame.toArrow()


serve(read)
