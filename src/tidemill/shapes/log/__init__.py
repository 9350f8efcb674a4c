"""The log of a shape, stage 3: initial rows and operations, in memory or on disk.

    row ─► row_writer ─► items ─► log | disk_log ─► store (when to flush) ─► sqlite_file
    restart: sqlite_file ─► saved_shape ─► disk_log; stale_files: removal

Knows nothing about shapes or captures: definitions are opaque records, positions are numbers.
"""
