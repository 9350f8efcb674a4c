"""Memory that clients make this process hold: requests on their way in, answers on their way out.

B1  A request counts from the first byte of its frame that has a buffer: what is half received is held as well. Each
    of the two has a half of the limit, so frames that never become whole leave room for those that do.
B2  While too much is half received no frame grows but one, the oldest: frames that wait for each other's room would
    all wait until their deadline. So at most one frame more than the limit is held, and of each connection beyond it
    what came with the size of its frame, at most 16 KiB.
B3  Answers that nobody fetches are let go with their connection, the one that has taken nothing for longest first:
    waiting for room instead would let a few that do not read stop everybody's Fetch.
"""

from __future__ import annotations

from typing import Protocol

from prometheus_client import Gauge

_REQUESTS = Gauge("tidemill_kafka_request_bytes", "Requests under way and half-received frames, bytes")
_ANSWERS = Gauge("tidemill_kafka_answer_bytes", "Answers that clients have not taken yet, bytes")


class Holder(Protocol):
    """A session."""

    def consider_reading(self) -> None: ...

    def close(self, error: Exception | None = None) -> None: ...

    @property
    def took_s(self) -> float:
        """When its client last took a byte of its answers."""
        ...


class Budget:
    def __init__(self, requests_max: int, answers_max: int) -> None:
        self.requests_max = requests_max
        self.answers_max = answers_max
        self._half = requests_max // 2
        self._begun_bytes = self._receiving_bytes = 0
        self.answer_bytes = 0
        self._waiting: dict[Holder, None] = {}
        self._receiving: dict[Holder, None] = {}
        """Sessions with an unfinished frame that has a buffer, oldest first."""
        self._answers: dict[Holder, int] = {}
        _REQUESTS.set_function(lambda: self.request_bytes)
        _ANSWERS.set_function(lambda: self.answer_bytes)

    # requests -------------------------------------------------------------------------------------
    @property
    def request_bytes(self) -> int:
        return self._begun_bytes + self._receiving_bytes

    def may_read(self, session: Holder, more: int) -> bool:
        """B2: is there room for `more` bytes of its unfinished frame? When not, the session is called when there is."""
        grows = not more or self._receiving_bytes + more <= self._half or next(iter(self._receiving), None) is session
        if grows and self._begun_bytes <= self._half:
            self._waiting.pop(session, None)
            return True
        self._waiting[session] = None
        return False

    def roomy(self, size: int) -> bool:
        """Is there room for the first buffer of another unfinished frame?"""
        return self._receiving_bytes + size <= self._half and self._begun_bytes <= self._half

    def receiving(self, session: Holder, delta: int) -> None:
        """The buffer of its unfinished frame grew, by `delta` bytes."""
        self._receiving.setdefault(session)
        self._receiving_bytes += delta

    def received(self, session: Holder, size: int) -> None:
        """The frame is whole, or given up: its buffer of `size` bytes counts no more as such."""
        self._receiving.pop(session, None)
        self._receiving_bytes -= size
        oldest = next(iter(self._receiving), None)
        if oldest is not None and oldest in self._waiting:
            oldest.consider_reading()
        self._call()

    def take(self, size: int) -> None:
        """A whole request, from its arrival until its end."""
        self._begun_bytes += size

    def give(self, size: int) -> None:
        self._begun_bytes -= size
        self._call()

    def _call(self) -> None:
        """Whoever waits, once there is room for a while: at half of the limit."""
        if self._waiting and max(self._begun_bytes, self._receiving_bytes) <= self._half // 2:
            waiting, self._waiting = self._waiting, {}
            for session in waiting:
                session.consider_reading()

    # answers --------------------------------------------------------------------------------------
    def answers(self, session: Holder, size: int) -> None:
        """What the session holds for its client now. Beyond the limit the slowest connection ends (B3)."""
        self.answer_bytes += size - self._answers.get(session, 0)
        if size:
            self._answers[session] = size
        else:
            self._answers.pop(session, None)
        while self.answer_bytes > self.answers_max and len(self._answers) > 1:
            slowest = min(self._answers, key=lambda each: each.took_s)
            self.answer_bytes -= self._answers.pop(slowest)
            slowest.close(TimeoutError("too many answers wait for clients, and this one takes none"))

    def forget(self, session: Holder) -> None:
        self._waiting.pop(session, None)
        self.answers(session, 0)
