"""All maintenance jobs, in one list. A new job is a module in `shards` or `topics`, and a line here."""

from __future__ import annotations

from tidemill.base.status.status import StatusTracker
from tidemill.maintenance.checkpoint.restore_horizon import RestoreHorizon
from tidemill.maintenance.scheduler import Job, JobContext
from tidemill.maintenance.shards.bindings import INTERVAL_S as BINDINGS_EVERY_S
from tidemill.maintenance.shards.bindings import BindingsUpkeep
from tidemill.maintenance.shards.orphans import OrphanCollector
from tidemill.maintenance.shards.upkeep import BUSY_S, ShardUpkeep
from tidemill.maintenance.topics.compaction import TopicCompaction
from tidemill.maintenance.topics.group_offsets import GroupOffsetsExpiry
from tidemill.maintenance.topics.l0_garbage import L0GarbageCollector
from tidemill.maintenance.topics.l1_garbage import L1GarbageCollector
from tidemill.maintenance.topics.l1_merge import L1Merger
from tidemill.maintenance.topics.pipeline_holds import PipelineHolds
from tidemill.maintenance.topics.rollups import RollupCollector
from tidemill.metastore.catalogue import Catalogue

ORPHANS_EVERY_S = 600.0
"""Interval. Each run lists the objects of all shards, at one request per thousand. Dropped shards are not urgent."""

TOPIC_OBJECTS_EVERY_S = 60.0
"""Interval. Each run lists the L0 objects, and reads the logs of the partitions that changed."""
TOPIC_ROLLUPS_EVERY_S = 300.0
TOPIC_L1_LEVELS_EVERY_S = 120.0
"""Interval. Each run reads the rows of L1's partitions; more where some of them gained extents."""
TOPIC_L1_EVERY_S = 300.0
"""Interval. Each run reads the rows of L1's partitions and objects, and lists the objects."""
TOPIC_COMPACTION_EVERY_S = 15.0
"""Interval, like Kafka's back-off. Each run reads the catalogue, the rows of a compacted topic, and its extents
where they changed."""
GROUP_OFFSETS_EVERY_S = 600.0


def build_jobs(context: JobContext, tracker: StatusTracker) -> list[Job]:
    """Create the jobs, one per line. The module of each job states what it deletes and why that is safe."""
    catalogue = Catalogue(context.metastore, context.clock, context.rand)
    persisted = RestoreHorizon(context.metastore)
    holds = PipelineHolds(context.consensus, catalogue, persisted, context.clock, context.rand)
    return [
        Job("shards", BUSY_S, ShardUpkeep(context, tracker)),
        Job("bindings", BINDINGS_EVERY_S, BindingsUpkeep(context, tracker)),
        Job("orphans", ORPHANS_EVERY_S, OrphanCollector(context)),
        Job("topic-objects", TOPIC_OBJECTS_EVERY_S, L0GarbageCollector(context)),
        Job("topic-rollups", TOPIC_ROLLUPS_EVERY_S, RollupCollector(context)),
        Job("topic-l1", TOPIC_L1_EVERY_S, L1GarbageCollector(context)),
        Job("topic-l1-levels", TOPIC_L1_LEVELS_EVERY_S, L1Merger(context)),
        Job("topic-compaction", TOPIC_COMPACTION_EVERY_S, TopicCompaction(context, holds)),
        Job("group-offsets", GROUP_OFFSETS_EVERY_S, GroupOffsetsExpiry(context)),
    ]
