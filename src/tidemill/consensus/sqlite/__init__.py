"""The SQLite backend: one database file, one sequencer per machine, any number of client processes.

Owns: the file's layout (`tables`), group commit under synchronous=FULL (`engine`), the sequencer thread and its
Unix socket (`sequencer`, `frames`, `address`), which process hosts it (`hosting`), the asyncio client (`client`).
Does not own: the rules of the contract (`consensus.rules`).

Several writing processes starve each other on SQLite's own locks, so exactly one writes: whoever holds an flock
beside the database. A killed host frees the lock; another process takes it and goes on from the file. Should two
ever write at once (somebody deleted the lock file), every commit still checks inside its own SQLite transaction.
"""
