"""The frame reader and the buffer pool, without a socket."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.kafka.frame import Frame, FrameReader
from tidemill.kafka.pool import LARGEST_BYTES, SMALLEST_BYTES, BufferPool
from tidemill.kafka.schema.wire import BadFrame

LIMIT = 32 << 20


def feed(reader: FrameReader, data: bytes, sizes: list[int] | None = None) -> list[Frame]:
    """Deliver `data` as a socket would: never more than the reader's buffer, in pieces of `sizes`, cycled."""
    frames: list[Frame] = []
    position = turn = 0
    while position < len(data):
        room = reader.buffer()
        want = sizes[turn % len(sizes)] if sizes else len(room)
        piece = data[position : position + min(want, len(room))]
        room[: len(piece)] = piece
        room.release()
        frames += reader.received(len(piece))
        position += len(piece)
        turn += 1
    return frames


def framed(*payloads: bytes) -> bytes:
    return b"".join(struct.pack(">i", len(p)) + p for p in payloads)


@settings(max_examples=50, deadline=None)
@given(
    payloads=st.lists(st.binary(min_size=1, max_size=50) | st.integers(1, 60_000).map(lambda n: bytes([n % 251]) * n)),
    sizes=st.lists(st.integers(1, 20_000), min_size=1, max_size=5),
)
def test_any_cutting_of_the_stream_gives_the_same_frames(payloads: list[bytes], sizes: list[int]) -> None:
    reader = FrameReader(BufferPool(), LIMIT, lambda _: None)
    assert [bytes(f.view) for f in feed(reader, framed(*payloads), sizes)] == payloads
    assert not reader.partial


def test_two_connections_share_the_scratch_buffer_without_mixing() -> None:
    pool = BufferPool()
    one, two = FrameReader(pool, LIMIT, lambda _: None), FrameReader(pool, LIMIT, lambda _: None)
    first, second = framed(b"a" * 10), framed(b"b" * 20_000)
    assert feed(one, first[:3]) == []
    assert feed(two, second[:5000]) == []
    assert [bytes(f.view) for f in feed(one, first[3:])] == [b"a" * 10]
    assert [bytes(f.view) for f in feed(two, second[5000:])] == [b"b" * 20_000]


@pytest.mark.parametrize("size", [0, -1, LIMIT + 1, 0x16030100, -(1 << 31)])
def test_a_size_out_of_bounds_is_a_bad_frame(size: int) -> None:
    with pytest.raises(BadFrame, match="out of bounds"):
        feed(FrameReader(BufferPool(), LIMIT, lambda _: None), struct.pack(">i", size) + b"x")


def test_an_announced_size_allocates_little_until_the_bytes_come() -> None:
    reader = FrameReader(BufferPool(), LIMIT, lambda _: None)
    feed(reader, struct.pack(">i", LIMIT) + b"x")
    assert len(reader.buffer()) < LARGEST_BYTES


def test_a_frame_larger_than_any_pooled_buffer_arrives_whole() -> None:
    payload = bytes(range(256)) * ((3 * LARGEST_BYTES) // 256) + b"tail"
    pool = BufferPool()
    (frame,) = feed(FrameReader(pool, LIMIT, lambda _: None), framed(payload))
    assert frame.view == payload
    frame.release()


def test_a_released_buffer_is_used_again_and_only_once() -> None:
    pool = BufferPool()
    reader = FrameReader(pool, LIMIT, lambda _: None)
    (frame,) = feed(reader, framed(b"x" * 100_000))
    frame.release()
    frame.release()
    assert pool.take(100_000) is not pool.take(100_000)


def test_an_unreleased_frame_is_never_overwritten() -> None:
    reader = FrameReader(BufferPool(), LIMIT, lambda _: None)
    (kept,) = feed(reader, framed(b"k" * 100_000))
    feed(reader, framed(b"o" * 100_000))
    assert kept.view == b"k" * 100_000


def test_the_pool_keeps_no_more_than_it_may() -> None:
    pool = BufferPool(keep_bytes=SMALLEST_BYTES)
    first, second = pool.take(1), pool.take(1)
    pool.give(first)
    pool.give(second)
    assert pool.take(1) is first
    assert pool.take(1) is not second
