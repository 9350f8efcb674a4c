"""Stream topics that have had a record since they were created, whether or not a node has opened their partitions.

A node reports a topic from the first use of a partition on. Before, only the logs of its partitions show whether it has
records.
"""

from __future__ import annotations

from tidemill.consensus.api import Consensus, read_all_changes
from tidemill.topics.partition.recovery import LOG_PREFIX, parse_log_name


class WrittenTopics:
    """Ids of the topics with records. One request to consensus per update while no log changes."""

    def __init__(self) -> None:
        self._token = ""
        self._ids: set[str] = set()

    async def update(self, consensus: Consensus) -> frozenset[str]:
        """Read the logs that changed since the last call, and return all ids. Raises UnavailableError."""
        heads, self._token = await read_all_changes(consensus, LOG_PREFIX, self._token)
        names = (name.removeprefix(LOG_PREFIX) for name, head in heads.items() if name.startswith(LOG_PREFIX))
        self._ids |= {parse_log_name(name)[0] for name in names if heads[LOG_PREFIX + name].next > 0}
        return frozenset(self._ids)
