"""The job `topic-groups`: committed offsets of deleted topics leave their groups' registers.

Groups are read first, topics afterwards: whatever a group has committed to was there before, so a topic that is not
there now was deleted. A group that commits meanwhile is left for the next step.
"""

from __future__ import annotations

from tidemill.base.errors import Conflict
from tidemill.keeper.grounds import Grounds
from tidemill.keeper.jobs import Budget
from tidemill.metastore.rows import TOPICS
from tidemill.topics.group_offsets import all_groups, decode_offsets, replace_group


class TopicGroups:
    def __init__(self, grounds: Grounds) -> None:
        self._g = grounds
        self._dropped = 0

    def facts(self) -> dict[str, object]:
        return {"dropped_topics": self._dropped}

    async def run(self, budget: Budget) -> bool:
        groups = await all_groups(self._g.consensus)
        if not groups:
            return False
        topics = {row.topic_id for row in await self._g.metastore.rows(TOPICS)}
        for group, (seq, data) in groups.items():
            offsets = decode_offsets(data, group)
            kept = {topic_id: committed for topic_id, committed in offsets.items() if topic_id in topics}
            if len(kept) == len(offsets):
                continue
            try:
                await replace_group(self._g.consensus, self._g.rand, group, seq, kept)
            except Conflict:
                continue
            self._dropped += len(offsets) - len(kept)
            if not budget.left:
                return True
        return False
