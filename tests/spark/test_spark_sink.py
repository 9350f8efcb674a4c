"""The sink on real stores and topics, without a JVM: exact tables, races, restarts, dead letters."""

from __future__ import annotations

import threading
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from support.spark.sinks import CLICKS, clicks_sink, dead_letters, shop_sink
from support.waiting import eventually
from tidemill.base.errors import UnavailableError
from tidemill.metastore.catalogue import TopicRow
from tidemill.shards.api import DIFF, TIME, ShardSchema
from tidemill.shards.compaction.compaction import FAN_IN, compact_once
from tidemill.shards.parts.schema import update_schema
from tidemill.shards.registry import open_shard
from tidemill.spark.decode.dead_letter_rows import DEAD_LETTERS, DeadLetter, Place, dead_letter_table
from tidemill.spark.ingest.dead_letters import DeadLetterWriter
from tidemill.spark.pipeline.streaming_query import planned_ends
from tidemill.spark.stored_letters import StoredLetters


def test_a_table_that_gets_nothing_moves_its_upper_at_its_pace_and_one_that_does_at_once(
    harbour: Any, tmp_path: Path
) -> None:
    topic = harbour.create_topic("clicks")
    sink = clicks_sink(harbour, tmp_path / "s", idle_move_s=3_600.0)
    for n in range(1, 6):
        harbour.mint("topic/clicks", n * 1000, topic)
        sink.process(sink.latest())
    assert (harbour.upper("clicks"), sink.seats.tables[0].won) == (1001, 1)
    assert sink.due_in_s is not None and sink.due_in_s > 3_000, "nobody asks for it again before its pace"
    harbour.produce(topic, [(b"a", {"click_id": "a", "product_id": 1})])
    harbour.mint("topic/clicks", 6000, topic)
    sink.process(sink.latest())
    assert harbour.upper("clicks") == 6001


def test_a_step_that_failed_and_is_read_again_up_to_less_loses_nothing(
    harbour: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A micro-batch that was planned before the failed step runs after it. Regression: it appended an interval that
    ended where the failed step did, with only its own records."""
    topic = harbour.create_topic("clicks")
    sink = clicks_sink(harbour, tmp_path / "s")
    harbour.produce(topic, [(b"a", {"click_id": "a", "product_id": 1})])
    harbour.mint("topic/clicks", 1000, topic)
    planned = sink.latest()
    harbour.produce(topic, [(b"b", {"click_id": "b", "product_id": 2})])
    harbour.mint("topic/clicks", 2000, topic)
    (table,) = sink.seats.tables

    async def away(updates: pa.Table) -> Any:
        raise UnavailableError("The bucket is away.")

    with monkeypatch.context() as patched:
        patched.setattr(table, "write", away)
        sink.advance()
    (seat,) = sink.seats._seats.values()
    assert harbour.upper("clicks") == 0 and seat.table.operator.source_frontier == 2001
    eventually(lambda: sink.due_in_s == 0)
    sink.advance_to(planned)
    assert harbour.upper("clicks") == 1001
    sink.advance()
    assert harbour.upper("clicks") == 2001 and [row["click_id"] for row in harbour.contents("clicks")] == ["a", "b"]


def test_whoever_watches_is_woken_by_a_new_time_by_the_end_of_every_round_and_of_a_large_step(
    harbour: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = harbour.create_topic("clicks")
    sink = clicks_sink(harbour, tmp_path / "s")
    changed = sink.seats.changed

    def woken() -> bool:
        was = changed.is_set()
        changed.clear()
        return was

    woken()
    harbour.produce(topic, [(b"a", {"click_id": "a", "product_id": 1})])
    harbour.mint("topic/clicks", 1000, topic)
    end = sink.latest()
    assert woken() and sink.due_in_s == 0, "a time is bound"
    sink.latest()
    assert not woken(), "nothing new is no news"

    def broken(*_: Any) -> None:
        raise UnavailableError("consensus is away.")

    with monkeypatch.context() as patched:
        patched.setattr(sink.steps, "run_round", broken)
        with pytest.raises(UnavailableError):
            sink.process(end)
    assert woken() and sink.due_in_s == 0, "a round that failed is tried again"
    sink.error = "consensus is away."
    sink.process(end)
    assert woken() and sink.due_in_s is None and harbour.upper("clicks") == 1001
    assert not sink.error, "a round that leaves nothing to do ends what was told, whoever did it"
    (seat,) = sink.seats.due_tables(end + 1)
    seat.aside = True
    monkeypatch.setattr(sink.steps, "_oversized_step", lambda *_: None)
    sink.steps._run_oversized(seat, None)  # type: ignore[arg-type]
    assert woken() and not seat.aside


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
    """Replace the topic by one of the same name with a new id, as a capture does for a re-created table."""
    harbour.portal.call(harbour.stores.catalogue.delete(TopicRow, topic.name))
    return harbour.create_topic(topic.name, kind="capture")


def test_a_stream_that_was_deleted_and_created_again_is_the_table_from_its_beginning_on(
    harbour: Any, tmp_path: Path
) -> None:
    old = harbour.create_topic("clicks")
    sink = clicks_sink(harbour, tmp_path / "s")
    harbour.produce(old, [(k.encode(), {"click_id": k, "product_id": 1}) for k in ("a", "b")])
    harbour.mint("topic/clicks", 10, old)
    sink.process(sink.latest())
    harbour.portal.call(harbour.stores.catalogue.delete(TopicRow, "clicks"))
    new = harbour.create_topic("clicks")
    harbour.produce(new, [(k.encode(), {"click_id": k, "product_id": 2}) for k in ("b", "c")])
    harbour.mint("topic/clicks", 20, old, new)
    sink.process(sink.latest())
    assert "starts over on a new topic: table=clicks" in str(sink.seats.failed["clicks"])
    assert harbour.upper("clicks") == 11, "its records are not passed over"
    again = clicks_sink(harbour, tmp_path / "s")
    again.process(again.latest())
    harbour.produce(new, [(b"d", {"click_id": "d", "product_id": 2})])
    harbour.mint("topic/clicks", 30, old, new)
    again.process(again.latest())
    assert [row["click_id"] for row in harbour.contents("clicks", 19)] == ["a", "b"]
    assert {row["click_id"]: row["product_id"] for row in harbour.contents("clicks", 29)} == {"b": 2, "c": 2}
    assert [row["click_id"] for row in harbour.contents("clicks")] == ["b", "c", "d"]


def test_what_was_written_into_a_table_before_its_stream_began_stays(harbour: Any, tmp_path: Path) -> None:
    """The table was filled by other means before a topic kept it: no earlier topic exists whose rows would have to be
    removed."""
    call, topic = harbour.portal.call, harbour.create_topic("clicks")
    call(harbour.stores.shard("clicks", CLICKS))
    shard = harbour.shard("clicks")
    old = [{"click_id": k, "product_id": 1, TIME: 5, DIFF: 1} for k in ("a", "b")]
    rows = pa.Table.from_pylist(old, update_schema(CLICKS))
    call(shard.compare_and_append(0, 6, [call(shard.write_part(rows))], ""))
    harbour.produce(topic, [(k.encode(), {"click_id": k, "product_id": 2}) for k in ("b", "c")])
    harbour.mint("topic/clicks", 20, topic)
    sink = clicks_sink(harbour, tmp_path / "s")
    sink.process(sink.latest())
    assert {row["click_id"]: row["product_id"] for row in harbour.contents("clicks")} == {"a": 1, "b": 2, "c": 2}


def test_a_captured_table_that_was_started_over_loses_what_is_not_in_its_new_copy(harbour: Any, tmp_path: Path) -> None:
    old = harbour.capture("shop", {"public.t": [("id", "integer", 0), ("v", "text", -1)]})["public.t"]
    sink = shop_sink(harbour, tmp_path / "s", ["t"])
    harbour.produce(old, [({"id": i}, {"id": i, "v": "old"}) for i in (1, 2, 3)])
    harbour.mint("capture/shop", 10, old)
    sink.process(sink.latest())
    new = start_over(harbour, old)
    harbour.produce(new, [({"id": i}, {"id": i, "v": v}) for i, v in ((2, "new"), (3, "old"))])
    harbour.mint("capture/shop", 20, old, new)
    sink.process(sink.latest())
    assert "starts over on a new topic: table=t" in str(sink.seats.failed["t"])
    assert harbour.upper("t") == 11, "nothing is appended past it from the old topic"
    # One process reads the new copy alone, another together with later records: the result is the same.
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


def test_m4302_idle_bindings_move_the_upper_without_a_part(harbour: Any, tmp_path: Path) -> None:
    topic = harbour.create_topic("clicks")
    sink = clicks_sink(harbour, tmp_path / "s")
    harbour.mint("topic/clicks", 5_000, topic)
    sink.process(sink.latest())
    assert harbour.upper("clicks") == 5_001
    assert not any(batch.parts for batch in harbour.shard("clicks").state.batches)
    assert harbour.upper("p.dead_letters") == 0, "no letters, no writes"


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
    assert (again.seats.tables[0].won, again.seats.tables[0].lost) == (0, 0)


def test_a_step_that_cannot_be_appended_is_held_once_however_often_it_is_tried(harbour: Any, tmp_path: Path) -> None:
    """The bucket is readable but not writable: the driver's memory does not grow with the retries."""
    topic = harbour.create_topic("clicks")
    harbour.produce(topic, [(b"%d" % n, {"click_id": str(n), "product_id": n}) for n in range(50)])
    harbour.mint("topic/clicks", 10, topic)
    sink = clicks_sink(harbour, tmp_path / "s")
    (table,) = sink.seats.tables
    append, tries = table.append, []

    async def refused(*_: Any) -> bool:
        tries.append(table.operator.stashed)
        raise UnavailableError("the bucket takes nothing.")

    table.append = refused  # type: ignore[method-assign]
    for _ in range(4):
        for seat in sink.seats._seats.values():
            seat.due_s = 0.0
        sink.process(sink.latest())
    assert tries == [50] * 4
    table.append = append  # type: ignore[method-assign]
    for seat in sink.seats._seats.values():
        seat.due_s = 0.0
    sink.process(sink.latest())
    assert len(harbour.contents("clicks")) == 50


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
    assert one.seats.tables[0].lost + two.seats.tables[0].lost > 0
    for sink in (one, two):
        assert sorted(map(str, sink.seats.tables[0].operator.mirror.live_rows().to_pylist())) == sorted(map(str, rows))
    assert len(harbour.contents("p.dead_letters")) == 12


def test_m4403_a_follower_whose_history_is_compacted_between_two_looks_starts_over(
    harbour: Any, tmp_path: Path
) -> None:
    """The merged batch, read from the old position, shows every live row as new and no deletion at all."""
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
    follower = one.seats.tables[0]
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


def letters(source: str, *offsets: int) -> pa.Table:
    return dead_letter_table([DeadLetter(source, 0, n, n, n * 10, "broken", b"bad") for n in offsets])


def test_threads_and_peers_that_put_the_same_letters_at_once_add_each_once(harbour: Any) -> None:
    """Feeds call from separate threads, identical drivers from separate processes."""
    writers = [dead_letters(harbour), dead_letters(harbour)]
    failures: list[BaseException] = []
    both = threading.Barrier(4)

    def put(dead: DeadLetterWriter, source: str) -> None:
        try:
            for n in range(1, 9):
                both.wait(30)
                dead.put(letters(source, n, n + 1))
        except BaseException as error:
            failures.append(error)
            both.abort()

    threads = [threading.Thread(target=put, args=(w, s)) for w in writers for s in ("topic/a", "topic/b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    found = harbour.contents("p.dead_letters")
    assert sorted((r["topic"], r["offset"]) for r in found) == [
        (source, n) for source in ("topic/a", "topic/b") for n in range(1, 10)
    ]
    assert sum(w.total for w in writers) == 18


def test_a_restart_with_or_without_its_mirror_goes_on_where_the_shard_is(harbour: Any, tmp_path: Path) -> None:
    topic = harbour.create_topic("clicks")
    expected = []
    for n, scratch in enumerate(("a", "a", "b", "a"), start=1):
        sink = clicks_sink(harbour, tmp_path / scratch)
        assert sink.seats.tables[0].upper == (0 if n == 1 else (n - 1) * 10 + 1)
        row = {"click_id": f"k{n}", "product_id": n}
        harbour.produce(topic, [(b"k", row), (b"k", {"click_id": "same", "product_id": n})])
        harbour.mint("topic/clicks", n * 10, topic)
        sink.process(sink.latest())
        sink.seats.tables[0].save()
        expected.append(row)
        assert harbour.contents("clicks") == [*expected, {"click_id": "same", "product_id": n}]


def test_a_crash_between_the_letters_and_the_table_adds_no_letter_twice(harbour: Any, tmp_path: Path) -> None:
    topic = harbour.create_topic("clicks")
    harbour.produce(topic, [(b"", b"bad1")])
    harbour.mint("topic/clicks", 100, topic)
    sink = clicks_sink(harbour, tmp_path / "1")

    async def crash(*_: Any) -> bool:
        raise RuntimeError("killed here")

    sink.seats.tables[0].append = crash  # type: ignore[method-assign,assignment]
    sink.process(101)
    assert "killed here" in str(sink.seats.failed["clicks"])
    assert harbour.upper("clicks") == 0
    assert [r["bytes"] for r in harbour.contents("p.dead_letters")] == [b"bad1"]
    harbour.produce(topic, [(b"", b"bad2")])
    harbour.mint("topic/clicks", 200, topic)
    clicks_sink(harbour, tmp_path / "2").process(201)
    assert [r["bytes"] for r in harbour.contents("p.dead_letters")] == [b"bad1", b"bad2"]
    assert harbour.upper("clicks") == 201


def test_a_later_letter_replaces_the_one_at_its_place_once_for_all_writers(harbour: Any) -> None:
    def at(time_ms: int, *offsets: int) -> pa.Table:
        return dead_letter_table([DeadLetter("t", 0, n, n, time_ms, f"at {time_ms}", b"bad") for n in offsets])

    mine, theirs = dead_letters(harbour), dead_letters(harbour)
    mine.put(at(10, 1, 2, 3))
    theirs.put(at(20, 2, 4))  # the topic was created again
    mine.put(at(20, 2, 4))
    mine.put(at(10, 1, 2))  # a step that is repeated
    assert (mine.total, theirs.total) == (3, 2)
    found = [(row["offset"], row["reason"]) for row in harbour.contents("p.dead_letters")]
    assert found == [(1, "at 10"), (2, "at 20"), (3, "at 10"), (4, "at 20")]
    later = dead_letters(harbour)
    later.put(at(20, 4, 2))
    later.put(at(30, 2))
    assert later.total == 1
    assert [row["reason"] for row in harbour.contents("p.dead_letters") if row["offset"] == 2] == ["at 30"]


def test_a_dead_letter_shard_of_an_earlier_make_gets_the_columns_of_this_one_while_it_is_written(harbour: Any) -> None:
    s = harbour.stores
    schemas = [ShardSchema(DEAD_LETTERS.columns[:6], DEAD_LETTERS.key), DEAD_LETTERS]

    def opened() -> Any:
        return harbour.portal.call(s.shard("p.dead_letters", schemas.pop(0)))

    mine = DeadLetterWriter(harbour.portal, opened, s.rand)
    mine.open()
    theirs = DeadLetterWriter(
        harbour.portal, lambda: harbour.portal.call(s.shard("p.dead_letters", DEAD_LETTERS)), s.rand
    )
    theirs.put(letters("t", 4))
    mine.put(letters("t", 4, 5))
    found = harbour.contents("p.dead_letters")
    assert [(r["offset"], r["reason"], r["table"]) for r in found] == [(4, "broken", ""), (5, "broken", "")]
    assert (theirs.total, mine.total, schemas) == (1, 1, [])


def test_a_dead_letter_shard_that_is_dropped_while_its_pipeline_runs_is_created_again(harbour: Any) -> None:
    mine = dead_letters(harbour)
    mine.put(letters("t", 4))
    harbour.drop_shard("p.dead_letters")
    mine.put(letters("t", 4, 5))
    mine.put(letters("t", 4, 6))
    assert [row["offset"] for row in harbour.contents("p.dead_letters")] == [4, 5, 6]


@pytest.mark.parametrize("merged", [False, True])
def test_a_letter_that_a_replay_removed_is_stored_again_if_its_record_fails_again(harbour: Any, merged: bool) -> None:
    # A table with a stricter expectation, which is added to the pipeline, reads the same records.
    s, mine, peer = harbour.stores, dead_letters(harbour), dead_letters(harbour)

    def stored() -> list[int]:
        return [row["offset"] for row in harbour.contents("p.dead_letters") if row["topic"] == "t"]

    mine.put(letters("t", 4, 5))
    peer.put(letters("t", 4))
    shard = harbour.shard("p.dead_letters")
    assert StoredLetters(harbour.portal, shard, s.rand).remove({Place("t", 0, 4)}) == 1
    assert stored() == [5]
    if merged:  # one batch with the letter, its removal, and the uppers of both writers
        for n in range(2, FAN_IN):
            dead_letters(harbour).put(letters("u", n))
        assert harbour.portal.call(compact_once(shard, s.objects, s.rand))
        assert len(harbour.portal.call(shard.batches(0))) == 1
    for writer, total in ((mine, 1), (mine, 0), (peer, 0), (dead_letters(harbour), 0)):
        before = writer.total
        writer.put(letters("t", 4, 5))
        assert writer.total - before == total
        assert stored() == [4, 5]


def test_the_ends_of_a_batch_are_read_from_sparks_offset_log(tmp_path: Path) -> None:
    (tmp_path / "offsets").mkdir()
    (tmp_path / "offsets" / "7").write_text('v1\n{"batchWatermarkMs":0}\n{"topic/t": 1234, "capture/c": 0}')
    assert planned_ends(tmp_path, 7) == {"topic/t": 1234, "capture/c": 0}
    assert planned_ends(tmp_path, 8) == {}
    (tmp_path / "offsets" / "8").write_text("v1\n{}\nnonsense")
    assert planned_ends(tmp_path, 8) == {}
