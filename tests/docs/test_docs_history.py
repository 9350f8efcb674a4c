"""The blocks of docs/guides/history.md: its pipeline is maintained, and its queries have the results shown."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from support.spark.harbour import Harbour
from support.spark.sinks import sink_of, writer
from tidemill.spark.definition import Pipeline, StreamTopic, load_pipeline
from tidemill.spark.derived.history import History
from tidemill.spark.ingest.sources import stream_feed

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "history.md"
BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)


def maintained(harbour: Harbour, declared: Pipeline, scratch: Path) -> pa.Table:
    source = declared.tables["orders"]
    assert isinstance(source, StreamTopic)
    topic = harbour.create_topic(source.topic)
    feed = harbour.portal.call(stream_feed(harbour.stores.catalogue, source.topic, source.schema))
    sink = sink_of(harbour, "topic/orders", [writer(harbour, "orders", source.schema, scratch, feed)])
    steps: list[list[dict[str, Any]]] = [
        [{"id": 1, "status": "new"}, {"id": 2, "status": "new"}],
        [{"id": 1, "status": "paid"}],
        [{"id": 1, "status": "paid", "note": "gift"}, {"id": 2}],
    ]
    for number, rows in enumerate(steps, 1):
        harbour.produce(topic, [(str(row["id"]).encode(), row if len(row) > 1 else None) for row in rows])
        harbour.mint("topic/orders", number * 1000, topic)
        sink.process(sink.latest())
    history = History(harbour.portal, harbour.stores, declared.histories["orders_history"], scratch / "history")
    history.open()
    while history.advance():
        pass
    shard = harbour.shard("orders_history")
    found: pa.Table = harbour.portal.call(shard.snapshot(harbour.upper("orders_history") - 1, 10))
    return found


def test_the_pipeline_of_the_page_is_maintained_and_its_queries_give_what_is_shown(tmp_path: Path) -> None:
    blocks = BLOCK.findall(PAGE.read_text())
    (python,) = [text for kind, text in blocks if kind == "python"]
    (tmp_path / "shop.py").write_text(python)
    harbour = Harbour(tmp_path)
    try:
        found = maintained(harbour, load_pipeline(tmp_path / "shop.py", "shop"), tmp_path / "scratch")
    finally:
        harbour.close()
    queries = [(text, blocks[at + 1]) for at, (kind, text) in enumerate(blocks) if kind == "sql"]
    assert len(queries) == 2
    with duckdb.connect() as db:
        db.register("orders_history", found)
        for query, (kind, shown) in queries:
            assert kind == "text"
            rows = [["NULL" if v is None else str(v) for v in row] for row in db.execute(query).fetchall()]
            assert rows == [[cell.strip() for cell in line.split("|")] for line in shown.strip().splitlines()]
