"""Fetch sessions (KIP-227): the server remembers the partitions of a client, and both sides send only changes.

    request   session id · epoch                      answer
    0 · 0     everything; creates a session           everything, and the session's id, or 0 if there is no room
    0 · −1    everything; without a session           everything
    id · 0    as above, and the session `id` ends     (−1 likewise)
    id · n    changes, and forgotten partitions       changes; n is one more than the last, after 2³¹−1 comes 1

Invariant (owner): a session belongs to one principal at one host, with topics by name or by id, not both. For other
clients it does not exist.

Invariant (bounded): there are at most `fetch_sessions_max` sessions, and their memory, estimated per session and
partition, is at most `fetch_sessions_bytes_max`. A new session evicts sessions in this order: those unused for
EVICT_AFTER_S, longest unused first, then those that were created that long ago and are smaller than it, smallest first.
If that is not enough, the client continues without a session. A session that outgrows its room ends.

Invariant (one request at a time): another request of a session whose request is still running gets
INVALID_FETCH_SESSION_EPOCH. Its client has abandoned the first request and creates a new session.

Invariant (ended id): a request with the id of an ended session gets FETCH_SESSION_ID_NOT_FOUND. Its client creates a
new session, with everything.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from prometheus_client import Counter, Gauge

from tidemill.base.clock import Clock, Rand
from tidemill.kafka import error_codes
from tidemill.kafka.fetch_sessions.partitions import FetchedPartitions
from tidemill.kafka.settings import KafkaSettings

NO_SESSION: Final = 0
INITIAL: Final = 0
FINAL: Final = -1
EPOCH_MAX: Final = 0x7FFFFFFF
EVICT_AFTER_S: Final = 120.0
"""Value of Kafka's min.incremental.fetch.session.eviction.ms."""

SESSION_BYTES: Final = 4_096
PARTITION_BYTES: Final = 1_024
"""Memory per partition, rounded up: 520 bytes to follow it (a test measures it), and as much for its stored request."""

_OPEN = Gauge("tidemill_kafka_fetch_sessions", "Open fetch sessions")
_PARTITIONS = Gauge("tidemill_kafka_fetch_session_partitions", "Partitions of the open fetch sessions")
_ENDED = Counter("tidemill_kafka_fetch_sessions_ended", "Fetch sessions that the server ended", ("reason",))
_DECLINED = Counter("tidemill_kafka_fetch_sessions_declined", "Fetch sessions for which there was no room")


class FetchSession:
    """One fetch session. `epoch` is the epoch of its client's next request."""

    def __init__(self, session_id: int, interest: FetchedPartitions, now_s: float) -> None:
        self.id = session_id
        self.epoch = 1
        self.interest = interest
        self.busy = False
        self.closed = False
        self.began_s = self.used_s = now_s
        self.counted = 0
        """Number of partitions that are counted against the limit."""

    @property
    def size_bytes(self) -> int:
        return SESSION_BYTES + PARTITION_BYTES * self.counted


class FetchSessions:
    def __init__(self, clock: Clock, rand: Rand, settings: KafkaSettings) -> None:
        self._clock = clock
        self._rand = rand
        self._count_max = settings.section.fetch_sessions_max
        self.bytes_max = settings.fetch_sessions_bytes_max
        self._sessions: OrderedDict[int, FetchSession] = OrderedDict()
        """Sessions, longest unused first."""
        self.used_bytes = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, interest: FetchedPartitions, *, own: bool = False) -> FetchSession | None:
        """Create a session; None if there is no room for it.

        `own` marks an internal session, whose id no client can name.
        """
        now_s = self._clock.monotonic_s()
        size_bytes = SESSION_BYTES + PARTITION_BYTES * len(interest)
        if not self._make_room(size_bytes, 1, now_s, None):
            _DECLINED.inc()
            return None
        session_id = NO_SESSION
        while session_id == NO_SESSION or session_id in self._sessions:
            session_id = (1 + self._rand.below(EPOCH_MAX)) * (-1 if own else 1)
        session = self._sessions[session_id] = FetchSession(session_id, interest, now_s)
        session.counted = len(interest)
        self.used_bytes += session.size_bytes
        self._publish_gauges()
        return session

    def find(self, session_id: int, epoch: int, *, principal: str, host: str, by_id: bool) -> FetchSession | int:
        """Return the session, with its epoch advanced, or a Kafka error code."""
        session = self._owned_session(session_id, principal, host)
        if session is None:
            return error_codes.FETCH_SESSION_ID_NOT_FOUND
        if session.epoch != epoch or session.busy:
            return error_codes.INVALID_FETCH_SESSION_EPOCH
        if session.interest.by_id != by_id:
            return error_codes.FETCH_SESSION_TOPIC_ID_ERROR
        session.epoch = 1 if epoch == EPOCH_MAX else epoch + 1
        self.touch(session)
        return session

    def touch(self, session: FetchSession) -> None:
        if not session.closed:
            session.used_s = self._clock.monotonic_s()
            self._sessions.move_to_end(session.id)

    def close_by_id(self, session_id: int, *, principal: str, host: str) -> None:
        """Close a session at the request of its client. Ignores the sessions of other clients."""
        session = self._owned_session(session_id, principal, host)
        if session is not None:
            self.close(session)

    def close(self, session: FetchSession) -> None:
        """Close a session. Idempotent."""
        if session.closed:
            return
        session.closed = True
        del self._sessions[session.id]
        self.used_bytes -= session.size_bytes
        session.interest.close()
        self._publish_gauges()

    def update_size(self, session: FetchSession) -> bool:
        """Count the partitions that the session has now. Return False if there is no room and the session has ended."""
        if session.closed:
            return False
        delta = len(session.interest) - session.counted
        if delta > 0 and not self._make_room(PARTITION_BYTES * delta, 0, self._clock.monotonic_s(), session):
            _ENDED.labels("outgrown").inc()
            self.close(session)
            return False
        session.counted += delta
        self.used_bytes += PARTITION_BYTES * delta
        self._publish_gauges()
        return True

    def _owned_session(self, session_id: int, principal: str, host: str) -> FetchSession | None:
        session = self._sessions.get(session_id) if session_id > 0 else None
        mine = session is not None and (session.interest.principal, session.interest.host) == (principal, host)
        return session if mine else None

    def _make_room(self, size_bytes: int, count: int, now_s: float, growing: FetchSession | None) -> bool:
        """Evict sessions until there is room. Either all necessary sessions end or none does."""
        over_bytes = self.used_bytes + size_bytes - self.bytes_max
        over_count = len(self._sessions) + count - self._count_max
        if over_bytes <= 0 and over_count <= 0:
            return True
        old_s = now_s - EVICT_AFTER_S
        whole_bytes = size_bytes + (growing.size_bytes if growing is not None else 0)
        unused = [each for each in self._sessions.values() if each.used_s <= old_s]
        small = [
            each
            for each in self._sessions.values()
            if each.used_s > old_s >= each.began_s and each.size_bytes < whole_bytes
        ]
        ending: list[FetchSession] = []
        for each in (*unused, *sorted(small, key=lambda each: each.counted)):
            if over_bytes <= 0 and over_count <= 0:
                break
            if each is not growing:
                ending.append(each)
                over_bytes -= each.size_bytes
                over_count -= 1
        if over_bytes > 0 or over_count > 0:
            return False
        for each in ending:
            _ENDED.labels("evicted").inc()
            self.close(each)
        return True

    def _publish_gauges(self) -> None:
        _OPEN.set(len(self._sessions))
        _PARTITIONS.set((self.used_bytes - SESSION_BYTES * len(self._sessions)) // PARTITION_BYTES)
