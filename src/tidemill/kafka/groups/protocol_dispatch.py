"""Dispatch of requests to a group of either protocol, and the change of its protocol. Pure.

Each function that may change the protocol returns the resulting group, which includes its outbox.
"""

from __future__ import annotations

from tidemill.kafka import error_codes
from tidemill.kafka.groups import classic, classic_members, classic_rebalance, consumer, protocol_migration
from tidemill.kafka.groups.classic_state import Answer, BeatAnswer, Group, Join, JoinAnswer, Sync, Waiter
from tidemill.kafka.groups.consumer_state import ConsumerGroup, HeartbeatRequest, TopicSnapshot

AnyGroup = Group | ConsumerGroup


def taken_over(group: AnyGroup, now: int) -> AnyGroup:
    """Return the group after a takeover. The former coordinator may not have been allowed to downgrade it."""
    return protocol_migration.settled(group, now) if isinstance(group, ConsumerGroup) else group


def join(group: AnyGroup, now: int, ask: Join, waiter: Waiter, seen: TopicSnapshot | None) -> AnyGroup:
    """Process a JoinGroup.

    `seen` may be omitted if the caller assumed a group of the classic protocol, which needs no topics.
    """
    if isinstance(group, ConsumerGroup) and protocol_migration.goes_back_with(group, ask):
        group = protocol_migration.downgraded_without(group, now, ask)
    if not isinstance(group, ConsumerGroup):
        classic.join(group, now, ask, waiter)
    elif not group.members or seen is None:
        # The last member's leave is being written, or the group was upgraded while this request was running.
        group.outbox.append((waiter, JoinAnswer(error_codes.REBALANCE_IN_PROGRESS, ask.member_id)))
    else:
        _say(group, waiter, classic_members.join(group, now, ask, seen))
    return group


def sync(group: AnyGroup, now: int, ask: Sync, waiter: Waiter) -> None:
    if isinstance(group, ConsumerGroup):
        _say(group, waiter, classic_members.sync(group, now, ask))
    else:
        classic.sync(group, now, ask, waiter)


def heartbeat(group: AnyGroup, now: int, member_id: str, instance_id: str | None, generation: int) -> int:
    """Process a heartbeat of the classic protocol."""
    if isinstance(group, ConsumerGroup):
        return classic_members.heartbeat(group, now, member_id, instance_id, generation)
    return classic.heartbeat(group, now, member_id, instance_id, generation)


def beat(group: AnyGroup, now: int, ask: HeartbeatRequest, waiter: Waiter, seen: TopicSnapshot) -> AnyGroup:
    """Process a heartbeat of the consumer protocol."""
    made = group if isinstance(group, ConsumerGroup) else _upgraded(group, now, ask, seen)
    said = made if isinstance(made, BeatAnswer) else consumer.heartbeat(made, now, ask, seen)
    if isinstance(made, BeatAnswer) or said.error:
        group.outbox.append((waiter, said))
        return group
    consumer.answer(made, waiter, said)
    return protocol_migration.settled(made, now)


def _upgraded(group: Group, now: int, ask: HeartbeatRequest, seen: TopicSnapshot) -> ConsumerGroup | BeatAnswer:
    if ask.epoch != 0:
        return BeatAnswer(error_codes.UNKNOWN_MEMBER_ID, "The member is not in the group.")
    if not group.members:
        return BeatAnswer(error_codes.COORDINATOR_LOAD_IN_PROGRESS, "Members are leaving the group.")
    return protocol_migration.upgraded(group, now, seen)


def leave(group: AnyGroup, now: int, member_id: str, instance_id: str | None) -> int:
    """Process a LeaveGroup of the classic protocol."""
    if isinstance(group, ConsumerGroup):
        return classic_members.leave(group, member_id, instance_id)
    return classic.leave(group, now, member_id, instance_id)


def commit_refusal(
    group: AnyGroup,
    now: int,
    member_id: str,
    instance_id: str | None,
    generation: int,
    *,
    in_transaction: bool = False,
) -> int:
    """Return the error code if a client with these properties may not commit offsets, else 0."""
    if isinstance(group, ConsumerGroup):
        return consumer.commit_refusal(group, member_id, instance_id, generation, in_transaction=in_transaction)
    return classic.commit_refusal(group, now, member_id, instance_id, generation, in_transaction=in_transaction)


def due(group: AnyGroup) -> int | None:
    """Return the earliest time at which `tick` has something to do."""
    return consumer.due(group) if isinstance(group, ConsumerGroup) else classic_rebalance.due(group)


def tick(group: AnyGroup, now: int) -> AnyGroup:
    if isinstance(group, ConsumerGroup):
        consumer.tick(group, now)
        return protocol_migration.settled(group, now)
    classic_rebalance.tick(group, now)
    return group


def abandon(group: AnyGroup, code: int) -> None:
    """Stop coordinating the group on this node.

    All waiting requests get `code`, so that their clients look up the coordinator.
    """
    if isinstance(group, ConsumerGroup):
        consumer.abandon(group, code)
    else:
        classic.abandon(group, code)


def _say(group: ConsumerGroup, waiter: Waiter, said: Answer) -> None:
    if said.error:
        group.outbox.append((waiter, said))
    else:
        consumer.answer(group, waiter, said)
