"""Bounds on the memory that clients make this process hold: incoming requests and outgoing answers.

Invariant (half each): a request counts from the first byte of its frame that has a buffer, because half-received frames
use memory too. Complete requests and half-received frames each have one half of the limit, so frames that are never
completed leave room for those that are.

Invariant (progress): while half-received frames exceed their half, only the oldest one grows, because frames that wait
for each other's room would all wait until their deadline. So the excess is at most one frame, plus, for each further
connection, the bytes that arrived with the size of its frame, at most 16 KiB.

Invariant (slow readers lose): answers that clients do not read are dropped together with their connection, the one that
has read nothing for longest first. Waiting for room instead would let a few clients that do not read stop the Fetch of
all others.
"""

from __future__ import annotations

from typing import Protocol

from prometheus_client import Gauge

_REQUESTS = Gauge("tidemill_kafka_request_bytes", "Running requests and half-received frames, bytes")
_ANSWERS = Gauge("tidemill_kafka_answer_bytes", "Answers that clients have not read yet, bytes")


class BudgetedSession(Protocol):
    """Owner of counted memory: a session."""

    def consider_reading(self) -> None: ...

    def close(self, error: Exception | None = None) -> None: ...

    @property
    def took_s(self) -> float:
        """Monotonic time at which the client last read a byte of its answers."""
        ...


class MemoryBudget:
    def __init__(self, requests_max: int, answers_max: int) -> None:
        self.requests_max = requests_max
        self.answers_max = answers_max
        self._half = requests_max // 2
        self._begun_bytes = self._receiving_bytes = 0
        self.answer_bytes = 0
        self._waiting: dict[BudgetedSession, None] = {}
        self._receiving: dict[BudgetedSession, None] = {}
        """Sessions with an unfinished frame that has a buffer, oldest first."""
        self._answers: dict[BudgetedSession, int] = {}
        _REQUESTS.set_function(lambda: self.request_bytes)
        _ANSWERS.set_function(lambda: self.answer_bytes)

    # requests -------------------------------------------------------------------------------------
    @property
    def request_bytes(self) -> int:
        return self._begun_bytes + self._receiving_bytes

    def can_read(self, session: BudgetedSession, more: int) -> bool:
        """Return whether the unfinished frame may grow by `more` bytes.

        If not, the session's `consider_reading` is called when there is room.
        """
        grows = not more or self._receiving_bytes + more <= self._half or next(iter(self._receiving), None) is session
        if grows and self._begun_bytes <= self._half:
            self._waiting.pop(session, None)
            return True
        self._waiting[session] = None
        return False

    def has_room(self, size: int) -> bool:
        """Return whether there is room for the first buffer of another unfinished frame."""
        return self._receiving_bytes + size <= self._half and self._begun_bytes <= self._half

    def add_receiving(self, session: BudgetedSession, delta: int) -> None:
        """Count `delta` more bytes for the buffer of the session's unfinished frame."""
        self._receiving.setdefault(session)
        self._receiving_bytes += delta

    def remove_receiving(self, session: BudgetedSession, size: int) -> None:
        """Stop counting the buffer of `size` bytes, because its frame is complete or dropped."""
        self._receiving.pop(session, None)
        self._receiving_bytes -= size
        oldest = next(iter(self._receiving), None)
        if oldest is not None and oldest in self._waiting:
            oldest.consider_reading()
        self._wake_waiting()

    def begin_request(self, size: int) -> None:
        """Count a complete request, from its arrival until its end."""
        self._begun_bytes += size

    def end_request(self, size: int) -> None:
        self._begun_bytes -= size
        self._wake_waiting()

    def _wake_waiting(self) -> None:
        """Call the waiting sessions once half of their limit is free."""
        if self._waiting and max(self._begun_bytes, self._receiving_bytes) <= self._half // 2:
            waiting, self._waiting = self._waiting, {}
            for session in waiting:
                session.consider_reading()

    # answers --------------------------------------------------------------------------------------
    def answers(self, session: BudgetedSession, size: int) -> None:
        """Set the bytes of unsent answers of a session. Beyond the limit, close the slowest connections."""
        self.answer_bytes += size - self._answers.get(session, 0)
        if size:
            self._answers[session] = size
        else:
            self._answers.pop(session, None)
        while self.answer_bytes > self.answers_max and len(self._answers) > 1:
            slowest = min(self._answers, key=lambda each: each.took_s)
            self.answer_bytes -= self._answers.pop(slowest)
            slowest.close(TimeoutError("too many answers wait for clients, and this client reads none"))

    def remove_session(self, session: BudgetedSession) -> None:
        self._waiting.pop(session, None)
        self.answers(session, 0)
