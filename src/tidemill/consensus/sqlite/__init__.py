"""The SQLite engine: one database file, one sequencer per machine, any number of client processes.

    operation ─► client ─► connection ─► protocol ─► sockets ─► sequencer ─► engine (one fsync) ─► file
    host_election: which process runs the sequencer (flock);  lock_holders: which process holds the lock

Owns the layout of the file (`schema`, `record_storage`), group commit under synchronous=FULL, the
sequencer and its Unix socket. Does not own the rules of the contract (`operations`).

Several writing processes would starve each other on SQLite's own locks, so exactly one writes: the process that holds
an flock on the lock file next to the database. If it is killed, the lock is freed and another process continues from
the file. Should two processes ever write at the same time (because the lock file was deleted), every commit still
checks inside its own SQLite transaction.
"""
