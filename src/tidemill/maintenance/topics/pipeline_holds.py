"""Records of a topic that pipelines have not read yet: retention removes no record before every table made from it
holds it.

A table's upper says how far it is. The lesser of its upper and the upper that a restore from the newest manifest would
bring back counts, because the restored table reads on from there. The bindings of the topic translate that time to
offsets. A pipeline whose table does not exist yet holds everything. So does a pipeline that is stalled: its stage
status says why.

Retention does not apply to a captured table's topic, but the topic may be compacted: not beyond what the oldest binding
of its capture covers. A future pipeline begins with that binding, and finds the tables as they were at every time from
there.
"""

from __future__ import annotations

from collections.abc import Mapping

from tidemill.base.clock import Clock, Rand
from tidemill.consensus.api import Consensus
from tidemill.maintenance.checkpoint.restore_horizon import RestoreHorizon
from tidemill.metastore.catalogue import Catalogue, PipelineRow, TopicRow
from tidemill.metastore.rows.catalogue import source_of
from tidemill.shards.api import Binding
from tidemill.shards.registry import open_remap, read_registration
from tidemill.shards.state.commands import Create
from tidemill.shards.state.state_machine import shard_replica


class PipelineHolds:
    """Holds of pipelines; implements `topics.lifecycle.retention.RetentionHolds`."""

    def __init__(
        self, consensus: Consensus, catalogue: Catalogue, persisted: RestoreHorizon, clock: Clock, rand: Rand
    ) -> None:
        self._consensus = consensus
        self._catalogue = catalogue
        self._persisted = persisted
        self._clock = clock
        self._rand = rand

    async def __call__(self, topic: TopicRow) -> Mapping[int, int] | None:
        """Return the first unread offset by partition; None if everything is held. Raises UnavailableError,
        CorruptError."""
        fed_by = await self._captured_source(topic) if topic.kind == "capture" else f"topic:{topic.name}"
        if not fed_by:
            return None
        tables = {
            shard
            for pipeline in await self._catalogue.list(PipelineRow)
            for shard, source in pipeline.tables.items()
            if source == fed_by
        }
        held: dict[int, int] = {}
        remap = await open_remap(self._consensus, self._clock, self._rand, source_of(fed_by))
        if topic.kind == "capture":
            oldest_ms = await remap.oldest_ms()
            first = await remap.at(oldest_ms) if oldest_ms is not None else None
            if first is None:
                return None
            held = _binding_offsets(first, topic)
        for shard in sorted(tables):
            found = await read_registration(self._consensus, shard)
            if found is None or not isinstance(found[0], Create):
                return None
            state = await shard_replica(self._consensus, found[0].shard_id).load()
            restored = (await self._persisted.persisted_shard(shard, found[0].shard_id)).upper
            upper = min(state.upper, restored) if state is not None else 0
            binding = await remap.at(upper - 1) if upper > 0 else None
            if binding is None:
                return None
            for partition, offset in _binding_offsets(binding, topic).items():
                held[partition] = min(held.get(partition, offset), offset)
        return held

    async def _captured_source(self, topic: TopicRow) -> str:
        """Return the pipeline source that a captured table's topic feeds; "" if no table has the topic any more."""
        for row in await self._catalogue.all_tables():
            if row.topic == topic.name:
                return f"capture:{row.capture}:{row.table}"
        return ""


def _binding_offsets(binding: Binding, topic: TopicRow) -> dict[int, int]:
    offsets = binding.offsets.get(topic.topic_id, ())
    return {p: offsets[p] if p < len(offsets) else 0 for p in range(topic.partitions)}
