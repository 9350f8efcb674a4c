"""Durable state of a group: its rows, and the group rebuilt from them (layouts: `metastore.rows`).

A group of the classic protocol is written as a whole; of one of the consumer protocol only the changed members are
written. The partitions of a large member are rows of their own, so that their number has no limit in the size of a
value. Those of other members are in the member's row, which every version of tidemill reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from tidemill.kafka.groups.classic.state import ClassicGroup, ClassicMember, GroupLimits, Phase
from tidemill.kafka.groups.consumer.sizes import GROUP_BYTES_MAX
from tidemill.kafka.groups.consumer.state import ClassicSubscription, ConsumerGroup, ConsumerGroupMember, iterate_places
from tidemill.kafka.groups.protocol_migration import begin_durable_rebalance
from tidemill.metastore.rows import GROUP_MEMBERS, GROUP_PARTITIONS
from tidemill.metastore.rows import groups as group_rows
from tidemill.metastore.rows.groups import (
    ConsumerMember,
    GroupMemberRow,
    GroupPartitionsRow,
    GroupRow,
    partition_rows,
)

Rows = list[tuple[bytes, bytes]]
StoredMembers = Mapping[str, int]
"""Members that have rows, with the number of rows of their partitions."""
CLASSIC, CONSUMER = "classic", "consumer"


def kind_of(group: ClassicGroup | ConsumerGroup) -> str:
    return CONSUMER if isinstance(group, ConsumerGroup) else CLASSIC


def head_row(group: ClassicGroup | ConsumerGroup, owner: str, now_ms: int) -> GroupRow:
    if isinstance(group, ConsumerGroup):
        return GroupRow(
            group.name,
            CONSUMER,
            owner,
            group.protocol_type,
            group.assignor,
            group.epoch,
            members=len(group.members),
            since_ms=now_ms,
            target_epoch=group.target_epoch,
            topics_digest=group.digest,
        )
    return GroupRow(
        group.name,
        CLASSIC,
        owner,
        group.protocol_type,
        group.protocol,
        group.generation,
        group.leader,
        len(group.members),
        now_ms,
    )


def count_stored(members: Iterable[GroupMemberRow], partitions: Iterable[GroupPartitionsRow]) -> dict[str, int]:
    return {row.member_id: 0 for row in members} | Counter(row.member_id for row in partitions)


def member_rows(
    group: ClassicGroup | ConsumerGroup, stored: StoredMembers, changed: frozenset[str]
) -> tuple[Rows, StoredMembers]:
    """Return the rows of the members, and what is stored once they are written.

    They replace the rows of the `changed` members, or of all in a group of the classic protocol, and delete those of
    members that were `stored` and are not in the group any more.
    """
    rows: Rows = []
    counts = {member_id: stored.get(member_id, 0) for member_id in group.members}
    if isinstance(group, ConsumerGroup):
        for member_id, of_member in _consumer_rows(group, changed).items():
            rows += of_member
            counts[member_id] = len(of_member) - 1
    else:
        rows += _classic_rows(group)
        counts = dict.fromkeys(group.members, 0)
    deleted = [GROUP_MEMBERS.key(group.name, member_id) for member_id in stored if member_id not in counts]
    for member_id, count in stored.items():
        numbers = range(counts.get(member_id, 0), count)
        deleted += [GROUP_PARTITIONS.key(group.name, member_id, number) for number in numbers]
    return [*((key, b"") for key in deleted), *rows], counts


def _classic_rows(group: ClassicGroup) -> Rows:
    """Return the member rows, with the assignment that is being written."""
    assigning = group.assigning
    return [
        GROUP_MEMBERS.encode(
            GroupMemberRow(
                group.name,
                member.member_id,
                member.instance_id,
                member.client_id,
                member.client_host,
                member.session_ms,
                member.rebalance_ms,
                member.protocols,
                member.assignment if assigning is None else assigning.get(member.member_id, b""),
            )
        )
        for member in group.members.values()
    ]


def _consumer_rows(group: ConsumerGroup, changed: frozenset[str]) -> dict[str, Rows]:
    """Return the rows of each changed member, its own row first.

    Partitions need more bytes in the member's row. If the batch has no room for that, they are in rows of their own.
    """
    rows: dict[str, Rows] = {}
    for member_id in sorted(changed & group.members.keys()):
        key, value = GROUP_MEMBERS.encode(_consumer_row(group.name, group.members[member_id]))
        is_small = len(value) <= group_rows.MEMBER_ROW_BYTES
        rows[member_id] = [(key, value)] if is_small else _split_rows(group, member_id)
    if sum(len(key) + len(value) for of_member in rows.values() for key, value in of_member) > GROUP_BYTES_MAX:
        rows = {member_id: _split_rows(group, member_id) for member_id in rows}
    return rows


def _split_rows(group: ConsumerGroup, member_id: str) -> Rows:
    member = group.members[member_id]
    rows = partition_rows(group.name, member_id, member.held, member.revoking, member.target)
    own_row = GROUP_MEMBERS.encode(_consumer_row(group.name, member, len(rows)))
    return [own_row, *map(GROUP_PARTITIONS.encode, rows)]


def _consumer_row(group: str, member: ConsumerGroupMember, rows_of_partitions: int = 0) -> GroupMemberRow:
    """Return the member's row, which has its partitions unless there are rows of them."""
    held, revoking, target = (
        {} if rows_of_partitions else _partition_tuples(each) for each in (member.held, member.revoking, member.target)
    )
    consumer = ConsumerMember(
        member.epoch,
        member.previous,
        member.rack_id,
        tuple(sorted(member.topics)),
        member.pattern,
        member.assignor,
        held,
        revoking,
        target,
        member.away,
        rows_of_partitions,
    )
    classic = member.classic
    return GroupMemberRow(
        group,
        member.member_id,
        member.instance_id,
        member.client_id,
        member.client_host,
        classic.session_ms if classic is not None else 0,
        member.rebalance_ms,
        classic.protocols if classic is not None else (),
        consumer=consumer,
    )


def _partition_tuples(partitions: Mapping[str, frozenset[int]]) -> dict[str, tuple[int, ...]]:
    return {topic: tuple(sorted(numbers)) for topic, numbers in partitions.items()}


def _partition_sets(partitions: Mapping[str, tuple[int, ...]]) -> dict[str, frozenset[int]]:
    return {topic: frozenset(numbers) for topic, numbers in partitions.items()}


def restore_group(
    head: GroupRow, members: list[GroupMemberRow], limits: GroupLimits, now: int
) -> ClassicGroup | ConsumerGroup:
    """Return the group from its durable rows; every member gets a full session timeout.

    `members` have their partitions (`rows.groups.with_partitions`).
    """
    if head.kind == CONSUMER:
        return _restore_consumer_group(head, members, limits, now)
    group = ClassicGroup(head.group, limits)
    group.protocol_type, group.generation = head.protocol_type, head.generation
    for row in members:
        group.members[row.member_id] = ClassicMember(
            row.member_id,
            row.instance_id,
            row.client_id,
            row.client_host,
            row.session_ms,
            row.rebalance_ms,
            row.protocols,
            row.assignment,
            until_ms=now + row.session_ms,
        )
        if row.instance_id is not None:
            group.instances[row.instance_id] = row.member_id
    if group.members:
        group.leader = head.leader if head.leader in group.members else next(iter(group.members))
        if head.protocol:
            group.phase, group.protocol = Phase.STABLE, head.protocol
        else:
            begin_durable_rebalance(group, now)
    return group


def _restore_consumer_group(
    head: GroupRow, members: list[GroupMemberRow], limits: GroupLimits, now: int
) -> ConsumerGroup:
    group = ConsumerGroup(head.group, limits)
    group.epoch, group.target_epoch, group.digest = head.generation, head.target_epoch, head.topics_digest
    group.assignor = head.protocol
    for row in members:
        kept = row.consumer or ConsumerMember()
        member = ConsumerGroupMember(
            row.member_id,
            row.instance_id,
            kept.rack_id,
            row.client_id,
            row.client_host,
            row.rebalance_ms,
            frozenset(kept.topics),
            kept.pattern,
            kept.assignor,
            kept.epoch,
            kept.previous,
            _partition_sets(kept.held),
            _partition_sets(kept.revoking),
            _partition_sets(kept.target),
            revoke_until_ms=now + row.rebalance_ms,
            away=kept.away,
            classic=ClassicSubscription(row.session_ms, row.protocols) if row.protocols else None,
        )
        member.until_ms = now + group.session_ms(member)
        group.members[row.member_id] = member
        if row.instance_id is not None:
            group.instances[row.instance_id] = row.member_id
        group.owners.update(dict.fromkeys(iterate_places(member.held), row.member_id))
    return group


def in_protocol(group: ClassicGroup | ConsumerGroup, kind: str) -> ClassicGroup | ConsumerGroup:
    """Return a group without members in the other protocol. Its generations and epochs continue."""
    if isinstance(group, ConsumerGroup) and kind == CLASSIC:
        classic = ClassicGroup(group.name, group.limits)
        classic.generation, classic.unstored = group.epoch, group.unstored
        return classic
    if not isinstance(group, ConsumerGroup) and kind == CONSUMER:
        consumer = ConsumerGroup(group.name, group.limits)
        consumer.epoch = consumer.target_epoch = group.generation
        consumer.unstored = group.unstored
        return consumer
    return group
