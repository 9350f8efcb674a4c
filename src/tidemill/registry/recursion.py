"""Comparison of types that may contain themselves: a pair that is still being compared counts as compatible.

- A pair found incompatible stays incompatible: an assumption could only have made it compatible.
- A pair found compatible is remembered only if its result did not depend on another pair that is still being compared.
"""

from __future__ import annotations

from collections.abc import Callable

from tidemill.registry.limits import MESSAGES, StepBudget
from tidemill.registry.schema import Difference

Pair = tuple[int, int]
_NONE = 1 << 30


class SchemaComparison:
    """One comparison. It counts its steps and collects its differences."""

    def __init__(self, steps: StepBudget) -> None:
        self.steps = steps
        self.found: list[Difference] = []
        self._good: set[Pair] = set()
        self._bad: dict[Pair, Difference] = {}
        self._open: dict[Pair, int] = {}
        self._leaned = _NONE
        """Depth of the outermost pair still being compared on which a result depended."""

    def add(self, kind: str, path: str, description: str) -> None:
        if len(self.found) < MESSAGES:
            self.found.append(Difference(kind, path, description))

    def compare_once(self, reader: object, writer: object, compare: Callable[[], None]) -> None:
        """Run `compare()` for this pair of types, unless its result is known. Both objects must live as long as the
        walk."""
        self.steps.count_step()
        pair = (id(reader), id(writer))
        if pair in self._good:
            return
        if pair in self._bad:
            self._add_limited(self._bad[pair])
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
            self._add_limited(difference)

    def fits(self, compare: Callable[[], None]) -> bool:
        """Return whether `compare()` finds no difference. Its differences are discarded, because an alternative may
        fit."""
        return not self.collect_differences(compare)

    def collect_differences(self, compare: Callable[[], None]) -> list[Difference]:
        kept, self.found = self.found, []
        try:
            compare()
            return self.found
        finally:
            self.found = kept

    def _add_limited(self, difference: Difference) -> None:
        if len(self.found) < MESSAGES:
            self.found.append(difference)
