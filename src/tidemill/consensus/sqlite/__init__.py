"""The SQLite engine: one database file, one sequencer per machine, any number of client processes.

    operation ─► client ─► connection ─► protocol ─► socket ─► server_sockets ─► sequencer ─► engine (one fsync) ─► file
    host_election: which process runs the sequencer (flock);  lock_holders: which process holds the lock

Owns the layout of the file (`schema`, `record_storage`, `row_checksums`), group commit under synchronous=FULL, the
sequencer and its Unix socket. Does not own the rules of the contract (`transitions`).

Several writing processes starve each other on SQLite's own locks, so exactly one writes: whoever holds an flock
beside the database. A killed host frees the lock; another process takes it and goes on from the file. Should two
ever write at once (somebody deleted the lock file), every commit still checks inside its own SQLite transaction.
"""
