"""The logs of one prefix that changed since somebody dealt with them: who keeps something of every log asks this."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tidemill.consensus.api import Consensus, LogHead, changes


class ChangedLogs:
    """A log is due with every change of it until it is `done`; so what could not be dealt with is met again.

    Names are given without the prefix. At first every log there is is due.
    """

    def __init__(self, consensus: Consensus, prefix: str) -> None:
        self._consensus = consensus
        self._prefix = prefix
        self._token = ""
        self._due: dict[str, LogHead] = {}
        self._strange: set[str] = set()

    async def look(self, known: Callable[[str], bool]) -> dict[str, LogHead]:
        """The due logs that are `known`, with their heads as of their last change. Raises Unavailable.

        One that is not known at two looks running is let go: whoever decides that asked before the first of them
        what there is, and knows at the second whatever was made before that log.
        """
        heads, self._token = await changes(self._consensus, self._prefix, self._token)
        cut = len(self._prefix)
        self._due.update((name[cut:], head) for name, head in heads.items())
        strange = {name for name in self._due if not known(name)}
        self.done(strange & self._strange)
        self._strange = strange
        return {name: head for name, head in self._due.items() if name not in strange}

    def done(self, names: Iterable[str]) -> None:
        for name in names:
            self._due.pop(name, None)

    def restart(self) -> None:
        """Nothing was ever dealt with."""
        self._token = ""
        self._due.clear()
        self._strange.clear()
