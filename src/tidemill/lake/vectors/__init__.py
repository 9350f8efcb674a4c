"""Rows of parts that do not count at a time, computed from what changed since an earlier time.

    views (parts and the bounds of their batches) ─► part_columns ─► row_states (which rows count) ─► evaluation
                                    part_files ─────────┘

Owns the decision; sums of whole rows are those of RFC 0004. Does not know Iceberg's metadata, or stores other than for
reading parts.
"""
