"""Comparison of a Fetch request with the previous one as bytes, so that Python decodes only the entries that differ.

    body   head (times, limits, isolation, session) · count · topic groups · tail (forgotten, rack, tags)
    group  topic · count · entries of one size each · tags

librdkafka begins each request at another partition than the last one, so the groups are those of the last request in
another order, and the entries of a topic may be in two groups.

Invariant (same request): two requests are comparable only if they differ in nothing but the order and the fields of
entries. A request whose entries or groups have tagged fields, or that names a partition twice, is never comparable.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from typing import NamedTuple

from tidemill.kafka.schema.fetch import FIRST_FLEXIBLE, FIRST_WITH_IDS, FetchPartition, FetchTopic, decode_entry
from tidemill.kafka.schema.fetch import partition_entry_bytes as entry_bytes
from tidemill.kafka.schema.primitives import MalformedFrameError, read_length

_PREFIX_BYTES = 64


class _Groups(NamedTuple):
    """Topic groups of a body: bytes of the topic and of its entries, starts of the groups, and the common end."""

    found: list[tuple[bytes, bytes]]
    starts: array[int]
    end: int


class _Topic:
    """Last entries of one topic. `known` and `from_body` are filled when another order occurs first."""

    __slots__ = ("blob", "known", "name", "of")

    def __init__(self, name: str, blob: bytes) -> None:
        self.name = name
        self.blob = blob
        self.known: set[bytes] | None = None
        self.of: dict[int, bytes] = {}


class RequestDiff:
    def __init__(self, body: bytes, version: int, groups: _Groups, topics: dict[bytes, _Topic]) -> None:
        self._version = version
        self._size = entry_bytes(version)
        self._head, self._tail = body[: _head_bytes(version)], body[groups.end :]
        self._topics = topics
        self._region = b""
        self._starts: array[int] = array("I")
        self._remember(body, groups)

    @staticmethod
    def from_body(body: bytes, version: int, topics: list[FetchTopic]) -> RequestDiff | None:
        """Return the diff base of a body that was decoded as `topics`, or None if later requests are not comparable
        with it.
        """
        groups = _split_groups(body, version)
        if groups is None or len(groups.found) != len(topics):
            return None
        made: dict[bytes, _Topic] = {}
        named: set[tuple[str, int]] = set()
        count = 0
        for (key, blob), topic in zip(groups.found, topics, strict=True):
            if [
                decode_entry(entry, version) for entry in _split_entries(blob, entry_bytes(version))
            ] != topic.partitions:
                return None
            made.setdefault(key, _Topic(topic.topic, b"")).blob += blob
            named.update((topic.topic, entry.partition) for entry in topic.partitions)
            count += len(topic.partitions)
        return RequestDiff(body, version, groups, made) if len(named) == count else None

    def changed_topics(self, body: bytes, version: int) -> list[FetchTopic] | None:
        """Return the entries that this request changes; the request then becomes the last one.

        Return None if it is not comparable; this object must not be used any more then.
        """
        head = len(self._head)
        if version != self._version or body[:head] != self._head:
            return None
        if self._is_rotation(body):
            return []
        groups = _split_groups(body, version)
        if groups is None or body[groups.end :] != self._tail:
            return None
        whole: set[bytes] = set()
        parts: dict[bytes, list[bytes]] = {}
        for key, blob in groups.found:
            topic = self._topics.get(key)
            if topic is None:
                return None
            if blob == topic.blob and key not in whole and key not in parts:
                whole.add(key)
            else:
                parts.setdefault(key, []).extend(_split_entries(blob, self._size))
        if len(whole) + len(parts) != len(self._topics) or not whole.isdisjoint(parts):
            return None
        found: list[FetchTopic] = []
        for key, entries in parts.items():
            changed = self._changed_entries(self._topics[key], entries)
            if changed is None:
                return None
            if changed:
                found.append(FetchTopic(self._topics[key].name, changed))
        self._remember(body, groups)
        return found

    def _changed_entries(self, topic: _Topic, entries: list[bytes]) -> list[FetchPartition] | None:
        """Return the entries of the topic that differ from the last ones, or None if they name other partitions."""
        if len(entries) * self._size != len(topic.blob):
            return None
        if topic.known is None:
            topic.known = set(_split_entries(topic.blob, self._size))
            topic.of = {int.from_bytes(entry[:4], "big", signed=True): entry for entry in topic.known}
        given, changed = set(entries), []
        for entry in given - topic.known:
            asked = decode_entry(entry, self._version)
            former = topic.of.get(asked.partition) if asked is not None else None
            if asked is None or former is None:
                return None
            topic.known.discard(former)
            topic.known.add(entry)
            topic.of[asked.partition] = entry
            changed.append(asked)
        topic.blob = b"".join(entries)
        return changed if given == topic.known else None

    def _is_rotation(self, body: bytes) -> bool:
        """Return whether the body has the same groups, rotated."""
        head, region = len(self._head), self._region
        if len(body) != head + len(region) + len(self._tail) or not body.endswith(self._tail):
            return False
        now = body[head : head + len(region)]
        if now == region:
            return True
        count = 4 if self._version < FIRST_FLEXIBLE else _varint_bytes(region)
        at = region.find(now[count : count + _PREFIX_BYTES], count)
        place = bisect_left(self._starts, head + at)
        if at < 0 or place == len(self._starts) or self._starts[place] != head + at:
            return False
        return now[:count] == region[:count] and now[count:] == region[at:] + region[count:at]

    def _remember(self, body: bytes, groups: _Groups) -> None:
        self._region, self._starts = body[len(self._head) : groups.end], groups.starts


def _split_groups(body: bytes, version: int) -> _Groups | None:
    size, flexible = entry_bytes(version), version >= FIRST_FLEXIBLE
    view = memoryview(body)
    found: list[tuple[bytes, bytes]] = []
    starts = array("I")
    try:
        count, at = read_length(view, _head_bytes(version), compact=flexible, wide=True)
        for _ in range(count):
            start = at
            if version >= FIRST_WITH_IDS:
                at += 16
            else:
                length, at = read_length(view, at, compact=flexible, wide=False)
                at += max(length, 0)
            key = body[start:at]
            if flexible and at < len(body) and 0 < body[at] < 0x80:
                entries, at = body[at] - 1, at + 1
            else:
                entries, at = read_length(view, at, compact=flexible, wide=True)
            end = at + entries * size
            if entries < 0 or end + flexible > len(body) or (flexible and body[end]):
                return None
            found.append((key, body[at:end]))
            starts.append(start)
            at = end + flexible
    except MalformedFrameError:
        return None
    return _Groups(found, starts, at)


def _split_entries(blob: bytes, size: int) -> list[bytes]:
    return [blob[at : at + size] for at in range(0, len(blob), size)]


def _head_bytes(version: int) -> int:
    return 13 + (4 if version <= 14 else 0) + (8 if version >= 7 else 0)


def _varint_bytes(data: bytes) -> int:
    return next(number for number, byte in enumerate(data, 1) if byte < 0x80)
