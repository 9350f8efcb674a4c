"""Server-side assignors of the consumer protocol (KIP-848): which member should have which partition.

Pure and deterministic.

    uniform   counts that differ by at most one over members of equal subscriptions; a member keeps a partition
              as long as that holds
    range     of each topic, consecutive partitions to the subscribed members in their order, so that partitions of
              one number go together over topics

P partitions, M members, T topics and D different subscriptions take O(P log P + D·T + M) steps in typical groups.
Members of equal subscriptions should have one set, the same object, which is then hashed once and not compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from heapq import heapify, heappop, heappush, heapreplace
from itertools import islice
from typing import Final

Partitions = Mapping[str, frozenset[int]]
"""Topic id → partitions; the set is never empty."""
Assignment = dict[str, dict[str, frozenset[int]]]
"""Member → partitions that it should have."""
Subscriptions = Mapping[str, frozenset[str]]
"""Member → ids of existing topics, in the order of the members."""
Assignor = Callable[[Subscriptions, Mapping[str, int], Mapping[str, Partitions]], Assignment]
"""Function of the subscriptions, the partition count of each topic, and the former target of the members."""

Place = tuple[str, int]
PASSES_MAX = 20
"""Maximum number of passes over all topics, to level counts among members of unequal subscriptions; two or three
usually suffice.
"""


def assign_uniform(
    subscriptions: Subscriptions, counts: Mapping[str, int], before: Mapping[str, Partitions]
) -> Assignment:
    work = _Work(subscriptions)
    free = _retain(work, subscriptions, counts, before)
    if len(set(subscriptions.values())) == 1:
        _assign_equally(work, free)
    else:
        audiences = _audiences(subscriptions)
        _assign_free(work, audiences, free)
        _level_counts(work, audiences)
    return {member: _frozen(topics) for member, topics in zip(subscriptions, work.topics, strict=True)}


class _Work:
    """Partitions of the members, which are numbered in their order. A set is copied before its first change.

    givers    members whose partitions were moved to others, in the order of these moves
    """

    def __init__(self, subscriptions: Subscriptions) -> None:
        self.topics: list[dict[str, AbstractSet[int]]] = [{} for _ in subscriptions]
        self.counts = [0] * len(subscriptions)
        self.givers: list[int] = []

    def add(self, member: int, topic: str, partition: int) -> None:
        self._own_partitions(member, topic).add(partition)
        self.counts[member] += 1

    def remove(self, member: int, topic: str, partition: int) -> None:
        self._own_partitions(member, topic).remove(partition)
        self.counts[member] -= 1

    def _own_partitions(self, member: int, topic: str) -> set[int]:
        found = self.topics[member].get(topic, _NOTHING)
        if not isinstance(found, set):
            found = self.topics[member][topic] = set(found)
        return found


_NOTHING: Final[frozenset[int]] = frozenset()


def _retain(
    work: _Work, subscriptions: Subscriptions, counts: Mapping[str, int], before: Mapping[str, Partitions]
) -> list[Place]:
    """Let members keep what they had and still want. Return the free partitions, in order."""
    taken: dict[str, AbstractSet[int]] = {}
    for index, (member, wanted) in enumerate(subscriptions.items()):
        for topic, partitions in before.get(member, {}).items():
            if topic not in wanted:
                continue
            others = taken.get(topic)
            count = counts.get(topic, 0)
            if others is not None:
                partitions = partitions - others
            if partitions and max(partitions) >= count:
                partitions = frozenset(partition for partition in partitions if partition < count)
            if not partitions:
                continue
            work.topics[index][topic] = partitions
            work.counts[index] += len(partitions)
            if others is None:
                taken[topic] = partitions
            elif isinstance(others, set):
                others |= partitions
            else:
                taken[topic] = set(others) | partitions
    free: list[Place] = []
    for topic in frozenset().union(*set(subscriptions.values())):
        held, count = taken.get(topic, _NOTHING), counts.get(topic, 0)
        if len(held) < count:
            free += [(topic, partition) for partition in range(count) if partition not in held]
    free.sort()
    return free


def _assign_equally(work: _Work, free: list[Place]) -> None:
    """Distribute partitions among members of equal subscriptions: equal counts, and one more to members that have it
    already, in their order.
    """
    members = range(len(work.counts))
    each, more = divmod(len(free) + sum(work.counts), len(work.counts))
    keeps_more = [member for member in members if work.counts[member] > each][:more]
    others = [member for member in members if member not in set(keeps_more)]
    quotas = [each] * len(work.counts)
    for member in [*keeps_more, *others[: more - len(keeps_more)]]:
        quotas[member] += 1
    surplus: list[Place] = []
    for member in members:
        if work.counts[member] > quotas[member]:
            held = work.topics[member]
            places = sorted((topic, partition) for topic, partitions in held.items() for partition in partitions)
            for topic, partition in places[quotas[member] :]:
                work.remove(member, topic, partition)
                surplus.append((topic, partition))
    left = iter(sorted(free + surplus))
    for member in members:
        for topic, partition in islice(left, quotas[member] - work.counts[member]):
            work.add(member, topic, partition)


class _Audience:
    """Members that are subscribed to the same topics, and these topics.

    The heap has an entry of every member, which may be older than the member's last change. An entry that is too low is
    corrected at the front of the heap. An entry that is too high is followed by a newer one (`_Work.givers`).
    """

    def __init__(self, members: list[int]) -> None:
        self.members = members
        self._is_member = frozenset(members)
        self._least: list[tuple[int, int]] = []
        self._given = 0

    def least(self, work: _Work) -> tuple[int, int]:
        """Return (count, member) of the member with the fewest partitions, of several the first in their order."""
        new = len(work.givers) - self._given
        if not self._least or new + len(self._least) > 2 * len(self.members):
            self._least = [(work.counts[member], member) for member in self.members]
            heapify(self._least)
        elif new:
            for member in work.givers[self._given :]:
                if member in self._is_member:
                    heappush(self._least, (work.counts[member], member))
        self._given = len(work.givers)
        while True:
            count, member = self._least[0]
            if count == work.counts[member]:
                return count, member
            heapreplace(self._least, (work.counts[member], member))


def _audiences(subscriptions: Subscriptions) -> dict[str, _Audience]:
    """Return topic → its subscribers. Topics of equal subscribers share them.

    Each different subscription is read once, however many members have it.
    """
    members: dict[frozenset[str], list[int]] = {}
    for index, topics in enumerate(subscriptions.values()):
        members.setdefault(topics, []).append(index)
    groups = list(members.values())
    by_topic: dict[str, list[int]] = {}
    for number, topics in enumerate(members):
        for topic in topics:
            by_topic.setdefault(topic, []).append(number)
    made: dict[tuple[int, ...], _Audience] = {}
    found: dict[str, _Audience] = {}
    for topic, numbers in by_topic.items():
        key = tuple(numbers)
        if key not in made:
            made[key] = _Audience(sorted(member for number in numbers for member in groups[number]))
        found[topic] = made[key]
    return found


def _assign_free(work: _Work, audiences: Mapping[str, _Audience], free: list[Place]) -> None:
    """Give each partition to the subscribed member with the fewest; topics with few subscribers first."""
    by_topic: dict[str, list[int]] = {}
    for topic, partition in free:
        by_topic.setdefault(topic, []).append(partition)
    for topic in sorted(by_topic, key=lambda topic: (len(audiences[topic].members), topic)):
        for partition in by_topic[topic]:
            work.add(audiences[topic].least(work)[1], topic, partition)


def _level_counts(work: _Work, audiences: Mapping[str, _Audience]) -> None:
    """Level the counts: per topic, move partitions from the fullest to the emptiest member while they differ by two.

    Each move decreases the sum of squares, so this ends; it stops early after PASSES_MAX passes.
    """
    holders: dict[str, set[int]] = {}
    for member, topics in enumerate(work.topics):
        for topic in topics:
            holders.setdefault(topic, set()).add(member)
    order = sorted(holders)
    for _ in range(PASSES_MAX):
        moved = False
        for topic in order:
            moved = _level_topic(work, topic, audiences[topic], holders[topic]) or moved
        if not moved:
            return


def _level_topic(work: _Work, topic: str, audience: _Audience, holders: set[int]) -> bool:
    low, taker = audience.least(work)
    if max(work.counts[member] for member in holders) - low < 2:
        return False
    most = [(-work.counts[member], member) for member in holders]
    heapify(most)
    held: dict[int, list[int]] = {}
    while most:
        # A taker cannot become a giver here, as it has at most one partition more than the emptiest member.
        count, giver = most[0]
        low, taker = audience.least(work)
        if -count - low < 2:
            break
        if giver not in held:
            held[giver] = sorted(work.topics[giver][topic])
        partition = held[giver].pop()
        work.remove(giver, topic, partition)
        work.givers.append(giver)
        work.add(taker, topic, partition)
        holders.add(taker)
        if held[giver]:
            heapreplace(most, (count + 1, giver))
        else:
            heappop(most)
            holders.remove(giver)
            del work.topics[giver][topic]
    return True


def assign_ranges(
    subscriptions: Subscriptions, counts: Mapping[str, int], before: Mapping[str, Partitions]
) -> Assignment:
    names = list(subscriptions)
    found: Assignment = {member: {} for member in subscriptions}
    for topic, audience in _audiences(subscriptions).items():
        each, more = divmod(counts.get(topic, 0), len(audience.members))
        given = audience.members if each else audience.members[:more]
        start = 0
        for index, member in enumerate(given):
            end = start + each + (index < more)
            found[names[member]][topic] = frozenset(range(start, end))
            start = end
    return found


def _frozen(topics: Mapping[str, AbstractSet[int]]) -> dict[str, frozenset[int]]:
    """Return the partitions by topic; a set that did not change stays the same object."""
    return {topic: frozenset(partitions) for topic, partitions in topics.items() if partitions}


ASSIGNORS: Final[Mapping[str, Assignor]] = {"uniform": assign_uniform, "range": assign_ranges}
DEFAULT: Final = "uniform"
