"""A pipeline's streams, upserts and derived tables moved step by step in the test's own thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from support.spark.sinks import sink_of, writer
from tidemill.spark import Pipeline
from tidemill.spark.definition import StreamTopic
from tidemill.spark.derived.derivation import Derivation
from tidemill.spark.ingest.feed_sink import FeedSink
from tidemill.spark.ingest.sources import stream_feed

Records = Sequence[tuple[bytes, Any]]
"""(key, value: None deletes), in order."""


class Replay:
    """A replay in which every table has a topic of its name.

    Derived tables are computed in the order of their declaration.
    """

    def __init__(self, harbour: Any, spark: Any, build: Callable[[Pipeline], None], scratch: Path) -> None:
        self._harbour = harbour
        p = Pipeline("replay")
        build(p)
        p.check()
        self.streams = {name: source for name, source in p.tables.items() if isinstance(source, StreamTopic)}
        self._topics = {name: harbour.create_topic(name) for name in self.streams}
        self._sinks = {name: self._sink(source, scratch / "sinks") for name, source in self.streams.items()}
        self.derived = {
            name: Derivation(harbour.portal, harbour.stores, spark, table, scratch / "drivers" / "mirrors" / name)
            for name, table in p.derived_tables.items()
        }

    def _sink(self, stream: StreamTopic, scratch: Path) -> FeedSink:
        harbour, name = self._harbour, stream.topic
        s, call = harbour.stores, harbour.portal.call
        table = writer(harbour, name, stream.schema, scratch, call(stream_feed(s.catalogue, name, stream.schema)))
        return sink_of(harbour, stream.source, [table])

    def step(self, time_ms: int, records: Mapping[str, Records]) -> None:
        """Produce the records, bind all there is to `time_ms`, and bring every table and derived table there."""
        for name, topic in self._topics.items():
            if records.get(name):
                self._harbour.produce(topic, records[name])
            self._harbour.mint(f"topic/{name}", time_ms, topic)
            while self._harbour.upper(name) <= time_ms:
                self._sinks[name].process(self._sinks[name].latest())
        for one in self.derived.values():
            if one.writer is None:
                one.open()
            assert one.recompute()

    def rows(self, name: str, time_ms: int) -> list[tuple[Any, ...]]:
        return sorted(map(row_values, self._harbour.contents(name, time_ms)), key=repr)

    def columns(self, name: str) -> list[str]:
        """Return the columns of a derived table, in the order of its shard."""
        found = self.derived[name].writer
        assert found is not None
        return [column.name for column in found.schema.columns]


def row_values(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row.values())


def answers(connection: Any, queries: Mapping[str, str], replay: Replay) -> dict[str, list[tuple[Any, ...]]]:
    """Each query's rows by DuckDB, its columns in the order of the shard's."""
    return {
        name: sorted(connection.execute(f"select {', '.join(replay.columns(name))} from ({sql})").fetchall(), key=repr)
        for name, sql in queries.items()
    }
