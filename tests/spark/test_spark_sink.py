"""The sink on real stores and topics, without a JVM: exact tables, races, restarts, dead letters (U1 to U5)."""

from __future__ import annotations

import asyncio
import threading
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tidemill.base.errors import TidemillError
from tidemill.metastore.catalogue import TopicRow
from tidemill.shards.compaction import compact_once
from tidemill.shards.front import DIFF, TIME
from tidemill.shards.open import open_remap, open_shard
from tidemill.shards.schema import update_schema
from tidemill.spark.dead_letters import DeadLetters
from tidemill.spark.decode.ddl import stream_schema
from tidemill.spark.decode.stream import DEAD_LETTERS
from tidemill.spark.facts import Latency
from tidemill.spark.feeds import captured_feed, stream_feed
from tidemill.spark.sink import FeedSink, planned_end
from tidemill.spark.table import TableWriter

CLICKS = stream_schema("click_id string, product_id long", "click_id")


def writer(harbour: Any, name: str, schema: Any, scratch: Path, feed: Any = None) -> TableWriter:
    s = harbour.stores
    shard = harbour.portal.call(open_shard(s.consensus, s.objects, s.clock, s.rand, name, schema))
    table = TableWriter(harbour.portal, s, shard, scratch / name, feed)
    table.hydrate()
    return table


def clicks_sink(harbour: Any, scratch: Path, **more: Any) -> FeedSink:
    s = harbour.stores
    feed = harbour.portal.call(stream_feed(s.catalogue, "clicks", CLICKS))
    table = writer(harbour, "clicks", CLICKS, scratch, feed)
    dead = DeadLetters(writer(harbour, "p.dead_letters", DEAD_LETTERS, scratch), ["topic/clicks"])
    remap = harbour.portal.call(open_remap(s.consensus, s.clock, s.rand, "topic/clicks"))
    return FeedSink(harbour.portal, s, "topic/clicks", remap, [table], Latency(), Latency(), dead_letters=dead, **more)


def shop_sink(harbour: Any, scratch: Path, tables: list[str]) -> FeedSink:
    s = harbour.stores
    writers = []
    for name in tables:
        feed = harbour.portal.call(captured_feed(s.catalogue, "shop", f"public.{name}"))
        writers.append(writer(harbour, name, feed.schema, scratch, feed))
    remap = harbour.portal.call(open_remap(s.consensus, s.clock, s.rand, "capture/shop"))
    return FeedSink(harbour.portal, s, "capture/shop", remap, writers, Latency(), Latency())


def test_all_tables_of_a_capture_agree_at_every_time(harbour: Any, tmp_path: Path) -> None:
    topics = harbour.capture(
        "shop",
        {
            "public.payment": [("p_id", "bigint", 0), ("amount", "numeric(10,2)", -1)],
            "public.warehouse": [("w_id", "integer", 0), ("ytd", "numeric(14,2)", -1)],
        },
    )
    payment, warehouse = topics["public.payment"], topics["public.warehouse"]
    for n in range(1, 21):
        harbour.produce(payment, [({"p_id": n}, {"p_id": n, "amount": "1.50"})])
        harbour.produce(warehouse, [({"w_id": 1}, {"w_id": 1, "ytd": f"{n * 1.5:.2f}"})])
        harbour.mint("capture/shop", n * 10, payment, warehouse)
    sink = shop_sink(harbour, tmp_path / "s", ["payment", "warehouse"])
    sink.process(sink.latest())
    assert harbour.upper("payment") == harbour.upper("warehouse") == 201
    for n in range(1, 21):
        paid = sum(row["amount"] for row in harbour.contents("payment", n * 10))
        (row,) = harbour.contents("warehouse", n * 10)
        assert row["ytd"] == paid == Decimal("1.50") * n
    assert harbour.contents("payment", 9) == []


def test_deletes_updates_and_truncation_of_a_captured_table(harbour: Any, tmp_path: Path) -> None:
    topics = harbour.capture("shop", {"public.t": [("id", "integer", 0), ("v", "text", -1)]})
    topic = topics["public.t"]
    sink = shop_sink(harbour, tmp_path / "s", ["t"])

    def commit(time: int, *rows: tuple[Any, Any]) -> list[dict[str, Any]]:
        harbour.produce(topic, rows)
        harbour.mint("capture/shop", time, topic)
        sink.process(sink.latest())
        return harbour.contents("t")

    one, two = {"id": 1, "v": "a"}, {"id": 2, "v": None}
    assert commit(1, ({"id": 1}, one), ({"id": 2}, two)) == [one, two]
    assert commit(2, ({"id": 1}, {"id": 1, "v": "b"}), ({"id": 2}, None)) == [{"id": 1, "v": "b"}]
    harbour.truncate(topic)
    assert commit(3, ({"id": 3}, {"id": 3, "v": "c"})) == [{"id": 3, "v": "c"}]
    assert harbour.contents("t", 2) == [{"id": 1, "v": "b"}]


def start_over(harbour: Any, topic: Any) -> Any:
    """As capture does when a table was made anew: a topic of the old name with a new id."""
    harbour.portal.call(harbour.stores.catalogue.delete(TopicRow, topic.name))
    return harbour.create_topic(topic.name, kind="capture")


def test_a_captured_table_that_was_started_over_loses_what_is_not_in_its_new_copy(harbour: Any, tmp_path: Path) -> None:
    old = harbour.capture("shop", {"public.t": [("id", "integer", 0), ("v", "text", -1)]})["public.t"]
    sink = shop_sink(harbour, tmp_path / "s", ["t"])
    harbour.produce(old, [({"id": i}, {"id": i, "v": "old"}) for i in (1, 2, 3)])
    harbour.mint("capture/shop", 10, old)
    sink.process(sink.latest())
    new = start_over(harbour, old)
    harbour.produce(new, [({"id": i}, {"id": i, "v": v}) for i, v in ((2, "new"), (3, "old"))])
    harbour.mint("capture/shop", 20, old, new)
    with pytest.raises(TidemillError, match="started over: shard=t"):
        sink.process(sink.latest())
    assert harbour.upper("t") == 11, "nothing is appended past it from the old topic"
    # One process takes the new copy by itself, another together with what came after it: no difference.
    one = shop_sink(harbour, tmp_path / "1", ["t"])
    one.process(21)
    harbour.produce(new, [({"id": 4}, {"id": 4, "v": "later"}), ({"id": 2}, None)])
    harbour.mint("capture/shop", 30, old, new)
    one.process(31)
    assert harbour.contents("t", 19) == [{"id": i, "v": "old"} for i in (1, 2, 3)]
    assert harbour.contents("t", 20) == [{"id": 2, "v": "new"}, {"id": 3, "v": "old"}]
    assert harbour.contents("t", 30) == [{"id": 3, "v": "old"}, {"id": 4, "v": "later"}]


def test_a_captured_table_that_was_started_over_empty_is_empty(harbour: Any, tmp_path: Path) -> None:
    old = harbour.capture("shop", {"public.t": [("id", "integer", 0), ("v", "text", -1)]})["public.t"]
    harbour.produce(old, [({"id": 1}, {"id": 1, "v": "old"})])
    harbour.mint("capture/shop", 10, old)
    shop_sink(harbour, tmp_path / "s", ["t"]).process(11)
    new = start_over(harbour, old)
    harbour.mint("capture/shop", 20, old, new)
    shop_sink(harbour, tmp_path / "1", ["t"]).process(21)
    assert (harbour.contents("t", 19), harbour.contents("t", 20)) == ([{"id": 1, "v": "old"}], [])


def test_duplicates_are_one_row_and_malformed_records_are_dead_letters(harbour: Any, tmp_path: Path) -> None:
    topic = harbour.create_topic("clicks", 2)
    a = {"click_id": "a", "product_id": 1}
    harbour.produce(topic, [(b"a", a), (b"a", a), (b"", b"{broken")], 0)
    harbour.produce(topic, [(b"b", {"click_id": "b", "product_id": 2}), (b"c", {"product_id": 3})], 1)
    harbour.mint("topic/clicks", 100, topic)
    sink = clicks_sink(harbour, tmp_path / "s")
    sink.process(sink.latest())
    assert harbour.contents("clicks") == [a, {"click_id": "b", "product_id": 2}]
    letters = harbour.contents("p.dead_letters")
    assert [(r["topic"], r["partition"], r["offset"], r["bytes"]) for r in letters] == [
        ("clicks", 0, 2, b"{broken"),
        ("clicks", 1, 1, b'{"product_id": 3}'),
    ]
    assert "malformed" in letters[0]["reason"] and "key column" in letters[1]["reason"]


def test_idle_bindings_move_the_upper(harbour: Any, tmp_path: Path) -> None:
    topic = harbour.create_topic("clicks")
    sink = clicks_sink(harbour, tmp_path / "s")
    harbour.mint("topic/clicks", 5_000, topic)
    sink.process(sink.latest())
    assert harbour.upper("clicks") == 5_001 == harbour.upper("p.dead_letters")


def test_a_replayed_batch_does_nothing(harbour: Any, tmp_path: Path) -> None:
    topic = harbour.create_topic("clicks")
    harbour.produce(topic, [(b"a", {"click_id": "a", "product_id": 1})])
    harbour.mint("topic/clicks", 100, topic)
    sink = clicks_sink(harbour, tmp_path / "s")
    sink.process(101)
    batches = len(harbour.portal.call(harbour.shard("clicks").batches(-1)))
    sink.process(101)
    sink.process(50)
    again = clicks_sink(harbour, tmp_path / "other")
    again.process(101)
    assert len(harbour.portal.call(harbour.shard("clicks").batches(-1))) == batches
    assert (again.tables[0].won, again.tables[0].lost) == (0, 0)


def test_two_sinks_race_on_one_shard_and_the_loser_recomputes(harbour: Any, tmp_path: Path) -> None:
    topic = harbour.create_topic("clicks", 2)
    one, two = clicks_sink(harbour, tmp_path / "1"), clicks_sink(harbour, tmp_path / "2")
    expected: dict[str, int] = {}
    for n in range(1, 13):
        rows = [(b"k%d" % (k % 7), {"click_id": f"k{k % 7}", "product_id": k}) for k in range(n, n + 5)]
        expected |= {value["click_id"]: value["product_id"] for _, value in rows}
        harbour.produce(topic, [*rows, (b"", b"bad")], n % 2 if n % 3 else 0)
        harbour.mint("topic/clicks", n * 10, topic)
        for sink in ((one, two), (two, one), (one,), (two,))[n % 4]:
            sink.process(sink.latest())
    for sink in (one, two):
        sink.process(sink.latest())
    rows = harbour.portal.call(harbour.shard("clicks").snapshot(120)).to_pylist()
    assert len({r["click_id"] for r in rows}) == len(rows) == 7
    assert one.tables[0].lost + two.tables[0].lost > 0
    for sink in (one, two):
        assert sorted(map(str, sink.tables[0].operator.mirror.live_rows().to_pylist())) == sorted(map(str, rows))
    assert len(harbour.contents("p.dead_letters")) == 12


def test_a_follower_whose_history_is_compacted_between_two_looks_starts_over(harbour: Any, tmp_path: Path) -> None:
    """Read from where it stands, the merged batch holds every live row as news and no deletion at all."""
    topic = harbour.create_topic("clicks")
    one, two = clicks_sink(harbour, tmp_path / "1"), clicks_sink(harbour, tmp_path / "2")
    for n in range(1, 11):
        rows = [(b"k", {"click_id": f"k{n}", "product_id": n}), (b"k", {"click_id": f"m{n}", "product_id": n})]
        gone = [(f"k{n - 1}".encode(), None)] if n > 1 else []
        harbour.produce(topic, [*rows, *gone])
        harbour.mint("topic/clicks", n * 10, topic)
        two.process(two.latest())
        if n == 3:
            one.process(one.latest())
    follower = one.tables[0]
    assert any(row["click_id"] == "k3" for row in follower.operator.mirror.live_rows().to_pylist())
    look = follower.shard.frontiers

    async def look_then_compact(*, fresh: bool = True) -> tuple[int, int]:
        found = await look(fresh=fresh)
        s = harbour.stores
        other = await open_shard(s.consensus, s.objects, s.clock, s.rand, "clicks")
        await other.downgrade_since("compactor", 1, 95)
        await compact_once(other, s.objects, s.rand)
        return found

    follower.shard.frontiers = look_then_compact  # type: ignore[method-assign]
    follower.follow()
    rows = sorted(map(str, harbour.contents("clicks")))
    assert len(rows) == 11 and not any("k3" in row for row in rows)
    assert sorted(map(str, follower.operator.mirror.live_rows().to_pylist())) == rows


def test_the_threads_of_two_feeds_share_the_dead_letters(harbour: Any, tmp_path: Path) -> None:
    """Feeds call from threads of their own: two flushes at once would append the same letters against each other."""
    table = writer(harbour, "p.dead_letters", DEAD_LETTERS, tmp_path)
    dead = DeadLetters(table, ["topic/a", "topic/b"])
    plain, inside, most = table.append, 0, 0

    async def slow(*given: Any) -> bool:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0.02)
        inside -= 1
        return await plain(*given)

    table.append = slow  # type: ignore[method-assign,assignment]
    failures: list[BaseException] = []
    both = threading.Barrier(2)

    def feed(source: str) -> None:
        try:
            for n in range(1, 11):
                letter = {"topic": source, "partition": 0, "offset": n, "bytes": b"bad", TIME: n * 10, DIFF: 1}
                target = update_schema(DEAD_LETTERS)
                row = {f.name: [letter.get(f.name)] for f in target} | {"reason": ["broken"]}
                dead.take(source, n * 10 + 1, pa.table(row, schema=target))
                both.wait(30)
                dead.flush()
                both.wait(30)
        except BaseException as error:
            failures.append(error)
            both.abort()

    threads = [threading.Thread(target=feed, args=(source,)) for source in ("topic/a", "topic/b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert most == 1
    letters = harbour.contents("p.dead_letters")
    assert sorted((r["topic"], r["offset"]) for r in letters) == [
        (source, n) for source in ("topic/a", "topic/b") for n in range(1, 11)
    ]


def test_a_restart_with_or_without_its_mirror_goes_on_where_the_shard_is(harbour: Any, tmp_path: Path) -> None:
    topic = harbour.create_topic("clicks")
    expected = []
    for n, scratch in enumerate(("a", "a", "b", "a"), start=1):
        sink = clicks_sink(harbour, tmp_path / scratch)
        assert sink.tables[0].upper == (0 if n == 1 else (n - 1) * 10 + 1)
        row = {"click_id": f"k{n}", "product_id": n}
        harbour.produce(topic, [(b"k", row), (b"k", {"click_id": "same", "product_id": n})])
        harbour.mint("topic/clicks", n * 10, topic)
        sink.process(sink.latest())
        sink.tables[0].save()
        expected.append(row)
        assert harbour.contents("clicks") == [*expected, {"click_id": "same", "product_id": n}]


def test_dead_letters_that_a_crash_left_out_are_found_again(harbour: Any, tmp_path: Path) -> None:
    topic = harbour.create_topic("clicks")
    harbour.produce(topic, [(b"", b"bad1")])
    harbour.mint("topic/clicks", 100, topic)
    sink = clicks_sink(harbour, tmp_path / "1")
    sink._dead.flush = lambda: None  # type: ignore[union-attr,method-assign]  # the crash: table appended, letters not
    sink.process(101)
    assert harbour.upper("clicks") == 101
    assert harbour.upper("p.dead_letters") == 0
    harbour.produce(topic, [(b"", b"bad2")])
    harbour.mint("topic/clicks", 200, topic)
    again = clicks_sink(harbour, tmp_path / "2")
    again.process(201)
    assert [r["bytes"] for r in harbour.contents("p.dead_letters")] == [b"bad1", b"bad2"]


def test_the_end_of_a_batch_is_read_from_sparks_offset_log(tmp_path: Path) -> None:
    (tmp_path / "offsets").mkdir()
    (tmp_path / "offsets" / "7").write_text('v1\n{"batchWatermarkMs":0}\n{"ts": 1234}')
    assert planned_end(tmp_path, 7) == 1234
    assert planned_end(tmp_path, 8) is None
    (tmp_path / "offsets" / "8").write_text("v1\n{}\nnonsense")
    assert planned_end(tmp_path, 8) is None
