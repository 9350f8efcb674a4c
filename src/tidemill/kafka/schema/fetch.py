"""Fetch (key 1), versions 4 to 17, by hand: record batches go out as they are, in a gather list.

request   replica id int32 (≤ v14) · max wait int32 ms · min bytes int32 · max bytes int32 · isolation int8
          session id int32 · session epoch int32 (v7)
          topics [ name (≤ v12) | topic id (v13)
                   [ partition int32 · leader epoch int32 (v9) · fetch offset int64
                     last fetched epoch int32 (v12) · log start int64 (v5) · max bytes int32 ] ]
          forgotten topics [ name | topic id · [ partition int32 ] ] (v7) · rack string (v11)
response  throttle int32 · error int16 (v7) · session id int32 (v7)
          topics [ name | topic id
                   [ partition int32 · error int16 · high watermark int64 · last stable offset int64
                     log start int64 (v5) · aborted transactions [ ] null · preferred replica int32 (v11)
                     records nullable bytes ] ]
v12 and later: compact lengths, tagged fields after every struct.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from tidemill.kafka.schema.wire import (
    I32,
    BadFrame,
    read_i32,
    read_i64,
    read_length,
    read_string,
    read_uuid,
    short,
    skip_tags,
    spend,
    uuid_bytes,
    write_length,
    write_string,
    write_uvarint,
)
from tidemill.objects.store import Buffer

FIRST_FLEXIBLE = 12
_FIRST_WITH_IDS = 13
_SESSION = struct.Struct(">hi")
_V4 = struct.Struct(">ihqq")
_V5 = struct.Struct(">ihqqq")


class FetchPartition(NamedTuple):
    partition: int
    offset: int
    max_bytes: int


class FetchTopic(NamedTuple):
    """topic: a name up to v12, a topic id from v13."""

    topic: str
    partitions: list[FetchPartition]


class FetchRequest(NamedTuple):
    max_wait_ms: int
    min_bytes: int
    max_bytes: int
    isolation_level: int
    session_id: int
    session_epoch: int
    topics: list[FetchTopic]


class PartitionRecords(NamedTuple):
    partition: int
    error_code: int
    high_watermark: int = -1
    log_start_offset: int = -1
    batches: list[Buffer] = []


def decode(view: memoryview, position: int, version: int) -> FetchRequest:
    """Raises BadFrame."""
    flexible = version >= FIRST_FLEXIBLE
    session_id, session_epoch = 0, -1
    if version <= 14:
        _, position = read_i32(view, position)
    max_wait_ms, position = read_i32(view, position)
    min_bytes, position = read_i32(view, position)
    max_bytes, position = read_i32(view, position)
    if position >= len(view):
        raise short("isolation level", position)
    isolation_level = view[position]
    position += 1
    if version >= 7:
        session_id, position = read_i32(view, position)
        session_epoch, position = read_i32(view, position)
    topics: list[FetchTopic] = []
    topic_count, position = read_length(view, position, compact=flexible, wide=True)
    spend(topic_count)
    for _ in range(topic_count):
        name, position = _read_topic(view, position, version)
        partitions: list[FetchPartition] = []
        partition_count, position = read_length(view, position, compact=flexible, wide=True)
        spend(partition_count)
        for _ in range(partition_count):
            index, position = read_i32(view, position)
            if version >= 9:
                _, position = read_i32(view, position)
            offset, position = read_i64(view, position)
            if version >= 12:
                _, position = read_i32(view, position)
            if version >= 5:
                _, position = read_i64(view, position)
            max_partition_bytes, position = read_i32(view, position)
            if flexible:
                position = skip_tags(view, position)
            partitions.append(FetchPartition(index, offset, max_partition_bytes))
        if flexible:
            position = skip_tags(view, position)
        topics.append(FetchTopic(name, partitions))
    if version >= 7:
        position = _skip_forgotten(view, position, version)
    if version >= 11:
        _, position = read_string(view, position, compact=flexible)
    if flexible:
        skip_tags(view, position)
    return FetchRequest(max_wait_ms, min_bytes, max_bytes, isolation_level, session_id, session_epoch, topics)


def _read_topic(view: memoryview, position: int, version: int) -> tuple[str, int]:
    if version >= _FIRST_WITH_IDS:
        return read_uuid(view, position)
    name, position = read_string(view, position, compact=version >= FIRST_FLEXIBLE)
    if name is None:
        raise BadFrame("null topic name in a Fetch request.")
    return name, position


def _skip_forgotten(view: memoryview, position: int, version: int) -> int:
    flexible = version >= FIRST_FLEXIBLE
    count, position = read_length(view, position, compact=flexible, wide=True)
    spend(count)
    for _ in range(count):
        _, position = _read_topic(view, position, version)
        partition_count, position = read_length(view, position, compact=flexible, wide=True)
        position += 4 * max(partition_count, 0)
        if position > len(view):
            raise short("forgotten partitions", position)
        if flexible:
            position = skip_tags(view, position)
    return position


def encode(topics: list[tuple[str, list[PartitionRecords]]], version: int, *, error_code: int = 0) -> list[Buffer]:
    """The response body as buffers to be written back to back; record batches are not copied."""
    flexible = version >= FIRST_FLEXIBLE
    gathered: list[Buffer] = []
    out = bytearray(I32.pack(0))
    if version >= 7:
        out += _SESSION.pack(error_code, 0)
    write_length(out, len(topics), compact=flexible, wide=True)
    for topic, partitions in topics:
        if version >= _FIRST_WITH_IDS:
            out += uuid_bytes(topic)
        else:
            write_string(out, topic, compact=flexible)
        write_length(out, len(partitions), compact=flexible, wide=True)
        for answer in partitions:
            watermark = answer.high_watermark
            if version >= 5:
                out += _V5.pack(answer.partition, answer.error_code, watermark, watermark, answer.log_start_offset)
            else:
                out += _V4.pack(answer.partition, answer.error_code, watermark, watermark)
            write_length(out, -1, compact=flexible, wide=True)
            if version >= 11:
                out += I32.pack(-1)
            write_length(out, sum(map(len, answer.batches)), compact=flexible, wide=True)
            if answer.batches:
                gathered.append(out)
                gathered += answer.batches
                out = bytearray()
            if flexible:
                write_uvarint(out, 0)
        if flexible:
            write_uvarint(out, 0)
    if flexible:
        write_uvarint(out, 0)
    gathered.append(out)
    return gathered
