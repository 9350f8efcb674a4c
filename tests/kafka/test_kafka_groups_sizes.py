"""Groups of the consumer protocol whose topics need all of their room or more: what they get, and what is rejected."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from uuid import UUID

import pytest

from support.kafka.groups.world import See, stored_members, subscription
from tidemill.kafka import error_codes
from tidemill.kafka.groups.classic.state import GroupLimits, HeartbeatAnswer, JoinRequest
from tidemill.kafka.groups.consumer import classic_members, requests, sizes
from tidemill.kafka.groups.consumer.state import ConsumerGroup, HeartbeatRequest, Topic
from tidemill.kafka.groups.group_records import head_row, member_rows, restore_group

LIMITS = GroupLimits(members=60, consumer_session_ms=1_000)


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "GROUP_BYTES_MAX", 10_000)


class Topics(See):
    """Topics of one partition each; every pattern matches those whose names begin with it."""

    def __init__(self, count: int, prefix: str = "t") -> None:
        super().__init__({f"{prefix}{n:05}": Topic(topic_id(prefix, n), 1) for n in range(count)})

    def matching(self, pattern: str) -> frozenset[str]:
        return frozenset(name for name in self.topics if name.startswith(pattern))

    def add(self, names: Iterable[str]) -> None:
        for name in names:
            self.change(name, Topic(topic_id(name, 0), 1))


def topic_id(name: str, number: int) -> str:
    return str(UUID(int=(int.from_bytes(name.encode()) << 32) + number))


def ask(group: ConsumerGroup, seen: See, member_id: str, epoch: int | None = None, **more: Any) -> HeartbeatAnswer:
    """Send a heartbeat, with the member's current epoch if none is given."""
    epoch = group.members[member_id].epoch if epoch is None else epoch
    return requests.heartbeat(group, 0, HeartbeatRequest(member_id, epoch, **more), seen)


def join(group: ConsumerGroup, seen: See, member_id: str, pattern: str = "t", **more: Any) -> HeartbeatAnswer:
    return ask(group, seen, member_id, 0, rebalance_ms=1_000, pattern=pattern, owned={}, **more)


def joins_as_classic(
    group: ConsumerGroup, seen: See, member_id: str, topic: str, instance_id: str | None = None
) -> int:
    """Send a JoinGroup and return its error."""
    protocols = (("range", subscription(topic=topic)),)
    request = JoinRequest(member_id, "c1", instance_id, "c", "/h", 10_000, 1_000, "consumer", protocols)
    return classic_members.join(group, 0, request, seen).error


def taken_over(group: ConsumerGroup) -> ConsumerGroup:
    rows, _ = member_rows(group, {}, frozenset(group.members))
    found = restore_group(head_row(group, "n", 0), stored_members(dict(rows)), LIMITS, 0)
    assert isinstance(found, ConsumerGroup) and found.topics is None
    return found


def full_room() -> int:
    """Return how many topics the first member of a group may have."""
    group = ConsumerGroup("g", LIMITS)
    join(group, Topics(1), "m1")
    return sizes.room_for_topics(group, group.members.values())


def overfull() -> tuple[ConsumerGroup, Topics]:
    """Return a group with one member whose pattern matches more topics than there is room for."""
    seen, group = Topics(100), ConsumerGroup("g", LIMITS)
    assert join(group, seen, "m1", instance_id="i").error == 0
    seen.add(f"t1{n:04}" for n in range(300))
    assert len(ask(group, seen, "m1").assignment or ()) == full_room() and group.topics_left_out
    return group, seen


@pytest.mark.parametrize("share", [0.45, 0.6, 1])
def test_an_accepted_subscription_is_not_cut_later(share: float) -> None:
    count = int(full_room() * share)
    seen, group = Topics(count), ConsumerGroup("g", LIMITS)
    assert len(join(group, seen, "m1").assignment or ()) == count
    for n in range(3):
        seen.add([f"other{n}"])
        assert ask(group, seen, "m1").assignment is None, "nothing has changed"
    group = taken_over(group)
    assert ask(group, seen, "m1").assignment is None
    assert join(group, seen, "m2").error == 0
    assert len(group.topics or ()) == count and not group.topics_left_out
    assert sum(len(member.target) for member in group.members.values()) == count


def test_one_topic_more_than_there_is_room_for_is_rejected() -> None:
    group = ConsumerGroup("g", LIMITS)
    assert join(group, Topics(full_room() + 1), "m1").error == error_codes.GROUP_MAX_SIZE_REACHED
    assert not group.members and not group.unstored


def test_a_topic_that_is_held_is_not_left_out_while_its_member_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, group = Topics(100), ConsumerGroup("g", LIMITS)
    held = join(group, seen, "m1").assignment
    monkeypatch.setattr(sizes, "GROUP_BYTES_MAX", 4_000)
    for n in range(3):
        seen.add([f"a{n}", f"t1{n:04}"])
        assert ask(group, seen, "m1").assignment is None
    group = taken_over(group)
    assert ask(group, seen, "m1").assignment is None
    assert group.members["m1"].assigned == group.members["m1"].target == held
    assert group.topics_left_out == 3


def test_partitions_that_are_added_to_a_held_topic_beyond_the_room_are_left_out_until_there_is_room() -> None:
    seen, group = Topics(100), ConsumerGroup("g", LIMITS)
    held = join(group, seen, "m1").assignment
    grown = seen.topics["t00007"]
    seen.change("t00007", Topic(grown.topic_id, 1_000))
    assert ask(group, seen, "m1").assignment is None
    assert group.members["m1"].target == held and group.topics_left_out == 1
    seen.change("t00007", Topic(grown.topic_id, 3))
    assert (ask(group, seen, "m1").assignment or {})[grown.topic_id] == {0, 1, 2}
    assert not group.topics_left_out


@pytest.mark.parametrize("is_rejoin", [False, True], ids=["revoked", "joins again"])
def test_topics_that_were_left_out_are_assigned_once_revoked_partitions_make_room(is_rejoin: bool) -> None:
    """Regression: they stayed out until a subscription or a topic changed."""
    group, seen = overfull()
    owned = ask(group, seen, "m1", pattern="t1").assignment or {}
    assert len(owned) == full_room() - 100 and len(group.members["m1"].revoking) == 100
    if is_rejoin:
        assert join(group, seen, "m1", "t1", instance_id="i").assignment == owned
    else:
        assert ask(group, seen, "m1", owned=owned).error == 0
    assert len(ask(group, seen, "m1").assignment or ()) == full_room()
    assert group.topics_left_out == 300 - full_room()
    epoch = group.epoch
    for _ in range(3):
        assert ask(group, seen, "m1").assignment is None and group.epoch == epoch, "nothing has changed"


def test_partitions_that_move_between_members_do_not_leave_their_room_to_topics_that_were_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: each revocation gave the room of the moving partitions to another topic, until few were left."""
    seen, group = See({"p": Topic(topic_id("p", 0), 98)}), ConsumerGroup("g", LIMITS)
    names = {"topics": frozenset({"p", "q"}), "pattern": ""}

    def join_by_name(member_id: str) -> HeartbeatAnswer:
        return ask(group, seen, member_id, 0, rebalance_ms=1_000, owned={}, **names)

    owned = {"m1": join_by_name("m1").assignment or {}}
    for room in range(10_000, 0, -sizes.PLACE_BYTES):  # with a second member there is no room for all of p
        monkeypatch.setattr(sizes, "GROUP_BYTES_MAX", room)
        if sizes.room_for_topics(group, group.members.values()) < 100:
            break
    seen.change("q", Topic(topic_id("q", 0), 8))
    ask(group, seen, "m1", owned=owned["m1"])
    assert group.topics_left_out == 1
    second = join_by_name("m2")
    assert second.error == 0
    owned["m2"] = second.assignment or {}
    for _ in range(20):
        for member_id in ("m1", "m2"):
            answer = ask(group, seen, member_id, owned=owned[member_id])
            owned[member_id] = owned[member_id] if answer.assignment is None else answer.assignment
    held = [member.held[topic_id("p", 0)] for member in group.members.values()]
    assert sorted(map(len, held)) == [49, 49] and not held[0] & held[1]


def test_a_member_may_repeat_its_subscription_though_topics_are_left_out() -> None:
    group, seen = overfull()
    owned = group.members["m1"].assigned
    for _ in range(2):
        again = ask(group, seen, "m1", rebalance_ms=1_000, pattern="t", owned=owned)
        assert again.error == 0 and again.assignment == owned
        group = taken_over(group)
    assert ask(group, seen, "m1", pattern="t", topics=frozenset()).error == 0
    assert len(join(group, seen, "m1", instance_id="i").assignment or ()) == full_room()
    assert ask(group, seen, "m1", -2, instance_id="i").error == 0
    back = join(group, seen, "m1b", instance_id="i")
    assert back.error == 0 and len(back.assignment or ()) == full_room()
    assert list(group.members) == ["m1b"]


def test_a_member_may_repeat_its_subscription_though_the_group_has_no_room_for_what_is_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group, seen = overfull()
    seen.add(["c"])
    assert joins_as_classic(group, seen, "", "t00001", "j") == 0
    monkeypatch.setattr(sizes, "GROUP_BYTES_MAX", 4_000)
    assert ask(group, seen, "m1", pattern="t", owned=group.members["m1"].assigned).error == 0
    assert joins_as_classic(group, seen, "c1", "t00001", "j") == 0
    assert joins_as_classic(group, seen, "", "t00001", "j") == 0, "by its instance"
    assert join(group, seen, "m2").error == error_codes.GROUP_MAX_SIZE_REACHED
    assert ask(group, seen, "m1", -2, instance_id="i").error == 0
    assert join(group, seen, "m1b", instance_id="i").error == 0, "by its instance"


@pytest.mark.parametrize("is_moved", [False, True], ids=["here", "after a takeover"])
def test_a_member_may_join_with_the_subscription_of_another(is_moved: bool) -> None:
    group, seen = overfull()
    group = taken_over(group) if is_moved else group
    assert join(group, seen, "m2").error == 0
    assert join(group, seen, "m3", "t0").error == 0, "a part of it"
    more = join(group, seen, "m4", "")
    assert more.error == 0, "nothing"
    seen.add(f"u{n}" for n in range(10))
    assert join(group, seen, "m5", "u").error == error_codes.GROUP_MAX_SIZE_REACHED


@pytest.mark.parametrize("is_moved", [False, True], ids=["here", "after a takeover"])
def test_the_first_member_of_a_group_whose_members_left_is_not_rejected(is_moved: bool) -> None:
    group, seen = overfull()
    assert ask(group, seen, "m1", -1).error == 0
    group = taken_over(group) if is_moved else group
    first = join(group, seen, "m9")
    assert first.error == 0 and len(first.assignment or ()) >= full_room()
    assert group.topics_left_out == 400 - len(first.assignment or ())


def test_a_subscription_replaces_the_former_one_of_its_member() -> None:
    seen, group = Topics(100), ConsumerGroup("g", LIMITS)
    seen.add(f"u{n}" for n in range(100))
    assert len(join(group, seen, "m1").assignment or ()) == 100
    assert join(group, seen, "m2", "u").error == error_codes.GROUP_MAX_SIZE_REACHED
    assert len(join(group, seen, "m1", "u").assignment or ()) == 100, "it joins again, so it holds nothing"


def test_a_member_joins_a_full_group_unless_its_texts_leave_no_room_for_what_is_held() -> None:
    group, seen = overfull()
    refused = join(group, seen, "m2", client_id="c" * 2_000)
    assert refused.error == error_codes.GROUP_MAX_SIZE_REACHED and list(group.members) == ["m1"]
    assert join(group, seen, "m2", client_id="c").error == 0


def test_a_member_of_the_classic_protocol_may_repeat_its_subscription_though_topics_are_left_out() -> None:
    seen, group = Topics(100), ConsumerGroup("g", LIMITS)
    assert join(group, seen, "m1").error == 0
    seen.add(["big", "new"])
    assert joins_as_classic(group, seen, "", "big", "i") == 0
    seen.change("big", Topic(topic_id("big", 0), 1_000))
    assert ask(group, seen, "m1").error == 0 and group.topics_left_out == 1
    assert joins_as_classic(group, seen, "c1", "big", "i") == 0, "again"
    assert joins_as_classic(group, seen, "", "big", "i") == 0, "by its instance"
    group = taken_over(group)
    assert joins_as_classic(group, seen, "c1", "big", "i") == 0
    assert joins_as_classic(group, seen, "", "t00001") == 0, "a topic of another member"
    seen.change("new", Topic(topic_id("new", 0), 1_000))
    assert joins_as_classic(group, seen, "c1", "new", "i") == error_codes.GROUP_MAX_SIZE_REACHED
