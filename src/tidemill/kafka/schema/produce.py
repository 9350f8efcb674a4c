"""Hand-written codec of Produce (key 0), versions 3 to 13: record batches stay views into the frame.

request   transactional_id  nullable string
          acks              int16      0 = no response, 1, −1 = all
          timeout           int32      ms
          topics            [ name string (≤ v12) | topic id uuid (v13)
                              [ index int32 · records nullable bytes ] ]
response  topics            [ name | topic id
                              [ index int32 · error int16 · base offset int64 · log append time int64
                                log start offset int64 (v5)
                                record errors [ index int32 · message nullable string ] (v8)
                                error message nullable string (v8) ] ]
          throttle          int32
v9 and later: compact lengths, tagged fields after every struct (the tags of v10 are left out).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from typing import NamedTuple

from tidemill.kafka.schema.primitives import (
    I32,
    MalformedFrameError,
    count_elements,
    read_bytes,
    read_i16,
    read_i32,
    read_length,
    read_string,
    read_uuid,
    skip_tags,
    uuid_bytes,
    write_length,
    write_string,
    write_uvarint,
)
from tidemill.objects.store import Buffer

FIRST_FLEXIBLE = 9
_FIRST_WITH_IDS = 13
_V3 = struct.Struct(">ihqq")
_V5 = struct.Struct(">ihqqq")
_USUAL_HEAD = struct.Struct(">BhiBB")
"""Null transactional id, acks, timeout, number of topics, length of the first topic's name."""
_USUAL_PARTITION = struct.Struct(">BiBBBB")
"""Number of partitions, index of the first, the first bytes of the length of its records."""
_NO_TAGS = bytes(3)
"""Tags of the partition, of the topic and of the request."""


class PartitionData(NamedTuple):
    partition: int
    records: memoryview | None


class TopicData(NamedTuple):
    """Partitions of one topic in a request. `topic` is a name up to v12, a topic id from v13."""

    topic: str
    partitions: list[PartitionData]


class ProduceRequest(NamedTuple):
    transactional_id: str | None
    acks: int
    timeout_ms: int
    topics: list[TopicData]


class PartitionAnswer(NamedTuple):
    partition: int
    error_code: int
    base_offset: int = -1
    log_start_offset: int = -1
    error_message: str | None = None
    record_errors: tuple[tuple[int, str], ...] = ()
    append_time_ms: int = -1


def decode(view: memoryview, position: int, version: int) -> ProduceRequest:
    """Decode a request body. Raises MalformedFrameError."""
    flexible = version >= FIRST_FLEXIBLE
    if flexible and (usual := _decode_usual(view, position, version)) is not None:
        return usual
    transactional_id, position = read_string(view, position, compact=flexible)
    acks, position = read_i16(view, position)
    timeout_ms, position = read_i32(view, position)
    topics: list[TopicData] = []
    topic_count, position = read_length(view, position, compact=flexible, wide=True)
    count_elements(topic_count)
    for _ in range(topic_count):
        name: str | None
        if version >= _FIRST_WITH_IDS:
            name, position = read_uuid(view, position)
        else:
            name, position = read_string(view, position, compact=flexible)
        if name is None:
            raise MalformedFrameError("null topic name in a Produce request.")
        partitions: list[PartitionData] = []
        partition_count, position = read_length(view, position, compact=flexible, wide=True)
        count_elements(partition_count)
        for _ in range(partition_count):
            index, position = read_i32(view, position)
            records, position = read_bytes(view, position, compact=flexible)
            if flexible:
                position = skip_tags(view, position)
            partitions.append(PartitionData(index, records))
        if flexible:
            position = skip_tags(view, position)
        topics.append(TopicData(name, partitions))
    if flexible:
        skip_tags(view, position)
    return ProduceRequest(transactional_id, acks, timeout_ms, topics)


def _decode_usual(view: memoryview, position: int, version: int) -> ProduceRequest | None:
    """Decode a request of one batch outside of a transaction and without tags, or return None.

    Most producers send a request for each batch, so its fields are read in place here.
    """
    try:
        nothing, acks, timeout_ms, topic_count, name_length = _USUAL_HEAD.unpack_from(view, position)
        position += _USUAL_HEAD.size
        if version >= _FIRST_WITH_IDS:
            position -= 1  # The id has no length.
            name, end = read_uuid(view, position)
        elif 1 < name_length < 0x80:
            end = position + name_length - 1
            name = str(view[position:end], "utf-8")
        else:
            return None
        partition_count, index, first, second, third, fourth = _USUAL_PARTITION.unpack_from(view, end)
    except (struct.error, UnicodeDecodeError, MalformedFrameError):
        return None
    if nothing or topic_count != 2 or partition_count != 2:
        return None
    length, begin = first & 0x7F, end + 6
    for shift, byte in ((7, second), (14, third), (21, fourth)):
        if first < 0x80:
            break
        length |= (byte & 0x7F) << shift
        first, begin = byte, begin + 1
    end = begin + length - 1
    if first >= 0x80 or not length or view[end:] != _NO_TAGS:
        return None
    count_elements(2)
    return ProduceRequest(None, acks, timeout_ms, [TopicData(name, [PartitionData(index, view[begin:end])])])


def set_throttle(reply: list[Buffer], version: int, throttle_ms: int) -> None:
    """Write the throttle time into an encoded response: its last field, before the tags."""
    [body] = reply
    assert isinstance(body, bytearray)
    I32.pack_into(body, len(body) - (5 if version >= FIRST_FLEXIBLE else 4), throttle_ms)


def encode(topics: Iterable[tuple[str, Sequence[PartitionAnswer]]], version: int) -> bytearray:
    flexible = version >= FIRST_FLEXIBLE
    topics = list(topics)
    out = bytearray(_encode_count(len(topics), version))
    for topic, answers in topics:
        out += _encode_topic(topic, version)
        out += _encode_count(len(answers), version)
        for answer in answers:
            partition, code, base_offset, log_start, message, record_errors, append_time_ms = answer
            if version >= 5:
                out += _V5.pack(partition, code, base_offset, append_time_ms, log_start)
            else:
                out += _V3.pack(partition, code, base_offset, append_time_ms)
            if message is None and not record_errors:
                out += _no_errors(version)
                continue
            if version >= 8:
                write_length(out, len(record_errors), compact=flexible, wide=True)
                for index, said in record_errors:
                    out += I32.pack(index)
                    write_string(out, said, compact=flexible)
                    if flexible:
                        write_uvarint(out, 0)
                write_string(out, message, compact=flexible)
            if flexible:
                write_uvarint(out, 0)
        if flexible:
            write_uvarint(out, 0)
    out += I32.pack(0)
    if flexible:
        write_uvarint(out, 0)
    return out


@lru_cache(256)
def _encode_count(count: int, version: int) -> bytes:
    out = bytearray()
    write_length(out, count, compact=version >= FIRST_FLEXIBLE, wide=True)
    return bytes(out)


@lru_cache(1024)
def _encode_topic(topic: str, version: int) -> bytes:
    if version >= _FIRST_WITH_IDS:
        return uuid_bytes(topic)
    out = bytearray()
    write_string(out, topic, compact=version >= FIRST_FLEXIBLE)
    return bytes(out)


@cache
def _no_errors(version: int) -> bytes:
    """Return the bytes after the numbers of a partition without errors: no record errors, no message, no tags."""
    out = bytearray()
    if version >= 8:
        write_length(out, 0, compact=version >= FIRST_FLEXIBLE, wide=True)
        write_string(out, None, compact=version >= FIRST_FLEXIBLE)
    if version >= FIRST_FLEXIBLE:
        write_uvarint(out, 0)
    return bytes(out)
