"""Where each capture should be: one plan, which all nodes that see the same compute alike.

    free    each goes to the node that then has fewest of those that may run it, the choosy ones first
    held    while a node could hand one to another that has two fewer, one moves from the fullest to the emptiest

So as few move as need to, however many nodes look at once; where not all may run all, in rare cases one more. Ties are
broken by hashes that do not change: what is left of a plan that was carried out in part is what was left of it before.
Only what helps by itself moves: nothing changes places with something else.
"""

from __future__ import annotations

import hashlib
from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping

Willing = Mapping[str, Collection[str]]
"""Live node → the captures that it may run."""
UNEVEN = 2
"""Moving one for less would only turn things round."""


class Placement:
    """Of `holders` (capture → the node that holds its lease) over `willing`. What a node holds that does not offer to
    run it is counted and stays: nobody but that node knows why."""

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
            node = self._at[capture] = self._emptiest(self._able[capture])
            self._counts[node] += 1
        self._even(free)
        self._even(capture for capture, node in self._at.items() if node in self._able.get(capture, ()))
        self._given: defaultdict[str, set[str]] = defaultdict(set)
        for capture, node in holders.items():
            if self._at[capture] != node:
                self._given[node].add(capture)

    def to_give(self, node: str) -> set[str]:
        """The captures that this node gives up for others to take."""
        return self._given.get(node, set())

    def line(self, capture: str) -> list[str]:
        """The nodes that may run a capture, the one that should try first first."""
        first = self._at.get(capture)
        return sorted(
            self._able.get(capture, ()), key=lambda node: (node != first, self._held[node], _hash(f"{capture}/{node}"))
        )

    def _emptiest(self, able: Iterable[str]) -> str:
        return min(able, key=lambda node: (self._counts[node], self._nodes[node]))

    def _even(self, captures: Iterable[str]) -> None:
        """Move some of these, each at a node that may run it, until none helps: every move makes the sum of the squares
        smaller. Those that move anyway go first."""
        piles: dict[frozenset[str], defaultdict[str, list[tuple[bool, bytes, str]]]] = {}
        for capture in captures:
            pile = piles.setdefault(self._able[capture], defaultdict(list))
            insort(pile[self._at[capture]], self._rank(capture))
        while True:
            found = []
            for able, pile in piles.items():
                source = max((node for node in pile if pile[node]), key=lambda n: (self._counts[n], self._nodes[n]))
                target = self._emptiest(able)
                uneven = self._counts[source] - self._counts[target]
                if uneven >= UNEVEN:
                    found.append((uneven, *pile[source][0], source, target, able))
            if not found:
                return
            *_, capture, source, target, able = max(found, key=lambda each: (each[0], not each[1], each[2]))
            del piles[able][source][0]
            self._at[capture] = target
            insort(piles[able][target], self._rank(capture))
            self._counts[source] -= 1
            self._counts[target] += 1

    def _rank(self, capture: str) -> tuple[bool, bytes, str]:
        return self._holders.get(capture) == self._at[capture], _hash(capture), capture


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
