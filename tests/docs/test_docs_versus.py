"""Pure parts of `./dev bench versus`: comparison, latencies, use of processes, and the published table and picture."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pyarrow as pa
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from versus_compare import Difference, compare, latencies, percentiles
from versus_peer import committed_offset
from versus_plot import plot
from versus_processes import Process, Used, parse_stat, percent_of_a_core, roles
from versus_publish import PAGE, PICTURE, RESULTS, page_text, published
from versus_reader import added_by_delta
from versus_report import sentences, table

ROWS = pa.table({"id": [1, 2, 3], "v": ["a", None, "c"]})


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (pa.table({"v": ["c", "a", None], "id": [3, 1, 2], "_lsn": [7, 8, 9]}), Difference(3, 0, 0, 0)),
        (ROWS.slice(1), Difference(3, 1, 0, 0)),
        (pa.concat_tables([ROWS, ROWS.slice(2)]), Difference(3, 0, 1, 0)),
        (pa.concat_tables([ROWS, pa.table({"id": [4], "v": ["d"]})]), Difference(3, 0, 1, 0)),
        (pa.table({"id": [1, 2, 3], "v": ["a", "", "c"]}), Difference(3, 0, 0, 1)),
    ],
)
def test_a_missing_an_extra_a_repeated_and_a_changed_row_are_found(found: pa.Table, expected: Difference) -> None:
    assert compare(ROWS, found, ("id",)) == expected
    assert expected.equal == (not any(expected[1:]))


def test_a_table_without_a_column_of_the_source_is_an_error() -> None:
    with pytest.raises(KeyError):
        compare(ROWS, ROWS.select(["id"]), ("id",))


def test_every_row_that_was_committed_inside_the_window_counts() -> None:
    sent = {0: 9.9, 1: 10.0, 2: 19.5, 3: 20.0}
    assert latencies(sent, {0: 10.0, 1: 10.25, 2: 55.5, 3: 20.1}, 10.0, 20.0) == [0.25, 36.0]
    with pytest.raises(KeyError):
        latencies(sent, {1: 10.25}, 10.0, 20.0)


def test_percentiles_are_nearest_ranks() -> None:
    assert percentiles([i / 100 for i in range(100, 0, -1)]) == {"p50": 0.51, "p90": 0.91, "p99": 1.0, "max": 1.0}
    assert percentiles([0.5]) == {"p50": 0.5, "p90": 0.5, "p99": 0.5, "max": 0.5}


def test_the_time_of_children_that_ended_counts_for_their_parent() -> None:
    fields = ["S", "7", *["0"] * 9, "100", "20", "3", "4", *["0"] * 10]
    assert parse_stat(f"42 (a name) with) {' '.join(fields)}") == Process(7, pytest.approx(1.27))


def test_a_process_has_the_role_of_its_parent_unless_it_has_another() -> None:
    parents = {1: 0, 10: 1, 11: 10, 12: 11, 13: 12, 20: 1, 21: 10}
    found = {pid: Process(parent, 0.0) for pid, parent in parents.items()}
    named = {12: "jvm"}
    assert roles(found, {10: "up", 21: "load", 99: "ended"}, lambda pid, _: named.get(pid, "")) == {
        10: "up",
        11: "up",
        12: "jvm",
        13: "jvm",
        21: "load",
    }


def test_what_else_ran_is_the_rest_of_the_machine() -> None:
    before, after = Used({"node": 1.0}, 100.0, 5.0), Used({"node": 3.0, "load": 1.0}, 108.0, 5.5)
    assert percent_of_a_core(before, after, 10.0) == {"node": 20.0, "load": 10.0, "other": 50.0, "stolen": 5.0}


def test_the_offset_of_a_query_is_that_of_its_last_committed_batch(tmp_path: Path) -> None:
    assert committed_offset(tmp_path, "t") == -1
    for folder, numbers in (("offsets", (8, 9, 10, 11)), ("commits", (8, 9, 10))):
        (tmp_path / folder).mkdir()
        for number in numbers:
            (tmp_path / folder / str(number)).write_text(f'v1\n{{}}\n{{"t":{{"0":{number}00}}}}')
    (tmp_path / "commits" / ".11.crc").touch()
    assert committed_offset(tmp_path, "t") == 1_000


def test_files_that_a_version_of_a_delta_table_only_rewrote_are_not_read(tmp_path: Path) -> None:
    actions = [
        {"commitInfo": {}},
        {"add": {"path": "new.parquet", "dataChange": True}},
        {"add": {"path": "compacted.parquet", "dataChange": False}},
        {"remove": {"path": "old.parquet", "dataChange": True}},
    ]
    version = tmp_path / "0.json"
    version.write_text("\n".join(map(json.dumps, actions)))
    assert added_by_delta(version, tmp_path) == [str(tmp_path / "new.parquet")]


def lane(p50: float, cpu: float, mib: int, **more: Any) -> dict[str, Any]:
    return {
        "latency_s": {"p50": p50, "p90": 2 * p50, "p99": 3 * p50, "max": 4 * p50},
        "cpu_percent": {"a": cpu, "b": 1.0, "postgres": 40.0, "other": 2.0, "stolen": 0.0},
        "cpu_total_percent": cpu + 1,
        "disturbed": False,
        "memory": {"a": {"processes": 2, "rss_mib": mib, "pss_mib": mib / 2}},
        "disk_mib": {"tables": 60, "kafka": 970},
        "verified": {"rows": 1234, "missing": 0, "extra": 0, "different": 0},
        "unequal": [],
        "lines": {"one": 3, "two": 40},
        "at": "2026-11-29T15:00:00+00:00",
        "warm_s": 60.0,
        "window_s": 180.2,
        "machine": "2 cores, load 0.1 0.2",
        **more,
    }


KILL = {
    "kills": {
        "node": {"worst_row_s": 9.7, "recovered": True},
        "jvm": {"worst_row_s": 300.0, "recovered": False},
    },
    "restarted_from_outside": {"kafka": 1},
    "verified": {"rows": 99, "missing": 1, "extra": 2, "different": 3},
    "unequal": ["orders"],
}
LANES = {
    "tidemill/30": lane(0.05, 10.0, 900),
    "tidemill/300": lane(0.2, 50.0, 1_000),
    "tidemill@10s/300": lane(5.0, 20.0, 1_000),
    "delta/300": lane(20.0, 140.0, 3_700, disturbed=True),
    "delta/30": lane(14.0, 160.0, 3_700),
    "delta/kill": KILL,
}


def test_the_table_has_a_column_for_each_side_and_a_dash_for_what_was_not_measured() -> None:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table(LANES).splitlines()]
    assert rows[0] == ["", "Debezium, Kafka, Spark, Delta", "tidemill", "tidemill, freshness 10 s"]
    cells = {row[0]: row[1:] for row in rows}
    assert cells["300 commits/s: commit → table, p50 / p90 / p99"] == [
        "20.0 / 40.0 / 60.0 s",
        "0.200 / 0.400 / 0.600 s",
        "5.00 / 10.0 / 15.0 s",
    ]
    assert cells["30 commits/s: CPU, % of a core"] == ["161: a 160, b 1", "11: a 10, b 1", "–"]
    assert cells["300 commits/s: CPU, % of a core"][0] == "141: a 140, b 1; disturbed: other work 2, stolen 0"
    assert cells["300 commits/s: compared with SELECT"][0] == "1,234 rows, all equal"
    assert cells["compared with SELECT"] == ["99 rows, 1 missing, 2 extra, 3 different", "–", "–"]
    assert cells["one SIGKILL of each process: worst row"][0] == "node 9.7 s, jvm 300.0 s (not recovered in time)"
    assert cells["lines of configuration and code"][0] == "43: two 40, one 3"
    assert cells["measured"][0] == "2026-11-29, 180 s after 60 s, 2 cores"


def test_the_picture_shows_a_longer_bar_for_a_larger_value_inside_its_frame() -> None:
    picture = ElementTree.fromstring(plot(LANES))
    bars = [one for one in picture.iter("{http://www.w3.org/2000/svg}rect") if float(one.get("rx", 0)) == 2]
    peer, ours = ([one for one in bars if one.get("class") == kind] for kind in ("peer", "ours"))
    assert len(peer) == len(ours) == 6
    assert all(float(p.get("x", 0)) > float(o.get("x", 0)) for p, o in zip(peer[:2], ours[:2], strict=True))
    assert all(float(p.get("width", 0)) > float(o.get("width", 0)) for p, o in zip(peer[2:], ours[2:], strict=True))
    edges = [float(one.get("x", 0)) + float(one.get("width", 0)) for one in bars]
    assert max(edges) < float(picture.get("width", 0)) - 40


def test_a_picture_needs_both_sides_at_one_rate() -> None:
    with pytest.raises(ValueError, match="no rate"):
        plot({"delta/30": LANES["delta/30"], "tidemill/300": LANES["tidemill/300"]})


def test_the_sentences_have_the_figures_of_both_sides() -> None:
    text = sentences(LANES)
    assert "At 300 commits/s a row is in tidemill's table after 0.200 s and 0.600 s (p50 and p99)" in text
    assert "after 20.0 s and 60.0 s through Debezium, Kafka, Spark, Delta: 100 times as late at p50" in text
    assert "tidemill uses 11 % of a core and 900 MiB, the peer 161 % and 3,700 MiB" in text
    assert "all rows are equal on both sides (2,468 and 2,468); the peer is 43 lines" in text
    wrong = {**LANES, "delta/30": lane(14.0, 160.0, 3_700, unequal=["orders"])}
    assert "not all rows are equal on both sides" in sentences(wrong)


def test_the_page_and_the_picture_show_the_published_results() -> None:
    lanes = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    assert published(PAGE.read_text()) == page_text(lanes)
    assert PICTURE.exists() == bool(lanes) and (not lanes or PICTURE.read_text() == plot(lanes))
