"""The capture sink of shapes: hands each change to the consumers of its relation, in commit order.

K1  A shape holds nothing back in capture: `deliver` names no consumers. Logs live in memory, and after a
    restart every shape starts over under a new handle (409 must-refetch), so there is nothing whose
    durability the database's WAL would have to wait for. A durable log would name its consumers here.
K2  A transaction at or below the last committed one is a replay and is dropped; a transaction that begins
    again after an interrupted delivery discards what the first attempt left.
K3  `recent` names the transactions delivered lately, the one under way included. A snapshot taken for a
    shape that registered after them must see them all: their changes were never offered to it. The gap is
    real: a commit is decoded from the WAL before it becomes visible to new snapshots.
"""

from __future__ import annotations

from collections import deque

from tidemill.capture.changes import Fragment
from tidemill.capture.sinks import FlushNotices
from tidemill.shapes.consumer import TableConsumer
from tidemill.shapes.router import Router

RECENT_TRANSACTIONS = 4096


class ShapeSink:
    """A capture Sink for one database. All work is synchronous inside `deliver`."""

    def __init__(self, database: str, router: Router) -> None:
        self._database = database
        self._router = router
        self._touched: dict[int, TableConsumer] = {}
        self._recent: deque[int] = deque(maxlen=RECENT_TRANSACTIONS)
        self.last_seen = 0
        """Commit LSN of the last whole transaction."""

    @property
    def recent(self) -> frozenset[int]:
        return frozenset(self._recent)

    async def deliver(self, fragment: Fragment, notices: FlushNotices) -> list[str]:
        """Route the fragment; returns no names (K1)."""
        self.take(fragment)
        return []

    def take(self, fragment: Fragment) -> None:
        if fragment.commit_lsn <= self.last_seen:
            return
        if fragment.begins:
            self._touched.clear()
            self._recent.append(fragment.xid)
        for change in fragment.changes:
            for consumer in self._router.route(self._database, change.relation.oid):
                if id(consumer) not in self._touched:
                    self._touched[id(consumer)] = consumer
                    consumer.begin(fragment.xid, fragment.commit_lsn)
                consumer.take(change)
        if fragment.commits:
            touched, self._touched = self._touched, {}
            for consumer in touched.values():
                consumer.commit()
            self.last_seen = fragment.commit_lsn

    async def aclose(self) -> None:
        self._touched.clear()
