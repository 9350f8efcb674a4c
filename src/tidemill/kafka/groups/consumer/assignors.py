"""Server-side assignors of the consumer protocol (KIP-848): which member should have which partition.

Pure and deterministic.

    uniform   counts that differ by at most one over members of equal subscriptions; a member keeps a partition
              as long as that holds
    range     of each topic, consecutive partitions to the subscribed members in their order, so that partitions of
              one number go together over topics

P partitions, M members, T topics take O(P log M + T·M) steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from heapq import heapify, heappop, heapreplace
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
    mine: dict[str, set[Place]] = {member: set() for member in subscriptions}
    topics = _subscribed_topics(subscriptions)
    free = {(topic, partition) for topic in topics for partition in range(counts.get(topic, 0))}
    for member, places in mine.items():
        for topic, partitions in before.get(member, {}).items():
            if topic in subscriptions[member]:
                places |= {(topic, partition) for partition in partitions} & free
        free -= places
    if len(set(subscriptions.values())) == 1:
        _assign_equally(mine, free)
    else:
        _assign_free(subscriptions, mine, free)
        _level_counts(subscriptions, mine, topics)
    return {member: _group_by_topic(places) for member, places in mine.items()}


def _assign_equally(mine: dict[str, set[Place]], free: set[Place]) -> None:
    """Distribute partitions among members of equal subscriptions: equal counts, and one more to members that have it
    already, in their order.
    """
    each, more = divmod(len(free) + sum(map(len, mine.values())), len(mine))
    keeps_more = [member for member, places in mine.items() if len(places) > each][:more]
    others = [member for member in mine if member not in set(keeps_more)]
    quotas = dict.fromkeys(keeps_more, each + 1) | dict.fromkeys(others[: more - len(keeps_more)], each + 1)
    for member, places in mine.items():
        surplus = sorted(places)[quotas.get(member, each) :]
        places.difference_update(surplus)
        free.update(surplus)
    left = iter(sorted(free))
    for member, places in mine.items():
        places.update(next(left) for _ in range(quotas.get(member, each) - len(places)))


def _assign_free(subscriptions: Subscriptions, mine: dict[str, set[Place]], free: Iterable[Place]) -> None:
    """Give each partition to the subscribed member with the fewest; topics with few subscribers first."""
    by_topic: dict[str, list[int]] = {}
    for topic, partition in sorted(free):
        by_topic.setdefault(topic, []).append(partition)
    wanting = _subscribers(subscriptions)
    for topic in sorted(by_topic, key=lambda topic: (len(wanting[topic]), topic)):
        least = [(len(mine[member]), index, member) for index, member in enumerate(wanting[topic])]
        heapify(least)
        for partition in by_topic[topic]:
            count, index, member = least[0]
            mine[member].add((topic, partition))
            heapreplace(least, (count + 1, index, member))


def _level_counts(subscriptions: Subscriptions, mine: dict[str, set[Place]], topics: Iterable[str]) -> None:
    """Level the counts: per topic, move partitions from the fullest to the emptiest member while they differ by two.

    Each move decreases the sum of squares, so this ends; it stops early after PASSES_MAX passes.
    """
    wanting = _subscribers(subscriptions)
    for _ in range(PASSES_MAX):
        moved = False
        for topic in topics:
            moved = _level_topic(topic, wanting[topic], mine) or moved
        if not moved:
            return


def _level_topic(topic: str, members: list[str], mine: dict[str, set[Place]]) -> bool:
    least = [(len(mine[member]), index, member) for index, member in enumerate(members)]
    most = [(-count, index, member) for count, index, member in least]
    heapify(least)
    heapify(most)
    held: dict[str, list[Place]] = {}
    moved = False
    while most and least:
        # An entry of the heaps may be older than the member's last move.
        count, index, giver = most[0]
        if -count != len(mine[giver]):
            heapreplace(most, (-len(mine[giver]), index, giver))
            continue
        low, place_in_line, taker = least[0]
        if low != len(mine[taker]):
            heapreplace(least, (len(mine[taker]), place_in_line, taker))
            continue
        if -count - low < 2:
            break
        if giver not in held:
            held[giver] = sorted(place for place in mine[giver] if place[0] == topic)
        if not held[giver]:
            # The member has no partition of this topic to give.
            heappop(most)
            continue
        place = held[giver].pop()
        mine[giver].remove(place)
        mine[taker].add(place)
        held.pop(taker, None)
        moved = True
    return moved


def assign_ranges(
    subscriptions: Subscriptions, counts: Mapping[str, int], before: Mapping[str, Partitions]
) -> Assignment:
    found: Assignment = {member: {} for member in subscriptions}
    for topic, members in _subscribers(subscriptions).items():
        each, more = divmod(counts.get(topic, 0), len(members))
        start = 0
        for index, member in enumerate(members):
            end = start + each + (index < more)
            if end > start:
                found[member][topic] = frozenset(range(start, end))
            start = end
    return found


def _subscribed_topics(subscriptions: Subscriptions) -> list[str]:
    return sorted(set().union(*subscriptions.values()))


def _subscribers(subscriptions: Subscriptions) -> dict[str, list[str]]:
    """Return topic → subscribed members, in the order of the members."""
    found: dict[str, list[str]] = {}
    for member, topics in subscriptions.items():
        for topic in topics:
            found.setdefault(topic, []).append(member)
    return found


def _group_by_topic(places: set[Place]) -> dict[str, frozenset[int]]:
    topics: dict[str, set[int]] = {}
    for topic, partition in places:
        topics.setdefault(topic, set()).add(partition)
    return {topic: frozenset(partitions) for topic, partitions in topics.items()}


ASSIGNORS: Final[Mapping[str, Assignor]] = {"uniform": assign_uniform, "range": assign_ranges}
DEFAULT: Final = "uniform"
