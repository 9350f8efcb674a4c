"""Fetch: the batches that answer a reader.

    fetch request ─► fetch_interest (what changed since the last one) ─► fetch_planner (which batches) ─► batch_reads
    ListOffsets by time ─► timestamp_lookup

Owns the choice of batches. Bytes are read by `batch_reads`, `l0` and `l1`.
"""
