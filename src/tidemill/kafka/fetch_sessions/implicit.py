"""Implicit sessions for clients without fetch sessions (librdkafka, aiokafka), which name everything in each request.

The parts of a request that equal the last one are not decoded again, and the unchanged parts of its answer are not
encoded again.

    request   the same partitions in any order ─► only those with changed entries are updated (`request_diff`)
    answer    one entry per partition, at a fixed place while it has no records ─► only changed entries are written

Invariant: a connection has at most one implicit session, counted and bounded like a fetch session. While it serves a
request, the connection's next request is decoded from scratch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

from tidemill.kafka.api.dispatch import Reply, Request
from tidemill.kafka.fetch_sessions.partitions import FetchedPartitions, Key
from tidemill.kafka.fetch_sessions.request_diff import RequestDiff
from tidemill.kafka.fetch_sessions.sessions import FetchSession, FetchSessions
from tidemill.kafka.schema.fetch import FetchAnswerTemplate, FetchRequest, FetchTopic, PartitionRecords

PARTITIONS_MIN: Final = 64
"""Smallest number of partitions with an implicit session: fewer are decoded and encoded in less than a millisecond."""


class ImplicitSession:
    """The last request of a connection, and the answer to it without records."""

    def __init__(
        self, fetch: FetchRequest, session: FetchSession, asked: RequestDiff, blank: FetchAnswerTemplate
    ) -> None:
        self.session = session
        self.fetch = fetch._replace(topics=[])
        self.asked = asked
        self._blank = blank

    @property
    def interest(self) -> FetchedPartitions:
        return self.session.interest

    def encode_answer(self, found: Iterable[tuple[Key, PartitionRecords]]) -> Reply:
        return self._blank.fill(found)


class ImplicitSessions:
    """Implicit sessions by connection."""

    def __init__(self, sessions: FetchSessions) -> None:
        self._sessions = sessions
        self._kept: dict[int, ImplicitSession] = {}

    def claim(self, request: Request) -> tuple[ImplicitSession, list[FetchTopic]] | None:
        """Return the session that this request repeats, and the partitions that it changes.

        The session is removed: the caller must return it by `store` or `close` it.
        """
        kept = self._kept.pop(request.sender, None)
        if kept is None or kept.session.closed:
            return None
        changes = kept.asked.changed_topics(_body(request), request.version)
        if changes is None:
            self._sessions.close(kept.session)
            return None
        return kept, changes

    async def create(
        self, request: Request, fetch: FetchRequest, interest: FetchedPartitions, found: dict[Key, PartitionRecords]
    ) -> Reply | None:
        """Return the answer that contains `found` and create an implicit session, which then owns the interest.

        Return None, without a session, if the request is too small, another session exists or there is no room.
        """
        if len(interest) < PARTITIONS_MIN or request.sender in self._kept:
            return None
        prepared = await asyncio.to_thread(_prepare_session, _body(request), request.version, fetch, found)
        if prepared is None or request.sender in self._kept:
            return None
        session = self._sessions.open(interest, own=True)
        if session is None:
            return None
        asked, blank, reply = prepared
        self._kept[request.sender] = ImplicitSession(fetch, session, asked, blank)
        return reply

    def store(self, request: Request, repeated: ImplicitSession) -> None:
        before = self._kept.get(request.sender)
        if before is not None:
            self._sessions.close(before.session)
        self._sessions.touch(repeated.session)
        self._kept[request.sender] = repeated

    def close(self, repeated: ImplicitSession) -> None:
        self._sessions.close(repeated.session)

    def close_connection(self, sender: int) -> None:
        """Close the session of a connection that has ended."""
        kept = self._kept.pop(sender, None)
        if kept is not None:
            self._sessions.close(kept.session)


def _prepare_session(
    body: bytes, version: int, fetch: FetchRequest, found: dict[Key, PartitionRecords]
) -> tuple[RequestDiff, FetchAnswerTemplate, Reply] | None:
    asked = RequestDiff.from_body(body, version, fetch.topics)
    if asked is None:
        return None
    blank = FetchAnswerTemplate(
        ((topic.topic, [each.partition for each in topic.partitions]) for topic in fetch.topics), version
    )
    return asked, blank, blank.fill(found.items())


def _body(request: Request) -> bytes:
    return bytes(request.view[request.position :])
