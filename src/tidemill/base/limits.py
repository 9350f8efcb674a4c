"""Every limit is a named constant with its unit and its reason. Settings may lower them, not exceed them."""

from __future__ import annotations

MIB = 1 << 20

OBJECT_CONCURRENCY = 16
"""Object requests under way at once per store."""

OBJECT_RETRY_BUDGET_S = 15.0
"""An object request retries transient errors for at most this long."""

COALESCE_GAP_BYTES = 64 << 10
"""Two ranged reads of one object closer than this become one request."""

LOG_RECORD_BYTES = 8 * MIB
"""One record of a fenced log; larger payloads belong in an object."""

REGISTER_BYTES = 1 * MIB

PAGE_BYTES = 96 << 10
PAGE_ENTRY_BYTES = 64 << 10
"""A process's report stands on pages of so many bytes; a fact larger than an entry is cut, with a note. Both together
are far below a register, and what changes once a second is small."""

LEASE_TTL_MS = 6_000
"""Leadership lease; safety comes from fencing, this only bounds the time to take over."""

L0_OBJECT_BYTES = 4 * MIB
L0_UPLOADS_IN_FLIGHT = 4

L1_OBJECT_BYTES = 32 * MIB
"""Large enough that a month of a busy topic is some thousand objects, small enough to be held while it is made."""

INLINE_PART_BYTES = 16 << 10
"""A shard part at most this large travels inside the shard's log record instead of an object."""

METASTORE_KEY_BYTES = 1024
METASTORE_VALUE_BYTES = 256 << 10
"""Larger values belong in an object of their own."""

METASTORE_BATCH_BYTES = 4 * MIB
METASTORE_BATCH_ROWS = 20_000
"""One batch is one record of the domain's log, applied in one go: some milliseconds of the event loop."""

KAFKA_REQUEST_BYTES = 100 * MIB

FRESHNESS_BUDGET_MS = 5_000
"""A stage that stands still below its target for longer is stuck, unless `freshness.budget_s` says otherwise."""

DECOMPRESSED_BYTES = 32 * MIB
"""The records of one compressed batch, by whoever decodes it. Kafka's Java producer buffers as much in all by default
(buffer.memory), so no client at its defaults makes a larger batch; 32 KiB of zstd would otherwise become 2 GB."""

MARK_PUBLISH_INTERVAL_S = 1.0
MARK_BLIND_AFTER_MS = 8_000
"""A process that has not published its marks for this long is blind, and so are its marks."""
NODE_BLIND_AFTER_MS = 3_500
"""The same for a node as a process. It publishes independently of its tables and captures, so three missing reports
are enough to name it. Its marks count until MARK_BLIND_AFTER_MS: other nodes have its partitions then."""

LOOPBACK_ORIGINS = ("http://localhost:*", "http://127.0.0.1:*", "http://[::1]:*")
"""Pages that may read a node's answers in a browser unless the configuration says otherwise: those of this machine."""
