"""Allocate producer ids for idempotent producers (InitProducerId): unique in the cluster, from reserved blocks.

register  topics/producer-ids    decimal text: the first id that is in no block yet
"""

from __future__ import annotations

import asyncio

from tidemill.base.clock import Rand
from tidemill.base.errors import ConflictError, UnknownOutcomeError
from tidemill.consensus.api import Consensus

REGISTER = "topics/producer-ids"
BLOCK_IDS = 1000
"""Ids per compare-and-set, as in Kafka's own allocation; ids that a process does not use are lost, by design."""


class ProducerIds:
    def __init__(self, consensus: Consensus, rand: Rand) -> None:
        self._consensus = consensus
        self._rand = rand
        self._next = 0
        self._end = 0
        self._lock = asyncio.Lock()

    async def allocate(self) -> int:
        """Allocate a producer id that is never allocated again. Raises UnavailableError."""
        async with self._lock:
            while self._next >= self._end:
                await self._reserve()
            self._next += 1
            return self._next - 1

    async def _reserve(self) -> None:
        found = await self._consensus.head(REGISTER)
        start = int(found.data) if found is not None else 1
        try:
            await self._consensus.cas(
                REGISTER, found.seq if found else 0, str(start + BLOCK_IDS).encode(), self._rand.nonce()
            )
        except (ConflictError, UnknownOutcomeError):
            # After a lost answer the block may be ours; reserving the next one is cheaper than finding out.
            return
        self._next, self._end = start, start + BLOCK_IDS
