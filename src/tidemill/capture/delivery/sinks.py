"""What the collector needs of those who make changes durable and may hold the capture back: the topic writer.

P1  The LSN confirmed to Postgres never passes what every sink has flushed.

The sinks of a session are fixed when it starts. Who only wants to see what passes by is a tap (taps.py).

Flush notices travel through the collector's own queue, never inline: a notice sent while a commit
is being handled is handled after that commit's registration (the ordering axiom of notes/electric.md §2).
"""

from __future__ import annotations

from typing import Protocol

from tidemill.base.lsn import ChangePosition
from tidemill.capture.changes import Fragment


class FlushNotices(Protocol):
    def flushed(self, consumer: str, position: ChangePosition) -> None:
        """`consumer` holds everything up to and including `position` durably. Any thread-of-control, same loop."""
        ...


class Sink(Protocol):
    async def deliver(self, fragment: Fragment, notices: FlushNotices) -> list[str]:
        """Take the fragment; return the names of consumers that will send `flushed` for it (touched ones).

        Called in commit order, one at a time; must not wait for durability. A commit fragment goes to
        every sink even when it changes nothing for it. Replayed fragments (after a restart) are
        recognised by position and still reported flushed. What it raises ends the session.
        """
        ...

    async def aclose(self) -> None: ...
