"""Tables of topics in formats with schemas, on real stores: the cluster's own registry, steps of any size, tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.spark.formats import avro, framed
from support.spark.local_tasks import LocalTasks
from support.spark.sinks import registry_of, topic_sink
from support.waiting import eventually
from tidemill.base.errors import UnavailableError
from tidemill.cli.verify.table import Verified, verify_expected
from tidemill.cli.verify.topic_fold import TopicFold
from tidemill.registry.schema import SubmittedSchema
from tidemill.spark.definition import Pipeline
from tidemill.spark.formats.schemas import lookup
from tidemill.spark.formats.schemas.lookup import SchemaCache, schema_source
from tidemill.spark.ingest import step_planner
from tidemill.spark.ingest.sources import stream_feed
from tidemill.spark.ingest.steps import distributed_step, oversized_step, step_executor
from tidemill.spark.predicates.expectations import Expectation, Expectations
from tidemill.spark.replay.pipeline_replay import replay_pipeline
from tidemill.spark.replay.table_replay import APPLIED

FIRST: dict[str, Any] = {
    "type": "record",
    "name": "Click",
    "fields": [{"name": "id", "type": "string"}, {"name": "n", "type": "int"}],
}
SECOND: dict[str, Any] = {
    "type": "record",
    "name": "Click",
    "fields": [
        {"name": "n", "type": "long"},
        {"name": "note", "type": ["null", "string"], "default": None},
        {"name": "id", "type": "string"},
    ],
}
DECLARED = {"key": "id", "schema": "id string, n long, note string", "format": "avro"}


def register(harbour: Any, schema: Any, subject: str = "clicks-value") -> int:
    found = harbour.portal.call(registry_of(harbour).register(subject, SubmittedSchema("AVRO", json.dumps(schema))))
    return int(found.version.id)


def rows(count: int, n: int, schema: Any, schema_id: int, note: str | None = None) -> list[tuple[bytes, bytes]]:
    value = {"note": note} if schema is SECOND else {}
    keys = [f"k{i}" for i in range(count)]
    return [(key.encode(), avro(schema, {"id": key, "n": n, **value}, schema_id)) for key in keys]


def test_writers_with_two_versions_of_a_schema_feed_one_table(harbour: Any, tmp_path: Path) -> None:
    topic = harbour.create_topic("clicks")
    one = register(harbour, FIRST)
    sink = topic_sink(harbour, tmp_path / "s", "clicks", **DECLARED)
    harbour.produce(topic, rows(3, 1, FIRST, one))
    harbour.mint("topic/clicks", 1000, topic)
    sink.process(sink.latest())
    two = register(harbour, SECOND)
    assert two > one
    harbour.produce(topic, [*rows(2, 2, SECOND, two, "x"), (b"k2", None), (b"?", framed(999, b"x")), (b"?", b"{}")])
    harbour.mint("topic/clicks", 2000, topic)
    sink.process(sink.latest())
    assert not sink.seats.failed and not sink.error
    assert [(r["id"], r["n"], r["note"]) for r in harbour.contents("clicks")] == [("k0", 2, "x"), ("k1", 2, "x")]
    reasons = [r["reason"] for r in harbour.contents("p.dead_letters")]
    assert reasons[0] == "the registry has no schema 999" and "not framed" in reasons[1] and len(reasons) == 2


def test_a_step_reads_the_same_however_it_is_cut_and_wherever_it_runs(
    harbour: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inline, by tasks that do not know a schema yet, by tasks that do, and in pieces."""
    topic = harbour.create_topic("clicks")
    ids = [register(harbour, FIRST), register(harbour, SECOND)]
    for n in range(1, 5):
        harbour.produce(topic, rows(70, n, FIRST, ids[0]))
        harbour.produce(topic, [(b"?", framed(ids[1], b"\xff")), *rows(40, 10 + n, SECOND, ids[1], "x"), (b"k5", None)])
        harbour.mint("topic/clicks", n * 1000, topic)
    sink = topic_sink(harbour, tmp_path / "whole", "clicks", **DECLARED)
    sink.process(sink.latest())
    expected = harbour.contents("clicks"), harbour.contents("p.dead_letters")
    assert len(expected[0]) == 69 and len(expected[1]) == 4
    monkeypatch.setattr(distributed_step, "PIECE_BYTES", 1)

    def again(how: str) -> Any:
        for name in ("clicks", "p.dead_letters"):
            harbour.drop_shard(name)
        return topic_sink(harbour, tmp_path / how, "clicks", **DECLARED)

    def check(sink: Any) -> None:
        eventually(lambda: sink.process(sink.latest()) or harbour.upper("clicks") == 4001)
        assert not sink.seats.failed
        assert (harbour.contents("clicks"), harbour.contents("p.dead_letters")) == expected

    sink = again("tasks")
    sink.steps.use_spark(LocalTasks(), inline_rows=0)
    run, inline = sink.steps._by_tasks.run, []

    def noting(work: Any) -> Any:
        results = run(work)
        inline.extend(result.inline for result in results.values())
        return results

    sink.steps._by_tasks.run = noting
    sink.process(1001)
    assert inline == [True], "only the driver can look the schemas up"
    check(sink)
    assert inline[1:] and not any(inline[1:]), "later tasks get them with the plan"
    sink = again("pieces")
    for module, name, value in (
        (step_planner, "STEP_RECORDS", 50), (step_executor, "STEP_RECORDS", 50), (oversized_step, "RANGE_RECORDS", 20),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    check(sink)


def test_a_registry_that_does_not_answer_makes_the_table_wait_and_say_why(
    harbour: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = harbour.create_topic("clicks")
    one = register(harbour, FIRST)
    sink = topic_sink(harbour, tmp_path / "s", "clicks", **DECLARED)
    harbour.produce(topic, rows(1, 1, FIRST, one))
    harbour.mint("topic/clicks", 1000, topic)
    (seat,) = sink.seats._seats.values()
    said: list[tuple[str, bool]] = []
    seat.on_failure = lambda error, left: said.append((str(error), left))

    async def away(*_: Any) -> Any:
        raise UnavailableError("the registry is away.")

    with monkeypatch.context() as patched:
        patched.setattr(lookup.ClusterRegistry, "load", away)
        sink.process(sink.latest())
    assert set(said) == {("the registry is away.", False)} and harbour.upper("clicks") == 0
    eventually(lambda: sink.process(sink.latest()) or harbour.upper("clicks") == 1001)
    assert [r["id"] for r in harbour.contents("clicks")] == ["k0"]
    assert harbour.upper("p.dead_letters") == 0


def test_a_letter_of_an_unknown_schema_is_replayed_once_it_is_registered_and_the_topic_folds_to_the_table(
    harbour: Any, tmp_path: Path
) -> None:
    topic = harbour.create_topic("clicks")
    one = register(harbour, FIRST)
    harbour.produce(topic, [*rows(2, 1, FIRST, one), *rows(1, 5, SECOND, one + 1, "late")])
    harbour.mint("topic/clicks", 1000, topic)
    sink = topic_sink(harbour, tmp_path / "s", "clicks", **DECLARED)
    sink.process(sink.latest())
    assert [(r["id"], r["n"]) for r in harbour.contents("clicks")] == [("k0", 1), ("k1", 1)]
    assert register(harbour, SECOND) == one + 1
    p = Pipeline("p")
    source = p.topic("clicks", **DECLARED)
    p.table("clicks", source)
    (outcomes,) = [found for found in replay_pipeline(harbour.portal, harbour.stores, p) if found]
    assert [outcome.outcome for outcome in outcomes] == [APPLIED]
    assert [(r["id"], r["n"], r["note"]) for r in harbour.contents("clicks")] == [("k0", 5, "late"), ("k1", 1, None)]

    async def verified() -> Verified:
        s = harbour.stores
        feed = await stream_feed(s.catalogue, "clicks", source.schema, source.record_format)
        schemas = SchemaCache(schema_source(s.metastore, source.record_format))
        shard = await s.shard("clicks")
        newest = (await shard.frontiers())[1] - 1  # a replay is applied at the table's upper
        fold = TopicFold(await s.remap("topic/clicks"), s.topics, feed, newest, schemas)
        return await verify_expected(shard, newest, fold.rows)

    found = harbour.portal.call(verified())
    assert found.clean and found.rows == 2, found


def test_a_violation_in_a_topic_of_debezium_makes_the_key_absent_and_in_others_the_key_keeps_its_row(
    harbour: Any, tmp_path: Path
) -> None:
    expectations = Expectations((Expectation("positive", "n >= 0"),))
    for name, wrap in (("events", lambda row: {"op": "u", "after": row}), ("plain", lambda row: row)):
        topic = harbour.create_topic(name)
        envelope = "debezium" if name == "events" else "none"
        declared = {"key": "id", "schema": "id string, n long", "envelope": envelope}
        sink = topic_sink(harbour, tmp_path / name, name, expectations=expectations, **declared)
        for time, rows in ((1000, {"a": 1, "b": 1}), (2000, {"a": -1, "b": 2}), (3000, {"b": -2}), (4000, {"b": 4})):
            harbour.produce(topic, [(json.dumps({"id": k}).encode(), wrap({"id": k, "n": n})) for k, n in rows.items()])
            harbour.mint(f"topic/{name}", time, topic)
        sink.process(sink.latest())

        def at(time: int, name: str = name) -> dict[str, int]:
            return {row["id"]: row["n"] for row in harbour.contents(name, time)}

        if name == "events":
            assert [at(time) for time in (1000, 2000, 3000, 4000)] == [{"a": 1, "b": 1}, {"b": 2}, {}, {"b": 4}]
        else:
            assert [at(time) for time in (2000, 3000, 4000)] == [{"a": 1, "b": 2}, {"a": 1, "b": 2}, {"a": 1, "b": 4}]
        assert sink.seats.tables[0].violations == {"positive": 2}
