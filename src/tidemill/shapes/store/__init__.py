"""store: shape logs of one source (a captured database, or all shards) on a local disk, so that a restart is no
refetch (RFC 0006).

    file      one SQLite file: its tables, one transaction a flush, reading, clearing away. Synchronous, on threads.
    disk_log  the log of one shape: a tail in memory before what the file holds.
    store     which logs have something to write, when it is written, and what is told then.
    left      files that nobody can follow on any more, taken away

Does not know what a shape or a capture is: definitions are opaque records, positions are numbers.
"""
