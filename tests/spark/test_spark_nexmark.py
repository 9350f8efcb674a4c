"""Nexmark as derived tables in real Spark, equal to batch SQL by another engine at several times, read afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import nexmark
import pyarrow as pa
import pytest
from test_spark_sink import dead_letters, writer

from tidemill.shards.open import open_remap
from tidemill.shards.schema import contents_schema
from tidemill.spark import Pipeline
from tidemill.spark.derived import Derivation
from tidemill.spark.facts import Latency
from tidemill.spark.feeds import stream_feed
from tidemill.spark.pipeline import StreamTopic
from tidemill.spark.sink import FeedSink

pytestmark = pytest.mark.spark

EVENTS, EVERY = 600, 150


def sink(harbour: Any, stream: StreamTopic, scratch: Path) -> FeedSink:
    s, call, name = harbour.stores, harbour.portal.call, stream.topic
    table = writer(harbour, name, stream.schema, scratch, call(stream_feed(s.catalogue, name, stream.schema)))
    remap = call(open_remap(s.consensus, s.clock, s.rand, stream.source))
    dead = dead_letters(harbour)
    return FeedSink(harbour.portal, s, stream.source, remap, [table], Latency(), Latency(), dead_letters=dead,
                    idle_move_s=0.0)  # fmt: skip


def test_nexmark_equals_its_batch_answers_at_every_time(spark: Any, harbour: Any, tmp_path: Path) -> None:
    p = Pipeline("nexmark")
    nexmark.build(p)
    topics = {name: harbour.create_topic(name) for name in nexmark.STREAMS}
    streams = {name: source for name, source in p.tables.items() if isinstance(source, StreamTopic)}
    sinks = {name: sink(harbour, source, tmp_path / "sinks") for name, source in streams.items()}
    derived = {
        name: Derivation(harbour.portal, harbour.stores, spark, table, tmp_path / "mirrors" / name)
        for name, table in p.derived_tables.items()
    }
    held: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in nexmark.STREAMS}
    expected: dict[int, dict[str, list[tuple[Any, ...]]]] = {}
    waiting: dict[str, list[tuple[bytes, Any]]] = {name: [] for name in nexmark.STREAMS}
    for number, (stream, key, row) in enumerate(nexmark.events(7, EVENTS), 1):
        waiting[stream].append((b"%d" % key, row))
        if row is None:
            held[stream].pop(key)
        else:
            held[stream][key] = row
        if number % EVERY:
            continue
        for name, topic in topics.items():
            if waiting[name]:
                harbour.produce(topic, waiting[name])
                waiting[name] = []
            harbour.mint(f"topic/{name}", number, topic)
            sinks[name].process(sinks[name].latest())
        for one in derived.values():
            if one.writer is None:
                one.open()
            assert one.round()
        expected[number] = batch(held, {name: source.schema for name, source in streams.items()}, derived)
    assert [name for name, one in derived.items() if one.groups is not None] == ["q0", "q1", "q2"], "by group"
    for number, answers in expected.items():
        for name, rows in answers.items():
            assert sorted(tuple(r.values()) for r in harbour.contents(name, number)) == rows, (number, name)
            assert rows or number == EVERY, name


def batch(held: dict[str, dict[int, dict[str, Any]]], schemas: dict[str, Any], derived: dict[str, Derivation]) -> Any:
    """Each query's answer by DuckDB, its columns in the order of the shard's."""
    with duckdb.connect() as connection:
        for name, rows in held.items():
            connection.register(name, pa.Table.from_pylist(list(rows.values()), contents_schema(schemas[name])))
        out = {}
        for name, one in derived.items():
            assert one.writer is not None
            columns = ", ".join(c.name for c in one.writer.schema.columns)
            out[name] = sorted(connection.execute(f"select {columns} from ({nexmark.SQL[name]})").fetchall())
        return out
