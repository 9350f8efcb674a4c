"""A table whose schema gained columns or wider types: its shard evolves, its mirror continues, peers are fenced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.spark.running import error_of, pipeline
from support.waiting import eventually
from tidemill.shards.read.read_handle import ShardReadHandle

CLICKS = 'def build(p):\n    p.table("clicks", p.topic("clicks", key="id", schema="{}"))\n'
OLD = CLICKS.format("id int, n int")
NEW = CLICKS.format("note string, id long, n long")


def test_a_table_that_gained_a_column_and_wider_types_goes_on_with_the_mirror_it_had(
    harbour: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = harbour.create_topic("clicks")
    with pipeline(harbour, tmp_path / "1", OLD):
        harbour.produce(topic, [(b"", {"id": n, "n": n}) for n in range(4)])
        harbour.mint("topic/clicks", 1000, topic)
        eventually(lambda: harbour.upper("clicks") == 1001)

    async def never(*_: Any, **__: Any) -> None:
        raise AssertionError("the mirror was made from contents, not taken over")

    with monkeypatch.context() as patched:
        patched.setattr(ShardReadHandle, "snapshot", never)
        with pipeline(harbour, tmp_path / "1", NEW):
            big = [{"id": 1, "n": 1 << 40, "note": "x"}, {"id": 2, "n": 2}, {"id": 3, "n": 3, "note": "y"}]
            harbour.produce(topic, [(b"", row) for row in big])
            harbour.mint("topic/clicks", 2000, topic)
            eventually(lambda: harbour.upper("clicks") == 2001)
            assert not error_of(harbour, "shard:clicks")
    before = [{"id": n, "n": n, "note": None} for n in range(4)]
    after = [before[0], {"id": 1, "n": 1 << 40, "note": "x"}, before[2], {"id": 3, "n": 3, "note": "y"}]
    assert harbour.contents("clicks", 1000) == before and harbour.contents("clicks") == after
    state = harbour.shard("clicks").state
    assert [(c.name, c.type) for c in state.schema.columns] == [("id", "int64"), ("n", "int64"), ("note", "string")]
    assert state.versions[0].upper == 1001
    written = sum(part.rows for part in state.batches[-1].parts)
    assert written == 4, "two updates; the row that is what it was is no change under the new version either"


def test_a_driver_with_the_file_of_before_is_fenced_says_so_and_goes_on_with_the_new_file(
    harbour: Any, tmp_path: Path
) -> None:
    topic = harbour.create_topic("clicks")
    with pipeline(harbour, tmp_path / "old", OLD):
        harbour.produce(topic, [(b"", {"id": 1, "n": 1})])
        harbour.mint("topic/clicks", 1000, topic)
        eventually(lambda: harbour.upper("clicks") == 1001)
        with pipeline(harbour, tmp_path / "new", NEW):
            eventually(lambda: harbour.shard("clicks").schema.version == 2)
            harbour.produce(topic, [(b"", {"id": 1, "n": 5, "note": "x"}), (b"", {"id": 2, "n": 2})])
            harbour.mint("topic/clicks", 2000, topic)
            eventually(lambda: harbour.upper("clicks") == 2001)
            want = [{"id": 1, "n": 5, "note": "x"}, {"id": 2, "n": 2, "note": None}]
            assert harbour.contents("clicks") == want
            eventually(lambda: "-note string, id int64→int32" in error_of(harbour, "shard:clicks"))
            assert "tidemill table drop clicks --force" in error_of(harbour, "shard:clicks")
    with pipeline(harbour, tmp_path / "old", NEW):
        harbour.produce(topic, [(b"", {"id": 2, "n": 3, "note": "z"})])
        harbour.mint("topic/clicks", 3000, topic)
        eventually(lambda: harbour.upper("clicks") == 3001)
    assert harbour.contents("clicks") == [want[0], {"id": 2, "n": 3, "note": "z"}]


def test_a_captured_table_that_was_copied_again_with_one_more_column_keeps_its_shard(
    harbour: Any, tmp_path: Path
) -> None:
    columns = [("id", "integer", 0), ("price", "numeric(6,2)", -1)]
    old = harbour.capture("shop", {"public.orders": columns})["public.orders"]
    shop = 'def build(p):\n    p.table("orders", p.capture("shop").table("orders"))\n'
    with pipeline(harbour, tmp_path / "1", shop):
        harbour.produce(old, [({"id": n}, {"id": n, "price": "1.50"}) for n in range(3)])
        harbour.mint("capture/shop", 1000, old)
        eventually(lambda: harbour.upper("orders") == 1001)
    more = [("id", "bigint", 0), ("price", "numeric(8,2)", -1), ("note", "text", -1)]
    new = harbour.capture_more("shop", {"public.orders": more})["public.orders"]
    with pipeline(harbour, tmp_path / "1", shop):
        rows = [{"id": 0, "price": "1.50", "note": None}, {"id": 1, "price": "123456.25", "note": "x"}]
        harbour.produce(new, [({"id": r["id"]}, r) for r in rows])
        harbour.mint("capture/shop", 2000, old, new)
        eventually(lambda: harbour.upper("orders") == 2001)
    found = harbour.contents("orders")
    assert [(r["id"], str(r["price"]), r["note"]) for r in found] == [(0, "1.50", None), (1, "123456.25", "x")]
    assert [r["id"] for r in harbour.contents("orders", 1000)] == [0, 1, 2]
