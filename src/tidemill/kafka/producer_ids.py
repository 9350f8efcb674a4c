"""Producer ids, unique for ever across nodes: each node takes blocks from one register.

    kafka/producer-ids    {"next": first id of the next block}

I1  A block is handed out by exactly one won compare-and-set. After an unknown outcome the block is given up
    (a gap in the ids harms nobody), never guessed to be ours.
"""

from __future__ import annotations

import asyncio

import msgspec

from tidemill.base.clock import Rand
from tidemill.base.errors import Conflict, Unknown
from tidemill.consensus.api import Consensus

KEY = "kafka/producer-ids"
BLOCK_COUNT = 1000
FIRST_ID = 1000


class _Register(msgspec.Struct, frozen=True):
    next: int


class ProducerIds:
    def __init__(self, consensus: Consensus, rand: Rand) -> None:
        self._consensus = consensus
        self._rand = rand
        self._next = 0
        self._end = 0
        self._refill = asyncio.Lock()

    async def allocate(self) -> int:
        """Raises Unavailable or Closed."""
        while self._next >= self._end:
            async with self._refill:
                if self._next >= self._end:
                    first = await self._take_block()
                    self._next, self._end = first, first + BLOCK_COUNT
        self._next += 1
        return self._next - 1

    async def _take_block(self) -> int:
        while True:
            found = await self._consensus.head(KEY)
            first = msgspec.msgpack.decode(found.data, type=_Register).next if found is not None else FIRST_ID
            taken = msgspec.msgpack.encode(_Register(first + BLOCK_COUNT))
            try:
                await self._consensus.cas(KEY, found.seq if found else 0, taken, self._rand.nonce())
            except (Conflict, Unknown):
                continue
            return first
