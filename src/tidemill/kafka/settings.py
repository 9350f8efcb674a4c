"""Settings of the endpoint: plain data. Limits may be lowered here, never exceed `base.limits`."""

from __future__ import annotations

import msgspec

from tidemill.base.limits import KAFKA_REQUEST_BYTES, MIB
from tidemill.kafka.groups.classic_state import GroupLimits


class KafkaSettings(msgspec.Struct, frozen=True):
    """auto_create_topics: Metadata requests that allow it create missing topics, with `default_partitions`."""

    auto_create_topics: bool = True
    default_partitions: int = 4
    partitions_max: int = 20_000
    """Partitions of all topics: clients create no topic beyond. Each partition with records costs a node a few kB."""
    request_bytes_max: int = KAFKA_REQUEST_BYTES
    connection_bytes_max: int = 32 * MIB
    """Request bytes of one connection under way before its socket is no longer read."""
    process_bytes_max: int = 192 * MIB
    """The same over all connections, with the frames that are half received. Below what `topics` stages at most, so
    that a batch without producer id is not refused for a moment and sent again out of its order."""
    answer_bytes_max: int = 256 * MIB
    """Answers that clients have not taken yet, over all connections; beyond, the slowest connection ends."""
    connection_requests_max: int = 500
    """Unanswered requests of one connection before its socket is no longer read."""
    fetch_bytes_max: int = 16 * MIB
    """One Fetch response is cut at about this size, whatever the client allows."""
    fetch_sessions_max: int = 1_000
    """Fetch sessions at once (Kafka's max.incremental.fetch.session.cache.slots)."""
    fetch_sessions_bytes_max: int = 64 * MIB
    """What they hold: some 60,000 partitions; who finds no room goes on without a session."""
    frame_timeout_s: float = 60.0
    """A frame that has begun must be whole within this time of reading (100 MiB at 14 Mbit/s), twice as much where our
    own limits make it wait; and a client must take something of its answers."""
    retention_ms: int = -1
    retention_bytes: int = -1
    """What a topic that a client creates gets where it says nothing itself."""
    connections_max: int = 1_000
    """Connections at once; less where the process may open fewer than twice as many files: the rest is for stores."""
    connections_per_address_max: int = 500
    """Of one address: a half, so that one machine's mistake does not shut everybody out."""
    idle_timeout_s: float = 600.0
    """A connection without requests is closed after this time (Kafka's connections.max.idle.ms)."""
    authentication_timeout_s: float = 10.0
    """A connection must have proved within this time who it is, where its listener asks for that."""
    stall_timeout_s: float = 10.0
    """A connection whose Produce names a topic that cannot be looked up for so long is closed."""
    topics_refresh_s: float = 2.0
    """How often topics created or deleted through other nodes are looked for."""
    groups_max: int = 10_000
    """Consumer groups in memory at once: those with members, and those that were asked about a moment ago."""
    groups_bytes_max: int = 64 * MIB
    """What members of all groups say of themselves and are assigned; nobody joins beyond."""
    group_members_max: int = 1_000
    """Of one group (Kafka's group.max.size)."""
    group_initial_rebalance_delay_ms: int = 3_000
    """A group that was empty waits so long for more members, each time one comes (as Kafka)."""
    group_min_session_timeout_ms: int = 6_000
    group_max_session_timeout_ms: int = 1_800_000
    group_consumer_session_timeout_ms: int = 45_000
    group_consumer_heartbeat_interval_ms: int = 5_000
    """Of members of the consumer protocol: not theirs to say."""
    group_consumer_min_session_timeout_ms: int = 45_000
    group_consumer_max_session_timeout_ms: int = 60_000
    group_consumer_min_heartbeat_interval_ms: int = 5_000
    group_consumer_max_heartbeat_interval_ms: int = 15_000
    """What a group's own configs may say of it. The node's own value is never out of bounds."""
    group_consumer_migration_policy: str = "bidirectional"
    """May a group change its protocol while members are in it: disabled, upgrade, downgrade, bidirectional."""
    transaction_timeout_max_ms: int = 900_000
    """The longest transaction.timeout.ms that a producer may ask for (Kafka's transaction.max.timeout.ms): for so long
    an open transaction may hold back what read_committed consumers, and tables, are shown."""
    transactional_id_expires_ms: int = 7 * 24 * 3_600_000
    """A transactional id without a transaction for so long is forgotten (transactional.id.expiration.ms)."""
    cluster_id: str = ""
    """The cluster's own, from the metastore: the server sets it when it starts."""

    @property
    def reads_at_once(self) -> int:
        """Reads of one connection that run together: so many that their largest answers have room together (S6)."""
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
