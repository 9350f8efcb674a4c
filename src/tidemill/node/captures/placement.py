"""Plan of where each capture should run. All nodes with the same view compute the same plan.

    free    each capture goes to the able node with the fewest; captures with the fewest able nodes go first
    held    while a node could hand one to a node that has two fewer, one moves from the fullest to the emptiest

As few captures move as necessary, however many nodes plan at the same time; if not every node may run every capture, in
rare cases one more. Ties are broken by stable hashes, so the rest of a partly executed plan stays the same. Only single
moves that help are planned; captures are never swapped.
"""

from __future__ import annotations

import hashlib
from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping

Willing = Mapping[str, Collection[str]]
"""Captures that each live node may run."""
MOVE_THRESHOLD = 2
"""Least difference that justifies a move: moving for a smaller one would only mirror the imbalance."""


class Placement:
    """Plan from `holders` (capture → node that holds its lease) over `willing`. A capture held by a node that does
    not offer to run it is counted and stays: only that node knows the reason."""

    def __init__(self, holders: Mapping[str, str], willing: Willing) -> None:
        self._holders = holders
        able: defaultdict[str, set[str]] = defaultdict(set)
        for node, captures in willing.items():
            for capture in captures:
                able[capture].add(node)
        self._able = {capture: frozenset(nodes) for capture, nodes in able.items()}
        self._held = Counter(holders.values())
        self._counts = Counter(self._held)
        self._nodes = {node: (_hash(node), node) for node in {*willing, *self._held}}
        self._at = dict(holders)
        free = sorted(self._able.keys() - holders.keys(), key=lambda each: (len(self._able[each]), _hash(each)))
        for capture in free:
            node = self._at[capture] = self._least_loaded(self._able[capture])
            self._counts[node] += 1
        self._balance(free)
        self._balance(capture for capture, node in self._at.items() if node in self._able.get(capture, ()))
        self._given: defaultdict[str, set[str]] = defaultdict(set)
        for capture, node in holders.items():
            if self._at[capture] != node:
                self._given[node].add(capture)

    def captures_to_hand_over(self, node: str) -> set[str]:
        """Return the captures that this node should hand over."""
        return self._given.get(node, set())

    def nodes_in_try_order(self, capture: str) -> list[str]:
        """Return the nodes that may run a capture, in the order in which they should try."""
        first = self._at.get(capture)
        return sorted(
            self._able.get(capture, ()), key=lambda node: (node != first, self._held[node], _hash(f"{capture}/{node}"))
        )

    def _least_loaded(self, able: Iterable[str]) -> str:
        return min(able, key=lambda node: (self._counts[node], self._nodes[node]))

    def _balance(self, captures: Iterable[str]) -> None:
        """Move some of these captures, each to a node that may run it, until no move helps: every move reduces the
        sum of the squares. Captures that move anyway go first."""
        piles: dict[frozenset[str], defaultdict[str, list[tuple[bool, bytes, str]]]] = {}
        for capture in captures:
            pile = piles.setdefault(self._able[capture], defaultdict(list))
            insort(pile[self._at[capture]], self._move_order(capture))
        while True:
            found = []
            for able, pile in piles.items():
                source = max((node for node in pile if pile[node]), key=lambda n: (self._counts[n], self._nodes[n]))
                target = self._least_loaded(able)
                uneven = self._counts[source] - self._counts[target]
                if uneven >= MOVE_THRESHOLD:
                    found.append((uneven, *pile[source][0], source, target, able))
            if not found:
                return
            *_, capture, source, target, able = max(found, key=lambda each: (each[0], not each[1], each[2]))
            del piles[able][source][0]
            self._at[capture] = target
            insort(piles[able][target], self._move_order(capture))
            self._counts[source] -= 1
            self._counts[target] += 1

    def _move_order(self, capture: str) -> tuple[bool, bytes, str]:
        return self._holders.get(capture) == self._at[capture], _hash(capture), capture


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
