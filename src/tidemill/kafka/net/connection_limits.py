"""Limits on connections: their number, in total and per address, and the times of each. Pure except that it reads the
limit of open files once.

A rejected connection is accepted and closed immediately: in the backlog it would only delay the next one.

Kafka clients may use only a share of the files that this process may open (`base.runtime.file_descriptors`), because
the sequencer, the bucket and HTTP need theirs.

The times limit authentication, unread answers, an unfinished frame and silence. The sweep asks every few seconds, with
the present time and the state of the connection. Progress is noticed by counters that the connection already has, so
that receiving and sending cost nothing here.
"""

from __future__ import annotations

from collections import Counter

import structlog
from prometheus_client import Counter as Count
from prometheus_client import Gauge

from tidemill.base.runtime import file_descriptors
from tidemill.kafka.net.connection import Connection
from tidemill.kafka.net.framing import FrameReader
from tidemill.kafka.settings import KafkaSettings

log = structlog.get_logger()

LOG_INTERVAL_S = 10.0
"""Interval at which a flood of rejections writes one log line; the metric counts each rejection."""

_OPEN = Gauge("tidemill_kafka_connections", "Open connections of Kafka clients")
_REFUSED = Count("tidemill_kafka_connections_refused", "Connections refused at a limit", ("reason",))


class ConnectionLimits:
    def __init__(self, settings: KafkaSettings) -> None:
        self.connections_max = min(settings.section.connections_max, file_descriptors.current_shares().kafka)
        self._per_address_max = settings.section.connections_per_address_max
        self._addresses: Counter[str] = Counter()
        self._logged_s = -LOG_INTERVAL_S
        self._suppressed = 0
        self.refused = 0

    @property
    def open(self) -> int:
        return self._addresses.total()

    def admit(self, address: str, now_s: float) -> bool:
        """Return whether a connection from `address` is admitted. The caller must call `release` for an admitted
        one."""
        reason = ""
        if self.open >= self.connections_max:
            reason = "all"
        elif self._addresses[address] >= self._per_address_max:
            reason = "address"
        if reason:
            self._reject(address, reason, now_s)
            return False
        self._addresses[address] += 1
        _OPEN.set(self.open)
        return True

    def release(self, address: str) -> None:
        self._addresses[address] -= 1
        if not self._addresses[address]:
            del self._addresses[address]
        _OPEN.set(self.open)

    def _reject(self, address: str, reason: str, now_s: float) -> None:
        _REFUSED.labels(reason).inc()
        self.refused += 1
        self._suppressed += 1
        if now_s - self._logged_s < LOG_INTERVAL_S:
            return
        log.warning(
            "kafka.connection_refused",
            address=address,
            refused=self._suppressed,
            open=self.open,
            limit=self._per_address_max if reason == "address" else self.connections_max,
            key="kafka.connections_per_address_max" if reason == "address" else "kafka.connections_max",
        )
        self._logged_s, self._suppressed = now_s, 0


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
