"""Settings of the endpoint, as plain data. Limits may be lowered here but never exceed `base.limits`."""

from __future__ import annotations

import msgspec

from tidemill.base.limits import KAFKA_REQUEST_BYTES, MIB
from tidemill.kafka.groups.classic.state import GroupLimits


class KafkaSettings(msgspec.Struct, frozen=True):
    """Settings of the Kafka endpoint.

    With `auto_create_topics`, Metadata requests that allow it create missing topics with `default_partitions`.
    """

    auto_create_topics: bool = True
    default_partitions: int = 4
    partitions_max: int = 20_000
    """Maximum number of partitions of all topics: clients cannot create topics beyond it.

    Each partition with records costs a node a few kB.
    """
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
    fetch_sessions_max: int = 1_000
    """Maximum number of fetch sessions (Kafka's max.incremental.fetch.session.cache.slots)."""
    fetch_sessions_bytes_max: int = 64 * MIB
    """Maximum memory of all fetch sessions, enough for some 60,000 partitions.

    A client that finds no room continues without a session.
    """
    frame_timeout_s: float = 60.0
    """Time within which a frame must be complete, from its first byte (100 MiB at 14 Mbit/s).

    It is doubled where the endpoint's own limits delay the reading. A client must also read some of its answers within
    this time.
    """
    retention_ms: int = -1
    retention_bytes: int = -1
    """Retention of topics that clients create without their own values."""
    connections_max: int = 1_000
    """Maximum number of connections.

    It is lowered if the process may open fewer than twice as many files, because stores need the rest.
    """
    connections_per_address_max: int = 500
    """Maximum number of connections from one address: a half, so that a faulty machine does not lock all others out."""
    idle_timeout_s: float = 600.0
    """Time after which a connection without requests is closed (Kafka's connections.max.idle.ms)."""
    authentication_timeout_s: float = 10.0
    """Time within which a connection must authenticate, where its listener requires it."""
    stall_timeout_s: float = 10.0
    """Time after which a connection is closed if its Produce names a topic that cannot be looked up."""
    topics_refresh_s: float = 2.0
    """Interval of the refresh that finds topics created or deleted through other nodes."""
    groups_max: int = 10_000
    """Maximum number of consumer groups in memory: those with members and those that were requested recently."""
    groups_bytes_max: int = 64 * MIB
    """Maximum size of the subscriptions, metadata and assignments of the members of all groups.

    Beyond it no member can join.
    """
    group_members_max: int = 1_000
    """Maximum number of members of one group (Kafka's group.max.size)."""
    group_initial_rebalance_delay_ms: int = 3_000
    """Time for which a group that was empty waits for more members; each member that joins restarts it (as in Kafka).
    """
    group_min_session_timeout_ms: int = 6_000
    group_max_session_timeout_ms: int = 1_800_000
    group_consumer_session_timeout_ms: int = 45_000
    group_consumer_heartbeat_interval_ms: int = 5_000
    """Session timeout and heartbeat interval of members of the consumer protocol, which cannot choose their own."""
    group_consumer_min_session_timeout_ms: int = 45_000
    group_consumer_max_session_timeout_ms: int = 60_000
    group_consumer_min_heartbeat_interval_ms: int = 5_000
    group_consumer_max_heartbeat_interval_ms: int = 15_000
    """Bounds of the same values in a group's own configs. The node's own value is always within them."""
    group_consumer_migration_policy: str = "bidirectional"
    """Policy for changing the protocol of a group that has members: disabled, upgrade, downgrade or bidirectional."""
    transaction_timeout_max_ms: int = 900_000
    """Longest transaction.timeout.ms that a producer may request (Kafka's transaction.max.timeout.ms).

    An open transaction can hold back read_committed consumers, and tables, for this long.
    """
    transactional_id_expires_ms: int = 7 * 24 * 3_600_000
    """Time after which a transactional id without a transaction expires (transactional.id.expiration.ms)."""
    cluster_id: str = ""
    """Id of the cluster, from the metastore. The server sets it when it starts."""

    @property
    def concurrent_reads_max(self) -> int:
        """Return how many reads of a connection may run together such that their largest answers fit its memory."""
        return max(1, self.connection_bytes_max // self.fetch_bytes_max)

    @property
    def group_limits(self) -> GroupLimits:
        session_ms = self.group_consumer_session_timeout_ms
        heartbeat_ms = self.group_consumer_heartbeat_interval_ms
        return GroupLimits(
            members=self.group_members_max,
            initial_delay_ms=self.group_initial_rebalance_delay_ms,
            session_ms_min=self.group_min_session_timeout_ms,
            session_ms_max=self.group_max_session_timeout_ms,
            consumer_session_ms=session_ms,
            consumer_heartbeat_ms=heartbeat_ms,
            consumer_session_ms_bounds=(
                min(self.group_consumer_min_session_timeout_ms, session_ms),
                max(self.group_consumer_max_session_timeout_ms, session_ms),
            ),
            consumer_heartbeat_ms_bounds=(
                min(self.group_consumer_min_heartbeat_interval_ms, heartbeat_ms),
                max(self.group_consumer_max_heartbeat_interval_ms, heartbeat_ms),
            ),
            upgrades=self.group_consumer_migration_policy in ("upgrade", "bidirectional"),
            downgrades=self.group_consumer_migration_policy in ("downgrade", "bidirectional"),
        )

    @property
    def topic_defaults(self) -> dict[str, str]:
        values = {"retention.ms": self.retention_ms, "retention.bytes": self.retention_bytes}
        return {name: str(value) for name, value in values.items() if value != -1}
