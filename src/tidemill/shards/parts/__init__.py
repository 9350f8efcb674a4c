"""Parts: immutable Parquet runs of updates, and all computations on their columns.

    rows ─► schema ─► key_hash, row_hash ─► sorted part (stored_types) ─► checksums ─► object
    parts ─► consolidate ─► contents at a time

Owns the format of stored data. Does not know which parts a shard has (`state`).
"""
