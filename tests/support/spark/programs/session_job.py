"""A job of a user: a pipeline and a streaming write in a session that tidemill did not build, until a file exists."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

import tidemill.spark
from tidemill.spark import Pipeline


def job(p: Pipeline) -> None:
    p.table("clicks", p.topic("clicks", key="id", schema="id string, product bigint"))

    @p.derived(key="product", every_s=0.2)
    def by_product(spark: Any, clicks: Any) -> Any:
        return clicks.groupBy("product").count()


def main(root: Path) -> None:
    spark = SparkSession.builder.appName("job").config("spark.ui.enabled", "false").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    running = tidemill.spark.run(spark, job, name="p", scratch=root / "scratch")
    arriving = spark.readStream.schema("id bigint, n bigint").json(str(root / "incoming"))
    query = (
        arriving.writeStream.format("tidemill")
        .option("key", "id")
        .option("checkpointLocation", str(root / "checkpoint"))
        .start("stock")
    )
    (root / f"started-{os.getpid()}").write_text(repr(running))
    while not (root / "finish").exists():
        if query.exception() is not None:
            raise query.exception()
        time.sleep(0.2)
    query.stop()
    spark.stop()
    print("ended", running.wait(60), running.status().state, running.status().error, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
