"""Assignment of captures to nodes: nodes with the same view move no more captures than necessary."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Mapping

import pytest

from tidemill.node.captures.placement import Placement, Willing


@pytest.mark.parametrize("seed", range(40))
def test_any_spread_becomes_even_and_then_nothing_moves(seed: int) -> None:
    rand = random.Random(seed)
    nodes = [f"n{n}" for n in range(rand.randint(1, 5))]
    captures = [f"c{n}" for n in range(rand.randint(1, 12))]
    willing = {node: captures for node in nodes}
    holders = {capture: rand.choice(nodes) for capture in captures if rand.random() < 0.8}
    for _ in range(12):
        free = [capture for capture in captures if capture not in holders]
        for capture in free:
            holders[capture] = Placement(dict(holders), willing).nodes_in_try_order(capture)[0]
        given = [capture for node in nodes for capture in Placement(holders, willing).captures_to_hand_over(node)]
        for capture in given:
            del holders[capture]
        if not free and not given:
            break
    counts = [list(holders.values()).count(node) for node in nodes]
    assert len(holders) == len(captures) and max(counts) - min(counts) <= 1


def test_nothing_is_given_to_a_node_that_may_not_run_it_and_nothing_for_one_more() -> None:
    holders = {"a": "n1", "b": "n1", "c": "n1"}
    assert Placement(holders, {"n1": "abc", "n2": "d"}).captures_to_hand_over("n1") == set()
    assert Placement(holders, {"n1": "abc", "n2": "b"}).captures_to_hand_over("n1") == {"b"}
    assert Placement({"a": "n1", "b": "n1", "c": "n2"}, {"n1": "abc", "n2": "abc"}).captures_to_hand_over("n1") == set()
    four = dict.fromkeys("abcd", "n1")
    assert len(Placement(four, {"n1": "abcd", "n2": "abcd"}).captures_to_hand_over("n1")) == 2
    assert Placement(holders, {"n1": "abcd", "n2": "abcd", "n3": "a"}).nodes_in_try_order("d") == ["n2", "n1"]


def settle(holders: dict[str, str], willing: Willing, rand: random.Random | None = None) -> int:
    """Let all nodes act on the same view until nothing changes. Return the number of captures that were handed over.

    With `rand` each action is delayed now and then.
    """
    given, rounds = 0, 0
    while True:
        placement = Placement(dict(holders), willing)
        gives = {capture for node in willing for capture in placement.captures_to_hand_over(node)}
        free = {capture for captures in willing.values() for capture in captures} - holders.keys()
        if not gives and not free:
            return given
        for capture in free:
            if rand is None or rand.random() < 0.5:
                holders[capture] = placement.nodes_in_try_order(capture)[0]
        for capture in gives:
            if rand is None or rand.random() < 0.5:
                del holders[capture]
                given += 1
        rounds += 1
        assert rounds < 100, holders


def spread(nodes: int, per: int) -> dict[str, str]:
    return {f"c{n}_{k}": f"n{n}" for n in range(nodes) for k in range(per)}


def needed(holders: Mapping[str, str], nodes: set[str]) -> int:
    """Return the fewest moves after which no two nodes differ by two: the fullest nodes keep one more than the
    others."""
    counts = sorted(Counter({node: 0 for node in nodes} | Counter(holders.values())).values(), reverse=True)
    share, more = divmod(len(holders), len(nodes))
    return sum(max(0, count - share - (place < more)) for place, count in enumerate(counts))


def even(holders: Mapping[str, str], nodes: set[str]) -> bool:
    counts = [list(holders.values()).count(node) for node in nodes]
    return max(counts) - min(counts) <= 1


@pytest.mark.parametrize(("nodes", "per"), [(3, 2), (5, 2), (10, 2), (10, 3)])
@pytest.mark.parametrize("come", [1, 2, 3])
@pytest.mark.parametrize("late", [False, True])
def test_nodes_that_come_are_given_what_they_need_and_no_more_moves(
    nodes: int, per: int, come: int, late: bool
) -> None:
    for seed in range(10):
        holders = spread(nodes, per)
        names = {f"n{n}" for n in range(nodes)} | {f"new{seed}_{n}" for n in range(come)}
        moves = needed(holders, names)
        assert settle(holders, dict.fromkeys(names, tuple(holders)), random.Random(seed) if late else None) == moves
        assert even(holders, names)


@pytest.mark.parametrize(("nodes", "per"), [(3, 2), (5, 2), (10, 2), (10, 3)])
@pytest.mark.parametrize("late", [False, True])
def test_of_nodes_that_leave_the_captures_are_taken_and_nothing_else_moves(nodes: int, per: int, late: bool) -> None:
    for gone in range(nodes - 1):
        every = spread(nodes, per)
        names = {f"n{n}" for n in range(nodes)} - {f"n{gone}"}
        holders = {capture: node for capture, node in every.items() if node in names}
        assert settle(holders, dict.fromkeys(names, tuple(every)), random.Random(gone) if late else None) == 0
        assert even(holders, names) and len(holders) == len(every)


def fewest(holders: Mapping[str, str], able: Mapping[str, list[str]]) -> int:
    """Return the smallest number of moves after which no capture could move to a node with two fewer, by trying all."""
    captures = sorted(holders)
    best = len(captures)
    for at in itertools.product(*(able[capture] for capture in captures)):
        counts = Counter(at)
        if all(counts[at[n]] - counts[other] < 2 for n, each in enumerate(captures) for other in able[each]):
            best = min(best, sum(at[n] != holders[each] for n, each in enumerate(captures)))
    return best


@pytest.mark.parametrize("seed", range(60))
def test_captures_that_only_some_may_run_move_no_more_than_is_needed(seed: int) -> None:
    rand = random.Random(seed)
    nodes = [f"n{n}" for n in range(rand.randint(2, 4))]
    able = {f"c{n}": rand.sample(nodes, rand.randint(1, len(nodes))) for n in range(rand.randint(3, 6))}
    holders = {capture: rand.choice(some) for capture, some in able.items()}
    willing = {node: [capture for capture, some in able.items() if node in some] for node in nodes}
    moves = fewest(holders, able)
    assert settle(dict(holders), willing) == moves, (holders, willing)


def test_what_is_free_is_taken_by_different_nodes_though_both_have_none() -> None:
    willing = {"n1": "abcd", "n2": "abcd", "n3": "abcd", "n4": "a"}
    placement = Placement({"c": "n1", "d": "n2"}, willing)
    assert placement.nodes_in_try_order("a")[0] == "n4" and placement.nodes_in_try_order("b")[0] == "n3"
    assert (
        sorted(placement.nodes_in_try_order("b")) == ["n1", "n2", "n3"]
        and placement.nodes_in_try_order("unknown") == []
    )


def test_what_a_node_holds_and_does_not_offer_stays_and_is_counted() -> None:
    placement = Placement(dict.fromkeys("abc", "n1"), {"n1": "c", "n2": "abc"})
    assert placement.captures_to_hand_over("n1") == {"c"}
    assert Placement(dict.fromkeys("abc", "n1"), {"n2": "abc"}).captures_to_hand_over("n1") == set()


def test_a_thousand_captures_on_one_node_are_planned_at_once() -> None:
    captures = [f"c{n}" for n in range(1000)]
    willing = {f"n{n}": captures for n in range(20)}
    assert len(Placement(dict.fromkeys(captures, "n0"), willing).captures_to_hand_over("n0")) == 950
