"""Blocks of a step that helpers read concurrently: the same commands and letters, in the same order."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tidemill.spark.decode import records
from tidemill.spark.decode.records import Slice, SliceDescriptor
from tidemill.spark.ingest import fetch_decode
from tidemill.spark.ingest.fetch_decode import BLOCKS_IN_FLIGHT, MIN_PARALLEL_RECORDS, _map_concurrently, decode
from tidemill.spark.ingest.sources import TopicFeed
from tidemill.spark.types import stream_schema
from tidemill.topics.api import BatchRef
from tidemill.topics.batch import Record, encode_batch

FEED = TopicFeed("t", "t", 3, False, stream_schema("k string, n long", "k"))
CAPTURED = TopicFeed("t", "t", 3, True, FEED.schema, "public.t")
KINDS = ("good", "bad", "gone", "keyless", "null key", "truncate", "other columns")
BOUND_S = 30.0


def record(number: int, kind: str, captured: bool) -> Record:
    values = {
        "good": {"k": f"k{number % 7}", "n": number},
        "null key": {"k": None, "n": 1},
        "other columns": {"k": f"k{number % 7}", "n": number, "more": 1},
    }
    value = "{" if kind == "bad" else json.dumps(values[kind]) if kind in values else None
    key = None if kind in ("keyless", "truncate") else f"k{number % 7}"
    headers = (("tm.op", b"truncate"),) if kind == "truncate" else ()
    named = json.dumps({"k": key}) if captured and key is not None else key
    return Record(named.encode() if named else None, value.encode() if value is not None else None, headers, 0, 0)


def descriptors_of(
    kinds: list[list[list[str]]], torn: int, captured: bool = False
) -> tuple[list[SliceDescriptor], list[list[bytes]]]:
    """Partitions of batches of records; batch `torn`, if there is one, cannot be read."""
    descriptors, data, number = [], [], 0
    for partition, batches in enumerate(kinds):
        refs, mine, offset = [], [], 0
        for batch in batches:
            rows = [record(offset + n, kind, captured) for n, kind in enumerate(batch)]
            encoded = encode_batch(rows, base_offset=offset)
            mine.append(encoded[:-3] if number == torn else encoded)
            refs.append(BatchRef("o", 0, len(encoded), offset, len(batch), 1))
            offset, number = offset + len(batch), number + 1
        if offset:
            ends, times = ((offset // 2, offset), (5, 6)) if offset > 1 else ((offset,), (6,))
            descriptors.append(SliceDescriptor(Slice("t", "t", partition, 0, offset, ends, times), tuple(refs)))
            data.append(mine)
    return descriptors, data


@settings(max_examples=80, deadline=None)
@given(
    feed=st.sampled_from([FEED, CAPTURED]),
    kinds=st.lists(st.lists(st.lists(st.sampled_from(KINDS), min_size=1, max_size=9), max_size=5), max_size=3),
    torn=st.integers(-1, 6),
)
@example(feed=CAPTURED, kinds=[[["good", "truncate", "good", "other columns", "good"]]], torn=-1)
@example(feed=CAPTURED, kinds=[[["good"] * 4, ["good"] * 4], [["truncate"] * 5]], torn=1)
def test_what_helpers_read_is_what_one_reads_alone(feed: TopicFeed, kinds: list[list[list[str]]], torn: int) -> None:
    descriptors, data = descriptors_of(kinds, torn, feed.captured)
    with ThreadPoolExecutor(3) as helpers, pytest.MonkeyPatch.context() as patched:
        patched.setattr(fetch_decode, "MIN_PARALLEL_RECORDS", 0)
        patched.setattr(fetch_decode, "cut_blocks", lambda *args: records.cut_blocks(*args, block_records=4))
        alone, together = decode(feed, descriptors, data), decode(feed, descriptors, data, helpers)
    assert together.commands.rows.equals(alone.commands.rows)
    assert together.commands.truncates == alone.commands.truncates
    assert together.dead.equals(alone.dead)
    assert together.stop == alone.stop


def test_the_property_has_stops_and_truncations_to_compare() -> None:
    kinds = ["good", "truncate", "good", "good", "other columns", "good"]
    stopped = decode(CAPTURED, *descriptors_of([[kinds]], -1, True))
    assert stopped.stop is not None and len(stopped.commands.truncates) == 1 and len(stopped.commands) == 3


def test_a_few_records_are_read_by_who_asks() -> None:
    class Nobody(ThreadPoolExecutor):
        def submit(self, *_: Any, **__: Any) -> Any:
            raise AssertionError("handed over")

    descriptors, data = descriptors_of([[["good"] * 9] * 3], -1)
    assert len(decode(FEED, descriptors, data, Nobody(1)).commands) == 27
    many = descriptors_of([[["good"] * 1_000] * (MIN_PARALLEL_RECORDS // 1_000)], -1)
    with pytest.raises(AssertionError, match="handed over"):
        decode(FEED, *many, Nobody(1))


def test_blocks_are_cut_only_as_they_are_read() -> None:
    """A step of any length holds only a few blocks at a time."""
    drawn: list[int] = []
    may = [threading.Event() for _ in range(3 * BLOCKS_IN_FLIGHT)]  # one each: a permit for any could go to a later one

    def items() -> Iterator[int]:
        for n in range(3 * BLOCKS_IN_FLIGHT):
            drawn.append(n)
            yield n

    def call(n: int) -> int:
        assert may[n].wait(BOUND_S)
        return -n

    with ThreadPoolExecutor(2) as helpers:
        found = _map_concurrently(helpers, call, items())
        for n in range(3 * BLOCKS_IN_FLIGHT):
            may[n].set()
            assert next(found) == -n
            assert len(drawn) <= n + BLOCKS_IN_FLIGHT
        assert next(found, None) is None


def test_what_reading_raises_is_raised() -> None:
    def call(n: int) -> int:
        if n == 2:
            raise MemoryError("no more")
        return n

    with ThreadPoolExecutor(2) as helpers:
        found = _map_concurrently(helpers, call, iter(range(9)))
        assert (next(found), next(found)) == (0, 1)
        with pytest.raises(MemoryError):
            next(found)
