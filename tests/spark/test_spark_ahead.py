"""The step after the one under way is read while that one is written: used if it is the next one, else thrown away."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from support.spark.sinks import clicks_sink, shop_sink
from tidemill.base.errors import UnavailableError
from tidemill.spark.ingest import fetch_decode, step_planner
from tidemill.spark.ingest.fetch_decode import PrefetchedStep, Prefetcher
from tidemill.spark.ingest.steps import step_executor

IDS = range(10, 25)


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_planner, "STEP_RECORDS", 20)
    monkeypatch.setattr(step_executor, "STEP_RECORDS", 20)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """[lower, upper) of every step that was taken as it had been read ahead."""
    found: list[tuple[int, int]] = []
    take = Prefetcher.wait_result

    def noting(self: Prefetcher) -> PrefetchedStep | None:
        prepared = take(self)
        if prepared is not None:
            found.append((prepared.step.lower, prepared.step.upper))
        return prepared

    monkeypatch.setattr(Prefetcher, "wait_result", noting)
    return found


def waiting(harbour: Any, times: int = 12) -> dict[str, int]:
    """`times` times of ten records each: a step takes two. Keys are written again and again; what they must hold."""
    topic = harbour.create_topic("clicks")
    expected = {}
    for n in range(1, times + 1):
        rows = [(b"k", {"click_id": f"k{(n * 10 + i) % 23}", "product_id": n * 10 + i}) for i in range(10)]
        expected |= {value["click_id"]: value["product_id"] for _, value in rows}
        harbour.produce(topic, rows)
        harbour.mint("topic/clicks", n * 1000, topic)
    return expected


def clicks(harbour: Any) -> dict[str, int]:
    return {row["click_id"]: row["product_id"] for row in harbour.contents("clicks")}


def test_every_step_but_the_first_is_read_ahead(harbour: Any, tmp_path: Path, used: list[tuple[int, int]]) -> None:
    expected = waiting(harbour)
    found = clicks_sink(harbour, tmp_path / "s")
    found.process(found.latest())
    assert clicks(harbour) == expected
    assert used == [(n * 1000 + 1, n * 1000 + 2001) for n in range(2, 12, 2)]
    assert found.seats.tables[0].won == 6 and found.steps.in_flight_bytes == 0


def test_a_step_read_ahead_is_thrown_away_when_a_peer_moved_the_table(
    harbour: Any, tmp_path: Path, used: list[tuple[int, int]]
) -> None:
    expected = waiting(harbour)
    one, peer = clicks_sink(harbour, tmp_path / "1"), clicks_sink(harbour, tmp_path / "2")
    table = one.seats.tables[0]
    append = table.append
    third = threading.Event()

    async def slow(lower: int, *more: Any) -> bool:
        if lower == 4001 and not third.is_set():
            third.set()
            # The peer ends its step where ours would not.
            await peer.seats.tables[0].shard.wait_upper(7000, 30)
        return await append(lower, *more)

    table.append = slow  # type: ignore[method-assign,assignment]
    thread = threading.Thread(target=one.process, args=(one.latest(),))
    thread.start()
    assert third.wait(30)
    peer.seats.tables[0].follow()
    peer.process(7001)
    thread.join(60)
    assert not thread.is_alive() and not one.seats.failed
    assert clicks(harbour) == expected
    assert table.lost == 1
    assert (6001, 8001) not in used, "the table was at 7001 by then"
    assert harbour.upper("clicks") == 12_001


def test_what_cannot_be_read_ahead_is_read_in_its_turn(
    harbour: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, used: list[tuple[int, int]]
) -> None:
    expected = waiting(harbour)

    def away(*_: Any) -> Any:
        raise UnavailableError("the bucket is away.")

    monkeypatch.setattr(fetch_decode, "fetch_table", away)
    found = clicks_sink(harbour, tmp_path / "s")
    found.process(found.latest())
    assert clicks(harbour) == expected and used == []
    assert found.seats.tables[0].won == 6 and not found.seats.failed


def test_the_end_of_a_batch_is_kept_to(harbour: Any, tmp_path: Path) -> None:
    waiting(harbour)
    found = clicks_sink(harbour, tmp_path / "s")
    for end in (3001, 4501, 9001):
        found.process(end)
        assert harbour.upper("clicks") == end


def test_tables_that_catch_up_together_agree_at_every_time(
    harbour: Any, tmp_path: Path, used: list[tuple[int, int]]
) -> None:
    """The table that will be furthest behind is read ahead, and none starves."""
    described = [("id", "integer", 0), ("v", "integer", -1)]
    topics = harbour.capture("shop", {"public.a": described, "public.b": described})
    for n in range(1, 9):
        for topic in topics.values():
            harbour.produce(topic, [({"id": i}, {"id": i, "v": n}) for i in IDS])
        harbour.mint("capture/shop", n * 10, *topics.values())
    found = shop_sink(harbour, tmp_path / "s", ["a", "b"])
    found.process(found.latest())
    assert harbour.upper("a") == harbour.upper("b") == 81
    for n in range(1, 9):
        assert harbour.contents("a", n * 10) == harbour.contents("b", n * 10) == [{"id": i, "v": n} for i in IDS]
    assert len(used) >= 8


def test_a_table_that_must_stop_in_a_step_read_ahead_stops_there(harbour: Any, tmp_path: Path) -> None:
    topic = harbour.capture("shop", {"public.t": [("id", "integer", 0), ("v", "text", -1)]})["public.t"]
    for n in range(1, 7):
        row = {"id": n, "v": "a", "w": 1} if n == 4 else {"id": n, "v": "a"}
        harbour.produce(topic, [({"id": n}, row)] * 15)
        harbour.mint("capture/shop", n * 10, topic)
    found = shop_sink(harbour, tmp_path / "s", ["t"])
    found.process(found.latest())
    assert "columns differ" in str(found.seats.failed["t"])
    assert harbour.upper("t") == 40
    assert [row["id"] for row in harbour.contents("t")] == [1, 2, 3]
