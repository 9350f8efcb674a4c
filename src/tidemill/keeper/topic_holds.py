"""What pipelines have not read of a topic yet: retention takes no record before every table made from it holds it.

A table's upper says up to which time it is: the lesser of what it has and what a restore from the newest manifest
would bring back, for that table reads on from there. The bindings of the topic say up to which offsets that time
reaches. A pipeline whose table does not exist yet holds everything. So does one that stands: its mark says why.
"""

from __future__ import annotations

from collections.abc import Mapping

from tidemill.base.clock import Clock, Rand
from tidemill.consensus.api import Consensus
from tidemill.keeper.persisted import Persisted
from tidemill.metastore.catalogue import Catalogue, PipelineRow, TopicRow
from tidemill.shards.commands import Create
from tidemill.shards.machine import shard_replica
from tidemill.shards.open import open_remap, registered


class PipelineHolds:
    """Implements `topics.retention.Holds`."""

    def __init__(
        self, consensus: Consensus, catalogue: Catalogue, persisted: Persisted, clock: Clock, rand: Rand
    ) -> None:
        self._consensus = consensus
        self._catalogue = catalogue
        self._persisted = persisted
        self._clock = clock
        self._rand = rand

    async def __call__(self, topic: TopicRow) -> Mapping[int, int] | None:
        """Raises Unavailable, Corrupt."""
        tables = {
            shard
            for pipeline in await self._catalogue.list(PipelineRow)
            for shard, source in pipeline.tables.items()
            if source == f"topic:{topic.name}"
        }
        held: dict[int, int] = {}
        remap = await open_remap(self._consensus, self._clock, self._rand, f"topic/{topic.name}")
        for shard in sorted(tables):
            found = await registered(self._consensus, shard)
            if found is None or not isinstance(found[0], Create):
                return None
            state = await shard_replica(self._consensus, found[0].shard_id).load()
            restored = (await self._persisted.held(shard, found[0].shard_id)).upper
            upper = min(state.upper, restored) if state is not None else 0
            binding = await remap.at(upper - 1) if upper > 0 else None
            if binding is None:
                return None
            offsets = binding.offsets.get(topic.topic_id, ())
            for partition in range(topic.partitions):
                offset = offsets[partition] if partition < len(offsets) else 0
                held[partition] = min(held.get(partition, offset), offset)
        return held
