"""Check of the replica assignments that clients specify for new partitions, by Kafka's rules.

The assignments have no effect here: a partition has one leader, which its lease names, and the bucket replicates the
data.
"""

from __future__ import annotations

from collections.abc import Sequence

from tidemill.base.errors import InvalidError
from tidemill.kafka.api.context import Broker


class InvalidReplicaAssignmentError(InvalidError):
    """Error with the code INVALID_REPLICA_ASSIGNMENT."""


def check_assignments(lists: Sequence[Sequence[int]], count: int, brokers: Sequence[Broker]) -> None:
    """Check `lists`, the broker ids of each of `count` partitions. Raises InvalidReplicaAssignmentError."""
    if len(lists) != count:
        raise InvalidReplicaAssignmentError(
            f"every new partition needs an assignment: partitions={count} assignments={len(lists)}."
        )
    known = {broker.node_id for broker in brokers}
    for ids in lists:
        if not ids:
            raise InvalidReplicaAssignmentError("an assignment names no broker.")
        if len(set(ids)) != len(ids):
            raise InvalidReplicaAssignmentError(f"an assignment names a broker twice: brokers={list(ids)}.")
        if len(ids) != len(lists[0]):
            raise InvalidReplicaAssignmentError(
                f"the assignments have different replication factors: brokers={list(ids)}."
            )
        if unknown := sorted(set(ids) - known):
            raise InvalidReplicaAssignmentError(
                f"an assignment names unknown brokers: brokers={unknown}.", fix=f"Use brokers of {sorted(known)}."
            )
