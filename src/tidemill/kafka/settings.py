"""Settings of the endpoint, as plain data: the configured ones, and limits that only tests change. The limits never
exceed `base.limits`."""

from __future__ import annotations

import msgspec

from tidemill.base.config.listeners import KafkaSection
from tidemill.base.limits import KAFKA_REQUEST_BYTES, MIB
from tidemill.kafka.groups.classic.state import GroupLimits


class KafkaSettings(msgspec.Struct, frozen=True):
    """Settings of the Kafka endpoint. `section` is what the configuration says."""

    section: KafkaSection = KafkaSection()
    request_bytes_max: int = KAFKA_REQUEST_BYTES
    connection_bytes_max: int = 32 * MIB
    """Bytes of running requests of one connection at which its socket is no longer read."""
    process_bytes_max: int = 192 * MIB
    """The same limit over all connections, including half-received frames.

    It is below the maximum that `topics` stages, so that a batch without a producer id is not rejected temporarily and
    sent again out of order.
    """
    answer_bytes_max: int = 256 * MIB
    """Bytes of answers that clients have not read yet, over all connections.

    Beyond it the slowest connection is closed.
    """
    connection_requests_max: int = 500
    """Unanswered requests of one connection at which its socket is no longer read."""
    fetch_bytes_max: int = 16 * MIB
    """Approximate size at which a Fetch response is cut, even if the client allows more."""
    fetch_sessions_bytes_max: int = 64 * MIB
    """Maximum memory of all fetch sessions, enough for some 60,000 partitions.

    A client that finds no room continues without a session.
    """
    frame_timeout_s: float = 60.0
    """Time within which a frame must be complete, from its first byte (100 MiB at 14 Mbit/s).

    It is doubled where the endpoint's own limits delay the reading. A client must also read some of its answers within
    this time.
    """
    idle_timeout_s: float = 600.0
    """Time after which a connection without requests is closed (Kafka's connections.max.idle.ms)."""
    authentication_timeout_s: float = 10.0
    """Time within which a connection must authenticate, where its listener requires it."""
    stall_timeout_s: float = 10.0
    """Time after which a connection is closed if its Produce names a topic that cannot be looked up."""
    topics_refresh_s: float = 2.0
    """Interval of the refresh that finds topics created or deleted through other nodes."""
    groups_bytes_max: int = 64 * MIB
    """Maximum size of the subscriptions, metadata and assignments of the members of all groups.

    Beyond it no member can join.
    """
    cluster_id: str = ""
    """Id of the cluster, from the metastore. The server sets it when it starts."""

    @property
    def concurrent_reads_max(self) -> int:
        """Return how many reads of a connection may run together such that their largest answers fit its memory."""
        return max(1, self.connection_bytes_max // self.fetch_bytes_max)

    @property
    def group_limits(self) -> GroupLimits:
        section = self.section
        session_ms = section.group_consumer_session_timeout_ms
        heartbeat_ms = section.group_consumer_heartbeat_interval_ms
        return GroupLimits(
            members=section.group_members_max,
            initial_delay_ms=section.group_initial_rebalance_delay_ms,
            session_ms_min=section.group_min_session_timeout_ms,
            session_ms_max=section.group_max_session_timeout_ms,
            consumer_session_ms=session_ms,
            consumer_heartbeat_ms=heartbeat_ms,
            consumer_session_ms_bounds=(
                min(section.group_consumer_min_session_timeout_ms, session_ms),
                max(section.group_consumer_max_session_timeout_ms, session_ms),
            ),
            consumer_heartbeat_ms_bounds=(
                min(section.group_consumer_min_heartbeat_interval_ms, heartbeat_ms),
                max(section.group_consumer_max_heartbeat_interval_ms, heartbeat_ms),
            ),
            upgrades=section.group_consumer_migration_policy in ("upgrade", "bidirectional"),
            downgrades=section.group_consumer_migration_policy in ("downgrade", "bidirectional"),
        )

    @property
    def topic_defaults(self) -> dict[str, str]:
        values = {"retention.ms": self.section.retention_ms, "retention.bytes": self.section.retention_bytes}
        return {name: str(value) for name, value in values.items() if value != -1}
