"""Settings of topics. The defaults suit a store without a price per put."""

from __future__ import annotations

import msgspec

from tidemill.base.limits import (
    L0_OBJECT_BYTES,
    L0_UPLOADS_IN_FLIGHT,
    L1_INTERVAL_MAX_S,
    L1_INTERVAL_MIN_S,
    L1_OBJECT_BYTES,
    MIB,
)


class TopicSettings(msgspec.Struct, frozen=True):
    object_bytes: int = L0_OBJECT_BYTES
    """Approximate size at which an L0 object is closed."""
    uploads_in_flight: int = L0_UPLOADS_IN_FLIGHT
    linger_s: float = 0.0
    """Time for which batches are collected. 0: group commit, upload whenever the writer is free.

    A longer time saves puts, for stores that charge for them, but the acknowledgement latency limits the throughput of
    idempotent producers.
    """
    staged_bytes: int = 256 * MIB
    """Limit of batches accepted but not yet uploaded; beyond it, produce fails with UnavailableError (clients retry).
    """
    staged_expiry_s: float = 30.0
    """Time after which a batch that waits for its upload fails and enters no object."""
    cache_bytes: int = 128 * MIB
    group_batches: int = 1024
    """Limit of batches placed by one append."""
    append_budget_s: float = 10.0
    """Time after which an append that keeps failing makes the leader step down."""
    retry_pause_s: float = 0.05
    rollup_records: int = 4096
    """Minimum of log records between rollups; more for a large partition, so that the cost stays linear."""
    retention_check_s: float = 30.0
    """Interval at which the leader applies its topics' retention."""
    leaders_check_s: float = 2.0
    """Approximate time for which a deposed leader without writes may still act as the leader."""
    settle_after_s: float = 3600.0
    """Interval at which a written partition logs what is decided, so that garbage collection can delete objects."""
    catalogue_poll_s: float = 2.0
    mark_interval_s: float = 0.5
    reconcile: bool = False
    """Move settled batches of every topic into L1 (RFC 0005), not only of compacted topics."""
    l1_object_bytes: int = L1_OBJECT_BYTES
    """Approximate size of an L1 object of one topic; it is built in memory."""
    reconcile_min_s: float = L1_INTERVAL_MIN_S
    reconcile_max_s: float = L1_INTERVAL_MAX_S
    appends_at_once: int = 64
    """Limit of concurrent appends to partition logs: one group commit that answers 64 takes 5 ms of the loop."""
