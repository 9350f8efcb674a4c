"""Tidemill's codecs against kio's on the same bytes, for every supported version."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import struct
import uuid
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kio.index import load_request_schema, load_response_schema
from kio.schema.errors import ErrorCode
from kio.serial import entity_reader

from support.kafka.schema_strategies import encoded, entities, plain
from tidemill.kafka import error_codes
from tidemill.kafka.handlers import APIS, compile_all
from tidemill.kafka.schema import codec_compiler, fetch, produce
from tidemill.kafka.schema.primitives import (
    MalformedFrameError,
    read_uvarint,
    reset_element_count,
    skip_tags,
    write_uvarint,
)

HOT = (0, 1)
COLD_VERSIONS = [
    (api.key, version)
    for api in APIS.values()
    if api.key not in HOT
    for version in range(api.min_version, api.max_version + 1)
    if (api.key, version) != (18, 5)  # kio does not know it: `test_kafka_literals.py`
]
PRODUCE_VERSIONS = range(3, 14)
FETCH_VERSIONS = range(4, 18)
few = settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))


def without_absent_tags(schema: Any, ours: Any, theirs: Any) -> Any:
    """Tidemill's reader omits absent tagged fields; kio fills in their defaults."""
    if isinstance(theirs, dict):
        return {k: without_absent_tags(schema, ours[k], v) for k, v in theirs.items() if k in ours}
    if isinstance(theirs, list):
        return [without_absent_tags(schema, o, t) for o, t in zip(ours, theirs, strict=True)]
    return theirs


@pytest.mark.parametrize(("key", "version"), COLD_VERSIONS)
@few
@given(data=st.data())
def test_requests_decode_as_kio_wrote_them(key: int, version: int, data: st.DataObject) -> None:
    schema = load_request_schema(key, version)
    entity = data.draw(entities(schema))
    raw = b"head" + encoded(entity)
    ours = codec_compiler.decode_request(key, version, memoryview(raw), 4)
    assert ours == without_absent_tags(schema, ours, plain(entity))


@pytest.mark.parametrize(("key", "version"), COLD_VERSIONS)
@few
@given(data=st.data())
def test_responses_are_encoded_byte_for_byte_as_kio_does(key: int, version: int, data: st.DataObject) -> None:
    entity = data.draw(entities(load_response_schema(key, version)))
    assert bytes(codec_compiler.encode_response(key, version, plain(entity))) == encoded(with_texts(entity))


def with_texts(entity: Any) -> Any:
    """Return the response with a text added to each refusal that has none."""
    if isinstance(entity, tuple):
        return tuple(with_texts(each) for each in entity)
    if not dataclasses.is_dataclass(entity) or isinstance(entity, type):
        return entity
    values = {field.name: with_texts(getattr(entity, field.name)) for field in dataclasses.fields(entity)}
    if values.get("error_code") and values.get("error_message", "") is None:
        values["error_message"] = error_codes.describe_code(int(values["error_code"]))
    return type(entity)(**values)


@pytest.mark.parametrize(("key", "version"), [(key, APIS[key].max_version) for key in sorted(APIS) if key not in HOT])
@few
@given(junk=st.binary(max_size=200))
def test_junk_is_a_bad_frame_and_nothing_else(key: int, version: int, junk: bytes) -> None:
    with contextlib.suppress(MalformedFrameError):
        codec_compiler.decode_request(key, version, memoryview(junk), 0)


@few
@given(cut=st.integers(0, 60), data=st.data())
def test_a_truncated_request_is_a_bad_frame(cut: int, data: st.DataObject) -> None:
    raw = encoded(data.draw(entities(load_request_schema(3, 12))))
    short = raw[: min(cut, len(raw) - 1)]
    with pytest.raises(MalformedFrameError):
        codec_compiler.decode_request(3, 12, memoryview(short), 0)


def test_unknown_tagged_fields_are_skipped() -> None:
    schema = load_request_schema(22, 4)
    raw = encoded(schema(transactional_id=None, transaction_timeout=datetime.timedelta(0), producer_id=-1))
    assert raw[-1:] == b"\x00"
    tagged = raw[:-1] + b"\x02" + b"\x07\x03abc" + b"\x63\x00"
    assert codec_compiler.decode_request(22, 4, memoryview(tagged), 0)["transactional_id"] is None


def test_null_where_the_schema_has_none_is_a_bad_frame() -> None:
    with pytest.raises(MalformedFrameError, match="field=topics"):
        codec_compiler.decode_request(23, 4, memoryview(bytes.fromhex("ffffffff0000")), 0)


def test_bytes_after_a_request_are_ignored_as_kafka_does() -> None:
    asked_by_librdkafka = bytes.fromhex("00000000010000")
    assert codec_compiler.decode_request(3, 13, memoryview(asked_by_librdkafka), 0)["topics"] is None


def test_a_huge_array_count_is_refused_before_anything_is_built() -> None:
    with pytest.raises(MalformedFrameError, match="exceeds the frame"):
        codec_compiler.decode_request(3, 1, memoryview(b"\x7f\xff\xff\xff"), 0)


@settings(deadline=None)
@given(value=st.integers(0, 0xFFFFFFFF))
def test_varints_round_trip(value: int) -> None:
    out = bytearray()
    write_uvarint(out, value)
    assert read_uvarint(memoryview(out), 0) == (value, len(out))


def test_a_tag_that_passes_the_end_is_a_bad_frame() -> None:
    with pytest.raises(MalformedFrameError):
        skip_tags(memoryview(b"\x01\x00\x7fxx"), 0)


# Produce and Fetch, by hand ----------------------------------------------------------------------


@pytest.mark.parametrize("version", PRODUCE_VERSIONS)
@few
@given(data=st.data())
def test_produce_requests_decode_as_kio_wrote_them(version: int, data: st.DataObject) -> None:
    entity = data.draw(entities(load_request_schema(0, version)))
    expected = plain(entity)
    ours = produce.decode(memoryview(encoded(entity)), 0, version)
    assert (ours.transactional_id, ours.acks, ours.timeout_ms) == (
        expected["transactional_id"],
        expected["acks"],
        expected["timeout"],
    )
    assert [(t.topic, [(p.partition, p.records) for p in t.partitions]) for t in ours.topics] == [
        (t["topic_id"] if version >= 13 else t["name"], [(p["index"], p["records"]) for p in t["partition_data"]])
        for t in expected["topic_data"]
    ]


ids = st.uuids().map(str)
names = st.text(min_size=1, max_size=12)
int64s = st.integers(-(1 << 63), (1 << 63) - 1)


@pytest.mark.parametrize("version", PRODUCE_VERSIONS)
@few
@given(data=st.data())
def test_kio_reads_our_produce_responses(version: int, data: st.DataObject) -> None:
    answers = st.builds(
        produce.PartitionAnswer,
        st.integers(0, 1000),
        st.sampled_from([int(code) for code in ErrorCode]),
        int64s,
        int64s,
        st.none() | names,
        st.lists(st.tuples(st.integers(0, 2**31 - 1), names), max_size=3).map(tuple),
        # kio converts them to datetimes; -1 stands for no time
        st.integers(-1, 2**45),
    )
    topics = data.draw(st.lists(st.tuples(ids if version >= 13 else names, st.lists(answers, max_size=3)), max_size=3))
    raw = bytes(produce.encode(topics, version))
    schema = load_response_schema(0, version)
    read, size = entity_reader(schema)(memoryview(raw).toreadonly(), 0)
    assert size == len(raw)
    assert encoded(read) == raw
    for (topic, expected), got in zip(topics, plain(read)["responses"], strict=True):
        assert got["topic_id" if version >= 13 else "name"] == topic
        for ours, theirs in zip(expected, got["partition_responses"], strict=True):
            assert theirs["index"] == ours.partition
            assert theirs["error_code"] == ours.error_code
            assert theirs["base_offset"] == ours.base_offset
            assert theirs.get("log_start_offset", ours.log_start_offset) == ours.log_start_offset
            assert theirs.get("error_message", ours.error_message) == ours.error_message


@pytest.mark.parametrize("version", FETCH_VERSIONS)
@few
@given(data=st.data())
def test_fetch_requests_decode_as_kio_wrote_them(version: int, data: st.DataObject) -> None:
    entity = data.draw(entities(load_request_schema(1, version)))
    expected = plain(entity)
    ours = fetch.decode(memoryview(encoded(entity)), 0, version)
    assert (ours.max_wait_ms, ours.min_bytes, ours.max_bytes) == (
        expected["max_wait"],
        expected["min_bytes"],
        expected["max_bytes"],
    )
    assert ours.session_id == expected.get("session_id", 0)
    assert [(t.topic, [tuple(p) for p in t.partitions]) for t in ours.topics] == [
        (
            t["topic_id"] if version >= 13 else t["topic"],
            [(p["partition"], p["fetch_offset"], p["partition_max_bytes"]) for p in t["partitions"]],
        )
        for t in expected["topics"]
    ]


@pytest.mark.parametrize("version", FETCH_VERSIONS)
@few
@given(data=st.data())
def test_kio_reads_our_fetch_responses(version: int, data: st.DataObject) -> None:
    partitions = st.builds(
        fetch.PartitionRecords,
        st.integers(0, 1000),
        st.sampled_from([int(code) for code in ErrorCode]),
        int64s,
        int64s,
        st.lists(st.binary(min_size=1, max_size=30), max_size=3),
        int64s,
        st.none() | st.lists(st.tuples(int64s, int64s), max_size=3),
    )
    topics = data.draw(
        st.lists(st.tuples(ids if version >= 13 else names, st.lists(partitions, max_size=3)), max_size=3)
    )
    raw = b"".join(bytes(part) for part in fetch.encode(topics, version))
    read, size = entity_reader(load_response_schema(1, version))(memoryview(raw).toreadonly(), 0)
    assert size == len(raw)
    assert encoded(read) == raw
    for (topic, expected), got in zip(topics, plain(read)["responses"], strict=True):
        assert got["topic_id" if version >= 13 else "topic"] == topic
        for ours, theirs in zip(expected, got["partitions"], strict=True):
            assert (theirs["partition_index"], theirs["error_code"]) == (ours.partition, ours.error_code)
            assert (theirs["high_watermark"], theirs["last_stable_offset"]) == (ours.high_watermark, ours.last_stable)
            assert bytes(theirs["records"]) == b"".join(ours.batches)
            aborted = theirs["aborted_transactions"]
            pairs = None if aborted is None else [(a["producer_id"], a["first_offset"]) for a in aborted]
            assert pairs == (None if ours.aborted is None else list(ours.aborted))


@pytest.mark.parametrize("version", [3, 8, 9, 13])
@settings(max_examples=50, deadline=None)
@given(junk=st.binary(max_size=120))
def test_junk_in_produce_is_a_bad_frame(version: int, junk: bytes) -> None:
    with contextlib.suppress(MalformedFrameError):
        produce.decode(memoryview(junk), 0, version)


@pytest.mark.parametrize("version", [4, 11, 12, 17])
@settings(max_examples=50, deadline=None)
@given(junk=st.binary(max_size=120))
def test_junk_in_fetch_is_a_bad_frame(version: int, junk: bytes) -> None:
    with contextlib.suppress(MalformedFrameError):
        fetch.decode(memoryview(junk), 0, version)


@pytest.mark.parametrize("version", [9, 12, 13])
@pytest.mark.parametrize("size", [0, 1, 126, 127, 16_382, 16_383, 2_097_150, 2_097_151])
def test_a_request_of_one_batch_is_read_in_place_like_any_other(version: int, size: int) -> None:
    schema = load_request_schema(0, version)
    part = schema.__dataclass_fields__["topic_data"].type.__args__[0]
    piece = part.__dataclass_fields__["partition_data"].type.__args__[0]
    topic = {"topic_id": uuid.UUID(int=7)} if version >= 13 else {"name": "t"}
    entity = schema(
        acks=-1,
        timeout=datetime.timedelta(seconds=3),
        topic_data=(part(**topic, partition_data=(piece(index=5, records=bytes([size % 251]) * size),)),),
    )
    frame = encoded(entity)
    reset_element_count()
    usual = produce._decode_usual(memoryview(frame), 0, version)
    assert usual == produce.decode(memoryview(frame), 0, version)
    assert usual is not None and usual[:3] == (None, -1, 3000)
    assert usual.topics == [(str(uuid.UUID(int=7)) if version >= 13 else "t", [(5, bytes([size % 251]) * size)])]
    for cut in {*range(min(len(frame), 40)), len(frame) - 1, len(frame) - 3}:
        with pytest.raises(MalformedFrameError):
            produce.decode(memoryview(frame)[:cut], 0, version)


def test_record_batches_are_views_of_the_frame_not_copies() -> None:
    schema = load_request_schema(0, 9)
    part = schema.__dataclass_fields__["topic_data"].type.__args__[0]
    piece = part.__dataclass_fields__["partition_data"].type.__args__[0]
    entity = schema(
        acks=-1,
        timeout=datetime.timedelta(0),
        topic_data=(part(name="t", partition_data=(piece(index=0, records=b"x" * 50),)),),
    )
    frame = bytearray(encoded(entity))
    records = produce.decode(memoryview(frame), 0, 9).topics[0].partitions[0].records
    assert records is not None
    frame[frame.index(b"xxx")] = ord("y")
    assert bytes(records[:3]) == b"yxx"


@pytest.mark.parametrize("tagged", [0, 1, 2, 3])
def test_a_fetched_partition_with_tagged_fields_is_read_as_one_without(tagged: int) -> None:
    """KIP-482: unknown tagged fields are skipped. The fast path that reads all partitions of a topic together must
    notice them.
    """

    def partition(index: int) -> bytes:
        tags = b"\x01\x05\x03abc" if index == tagged else b"\x00"
        return struct.pack(">iiqiqi", index, 7, 100 + index, 8, 9, 1000 + index) + tags

    topic = b"\x02t" + b"\x05" + b"".join(map(partition, range(4))) + b"\x00"
    head = struct.pack(">iiiibii", -1, 500, 1, 2, 0, 0, -1)
    raw = head + b"\x02" + topic + b"\x01" + b"\x01" + b"\x00"
    found = fetch.decode(memoryview(raw), 0, 12)
    assert found.topics == [("t", [(index, 100 + index, 1000 + index) for index in range(4)])]


def test_fetch_responses_carry_the_very_batches() -> None:
    batch = memoryview(bytes(1000))
    parts = fetch.encode([("t", [fetch.PartitionRecords(0, 0, 1, 0, [batch])])], 11)
    assert any(part is batch for part in parts)


def test_every_field_of_a_schema_is_reachable_by_name() -> None:
    tree = codec_compiler.response_fields(3, 12)
    assert "leader_id" in tree["topics"]["partitions"]


def test_nothing_is_compiled_on_the_loop_once_everything_was() -> None:
    """One connection may send a request of every version in a row."""
    codecs = (codec_compiler._request_reader, codec_compiler._response_writer, codec_compiler.is_flexible)
    compile_all()
    before = [codec.cache_info().misses for codec in codecs]
    for api in APIS.values():
        for version in range(api.min_version, api.max_version + 1):
            schema = codec_compiler._request_schema(api.key, version)
            assert codec_compiler.is_flexible(api.key, version) == schema.__flexible__
            if api.key > 1:
                codec_compiler._request_reader(api.key, version)
                codec_compiler._response_writer(api.key, version)
    assert [codec.cache_info().misses for codec in codecs][:2] == before[:2]
