"""Split the frames of one receive into steps, in order: ranges of rows, and single messages. Pure.

A burst is joined into one buffer, and its row changes are found by columns (row_blocks.py), over all transactions
together. A message that is no row change, is too large to be joined, belongs to a relation with few rows here, or is
irregular in any way, is a separate step and is decoded row by row. So the steps contain every message once, in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tidemill.capture.decode.columnar_tuples import (
    DELETE,
    INSERT,
    PAD_BYTES,
    TUPLE_AT,
    UPDATE,
    Bools,
    Int64s,
    TupleWalker,
)
from tidemill.capture.decode.row_blocks import RowSegment
from tidemill.capture.decode.transaction_builder import TransactionBuilder
from tidemill.capture.postgres.replication_stream import FramedMessage, parse_frame
from tidemill.capture.postgres.standby_status import PAYLOAD_START, Keepalive

MIN_COLUMNAR_ROWS = 96
"""Fewer rows of a relation are decoded and encoded faster one by one (`./dev bench capture_rows`)."""
MAX_JOINED_FRAME_BYTES = 64 << 10
"""Joining a larger frame costs more than decoding its row."""
_HEAD_BYTES = PAYLOAD_START + TUPLE_AT + 2
_DATA, _RELATION = b"wR"


class RowRun:
    """Row changes at the places [start, end) of a segment, to be fed as a range."""

    __slots__ = ("_frames", "end", "segment", "start")

    def __init__(self, frames: Sequence[bytes], segment: RowSegment, start: int, end: int) -> None:
        self._frames = frames
        self.segment = segment
        self.start = start
        self.end = end

    def parse_frame_at(self, place: int) -> FramedMessage | Keepalive:
        """Return one frame, to be fed separately after all."""
        return parse_frame(self._frames[place])


ReceiveStep = FramedMessage | Keepalive | RowRun


def split_into_steps(
    frames: Sequence[bytes], converter: TransactionBuilder, least: int = MIN_COLUMNAR_ROWS
) -> Iterator[ReceiveStep]:
    """Yield every frame once, in order. The caller feeds each step to `converter` before it requests the next one,
    because a description of a relation applies to the messages after it. Raises CorruptError for an unknown frame.
    """
    if len(frames) < max(least, 1):
        yield from map(parse_frame, frames)
        return
    walker, starts, ends, joined = _join_frames(frames)
    kinds = np.where(ends - starts > TUPLE_AT + 1, walker.bytes[starts], 0)
    rows = joined & ((kinds == INSERT) | (kinds == UPDATE) | (kinds == DELETE))
    (described,) = np.nonzero(kinds == _RELATION)
    at = 0
    for end in [*described.tolist(), len(frames)]:
        places = np.nonzero(rows[at:end])[0] + at
        if len(places) >= least:
            segment = RowSegment(walker, starts, ends, places, converter.relations, converter.accepts_ranges_of, least)
            yield from _split_segment(frames, segment, at, end)
        else:
            yield from map(parse_frame, frames[at:end])
        yield from map(parse_frame, frames[end : end + 1])
        at = end + 1


def _split_segment(frames: Sequence[bytes], segment: RowSegment, at: int, end: int) -> Iterator[ReceiveStep]:
    (alone,) = np.nonzero(~segment.whole[at:end])
    for place in [*(alone + at).tolist(), end]:
        if place > at:
            yield RowRun(frames, segment, at, place)
        if place < end:
            yield parse_frame(frames[place])
        at = place + 1


def _join_frames(frames: Sequence[bytes]) -> tuple[TupleWalker, Int64s, Int64s, Bools]:
    """Return all frames in one buffer, the start and end of each message, and which frames are complete: of a large one
    only the head is included. A frame without a message has an empty one.
    """
    sizes = np.fromiter(map(len, frames), np.int64, len(frames))
    whole = sizes <= MAX_JOINED_FRAME_BYTES
    if not whole.all():
        frames = [frame if len(frame) <= MAX_JOINED_FRAME_BYTES else frame[:_HEAD_BYTES] for frame in frames]
        sizes = np.where(whole, sizes, _HEAD_BYTES)
    walker = TupleWalker(b"".join([*frames, bytes(PAD_BYTES)]))
    ends = np.cumsum(sizes)
    starts = ends - sizes
    data = (walker.bytes[starts] == _DATA) & (sizes >= PAYLOAD_START)
    return walker, np.where(data, starts + PAYLOAD_START, ends), ends, whole
