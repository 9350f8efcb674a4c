"""Interface of the collector to the consumers that make changes durable and may block the capture: the topic writer.

Invariant (no early confirm): the LSN confirmed to PostgreSQL never passes what every sink has flushed.

The sinks of a session are fixed when it starts. A consumer that only observes changes is a tap (taps.py).

Flush notices go through the collector's own queue, never inline. So a notice sent while a commit is being handled is
processed after that commit's registration.
"""

from __future__ import annotations

from typing import Protocol

from tidemill.base.lsn import ChangePosition
from tidemill.capture.changes import Fragment


class FlushNotices(Protocol):
    def report_flushed(self, consumer: str, position: ChangePosition) -> None:
        """Report that `consumer` has stored everything up to and including `position` durably. May be called from any
        task of the loop.
        """
        ...


class Sink(Protocol):
    async def deliver(self, fragment: Fragment, notices: FlushNotices) -> list[str]:
        """Process the fragment; return the names of consumers that will send `report_flushed` for it (touched ones).

        Called in commit order, one call at a time; must not wait for durability. A commit fragment goes to every sink
        even if it changes nothing for it. Replayed fragments (after a restart) are recognised by position and still
        reported as flushed. An error ends the session.
        """
        ...

    async def aclose(self) -> None: ...
