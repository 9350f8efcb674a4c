"""Settings of topics: plain data. Defaults suit a store whose puts are cheap; see the field notes for priced ones."""

from __future__ import annotations

import msgspec

from tidemill.base.limits import L0_OBJECT_BYTES, L0_UPLOADS_IN_FLIGHT, MIB


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
    settle_after_s: float = 3600.0
    """A partition that was written to says once in so long what is decided, so that the bucket's objects can go."""
    catalogue_poll_s: float = 2.0
    mark_interval_s: float = 0.5
    reserve_after_upload: bool = False
    """Test-only fault of seed 000: the place in line is taken when the upload ends, not when the batch arrives."""
    unordered_without_id: bool = False
    """Test-only fault: batches without producer id are placed as their uploads end, whoever sent them."""
