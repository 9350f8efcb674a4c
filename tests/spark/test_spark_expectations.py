"""Expectations: a violating record never reaches the table, the same however steps are cut, and is counted."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from support.spark.local_tasks import LocalTasks
from support.spark.partial_shop import PartialShop
from support.spark.sinks import clicks_sink, shop_sink
from tidemill.base.errors import InvalidError
from tidemill.base.status.status import StatusReport
from tidemill.console.views.pipelines import count_metrics, table_row
from tidemill.metastore.catalogue import TopicRow
from tidemill.shards.api import Column, ShardSchema
from tidemill.spark.check import check_file
from tidemill.spark.definition import Pipeline
from tidemill.spark.ingest import step_planner
from tidemill.spark.ingest.steps import distributed_step, oversized_step, step_executor
from tidemill.spark.merge.commands import Commands, filter_commands, partial_command_schema, times_of
from tidemill.spark.merge.mirror import Mirror
from tidemill.spark.merge.resolve import resolve
from tidemill.spark.predicates.expectations import (
    Expectation,
    ExpectationCheck,
    Expectations,
    declared_expectations,
)

RULES = (Expectation("positive", "product_id >= 0"), Expectation("small", "product_id < 5 AND click_id <> 'k9'"))


def test_a_stream_skips_violating_records_in_steps_of_any_length(harbour: Any, tmp_path: Path) -> None:
    rand = random.Random(7)
    topic = harbour.create_topic("clicks", 2)
    model: dict[str, int | None] = {}
    letters: list[tuple[int, int, str]] = []
    counts: Counter[str] = Counter()
    sinks = [clicks_sink(harbour, tmp_path / "a", expectations=Expectations(RULES))]
    for time in range(1, 13):
        for _ in range(rand.randint(0, 30)):
            key = f"k{rand.randint(0, 9)}"
            partition = int(key[1]) % 2
            value = rand.choice([None, -1, 0, 3, 7, "null"])
            row = None if value is None else {"click_id": key, "product_id": None if value == "null" else value}
            offset = harbour.produce(topic, [(key.encode(), row)], partition) - 1
            if row is None:
                model.pop(key, None)
                continue
            number = row["product_id"]
            broken = [
                *(["positive"] if number is not None and number < 0 else []),
                *(["small"] if (number is not None and number >= 5) or key == "k9" else []),
            ]
            counts.update(broken)
            if broken:
                said = {rule.name: f"violates {rule.name}: {rule.expression}" for rule in RULES}
                letters.append((partition, offset, "; ".join(said[name] for name in broken)))
            else:
                model[key] = number
        harbour.mint("topic/clicks", time * 1000, topic)
        if rand.random() < 0.4:
            sinks[0].process(sinks[0].latest())
        if time == 6:  # another driver continues
            sinks.insert(0, clicks_sink(harbour, tmp_path / "b", expectations=Expectations(RULES)))
    for sink in sinks:
        sink.process(sink.latest())
    assert {row["click_id"]: row["product_id"] for row in harbour.contents("clicks")} == model
    found = [(row["partition"], row["offset"], row["reason"]) for row in harbour.contents("p.dead_letters")]
    assert sorted(found) == sorted(letters)
    assert all(json.loads(row["bytes"])["click_id"] for row in harbour.contents("p.dead_letters"))
    counted = Counter[str]()
    for sink in sinks:
        counted.update(sink.seats.tables[0].violations)
    assert counted == counts, "each violation is counted by the driver whose append passed it"


def produced(harbour: Any, topic: TopicRow, rows: list[int], time: int) -> None:
    harbour.produce(topic, [(f"k{n}".encode(), {"click_id": f"k{n}", "product_id": n}) for n in rows])
    harbour.mint("topic/clicks", time, topic)


def test_dropped_records_leave_no_letter_and_are_counted(harbour: Any, tmp_path: Path) -> None:
    topic = harbour.create_topic("clicks")
    sink = clicks_sink(harbour, tmp_path, expectations=Expectations(RULES, "drop"))
    produced(harbour, topic, [1, 9, -2, 2], 1000)
    sink.process(sink.latest())
    assert [row["product_id"] for row in harbour.contents("clicks")] == [1, 2]
    assert harbour.upper("p.dead_letters") == 0
    assert sink.seats.tables[0].violations == {"positive": 1, "small": 1}


def test_a_table_that_must_not_violate_stops_before_the_record_until_its_expectation_changes(
    harbour: Any, tmp_path: Path
) -> None:
    topic = harbour.create_topic("clicks")
    sink = clicks_sink(harbour, tmp_path / "a", expectations=Expectations(RULES[:1], "fail"))
    for time, rows in ((1000, [1]), (2000, [2]), (3000, [3, -4, 5]), (4000, [6])):
        produced(harbour, topic, rows, time)
    sink.process(sink.latest())
    assert harbour.upper("clicks") == 3000 and [row["product_id"] for row in harbour.contents("clicks")] == [1, 2]
    said = str(sink.seats.failed["clicks"])
    assert "expectation=positive expression=[product_id >= 0] topic=clicks partition=0 offset=3" in said
    changed = clicks_sink(harbour, tmp_path / "c", expectations=Expectations(RULES[:1], "dead_letter"))
    changed.process(changed.latest())
    assert [row["product_id"] for row in harbour.contents("clicks")] == [1, 2, 3, 5, 6]
    assert [row["offset"] for row in harbour.contents("p.dead_letters")] == [3]


POSITIVE = Expectations((Expectation("positive", "total >= 0 OR note = 'refund'"),))


def test_f325_the_key_of_a_violating_captured_row_is_absent_until_a_row_that_satisfies(
    harbour: Any, tmp_path: Path
) -> None:
    shop = PartialShop(harbour)
    sink = shop_sink(harbour, tmp_path, ["orders"], {"orders": POSITIVE})
    for key in (1, 2, 3, 4):
        shop.write(key, 10, "plain" if key != 4 else "refund")
    shop.bind(1000)
    sink.process(sink.latest())
    shop.write(1, -1, "plain")
    shop.write(2, -1)  # its note, left unchanged, does not excuse it
    shop.write(4, -1)  # its note does
    shop.bind(2000)
    sink.process(sink.latest())
    assert [(row["id"], row["total"]) for row in harbour.contents("orders")] == [(3, 10), (4, -1)]
    letters = harbour.contents("p.dead_letters")
    assert [(row["table"], json.loads(row["key"])["id"], row["reason"]) for row in letters] == [
        ("public.orders", n, "violates positive: total >= 0 OR note = 'refund'") for n in (1, 2)
    ]
    assert sink.seats.tables[0].violations == {"positive": 2}
    shop.write(1, 5, "good")
    shop.write(2, 5)  # its row before is absent, so that its note is unknown
    shop.bind(3000)
    sink.process(sink.latest())
    assert [(row["id"], row["note"]) for row in harbour.contents("orders")] == [
        (1, "good"),
        (3, "plain"),
        (4, "refund"),
    ]
    assert "is missing" in harbour.contents("p.dead_letters")[-1]["reason"]


@pytest.mark.parametrize("how", ["inline", "tasks", "oversized"])
def test_f326_every_kind_of_step_stops_at_a_row_that_is_known_only_with_the_row_before_and_neighbours_go_on(
    harbour: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    shop = PartialShop(harbour)
    failing = {"orders": Expectations(POSITIVE.rules, "fail")}
    sink = shop_sink(harbour, tmp_path, ["orders", "other"], failing)
    if how == "tasks":
        monkeypatch.setattr(distributed_step, "PIECE_BYTES", 1)
        sink.steps.use_spark(LocalTasks(), inline_rows=0)
    shop.write(1, 10, "plain")
    shop.bind(1000)
    sink.process(sink.latest())
    for n in range(20):
        shop.write(n + 2, n, "x")
        shop.write(n, n, "y", table="other")
    shop.write(1, -1)
    if how == "oversized":
        for module in (step_planner, step_executor):
            monkeypatch.setattr(module, "STEP_RECORDS", 10)
        monkeypatch.setattr(oversized_step, "RANGE_RECORDS", 7)
    shop.bind(2000)
    shop.write(1, 5)
    shop.bind(3000)
    for _ in range(400):
        sink.process(sink.latest())
        if harbour.upper("orders") == 2000 and harbour.upper("other") == 3001 and sink.seats.failed:
            break
        sink.seats.changed.wait(0.05)
        sink.seats.changed.clear()
    assert [row["total"] for row in harbour.contents("orders")] == [10]
    assert (harbour.upper("orders"), harbour.upper("other"), len(harbour.contents("other"))) == (2000, 3001, 20)
    assert "expectation=positive" in str(sink.seats.failed["orders"]) and "offset=21" in str(
        sink.seats.failed["orders"]
    )
    assert "other" not in sink.seats.failed
    monkeypatch.undo()
    changed = shop_sink(harbour, tmp_path / "c", ["orders"], {"orders": Expectations(POSITIVE.rules, "drop")})
    if how == "tasks":
        changed.steps.use_spark(LocalTasks(), inline_rows=0)
    changed.process(changed.latest())
    assert changed.seats.tables[0].violations == {"positive": 1}
    assert len(harbour.contents("orders")) == 20 and harbour.upper("orders") == 3001


SCHEMA = ShardSchema((Column("k", "int64"), Column("a", "int64"), Column("b", "int64")), ("k",))
CHECK = ExpectationCheck(SCHEMA, Expectations((Expectation("sum", "a + b < 10"),)))


def test_partial_rows_are_checked_with_the_values_of_the_row_before_however_steps_are_cut() -> None:
    for seed in range(40):
        rand = random.Random(seed)
        steps: list[dict[str, Any]] = []
        held: dict[int, tuple[int | None, int | None]] = {}
        lost, rejected, time = [], [], 1
        for order in range(50):
            time += rand.random() < 0.3
            key, left = rand.randint(1, 4), [n for n in ("a", "b") if rand.random() < 0.4]
            row = {n: None if n in left else rand.choice([None, 1, 6]) for n in ("a", "b")}
            live = rand.random() < 0.9
            before = held.pop(key, None)
            steps.append(
                {"k": key, **row, "_time": time, "_order": order, "_partition": 0, "_live": live,
                 "_tm.unchanged": json.dumps(left).encode() if left and live else None, "_tm.key": b"{}"}
            )  # fmt: skip
            if not live:
                continue
            if left and before is None:
                lost.append(order)
                continue
            whole = tuple(before["ab".index(n)] if n in left and before else row[n] for n in ("a", "b"))
            if None not in whole and sum(whole) >= 10:  # type: ignore[arg-type]
                if left:
                    rejected.append(order)
                else:
                    steps[-1]["_live"] = False  # as decoding leaves it
                continue
            held[key] = whole  # type: ignore[assignment]
        every = Commands(pa.Table.from_pylist(steps, schema=partial_command_schema(SCHEMA)))
        for cuts in ([time + 1], sorted({*rand.sample(range(1, time + 1), 3), time + 1}), range(1, time + 2)):
            mirror, lower, found_lost, found_rejected = Mirror(SCHEMA), 0, [], []
            for upper in cuts:
                times = times_of(every)
                mine = filter_commands(every, (times >= lower) & (times < upper))
                done = resolve(SCHEMA, mine, mirror, lower, upper, check=CHECK)
                mirror.advance(done.changes, lower, upper)
                found_lost += [each.order for each in done.lost]
                found_rejected += [each.order for each in done.rejected]
                lower = upper
            contents = {row["k"]: (row["a"], row["b"]) for row in mirror.live_rows().to_pylist()}
            assert (contents, sorted(found_lost), sorted(found_rejected)) == (held, lost, rejected), (seed, cuts)


def test_violations_are_shown_by_table_and_expectation_and_by_process_in_metrics() -> None:
    reports = [
        StatusReport(f"pipeline:p{label}", 7, (), facts={"tables": {"t": {"rows": 1, "violations": {"a": n, "b": 0}}}})
        for label, n in (("", 2), (":2", 3))
    ]
    assert table_row("t", "topic:t", 5, 1, None, reports)["violations"] == {"a": 5, "b": 0}
    assert count_metrics("violations", reports)[::2] == [("pipeline:p", "t", "a", 2), ("pipeline:p:2", "t", "a", 3)]


def test_a_check_of_the_file_names_the_line_of_a_wrong_expectation(tmp_path: Path) -> None:
    file = tmp_path / "p.py"
    file.write_text(
        "def build(p):\n"
        "    clicks = p.topic('clicks', key='id', schema='id string, total long')\n"
        "    p.table('a', clicks, expect={'x': 'total / 2 > 1'})\n"
        "    p.table('b', clicks, expect={'x': 'total > 1'})\n"
    )
    (found,) = check_file(file, "p").problems
    assert found.line == 3 and "division is not supported at character 7" in found.message


def test_whitespace_in_literals_and_quoted_names_is_kept_and_shown_on_one_line() -> None:
    schema = ShardSchema((Column("name", "string"), Column("sep", "string"), Column("a  b", "int64")), ("name",))
    declared = declared_expectations(
        "t",
        {
            "single spaces": "NOT name\n        LIKE '%  %'",
            "no tab": "sep <>\t'\t'",
            "column": '"a  b"  >= 0',
            "quote": "name <> 'it''s  \n'",
        },
        "dead_letter",
    )
    assert declared is not None
    rows = {"name": ["a b", "a  b", "it's  \n"], "sep": ["\t", " ", "x"], "a  b": [0, -1, 0]}
    violated = ExpectationCheck(schema, declared).violated(pa.table(rows))
    assert violated.tolist() == [[False, True, True], [True, False, False], [False, True, False], [False, False, True]]
    assert declared.reason(range(4)) == (
        "violates single spaces: NOT name LIKE '%  %'; violates no tab: sep <> '\\t'; "
        "violates column: \"a  b\" >= 0; violates quote: name <> 'it''s  \\n'"
    )


def test_an_error_shows_an_expression_of_several_lines_on_one_and_counts_characters_as_they_were_written() -> None:
    p = Pipeline("p")
    clicks = p.topic("clicks", key="id", schema="id string, total long")
    with pytest.raises(InvalidError) as caught:
        p.table("t", clicks, expect={"x": "total > 1\n  AND total / 2 > 1"})
    assert "expression=[total > 1   AND total / 2 > 1]" in caught.value.message
    assert "division is not supported at character 23" in caught.value.message


def test_declarations_are_checked() -> None:
    p = Pipeline("p")
    clicks = p.topic("clicks", key="id", schema="id string, total long")
    p.table("good", clicks, expect={"positive": " total\n >= 0 "}, on_violation="fail")
    assert p.expectations == {"good": Expectations((Expectation("positive", " total\n >= 0 "),), "fail")}
    assert p.expectations["good"].rules[0].line == "total >= 0"
    p.table("other", p.capture("shop").table("orders"), expect={"any": "unknown > 0"})  # its columns are not known yet
    for wrong in (
        {"expect": {"positive": "totals >= 0"}},
        {"expect": {"": "total >= 0"}},
        {"expect": {"a\n": "total >= 0"}},
        {"expect": {"x": 3}},
        {"expect": {str(n): "total > 0" for n in range(101)}},
        {"on_violation": "warn"},
    ):
        with pytest.raises(InvalidError):
            p.table("wrong", clicks, **wrong)  # type: ignore[arg-type]
    assert declared_expectations("t", {}, "drop") is None
