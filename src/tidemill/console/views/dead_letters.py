"""Dead letters, as `dead-letters` prints them: the newest ones, and how many there are for each reason."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

REASONS_MAX = 50

Letter = dict[str, Any]


def letter_order(letter: Letter) -> tuple[Any, ...]:
    return letter["at"], letter["topic"], letter["partition"], letter["offset"]


def newest_letters(letters: Iterable[Letter], limit: int) -> list[Letter]:
    """Return the newest letters, oldest of them first."""
    return sorted(letters, key=letter_order)[-limit:]


class ReasonCounts:
    """Number of letters for each reason and topic. Reasons that differ only in numbers and quoted values are one."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, str], dict[str, Any]] = {}

    def add(self, letters: Iterable[Letter]) -> None:
        """Count letters; only `reason`, `topic` and `at` are needed."""
        for letter in letters:
            reason, at = letter["reason"], letter["at"]
            found = self._groups.setdefault(
                (_VALUES.sub("#", reason), letter["topic"]),
                {"reason": reason, "topic": letter["topic"], "count": 0, "first": at, "last": at},
            )
            found["count"] += 1
            found["first"] = min(found["first"], at)
            if at >= found["last"]:
                found["reason"], found["last"] = reason, at

    def rows(self) -> list[dict[str, Any]]:
        """Return {"reason", "topic", "count", "first", "last"}, the most frequent reason first; `reason` is that of
        the newest letter."""
        return sorted(self._groups.values(), key=lambda row: -row["count"])[:REASONS_MAX]


_VALUES = re.compile(r"'[^']*'|\"[^\"]*\"|\d+")
