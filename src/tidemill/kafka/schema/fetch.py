"""Hand-written codec of Fetch (key 1), versions 4 to 17: record batches are sent unchanged, in a gather list.

request   replica id int32 (≤ v14) · max wait int32 ms · min bytes int32 · max bytes int32 · isolation int8
          session id int32 · session epoch int32 (v7)
          topics [ name (≤ v12) | topic id (v13)
                   [ partition int32 · leader epoch int32 (v9) · fetch offset int64
                     last fetched epoch int32 (v12) · log start int64 (v5) · max bytes int32 ] ]
          forgotten topics [ name | topic id · [ partition int32 ] ] (v7) · rack string (v11)
response  throttle int32 · error int16 (v7) · session id int32 (v7)
          topics [ name | topic id
                   [ partition int32 · error int16 · high watermark int64 · last stable offset int64
                     log start int64 (v5) · aborted transactions nullable [ producer id int64 · first offset int64 ]
                     preferred replica int32 (v11)
                     records nullable bytes ] ]
v12 and later: compact lengths, tagged fields after every struct.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tidemill.kafka.schema.primitives import (
    I32,
    MalformedFrameError,
    count_elements,
    read_i32,
    read_i64,
    read_length,
    read_string,
    read_uuid,
    skip_tags,
    truncated_frame_error,
    uuid_bytes,
    write_length,
    write_string,
    write_uvarint,
)
from tidemill.objects.store import Buffer

FIRST_FLEXIBLE = 12
FIRST_WITH_IDS = 13
_SESSION = struct.Struct(">hi")
_V4 = struct.Struct(">ihqq")
_V5 = struct.Struct(">ihqqq")
_ABORTED = struct.Struct(">qq")


def _partition_struct(version: int) -> struct.Struct:
    """Return the layout of one requested partition: partition, offset, max bytes, and if flexible its count of tagged
    fields.
    """
    epochs, flexible = ("4x" if version >= 9 else ""), version >= FIRST_FLEXIBLE
    start = "8x" if version >= 5 else ""
    return struct.Struct(f">i{epochs}q{'4x' if flexible else ''}{start}i{'B' if flexible else ''}")


_PARTITION_STRUCTS = {version: _partition_struct(version) for version in range(4, 19)}


def _empty_answer_layout(version: int) -> tuple[struct.Struct, tuple[int, ...], tuple[int, ...]]:
    """Return the layout of a partition answer without records, and the values after its offsets.

    The values are given for a reader of uncommitted and of committed records: no aborted transactions (null, or an
    empty array), no preferred replica, no bytes, no tagged fields.
    """
    flexible = version >= FIRST_FLEXIBLE
    length, replica = ("B", "i") if flexible else ("i", "i" if version >= 11 else "")
    packed = struct.Struct(f">ihqq{'q' if version >= 5 else ''}{length}{replica}{length}{'B' if flexible else ''}")
    rest = (*((-1,) if replica else ()), *((1, 0) if flexible else (0,)))
    return packed, ((0 if flexible else -1), *rest), ((1 if flexible else 0), *rest)


_EMPTY_ANSWERS = {version: _empty_answer_layout(version) for version in range(4, 19)}


class FetchPartition(NamedTuple):
    partition: int
    offset: int
    max_bytes: int


class FetchTopic(NamedTuple):
    """Partitions of one topic in a request. `topic` is a name up to v12, a topic id from v13."""

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
    forgotten: list[tuple[str, list[int]]]
    """Tuples of (name or id, partitions)."""


class PartitionRecords(NamedTuple):
    """Answer for one partition.

    `aborted` has the (producer id, first offset) of each aborted transaction; None if uncommitted records are read.
    """

    partition: int
    error_code: int
    high_watermark: int = -1
    log_start_offset: int = -1
    batches: list[Buffer] = []
    last_stable: int = -1
    aborted: Sequence[tuple[int, int]] | None = None


def decode(view: memoryview, position: int, version: int) -> FetchRequest:
    """Decode a request body. Raises MalformedFrameError."""
    flexible = version >= FIRST_FLEXIBLE
    session_id, session_epoch = 0, -1
    if version <= 14:
        _, position = read_i32(view, position)
    max_wait_ms, position = read_i32(view, position)
    min_bytes, position = read_i32(view, position)
    max_bytes, position = read_i32(view, position)
    if position >= len(view):
        raise truncated_frame_error("isolation level", position)
    isolation_level = view[position]
    position += 1
    if version >= 7:
        session_id, position = read_i32(view, position)
        session_epoch, position = read_i32(view, position)
    topics: list[FetchTopic] = []
    topic_count, position = read_length(view, position, compact=flexible, wide=True)
    count_elements(topic_count)
    for _ in range(topic_count):
        name, position = _read_topic(view, position, version)
        partitions: list[FetchPartition] = []
        partition_count, position = read_length(view, position, compact=flexible, wide=True)
        count_elements(partition_count)
        whole, end = _read_untagged(view, position, version, partition_count)
        if whole is not None:
            partitions, position, partition_count = whole, end, 0
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
    forgotten: list[tuple[str, list[int]]] = []
    if version >= 7:
        forgotten, position = _read_forgotten(view, position, version)
    if version >= 11:
        _, position = read_string(view, position, compact=flexible)
    if flexible:
        skip_tags(view, position)
    asked = (max_wait_ms, min_bytes, max_bytes, isolation_level, session_id, session_epoch)
    return FetchRequest(*asked, topics, forgotten)


def _read_untagged(
    view: memoryview, position: int, version: int, count: int
) -> tuple[list[FetchPartition] | None, int]:
    """Read all partitions of a topic in one step, and return them with their end.

    Return None for the partitions if the entries exceed the frame or if one has tagged fields, because then they are
    not at fixed distances.
    """
    packed = _PARTITION_STRUCTS[version]
    end = position + max(count, 0) * packed.size
    if end > len(view):
        return None, position
    rows = list(packed.iter_unpack(view[position:end]))
    if version >= FIRST_FLEXIBLE and any(row[-1] for row in rows):
        return None, position
    return [FetchPartition(*row[:3]) for row in rows], end


def partition_entry_bytes(version: int) -> int:
    """Return the size of one partition in a request, without tagged fields."""
    return _PARTITION_STRUCTS[version].size


def decode_entry(entry: bytes, version: int) -> FetchPartition | None:
    """Decode one partition of a request; None if it has tagged fields."""
    row = _PARTITION_STRUCTS[version].unpack(entry)
    return None if version >= FIRST_FLEXIBLE and row[-1] else FetchPartition(*row[:3])


def _read_topic(view: memoryview, position: int, version: int) -> tuple[str, int]:
    if version >= FIRST_WITH_IDS:
        return read_uuid(view, position)
    name, position = read_string(view, position, compact=version >= FIRST_FLEXIBLE)
    if name is None:
        raise MalformedFrameError("null topic name in a Fetch request.")
    return name, position


def _read_forgotten(view: memoryview, position: int, version: int) -> tuple[list[tuple[str, list[int]]], int]:
    found: list[tuple[str, list[int]]] = []
    flexible = version >= FIRST_FLEXIBLE
    count, position = read_length(view, position, compact=flexible, wide=True)
    count_elements(count)
    for _ in range(count):
        topic, position = _read_topic(view, position, version)
        partition_count, position = read_length(view, position, compact=flexible, wide=True)
        count_elements(partition_count)
        end = position + 4 * max(partition_count, 0)
        if end > len(view):
            raise truncated_frame_error("forgotten partitions", position)
        found.append((topic, [partition for (partition,) in I32.iter_unpack(view[position:end])]))
        position = end
        if flexible:
            position = skip_tags(view, position)
    return found, position


def set_throttle(reply: list[Buffer], throttle_ms: int, at: int = 0) -> None:
    """Write the throttle time into an encoded response; it is the first field of a Fetch response."""
    first = reply[0]
    assert isinstance(first, bytearray)
    I32.pack_into(first, at, throttle_ms)


def encode(
    topics: list[tuple[str, list[PartitionRecords]]], version: int, *, error_code: int = 0, session_id: int = 0
) -> list[Buffer]:
    """Encode the response body as buffers to be sent back to back; record batches are not copied."""
    flexible = version >= FIRST_FLEXIBLE
    gathered: list[Buffer] = []
    out = bytearray(I32.pack(0))
    if version >= 7:
        out += _SESSION.pack(error_code, session_id)
    write_length(out, len(topics), compact=flexible, wide=True)
    for topic, partitions in topics:
        _write_topic(out, topic, len(partitions), version)
        for answer in partitions:
            if _is_empty(answer):
                out += _pack_empty(answer, version)
                continue
            _write_partition(out, answer, version)
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


class FetchAnswerTemplate:
    """Reusable answer about a fixed set of partitions.

    `fill` overwrites the entries of the partitions that changed. Each entry begins empty, and no partition occurs
    twice.
    """

    def __init__(self, topics: Iterable[tuple[str, Sequence[int]]], version: int) -> None:
        self._version = version
        self._size = _EMPTY_ANSWERS[version][0].size
        self._places: dict[tuple[str, int], int] = {}
        asked = list(topics)
        out = bytearray(I32.pack(0))
        if version >= 7:
            out += _SESSION.pack(0, 0)
        flexible = version >= FIRST_FLEXIBLE
        write_length(out, len(asked), compact=flexible, wide=True)
        for topic, partitions in asked:
            _write_topic(out, topic, len(partitions), version)
            for partition in partitions:
                self._places[topic, partition] = len(out)
                out += _pack_empty(PartitionRecords(partition, 0), version)
            if flexible:
                write_uvarint(out, 0)
        if flexible:
            write_uvarint(out, 0)
        self._out = out

    def fill(self, found: Iterable[tuple[tuple[str, int], PartitionRecords]]) -> list[Buffer]:
        """Return what `encode` would return for all partitions. Buffers that were returned before do not change."""
        out, size, version = self._out, self._size, self._version
        whole: list[tuple[int, PartitionRecords]] = []
        for key, answer in found:
            at = self._places[key]
            out[at : at + size] = _pack_empty(answer, version)
            if not _is_empty(answer):
                whole.append((at, answer))
        gathered: list[Buffer] = []
        rest, since = bytearray(), 0
        for at, answer in sorted(whole, key=lambda each: each[0]):
            rest += out[since:at]
            _write_partition(rest, answer, version)
            if answer.batches:
                gathered.append(rest)
                gathered += answer.batches
                rest = bytearray()
            if version >= FIRST_FLEXIBLE:
                write_uvarint(rest, 0)
            since = at + size
        rest += out[since:]
        gathered.append(rest)
        return gathered


def _write_topic(out: bytearray, topic: str, count: int, version: int) -> None:
    flexible = version >= FIRST_FLEXIBLE
    if version >= FIRST_WITH_IDS:
        out += uuid_bytes(topic)
    else:
        write_string(out, topic, compact=flexible)
    write_length(out, count, compact=flexible, wide=True)


def _is_empty(answer: PartitionRecords) -> bool:
    return not answer.batches and not answer.aborted


def _pack_empty(answer: PartitionRecords, version: int) -> bytes:
    """Encode one partition without records, always in the same number of bytes."""
    nothing, uncommitted, committed = _EMPTY_ANSWERS[version]
    start = (answer.log_start_offset,) if version >= 5 else ()
    rest = uncommitted if answer.aborted is None else committed
    offsets = (answer.high_watermark, answer.last_stable, *start)
    return nothing.pack(answer.partition, answer.error_code, *offsets, *rest)


def _write_partition(out: bytearray, answer: PartitionRecords, version: int) -> None:
    """Encode one partition up to its record batches."""
    flexible = version >= FIRST_FLEXIBLE
    head = (answer.partition, answer.error_code, answer.high_watermark, answer.last_stable)
    out += _V5.pack(*head, answer.log_start_offset) if version >= 5 else _V4.pack(*head)
    if answer.aborted:
        _write_aborted(out, answer.aborted, compact=flexible)
    else:
        write_length(out, -1 if answer.aborted is None else 0, compact=flexible, wide=True)
    if version >= 11:
        out += I32.pack(-1)
    write_length(out, sum(map(len, answer.batches)), compact=flexible, wide=True)


def _write_aborted(out: bytearray, aborted: Sequence[tuple[int, int]], *, compact: bool) -> None:
    write_length(out, len(aborted), compact=compact, wide=True)
    for producer_id, first_offset in aborted:
        out += _ABORTED.pack(producer_id, first_offset)
        if compact:
            write_uvarint(out, 0)
