"""TPC-H (specification 3.0.1) as keyed topics and derived tables: its data by tpchgen-cli, its refresh functions, and
three of its queries, each as a PySpark function and, for comparison, as SQL on the same tables.

tpchgen-cli makes no refresh sets, so they are made here by the rules of the specification (2.5, 2.26, 2.27, 4.2.3):

`RF1`  inserts SF · 1,500 orders and their lines. Keys are sparse, only the first 8 of every 32 are populated; new
orders
     take the next 8, as dbgen's do. Their rows are rows that the generator made, evenly taken out of the initial ones
     (which are fewer by them).
`RF2`  deletes as many of the initial orders, in the order of their keys, and their lines.

Without the limits of Q3 and the order of results, which no keyed table has: `q3` has every order, `q3_top` its ten.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb

from tidemill.spark import Pipeline

KEYS = {"customer": "c_custkey", "orders": "o_orderkey", "lineitem": "l_orderkey, l_linenumber"}
SCHEMAS = {
    "customer": "c_custkey long, c_name string, c_nationkey short, c_acctbal decimal(15,2), c_mktsegment string",
    "orders": """o_orderkey long, o_custkey long, o_orderstatus string, o_totalprice decimal(15,2), o_orderdate date,
        o_orderpriority string, o_shippriority short, o_comment string""",
    "lineitem": """l_orderkey long, l_linenumber short, l_quantity decimal(15,2), l_extendedprice decimal(15,2),
        l_discount decimal(15,2), l_tax decimal(15,2), l_returnflag string, l_linestatus string, l_shipdate date""",
}
GAP = 8
"""Distance from a populated key to the next one that refreshes may use."""


def generate(directory: Path, scale: float) -> None:
    """customer, orders and lineitem as Parquet files."""
    program = Path(sys.executable).with_name("tpchgen-cli")
    command = [str(program), "parquet", "-s", str(scale), "-o", str(directory), "-T", ",".join(KEYS), "-n", "1", "-q"]
    subprocess.run([*command, "--no-progress"], check=True)


class World:
    """The database as DuckDB holds it: `initial_<table>`, and `<table>` as the refresh functions leave it."""

    def __init__(self, directory: Path, scale: float, sets: int) -> None:
        """`sets`: pairs of refreshes that there will be at most."""
        generate(directory, scale)
        self.connection = duckdb.connect()
        self.orders_a_set = max(1, round(1_500 * scale))
        self._done = 0
        run = self.connection.execute
        for name, schema in SCHEMAS.items():
            columns = ", ".join(f"{c}::{t.replace('string', 'varchar')} as {c}" for c, t in fields(schema))
            run(f"create table initial_{name} as select {columns} from '{directory}/{name}.parquet'")
        counted = run("select count(*) from initial_orders").fetchone()
        assert counted is not None
        every = counted[0] // (sets * self.orders_a_set)
        run(f"""create table reserved as select o_orderkey as key, (n // {every} // {self.orders_a_set}) as number
                from (select o_orderkey, row_number() over (order by o_orderkey) - 1 as n from initial_orders)
                where n % {every} = {every - 1}""")
        for name, key in (("orders", "o_orderkey"), ("lineitem", "l_orderkey")):
            run(f"""create table new_{name} as select * exclude (key) replace ({key} + {GAP} as {key})
                    from initial_{name} join reserved on {key} = reserved.key""")
            run(f"delete from initial_{name} where {key} in (select key from reserved)")
        run(f"""create table old as select o_orderkey as key, (row_number() over (order by o_orderkey) - 1)
                // {self.orders_a_set} as number from initial_orders""")
        for name in KEYS:
            run(f"create table {name} as from initial_{name}")

    def insert(self, sets: int) -> dict[str, str]:
        """Apply RF1 `sets` times. Return table → SQL of the new rows."""
        chosen = f"where number >= {self._done} and number < {self._done + sets}"
        new = {name: f"select * exclude (number) from new_{name} {chosen}" for name in ("orders", "lineitem")}
        for name, rows in new.items():
            self.connection.execute(f"insert into {name} {rows}")
        return new

    def delete(self, sets: int) -> dict[str, str]:
        """RF2, after as many of RF1. Table → SQL of the rows that are gone."""
        chosen = f"(select key from old where number >= {self._done} and number < {self._done + sets})"
        gone = {"orders": f"from initial_orders where o_orderkey in {chosen}",
                "lineitem": f"from initial_lineitem where l_orderkey in {chosen}"}  # fmt: skip
        self.connection.execute(f"delete from orders where o_orderkey in {chosen}")
        self.connection.execute(f"delete from lineitem where l_orderkey in {chosen}")
        self._done += sets
        return gone

    def records(self, name: str, rows: str, *, gone: bool = False) -> list[tuple[bytes, bytes | None]]:
        """The rows as records of a topic: (key, JSON or None)."""
        keys = [k.strip() for k in KEYS[name].split(",")]
        named = ", ".join(f"'{key}', {key}" for key in keys)
        key = keys[0] if len(keys) == 1 else f"json_object({named})"
        found = self.connection.execute(f"select {key}::varchar, to_json(r)::varchar from ({rows}) r").fetchall()
        return [(key.encode(), None if gone else value.encode()) for key, value in found]


def fields(schema: str) -> Iterator[tuple[str, str]]:
    """(name, type) of a schema's columns."""
    for column in schema.replace("(15,2)", "(15;2)").split(","):
        name, kind = column.split()
        yield name, kind.replace(";", ",")


def declare(p: Pipeline) -> None:
    for name, schema in SCHEMAS.items():
        p.table(name, p.topic(name, key=KEYS[name], schema=schema))
    derive(p)


def derive(p: Pipeline) -> None:
    from pyspark.sql import functions as f

    @p.derived("q1", key="l_returnflag, l_linestatus", inputs=("lineitem",))
    def q1(spark: Any, lineitem: Any) -> Any:
        price = f.col("l_extendedprice") * (1 - f.col("l_discount"))
        return (
            lineitem.where("l_shipdate <= date '1998-12-01' - interval 90 days")
            .groupBy("l_returnflag", "l_linestatus")
            .agg(
                f.sum("l_quantity").alias("sum_qty"),
                f.sum("l_extendedprice").alias("sum_base_price"),
                f.sum(price).alias("sum_disc_price"),
                f.sum(price * (1 + f.col("l_tax"))).alias("sum_charge"),
                f.avg("l_quantity").alias("avg_qty"),
                f.avg("l_extendedprice").alias("avg_price"),
                f.avg("l_discount").alias("avg_disc"),
                f.count("*").alias("count_order"),
            )
        )

    @p.derived(
        "q3",
        key="l_orderkey",
        inputs=("customer", "orders", "lineitem"),
        by={"orders": "o_orderkey", "lineitem": "l_orderkey"},
    )
    def q3(spark: Any, customer: Any, orders: Any, lineitem: Any) -> Any:
        chosen = customer.where("c_mktsegment = 'BUILDING'").select(f.col("c_custkey").alias("o_custkey"))
        early = orders.where("o_orderdate < date '1995-03-15'").join(chosen, "o_custkey")
        lines = lineitem.where("l_shipdate > date '1995-03-15'")
        revenue = f.sum(f.col("l_extendedprice") * (1 - f.col("l_discount"))).alias("revenue")
        joined = lines.join(early, lines.l_orderkey == early.o_orderkey)
        return joined.groupBy("l_orderkey", "o_orderdate", "o_shippriority").agg(revenue)

    @p.derived("q3_top", key="place", inputs=("q3",))
    def q3_top(spark: Any, q3: Any) -> Any:
        from pyspark.sql import Window

        order = Window.orderBy(f.desc("revenue"), "o_orderdate", "l_orderkey")
        return q3.withColumn("place", f.row_number().over(order).cast("short")).where("place <= 10")

    @p.derived("q13_customers", key="c_custkey", inputs=("customer", "orders"),
               by={"customer": "c_custkey", "orders": "o_custkey"})  # fmt: skip
    def q13_customers(spark: Any, customer: Any, orders: Any) -> Any:
        own = orders.where("o_comment not like '%special%requests%'")
        joined = customer.join(own, customer.c_custkey == own.o_custkey, "left")
        return joined.groupBy("c_custkey").agg(f.count("o_orderkey").alias("c_count"))

    @p.derived("q13", key="c_count", inputs=("q13_customers",))
    def q13(spark: Any, customers: Any) -> Any:
        return customers.groupBy("c_count").agg(f.count("*").alias("custdist"))


BY_GROUP = ("q3", "q13_customers")

Q3 = """select l_orderkey, sum(l_extendedprice * (1 - l_discount)) as revenue, o_orderdate, o_shippriority
        from customer, orders, lineitem
        where c_mktsegment = 'BUILDING' and c_custkey = o_custkey and l_orderkey = o_orderkey
          and o_orderdate < date '1995-03-15' and l_shipdate > date '1995-03-15'
        group by l_orderkey, o_orderdate, o_shippriority"""
Q13 = """select c_custkey, count(o_orderkey) as c_count from customer left outer join orders
         on c_custkey = o_custkey and o_comment not like '%special%requests%' group by c_custkey"""
SQL = {
    "q1": """select l_returnflag, l_linestatus, sum(l_quantity) as sum_qty, sum(l_extendedprice) as sum_base_price,
               sum(l_extendedprice * (1 - l_discount)) as sum_disc_price,
               sum(l_extendedprice * (1 - l_discount) * (1 + l_tax)) as sum_charge,
               avg(l_quantity)::decimal(19,6) as avg_qty, avg(l_extendedprice)::decimal(19,6) as avg_price,
               avg(l_discount)::decimal(19,6) as avg_disc, count(*) as count_order
             from lineitem where l_shipdate <= date '1998-12-01' - interval 90 day
             group by l_returnflag, l_linestatus""",
    "q3": Q3,
    "q3_top": f"""select * from (select *, row_number() over (order by revenue desc, o_orderdate, l_orderkey) as place
                  from ({Q3})) where place <= 10""",
    "q13_customers": Q13,
    "q13": f"select c_count, count(*) as custdist from ({Q13}) group by c_count",
}
"""Derived table → its batch query by the specification's text and validation parameters (2.4)."""
