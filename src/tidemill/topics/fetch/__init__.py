"""Fetch: the batches that answer a reader.

    fetch request ─► fetch_interest (changes since the previous one) ─► fetch_planner (which batches) ─► batch_reads
    ListOffsets by time ─► timestamp_lookup ─► batch_reads

Owns the choice of batches. `batch_reads`, `l0` and `l1` read the bytes.
"""
