"""Assignments that clients name for new partitions, checked by Kafka's rules. What they say decides nothing here: a
partition has one leader, which its lease names, and copies are the bucket's.
"""

from __future__ import annotations

from collections.abc import Sequence

from tidemill.base.errors import InvalidError
from tidemill.kafka.api.context import Broker


class InvalidReplicaAssignmentError(InvalidError):
    """INVALID_REPLICA_ASSIGNMENT."""


def check_assignments(lists: Sequence[Sequence[int]], count: int, brokers: Sequence[Broker]) -> None:
    """`lists`: the broker ids of each of `count` partitions. Raises InvalidReplicaAssignmentError."""
    if len(lists) != count:
        raise InvalidReplicaAssignmentError(
            f"an assignment for every new partition is needed: partitions={count} assignments={len(lists)}."
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
                f"an assignment names unknown brokers: brokers={unknown}.", fix=f"Known are {sorted(known)}."
            )
