"""The contents of the peer's tables, one Parquet file each: python dump.py delta|iceberg DIRECTORY TARGET"""

import importlib
import sys
from pathlib import Path

import job
from pyspark.sql import SparkSession


def main() -> None:
    name, directory, target = sys.argv[1:]
    lake = importlib.import_module(name)
    builder = SparkSession.builder.appName("dump")
    for key, value in {**job.COMMON, **lake.settings(directory), "spark.driver.memory": "1g"}.items():
        builder = builder.config(key, value)
    spark = builder.config("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    for table in job.TABLES:
        rows = spark.sql(f"SELECT * FROM {lake.target(directory, table)}")
        rows.drop("_lsn").coalesce(1).write.mode("overwrite").parquet(str(Path(target) / table))
    spark.stop()


if __name__ == "__main__":
    main()
