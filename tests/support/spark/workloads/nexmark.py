"""Nexmark (Tucker, Tufte, Papadimos, Maier: NEXMark, a benchmark for queries over data streams) as keyed topics and
derived tables: q0 to q5, q7 and q8, each as a PySpark function and, for comparison, as SQL on the same tables.

Persons, auctions and bids have the benchmark's proportions 1 : 3 : 46, in the order of their times. Unlike there, rows
also change and disappear: a person moves, an auction is extended, a bid is withdrawn. Windows use `at_ms`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from tidemill.spark import Pipeline

WINDOW_MS, HOP_MS = 10_000, 5_000
STREAMS = {
    "person": "id long, name string, city string, state string, at_ms long",
    "auction": "id long, item string, seller long, category long, initial long, expires_ms long, at_ms long",
    "bid": "id long, auction long, bidder long, price long, at_ms long",
}
Event = tuple[str, int, dict[str, Any] | None]
"""(stream, id, row; None = it is withdrawn)"""


def events(seed: int, count: int) -> Iterator[Event]:
    rng = random.Random(seed)
    ids = dict.fromkeys(STREAMS, 0)
    rows: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in STREAMS}
    for number in range(count):
        at_ms = number * 100
        if number > 20 and rng.random() < 0.05:
            yield _later(rng, rows, at_ms)
            continue
        place = number % 50
        stream = "person" if place == 0 else "auction" if place % 16 == 1 else "bid"
        key = ids[stream]
        ids[stream] += 1
        row: dict[str, Any] = {"id": key, "at_ms": at_ms}
        if stream == "person":
            state = rng.choice(["OR", "ID", "CA", "WA", "NY"])
            row |= {"name": f"p{rng.randrange(50)}", "city": f"city {rng.randrange(9)}", "state": state}
        elif stream == "auction":
            row |= {"item": f"item {key}", "seller": rng.randrange(max(1, ids["person"])), "category": 10 + key % 3}
            row |= {"initial": rng.randrange(100), "expires_ms": at_ms + rng.randrange(2_000, 20_000)}
        else:
            row |= {"auction": rng.randrange(max(1, ids["auction"])), "bidder": rng.randrange(max(1, ids["person"]))}
            row |= {"price": rng.randrange(1, 10_000)}
        rows[stream][key] = row
        yield stream, key, row


def _later(rng: random.Random, rows: dict[str, dict[int, dict[str, Any]]], at_ms: int) -> Event:
    """A row that was there changes, or goes."""
    stream = rng.choice([name for name in rows if rows[name]])
    key = rng.choice(list(rows[stream]))
    row = rows[stream][key]
    if stream == "person":
        row = row | {"state": rng.choice(["OR", "NY"])}
    elif stream == "auction":
        row = row | {"expires_ms": at_ms + 3_000}
    elif rng.random() < 0.5:
        del rows[stream][key]
        return stream, key, None
    else:
        row = row | {"price": row["price"] + 1}
    rows[stream][key] = row
    return stream, key, row


def build(p: Pipeline) -> None:
    from pyspark.sql import functions as f

    for name, schema in STREAMS.items():
        p.table(name, p.topic(name, key="id", schema=schema))

    @p.derived("q0", key="id", inputs=("bid",), by="id")
    def q0(spark: Any, bid: Any) -> Any:
        return bid

    @p.derived("q1", key="id", inputs=("bid",), by="id")
    def q1(spark: Any, bid: Any) -> Any:
        return bid.selectExpr("id", "auction", "cast(price * 908 div 1000 as long) as price_eur")

    @p.derived("q2", key="id", inputs=("bid",), by="id")
    def q2(spark: Any, bid: Any) -> Any:
        return bid.where("auction % 7 = 0").select("id", "auction", "price")

    @p.derived("q3", key="id", inputs=("auction", "person"), by={"auction": "id"})
    def q3(spark: Any, auction: Any, person: Any) -> Any:
        near = person.where("state in ('OR', 'ID', 'CA')").select(f.col("id").alias("seller"), "name", "city", "state")
        return auction.where("category = 10").join(near, "seller").select("id", "name", "city", "state")

    @p.derived("q4", key="category", inputs=("auction", "bid"))
    def q4(spark: Any, auction: Any, bid: Any) -> Any:
        own = bid.select("auction", "price", f.col("at_ms").alias("bid_ms"))
        final = auction.join(own, auction.id == own.auction).where("bid_ms between at_ms and expires_ms")
        final = final.groupBy("id", "category").agg(f.max("price").alias("price"))
        return final.groupBy("category").agg(f.sum("price").alias("total"), f.count("*").alias("auctions"))

    @p.derived("q5", key="start_ms, auction", inputs=("bid",))
    def q5(spark: Any, bid: Any) -> Any:
        starts = f"sequence(at_ms - at_ms % {HOP_MS} - {WINDOW_MS - HOP_MS}, at_ms - at_ms % {HOP_MS}, {HOP_MS}L)"
        seen = bid.select("auction", f.explode(f.expr(starts)).alias("start_ms")).groupBy("start_ms", "auction").count()
        most = seen.groupBy("start_ms").agg(f.max("count").alias("count"))
        return seen.join(most, ["start_ms", "count"]).select("start_ms", "auction", "count")

    @p.derived("q7", key="id", inputs=("bid",))
    def q7(spark: Any, bid: Any) -> Any:
        own = bid.select("id", "auction", "price", f.expr(f"at_ms - at_ms % {WINDOW_MS}").alias("start_ms"))
        return own.join(own.groupBy("start_ms").agg(f.max("price").alias("price")), ["start_ms", "price"])

    @p.derived("q8", key="id, start_ms", inputs=("person", "auction"))
    def q8(spark: Any, person: Any, auction: Any) -> Any:
        window = f.expr(f"at_ms - at_ms % {WINDOW_MS}").alias("start_ms")
        sellers = auction.select(f.col("seller").alias("id"), window).distinct()
        return person.select("id", "name", window).join(sellers, ["id", "start_ms"])


SQL = {
    "q0": "select * from bid",
    "q1": "select id, auction, price * 908 // 1000 as price_eur from bid",
    "q2": "select id, auction, price from bid where auction % 7 = 0",
    "q3": """select a.id, p.name, p.city, p.state from auction a join person p on a.seller = p.id
             where a.category = 10 and p.state in ('OR', 'ID', 'CA')""",
    "q4": """select category, sum(price)::bigint as total, count(*) as auctions from
             (select a.id, a.category, max(b.price) as price from auction a join bid b on b.auction = a.id
              where b.at_ms between a.at_ms and a.expires_ms group by all) group by category""",
    "q5": f"""with seen as (
               select s * {HOP_MS} as start_ms, auction, count(*) as count from bid,
               range(-100, 1000) as r(s)
               where at_ms >= s * {HOP_MS} and at_ms < s * {HOP_MS} + {WINDOW_MS} group by all)
             select start_ms, auction, count from seen
             where count = (select max(count) from seen other where other.start_ms = seen.start_ms)""",
    "q7": f"""select id, auction, price, at_ms // {WINDOW_MS} * {WINDOW_MS} as start_ms from bid b where price =
             (select max(price) from bid o where o.at_ms // {WINDOW_MS} = b.at_ms // {WINDOW_MS})""",
    "q8": f"""select p.id, p.name, p.at_ms // {WINDOW_MS} * {WINDOW_MS} as start_ms from person p where exists
             (select 1 from auction a where a.seller = p.id and a.at_ms // {WINDOW_MS} = p.at_ms // {WINDOW_MS})""",
}
