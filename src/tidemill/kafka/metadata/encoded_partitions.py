"""Cache of partitions as Metadata responses encode them, one entry for each tuple of leaders.

An entry depends on nothing but its key, so it is never stale. It contains no authorization: each answer decides which
topics its client sees. Topics with equal leaders share an entry, as all topics of one partition on one node do.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Final

from tidemill.base.limits import MIB
from tidemill.kafka import error_codes
from tidemill.kafka.schema.codec_compiler import encode_field

CACHE_BYTES_MAX: Final = 8 * MIB
"""Maximum size of the cache; one partition takes some 60 bytes."""
LARGE_PARTITIONS: Final = 1_000
"""Number of partitions from which encoding runs in a thread: some 5 ms of work."""
NO_LEADER: Final = -1

Leaders = tuple[int, ...]
"""Node id of each partition's leader, or NO_LEADER."""


class EncodedPartitions:
    def __init__(self, bytes_max: int = CACHE_BYTES_MAX) -> None:
        self._kept: OrderedDict[tuple[int, Leaders], bytes] = OrderedDict()
        self.bytes_max = bytes_max
        self.used_bytes = 0

    def cached(self, version: int, leaders: Leaders) -> bytes | None:
        """Return the cached field `partitions` of a topic in a Metadata answer, or None."""
        found = self._kept.get((version, leaders))
        if found is not None:
            self._kept.move_to_end((version, leaders))
        return found

    async def partitions(self, version: int, leaders: Leaders) -> bytes:
        """Return the field `partitions` of a topic in a Metadata answer, and encode it if it is not cached."""
        key, found = (version, leaders), self.cached(version, leaders)
        if found is not None:
            return found
        if len(leaders) < LARGE_PARTITIONS:
            made = _encode(version, leaders)
        else:
            made = await asyncio.to_thread(_encode, version, leaders)
        if key not in self._kept:
            self._kept[key] = made
            self.used_bytes += _cost(key, made)
            while self.used_bytes > self.bytes_max and len(self._kept) > 1:
                self.used_bytes -= _cost(*self._kept.popitem(last=False))
        return made


def _cost(key: tuple[int, Leaders], encoded: bytes) -> int:
    return 256 + 8 * len(key[1]) + len(encoded)


def _encode(version: int, leaders: Leaders) -> bytes:
    partitions = [
        {
            "error_code": error_codes.LEADER_NOT_AVAILABLE if leader == NO_LEADER else 0,
            "partition_index": index,
            "leader_id": leader,
            "replica_nodes": [] if leader == NO_LEADER else [leader],
            "isr_nodes": [] if leader == NO_LEADER else [leader],
        }
        for index, leader in enumerate(leaders)
    ]
    return encode_field(3, version, ("topics", "partitions"), partitions)
