"""Parts: immutable Parquet runs of updates, and everything that is decided by columns.

    rows ─► schema ─► key_hash, row_hash ─► sorted part ─► checksums ─► object
    parts ─► consolidate ─► contents at a time

Owns the format of stored data. Does not know which parts a shard has (`state`).
"""
