"""Settings of the endpoint: plain data. Limits may be lowered here, never exceed `base.limits`."""

from __future__ import annotations

import msgspec

from tidemill.base.limits import KAFKA_REQUEST_BYTES, MIB


class KafkaSettings(msgspec.Struct, frozen=True):
    """auto_create_topics: Metadata requests that allow it create missing topics, with `default_partitions`."""

    auto_create_topics: bool = True
    default_partitions: int = 4
    request_bytes_max: int = KAFKA_REQUEST_BYTES
    connection_bytes_max: int = 32 * MIB
    """Request bytes of one connection under way before its socket is no longer read."""
    process_bytes_max: int = 512 * MIB
    """The same over all connections."""
    connection_requests_max: int = 500
    """Unanswered requests of one connection before its socket is no longer read."""
    fetch_bytes_max: int = 16 * MIB
    """One Fetch response is cut at about this size, whatever the client allows."""
    frame_timeout_s: float = 60.0
    """A frame that has begun must make progress within this time."""
    idle_timeout_s: float = 600.0
    """A connection without requests is closed after this time (Kafka's connections.max.idle.ms)."""
    stall_timeout_s: float = 10.0
    """A connection whose Produce names a topic that cannot be looked up for so long is closed."""
    topics_refresh_s: float = 2.0
    """How often topics created or deleted through other nodes are looked for."""
    cluster_id: str = "tidemill"
