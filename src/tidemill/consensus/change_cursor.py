"""The logs of one prefix that changed since the caller last processed them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tidemill.consensus.api import Consensus, LogHead, read_all_changes


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
