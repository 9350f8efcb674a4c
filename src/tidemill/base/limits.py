"""Limits as named constants with their units and reasons. Settings may lower them, not exceed them."""

from __future__ import annotations

MIB = 1 << 20

OBJECT_CONCURRENCY = 16
"""Concurrent object requests per store."""

OBJECT_RETRY_BUDGET_S = 15.0
"""Time for which an object request retries transient errors."""

COALESCE_GAP_BYTES = 64 << 10
"""Gap below which two ranged reads of one object become one request."""

LOG_RECORD_BYTES = 8 * MIB
"""Size of one record of a fenced log; larger payloads belong in an object."""

REGISTER_BYTES = 1 * MIB

PAGE_BYTES = 96 << 10
PAGE_ENTRY_BYTES = 64 << 10
"""Sizes for the pages of a process's report. A fact larger than an entry is cut, with a note.

Both together are far below a register, and the part that changes once a second is small.
"""

LEASE_TTL_MS = 6_000
"""Leadership lease. Safety comes from fencing; this only bounds the time of a takeover."""

L0_OBJECT_BYTES = 4 * MIB
L0_UPLOADS_IN_FLIGHT = 4

L1_OBJECT_BYTES = 32 * MIB
"""Target size: so large that a month of a busy topic is some thousand objects, so small that one fits in memory."""

L1_INTERVAL_MIN_S = 10.0
L1_INTERVAL_MAX_S = 600.0
"""Bounds of the interval between two L1 objects of a topic; within them, the interval that fills an object."""

INLINE_PART_BYTES = 24 << 10
"""Size up to which a shard part is stored inside the shard's log record instead of an object."""

METASTORE_PERSIST_INTERVAL_S = 30.0
"""Approximate time from a row's commit until it is in the bucket."""

METASTORE_CHECKPOINT_INTERVAL_S = 10.0
"""Interval of the checkpoints of consensus state, from which a restore starts."""

CLUSTER_ALIVE_INTERVAL_S = 30.0
"""Interval at which a node publishes that its cluster uses the bucket."""

METASTORE_KEY_BYTES = 1024
METASTORE_VALUE_BYTES = 256 << 10
"""Size of a metastore value; a larger one belongs in an object."""

SCHEMA_REFERENCES_MAX = 64
"""Number of schemas to which one schema of a registry refers, directly or not."""

METASTORE_BATCH_BYTES = 4 * MIB
METASTORE_BATCH_ROWS = 20_000
"""Rows of one batch: one record of the domain's log, applied in one step of some milliseconds of the event loop."""

KAFKA_REQUEST_BYTES = 100 * MIB

FRESHNESS_BUDGET_MS = 5_000
"""Time after which a stage stalled below its target is stuck, unless `freshness.budget_s` says otherwise."""

PIPELINE_FRESHNESS_MS = 100
"""Time for which a pipeline gathers records before a step, unless its `freshness_s` says otherwise."""

DEAD_LETTERS_KEEP_MS = 7 * 86_400_000
"""Age at which a dead letter expires, unless `retention.dead_letters_s` says otherwise; Kafka's retention.ms."""

DECOMPRESSED_BYTES = 32 * MIB
"""Decompressed size of the records of one batch, for every decoder.

Kafka's Java producer buffers this much in total by default (buffer.memory), so no client with default settings makes a
larger batch. Without the limit, 32 KiB of zstd could become 2 GB.
"""

STATUS_PUBLISH_INTERVAL_S = 1.0
STATUS_BLIND_AFTER_MS = 8_000
"""Silence after which a process is blind, and so are its stage statuses."""
NODE_BLIND_AFTER_MS = 3_500
"""Silence after which a node is blind as a process.

It publishes independently of its tables and captures, so three missing reports suffice. Its stage statuses count until
STATUS_BLIND_AFTER_MS: by that time other nodes have its partitions.
"""

LOOPBACK_ORIGINS = ("http://localhost:*", "http://127.0.0.1:*", "http://[::1]:*")
"""Origins of web pages that may read a node's answers by default: those of this machine."""
