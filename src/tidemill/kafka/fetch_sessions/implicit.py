"""Clients without sessions (librdkafka, aiokafka) ask for everything each time: what of such a request is as it was the
last time is not read again, and what of its answer is, not written again.

    request   the same partitions, in any order ─► those whose offsets are others alone are put (`request_diff`)
    answer    an entry a partition, at a fixed place while it has no records ─► those told anew alone are written

RP1  One is kept for a connection at most, counted and bounded as a session; while it answers, the connection's next
     request is read from the beginning.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

from tidemill.kafka.api.dispatch import Reply, Request
from tidemill.kafka.fetch_sessions.partitions import Interest, Key
from tidemill.kafka.fetch_sessions.request_diff import Asked
from tidemill.kafka.fetch_sessions.sessions import FetchSession, FetchSessions
from tidemill.kafka.schema.fetch import Blank, FetchRequest, FetchTopic, PartitionRecords

PARTITIONS_MIN: Final = 64
"""Fewer are read and written in less than a millisecond."""


class Repeated:
    """What a connection asked for last, and the answer to it without records."""

    def __init__(self, fetch: FetchRequest, session: FetchSession, asked: Asked, blank: Blank) -> None:
        self.session = session
        self.fetch = fetch._replace(topics=[])
        self.asked = asked
        self._blank = blank

    @property
    def interest(self) -> Interest:
        return self.session.interest

    def answer(self, found: Iterable[tuple[Key, PartitionRecords]]) -> Reply:
        return self._blank.filled(found)


class Repeats:
    """By connection."""

    def __init__(self, sessions: FetchSessions) -> None:
        self._sessions = sessions
        self._kept: dict[int, Repeated] = {}

    def take(self, request: Request) -> tuple[Repeated, list[FetchTopic]] | None:
        """What this request repeats, and what it changes; the caller keeps it again, or closes it (RP1)."""
        kept = self._kept.pop(request.sender, None)
        if kept is None or kept.session.closed:
            return None
        changes = kept.asked.changes(_body(request), request.version)
        if changes is None:
            self._sessions.close(kept.session)
            return None
        return kept, changes

    async def begin(
        self, request: Request, fetch: FetchRequest, interest: Interest, found: dict[Key, PartitionRecords]
    ) -> Reply | None:
        """The answer that tells `found`, where the request is worth to be kept: the interest is no longer its caller's
        then."""
        if len(interest) < PARTITIONS_MIN or request.sender in self._kept:
            return None
        prepared = await asyncio.to_thread(_prepare, _body(request), request.version, fetch, found)
        if prepared is None or request.sender in self._kept:
            return None
        session = self._sessions.open(interest, own=True)
        if session is None:
            return None
        asked, blank, reply = prepared
        self._kept[request.sender] = Repeated(fetch, session, asked, blank)
        return reply

    def keep(self, request: Request, repeated: Repeated) -> None:
        before = self._kept.get(request.sender)
        if before is not None:
            self._sessions.close(before.session)
        self._sessions.used(repeated.session)
        self._kept[request.sender] = repeated

    def close(self, repeated: Repeated) -> None:
        self._sessions.close(repeated.session)

    def forget(self, sender: int) -> None:
        """The connection has ended."""
        kept = self._kept.pop(sender, None)
        if kept is not None:
            self._sessions.close(kept.session)


def _prepare(
    body: bytes, version: int, fetch: FetchRequest, found: dict[Key, PartitionRecords]
) -> tuple[Asked, Blank, Reply] | None:
    asked = Asked.of(body, version, fetch.topics)
    if asked is None:
        return None
    blank = Blank(((topic.topic, [each.partition for each in topic.partitions]) for topic in fetch.topics), version)
    return asked, blank, blank.filled(found.items())


def _body(request: Request) -> bytes:
    return bytes(request.view[request.position :])
