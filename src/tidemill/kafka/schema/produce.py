"""Produce (key 0), versions 3 to 13, by hand: record batches stay views into the frame.

request   transactional_id  nullable string
          acks              int16      0 = no response at all, 1, −1 = all
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
from collections.abc import Iterable
from typing import NamedTuple

from tidemill.kafka.schema.wire import (
    I32,
    BadFrame,
    read_bytes,
    read_i16,
    read_i32,
    read_length,
    read_string,
    read_uuid,
    skip_tags,
    spend,
    uuid_bytes,
    write_length,
    write_string,
    write_uvarint,
)

FIRST_FLEXIBLE = 9
_FIRST_WITH_IDS = 13
_V3 = struct.Struct(">ihqq")
_V5 = struct.Struct(">ihqqq")


class PartitionData(NamedTuple):
    partition: int
    records: memoryview | None


class TopicData(NamedTuple):
    """topic: a name up to v12, a topic id from v13."""

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


def decode(view: memoryview, position: int, version: int) -> ProduceRequest:
    """Raises BadFrame."""
    flexible = version >= FIRST_FLEXIBLE
    transactional_id, position = read_string(view, position, compact=flexible)
    acks, position = read_i16(view, position)
    timeout_ms, position = read_i32(view, position)
    topics: list[TopicData] = []
    topic_count, position = read_length(view, position, compact=flexible, wide=True)
    spend(topic_count)
    for _ in range(topic_count):
        name: str | None
        if version >= _FIRST_WITH_IDS:
            name, position = read_uuid(view, position)
        else:
            name, position = read_string(view, position, compact=flexible)
        if name is None:
            raise BadFrame("null topic name in a Produce request.")
        partitions: list[PartitionData] = []
        partition_count, position = read_length(view, position, compact=flexible, wide=True)
        spend(partition_count)
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


def encode(topics: Iterable[tuple[str, list[PartitionAnswer]]], version: int) -> bytearray:
    flexible = version >= FIRST_FLEXIBLE
    topics = list(topics)
    out = bytearray()
    write_length(out, len(topics), compact=flexible, wide=True)
    for topic, answers in topics:
        if version >= _FIRST_WITH_IDS:
            out += uuid_bytes(topic)
        else:
            write_string(out, topic, compact=flexible)
        write_length(out, len(answers), compact=flexible, wide=True)
        for answer in answers:
            if version >= 5:
                out += _V5.pack(answer.partition, answer.error_code, answer.base_offset, -1, answer.log_start_offset)
            else:
                out += _V3.pack(answer.partition, answer.error_code, answer.base_offset, -1)
            if version >= 8:
                write_length(out, len(answer.record_errors), compact=flexible, wide=True)
                for index, message in answer.record_errors:
                    out += I32.pack(index)
                    write_string(out, message, compact=flexible)
                    if flexible:
                        write_uvarint(out, 0)
                write_string(out, answer.error_message, compact=flexible)
            if flexible:
                write_uvarint(out, 0)
        if flexible:
            write_uvarint(out, 0)
    out += I32.pack(0)
    if flexible:
        write_uvarint(out, 0)
    return out
