"""Assignment of groups and transactional ids to coordinating nodes, by rendezvous hashing over the live nodes, as
partitions are assigned to leaders.

Equal views give equal owners, and views converge within a poll. While they differ, two nodes may both claim a group or
id. Their writes are fenced (groups) or compare-and-set (transactions), so at most one of them makes progress.
"""

from __future__ import annotations

from tidemill.kafka.api.context import Broker, Context
from tidemill.topics.membership import rendezvous_leader


class CoordinatorLookup:
    def __init__(self, context: Context) -> None:
        self._context = context

    def group_coordinator(self, group: str) -> Broker:
        return self._coordinator_of(f"group/{group}")

    def transaction_coordinator(self, transactional_id: str) -> Broker:
        return self._coordinator_of(f"transaction/{transactional_id}")

    def coordinates_group(self, group: str) -> bool:
        return self.group_coordinator(group).name == self._context.own.name

    def coordinates_transaction(self, transactional_id: str) -> bool:
        return self.transaction_coordinator(transactional_id).name == self._context.own.name

    def _coordinator_of(self, place: str) -> Broker:
        """Return the owner of a place.

        A node that has not joined yet, or has left, coordinates nothing as long as there is another one.
        """
        brokers = self._context.coordinator_nodes()
        if len(brokers) == 1:
            return brokers[0]
        name = rendezvous_leader([broker.name for broker in brokers], place, 0)
        return next(broker for broker in brokers if broker.name == name)
