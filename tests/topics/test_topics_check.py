"""Complete checks of a batch before it is stored: all ways of checking agree, and forged batches are reported."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable

import crc32c
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.base.limits import DECOMPRESSED_BYTES
from tidemill.topics.api import (
    BatchRef,
    BatchTooLargeError,
    CorruptBatchError,
    InvalidRecordsError,
    UnreadableBatchError,
)
from tidemill.topics.batch import Record, check_batch, decode_columns, encode_batch
from tidemill.topics.batch import validation as module
from tidemill.topics.batch.compression import CODECS, compress, decompress
from tidemill.topics.batch.validation import check_body, check_header

COUNT = 40


def sealed(payload: bytes, count: int, *, codec: int = 0, last_delta: int | None = None) -> bytes:
    """Return a batch of arbitrary record bytes with a correct checksum."""
    head = bytearray(encode_batch([Record(None, b"v", timestamp_ms=1_000)])[:61])
    struct.pack_into(">i", head, 8, 49 + len(payload))
    struct.pack_into(">h", head, 21, codec)
    struct.pack_into(">i", head, 23, count - 1 if last_delta is None else last_delta)
    struct.pack_into(">i", head, 57, count)
    whole = head + payload
    struct.pack_into(">I", whole, 17, crc32c.crc32c(whole[21:]))
    return bytes(whole)


def varint(value: int) -> bytes:
    zigzag, out = (value << 1) ^ (value >> 63), bytearray()
    while zigzag > 0x7F:
        out.append(zigzag & 0x7F | 0x80)
        zigzag >>= 7
    return bytes([*out, zigzag])


def record(
    index: int, value: bytes = b"value", *, delta_ms: int = 0, headers: bytes = b"\x00", length: int = 0
) -> bytes:
    body = b"\x00" + varint(delta_ms) + varint(index) + b"\x01" + varint(len(value)) + value + headers
    return varint(length or len(body)) + body


def records(count: int = COUNT, **odd: bytes) -> bytes:
    """Return `count` valid records, some of which are replaced by the ones given as "r<index>"."""
    return b"".join(odd.get(f"r{i}", record(i)) for i in range(count))


FORGED: dict[str, tuple[bytes, int]] = {
    "one record too few": (sealed(records(), COUNT + 1), COUNT),
    "one record too many": (sealed(records(), COUNT - 1), -1),
    "a delta twice": (sealed(records(r7=record(6)), COUNT), 7),
    "a delta skipped": (sealed(records(r7=record(8)), COUNT), 7),
    "a delta of 2³¹": (sealed(records(r7=record(2**31)), COUNT), 7),
    "a length too long": (sealed(records(r7=record(7, length=12)), COUNT), 7),
    "a length that passes the end": (sealed(records(r39=record(39, length=99)), COUNT), 39),
    "a negative length": (sealed(records(r7=varint(-3) + record(7)[1:]), COUNT), 7),
    "a value beyond its record": (sealed(records(r7=b"\x12\x00\x00\x0e\x01\x7fvalue"[:10]), COUNT), 7),
    "a varint without end": (sealed(records(r7=b"\xff" * 12), COUNT), 7),
    "a header without a key": (sealed(records(r7=record(7, headers=b"\x02\x01\x01")), COUNT), 7),
    "headers that are not there": (sealed(records(r7=record(7, headers=b"\x7e")), COUNT), 7),
    "more headers than bytes": (sealed(records(r7=record(7, headers=varint(2**31 - 1))), COUNT), 7),
    "a time beyond 64 bits": (sealed(records(r7=record(7, delta_ms=2**63 - 1)), COUNT), 7),
    "a count of 2³¹−1": (sealed(records(), 2**31 - 1), -1),
    "no bytes at all": (sealed(b"", 1), -1),
}


@pytest.mark.parametrize("name", FORGED)
@pytest.mark.parametrize("compression", CODECS)
def test_a_forged_batch_under_a_right_checksum_is_refused_with_its_first_bad_record(
    name: str, compression: str
) -> None:
    batch, bad = FORGED[name]
    count = struct.unpack_from(">i", batch, 57)[0]
    codec = CODECS[compression]
    batch = sealed(compress(codec, batch[61:]), count, codec=codec)
    with pytest.raises(InvalidRecordsError) as caught:
        check_batch(batch)
    assert [index for index, _ in caught.value.record_errors] == ([bad] if bad >= 0 else [])


def test_counts_of_the_header_that_disagree_are_refused() -> None:
    with pytest.raises(InvalidRecordsError):
        check_header(sealed(records(), COUNT, last_delta=COUNT))


def test_a_wrong_checksum_is_damage_on_the_way_and_may_be_sent_again() -> None:
    batch = bytearray(sealed(records(), COUNT))
    batch[-1] ^= 1
    with pytest.raises(CorruptBatchError) as caught:
        check_batch(batch)
    assert not isinstance(caught.value, InvalidRecordsError)


rows = st.lists(
    st.builds(
        Record,
        key=st.none() | st.binary(max_size=20),
        value=st.none() | st.binary(max_size=200) | st.just(bytes(20_000)),
        headers=st.lists(st.tuples(st.text(max_size=5), st.none() | st.binary(max_size=9)), max_size=3).map(tuple),
        timestamp_ms=st.integers(0, 2**41),
    ),
    min_size=1,
    max_size=90,
)


@settings(max_examples=150, deadline=None)
@given(rows=rows, chunk=st.integers(1, 100), damage=st.lists(st.tuples(st.integers(0, 5_000), st.binary(max_size=3))))
def test_columns_and_walk_agree_on_every_batch(rows: list[Record], chunk: int, damage: list[tuple[int, bytes]]) -> None:
    """The columnar check and the walk accept the same batches and find the same greatest time."""
    payload = bytearray(encode_batch(rows)[61:])
    for at, piece in damage:
        payload[at % len(payload) : at % len(payload) + len(piece)] = piece
    batch = sealed(bytes(payload), len(rows))
    header, view = check_header(batch), memoryview(batch)[61:]
    in_line = module._check_in_loop(bytes(view), header)
    by_runs = module._check_by_runs(view, header)
    before, module.CHUNK_RECORDS = module.CHUNK_RECORDS, chunk
    try:
        by_columns = module._check_by_columns(view, header)
    finally:
        module.CHUNK_RECORDS = before
    try:
        walked: int | None = module._check_by_record(view, header)
    except InvalidRecordsError:
        walked = None
    assert by_columns == walked
    assert in_line in (walked, None), "in line nothing is taken that the walk refuses"
    assert by_runs in (walked, None), "nor by runs"
    if walked is not None and not damage:
        assert in_line == walked, "plain records need no slow path"


@settings(max_examples=200, deadline=None)
@given(
    shapes=st.lists(
        st.tuples(
            st.none() | st.integers(0, 70),
            st.none() | st.integers(0, 300),
            st.lists(st.tuples(st.integers(0, 70), st.none() | st.integers(0, 70)), max_size=2),
            st.sampled_from([0, 5, 70, 9_000]),
            st.integers(1, 70),
        ),
        min_size=1,
        max_size=5,
    ),
    damage=st.lists(st.tuples(st.integers(0, 100_000), st.binary(min_size=1, max_size=2)), max_size=2),
)
def test_runs_and_walk_agree_on_batches_of_few_shapes(
    shapes: list[tuple[int | None, int | None, list[tuple[int, int | None]], int, int]], damage: list[tuple[int, bytes]]
) -> None:
    def sized(size: int | None) -> bytes | None:
        return None if size is None else bytes(size)

    rows = [
        Record(sized(key), sized(value), tuple((size * "h", sized(other)) for size, other in headers), 1_000 + delta_ms)
        for key, value, headers, delta_ms, count in shapes
        for _ in range(count)
    ]
    payload = bytearray(encode_batch(rows)[61:])
    for at, piece in damage:
        payload[at % len(payload) : at % len(payload) + len(piece)] = piece
    header, view = check_header(sealed(bytes(payload), len(rows))), memoryview(payload)
    try:
        walked: int | None = module._check_by_record(view, header)
    except InvalidRecordsError:
        walked = None
    assert module._check_by_runs(view, header) in (walked, None)


@pytest.mark.parametrize("count", [48, 64, 65, 70, 200, 8_192, 8_200, 20_000])
@pytest.mark.parametrize("headers", [(), (("trace", b"0123456789"), ("none", None))])
def test_records_of_one_shape_are_runs_at_every_place(
    count: int, headers: tuple[tuple[str, bytes | None], ...]
) -> None:
    """A longer offset delta or time delta makes another shape."""
    for step_ms in (0, 1) if count < 8_192 else (0,):
        batch = encode_batch([Record(b"key", bytes(50), headers, 1_000 + i * step_ms) for i in range(count)])
        header, view = check_header(batch), memoryview(batch)[61:]
        assert module._check_by_runs(view, header) == 1_000 + (count - 1) * step_ms
        assert module._check_by_runs(memoryview(batch)[61:-1], header) is None
        assert module._check_by_runs(memoryview(batch + b"x")[61:], header) is None


@pytest.mark.parametrize("changed", [1, 2, 0x40, 0x80, 0xFF])
def test_no_byte_of_a_record_in_a_run_changes_unseen(changed: int) -> None:
    """Change every byte of one record in the middle, in turn: no run contains a record that the walk refuses."""
    batch = encode_batch([Record(b"key", bytes(9), (("h", b"v"),), 1_000 + i // 2) for i in range(100)])
    header = check_header(batch)
    payload = bytearray(batch[61:])
    last = len(payload) // 100 * 80
    refused = 0
    for at in range(last, last + 60):
        payload[at] ^= changed
        try:
            walked: int | None = module._check_by_record(memoryview(payload), header)
        except InvalidRecordsError:
            walked = None
            refused += 1
        assert module._check_by_runs(memoryview(payload), header) in (walked, None), at - last
        payload[at] ^= changed
    assert refused > 10


def test_a_batch_of_many_short_runs_is_looked_at_otherwise() -> None:
    batch = encode_batch([Record(None, bytes(50 + i // 10 % 2), (), 1_000) for i in range(400)])
    header, view = check_header(batch), memoryview(batch)[61:]
    assert module._check_by_runs(view, header) is None
    assert check_body(header, batch) == 1_000


@pytest.mark.parametrize("headers", [1, 31, 32, 33, 500])
def test_many_headers_are_no_fault(headers: int) -> None:
    many = tuple((f"h{i}", b"x" * (i % 5)) for i in range(headers))
    check_batch(encode_batch([Record(b"k", b"v", many if i == 3 else (), 5) for i in range(COUNT)]))


def test_the_greatest_time_is_counted_not_believed() -> None:
    batch = bytearray(encode_batch([Record(None, b"v", (), 1_000 + i) for i in range(COUNT)]))
    struct.pack_into(">q", batch, 35, 9_999_999)
    struct.pack_into(">I", batch, 17, crc32c.crc32c(batch[21:]))
    assert check_body(check_header(batch), batch) == 1_000 + COUNT - 1


@pytest.mark.parametrize("compression", [name for name in CODECS if name != "none"])
def test_no_decode_makes_more_than_the_cap(compression: str) -> None:
    codec = CODECS[compression]
    at_most = compress(codec, bytes(DECOMPRESSED_BYTES))
    assert len(decompress(codec, memoryview(at_most))) == DECOMPRESSED_BYTES
    bomb = compress(codec, bytes(DECOMPRESSED_BYTES + 1))
    with pytest.raises(BatchTooLargeError):
        decompress(codec, memoryview(bomb))
    with pytest.raises(BatchTooLargeError):
        check_batch(sealed(bomb, 1, codec=codec))
    with pytest.raises(UnreadableBatchError, match="too large"):
        decode_columns(sealed(bomb, 1, codec=codec))


REF = BatchRef("l0/x", 0, 1, 500, COUNT, 0)
SPOILT: dict[str, Callable[[bytearray], object]] = {
    "a flipped bit": lambda batch: batch.__setitem__(70, batch[70] ^ 1),
    "cut short": lambda batch: batch.__delitem__(slice(100, None)),
    "nothing left": lambda batch: batch.clear(),
    "noise": lambda batch: batch.__setitem__(slice(None), random.Random(3).randbytes(len(batch))),
    "another batch": lambda batch: batch.__setitem__(slice(None), sealed(records(), COUNT)),
}


@pytest.mark.parametrize("how", SPOILT)
def test_a_stored_batch_that_is_spoilt_is_named_by_the_offsets_of_its_log(how: str) -> None:
    batch = bytearray(encode_batch([Record(None, b"v") for _ in range(COUNT)], base_offset=500))
    assert decode_columns(batch, ref=REF)[1].offsets.tolist() == list(range(500, 500 + COUNT))
    SPOILT[how](batch)
    with pytest.raises(UnreadableBatchError) as caught:
        decode_columns(batch, ref=REF)
    assert (caught.value.base_offset, caught.value.last_offset) == (500, 500 + COUNT - 1)


@pytest.mark.parametrize("name", FORGED)
def test_what_was_stored_before_it_was_checked_ends_its_reader_with_one_kind_of_error(name: str) -> None:
    batch, _ = FORGED[name]
    with pytest.raises(UnreadableBatchError):
        decode_columns(batch)
