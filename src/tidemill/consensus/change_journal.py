"""Recently changed logs, in the order of their last change: the journal of one engine, and the caller that follows it.

    token   LIFE:N            "which logs changed after change N?"
            LIFE:N:NAME       "which other logs are there after NAME?"; LIFE:N follows the last page

Invariant (no missed change): a token's answer contains every log that changed after the token was issued. A log that
changes during a listing of all logs gets a number above N, so it is reported again.

Invariant (safe fallback): a token of another journal, or one older than the oldest remembered change, is answered with
a listing of all logs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tidemill.consensus.api import Changes, Consensus, LogHead, read_all_changes
from tidemill.consensus.operations import Changed

PAGE_HEADS = 1_000
"""Heads per answer: one or two milliseconds of an engine's thread."""

JOURNAL_CHANGES = 50_000
"""Number of remembered changes, at about 200 bytes each."""

ListHeads = Callable[[str, str, int], list[tuple[str, LogHead]]]
"""(prefix, after, limit) → the first `limit` logs with this prefix whose name is greater than `after`, by name."""


class ChangeJournal:
    """The journal of one engine."""

    def __init__(self, life: str, *, remembered: int = JOURNAL_CHANGES, page: int = PAGE_HEADS) -> None:
        """`life` identifies this journal: unique among all journals ever created, and without a colon."""
        self._life = life
        self._remembered = remembered
        self._page = page
        self._last = 0
        self._forgotten = 0
        self._changes: dict[str, int] = {}
        """log → number of its last change, ascending."""

    def record_changes(self, logs: Iterable[str]) -> None:
        """Record that these logs changed. Call it only once the change is durable."""
        changes = self._changes
        for log in logs:
            self._last += 1
            changes.pop(log, None)
            changes[log] = self._last
        while len(changes) > self._remembered:
            self._forgotten = changes.pop(next(iter(changes)))

    def changes_since(self, op: Changed, listed: ListHeads, head: Callable[[str], LogHead]) -> Changes:
        life, _, rest = op.since.partition(":")
        digits, listing, after = rest.partition(":")
        number = int(digits) if digits.isdecimal() and digits.isascii() else 0
        known = life == self._life and self._forgotten <= number <= self._last
        if known and not listing:
            return self._changes_after(op.prefix, number, head)
        if not known:
            number, after = self._last, ""
        found = listed(op.prefix, after, self._page)
        if len(found) == self._page:
            return Changes(tuple(found), f"{self._life}:{number}:{found[-1][0]}", True)
        return Changes(tuple(found), f"{self._life}:{number}", number < self._last)

    def _changes_after(self, prefix: str, number: int, head: Callable[[str], LogHead]) -> Changes:
        names: list[tuple[str, int]] = []
        for name, changed in reversed(self._changes.items()):
            if changed <= number:
                break
            if name.startswith(prefix):
                names.append((name, changed))
        names.reverse()
        more = len(names) > self._page
        page = names[: self._page]
        upto = page[-1][1] if more else self._last
        return Changes(tuple((name, head(name)) for name, _ in page), f"{self._life}:{upto}", more)


class ChangedLogs:
    """Tracker of changed logs until they are `done`, so that a log whose processing failed is returned again.

    Names are given without the prefix. Initially every existing log is due.
    """

    def __init__(self, consensus: Consensus, prefix: str) -> None:
        self._consensus = consensus
        self._prefix = prefix
        self._token = ""
        self._due: dict[str, LogHead] = {}
        self._strange: set[str] = set()

    async def next_changed(self, known: Callable[[str], bool]) -> dict[str, LogHead]:
        """Return the due logs that are `known`, with their heads as of their last change. Raises UnavailableError.

        A name that is unknown in two consecutive calls is dropped. The caller refreshes its set of logs between the
        calls, so the second one sees every log that existed at the first.
        """
        heads, self._token = await read_all_changes(self._consensus, self._prefix, self._token)
        cut = len(self._prefix)
        self._due.update((name[cut:], head) for name, head in heads.items())
        strange = {name for name in self._due if not known(name)}
        self.done(strange & self._strange)
        self._strange = strange
        return {name: head for name, head in self._due.items() if name not in strange}

    def done(self, names: Iterable[str]) -> None:
        for name in names:
            self._due.pop(name, None)

    def reset(self) -> None:
        """Treat every log as changed."""
        self._token = ""
        self._due.clear()
        self._strange.clear()
