"""Limits on connections, in total and per address. Pure except that it reads the limit of open files once.

A rejected connection is accepted and closed immediately: in the backlog it would only delay the next one.

Kafka clients may use only a share of the files that this process may open (`base.runtime.file_descriptors`), because
the sequencer, the bucket and HTTP need theirs.
"""

from __future__ import annotations

from collections import Counter

import structlog
from prometheus_client import Counter as Count
from prometheus_client import Gauge

from tidemill.base.runtime import file_descriptors
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
