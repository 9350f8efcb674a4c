"""Harbour Shop's pipeline: every table of the shop, the click stream, and one table derived from both.

`tidemill up` runs it in a separate PySpark driver. The tables of `shop` are consistent with each other at every time.
A click that arrives twice is one row. A malformed click becomes a dead letter.
"""

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from tidemill.spark import Pipeline

TABLES = ("warehouse", "district", "customer", "stock", "orders", "order_line", "payment")


def build(p: Pipeline) -> None:
    shop = p.capture("shop")
    for table in TABLES:
        p.table(table, shop.table(f"public.{table}"))

    clicks = p.topic(
        "clicks",
        key="click_id",
        schema="click_id string, product_id long, customer_id long, at_ms long",
    )
    p.table("clicks", clicks)

    @p.derived("conversion_by_product", key="product_id", inputs=("clicks", "order_line"), by="product_id", every_s=2)
    def conversion(spark: SparkSession, clicks: DataFrame, order_line: DataFrame) -> DataFrame:
        seen = clicks.groupBy("product_id").agg(f.count("*").alias("clicks"))
        sold = order_line.groupBy("product_id").agg(
            f.sum("quantity").cast("long").alias("sold"),
            f.sum("amount").cast("decimal(18,2)").alias("revenue"),
        )
        return seen.join(sold, "product_id", "full_outer").select(
            "product_id",
            f.coalesce("clicks", f.lit(0)).cast("long").alias("clicks"),
            f.coalesce("sold", f.lit(0)).cast("long").alias("sold"),
            f.coalesce("revenue", f.lit(0)).cast("decimal(18,2)").alias("revenue"),
        )
