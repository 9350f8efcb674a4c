"""Settings of the endpoint: plain data. Limits may be lowered here, never exceed `base.limits`."""

from __future__ import annotations

import msgspec

from tidemill.base.limits import KAFKA_REQUEST_BYTES, MIB


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
    stall_timeout_s: float = 10.0
    """A connection whose Produce names a topic that cannot be looked up for so long is closed."""
    topics_refresh_s: float = 2.0
    """How often topics created or deleted through other nodes are looked for."""
    cluster_id: str = "tidemill"

    @property
    def reads_at_once(self) -> int:
        """Reads of one connection that run together: so many that their largest answers have room together (S6)."""
        return max(1, self.connection_bytes_max // self.fetch_bytes_max)

    @property
    def topic_defaults(self) -> dict[str, str]:
        values = {"retention.ms": self.retention_ms, "retention.bytes": self.retention_bytes}
        return {name: str(value) for name, value in values.items() if value != -1}
