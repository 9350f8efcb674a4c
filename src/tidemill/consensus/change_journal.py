"""Which logs changed lately, in the order of their last change: what one engine remembers of its own life.

    token   LIFE:N            "what changed after the N-th change?"
            LIFE:N:NAME       "what else is there after NAME?"; LIFE:N follows when all of it was told

J1  Who asks with a token hears of every log that changed after it was handed out. What changes while all there is is
    being told has a number beyond N, so it is told again.
J2  A token of another life, or older than what is remembered, is answered by all there is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tidemill.consensus.api import Changes, LogHead
from tidemill.consensus.operations import Changed

PAGE = 1_000
"""Heads in one answer: a millisecond of an engine's thread, or two."""

REMEMBERED = 50_000
"""Some 200 bytes each."""

Listed = Callable[[str, str, int], list[tuple[str, LogHead]]]
"""(prefix, after, limit) → the first logs with this prefix whose name is greater than `after`, by name."""


class Journal:
    """Owned by one engine."""

    def __init__(self, life: str, *, remembered: int = REMEMBERED, page: int = PAGE) -> None:
        """`life`: another one for every journal there ever was, without a colon."""
        self._life = life
        self._remembered = remembered
        self._page = page
        self._last = 0
        self._forgotten = 0
        self._changes: dict[str, int] = {}
        """log → number of its last change, ascending"""

    def note(self, logs: Iterable[str]) -> None:
        """These changed, and it is durable."""
        changes = self._changes
        for log in logs:
            self._last += 1
            changes.pop(log, None)
            changes[log] = self._last
        while len(changes) > self._remembered:
            self._forgotten = changes.pop(next(iter(changes)))

    def answer(self, op: Changed, listed: Listed, head: Callable[[str], LogHead]) -> Changes:
        life, _, rest = op.since.partition(":")
        digits, listing, after = rest.partition(":")
        number = int(digits) if digits.isdecimal() and digits.isascii() else 0
        known = life == self._life and self._forgotten <= number <= self._last
        if known and not listing:
            return self._later(op.prefix, number, head)
        if not known:
            number, after = self._last, ""
        found = listed(op.prefix, after, self._page)
        if len(found) == self._page:
            return Changes(tuple(found), f"{self._life}:{number}:{found[-1][0]}", True)
        return Changes(tuple(found), f"{self._life}:{number}", number < self._last)

    def _later(self, prefix: str, number: int, head: Callable[[str], LogHead]) -> Changes:
        names: list[tuple[str, int]] = []
        for name, changed in reversed(self._changes.items()):
            if changed <= number:
                break
            if name.startswith(prefix):
                names.append((name, changed))
        names.reverse()
        more = len(names) > self._page
        told = names[: self._page]
        upto = told[-1][1] if more else self._last
        return Changes(tuple((name, head(name)) for name, _ in told), f"{self._life}:{upto}", more)
