"""The thin layer on a real Spark session: source, foreachBatch, tasks, derived tables, batch reads."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from support.spark.pipelines import running, until
from tidemill.base.clock import Rand
from tidemill.consensus.status.board import StatusBoard
from tidemill.spark import register

pytestmark = pytest.mark.spark

PIPELINE = """
from pyspark.sql import functions as f

def build(p):
    shop = p.capture("shop")
    p.table("orders", shop.table("public.orders"))
    p.table("lines", shop.table("lines"))
    p.table("clicks", p.topic("clicks", key="click_id", schema="click_id string, product_id long"))

    @p.derived("by_product", key="product_id", inputs=("clicks", "lines"), every_s=0.2)
    def by_product(spark, clicks, lines):
        seen = clicks.groupBy("product_id").agg(f.count("*").alias("clicks"))
        sold = lines.groupBy("product_id").agg(f.sum("amount").cast("decimal(18,2)").alias("revenue"))
        return seen.join(sold, "product_id", "full_outer")
"""
TABLES = {
    "public.orders": [("o_id", "bigint", 0), ("status", "text", -1)],
    "public.lines": [
        ("o_id", "bigint", 0), ("line", "integer", 1), ("product_id", "bigint", -1), ("amount", "numeric(12,2)", -1),
    ],
}  # fmt: skip


class Shop:
    """Produces to both sources and knows the expected tables."""

    def __init__(self, harbour: Any) -> None:
        self.harbour = harbour
        self.clicks = harbour.create_topic("clicks", 2)
        topics = harbour.capture("shop", TABLES)
        self.orders, self.lines = topics["public.orders"], topics["public.lines"]
        self.n = 0

    def trade(self, count: int = 1) -> None:
        for _ in range(count):
            self.n += 1
            n, h = self.n, self.harbour
            click = {"click_id": f"c{n}", "product_id": n % 3}
            h.produce(self.clicks, [(b"k", click), (b"k", click), (b"", b"bad")], n % 2)
            h.produce(self.orders, [({"o_id": n}, {"o_id": n, "status": "open"})])
            line = {"o_id": n, "line": 1, "product_id": n % 3, "amount": "2.50"}
            h.produce(self.lines, [({"o_id": n, "line": 1}, line)])
            if n > 1:
                h.produce(self.orders, [({"o_id": n - 1}, {"o_id": n - 1, "status": "done"})])
        self.mint()

    def mint(self) -> int:
        now = int(time.time() * 1000)
        self.harbour.mint("topic/clicks", now, self.clicks, source_time_ms=now)
        self.harbour.mint("capture/shop", now, self.orders, self.lines, source_time_ms=now)
        return now

    def settle(self, *names: str) -> int:
        now = self.mint()
        for name in names:
            until(lambda name=name: self.harbour.upper(name) > now, f"{name} beyond {now}")  # type: ignore[misc]
        return now

    def check(self, at: int) -> None:
        h, n = self.harbour, self.n
        assert h.contents("clicks", at) == sorted(
            ({"click_id": f"c{i}", "product_id": i % 3} for i in range(1, n + 1)), key=lambda r: r["click_id"]
        )
        status = {r["o_id"]: r["status"] for r in h.contents("orders", at)}
        assert status == {i: "open" if i == n else "done" for i in range(1, n + 1)}
        assert len(h.contents("lines", at)) == n


def test_a_pipeline_keeps_its_tables_through_restarts_and_shows_marks(harbour: Any, spark: Any, tmp_path: Path) -> None:
    file = tmp_path / "pipeline.py"
    file.write_text(PIPELINE)
    shop = Shop(harbour)
    shop.trade(5)
    with running(harbour, spark, tmp_path / "a", file) as runner:
        until(lambda: runner.query.query is not None, "the query is started")
        for _ in range(3):
            shop.trade(2)
            time.sleep(0.1)
        at = shop.settle("clicks", "orders", "lines", "by_product")
        shop.check(at)
        until(runner.query.called.is_set, "Spark brings batches")
        board = StatusBoard(harbour.stores.consensus, Rand())
        until(lambda: _marks_caught_up(harbour, board, at), "marks show the uppers")
        found = [stages.to_plain() for stages in runner.stages.values()]
        assert found and all({"planned", "decoded", "written", "appended"} <= set(stages) for stages in found), found
    by_product = {r["product_id"]: (r["clicks"], str(r["revenue"])) for r in harbour.contents("by_product", at)}
    counts = {k: sum(1 for i in range(1, shop.n + 1) if i % 3 == k) for k in range(3)}
    assert by_product == {k: (c, f"{c * 2.5:.2f}") for k, c in counts.items()}
    assert len(harbour.contents("p.dead_letters")) == shop.n

    shop.trade(3)  # while no driver runs; then a new process with nothing but the shards
    with running(harbour, spark, tmp_path / "b", file):
        at = shop.settle("clicks", "orders", "lines")
    shop.check(at)
    assert len(harbour.contents("p.dead_letters")) == shop.n

    register(spark, harbour.urls.objects, harbour.urls.consensus)
    orders = spark.read.format("tidemill").option("table", "orders").option("as_of", at).load()
    assert orders.columns == ["o_id", "status"]
    assert sorted(r.o_id for r in orders.where("status = 'done'").collect()) == list(range(1, shop.n))


def _marks_caught_up(harbour: Any, board: StatusBoard, at: int) -> bool:
    reports = harbour.portal.call(board.reports())
    marks = {m.name: m for r in reports for m in r.marks}
    wanted = ("shard:orders", "shard:clicks", "shard:by_product", "pipeline:p")
    return all(name in marks and marks[name].position > at for name in wanted)


def test_two_identical_pipelines_on_the_same_shards_give_equal_contents(
    harbour: Any, spark: Any, tmp_path: Path
) -> None:
    file = tmp_path / "pipeline.py"
    file.write_text(PIPELINE.split("    @p.derived")[0])
    shop = Shop(harbour)
    with running(harbour, spark, tmp_path / "a", file) as one, running(harbour, spark, tmp_path / "b", file) as two:
        until(lambda: all(r.query.called.is_set() for r in (one, two)), "queries run")
        for _ in range(15):
            shop.trade()
            time.sleep(0.05)

        def both_won() -> bool:
            shop.trade()
            return min(sum(table.won for table in each.tables()) for each in (one, two)) > 0

        until(both_won, "both take part")  # on a busy machine one of them may win every step of a second
        at = shop.settle("clicks", "orders", "lines")
    shop.check(at)
    assert len(harbour.contents("p.dead_letters")) == shop.n


def test_big_batches_go_through_spark_tasks_to_the_same_contents(harbour: Any, spark: Any, tmp_path: Path) -> None:
    from support.spark.sinks import clicks_sink

    topic = harbour.create_topic("clicks", 2)
    expected: dict[str, int] = {}
    sink = clicks_sink(harbour, tmp_path / "s")
    sink.steps.use_spark(spark.sparkContext, inline_rows=10)
    run, inline = sink.steps._by_tasks.run, []

    def noting(work: Any) -> Any:
        results = run(work)
        inline.extend(name for name, result in results.items() if result.inline)
        return results

    sink.steps._by_tasks.run = noting
    for n in range(1, 4):
        rows = [(b"k", {"click_id": f"k{k}", "product_id": k * n}) for k in range(0, 60_000, 20 * n)]
        expected |= {value["click_id"]: value["product_id"] for _, value in rows}
        harbour.produce(topic, [*rows, (b"", b"bad")], n % 2)
        harbour.mint("topic/clicks", n * 10, topic)
        sink.process(sink.latest())
    assert {r["click_id"]: r["product_id"] for r in harbour.contents("clicks")} == expected
    assert len(harbour.contents("p.dead_letters")) == 3
    mirror = {r["click_id"]: r["product_id"] for r in sink.seats.tables[0].operator.mirror.live_rows().to_pylist()}
    assert mirror == expected
    assert sink.seats.tables[0].operator.upper == 31
    assert not list((tmp_path / "s").rglob("pending-*")), "no task leaves its run behind"
    assert inline == [], "the tasks decided each of them"


def test_rows_of_a_topic_as_a_streaming_dataframe(harbour: Any, spark: Any, tmp_path: Path) -> None:
    topic = harbour.create_topic("clicks")
    for n in range(1, 5):
        harbour.produce(topic, [(b"k", {"click_id": f"k{n}", "product_id": n}), (b"", b"bad"), (b"gone", None)])
        harbour.mint("topic/clicks", n * 10, topic)
    rows = (
        spark.readStream.format("tidemill")
        .options(objects=harbour.urls.objects, consensus=harbour.urls.consensus, source="topic/clicks")
        .options(schema="click_id string, product_id long", key="click_id", max_rows=3)
        .load()
    )
    query = (
        rows.writeStream.format("memory")
        .queryName("rows")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination(90)
    found = spark.sql("select * from rows order by _order").collect()
    live = [(r.click_id, r.product_id, r._time, r._order) for r in found if r._live]
    assert live == [(f"k{n}", n, n * 10, (n - 1) * 3) for n in range(1, 5)]
    assert [r.click_id for r in found if r._live is False] == ["gone"] * 4
    bad = [(r._corrupt_record, r._order, r._time, r.click_id) for r in found if r._live is None]
    assert bad == [(b"bad", (n - 1) * 3 + 1, n * 10, None) for n in range(1, 5)], "what cannot be read does not vanish"
    assert all("malformed" in r._corrupt_record_reason for r in found if r._live is None)
    assert len(query.recentProgress) >= 4, "max_rows cuts between bindings"
