"""Tables with `sequence_by` on real stores: steps of any size, two drivers, drops, topics created again, verification,
and the replay of dead letters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.spark.local_tasks import LocalTasks
from support.spark.sinks import topic_sink
from support.spark.users_topic import DECLARED, STRICT, contents, expected_of, random_records, value
from support.waiting import eventually
from tidemill.cli.verify.table import Verified, verify_expected
from tidemill.cli.verify.topic_fold import TopicFold
from tidemill.metastore.catalogue import TopicRow
from tidemill.shards.registry import list_created_shards
from tidemill.spark.definition import Pipeline
from tidemill.spark.ingest import step_planner
from tidemill.spark.ingest.sources import stream_feed
from tidemill.spark.ingest.steps import oversized_step, step_executor
from tidemill.spark.replay.pipeline_replay import replay_pipeline


def tombstones(harbour: Any) -> list[str]:
    created = harbour.portal.call(list_created_shards(harbour.stores.consensus))
    return [create.name for create in created if create.name.startswith("users.tombstones.")]


def test_a_record_that_is_later_than_a_deletion_changes_nothing(harbour: Any, tmp_path: Path) -> None:
    """Each step has another driver. The last record of equal sequence wins."""
    topic = harbour.create_topic("users")
    steps: list[tuple[list[Any], list[Any]]] = [
        ([value("a", 5, 1), value("b", 1, 2)], [("a", 5, 1), ("b", 1, 2)]),
        ([value("a", 6, None), value("b", 1, 3)], [("b", 1, 3)]),
        ([value("a", 5, 4), value("b", 0, None)], [("b", 1, 3)]),  # both are late
        ([value("a", 6, 5), value("b", 1, None)], [("a", 6, 5)]),  # both are ties
        ([value("c", 9, None), value("b", None, 1), ("c", None)], [("a", 6, 5)]),  # two dead letters
        ([value("c", 8, 6), value("b", 0, 7)], [("a", 6, 5)]),
    ]
    for number, (records, expected) in enumerate(steps):
        sink = topic_sink(harbour, tmp_path / str(number), "users", **DECLARED)
        harbour.produce(topic, records)
        harbour.mint("topic/users", number * 1000 + 1000, topic)
        sink.process(sink.latest())
        assert not sink.seats.failed and not sink.error
        assert contents(harbour) == expected, number
        (table,) = sink.seats.tables
        assert table.late == {2: 2, 5: 2}.get(number, 0)
    reasons = sorted(r["reason"].split(":")[0] for r in harbour.contents("p.dead_letters"))
    assert reasons == ["a deletion without a sequence", "the sequence is null"]
    (name,) = tombstones(harbour)
    assert {r["id"] for r in harbour.contents(name)} == {"a", "b", "c"}
    harbour.drop_shard("users")
    assert tombstones(harbour) == []


def test_steps_of_any_size_and_two_drivers_equal_a_batch_job_and_verify_agrees(
    harbour: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = harbour.create_topic("users")
    records = random_records(1, 300)
    for number in range(3):
        harbour.produce(topic, [value(*record) for record in records[number * 100 : number * 100 + 100]])
        harbour.mint("topic/users", number * 1000 + 1000, topic)
    for module, name, limit in (
        (step_planner, "STEP_RECORDS", 50), (step_executor, "STEP_RECORDS", 50), (oversized_step, "RANGE_RECORDS", 20),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, limit)
    one, two = (topic_sink(harbour, tmp_path / name, "users", **DECLARED) for name in ("one", "two"))
    eventually(lambda: one.process(1001) or harbour.upper("users") == 1001)
    monkeypatch.undo()
    two.steps.use_spark(LocalTasks(), inline_rows=0)  # tasks have no tombstones: the driver computes the step
    eventually(lambda: two.process(2001) or harbour.upper("users") == 2001)
    eventually(lambda: one.process(one.latest()) or harbour.upper("users") == 3001)
    assert not one.seats.failed and not two.seats.failed
    assert contents(harbour) == expected_of(records)
    found = verified(harbour)
    assert found.clean and found.rows == len(contents(harbour))
    (first,) = two.seats.tables
    first.follow()
    assert first.operator.mirror.count_live() == len(contents(harbour))


def verified(harbour: Any) -> Verified:
    s, source = harbour.stores, Pipeline("p").topic("users", **DECLARED)
    time_ms = harbour.upper("users") - 1

    async def run() -> Verified:
        feed = await stream_feed(s.catalogue, "users", source.schema, source.record_format)
        remap = await s.remap("topic/users")
        fold = TopicFold(remap, s.topics, feed, time_ms)
        return await verify_expected(await s.shard("users"), time_ms, fold.rows)

    return harbour.portal.call(run())


def test_a_topic_that_is_created_again_deletes_each_row_at_its_own_sequence(harbour: Any, tmp_path: Path) -> None:
    topic = harbour.create_topic("users")
    harbour.produce(topic, [value("a", 5, 1), value("b", 5, 2), value("c", 5, 3)])
    harbour.mint("topic/users", 1000, topic)
    sink = topic_sink(harbour, tmp_path / "one", "users", **DECLARED)
    sink.process(sink.latest())
    harbour.portal.call(harbour.stores.catalogue.delete(TopicRow, "users"))
    topic = harbour.create_topic("users")
    harbour.produce(topic, [value("a", 5, 4), value("b", 4, 5)])
    harbour.mint("topic/users", 2000, topic)
    sink = topic_sink(harbour, tmp_path / "two", "users", **DECLARED)
    sink.process(sink.latest())
    assert not sink.seats.failed and contents(harbour) == [("a", 5, 4)]


@pytest.mark.parametrize("seed", range(3))
def test_replayed_records_obey_the_sequence(harbour: Any, tmp_path: Path, seed: int) -> None:
    """The table equals a batch job over all records once the expectation is repaired."""
    topic = harbour.create_topic("users")
    records = random_records(seed, 120)
    for number in range(3):
        harbour.produce(topic, [value(*record) for record in records[number * 40 : number * 40 + 40]])
        harbour.mint("topic/users", number * 1000 + 1000, topic)
    sink = topic_sink(harbour, tmp_path / "one", "users", expectations=STRICT, **DECLARED)
    sink.process(sink.latest())
    good = [record for record in records if record[2] is None or record[2] < 60]
    assert contents(harbour) == expected_of(good) != expected_of(records)
    p = Pipeline("p")
    p.table("users", p.topic("users", **DECLARED))
    outcomes = [each for some in replay_pipeline(harbour.portal, harbour.stores, p) for each in some]
    assert contents(harbour) == expected_of(records)
    assert {each.outcome for each in outcomes} == {"applied", "superseded"}
    assert harbour.contents("p.dead_letters") == []
    harbour.produce(topic, [value(*record) for record in [("k1", -1, 7), ("k2", 99, 8)]])
    harbour.mint("topic/users", 10_000, topic)
    sink = topic_sink(harbour, tmp_path / "two", "users", **DECLARED)
    sink.process(sink.latest())
    assert contents(harbour) == expected_of([*records, ("k1", -1, 7), ("k2", 99, 8)])
