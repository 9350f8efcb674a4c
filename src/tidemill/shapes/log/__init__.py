"""The log of a shape, stage 3: initial rows and operations, in memory or on disk.

    row ─► row_writer ─► items ─► log | disk_log ─► log_set ─► store (when to flush) ─► sqlite_file
    chunks: what is read, on its way to a reader
    restart: sqlite_file ─► saved_shape ─► disk_log; stale_files: removal

Knows nothing about shapes or captures: definitions are opaque records, positions are numbers.
"""
