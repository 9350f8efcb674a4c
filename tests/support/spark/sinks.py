"""Sinks of a topic and of a capture, with their dead letters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tidemill.base.status.histogram import StageHistograms
from tidemill.registry.registry import Registry
from tidemill.shards.api import run_inline
from tidemill.shards.registry import open_remap, open_shard
from tidemill.spark.decode.dead_letter_rows import DEAD_LETTERS
from tidemill.spark.definition import Pipeline
from tidemill.spark.ingest.dead_letters import DeadLetterWriter
from tidemill.spark.ingest.feed_sink import FeedSink
from tidemill.spark.ingest.sources import captured_feed, stream_feed
from tidemill.spark.ingest.table_schedule import TableSchedule
from tidemill.spark.ingest.table_writer import TableWriter
from tidemill.spark.predicates.expectations import Expectations
from tidemill.spark.types import stream_schema

CLICKS = stream_schema("click_id string, product_id long", "click_id")


def writer(harbour: Any, name: str, schema: Any, scratch: Path, feed: Any = None) -> TableWriter:
    s = harbour.stores
    shard = harbour.portal.call(open_shard(s.consensus, s.objects, s.clock, s.rand, name, schema))
    table = TableWriter(harbour.portal, s, shard, scratch / name, feed)
    table.hydrate()
    return table


def dead_letters(harbour: Any) -> DeadLetterWriter:
    s = harbour.stores
    return DeadLetterWriter(
        harbour.portal, lambda: harbour.portal.call(s.shard("p.dead_letters", DEAD_LETTERS)), s.rand
    )


def sink_of(harbour: Any, source: str, tables: Sequence[TableWriter], *, idle_move_s: float = 0.0) -> FeedSink:
    s = harbour.stores
    remap = harbour.portal.call(open_remap(s.consensus, s.clock, s.rand, source))
    seats = TableSchedule(s.clock, StageHistograms(), idle_move_s)
    for table in tables:
        seats.attach(table)
    return FeedSink(harbour.portal, s, source, remap, seats, dead_letters(harbour))


def clicks_sink(harbour: Any, scratch: Path, *, expectations: Expectations | None = None, **more: Any) -> FeedSink:
    s = harbour.stores
    feed = replace(harbour.portal.call(stream_feed(s.catalogue, "clicks", CLICKS)), expectations=expectations)
    table = writer(harbour, "clicks", CLICKS, scratch, feed)
    return sink_of(harbour, "topic/clicks", [table], **more)


def topic_sink(
    harbour: Any, scratch: Path, topic: str, *, expectations: Expectations | None = None, **declared: Any
) -> FeedSink:
    """A sink of one table with the name of its topic, declared as by `p.topic`."""
    s = harbour.stores
    source = Pipeline("p").topic(topic, **declared)
    feed = harbour.portal.call(stream_feed(s.catalogue, topic, source.schema, source.record_format))
    feed = replace(feed, expectations=expectations)
    return sink_of(harbour, source.source, [writer(harbour, topic, source.schema, scratch, feed)])


def registry_of(harbour: Any) -> Registry:
    """The registry of the harbour's cluster, as a node has it."""
    return Registry(harbour.stores.metastore, harbour.stores.clock, harbour.stores.rand, run_inline)


def shop_sink(
    harbour: Any, scratch: Path, tables: list[str], expectations: Mapping[str, Expectations] | None = None
) -> FeedSink:
    s = harbour.stores
    writers = []
    for name in tables:
        feed = harbour.portal.call(captured_feed(s.catalogue, "shop", f"public.{name}"))
        feed = replace(feed, expectations=(expectations or {}).get(name))
        writers.append(writer(harbour, name, feed.schema, scratch, feed))
    return sink_of(harbour, "capture/shop", writers)
