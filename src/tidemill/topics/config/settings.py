"""Settings of topics: plain data. Defaults suit a store whose puts are cheap; see the field notes for priced ones."""

from __future__ import annotations

import msgspec

from tidemill.base.limits import L0_OBJECT_BYTES, L0_UPLOADS_IN_FLIGHT, L1_OBJECT_BYTES, MIB


class TopicSettings(msgspec.Struct, frozen=True):
    object_bytes: int = L0_OBJECT_BYTES
    """An L0 object is closed at about this size."""
    uploads_in_flight: int = L0_UPLOADS_IN_FLIGHT
    linger_s: float = 0.0
    """0: group commit, upload whenever the writer is free. Above: collect for so long first (a cost knob for
    stores that charge for a put; acknowledgement latency decides the throughput of idempotent producers)."""
    staged_bytes: int = 256 * MIB
    """Batches accepted but not yet uploaded; beyond, produce fails as Unavailable (clients retry)."""
    staged_expiry_s: float = 30.0
    """A batch that waited longer for its upload never enters an object."""
    cache_bytes: int = 128 * MIB
    group_batches: int = 1024
    """Batches placed by one append at most."""
    append_budget_s: float = 10.0
    """An append that keeps failing for so long makes the leader step down."""
    retry_pause_s: float = 0.05
    rollup_records: int = 4096
    """Log records between rollups at least; more when the partition is large, so that the cost stays linear."""
    retention_check_s: float = 30.0
    """How often the leader looks what its topics' retention lets go."""
    leaders_check_s: float = 2.0
    """How long a deposed leader that has nothing to write may take itself for the leader, about."""
    settle_after_s: float = 3600.0
    """A partition that was written to says once in so long what is decided, so that the bucket's objects can go."""
    catalogue_poll_s: float = 2.0
    mark_interval_s: float = 0.5
    reconcile: bool = False
    """Move what is settled of every topic into L1 (RFC 0005), not only of those that are compacted."""
    l1_object_bytes: int = L1_OBJECT_BYTES
    """An L1 object holds about this much of one topic; so much is in memory while it is made."""
    reconcile_min_s: float = 10.0
    reconcile_max_s: float = 600.0
    """How often a topic that is written to is looked at: as often as fills an object, between these bounds."""
    appends_at_once: int = 64
    """Partition logs appended to at the same time: some 5 ms of the loop when one group commit answers them all."""
    fault: str = ""
    """Test-only: a planted fault of the simulation's room `topics` or `transactions` (`sim.scenarios.FAULTS`)."""
