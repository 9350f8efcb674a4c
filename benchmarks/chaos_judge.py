"""The rules by which the chaos lane judges. Pure: sent and acknowledged records, final contents, offsets that groups
got.

A value is "PRODUCER NUMBER"; a producer counts from 0 in each partition. A value of a transaction is "PRODUCER
TRANSACTION NUMBER", and NUMBER counts within the transaction over all partitions.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

Place = tuple[str, int]
"""(topic, partition)"""


ANYBODY = "anybody"


class Stored(NamedTuple):
    offset: int
    value: str


class Acked(NamedTuple):
    """`offset` < 0: the broker said that it has the record, and no longer where."""

    at_s: float
    number: int
    offset: int


class Committed(NamedTuple):
    """A group's offset for a partition, as a client received it between two times: a commit of it was
    acknowledged, or it was the answer to a request (`found`).
    """

    began_s: float
    ended_s: float
    place: Place
    offset: int
    found: bool


def of_producer(contents: Sequence[Stored], producer: str) -> list[tuple[int, int]]:
    """(number, offset) of its records, in the order of the partition."""
    found = []
    for offset, value in contents:
        who, _, number = value.partition(" ")
        if who == producer:
            found.append((int(number), offset))
    return found


def judge_producer(
    name: str,
    place: Place,
    contents: Sequence[Stored],
    sent: int,
    acked: Sequence[Acked],
    *,
    once: bool,
    ordered: bool = True,
) -> list[str]:
    """Return the failures in the records of one producer in one partition.

    `once`: it is idempotent. Otherwise a record may be duplicated, but its first occurrence keeps the order, if the
    producer sends in order (`ordered`).
    """
    where = f"{name} in {place[0]}/{place[1]}"
    stored = of_producer(contents, name)
    firsts: dict[int, int] = {}
    for number, offset in stored:
        firsts.setdefault(number, offset)
    wrong = []
    lost = sorted({each.number for each in acked} - firsts.keys())
    if lost:
        wrong.append(f"lost {len(lost)} acknowledged of {where}: {lost[:5]}")
    strangers = sorted(number for number in firsts if number >= sent)
    if strangers:
        wrong.append(f"never sent by {where}: {strangers[:5]}")
    if once and len(stored) > len(firsts):
        twice = [number for number, count in Counter(number for number, _ in stored).items() if count > 1]
        wrong.append(f"stored {len(stored) - len(firsts)} twice of {where}: {twice[:5]}")
    order = list(firsts)
    behind = [later for earlier, later in itertools.pairwise(order) if later < earlier]
    if ordered and behind:
        wrong.append(f"reordered {len(behind)} of {where}: {behind[:5]}")
    there = set(stored)
    moved = [each for each in acked if each.offset >= 0 and (each.number, each.offset) not in there]
    if elsewhere := [each.number for each in moved if each.number in firsts]:
        wrong.append(f"acknowledged at another offset {len(elsewhere)} of {where}: {elsewhere[:5]}")
    return wrong


def judge_transactions(
    name: str, contents: Mapping[Place, Sequence[Stored]], size: int, committed: set[int], aborted: set[int]
) -> list[str]:
    """Return the failures in what read_committed shows of a producer whose transactions have `size` records each.

    A transaction in neither set may be present or not, but whole.
    """
    seen: dict[int, list[int]] = defaultdict(list)
    wrong = []
    for place, records in contents.items():
        order = []
        for _, value in records:
            who, transaction, number = value.split(" ")
            if who == name:
                seen[int(transaction)].append(int(number))
                order.append((int(transaction), int(number)))
        if behind := [later for earlier, later in itertools.pairwise(order) if later <= earlier]:
            wrong.append(f"reordered or twice in {name} in {place[0]}/{place[1]}: {behind[:5]}")
    for what, found in (
        ("lost committed", sorted(committed - seen.keys())),
        ("shown aborted", sorted(aborted & seen.keys())),
        ("not whole", sorted(t for t, numbers in seen.items() if sorted(numbers) != list(range(size)))),
    ):
        if found:
            wrong.append(f"{what} transactions of {name}: {len(found)}, first {found[:5]}")
    return wrong


def judge_group(name: str, reported: Iterable[Committed]) -> list[str]:
    """Return the answers below an offset whose commit was acknowledged before the request."""
    wrong = []
    by_place: dict[Place, list[Committed]] = defaultdict(list)
    for each in reported:
        by_place[each.place].append(each)
    for place, history in by_place.items():
        commits = sorted((c for c in history if not c.found), key=lambda c: c.ended_s)
        for found in sorted((c for c in history if c.found), key=lambda c: c.began_s):
            before = max((c.offset for c in commits if c.ended_s <= found.began_s), default=-1)
            if found.offset < before:
                wrong.append(f"group {name} went back in {place[0]}/{place[1]}: from {before} to {found.offset}")
    return wrong


def judge_coverage(
    name: str, place: Place, offsets: Sequence[int], got: Iterable[tuple[int, int]], committed: int
) -> list[str]:
    """Every record below what the group committed was handed to a member. `got`: offsets that a member was handed at
    once, first and last."""
    covered = 0
    starts = sorted(got)
    missing = []
    index, reach = 0, -1
    for offset in offsets:
        if offset >= committed:
            break
        while index < len(starts) and starts[index][0] <= offset:
            reach = max(reach, starts[index][1])
            index += 1
        if offset > reach:
            missing.append(offset)
        covered += 1
    if missing:
        return [f"group {name} was never handed {len(missing)} of {covered} in {place[0]}/{place[1]}: {missing[:5]}"]
    return []


class Stall(NamedTuple):
    net_s: float
    """Length without the time in which consensus was unavailable."""
    raw_s: float
    at_s: float
    """Time at which it began."""
    whose: str


def longest_stall(
    acked: Mapping[str, Sequence[float]], began_s: float, ended_s: float, away: Sequence[tuple[float, float]]
) -> Stall:
    """The longest pause between acknowledgements of one producer in one partition (a key of `acked`)."""
    longest = Stall(0.0, 0.0, began_s, "")
    for whose, times in acked.items():
        for earlier, later in itertools.pairwise([began_s, *times, ended_s]):
            raw_s = later - earlier
            net_s = raw_s - sum(max(0.0, min(later, end) - max(earlier, start)) for start, end in away)
            if net_s > longest.net_s:
                longest = Stall(net_s, raw_s, earlier, whose)
    return longest


def stalls_by_producer(
    acked: Mapping[tuple[str, Place], Sequence[float]],
    began_s: float,
    ended_s: float,
    away: Sequence[tuple[float, float]],
) -> dict[str, Stall]:
    """Return the longest stall of each producer, and of ANYBODY: of a partition over all producers.

    `acked`: times by producer and place.
    """
    whose: dict[str, dict[Place, list[float]]] = defaultdict(lambda: defaultdict(list))
    for (producer, place), times in acked.items():
        whose[producer][place] += times
        whose[ANYBODY][place] += times
    return {
        name: longest_stall(
            {f"{name} in {topic}/{partition}": sorted(times) for (topic, partition), times in places.items()},
            began_s,
            ended_s,
            away,
        )
        for name, places in whose.items()
    }
