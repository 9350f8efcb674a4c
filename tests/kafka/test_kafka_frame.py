"""The frame reader and the buffer pool, without a socket."""

from __future__ import annotations

import struct
from itertools import cycle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.kafka.net.framing import (
    FIRST_BYTES,
    HEAD_BYTES,
    LARGEST_BYTES,
    SMALLEST_BYTES,
    BufferPool,
    Frame,
    FrameReader,
)
from tidemill.kafka.schema.primitives import MalformedFrameError

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
        frames += reader.add_received(len(piece))
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
    assert not reader.has_partial


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 300_000) | st.integers(1, 50), max_size=6),
    sizes=st.lists(st.integers(3_000, 200_000), min_size=1, max_size=5),
    released=st.lists(st.booleans(), min_size=1, max_size=4),
)
def test_frames_keep_their_bytes_while_buffers_of_others_come_back(
    lengths: list[int], sizes: list[int], released: list[bool]
) -> None:
    held: list[int] = []
    reader, kept = FrameReader(BufferPool(), LIMIT, held.append), []
    payloads = [bytes([number + 1]) * length for number, length in enumerate(lengths)]
    stream, at, turn = framed(*payloads), 0, 0
    found = []
    while at < len(stream):
        size = sizes[turn % len(sizes)]
        for frame in feed(reader, stream[at : at + size]):
            found.append(bytes(frame.view))
            if released[len(found) % len(released)]:
                frame.release()
            else:
                kept.append((frame, found[-1]))
        at, turn = at + size, turn + 1
    assert found == payloads
    assert all(frame.view == payload for frame, payload in kept)
    assert not reader.has_partial
    assert sum(held) == 0


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
    with pytest.raises(MalformedFrameError, match="out of bounds"):
        feed(FrameReader(BufferPool(), LIMIT, lambda _: None), struct.pack(">i", size) + b"x")


def test_an_announced_size_allocates_little_until_the_bytes_come() -> None:
    reader = FrameReader(BufferPool(), LIMIT, lambda _: None)
    feed(reader, struct.pack(">i", LIMIT) + b"x")
    assert len(reader.buffer()) < LARGEST_BYTES


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40_000), min_size=1, max_size=4),
    length=st.integers(1, 700_000),
    roomy=st.lists(st.booleans(), min_size=1, max_size=3),
)
def test_without_room_a_frame_holds_what_has_come_and_still_arrives_whole(
    sizes: list[int], length: int, roomy: list[bool]
) -> None:
    held: list[int] = []
    answers = cycle(roomy)
    reader = FrameReader(BufferPool(), LIMIT, held.append, lambda size: next(answers))
    payload = bytes(range(251)) * (length // 251 + 1)
    for _ in range(3):
        (frame,) = feed(reader, framed(payload[:length]), sizes)
        assert frame.view == payload[:length]
        frame.release()
    assert sum(held) == 0


def test_a_frame_without_room_asks_before_it_takes_any() -> None:
    held: list[int] = []
    reader = FrameReader(BufferPool(), LIMIT, held.append, lambda size: False)
    feed(reader, struct.pack(">i", 1_000_000) + b"x" * 100)
    assert held == [100]
    assert reader.growth_bytes > 0


@pytest.mark.parametrize("came", [FIRST_BYTES // 2, FIRST_BYTES + 4, 150_000])
def test_a_large_frame_is_not_copied_out_of_what_it_was_received_into(came: int) -> None:
    pool = BufferPool()
    scratch = pool.scratch
    (frame,) = feed(FrameReader(pool, LIMIT, lambda _: None), framed(b"x" * (came - 4)))
    assert (frame.view.obj is scratch) == (came <= FIRST_BYTES)
    assert pool.scratch is not scratch


def test_whoever_sent_a_large_frame_gets_a_buffer_for_the_next_one_at_once() -> None:
    held: list[int] = []
    reader = FrameReader(BufferPool(), LIMIT, held.append)
    for _ in range(2):
        feed(reader, framed(b"x" * 1_000_000))[0].release()
    assert held[-2:] == [1 << 20, -(1 << 20)]
    assert max(held[:-2]) < 1 << 20


def test_without_room_a_connection_holds_no_more_than_the_head_of_a_frame() -> None:
    held: list[int] = []
    reader = FrameReader(BufferPool(), LIMIT, held.append, lambda size: False)
    for _ in range(100):
        if reader.growth_bytes:
            break
        room = reader.buffer()
        count = len(room)
        room[:4] = struct.pack(">i", 1_000_000)
        room.release()
        reader.add_received(count)
    assert held == [HEAD_BYTES - 4]


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
    assert pool.acquire(100_000) is not pool.acquire(100_000)


def test_an_unreleased_frame_is_never_overwritten() -> None:
    reader = FrameReader(BufferPool(), LIMIT, lambda _: None)
    (kept,) = feed(reader, framed(b"k" * 100_000))
    feed(reader, framed(b"o" * 100_000))
    assert kept.view == b"k" * 100_000


def test_the_pool_keeps_no_more_than_it_may() -> None:
    pool = BufferPool(keep_bytes=SMALLEST_BYTES)
    first, second = pool.acquire(1), pool.acquire(1)
    pool.release(first)
    pool.release(second)
    assert pool.acquire(1) is first
    assert pool.acquire(1) is not second
