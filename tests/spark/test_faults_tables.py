"""Faults of records, values, schemas and tables in a running pipeline: each ends its own unit and nothing larger."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import crc32c
import pytest

from support.spark.running import error_of, mark, pipeline
from support.waiting import eventually
from tidemill.cli.verify.tables import poisoned_keys
from tidemill.topics.batch import Record, encode_batch

CLICKS = 'p.table("clicks", p.topic("clicks", key="click_id", schema="click_id string, n long, at timestamp"))'
TABLES = {"public.orders": [("id", "integer", 0), ("price", "numeric(6,2)", -1), ("at", "timestamp", -1)]}
SHOP = """
def build(p):
    p.table("orders", p.capture("shop").table("orders"))
    p.table("others", p.capture("shop").table("others"))
"""


POISON = [
    b'{"click_id":"x","more":' + b"[" * 200_000,
    b'{"click_id":"x","at":"9999-12-31T23:59:59.999999-14:00"}',
    b'{"click_id":"x","n":9223372036854775808}',
    b'{"click_id":"\xff\xfe"}',
    b"",
]


def test_f301_a_record_that_cannot_be_read_is_a_dead_letter_and_the_pipeline_goes_on(
    harbour: Any, tmp_path: Path
) -> None:
    topic = harbour.create_topic("clicks")
    with pipeline(harbour, tmp_path, f"def build(p):\n    {CLICKS}\n"):
        for n, poison in enumerate(POISON, start=1):
            harbour.produce(topic, [(b"a", {"click_id": f"k{n}"}), (b"x", poison), (b"b", {"click_id": f"m{n}"})])
            harbour.mint("topic/clicks", n * 1000, topic)
        eventually(lambda: harbour.upper("clicks") == len(POISON) * 1000 + 1)
        assert not error_of(harbour, "shard:clicks")
    assert len(harbour.contents("clicks")) == 2 * len(POISON)
    letters = harbour.contents("p.dead_letters")
    assert sorted((r["topic"], r["offset"]) for r in letters) == [("clicks", 3 * n + 1) for n in range(len(POISON))]
    assert all(r["reason"] and len(r["bytes"]) <= 64 << 10 for r in letters)


def forged(whole: bytes, at: int, with_bytes: bytes) -> bytes:
    """A batch with other contents under a right checksum."""
    out = bytearray(whole)
    out[at : at + len(with_bytes)] = with_bytes
    out[17:21] = crc32c.crc32c(bytes(out[21:])).to_bytes(4, "big")
    return bytes(out)


def test_f302_a_batch_that_cannot_be_read_is_one_dead_letter_for_its_range(
    harbour: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buckets may hold such batches from the time before the check; here they bypass it."""
    topic = harbour.create_topic("clicks")
    whole = encode_batch([Record(b"k", b'{"click_id":"a"}', (), 0, 0) for _ in range(4)])
    junk = forged(whole, 61, bytes((i * 37) & 0xFF for i in range(len(whole) - 61)))
    deltas = forged(whole, 64, b"\xff\xff\xff\xff\x0f")
    from tidemill.spark.ingest import fetch_decode

    plain = fetch_decode.read_batches
    poison = {4: junk, 8: deltas}

    async def read(objects: Any, groups: Any, *more: Any) -> Any:
        found = await plain(objects, groups, *more)
        swapped = []
        for refs, batches in zip(groups, found, strict=True):
            row = []
            for ref, batch in zip(refs, batches, strict=True):
                bad = poison.get(ref.base_offset)
                row.append(batch if bad is None else ref.base_offset.to_bytes(8, "big") + bad[8:])
            swapped.append(row)
        return swapped

    monkeypatch.setattr(fetch_decode, "read_batches", read)
    with pipeline(harbour, tmp_path, f"def build(p):\n    {CLICKS}\n"):
        for n in range(4):
            harbour.produce(topic, [(b"k", {"click_id": f"{n}.{i}"}) for i in range(4)])
        harbour.mint("topic/clicks", 1000, topic)
        eventually(lambda: harbour.upper("clicks") == 1001)
    assert [r["click_id"][0] for r in harbour.contents("clicks")] == ["0"] * 4 + ["3"] * 4
    letters = harbour.contents("p.dead_letters")
    assert sorted((r["offset"], r["last_offset"]) for r in letters) == [(4, 7), (8, 11)]


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("price", "NaN"),
        ("price", "12345.67"),
        ("at", "294276-12-31 00:00:00"),
        ("at", "tomorrow"),
        ("id", 3_000_000_000),
    ],
)
def test_f303_a_value_that_its_column_cannot_hold_is_a_dead_letter_and_a_later_good_one_heals_it(
    harbour: Any, tmp_path: Path, column: str, value: Any
) -> None:
    topics = harbour.capture("shop", {**TABLES, "public.others": TABLES["public.orders"]})
    orders, others = topics["public.orders"], topics["public.others"]
    good = {"id": 1, "price": "1.50", "at": "2026-01-02 03:04:05"}
    bad = good | {column: value}

    def commit(time_ms: int, *rows: Any) -> list[Any]:
        harbour.produce(orders, [({"id": row["id"]}, row) for row in rows])
        harbour.produce(others, [({"id": time_ms}, good | {"id": time_ms})])
        harbour.mint("capture/shop", time_ms, orders, others)
        eventually(lambda: harbour.upper("orders") == harbour.upper("others") == time_ms + 1)
        return [row["id"] for row in harbour.contents("orders")]

    with pipeline(harbour, tmp_path, SHOP):
        assert commit(1000, good, good | {"id": 2}) == [1, 2]
        # The old value of the key does not stay as if it were current. A key that no column holds was no row before.
        assert commit(2000, bad) == ([1, 2] if column == "id" else [2])
        assert commit(3000, good) == [1, 2]
        assert not error_of(harbour, "shard:orders")
    (letter,) = harbour.contents("p.dead_letters")
    assert (letter["table"], letter["offset"], letter["partition"]) == ("public.orders", 2, 0)
    assert f"column={column}" in letter["reason"] and "table=public.orders" in letter["reason"]
    assert len(harbour.contents("others")) == 3
    keys = harbour.portal.call(
        poisoned_keys(harbour.shard("p.dead_letters"), "public.orders", harbour.shard("orders").schema)
    )
    assert keys == ({} if column == "id" else {(1,): letter["reason"]})


def test_values_that_only_postgres_writes_are_rows_like_others(harbour: Any, tmp_path: Path) -> None:
    tables = {"public.t": [("id", "integer", 0), ("d", "date", -1), ("at", "timestamp with time zone", -1)]}
    topic = harbour.capture("shop", tables)["public.t"]
    rows = [("infinity", "-infinity"), ("0044-03-15 BC", "0044-03-15 00:00:00+00 BC"), ("5874897-12-31", "infinity")]
    with pipeline(harbour, tmp_path, 'def build(p):\n    p.table("t", p.capture("shop").table("t"))\n'):
        harbour.produce(topic, [({"id": n}, {"id": n, "d": d, "at": at}) for n, (d, at) in enumerate(rows)])
        harbour.mint("capture/shop", 1000, topic)
        eventually(lambda: harbour.upper("t") == 1001)
    assert harbour.portal.call(harbour.shard("t").snapshot(1000)).num_rows == 3
    assert harbour.upper("p.dead_letters") == 0


def test_f304_a_record_with_other_columns_stops_its_table_before_its_time_and_recopying_heals_it(
    harbour: Any, tmp_path: Path
) -> None:
    topics = harbour.capture("shop", {**TABLES, "public.others": TABLES["public.orders"]})
    orders, others = topics["public.orders"], topics["public.others"]
    row = {"price": "1.50", "at": None}
    with pipeline(harbour, tmp_path, SHOP):
        for n in range(1, 6):
            renamed = {"id": n, "cost": "1.50", "at": None}
            harbour.produce(orders, [({"id": n}, renamed if n >= 4 else {"id": n, **row})])
            harbour.produce(others, [({"id": n}, {"id": n, **row})])
            harbour.mint("capture/shop", n * 1000, orders, others)
        eventually(lambda: harbour.upper("others") == 5001)
        eventually(lambda: "columns differ" in error_of(harbour, "shard:orders"))
        found = mark(harbour, "shard:orders")
        assert found is not None and found.parked
        assert found.position == harbour.upper("orders") == 4000, "everything before the transaction, nothing of it"
        assert "difference=[+cost -price]" in found.error and "offset=3" in found.error
        assert "tidemill capture resnapshot public.orders" in found.error
        assert [r["id"] for r in harbour.contents("orders")] == [1, 2, 3]
        # With a new shard, and a copy of the table on a new topic, it flows again without a restart.
        new = harbour.capture_more("shop", {"public.orders": [("id", "integer", 0), ("cost", "numeric(6,2)", -1),
                                                              ("at", "timestamp", -1)]})["public.orders"]  # fmt: skip
        harbour.produce(new, [({"id": n}, {"id": n, "cost": "2.00", "at": None}) for n in range(1, 6)])
        harbour.mint("capture/shop", 6000, orders, others, new)
        eventually(lambda: "exists with another schema" in error_of(harbour, "shard:orders"))
        harbour.drop_shard("orders")
        eventually(lambda: harbour.upper("orders") == 6001)
        assert [sorted(r) for r in harbour.contents("orders")] == [["at", "cost", "id"]] * 5
        eventually(lambda: not error_of(harbour, "shard:orders"))
    assert harbour.upper("p.dead_letters") == 0


def test_f308_a_shard_with_another_schema_parks_its_table_and_nothing_else(harbour: Any, tmp_path: Path) -> None:
    from tidemill.spark.types import stream_schema

    harbour.portal.call(harbour.stores.shard("clicks", stream_schema("click_id string, n string", "click_id")))
    topic = harbour.create_topic("clicks")
    more = CLICKS.replace('"clicks", p', '"twin", p')
    with pipeline(harbour, tmp_path, f"def build(p):\n    {CLICKS}\n    {more}\n"):
        harbour.produce(topic, [(b"k", {"click_id": "a", "n": 1})])
        harbour.mint("topic/clicks", 1000, topic)
        eventually(lambda: harbour.upper("twin") == 1001)
        eventually(lambda: "another schema" in error_of(harbour, "shard:clicks"))
        found = mark(harbour, "shard:clicks")
        assert found is not None and found.parked and "+at timestamp" in found.error


def test_f309_a_scratch_directory_that_cannot_be_written_is_told_and_heals(
    harbour: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file replaces the directory. Work without scratch continues; other work waits and resumes without a restart."""
    monkeypatch.setattr("tidemill.spark.merge.mirror.SPILL_BYTES", 1 << 20)
    topic = harbour.create_topic("clicks")
    with pipeline(harbour, tmp_path, f"def build(p):\n    {CLICKS}\n") as runner:
        harbour.produce(topic, [(b"k", {"click_id": "a"})])
        harbour.mint("topic/clicks", 1000, topic)
        eventually(lambda: harbour.upper("clicks") == 1001)
        mirrors = runner.mirror_dir("clicks").parent
        shutil.rmtree(mirrors, ignore_errors=True)
        mirrors.write_text("in the way")
        rows = [(b"k", {"click_id": f"k{n}"}) for n in range(20_000)]
        for _ in range(6):
            harbour.produce(topic, rows)
        rows = [(b"k", {"click_id": f"m{n}"}) for n in range(110_000)]  # one time, more than a step: it is spilled
        for at in range(0, len(rows), 20_000):
            harbour.produce(topic, rows[at : at + 20_000])
        harbour.mint("topic/clicks", 2000, topic)
        eventually(lambda: "Error" in error_of(harbour, "shard:clicks"))
        mirrors.unlink()
        eventually(lambda: harbour.upper("clicks") == 2001)
        eventually(lambda: not error_of(harbour, "shard:clicks"))
    assert len(harbour.contents("clicks")) == 130_001


def test_an_exception_of_no_known_type_in_one_table_leaves_the_others_alone(harbour: Any, tmp_path: Path) -> None:
    class Panic(BaseException):
        """An exception like those of native code."""

    topics = harbour.capture("shop", {**TABLES, "public.others": TABLES["public.orders"]})
    orders, others = topics["public.orders"], topics["public.others"]
    broken = threading.Event()
    broken.set()
    with pipeline(harbour, tmp_path, SHOP) as runner:
        eventually(lambda: len(runner.tables()) == 2)
        writer = next(t for t in runner.tables() if t.name == "orders")
        drain = writer.operator.drain

        def panics() -> Any:
            if broken.is_set():
                raise Panic("inside")
            return drain()

        writer.operator.drain = panics  # type: ignore[method-assign]
        for topic in (orders, others):
            harbour.produce(topic, [({"id": 1}, {"id": 1, "price": None, "at": None})])
        harbour.mint("capture/shop", 1000, orders, others)
        eventually(lambda: harbour.upper("others") == 1001)
        eventually(lambda: harbour.upper("orders") == 1001)  # it was reopened, and works
        eventually(lambda: not error_of(harbour, "shard:orders"))
