"""Batches decoded together by columns equal those decoded record by record."""

from __future__ import annotations

import struct

import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.topics.api import UnreadableBatchError
from tidemill.topics.batch import Record, RecordColumns, decode_opened, encode_batch, open_batch
from tidemill.topics.batch.decode import OpenedBatch, _decode_group, _decode_single

fields = st.none() | st.binary(max_size=3) | st.binary(min_size=60, max_size=200) | st.just(b"x" * 20_000)
records = st.builds(
    Record,
    key=fields,
    value=fields,
    headers=st.lists(st.tuples(st.text(max_size=5), st.none() | st.binary(max_size=9)), max_size=3).map(tuple),
    timestamp_ms=st.integers(-(2**40), 2**41),
)
batches = st.lists(st.lists(records, min_size=1, max_size=20), min_size=1, max_size=8)
spoils = st.lists(st.tuples(st.integers(0, 7), st.floats(0, 1), st.integers(0, 255)), max_size=3)


def rows_of(columns: RecordColumns) -> list[tuple[object, ...]]:
    rows = list(zip(columns.offsets.tolist(), columns.timestamps_ms.tolist(), columns.keys, columns.values,
                    columns.headers, strict=True))  # fmt: skip
    for at, row in enumerate(rows):
        assert (columns.key(at), columns.value(at), columns.headers_of(at)) == row[2:]
    return rows


def read_alone(opened: OpenedBatch) -> list[tuple[object, ...]] | tuple[int, int]:
    try:
        return rows_of(_decode_single(opened))
    except UnreadableBatchError as bad:
        return bad.base_offset, bad.last_offset


def encoded(groups: list[list[Record]]) -> list[bytes]:
    base, out = 100, []
    for rows in groups:
        out.append(encode_batch(rows, base_offset=base))
        base += len(rows)
    return out


def spoilt(batch: bytes, at: float, value: int) -> bytes:
    """Change one byte of the records, with a correct checksum."""
    out = bytearray(batch)
    out[61 + min(int(at * (len(out) - 61)), len(out) - 62)] = value
    struct.pack_into(">I", out, 17, crc32c.crc32c(out[21:]))
    return bytes(out)


@given(batches)
@settings(max_examples=150, deadline=None)
def test_good_batches_are_read_together(groups: list[list[Record]]) -> None:
    opened = [open_batch(batch) for batch in encoded(groups)]
    together = _decode_group(opened)
    assert together is not None
    assert rows_of(together) == [row for one in opened for row in read_alone(one)]


@given(batches, spoils)
@settings(max_examples=300, deadline=None)
def test_a_bad_batch_among_good_ones_is_alone_with_its_harm(
    groups: list[list[Record]], changes: list[tuple[int, float, int]]
) -> None:
    data = encoded(groups)
    for number, at, value in changes:
        data[number % len(data)] = spoilt(data[number % len(data)], at, value)
    opened = [open_batch(batch) for batch in data]
    expected: list[object] = []
    for one in opened:
        found = read_alone(one)
        expected += found if isinstance(found, list) else [found]
    reported: list[object] = []
    for part in decode_opened(opened):
        reported += rows_of(part) if isinstance(part, RecordColumns) else [(part[1].base_offset, part[1].last_offset)]
    assert reported == expected


def test_no_more_is_opened_than_the_next_group_needs() -> None:
    taken = []

    def source() -> object:
        for number in range(40):
            taken.append(number)
            yield open_batch(encode_batch([Record(None, b"v" * (1 << 20))], base_offset=number))

    found = decode_opened(source())  # type: ignore[arg-type]
    first = next(found)
    assert isinstance(first, RecordColumns) and len(first) == len(taken) == 8
