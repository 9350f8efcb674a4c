"""The replicated state of a shard.

    command ─► state_machine (async seam) ─► codec ─► fenced log ─► apply ─► state
                     └─► a rejected command as an error
    checkpoint.py, restore.py: the same state as rows of the metastore

Owns since, upper, batches, holds and schema versions. Does not read or write parts.
"""
