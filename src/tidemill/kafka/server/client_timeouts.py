"""Time limits of one client connection: authentication, unread answers, an unfinished frame, silence.

The sweep asks every few seconds, with the present time and the state of the connection. Progress is noticed by counters
that the connection already has, so that receiving and sending cost nothing here.
"""

from __future__ import annotations

from tidemill.kafka.net.connection import Connection
from tidemill.kafka.net.framing import FrameReader
from tidemill.kafka.settings import KafkaSettings


class ClientTimeouts:
    """Times and counters as of the last sweep of one connection.

    Invariant: each pair of a counter and a time holds the counter of the last sweep and the time of the sweep that last
    saw it change. An age is therefore at most one sweep too short, never too long.
    """

    def __init__(self, now_s: float) -> None:
        self.took_s = now_s
        """Time at which the client last read answers, or had none to read."""
        self._began_s = self._heard_s = self._swept_s = now_s
        self._heard_bytes = self._taken_bytes = 0
        self._frame_number = 0
        self._frame_age_s = 0.0

    def unauthenticated_too_long(self, now_s: float, settings: KafkaSettings) -> bool:
        return now_s - self._began_s > settings.authentication_timeout_s

    def close_reason(
        self, now_s: float, connection: Connection, reader: FrameReader, settings: KafkaSettings, *, busy: bool
    ) -> str:
        """Return why to close the connection now, or "". `busy`: a request is running.

        A frame has `frame_timeout_s` of reading time and twice that in total: pauses that our own limits cause are not
        the client's fault, but a frame must not hold memory indefinitely.
        """
        passed_s, self._swept_s = now_s - self._swept_s, now_s
        if connection.sent_bytes != self._taken_bytes or not connection.unsent_bytes:
            self._taken_bytes, self.took_s = connection.sent_bytes, now_s
        elif now_s - self.took_s > settings.frame_timeout_s:
            return "the client reads no answers"
        if not reader.has_partial or reader.frames_begun != self._frame_number:
            self._frame_number, self._frame_age_s = reader.frames_begun, 0.0
        else:
            self._frame_age_s += passed_s / 2 if connection.paused else passed_s
            if self._frame_age_s > settings.frame_timeout_s:
                return "a frame was not complete in time"
        if connection.received_bytes != self._heard_bytes or busy or connection.paused:
            self._heard_bytes, self._heard_s = connection.received_bytes, now_s
        return "idle" if now_s - self._heard_s > settings.idle_timeout_s else ""
