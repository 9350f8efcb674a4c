"""Views of the console: pure functions of reports and rows."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from support.console.reports import by_name, captured_tables, large, large_rows, pipelines, shop
from tidemill.base.status.status import DerivedStatus, StageStatus, StatusReport, derive_status, derive_statuses
from tidemill.console.views.captures import capture_rows
from tidemill.console.views.dead_letters import ReasonCounts, newest_letters
from tidemill.console.views.events import restart_rows
from tidemill.console.views.flow import (
    COLUMN_MAX,
    Catalogued,
    behind_ms,
    flow_graph,
    table_places,
    unreported_topics,
)
from tidemill.console.views.overview import overview
from tidemill.console.views.problems import PROBLEMS_MAX, problem_rows
from tidemill.console.views.sentences import describe_name, describe_state

NOW_MS = 1_795_000_000_000
SHOP = Catalogued({"clicks": 4}, {"shop": 9}, pipelines())


def derived(**fields: Any) -> DerivedStatus:
    mark = StageStatus(**{"name": "shard:orders", "position": 5, "target": 905, "since_ms": NOW_MS, **fields})
    return derive_status(mark, "pipeline:shop", NOW_MS - 100, NOW_MS)


def problems(reports: list[StatusReport]) -> list[dict[str, Any]]:
    return problem_rows(derive_statuses(reports, NOW_MS))[0]


def test_a_cluster_without_late_stages_has_no_problem() -> None:
    assert problem_rows(derive_statuses(shop(NOW_MS), NOW_MS)) == ([], 0)


def test_a_killed_driver_is_one_problem_with_its_pid_and_the_tables_that_it_holds_up() -> None:
    [found] = problems(shop(NOW_MS, killed_s=12))
    assert found["name"] == "process:pipeline:shop"
    assert found["sentence"] == (
        "The driver of pipeline shop has not reported for 12 s: it is stopped, disconnected or dead."
    )
    assert (found["holder"], found["blocked_by"]) == ("pid 4712 on quay", "pid 4712 on quay")
    assert (found["state"], found["affected_tables"]) == ("blind", 9)
    assert found["affected_count"] == 10  # the pipeline's own stage, too


def test_what_a_silent_process_saw_of_its_stores_is_not_held_up_by_it() -> None:
    reports = shop(NOW_MS, killed_s=12)
    silent = reports[1]
    reports[1] = msgspec.structs.replace(silent, marks=(*silent.marks, StageStatus("objects", 1, 1)))
    [found] = problems(reports)
    assert found["affected_count"] == 10


def test_a_late_table_is_told_at_the_topic_that_causes_its_delay_with_the_outside_blocker() -> None:
    [found] = problems(shop(NOW_MS, waits=True))
    assert (found["name"], found["state"], found["holder"]) == ("topic:clicks", "stuck", "upload:l0/17")
    assert found["sentence"] == "Topic clicks does not advance: records wait for their upload."
    assert found["affected"] == ["table clicks"]
    assert found["command"] == "tidemill why topic:clicks"


def test_a_stage_that_waits_for_one_without_delay_is_itself_the_problem() -> None:
    mark = StageStatus("shard:orders", 1, 2, held_by="topic:t", since_ms=NOW_MS - 9_000, reason="waits for its input")
    idle = StageStatus("topic:t", 1, 1, since_ms=NOW_MS - 9_000)
    [found] = problems([StatusReport("pipeline:shop", NOW_MS, (mark, idle))])
    assert found["sentence"] == "Table orders does not advance: waits for its input."
    assert found["blocked_by"] == "topic t"


def test_stages_that_wait_for_each_other_in_a_circle_are_a_problem_all_the_same() -> None:
    marks = [
        StageStatus(f"shard:{name}", 1, 2, held_by=f"shard:{other}", since_ms=NOW_MS - 9_000)
        for name, other in ("ab", "bc", "ca")
    ]
    found = problems([StatusReport("pipeline:shop", NOW_MS, tuple(marks))])
    assert found
    assert all(each["state"] == "stuck" for each in found)


def test_a_paused_table_says_so() -> None:
    assert describe_state(derived(error="other columns", reason="other columns", parked=True)) == (
        "Table orders is paused: other columns."
    )


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("shard:orders", "table orders"),
        ("shard:orders@pipeline:shop:2", "table orders in driver 2 of pipeline shop"),
        ("capture:shop", "capture shop"),
        ("capture:shop/topics", "the topic writer of capture shop"),
        ("table:shop/public.orders", "captured table public.orders of shop"),
        ("process:node:n1", "node n1"),
        ("process:pipeline:shop", "the driver of pipeline shop"),
        ("objects@node:n1", "the bucket as seen by node n1"),
        ("consensus@pipeline:shop", "consensus as seen by the driver of pipeline shop"),
        ("pipeline:shop:spark", "the Spark session of pipeline shop"),
        ("pipeline:shop:table/orders", "table orders of pipeline shop"),
        ("postgres-pid:812", "PostgreSQL session 812"),
        ("postgres:db:5432", "the PostgreSQL server db:5432"),
        ("operator", "an operator"),
        ("pid 12 on quay", "pid 12 on quay"),
        ("upload:l0/17", "upload:l0/17"),
    ],
)
def test_names_of_stages_become_words_and_unknown_ones_stay(name: str, words: str) -> None:
    assert describe_name(name) == words


def test_a_delay_is_stated_in_ms_or_is_the_time_without_progress() -> None:
    assert behind_ms(derived(unit="ms")) == 900
    assert behind_ms(derived(unit="ms", position=0, target=NOW_MS)) is None
    assert behind_ms(derived(unit="lsn", since_ms=NOW_MS - 3_000)) == 3_000
    assert behind_ms(derived(unit="lsn", position=905)) == 0
    assert behind_ms(derive_status(StageStatus("x", 1, 1), "p", NOW_MS - 60_000, NOW_MS)) == 60_000


def test_the_flow_leads_from_databases_and_producers_to_tables_and_clients() -> None:
    reports = shop(NOW_MS)
    flow = flow_graph(derive_statuses(reports, NOW_MS), SHOP, reports)
    columns = {column["name"]: by_name(column["nodes"], "name") for column in flow["columns"]}
    assert set(columns["sources"]) == {"capture:shop", "producers"}
    assert set(columns["topics"]) == {"capture:shop/topics", "topic:clicks"}
    assert columns["topics"]["capture:shop/topics"]["note"] == "9 captured tables"
    assert len(columns["tables"]) == 9
    assert columns["tables"]["shard:conversion_by_product"]["note"] == "derived from clicks, order_line"
    assert columns["clients"]["clients"]["note"] == "3 shapes"
    edges = {(edge["from"], edge["to"]): edge for edge in flow["edges"]}
    assert edges["capture:shop/topics", "pipeline:shop"]["behind_ms"] == 620  # of its slowest table
    assert edges["pipeline:shop", "shard:orders"]["behind_ms"] == 540
    assert ("producers", "topic:clicks") in edges
    assert ("shard:orders", "clients") in edges
    assert ("capture:shop/topics", "clients") in edges


def test_a_topic_that_no_process_reports_has_no_records_or_is_not_in_use() -> None:
    reports = shop(NOW_MS)
    found = Catalogued({"clicks": 4, "returns": 1, "old": 1}, unwritten=["returns"], unused=["old"])
    [_, topics, *_] = flow_graph(derive_statuses(reports, NOW_MS), found, reports)["columns"]
    states = {node["title"]: (node["state"], node["sentence"]) for node in topics["nodes"]}
    assert states["clicks"][0] == "idle"
    assert states["returns"] == ("empty", "The topic has no records yet.")
    assert states["old"][0] == "unused"


def test_a_topic_is_without_records_only_where_a_live_node_could_report_it() -> None:
    topics = ["clicks", "returns"]
    assert unreported_topics(shop(NOW_MS), topics, NOW_MS) == ["returns"]
    assert unreported_topics(shop(NOW_MS), topics, NOW_MS + 60_000) == []
    shared = StatusReport("node:n2", NOW_MS, (StageStatus("topics", 1, 1),))
    assert unreported_topics([*shop(NOW_MS), shared], topics, NOW_MS) == []


def test_a_driver_that_was_killed_and_is_back_is_an_event() -> None:
    [back] = restart_rows(shop(NOW_MS, restarted_s=4), NOW_MS)
    assert (back["name"], back["reason"], back["ended_ms"], back["is_back"]) == (
        "the driver of pipeline shop", "pipeline-shop killed by SIGKILL.", 4_000, True
    )  # fmt: skip
    [away] = restart_rows(shop(NOW_MS, restarted_s=4, killed_s=5), NOW_MS)
    assert not away["is_back"]
    assert restart_rows(shop(NOW_MS), NOW_MS) == []


def test_a_flow_of_many_tables_shows_the_worst_and_one_box_for_the_others() -> None:
    reports, (rows, topics) = large(NOW_MS), large_rows()
    flow = flow_graph(derive_statuses(reports, NOW_MS), Catalogued({t.name: 10 for t in topics}, {}, rows), reports)
    tables = next(column for column in flow["columns"] if column["name"] == "tables")
    assert len(tables["nodes"]) == COLUMN_MAX - 1
    assert {node["state"] for node in tables["nodes"]} == {"stuck"}
    assert tables["more"] == {"count": 1_000 - COLUMN_MAX + 1, "state": "stuck", "behind_ms": 8_000}
    assert len(flow["edges"]) <= 4 * COLUMN_MAX


def test_an_overview_does_not_grow_with_the_cluster() -> None:
    import orjson

    reports, (rows, topics) = large(NOW_MS), large_rows()
    found = overview(reports, Catalogued({t.name: 10 for t in topics}, {}, rows), [], NOW_MS)
    assert len(found["problems"]) <= PROBLEMS_MAX
    assert len(found["problems"]) + found["problems_more"] == len(
        {int(mark.held_by[-4:]) for mark in reports[1].marks if mark.name[-1] in "01" and mark.held_by}
    )
    assert found["counts"]["stuck"] == 100
    assert len(orjson.dumps(found)) < 40_000


def test_every_table_has_its_place_also_one_that_no_process_reports() -> None:
    places = by_name(table_places(derive_statuses(shop(NOW_MS)[:1], NOW_MS), pipelines()), "table")
    assert places["orders"]["input"] == "capture:shop:public.orders"
    assert (places["orders"]["state"], places["orders"]["behind_ms"]) == ("", None)
    assert places["orders"]["reason"] == "No process reports this table."


def test_a_capture_has_its_slot_its_tables_by_state_and_its_copies() -> None:
    reports = shop(NOW_MS)
    [found] = capture_rows(captured_tables(), derive_statuses(reports, NOW_MS), reports)
    assert found["tables"] == {"captured": 8, "copying": 1, "refused": 1}
    assert (found["slot"]["slot"], found["slot"]["slot_retained_bytes"]) == ("tidemill_shop", 48_000_000)
    [copy] = found["copies"]
    assert (copy["rows"], copy["rows_expected"], copy["chunks_done"], copy["chunks"]) == (7_100_000, 9_600_000, 71, 96)
    [troubled] = found["troubled"]
    assert (troubled["table"], troubled["state"]) == ("public.audit", "refused")


def test_dead_letters_are_counted_by_reason_without_the_values_in_it() -> None:
    def letter(reason: str, second: int) -> dict[str, Any]:
        return {"reason": reason, "topic": "clicks", "at": datetime(2026, 1, 1, 0, 0, second, tzinfo=UTC)}

    counts = ReasonCounts()
    counts.add([letter("not JSON at character 13", 2), letter("no column holds 'a'", 1)])
    counts.add(
        [letter("not JSON at character 9", 5), letter("no column holds 'b'", 1), letter("not JSON at character 7", 0)]
    )
    first, second = counts.rows()
    assert (first["reason"], first["count"]) == ("not JSON at character 9", 3)
    assert (first["first"].second, first["last"].second) == (0, 5)
    assert second["count"] == 2


def test_the_newest_letters_are_in_the_order_of_their_times() -> None:
    letters = [{"at": at, "topic": "t", "partition": 0, "offset": at} for at in (3, 1, 2)]
    assert [letter["at"] for letter in newest_letters(letters, 2)] == [2, 3]
