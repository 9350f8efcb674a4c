from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder

from tidemill.base.errors import InvalidError
from tidemill.topics.api import CorruptBatchError, UnreadableBatchError
from tidemill.topics.batch import (
    Record,
    check_batch,
    decode_batch,
    decode_columns,
    encode_batch,
    patch_base_offset,
    split_batches,
)
from tidemill.topics.batch.header import MAX_SEQUENCE

CODECS = ["none", "gzip", "snappy", "lz4", "zstd"]
records = st.lists(
    st.builds(
        Record,
        key=st.none() | st.binary(max_size=40),
        value=st.none() | st.binary(max_size=300),
        headers=st.lists(st.tuples(st.text(max_size=5), st.none() | st.binary(max_size=9)), max_size=3).map(tuple),
        timestamp_ms=st.integers(0, 2**41),
    ),
    min_size=1,
    max_size=30,
)


@given(records, st.sampled_from(CODECS), st.integers(0, 2**50))
@settings(max_examples=60, deadline=None)
def test_what_is_encoded_is_decoded_under_every_codec(rows: list[Record], compression: str, base: int) -> None:
    batch = encode_batch(rows, compression=compression, base_offset=base)
    check_batch(batch)
    decoded = decode_batch(batch)
    assert [r.offset for r in decoded.records] == list(range(base, base + len(rows)))
    for before, after in zip(rows, decoded.records, strict=True):
        assert (before.key, before.value, before.headers, before.timestamp_ms) == (
            after.key,
            after.value,
            after.headers,
            after.timestamp_ms,
        )
    assert decoded.header.max_timestamp_ms == max(rows[0].timestamp_ms, *(r.timestamp_ms for r in rows))


@pytest.mark.parametrize("codec", [0, 1, 3])
def test_batches_of_kafka_python_are_read(codec: int) -> None:
    builder = DefaultRecordBatchBuilder(2, codec, False, 7, 1, 3, 1 << 20)
    for i in range(50):
        builder.append(i, 1000 + i, b"k%d" % i, b"v" * (i * 40), [("h", b"x")])
    batch = bytes(builder.build())
    header = check_batch(batch)
    assert (header.producer_id, header.producer_epoch, header.base_sequence, header.record_count) == (7, 1, 3, 50)
    decoded = decode_batch(batch).records
    assert [r.key for r in decoded] == [b"k%d" % i for i in range(50)]
    assert [len(r.value or b"") for r in decoded] == [i * 40 for i in range(50)]
    assert decoded[4].headers == (("h", b"x"),)


@pytest.mark.parametrize("compression", ["none", "gzip", "lz4"])
def test_kafka_python_reads_our_batches(compression: str) -> None:
    rows = [Record(b"k", b"v" * i, (("a", b"b"), ("n", None)), 5 + i) for i in range(300)]
    batch = encode_batch(rows, compression=compression, producer_id=4, producer_epoch=0, base_sequence=9)
    theirs = DefaultRecordBatch(batch)
    assert theirs.validate_crc()
    read = list(theirs)
    assert [r.value for r in read] == [r.value for r in rows]
    assert [r.timestamp for r in read] == [r.timestamp_ms for r in rows]


def test_patching_offset_and_epoch_keeps_the_checksum() -> None:
    batch = bytearray(encode_batch([Record(b"a", b"b", (), 1)] * 3))
    patch_base_offset(batch, 0, 12345, 7)
    header = check_batch(batch)
    assert (header.base_offset, header.leader_epoch) == (12345, 7)
    assert decode_columns(batch)[1].offsets.tolist() == [12345, 12346, 12347]


def test_batches_back_to_back_are_split_without_the_torn_tail() -> None:
    one, two = encode_batch([Record(None, b"1")]), encode_batch([Record(None, b"22")] * 2)
    assert [bytes(b) for b in split_batches(one + two + one[:50])] == [one, two]


def test_the_last_sequence_wraps_to_zero() -> None:
    batch = encode_batch([Record(None, b"x")] * 3, producer_id=1, producer_epoch=0, base_sequence=MAX_SEQUENCE - 1)
    assert check_batch(batch).last_sequence == 0


def _with(batch: bytes, at: int, value: bytes) -> bytes:
    return batch[:at] + value + batch[at + len(value) :]


GOOD = encode_batch([Record(b"k", b"v", (), 3)] * 4, producer_id=5, producer_epoch=0, base_sequence=0)


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        GOOD[:40],
        GOOD[:-1],
        GOOD + b"x",
        GOOD + GOOD,
        _with(GOOD, 16, b"\x01"),
        _with(GOOD, 17, b"\x00\x00\x00\x00"),
        _with(GOOD, len(GOOD) - 1, b"\xff"),
        _with(GOOD, 8, b"\xff\xff\xff\xff"),
        encode_batch([Record(b"k", b"v")], producer_id=5, producer_epoch=-1, base_sequence=0),
        encode_batch([Record(b"k", b"v")], producer_id=5, producer_epoch=0, base_sequence=-1),
        encode_batch([Record(b"k", b"v")], producer_id=-2),
    ],
)
def test_a_malformed_batch_is_refused(bad: bytes) -> None:
    with pytest.raises(CorruptBatchError):
        check_batch(bad)


@given(st.integers(61, len(GOOD) - 1), st.integers(0, 255))
def test_damage_inside_the_records_never_escapes_as_another_error(at: int, value: int) -> None:
    with contextlib.suppress(UnreadableBatchError):
        decode_batch(_with(GOOD, at, bytes([value])), check_crc=False)


@given(st.binary(max_size=200))
def test_random_payload_never_escapes_as_another_error(payload: bytes) -> None:
    for codec in range(5):
        head = bytearray(GOOD[:61])
        head[8:12] = (49 + len(payload)).to_bytes(4, "big")
        head[22] = codec
        with contextlib.suppress(UnreadableBatchError):
            decode_batch(bytes(head) + payload, check_crc=False)


def test_no_records_and_unknown_codecs_are_refused() -> None:
    with pytest.raises(InvalidError):
        encode_batch([])
    with pytest.raises(InvalidError):
        encode_batch([Record(None, None)], compression="brotli")
