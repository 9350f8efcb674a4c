"""Pairs of types that may contain themselves: what is still being compared counts as compatible.

F1  A pair found incompatible is so for good: to assume more would only have helped it.
F2  A pair found compatible is remembered only when it leaned on nothing that is still being compared, itself aside.
"""

from __future__ import annotations

from collections.abc import Callable

from tidemill.registry.limits import MESSAGES, Steps
from tidemill.registry.parsed_schema import Difference

Pair = tuple[int, int]
_NONE = 1 << 30


class Walk:
    """One comparison: counts its steps, and keeps what it found."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self.found: list[Difference] = []
        self._good: set[Pair] = set()
        self._bad: dict[Pair, Difference] = {}
        self._open: dict[Pair, int] = {}
        self._leaned = _NONE
        """The outermost pair still being compared that anything leaned on."""

    def add(self, kind: str, path: str, told: str) -> None:
        if len(self.found) < MESSAGES:
            self.found.append(Difference(kind, path, told))

    def once(self, reader: object, writer: object, compare: Callable[[], None]) -> None:
        """`compare()` of this pair of types, unless it is known. Both must live as long as the walk."""
        self.steps.take()
        pair = (id(reader), id(writer))
        if pair in self._good:
            return
        if pair in self._bad:
            self._keep(self._bad[pair])
            return
        if pair in self._open:
            self._leaned = min(self._leaned, self._open[pair])
            return
        depth = len(self._open)
        self._open[pair] = depth
        outer, self._leaned = self._leaned, _NONE
        kept, self.found = self.found, []
        try:
            compare()
        finally:
            del self._open[pair]
            mine, self.found = self.found, kept
        if mine:
            self._bad[pair] = mine[0]
        elif self._leaned >= depth:
            self._good.add(pair)
        if self._leaned < depth:
            outer = min(outer, self._leaned)
        self._leaned = outer
        for difference in mine:
            self._keep(difference)

    def fits(self, compare: Callable[[], None]) -> bool:
        """Is nothing found by `compare()`? What it finds is not told: something else may do."""
        return not self.trial(compare)

    def trial(self, compare: Callable[[], None]) -> list[Difference]:
        kept, self.found = self.found, []
        try:
            compare()
            return self.found
        finally:
            self.found = kept

    def _keep(self, difference: Difference) -> None:
        if len(self.found) < MESSAGES:
            self.found.append(difference)
