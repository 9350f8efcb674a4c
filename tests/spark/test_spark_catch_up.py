"""Catching up in bounded steps: memory, progress, and times that are larger than a step."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tidemill.topics.batch import Record, encode_batch

WAITING = 1_000_000
DISTINCT = 400_000
GROWTH_MIB = 450
"""Limit of the memory that catching up adds: a step's records as Python objects, its columns, the mirror's runs and
their merges. Measured: 335 MiB in steps, 243 MiB as one time. Three million records as one batch took 3.8 GB."""


def produced(harbour: Any, count: int) -> Any:
    """Produce `count` waiting records of about 110 bytes, in ten batches per call."""
    topic = harbour.create_topic("clicks")
    page = "/products/list?sort=price&page=" + "x" * 20

    async def run() -> None:
        pending = []
        for at in range(0, count, 5_000):
            records = [
                Record(
                    None,
                    b'{"click_id":"c%09d","product_id":%d,"at":"2026-01-02T03:04:05Z","page":"%s"}'
                    % (n * 7919 % DISTINCT, n, page.encode()),
                )
                for n in range(at, at + 5_000)
            ]
            pending.append(harbour.topics.produce_nowait(topic.topic_id, 0, encode_batch(records)))
            if len(pending) >= 4:
                await pending.pop(0)
        for future in pending:
            await future

    harbour.portal.call(run())
    return topic


def caught_up(harbour: Any, tmp_path: Path) -> dict[str, Any]:
    child = Path(__file__).parents[1] / "support" / "spark" / "programs" / "catch_up_child.py"
    urls = harbour.urls
    command = [sys.executable, str(child), urls.objects, urls.consensus, str(tmp_path / "scratch")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    print(found)
    return found


def equal(harbour: Any, count: int) -> None:
    rows = harbour.portal.call(harbour.shard("clicks").snapshot(harbour.upper("clicks") - 1))
    expected = {}
    for n in range(count):
        expected[f"c{n * 7919 % DISTINCT:09d}"] = n
    found = dict(zip(rows.column("click_id").to_pylist(), rows.column("product_id").to_pylist(), strict=True))
    assert found == expected


@pytest.mark.parametrize("bindings", [40, 1])
def test_a_million_waiting_records_are_taken_in_bounded_memory(harbour: Any, tmp_path: Path, bindings: int) -> None:
    """Records of many times are read in steps. Records of one time are spilled, and written by one append."""
    topic = produced(harbour, WAITING)
    for n in range(1, bindings + 1):
        harbour.heads[topic.topic_id][0] = WAITING * n // bindings
        harbour.mint("topic/clicks", n * 1000, topic)
    found = caught_up(harbour, tmp_path)
    assert found["read"] == WAITING and found["to_go"] == 0
    assert found["won"] == (10 if bindings == 40 else 1), "steps of 100,000 records, or one append"
    assert found["looks"] >= 5, "progress can be seen on the way"
    assert found["peak_mib"] - found["start_mib"] < GROWTH_MIB
    equal(harbour, WAITING)


def test_a_step_is_bounded_by_bytes_too(harbour: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from support.spark.sinks import clicks_sink
    from tidemill.spark.ingest import step_planner

    monkeypatch.setattr(step_planner, "STEP_BYTES", 3_000)
    topic = harbour.create_topic("clicks")
    for n in range(1, 13):
        harbour.produce(topic, [(b"k", {"click_id": f"k{n}.{i}", "product_id": n}) for i in range(20)])
        harbour.mint("topic/clicks", n * 1000, topic)
    sink = clicks_sink(harbour, tmp_path / "s")
    sink.process(sink.latest())
    assert harbour.upper("clicks") == 12_001
    assert sink.seats.tables[0].won == 5, "two or three batches of some 1,000 bytes a step"
    assert len(harbour.contents("clicks")) == 240


def test_bindings_are_followed_again_once_the_tables_have_reached_the_last_one(harbour: Any, tmp_path: Path) -> None:
    from support.spark.sinks import clicks_sink

    topic = harbour.create_topic("clicks")
    sink = clicks_sink(harbour, tmp_path / "s")

    def bind(n: int) -> None:
        harbour.produce(topic, [(b"k", {"click_id": f"k{n}", "product_id": n})])
        harbour.mint("topic/clicks", n * 1000, topic)

    def reached() -> bool:
        return sink.wait_until_reached(0)

    assert reached()
    bind(1)
    harbour.portal.call(sink.wait_for_binding(5))
    assert sink.target == 1001 and not reached(), "the first binding is known, so the next ones need no look"
    bind(2)
    sink.process(1001)
    assert reached(), "the second one is still unknown"
    bind(3)
    harbour.portal.call(sink.wait_for_binding(5))
    assert sink.target == 2001 and not reached()
    sink.process(1001)
    assert not reached(), "a round that ends earlier leaves the newer binding open"
    sink.advance()
    assert reached() and harbour.upper("clicks") == 3001


def test_a_large_time_with_truncations_and_dead_letters_is_what_one_batch_would_be(
    harbour: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from support.spark.sinks import shop_sink
    from tidemill.spark.ingest import step_planner
    from tidemill.spark.ingest.steps import oversized_step, step_executor

    tables = {"public.t": [("id", "integer", 0), ("v", "numeric(4,1)", -1)]}
    topic = harbour.capture("shop", tables)["public.t"]

    def rows(*ids: int, v: str = "1.5") -> list[Any]:
        return [({"id": i}, {"id": i, "v": v}) for i in ids]

    harbour.produce(topic, rows(*range(50)))
    harbour.mint("capture/shop", 1000, topic)
    first = shop_sink(harbour, tmp_path / "1", ["t"])
    first.process(first.latest())
    monkeypatch.setattr(step_planner, "STEP_RECORDS", 10)
    monkeypatch.setattr(oversized_step, "RANGE_RECORDS", 7)
    monkeypatch.setattr(step_executor, "STEP_RECORDS", 10)
    harbour.produce(topic, rows(*range(100, 120)))
    harbour.truncate(topic)
    harbour.produce(topic, [*rows(*range(30)), *rows(7, 8, v="NaN"), ({"id": 9}, None), *rows(8, v="2.5")])
    harbour.mint("capture/shop", 2000, topic)
    second = shop_sink(harbour, tmp_path / "2", ["t"])
    pause = threading.Event()
    for _ in range(200):
        second.process(second.latest())
        if harbour.upper("t") == 2001:
            break
        pause.wait(0.05)
    assert not second.seats.failed
    found = {r["id"]: str(r["v"]) for r in harbour.contents("t")}
    assert found == {i: "2.5" if i == 8 else "1.5" for i in range(30) if i not in (7, 9)}
    assert [r["key"] for r in harbour.contents("p.dead_letters")] == ['{"id": 7}', '{"id": 8}']
    assert second.seats.tables[0].won == 1
    mirror = second.seats.tables[0].operator.mirror
    assert {r["id"]: str(r["v"]) for r in mirror.live_rows().to_pylist()} == found
    assert mirror.runs[-1].path is not None, "what changed was written range by range, and is held by no memory"
    assert not (tmp_path / "2" / "large").exists() or not list((tmp_path / "2" / "large").iterdir())


def test_a_damaged_file_of_a_large_step_is_corrupt_and_nothing_of_the_step_is_appended(
    harbour: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from support.spark.sinks import shop_sink
    from tidemill.base.errors import CorruptError
    from tidemill.spark.ingest import step_planner
    from tidemill.spark.ingest.steps import oversized_step, step_executor

    topic = harbour.capture("shop", {"public.t": [("id", "integer", 0), ("v", "integer", -1)]})["public.t"]
    monkeypatch.setattr(step_planner, "STEP_RECORDS", 10)
    monkeypatch.setattr(step_executor, "STEP_RECORDS", 10)
    resolve = oversized_step.OversizedStep._resolve_ranges
    seen: list[str] = []

    def damaged(step: Any, bury: Any) -> None:
        path = step._file(0)
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(bytes(data))
        try:
            resolve(step, bury)
        except CorruptError as error:
            seen.append(str(error))
            raise

    monkeypatch.setattr(oversized_step.OversizedStep, "_resolve_ranges", damaged)
    harbour.produce(topic, [({"id": i}, {"id": i, "v": i}) for i in range(50)])
    harbour.mint("capture/shop", 1000, topic)
    feed = shop_sink(harbour, tmp_path / "1", ["t"])
    deadline, pause = 1200, threading.Event()
    while not seen:
        feed.process(feed.latest())
        deadline -= 1
        assert deadline and not pause.wait(0.05)
    assert "spilled records are damaged: path=" in seen[0] and "range-0.arrow" in seen[0]
    assert harbour.upper("t") == 0


def test_a_mirror_that_somebody_works_on_is_not_saved(harbour: Any, tmp_path: Path) -> None:
    """Otherwise the next start would trust a manifest with the upper of a change and without its rows."""
    from support.spark.sinks import clicks_sink

    harbour.create_topic("clicks")
    sink = clicks_sink(harbour, tmp_path / "s")
    assert [t.name for t in sink.idle_tables] == ["clicks"]
    sink.seats._seats["clicks"].aside = True
    assert sink.idle_tables == []
    sink.seats._seats["clicks"].aside = False
    sink.idle.clear()
    assert sink.idle_tables == []
