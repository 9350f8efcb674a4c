"""Dispatch of requests to a group of either protocol, and the change of its protocol. Pure.

Each function that may change the protocol returns the resulting group, which includes its outbox.
"""

from __future__ import annotations

from tidemill.kafka import error_codes
from tidemill.kafka.groups import protocol_migration
from tidemill.kafka.groups.classic import rebalance
from tidemill.kafka.groups.classic import requests as classic
from tidemill.kafka.groups.classic.state import (
    Answer,
    ClassicGroup,
    HeartbeatAnswer,
    JoinAnswer,
    JoinRequest,
    SyncRequest,
    Waiter,
)
from tidemill.kafka.groups.consumer import classic_members
from tidemill.kafka.groups.consumer import requests as consumer
from tidemill.kafka.groups.consumer.state import ConsumerGroup, HeartbeatRequest, TopicSnapshot

AnyGroup = ClassicGroup | ConsumerGroup


def after_takeover(group: AnyGroup, now: int) -> AnyGroup:
    """Return the group after a takeover. The former coordinator may not have been allowed to downgrade it."""
    return protocol_migration.downgrade_if_classic(group, now) if isinstance(group, ConsumerGroup) else group


def join(group: AnyGroup, now: int, ask: JoinRequest, waiter: Waiter, seen: TopicSnapshot | None) -> AnyGroup:
    """Process a JoinGroup.

    `seen` may be omitted if the caller assumed a group of the classic protocol, which needs no topics.
    """
    if isinstance(group, ConsumerGroup) and protocol_migration.is_last_consumer_replaced(group, ask):
        group = protocol_migration.downgrade_by_replacement(group, now, ask)
    if not isinstance(group, ConsumerGroup):
        classic.join(group, now, ask, waiter)
    elif not group.members or seen is None:
        # The last member's leave is being written, or the group was upgraded while this request was running.
        group.outbox.append((waiter, JoinAnswer(error_codes.REBALANCE_IN_PROGRESS, ask.member_id)))
    else:
        _queue_answer(group, waiter, classic_members.join(group, now, ask, seen))
    return group


def sync(group: AnyGroup, now: int, ask: SyncRequest, waiter: Waiter) -> None:
    if isinstance(group, ConsumerGroup):
        _queue_answer(group, waiter, classic_members.sync(group, now, ask))
    else:
        classic.sync(group, now, ask, waiter)


def heartbeat(group: AnyGroup, now: int, member_id: str, instance_id: str | None, generation: int) -> int:
    """Process a heartbeat of the classic protocol."""
    if isinstance(group, ConsumerGroup):
        return classic_members.heartbeat(group, now, member_id, instance_id, generation)
    return classic.heartbeat(group, now, member_id, instance_id, generation)


def consumer_heartbeat(
    group: AnyGroup, now: int, ask: HeartbeatRequest, waiter: Waiter, seen: TopicSnapshot
) -> AnyGroup:
    """Process a heartbeat of the consumer protocol."""
    made = group if isinstance(group, ConsumerGroup) else _upgrade(group, now, ask, seen)
    said = made if isinstance(made, HeartbeatAnswer) else consumer.heartbeat(made, now, ask, seen)
    if isinstance(made, HeartbeatAnswer) or said.error:
        group.outbox.append((waiter, said))
        return group
    consumer.queue_answer(made, waiter, said)
    return protocol_migration.downgrade_if_classic(made, now)


def _upgrade(
    group: ClassicGroup, now: int, ask: HeartbeatRequest, seen: TopicSnapshot
) -> ConsumerGroup | HeartbeatAnswer:
    if ask.epoch != 0:
        return HeartbeatAnswer(error_codes.UNKNOWN_MEMBER_ID, "The member is not in the group.")
    if not group.members:
        return HeartbeatAnswer(error_codes.COORDINATOR_LOAD_IN_PROGRESS, "Members are leaving the group.")
    return protocol_migration.upgrade(group, now, seen)


def leave_group(group: AnyGroup, now: int, member_id: str, instance_id: str | None) -> int:
    """Process a LeaveGroup of the classic protocol."""
    if isinstance(group, ConsumerGroup):
        return classic_members.leave_group(group, member_id, instance_id)
    return classic.leave_group(group, now, member_id, instance_id)


def commit_error(
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
        return consumer.commit_error(group, member_id, instance_id, generation, in_transaction=in_transaction)
    return classic.commit_error(group, now, member_id, instance_id, generation, in_transaction=in_transaction)


def next_due_ms(group: AnyGroup) -> int | None:
    """Return the earliest time at which `tick` has something to do."""
    return consumer.next_due_ms(group) if isinstance(group, ConsumerGroup) else rebalance.next_due_ms(group)


def tick(group: AnyGroup, now: int) -> AnyGroup:
    if isinstance(group, ConsumerGroup):
        consumer.tick(group, now)
        return protocol_migration.downgrade_if_classic(group, now)
    rebalance.tick(group, now)
    return group


def release(group: AnyGroup, code: int) -> None:
    """Stop coordinating the group on this node.

    All waiting requests get `code`, so that their clients look up the coordinator.
    """
    if isinstance(group, ConsumerGroup):
        consumer.release(group, code)
    else:
        classic.release(group, code)


def _queue_answer(group: ConsumerGroup, waiter: Waiter, said: Answer) -> None:
    if said.error:
        group.outbox.append((waiter, said))
    else:
        consumer.queue_answer(group, waiter, said)
