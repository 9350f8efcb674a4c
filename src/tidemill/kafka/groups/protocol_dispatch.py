"""One group of either protocol: what members of both may ask of it, and when it goes over to the other one. Pure.

Each function that may change the protocol gives the group as it is from then on, its outbox with it.
"""

from __future__ import annotations

from tidemill.kafka import error_codes
from tidemill.kafka.groups import classic, classic_members, classic_rebalance, consumer, protocol_migration
from tidemill.kafka.groups.classic_state import Answer, BeatAnswer, Group, Join, JoinAnswer, Sync, Waiter
from tidemill.kafka.groups.consumer_state import ConsumerGroup, HeartbeatRequest, TopicSnapshot

AnyGroup = Group | ConsumerGroup


def taken_over(group: AnyGroup, now: int) -> AnyGroup:
    """Who coordinated it before may not have been allowed to let it go back."""
    return protocol_migration.settled(group, now) if isinstance(group, ConsumerGroup) else group


def join(group: AnyGroup, now: int, ask: Join, waiter: Waiter, seen: TopicSnapshot | None) -> AnyGroup:
    """`seen` None: who asks took it for a group of the classic protocol, which needs to see nothing."""
    if isinstance(group, ConsumerGroup) and protocol_migration.goes_back_with(group, ask):
        group = protocol_migration.downgraded_without(group, now, ask)
    if not isinstance(group, ConsumerGroup):
        classic.join(group, now, ask, waiter)
    elif not group.members or seen is None:
        # The last member's leaving is being written; or the group went over while this was on its way.
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
    """Of the classic protocol."""
    if isinstance(group, ConsumerGroup):
        return classic_members.heartbeat(group, now, member_id, instance_id, generation)
    return classic.heartbeat(group, now, member_id, instance_id, generation)


def beat(group: AnyGroup, now: int, ask: HeartbeatRequest, waiter: Waiter, seen: TopicSnapshot) -> AnyGroup:
    """Of the consumer protocol."""
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
        return BeatAnswer(error_codes.COORDINATOR_LOAD_IN_PROGRESS, "Members are leaving it.")
    return protocol_migration.upgraded(group, now, seen)


def leave(group: AnyGroup, now: int, member_id: str, instance_id: str | None) -> int:
    """Of the classic protocol."""
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
    """May whoever says this of itself commit offsets?"""
    if isinstance(group, ConsumerGroup):
        return consumer.commit_refusal(group, member_id, instance_id, generation, in_transaction=in_transaction)
    return classic.commit_refusal(group, now, member_id, instance_id, generation, in_transaction=in_transaction)


def due(group: AnyGroup) -> int | None:
    """When `tick` has something to do next, at the earliest."""
    return consumer.due(group) if isinstance(group, ConsumerGroup) else classic_rebalance.due(group)


def tick(group: AnyGroup, now: int) -> AnyGroup:
    if isinstance(group, ConsumerGroup):
        consumer.tick(group, now)
        return protocol_migration.settled(group, now)
    classic_rebalance.tick(group, now)
    return group


def abandon(group: AnyGroup, code: int) -> None:
    """This node does not coordinate the group any more: everybody who waits is told to look for who does."""
    if isinstance(group, ConsumerGroup):
        consumer.abandon(group, code)
    else:
        classic.abandon(group, code)


def _say(group: ConsumerGroup, waiter: Waiter, said: Answer) -> None:
    if said.error:
        group.outbox.append((waiter, said))
    else:
        consumer.answer(group, waiter, said)
