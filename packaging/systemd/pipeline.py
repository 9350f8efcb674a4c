"""The captured table, and one derived from it."""

from tidemill.spark import Pipeline


def build(p: Pipeline) -> None:
    orders = p.table("orders", p.capture("shop").table("public.orders"))

    @p.derived(key="customer", inputs=(orders,))
    def spending(spark, orders):  # type: ignore[no-untyped-def]
        return orders.groupBy("customer").sum("cents").withColumnRenamed("sum(cents)", "cents")
