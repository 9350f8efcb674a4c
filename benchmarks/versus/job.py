"""The peer's job: each table of the shop is a stream from its Debezium topic, merged into a Delta or Iceberg table.

python job.py delta|iceberg BOOTSTRAP DIRECTORY TRIGGER_S
"""

import importlib
import sys
import time
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

TABLES = {
    "warehouse": ("w_id", "w_id INT, name STRING, ytd DECIMAL(14,2)"),
    "district": ("w_id d_id", "w_id INT, d_id INT, next_order INT, ytd DECIMAL(14,2)"),
    "customer": (
        "c_id",
        "c_id BIGINT, w_id INT, d_id INT, name STRING, balance DECIMAL(12,2), payments INT, note STRING",
    ),
    "stock": ("w_id product_id", "w_id INT, product_id BIGINT, quantity INT, price DECIMAL(8,2)"),
    "orders": (
        "o_id",
        "o_id BIGINT, w_id INT, d_id INT, c_id BIGINT, status STRING, total DECIMAL(12,2), placed_at TIMESTAMP",
    ),
    "order_line": (
        "o_id line",
        "o_id BIGINT, line INT, product_id BIGINT, quantity INT, amount DECIMAL(12,2)",
    ),
    "payment": (
        "p_id",
        "p_id BIGINT, w_id INT, d_id INT, c_id BIGINT, amount DECIMAL(10,2), paid_at TIMESTAMP",
    ),
    "probe": ("id", "id BIGINT, at TIMESTAMP"),
}
LARGE = {"customer", "stock", "orders", "order_line", "payment"}
UNCHANGED = "__debezium_unavailable_value"  # stands for an unchanged TOASTed value
TOASTED = {"customer": ["note"]}

COMMON = {
    "spark.master": "local[*]",
    "spark.driver.memory": "2g",
    "spark.driver.extraJavaOptions": "-XX:+UseParallelGC",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.scheduler.mode": "FAIR",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.cache.maxEntries": "5000",
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
}


class Merge:
    """Applies a micro-batch of change events to one table: of each key the latest change, if it is newer."""

    def __init__(self, table: str, target: str) -> None:
        key, self.schema = TABLES[table]
        self.table, self.target, self.key = table, target, key.split()
        self.columns = [column.split()[0] for column in self.schema.split(", ")]
        self.toasted = TOASTED.get(table, [])

    def __call__(self, batch: DataFrame, _: int) -> None:
        envelope = f"op STRING, source STRUCT<lsn: BIGINT>, before STRUCT<{self.schema}>, after STRUCT<{self.schema}>"
        changes = (
            batch.select(f.from_json(f.col("value").cast("string"), envelope).alias("e"))
            .select(
                "e.op", f.col("e.source.lsn").alias("_lsn"), f.expr("IF(e.op = 'd', e.before, e.after)").alias("row")
            )
            .select("op", "_lsn", "row.*")
        )
        rest = [column for column in self.columns if column not in self.key]
        known = [
            f.expr(f"max_by(struct({column}), _lsn) FILTER (WHERE {column} IS DISTINCT FROM '{UNCHANGED}')").alias(
                f"_{column}"
            )
            for column in self.toasted
        ]
        latest = changes.groupBy(*self.key).agg(f.max_by(f.struct("op", "_lsn", *rest), "_lsn").alias("latest"), *known)
        latest.select(*self.key, "latest.*", *(f"_{column}" for column in self.toasted)).createOrReplaceTempView(
            f"changes_{self.table}"
        )
        batch.sparkSession.sql(self.statement(rest))

    def statement(self, rest: list[str]) -> str:
        new = {column: f"s.{column}" for column in [*self.key, *rest, "_lsn"]}
        new |= {column: f"s._{column}.{column}" for column in self.toasted}
        updated = new | {
            column: f"IF(s._{column} IS NULL, t.{column}, s._{column}.{column})" for column in self.toasted
        }
        return f"""
            MERGE INTO {self.target} t USING changes_{self.table} s
            ON {" AND ".join(f"t.{column} = s.{column}" for column in self.key)}
            WHEN MATCHED AND s._lsn > t._lsn AND s.op = 'd' THEN DELETE
            WHEN MATCHED AND s._lsn > t._lsn THEN UPDATE SET {", ".join(f"{c} = {v}" for c, v in updated.items())}
            WHEN NOT MATCHED AND s.op <> 'd' THEN INSERT ({", ".join(new)}) VALUES ({", ".join(new.values())})
        """


def main() -> None:
    name, bootstrap, directory, trigger_s = sys.argv[1:]
    lake = importlib.import_module(name)
    builder = SparkSession.builder.appName("shop")
    for key, value in {**COMMON, **lake.settings(directory)}.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    streams = {}
    for table, (_, schema) in TABLES.items():
        spark.sql(lake.create(directory, table, f"{schema}, _lsn BIGINT", large=table in LARGE))
    while True:  # also starts a query that failed: a batch repeated after a crash fails once (SPARK-55236)
        for table in TABLES:
            if table not in streams or not streams[table].isActive:
                spark.sparkContext.setLocalProperty("spark.scheduler.pool", table)
                streams[table] = (
                    spark.readStream.format("kafka")
                    .option("kafka.bootstrap.servers", bootstrap)
                    .option("subscribe", f"shop.public.{table}")
                    .option("startingOffsets", "earliest")
                    .option("maxOffsetsPerTrigger", 40_000)
                    .load()
                    .writeStream.foreachBatch(Merge(table, lake.target(directory, table)))
                    .option("checkpointLocation", str(Path(directory) / "checkpoints" / table))
                    .trigger(processingTime=f"{trigger_s} seconds")
                    .start()
                )
        time.sleep(1)


if __name__ == "__main__":
    main()
