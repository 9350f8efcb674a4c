"""Blocks with records of several partitions: the same commands, letters and stop as of each partition alone."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tidemill.shards.api import TIME, Column
from tidemill.spark.decode.records import Records, Slice, cut_blocks
from tidemill.spark.ingest.fetch_decode import Decoded, decode_block
from tidemill.spark.ingest.sources import TopicFeed
from tidemill.spark.merge.commands import filter_commands, join_commands, times_of
from tidemill.spark.types import stream_schema
from tidemill.topics.batch import Record, encode_batch

OLD = (Column("k", "string"), Column("n", "int32"))
NEW = (Column("k", "string"), Column("n", "int64"), Column("x", "int32", "5"))
DECLARED = TopicFeed("t", "t", 3, False, stream_schema("k string, n long", "k"))
CAPTURED = TopicFeed("t", "t", 3, True, stream_schema("k string, n long, x int", "k"), "public.t", (OLD, NEW))
KINDS = ("good", "bad", "gone", "keyless", "truncate", "other columns")
Batch = tuple[list[str], bool]
"""Kinds of the records of a batch, and whether it is torn."""


def record(number: int, kind: str, version: int, captured: bool) -> Record:
    value: dict[str, Any] | str | None = None
    if kind in ("good", "other columns"):
        value = {"k": f"k{number % 7}", "n": number, **({"x": number} if version > 1 else {})}
        value |= {"more": 1} if kind == "other columns" else {}
    elif kind == "bad":
        value = "{"
    text = value if isinstance(value, str) or value is None else json.dumps(value, separators=(",", ":"))
    key = None if kind in ("keyless", "truncate") else f"k{number % 7}"
    named = json.dumps({"k": key}, separators=(",", ":")) if captured and key is not None else key
    operation = b"truncate" if kind == "truncate" else b"x"
    headers = (("tm.pos", b"1_0"), ("tm.op", operation), ("tm.xid", b"1"))
    more = (("tm.version", b"%d" % version),) if version > 1 else ()
    return Record(named.encode() if named else None, text.encode() if text is not None else None, headers + more, 0, 0)


def slices_of(partitions: list[list[Batch]], versions: list[int], captured: bool) -> list[Any]:
    """Slices and batches: the first and the last offset of each partition are outside its slice. A partition has
    version 1 up to the batch whose number `versions` gives, and then version 2."""
    out = []
    for partition, batches in enumerate(partitions):
        encoded, offset = [], 0
        for number, (kinds, torn) in enumerate(batches):
            version = 2 if captured and number >= versions[partition % len(versions)] else 1
            rows = [record(offset + n, kind, version, captured) for n, kind in enumerate(kinds)]
            data = encode_batch(rows, base_offset=offset)
            encoded.append(data[:-3] if torn else data)
            offset += len(kinds)
        if offset > 3:
            middle = 1 + (offset - 1) // 2
            ends = (middle, offset - 1)
            out.append((Slice("t", "t", partition, 1, offset - 1, ends, (5 + partition, 9)), encoded, ()))
    return out


def joined(feed: TopicFeed, parts: list[Decoded]) -> tuple[list[Any], list[Any], list[Any], Any]:
    """Return the result of a step, in an order that does not depend on the cuts between its blocks."""
    stop = min((part.stop for part in parts if part.stop is not None), default=None)
    commands = join_commands(feed.schema, [part.commands for part in parts])
    dead = pa.concat_tables([part.dead for part in parts]).to_pylist() if parts else []
    if stop is not None:
        commands = filter_commands(commands, times_of(commands) < stop.time_ms)
        dead = [row for row in dead if row[TIME] < stop.time_ms]
    rows = sorted(commands.rows.to_pylist(), key=lambda row: (row["_partition"], row["_order"]))
    return rows, sorted(commands.truncates), sorted(map(str, dead)), stop


@settings(max_examples=150, deadline=None)
@given(
    feed=st.sampled_from([DECLARED, CAPTURED]),
    partitions=st.lists(
        st.lists(
            st.tuples(
                st.one_of(
                    st.lists(st.sampled_from(KINDS), min_size=1, max_size=6),
                    st.just(["good"] * 70),  # enough to be read by columns
                ),
                st.sampled_from([False] * 8 + [True]),
            ),
            max_size=4,
        ),
        max_size=4,
    ),
    versions=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    block_records=st.sampled_from([3, 50, 20_000]),
)
@example(CAPTURED, [[(["good"] * 70, False)], [(["good"] * 70, False)]], [0, 9], 20_000)
@example(CAPTURED, [[(["good", "other columns", "good", "good"], False)], [(["good"] * 5, False)]], [9], 20_000)
@example(DECLARED, [[(["good"] * 4, True)], [(["good"] * 5, False)], [(["bad"] * 5, True)]], [9], 20_000)
def test_a_block_of_several_partitions_is_read_as_each_partition_alone(
    feed: TopicFeed, partitions: list[list[Batch]], versions: list[int], block_records: int
) -> None:
    slices = slices_of(partitions, versions, feed.captured)
    together = [decode_block(feed, block) for block in cut_blocks(slices, block_records=block_records)]
    alone = [decode_block(feed, block) for one in slices for block in cut_blocks([one])]
    assert joined(feed, together) == joined(feed, alone)


def test_a_small_step_is_one_block_and_a_part_of_it_has_its_letters() -> None:
    good: list[Batch] = [(["good"] * 9, False)]
    slices = slices_of([good, [*good, (["good"] * 9, True)], good], [9], captured=False)
    (block,) = cut_blocks(slices)
    assert block.partitions is not None
    parts = {part.partition: part for part in block.by_partition()}
    assert {number: (len(part), len(part.unread)) for number, part in parts.items()} == {
        0: (7, 0),
        1: (8, 1),
        2: (7, 0),
    }


def test_records_of_one_partition_are_not_split() -> None:
    slices = slices_of([[(["good"] * 9, False)] * 3], [9], captured=False)
    (block,) = cut_blocks(slices)
    assert isinstance(block, Records) and block.partitions is None and block.by_partition() == [block]


def test_a_deletion_is_read_under_its_own_version_between_partitions_of_an_earlier_one() -> None:
    """A key of the newer version is beyond the earlier one's type: under that it would be a dead letter."""
    known = ((Column("k", "int32"), Column("n", "int64")), (Column("k", "int64"), Column("n", "int64")))
    feed = TopicFeed("t", "t", 3, True, stream_schema("k long, n long", "k"), "public.t", known)

    def gone(key: int, version: int) -> Record:
        headers = (("tm.pos", b"1_0"), ("tm.op", b"d"), ("tm.xid", b"1"))
        more = (("tm.version", b"%d" % version),) if version > 1 else ()
        return Record(json.dumps({"k": key}).encode(), None, headers + more, 0, 0)

    partitions = [[gone(n, 1) for n in range(9)], [gone(1 << 40, 2)], [gone(n, 1) for n in range(9, 90)]]
    slices: list[Any] = [
        (Slice("t", "t", number, 0, len(rows), (len(rows),), (5,)), [encode_batch(rows, base_offset=0)], ())
        for number, rows in enumerate(partitions)
    ]
    (block,) = cut_blocks(slices)
    found = decode_block(feed, block)
    assert found.stop is None and not found.dead.num_rows
    assert sorted(found.commands.rows.column("k").to_pylist()) == [*range(90), 1 << 40]
