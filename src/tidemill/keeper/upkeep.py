"""Every job of the keeper, in one list."""

from __future__ import annotations

from tidemill.base.marks import Tracker
from tidemill.keeper.bindings_upkeep import EVERY_S as BINDINGS_EVERY_S
from tidemill.keeper.bindings_upkeep import BindingsUpkeep
from tidemill.keeper.grounds import Grounds
from tidemill.keeper.jobs import Job
from tidemill.keeper.orphans import Orphans
from tidemill.keeper.shard_upkeep import BUSY_S, ShardUpkeep
from tidemill.keeper.topic_groups import TopicGroups
from tidemill.keeper.topic_objects import TopicObjects
from tidemill.keeper.topic_rollups import TopicRollups

ORPHANS_EVERY_S = 600.0
"""A listing of all the shards' objects, a request for each thousand of them: what was dropped has a while."""

TOPIC_OBJECTS_EVERY_S = 60.0
"""A listing of the L0 objects, and a reading of the partitions' logs where something changed."""
TOPIC_ROLLUPS_EVERY_S = 300.0
TOPIC_GROUPS_EVERY_S = 600.0


def jobs(grounds: Grounds, tracker: Tracker) -> list[Job]:
    """One line a job; its module says what it takes away and why that is safe."""
    shards = ShardUpkeep(grounds, tracker)
    bindings = BindingsUpkeep(grounds, tracker)
    orphans = Orphans(grounds)
    topic_objects, topic_rollups = TopicObjects(grounds), TopicRollups(grounds)
    topic_groups = TopicGroups(grounds)
    return [
        Job("shards", BUSY_S, shards.run, shards.facts),
        Job("bindings", BINDINGS_EVERY_S, bindings.run, bindings.facts),
        Job("orphans", ORPHANS_EVERY_S, orphans.run, orphans.facts),
        Job("topic-objects", TOPIC_OBJECTS_EVERY_S, topic_objects.run, topic_objects.facts),
        Job("topic-rollups", TOPIC_ROLLUPS_EVERY_S, topic_rollups.run, topic_rollups.facts),
        Job("topic-groups", TOPIC_GROUPS_EVERY_S, topic_groups.run, topic_groups.facts),
    ]
