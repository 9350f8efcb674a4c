from __future__ import annotations

import crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.topics.world import batch
from tidemill.base.errors import CorruptError
from tidemill.metastore.rows.l1 import NO_TIMESTAMP, l1_key
from tidemill.topics.batch import parse_header, patch_base_offset, split_batches
from tidemill.topics.l1 import builder, format
from tidemill.topics.l1.builder import ObjectBuilder
from tidemill.topics.l1.format import (
    Footer,
    L1Region,
    created_ms,
    decode_index,
    encode_footer,
    encode_index,
    object_id,
    parse_tail,
)

TIMES = st.integers(-(2**63), 2**63 - 1)
KEY = l1_key("id", object_id(1, "n"))


@st.composite
def entries(draw: st.DrawFn) -> list[tuple[int, int, int, int]]:
    """Return batches of one region, with gaps between some of them."""
    at = draw(st.integers(0, 2**50))
    found = []
    for gap, count, size, timestamp in draw(
        st.lists(st.tuples(st.integers(0, 3), st.integers(1, 2**31), st.integers(61, 2**27), TIMES), max_size=30)
    ):
        found.append((at + gap, at + gap + count, size, timestamp))
        at += gap + count
    return found


def region_of(batches: list[tuple[int, int, int, int]]) -> L1Region:
    base, end = (batches[0][0], batches[-1][1]) if batches else (0, 1)
    size = sum(each[2] for each in batches)
    return L1Region(0, 0, size, base, end - 1, 0, len(batches), size, 0)


@given(entries())
def test_an_index_gives_every_batch_back(batches: list[tuple[int, int, int, int]]) -> None:
    index = decode_index(encode_index(batches), region_of(batches))
    at = 7
    assert len(index) == len(batches)
    for i, (base, end, size, timestamp) in enumerate(batches):
        ref = index.ref(i, KEY, 7)
        assert (ref.first_byte, ref.size_bytes, ref.base_offset) == (at, size, base)
        assert (ref.base_offset + ref.record_count, ref.max_timestamp_ms) == (end, timestamp)
        at += size


@given(entries(), st.data())
def test_offsets_and_times_are_found_as_by_looking_through(
    batches: list[tuple[int, int, int, int]], data: st.DataObject
) -> None:
    index = decode_index(encode_index(batches), region_of(batches))
    offsets = [edge for base, end, _, _ in batches for edge in (base - 1, base, end - 1, end)]
    offset = data.draw(st.sampled_from(offsets) if offsets else st.just(0))
    assert index.find(offset) == next((i for i, each in enumerate(batches) if offset < each[1]), len(batches))
    at_ms = data.draw(TIMES | st.sampled_from([each[3] for each in batches] or [0]))
    assert index.find_time(at_ms) == next((i for i, each in enumerate(batches) if each[3] >= at_ms), len(batches))


@given(entries(), st.data())
def test_any_damage_to_an_index_is_noticed(batches: list[tuple[int, int, int, int]], data: st.DataObject) -> None:
    stored = bytearray(encode_index(batches))
    at = data.draw(st.integers(0, len(stored) - 1))
    stored[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CorruptError):
        decode_index(stored, region_of(batches))
    with pytest.raises(CorruptError):
        decode_index(encode_index(batches)[:-1], region_of(batches))


@pytest.mark.parametrize(
    "region",
    [
        L1Region(0, 0, 150, 5, 9, 0, 2, 150, 0),  # another number of batches
        L1Region(0, 0, 151, 5, 9, 0, 1, 150, 0),  # another size
        L1Region(0, 0, 150, 10, 19, 0, 1, 150, 0),  # a batch before it
        L1Region(0, 0, 150, 5, 8, 0, 1, 150, 0),  # a batch beyond it
    ],
)
def test_an_index_of_another_region_is_refused(region: L1Region) -> None:
    data = encode_index([(5, 10, 150, 0)])
    assert len(decode_index(data, L1Region(0, 0, 150, 5, 9, 0, 1, 150, 0))) == 1
    with pytest.raises(CorruptError):
        decode_index(data, region)


@pytest.mark.parametrize("bad", [[(5, 5, 9, 0)], [(5, 7, 9, 0), (6, 9, 9, 0)], [(5, 7, 0, 0), (7, 9, 18, 0)]])
def test_an_index_whose_batches_do_not_ascend_is_corrupt(bad: list[tuple[int, int, int, int]]) -> None:
    with pytest.raises(CorruptError):
        decode_index(encode_index(bad), region_of(bad))


@pytest.mark.parametrize("count", [9, 11])
def test_a_compressed_index_of_another_length_than_its_count_is_corrupt(count: int) -> None:
    batches = [(i, i + 1, 100, i) for i in range(count)]
    body = bytearray(encode_index([(i, i + 1, 100, i) for i in range(10)])[:-4])
    body[4:8] = count.to_bytes(4, "little")
    with pytest.raises(CorruptError, match=r"cause=|payload_bytes="):
        decode_index(body + crc32c.crc32c(body).to_bytes(4, "little"), region_of(batches))


def test_regular_batches_take_a_byte_or_two_each() -> None:
    assert len(encode_index([(i, i + 1, 100, i) for i in range(1000)])) < 2000


REGIONS = st.builds(
    L1Region,
    partition=st.integers(0, 2**32 - 1),
    first_byte=st.integers(0, 500),
    size_bytes=st.integers(0, 500),
    base_offset=st.integers(0, 2**62),
    last_offset=st.integers(2**62, 2**63 - 1),
    max_timestamp_ms=TIMES,
    batch_count=st.integers(0, 2**32 - 1),
    index_byte=st.integers(0, 500),
    index_bytes=st.integers(0, 500),
)
FOOTERS = st.builds(Footer, st.text(max_size=20), st.lists(REGIONS, max_size=5).map(tuple))


@given(FOOTERS, st.integers(0, 400))
def test_a_footer_is_found_from_any_tail(footer: Footer, first: int) -> None:
    """A tail that is too short yields the number of missing bytes. One further read suffices if the tail held the
    size."""
    whole = bytes(1000) + encode_footer(footer)
    tail, steps = first, 0
    while isinstance(found := parse_tail(whole[len(whole) - tail :], len(whole)), int):
        assert found > 0
        tail, steps = tail + found, steps + 1
    assert found == footer
    assert steps <= (2 if first < 4 else 1)


@given(FOOTERS, st.data())
def test_any_damage_to_a_footer_is_noticed(footer: Footer, data: st.DataObject) -> None:
    whole = bytearray(bytes(1000) + encode_footer(footer))
    at = data.draw(st.integers(1000, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CorruptError):
        parse_tail(whole, len(whole))


@pytest.mark.parametrize("tail", [b"", b"123", b"1234", bytes(64), b"\xff" * 64])
def test_what_is_no_l1_object_is_corrupt(tail: bytes) -> None:
    with pytest.raises(CorruptError):
        parse_tail(tail, len(tail))


def test_a_footer_that_names_more_than_the_object_holds_is_corrupt() -> None:
    region = L1Region(0, 0, 100, 0, 0, 0, 1, 100, 9)
    whole = encode_footer(Footer("t", (region,)))
    assert parse_tail(bytes(109) + whole, 109 + len(whole))
    with pytest.raises(CorruptError, match="names bytes outside"):
        parse_tail(bytes(108) + whole, 108 + len(whole))
    with pytest.raises(CorruptError, match="names bytes outside"):
        parse_tail(bytes(109) + encode_footer(Footer("t", (region, L1Region(0, 0, 0, 5, 4, 0, 0, 0, 0)))), 300)


def stored(base: int, *values: str, timestamp_ms: int = 1000) -> tuple[bytes, int, int, int]:
    data = bytearray(batch(*values, timestamp_ms=timestamp_ms))
    patch_base_offset(data, 0, base)
    return bytes(data), base, base + len(values), timestamp_ms


def test_an_object_holds_its_partitions_in_order_and_covers_their_gaps() -> None:
    build = ObjectBuilder("topic")
    build.begin_range(3, 10)
    build.add(*stored(12, "a", "b", timestamp_ms=7))  # 10 and 11 were markers, say
    build.add(*stored(14, "c", timestamp_ms=5))
    build.end(18)
    build.begin_range(0, 0)
    build.add(*stored(0, "x"))
    build.end(1)
    build.begin_range(5, 4)  # nothing but markers
    build.end(6)
    build.begin_range(6, 8)  # nothing at all
    build.end(8)
    parts, footer = build.finish()
    data = b"".join(parts)
    assert parse_tail(data, len(data)) == footer and footer.topic_id == "topic"
    ranges = [(r.partition, r.base_offset, r.last_offset, r.max_timestamp_ms, r.batch_count) for r in footer.regions]
    assert ranges == [(3, 10, 17, 7, 2), (0, 0, 0, 1000, 1), (5, 4, 5, NO_TIMESTAMP, 0)]
    for region in footer.regions:
        index = decode_index(data[region.index_byte : region.index_byte + region.index_bytes], region)
        held = split_batches(data[region.first_byte : region.first_byte + region.size_bytes])
        for i, each in enumerate(held):
            ref = index.ref(i, KEY, region.first_byte)
            assert data[ref.first_byte : ref.first_byte + ref.size_bytes] == each
            assert (parse_header(each).base_offset, parse_header(each).next_offset) == (
                ref.base_offset,
                ref.base_offset + ref.record_count,
            )


def test_a_range_of_many_batches_becomes_several_regions_without_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "REGION_BATCHES", 3)
    monkeypatch.setattr(format, "REGION_BATCHES", 3)
    build = ObjectBuilder("topic")
    build.begin_range(0, 100)
    for i in range(7):
        build.add(*stored(101 + 2 * i, "v"))
    build.end(120)
    _, footer = build.finish()
    assert [(r.base_offset, r.last_offset, r.batch_count) for r in footer.regions] == [
        (100, 105, 3),
        (106, 111, 3),
        (112, 119, 1),
    ]


def test_batches_out_of_order_are_refused() -> None:
    build = ObjectBuilder("topic")
    build.begin_range(0, 5)
    with pytest.raises(ValueError, match="ascend"):
        build.add(*stored(4, "v"))
    build.add(*stored(4, "before the cut", "w", "x"))
    with pytest.raises(ValueError, match="ascend"):
        build.add(*stored(6, "v"))
    with pytest.raises(ValueError, match="before its batches"):
        build.end(6)


def test_keys_of_a_topic_list_in_the_order_of_creation() -> None:
    keys = [l1_key("t", object_id(ms, "0f")) for ms in (9, 1_700_000_000_000, 10)]
    assert sorted(keys) == [keys[0], keys[2], keys[1]]
    assert created_ms(object_id(1_700_000_000_000, "0f")) == 1_700_000_000_000
    assert [created_ms(name) for name in ("", "12-0f", "x" * 15, "readme")] == [-1] * 4
